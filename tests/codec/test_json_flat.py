"""The kernel for flat schemas against Arrow's parser: whoever reads a record, it is the same."""

import datetime
import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tallystick.codec.json import read as json_reader
from tallystick.codec.json.flat import FlatColumns, flat_of
from tallystick.codec.json.flat_kernels import UNSURE_FREE
from tallystick.codec.json.read import parse_json
from tallystick.codec.json.token_kernels import DEPTH_MAX, PARSED, SUSPECT, UNSURE
from tallystick.codec.spans import Spans, spans_of
from tallystick.codec.values import ParsedValues
from tests.examples import drawn

MICROS = pa.timestamp("us", "UTC")
INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
FLOATS = [pa.float32(), pa.float64()]
KINDS = [pa.bool_(), *INTEGERS, *FLOATS, pa.string(), pa.date32(), MICROS, pa.timestamp("us")]
SCHEMA = pa.schema([(f"f{number}", kind) for number, kind in enumerate(KINDS)])
INT = pa.schema([("a", pa.int64())])


def parse(values: list[bytes | None], schema: pa.Schema, mode: str = "permissive") -> ParsedValues:
    return parse_json(pa.array(values, pa.binary()), schema, mode, str)


def parse_by_arrow(values: list[bytes | None], schema: pa.Schema) -> ParsedValues:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_reader, "flat_of", lambda schema: None)
        return parse(values, schema)


def verdicts(values: list[bytes | None], schema: pa.Schema) -> list[int]:
    spans = spans_of(pa.array(values, pa.binary()), "value")
    return FlatColumns(schema, flat_of(schema), spans).verdicts.tolist()


def shown(parsed: ParsedValues) -> list[str]:
    """Values under an equality that tells 0 from -0, and knows NaN and the year 0."""
    columns = [
        column.view(f"int{column.type.bit_width}") if pa.types.is_temporal(column.type) else column
        for column in parsed.columns.columns
    ]
    return [repr(column.to_pylist()) for column in columns]


def check_same(values: list[bytes | None], schema: pa.Schema) -> None:
    ours, arrows = parse(values, schema), parse_by_arrow(values, schema)
    assert shown(ours) == shown(arrows)
    assert list(ours.reasons.items()) == list(arrows.reasons.items())
    ours.columns.validate(full=True)
    for verdict, row in zip(verdicts(values, schema), range(len(values)), strict=True):
        assert verdict != SUSPECT or row in arrows.reasons, "a suspect is malformed, or slow"


# ---- whatever the records are ----

SPACE = st.sampled_from(["", "", "", " ", "\t", "\r\n", "  \n"])
ODD_NUMBERS = """0 -0 0.0 -0.0 00 01 - -a + +1 1. 1.e5 .5 1e 1e+ 1E5 1e-5 0e5 0e400 1e400 1e-400
    1.8e308 5e-324 9007199254740993 16777217 16777217.0000000001
    16777218.9999999999 2.1019476964872256e-45 3.4028235e38 3.4028236e38 1e-45 1e-46
    1.17549435e-38 1.5e-39 NaN -NaN Infinity -Infinity Inf inf 123456789012345678901234567890
    0.00000000000000000000001234567890123456789 127 128 -128 -129 32767 32768 -32769 2147483648
    -2147483649 9223372036854775807 9223372036854775808 -9223372036854775808 -9223372036854775809
    18446744073709551616 99999999999999999999 1e22 1e23 8.5e-22""".split()  # noqa: SIM905
NUMBERS = st.one_of(
    st.sampled_from(ODD_NUMBERS),
    st.integers(-300, 300).map(str),
    st.integers(-(2**65), 2**65).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.floats(-1000, 1000, width=32).map(repr),
    st.from_regex(r"-?(0|[1-9][0-9]{0,20})(\.[0-9]{1,24})?([eE][+-]?[0-9]{1,3})?", fullmatch=True),
)
PLAIN = st.text(st.characters(codec="utf-8"), max_size=20) | st.text("ab", max_size=40)
ODD_STRINGS = r""""\ud800" "\udc00" "\ud83d\ude00" "\ud83d\u0041" "\ud83d\q" "\uDBFF\uDFFF" "\q"
    "\u12" "\/\b\f\n\r\t\"\\" "\u0000" "\u07ff\u0800\uffff\u007f\u0080" "\" " "\u00E9" """.split()  # noqa: SIM905
STRINGS = st.one_of(
    st.builds(
        lambda text, ascii_only: json.dumps(text, ensure_ascii=ascii_only), PLAIN, st.booleans()
    ),
    st.sampled_from(ODD_STRINGS),
)
ODD_DATES = """0000-01-01 0000-02-29 0001-01-01 1900-02-29 2000-02-29 2023-02-29 9999-12-31
    1600-03-01 2024-00-10 2024-13-10 2024-04-31 2024-12-00 2024-12-32 2024-1-1 20240101 2024/01/01
    2024-01/01 2024-01-0a -024-01-01 2024-01-011 2024-01 2024-02-30 2024-06-31 2100-02-29""".split()  # noqa: SIM905
ODD_TIMES = """24:00:00 23:60:00 23:59:60 1:00:00 12 12:30 12:30:1 12:30:00. 12:30:00.1 12:30:00.12x
    12:30:00.123456 12:30:00.1234567 12-30-00 12:30-00 12:30:0a 00:00:00 23:59:59.999999""".split()  # noqa: SIM905
ZONES = ["", "Z", "z", "+02:00", "-0130", "+25:00", " Z", "ZZ"]
DATES = st.dates().map(lambda day: day.isoformat()) | st.sampled_from(ODD_DATES)
TIMES = st.times().map(lambda time: time.isoformat()) | st.sampled_from(ODD_TIMES)
BETWEEN = ["T", " ", "t", "_", "  "]
MOMENTS = st.builds(
    "{}{}{}{}".format, DATES, st.sampled_from(BETWEEN), TIMES, st.sampled_from(ZONES)
)
QUOTED_DATES = (DATES | MOMENTS).map('"{}"'.format)
LITERALS = st.sampled_from(["true", "false", "null", "True", "nul", "nulll", "truefalse"])
SCALARS = NUMBERS | STRINGS | QUOTED_DATES | LITERALS
NESTED = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: "[" + " ,".join(items) + "]"),
        st.lists(st.tuples(STRINGS, inner), max_size=3).map(
            lambda pairs: "{ " + ",".join(f"{key} :{value}" for key, value in pairs) + "}"
        ),
    ),
    max_leaves=5,
)
NAMES = ["a", "b", "id", "", "é", "ключ", "a b", "seven77", "eight888", "nine99999", "x" * 40]


def fitting(kind: pa.DataType) -> st.SearchStrategy[str]:
    if pa.types.is_integer(kind):
        most = 2 ** (kind.bit_width - 1)
        return st.integers(-most - 1, most).map(str) | st.integers(-9, 9).map(str)
    if pa.types.is_floating(kind):
        return NUMBERS
    if pa.types.is_string(kind):
        return STRINGS
    return st.sampled_from(["true", "false"]) if pa.types.is_boolean(kind) else QUOTED_DATES


@st.composite
def documents(draw: st.DrawFn, schema: pa.Schema) -> bytes:
    """Fields in any order, some missing, some more, some twice, some of other types."""
    fields = draw(st.permutations(list(schema)) | st.just(list(schema)))
    parts = []
    for field in fields[: draw(st.integers(0, len(fields)) | st.just(len(fields)))]:
        value = draw(fitting(field.type) | fitting(field.type) | st.just("null") | NESTED)
        parts.append((json.dumps(field.name, ensure_ascii=draw(st.booleans())), value))
    if draw(st.booleans()):
        extra = draw(st.tuples(STRINGS | st.sampled_from(NAMES).map(json.dumps), NESTED))
        parts.insert(draw(st.integers(0, len(parts))), extra)
    space = [draw(SPACE) for _ in range(5)]
    pairs = [f"{space[0]}{key}{space[1]}:{space[2]}{value}{space[3]}" for key, value in parts]
    text = space[4] + "{" + (",".join(pairs) or space[0]) + "}" + space[2]
    return text.encode("utf-8", "surrogatepass")


FRAGMENTS = [*(bytes([byte]) for byte in b'{}[],:"\\ \n\r\t01-+.eE\x00\x01\x1f\x7f\x80\xc3\xff')]
FRAGMENTS += [b"\xed\xa0\x80", b"\xc3\xa9", b"\xef\xbb\xbf", b"{}", b"null", b'"a":1,', b"/**/"]


@st.composite
def damaged(draw: st.DrawFn, schema: pa.Schema) -> bytes | None:
    """A document with some bytes changed, or cut, or none at all."""
    record = draw(documents(schema))
    place = draw(st.integers(0, len(record)))
    match draw(st.sampled_from(["whole"] * 4 + ["flip", "insert", "remove", "cut", "null"])):
        case "flip":
            flipped = bytearray(record + b" ")
            flipped[place] ^= 1 << draw(st.integers(0, 7))
            return bytes(flipped)
        case "insert":
            return record[:place] + draw(st.sampled_from(FRAGMENTS)) + record[place:]
        case "remove":
            return record[:place] + record[place + draw(st.integers(1, 4)) :]
        case "cut":
            return record[:place]
        case "null":
            return None
        case _:
            return record


@st.composite
def schemas_and_records(draw: st.DrawFn) -> tuple[pa.Schema, list[bytes | None]]:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=5, unique=True))
    schema = pa.schema([(name, draw(st.sampled_from(KINDS))) for name in names])
    return schema, draw(st.lists(damaged(schema), max_size=5))


@drawn(400)
@given(schemas_and_records())
def test_every_record_is_what_arrow_makes_of_it(case):
    schema, values = case
    check_same(values, schema)


@drawn(100)
@given(st.lists(NUMBERS, min_size=1, max_size=20))
@example(ODD_NUMBERS)
def test_every_number_is_what_arrow_makes_of_it(texts):
    for kind in (*FLOATS, *INTEGERS):
        check_same([b'{"a":' + text.encode() + b"}" for text in texts], pa.schema([("a", kind)]))


def test_every_date_and_time_is_what_arrow_makes_of_it():
    days = [datetime.date.fromordinal(day).isoformat() for day in range(1, 3652059, 2999)]
    times = [f"2024-02-29{b}{time}{zone}" for b in BETWEEN for time in ODD_TIMES for zone in ZONES]
    for kind in (pa.date32(), MICROS, pa.timestamp("us")):
        texts = [*days, *ODD_DATES, *(f"{day}T01:02:03" for day in ODD_DATES), *times]
        check_same([b'{"a":"%s"}' % text.encode() for text in texts], pa.schema([("a", kind)]))


@drawn(300)
@given(st.integers(2**52, 2**53 - 1), st.integers(-900, 800), st.sampled_from([1, -1]))
def test_doubles_of_any_bits_come_back(mantissa, exponent, sign):
    value = math.ldexp(sign * mantissa, exponent)
    record = b'{"a":%s}' % repr(value).encode()
    schema = pa.schema([("a", pa.float64())])

    assert parse([record], schema).columns.column(0)[0].as_py() == value
    assert verdicts([record], schema) == [PARSED]


# ---- who reads what ----

READ_HERE = [
    b'{"a":1}',
    b"{}",
    b' \r\n{ "a"\t:\n-9223372036854775808 } ',
    b'{"z":1e5,"a":1}',
    b'{"z":"\\u00e9\\n\\ud83d\\ude00","a":1}',
    b'{"z":[1,{"a":"x","b":[[],{}]},null,true],"a":1}',
    b'{"z":1,"z":2,"a":null}',
    b'{"z":[NaN,-Infinity],"a":1}',
    b'{"z":123456789012345678901,"y":[1e999,0e785,-0.0E+400],"a":1}',
    b'{"z":"\\ud800 \\udc00\\ud83d\\u0041","y":{"\\ud800":1},"a":1}',
    None,
]
LEFT_OPEN = [
    b'{"\\u0061":1}',
    b'{"\\u007a":0,"a":1}',
    b'{"z":' + b"[" * (DEPTH_MAX + 1) + b"]" * (DEPTH_MAX + 1) + b',"a":1}',
]
WRONG = [b"", b"{", b'{"a":1}x', b'{"a":"1"}', b'{"a":1.0}', b'{"a":1,"a":1}', b'{"a":[]}']
WRONG += [b'{"a":9223372036854775808}', b'{"a":1,}', b'{"a" 1}', b'{"z":"\xff"}', b'{"z":"\\q"}']
WRONG += [
    b'{"z":Inf}',
    b'{"z":-NaN}',
    b'{"z":[-Inf]}',
    b'{"z":"\\ud80x"}',
    b'{"z":1.}',
    b'{"z":01}',
]


def test_the_usual_is_read_here_and_only_the_strange_is_left_to_arrow():
    values = [*READ_HERE, *LEFT_OPEN, *WRONG]
    expected = [PARSED] * len(READ_HERE) + [UNSURE] * len(LEFT_OPEN) + [SUSPECT] * len(WRONG)

    assert verdicts(values, INT) == expected
    check_same(values, INT)


def test_usual_values_of_every_type_are_read_here():
    day, moment = '"2024-02-29"', '"2024-02-29T12:34:56.5Z"'
    texts = ["true", "-128", "0", "7", "1234567890123456789", "0.1", "-0.12345678901234567"]
    texts += ['"\\u00e9 \\"\\/"', day, moment, '"2024-02-29 12:34:56"']
    pairs = [f'"{field.name}":{text}' for field, text in zip(SCHEMA, texts, strict=True)]
    record = "{" + ", ".join(pairs) + "}"

    assert verdicts([record.encode()], SCHEMA) == [PARSED]
    check_same([record.encode(), None], SCHEMA)


def test_records_that_arrow_read_are_put_back_in_their_places():
    """Of every type, with nulls, between records that were read here."""
    full = {"f0": True, "f1": 1, "f2": -2, "f3": 3, "f4": -4, "f5": 0.5, "f6": 6.25, "f7": "é"}
    full |= {"f8": "2024-02-29", "f9": "2024-02-29T12:34:56", "f10": "2024-02-29"}
    here = json.dumps(full).encode()
    there = here[:-1] + b', "\\u007a": 0}'
    values = [here, there, None, b'{"\\u007a":0,"f7":"x"}', here, b'{"f3":NaN}', there, here]

    assert verdicts(values, SCHEMA) == [
        PARSED,
        UNSURE,
        PARSED,
        UNSURE,
        PARSED,
        UNSURE,
        UNSURE,
        PARSED,
    ]
    check_same(values, SCHEMA)


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The runs of rows that Arrow is asked to parse."""
    runs: list[Any] = []
    parse_block = json_reader._Block.parse
    monkeypatch.setattr(
        json_reader._Block, "parse", lambda *run: runs.append(run[1:]) or parse_block(*run)
    )
    return runs


def test_wrongly_typed_records_are_tried_once_each(parses):
    values = [b'{"a":%d}' % row if row % 2 else b'{"a":"x"}' for row in range(100)]

    assert list(parse(values, INT).reasons) == list(range(0, 100, 2))
    assert len(parses) == 50


def test_records_left_open_are_parsed_together(parses):
    values = [b'{"a":%d}' % row if row % 2 else b'{"a":%d,"\\u007a":0}' % row for row in range(100)]

    assert parse(values, INT).columns.column("a").to_pylist() == list(range(100))
    assert parses == [(0, 50)]


def test_where_nearly_all_is_left_open_the_rest_is_not_tried(parses):
    count = 10 * UNSURE_FREE
    values = [b'{"a":1,"\\u007a":0}'] * count + [b'{"a":2}'] * 5

    assert parse(values, INT).columns.column("a").to_pylist() == [1] * count + [2] * 5
    assert parses == [(0, count + 5)]


def test_a_failfast_reader_tries_no_record_after_the_first_wrong_one(parses):
    with pytest.raises(Exception, match=r"^1: the value is not"):
        parse([b'{"a":1}', *[b'{"a":"x"}'] * 50], INT, "failfast")
    assert len(parses) == 1


@pytest.mark.parametrize("wrong_first", [True, False])
def test_a_failfast_reader_names_the_first_whoever_refuses_it(wrong_first):
    suspect, unsure = b'{"a":""}', b'{"\\u0061":""}'
    values = [b"{}", suspect, unsure] if wrong_first else [b"{}", unsure, suspect]
    with pytest.raises(Exception, match=r"^1: the value is not"):
        parse(values, INT, "failfast")


# ---- names ----


def test_names_of_every_length_are_told_apart():
    names = ["x" * length for length in range(26)] + ["y" * length for length in range(1, 26)]
    schema = pa.schema([(name, pa.int64()) for name in names])
    row = {name: number for number, name in enumerate(names)}
    backwards = dict(reversed(row.items()))
    values = [json.dumps(fields).encode() for fields in (row, backwards, row, {"x" * 26: 1})]

    assert parse(values, schema).columns.to_pylist() == [row, row, row, dict.fromkeys(names)]
    assert verdicts(values, schema) == [PARSED] * 4


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "a\x00"])
def test_a_name_that_needs_escapes_is_left_to_arrow(name):
    schema = pa.schema([(name, pa.int64())])

    assert flat_of(schema) is None
    assert parse([json.dumps({name: 1}).encode()], schema).columns.to_pylist() == [{name: 1}]


def test_schemas_that_differ_in_metadata_only_keep_their_own():
    for mark in ("1", "2"):
        schema = pa.schema([pa.field("a", pa.int64(), metadata={"m": mark})])
        assert parse([b'{"a":1}'], schema).columns.schema.equals(schema, check_metadata=True)


# ---- the limits of memory ----


def test_no_record_is_read_beyond_its_end():
    """What follows would make each of these beginnings a whole record."""
    record = b'{"b":"text of some length","z":[1,{"q":"\\u00e9"}],"d":"2024-02-29", "a":-12345678}'
    schema = pa.schema([("a", pa.int32()), ("b", pa.string()), ("d", pa.date32())])
    data = np.frombuffer(record, np.uint8)
    ends = np.arange(len(record) + 1)
    spans = Spans(data, np.zeros_like(ends), ends)

    columns = FlatColumns(schema, flat_of(schema), spans)

    assert (columns.verdicts == PARSED).tolist() == [False] * len(record) + [True]
    assert columns.batch().to_pylist()[:-1] == [dict.fromkeys("abd")] * len(record)


def test_short_records_see_nothing_of_what_is_before_them():
    data = np.frombuffer(b'{"a":1}' * 3 + b'{"a":2,', np.uint8)
    spans = Spans(data, np.array([0, 7, 14, 21]), np.array([7, 7, 7, 7]))

    assert FlatColumns(INT, flat_of(INT), spans).verdicts.tolist() == [PARSED] * 3 + [SUSPECT]


@pytest.mark.parametrize(("start", "length"), [(0, 8), (-1, 3), (7, 1)])
def test_spans_that_leave_their_data_are_refused(start, length):
    spans = Spans(np.frombuffer(b'{"a":1}', np.uint8), np.array([start]), np.array([length]))
    with pytest.raises(AssertionError, match="leaves its data"):
        FlatColumns(INT, flat_of(INT), spans)
