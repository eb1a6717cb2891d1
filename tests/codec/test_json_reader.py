"""The reader against `json.loads`, record by record, however records are cut, merged or damaged."""

import json
import math
import re
from datetime import UTC, date, datetime
from decimal import Decimal, localcontext
from itertools import product
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tallystick.codec.formats import MODES, Json
from tallystick.codec.json import read as json_reader
from tallystick.codec.json.kernels import CONTROL_CHARACTER, GOOD, NOT_UTF8, join_records
from tallystick.codec.json.read import JsonReader, check_schema, parse_json
from tallystick.codec.spans import spans_of
from tallystick.codec.values import ParsedValues
from tallystick.errors import OptionError, RecordError
from tests.examples import drawn

SCHEMA = pa.schema(
    [
        ("a", pa.int32()),
        ("b", pa.string()),
        ("c", pa.float64()),
        ("s", pa.struct([("x", pa.int8())])),
        ("l", pa.list_(pa.string())),
    ]
)
FLAT = pa.schema([field for field in SCHEMA if not pa.types.is_nested(field.type)])
INT = pa.schema([("a", pa.int64())])
NESTED = pa.schema([("a", pa.int64()), ("l", pa.list_(pa.string()))])

MALFORMED = [
    b"",
    b"   ",
    b"null",
    b"1",
    b"[]",
    b'[{"a":1}]',
    b"{",
    b"}",
    b'{"a":1',
    b',"b":2}',
    b'{"a":1}{"a":2}',
    b'{"a":1} {"a":2}',
    b'{"a":1}\n{"a":2}',
    b'{"a":1}\r\n{}',
    b'{"a":1} null {"a":2}',
    b'{"a":1}\x00{"a":2}',
    b'{"a":1}\x00}',
    b'\x00{"a":1}',
    b'{"a":1}]',
    b'{"a":1,}',
    b'{"a":1,"a":2}',
    b'{"a":1.0}',
    b'{"a":1e2}',
    b'{"a":"1"}',
    b'{"a":true}',
    b'{"a":{}}',
    b'{"a":9223372036854775808}',
    b'{"a":NaN}',
    b'{"z":01}',
    b'{"z":Inf}',
    b'{"z":-NaN}',
    b'{"z":[-Inf]}',
    b'{"z":+1}',
    b'{"a":1e999}',
    b'{"a":0e999}',
    b'{"z":"a\tb"}',
    b'{"z":"a\nb"}',
    b'{"z":"\x01"}',
    b'{"z":"\\ud80x"}',
    b'{"z":"\\q"}',
    b'{"z":"\xff"}',
    b'{"z":"\xed\xa0\x80"}',
    b'{"z":"\xc0\x80"}',
    b'{"\xff":1}',
    b'\xef\xbb\xbf{"a":1}',
    b'/**/{"a":1}',
    b"{'a':1}",
    b'{"z":{"a":1}',
    b'{"z":"}',
    b'{"z":[{}',
]
WELL_FORMED = [
    (b'{"a":1}', 1),
    (b' \t\r\n{"a":2}\r\n', 2),
    (b'{\n  "a":\t3\r\n}', 3),
    (b"{}", None),
    (b'{"a":null}', None),
    (b'{"z":[1,{"a":7}],"a":-4}', -4),
    (b'{"z":1,"z":2,"a":5}', 5),
    (b'{"\\u0061":6}', 6),
    (b'{"a\\u0000":6}', None),
    (b'{"z":1e999,"a":10}', 10),
    (b'{"z":[-1E+0000999,0e785,0.0e400,1e-99999],"a":11}', 11),
    (b'{"z":1e99999999999999999999999,"a":12}', 12),
    (b'{"z":{"y":"\\ud800","\\udc00":"\\udc00"},"a":13}', 13),
    (b'{"\\ud800":1,"a":14}', 14),
    (b'{"z":[NaN,Infinity,-Infinity],"a":15}', 15),
    (b'{"z":"\\ud83d\\ud83d\\u0041","\\u0061":16}', 16),
    (b'{"z":"}\\n{","a":8}', 8),
    ('{"z":"é😀\u2028","a":9}'.encode(), 9),
    (b'{"a":-9223372036854775808}', -(2**63)),
    (None, None),
]


def where(row: int) -> str:
    return f"topic t, partition 3, offset {1000 + row}"


def parse(values: list[bytes | None], schema: pa.Schema, mode: str = "permissive") -> ParsedValues:
    return parse_json(pa.array(values, pa.binary()), schema, mode, where)


def marks(parsed: ParsedValues, count: int) -> list[bool]:
    return [row in parsed.reasons for row in range(count)]


# ---- what is malformed, in each mode ----


@pytest.mark.parametrize("record", MALFORMED)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_malformed_record_is_a_row_of_nulls_and_its_neighbours_stay(record, place):
    values = [b'{"a":1}', b'{"a":2}']
    values.insert(place, record)
    expected = [1, 2]
    expected.insert(place, None)

    parsed = parse(values, INT)

    assert parsed.columns.column("a").to_pylist() == expected
    assert marks(parsed, 3) == [row == place for row in range(3)]
    assert parsed.rows is None


@pytest.mark.parametrize("record", MALFORMED)
@pytest.mark.parametrize("mode", ["dropmalformed", "deadletter"])
def test_a_malformed_record_is_left_out_and_its_neighbours_stay(record, mode):
    parsed = parse([b'{"a":1}', record, None, b'{"a":2}'], INT, mode)

    assert parsed.columns.column("a").to_pylist() == [1, None, 2]
    assert parsed.rows.tolist() == [0, 2, 3]
    assert marks(parsed, 4) == [False, True, False, False]


@pytest.mark.parametrize("record", MALFORMED)
def test_the_first_malformed_record_stops_a_failfast_reader(record):
    with pytest.raises(RecordError, match=r"^topic t, partition 3, offset 1002: .*"):
        parse([b'{"a":1}', None, record, b'{"a":"later"}', b""], INT, "failfast")


def test_the_first_malformed_record_is_named_whichever_check_finds_it():
    for values, first in (([b'{"a":""}', b""], 1000), ([b"", b'{"a":""}'], 1000)):
        with pytest.raises(RecordError, match=f"offset {first}:"):
            parse(values, INT, "failfast")


@pytest.mark.parametrize("mode", MODES)
def test_well_formed_records_and_tombstones_pass_in_every_mode(mode):
    parsed = parse([record for record, _ in WELL_FORMED], INT, mode)

    assert parsed.columns.column("a").to_pylist() == [value for _, value in WELL_FORMED]
    assert parsed.rows is None
    assert not parsed.reasons


@pytest.mark.parametrize(
    "values",
    [
        [b'{"a":1', b',"b":2}', b"", b'{"a":1}{"a":2}'],
        [b'{"a":[1', b']}{"a":3}'],
        [b'{"z":', b'{"a":1}}', b"{}{}"],
        [b'{"z":[', b"{}]}", b"{}{}"],
        [b'{"z":"', b'{"}', b"{}{}"],
        [b"{}{}", b" "],
    ],
)
def test_records_that_make_up_for_each_other_are_all_malformed(values):
    """Joined by line breaks they are as many documents as records, all of them well-formed."""
    assert marks(parse(values, INT), len(values)) == [True] * len(values)


def test_an_error_says_where_why_and_what_to_do_and_shows_only_the_beginning():
    record = b'{"a":"' + b"x" * 200 + b'secret"}'
    with pytest.raises(RecordError) as caught:
        parse([record], INT, "failfast")

    message = str(caught.value)
    assert message.startswith("topic t, partition 3, offset 1000: ")
    assert "a: declared bigint, found the text" in message
    assert "208 bytes" not in message
    assert f"{len(record)} bytes" in message
    assert "secret" not in message
    assert "permissive" in message
    assert "dropmalformed" in message


# ---- against json.loads ----


def reference(record: bytes | None, schema: pa.Schema) -> dict[str, Any] | None:
    """The row that `json.loads` and the documented rules give; None: malformed.

    What nobody asks for need only be JSON: any number, and halves of characters.
    """
    if record is None:
        return dict.fromkeys(schema.names)
    try:
        pairs = json.loads(record.decode(), object_pairs_hook=Object)
        return shaped_object(pairs, pa.struct(list(schema)))
    except (ValueError, RecursionError):
        return None


class Object(list):  # type: ignore[type-arg]
    """The pairs of a JSON object, with their duplicates."""


def shaped(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return shaped_object(value, kind)
    if pa.types.is_list(kind):
        if type(value) is not list:
            raise ValueError(value)
        return [shaped(item, kind.value_type) for item in value]
    if pa.types.is_integer(kind):
        bound = 2 ** (kind.bit_width - 1)
        if type(value) is not int or not -bound <= value < bound:
            raise ValueError(value)
        return value
    if pa.types.is_floating(kind):
        if type(value) not in (int, float):
            raise ValueError(value)
        return float(value)
    if type(value) is not str:
        raise ValueError(value)
    value.encode()  # UnicodeEncodeError for half a character
    return value


def shaped_object(value: Any, kind: pa.DataType) -> dict[str, Any]:
    if type(value) is not Object:
        raise ValueError(value)
    row = dict.fromkeys(field.name for field in kind)
    names = [name for name, _ in value if name in row]
    if len(names) != len(set(names)):
        raise ValueError(names)
    return row | {name: shaped(item, kind.field(name).type) for name, item in value if name in row}


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-300, 300),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("axz"), inner),
    max_leaves=4,
)
FITTING = st.fixed_dictionaries(
    {},
    optional={
        "a": st.none() | st.integers(-(2**31), 2**31 - 1),
        "b": st.none() | st.text(max_size=8),
        "c": st.none() | st.floats() | st.integers(-(2**60), 2**60),
        "s": st.none() | st.fixed_dictionaries({"x": st.integers(-128, 127)}),
        "l": st.none() | st.lists(st.none() | st.text(max_size=3), max_size=3),
        "z": VALUES,
    },
)
NAMES = st.sampled_from([*SCHEMA.names, "x", "z", ""])
DOCUMENTS = st.builds(
    lambda value, indent, ascii_only: json.dumps(
        value, indent=indent, ensure_ascii=ascii_only
    ).encode("utf-8", "surrogatepass"),
    FITTING | FITTING | st.dictionaries(NAMES, VALUES, max_size=4) | VALUES,
    st.sampled_from([None, None, 1]),
    st.booleans(),
)
STRUCTURE = [b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\n", b"\r", b"\t", b" ", b"/**/"]
DAMAGE = [b"\x00", b"\x01", b"\x7f", b"\x80", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\\ud83d"]
LITERALS = [
    b"null",
    b"NaN",
    b"-",
    b"0",
    b"1",
    b"1e5",
    b"1e999",
    b"0e999",
    b"-Inf",
    b".5",
    b"{}",
    b'"a":1',
    b'"a":1,',
    b"\\u0061",
]
FRAGMENTS = st.sampled_from([*STRUCTURE, *DAMAGE, *LITERALS])


@st.composite
def records(draw: st.DrawFn) -> list[bytes | None]:
    """Documents, damaged, cut into several records, or several in one."""
    values: list[bytes | None] = []
    for _ in range(draw(st.integers(0, 6))):
        document = draw(DOCUMENTS)
        place = draw(st.integers(0, len(document)))
        match draw(st.sampled_from(["whole", "whole", "insert", "remove", "cut", "merge", "null"])):
            case "whole":
                values.append(document)
            case "insert":
                values.append(document[:place] + draw(FRAGMENTS) + document[place:])
            case "remove":
                values.append(document[:place] + document[place + 1 :])
            case "cut":
                values += [document[:place], document[place:]]
            case "merge":
                values.append(document + draw(FRAGMENTS) + draw(DOCUMENTS))
            case _:
                values.append(None)
    return values


def same(first_value: Any, right: Any) -> bool:
    """Equality under which NaN is itself."""
    return repr(first_value) == repr(right)


@drawn(400)
@given(records(), st.sampled_from([SCHEMA, FLAT]))
@example([b"{}{}", b""], SCHEMA)
@example([b'{"a":1', b',"b":"x"}'], SCHEMA)
@example([b'{"b":"', b'"}'], SCHEMA)
@example([b'{"c":1.797693134862317e+308}', b'{"c":-1.5e309}', b'{"c":1e309}'], SCHEMA)
@example([b'{"c":1.797693134862317e+308}', b'{"c":-1.5e309}', b'{"c":1e309}'], FLAT)
@example([b'{"c":0e309}', b'{"c":-0.0e400}', b'{"c":-0.001e311}', b'{"c":-0.001e312}'], SCHEMA)
@example([b'{"a": null, "b": null, "c": 1.797693134862317e+308}'], FLAT)
@example([b'{"c":Inf}', b'{"c":-NaN}', b'{"c":-Infinity}', b'{"c":NaN,"b":"Inf"}'], SCHEMA)
@example([b'{"c":Inf}', b'{"c":-NaN}', b'{"c":-Infinity}', b'{"c":NaN,"b":"Inf"}'], FLAT)
@example([b'{"s":{"x":1,"z":1e999,"y":[{"x":2}]}}', b'{"s":{"x":1e999}}', b'{"z":1e999}'], SCHEMA)
def test_every_record_is_judged_and_read_as_if_it_stood_alone(values, schema):
    """No record can be hidden, invented, split or merged by its neighbours."""
    rows = [reference(value, schema) for value in values]
    nulls = dict.fromkeys(schema.names)

    parsed = parse(values, schema)
    kept = parse(values, schema, "dropmalformed")

    assert marks(parsed, len(values)) == [row is None for row in rows]
    assert same(parsed.columns.to_pylist(), [nulls if row is None else row for row in rows])
    assert same(kept.columns.to_pylist(), [row for row in rows if row is not None])
    parsed.columns.validate(full=True)


def joined(values: list[bytes]) -> tuple[list[int], bytes]:
    """The kernel's verdicts, and the text that the parser would get."""
    spans = spans_of(pa.array(values, pa.binary()), "value")
    out = np.zeros(sum(map(len, values)) + 3 * len(values), np.uint8)
    verdicts = np.zeros(len(values), np.uint8)
    lines = np.zeros(len(values) + 1, np.int64)
    written = join_records(spans.data, spans.starts, spans.lengths, out, lines, verdicts)
    return verdicts.tolist(), out[:written].tobytes()


def is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_only_valid_utf8_reaches_the_parser():
    """Every lead byte with the bytes on both sides of each limit after it."""
    seconds, rest = [0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0], [0x7F, 0x80, 0xBF, 0xC0]
    tails = [tail for length in range(4) for tail in product(*([seconds, rest, rest][:length]))]
    texts = [bytes([lead, *tail]) for lead in range(0x80, 0x100) for tail in tails]

    verdicts, _ = joined([b"{" + text + b"}" for text in texts])

    assert verdicts == [GOOD if is_utf8(text) else NOT_UTF8 for text in texts]


def test_line_breaks_in_a_record_become_tabs_and_control_characters_condemn_it():
    """The parser ends at a NUL, and the text has one line per record, whatever stands in them."""
    controls = [b"{%c}" % byte for byte in range(0x20) if byte not in b"\t\n\r"]

    verdicts, text = joined([b"\n{\r\n1 \t\n2}\r", *controls])

    assert verdicts == [GOOD] + [CONTROL_CHARACTER] * len(controls)
    assert text == b"{\t\t1 \t\t2}\n" + b"{}\n" * len(controls)


@drawn(50)
@given(records(), st.sampled_from([SCHEMA, FLAT]), st.data())
def test_slices_and_small_blocks_give_the_same_rows(values, schema, data):
    start = data.draw(st.integers(0, len(values)))
    rows = data.draw(st.integers(1, 4))
    block_bytes = data.draw(st.integers(1, 200))
    whole = parse(values, schema)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_reader, "BLOCK_ROWS_MAX", rows)
        patch.setattr(json_reader, "BLOCK_BYTES_MAX", block_bytes)
        part = parse_json(pa.array(values, pa.binary())[start:], schema, "permissive", where)

    assert same(part.columns.to_pylist(), whole.columns.to_pylist()[start:])
    assert marks(part, len(values) - start) == marks(whole, len(values))[start:]


# ---- finding the malformed ones ----


@pytest.mark.parametrize("bad_count", [1, 3, 20])
def test_malformed_records_are_found_in_few_parses(bad_count, monkeypatch):
    count = 4096
    bad = np.random.default_rng(bad_count).choice(count, bad_count, replace=False)
    values = [b'{"a":%d}' % row for row in range(count)]
    for row in bad:
        values[row] = b'{"a":"x"}'
    parses = []
    parse_block = json_reader._Block.parse
    monkeypatch.setattr(
        json_reader._Block, "parse", lambda *run: parses.append(run) or parse_block(*run)
    )

    parsed = parse(values, NESTED)

    assert list(parsed.reasons) == sorted(bad)
    assert parsed.columns.column("a").null_count == bad_count
    assert len(parses) <= 2 * bad_count * math.log2(count) + 1


def test_a_million_records_are_read():
    records_in = pa.array([b'{"a":7}'] * 1_000_000, pa.binary())

    parsed = parse_json(records_in, INT, "failfast", where)

    assert parsed.columns.num_rows == 1_000_000
    assert parsed.columns.column("a").to_numpy().sum() == 7_000_000


def test_no_records_give_an_empty_batch():
    for mode in MODES:
        parsed = parse([], SCHEMA, mode)
        assert parsed.columns.schema == SCHEMA
        assert parsed.columns.num_rows == 0


def test_deep_nesting_in_an_ignored_field_does_no_harm():
    depth = 100_000
    deep = b'{"z":' + b"[" * depth + b"]" * depth + b',"a":1}'

    assert parse([deep], INT).columns.column("a").to_pylist() == [1]


def test_the_kernel_refuses_spans_that_leave_their_arrays():
    data = np.frombuffer(b'{"a":1}', np.uint8)
    for start, length, room in ((0, 8, 99), (-1, 3, 99), (7, 1, 99), (0, 7, 9)):
        out = np.zeros(room, np.uint8)
        verdicts = np.zeros(1, np.uint8)
        spans = np.array([start], np.int64), np.array([length], np.int64)
        assert join_records(data, *spans, out, np.zeros(2, np.int64), verdicts) == -1


# ---- types ----


def one(text: str, kind: pa.DataType) -> Any:
    """The value of field `v`; "malformed" where it is."""
    parsed = parse([b'{"v":' + text.encode() + b"}"], pa.schema([("v", kind)]))
    return "malformed" if parsed.reasons else parsed.columns.column(0)[0].as_py()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"2024-02-29T12:34:56.123456Z"', datetime(2024, 2, 29, 12, 34, 56, 123456, UTC)),
        ('"2024-02-29T12:34:56"', datetime(2024, 2, 29, 12, 34, 56, tzinfo=UTC)),
        ('"2024-02-29 12:34:56.5"', datetime(2024, 2, 29, 12, 34, 56, 500000, UTC)),
        ('"2024-02-29T12:34"', datetime(2024, 2, 29, 12, 34, tzinfo=UTC)),
        ('"2024-02-29"', datetime(2024, 2, 29, tzinfo=UTC)),
        ('"2024-02-29T12:34:56+02:00"', datetime(2024, 2, 29, 10, 34, 56, tzinfo=UTC)),
        ('"2024-02-29T12:34:56-0130"', datetime(2024, 2, 29, 14, 4, 56, tzinfo=UTC)),
        ("null", None),
        ('"2023-02-29"', "malformed"),
        ('"2024-02-29T12:34:56.1234567"', datetime(2024, 2, 29, 12, 34, 56, 123456, UTC)),
        ('"2024-02-29T12:34:56.123456789Z"', datetime(2024, 2, 29, 12, 34, 56, 123456, UTC)),
        ('"2024-02-29T12:34:56.0000009+00:00"', datetime(2024, 2, 29, 12, 34, 56, tzinfo=UTC)),
        ('"2024-02-29T12:34:56.999999999999999Z"', datetime(2024, 2, 29, 12, 34, 56, 999999, UTC)),
        ('"2024-02-29t12:34:56z"', datetime(2024, 2, 29, 12, 34, 56, tzinfo=UTC)),
        ('"2024-02-29T12:34Z"', datetime(2024, 2, 29, 12, 34, tzinfo=UTC)),
        ('"2024-02-29T12"', datetime(2024, 2, 29, 12, tzinfo=UTC)),
        ('"2024-02-29 12:34:56+02"', datetime(2024, 2, 29, 10, 34, 56, tzinfo=UTC)),
        ('"2024-02-29T12:34:56+02"', "malformed"),
        ('"2024-02-29T12:34:56+24:00"', "malformed"),
        ('"2024-02-29T12:34:56+02:60"', "malformed"),
        ('"2024-02-29T12:34:56+2:00"', "malformed"),
        ('"2024-02-29T12:34:56."', "malformed"),
        ('"2024-02-29T12:34:56.1 Z"', "malformed"),
        ('"2024-02-29T12:34.5Z"', "malformed"),
        ('"2024-02-29_12:34:56Z"', "malformed"),
        ('"2024-02-29T12:34:60Z"', "malformed"),
        ('"1998-12-31T23:59:60Z"', datetime(1998, 12, 31, 23, 59, 59, tzinfo=UTC)),
        ('"1998-12-31T23:59:60.5Z"', datetime(1998, 12, 31, 23, 59, 59, 500000, UTC)),
        ('"1998-12-31T15:59:60-08:00"', datetime(1998, 12, 31, 23, 59, 59, tzinfo=UTC)),
        ('"1998-12-31T23:59:60-08:00"', "malformed"),
        ('"1998-12-31T23:59:61Z"', "malformed"),
        ('"1998-12-31T24:00:00Z"', "malformed"),
        ('"yesterday"', "malformed"),
        ('""', "malformed"),
        ("1700000000", "malformed"),
    ],
)
def test_timestamps_are_iso_8601_in_utc(text, expected):
    assert one(text, pa.timestamp("us", "UTC")) == expected
    assert one(f"[{text},null]", pa.list_(pa.timestamp("us", "UTC"))) == (
        [expected, None] if expected != "malformed" else "malformed"
    )


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ('"2024-02-29"', pa.date32(), date(2024, 2, 29)),
        ('"2024-02-30"', pa.date32(), "malformed"),
        ("19000", pa.date32(), "malformed"),
        ("null", pa.date32(), None),
        ("1.5", pa.decimal128(4, 2), Decimal("1.50")),
        ('"1.5"', pa.decimal128(4, 2), Decimal("1.50")),
        ("99.99", pa.decimal128(4, 2), Decimal("99.99")),
        ("100", pa.decimal128(4, 2), "malformed"),
        ("1.555", pa.decimal128(4, 2), "malformed"),
        ("NaN", pa.decimal128(4, 2), "malformed"),
        ("127", pa.int8(), 127),
        ("128", pa.int8(), "malformed"),
        ("Infinity", pa.float64(), math.inf),
        ("-Infinity", pa.float32(), -math.inf),
        ("1e300", pa.float32(), math.inf),
        ("1e999", pa.float64(), math.inf),
        ("-1e99999", pa.float32(), -math.inf),
        ("0e785", pa.float64(), 0.0),
        ("-0.0e400", pa.float32(), -0.0),
        ("0e785", pa.decimal128(4, 2), Decimal("0.00")),
        ("0e785", pa.int64(), "malformed"),
        ("1e999", pa.decimal128(4, 2), "malformed"),
        ("[1e999,[0e999]]", pa.list_(pa.float64()), "malformed"),
        ("[1e999,null,0e999]", pa.list_(pa.float64()), [math.inf, None, 0.0]),
        ("NaN", pa.int64(), "malformed"),
        ("Inf", pa.float64(), "malformed"),
        ("-Inf", pa.float64(), "malformed"),
        ("-NaN", pa.float64(), "malformed"),
        ("+Infinity", pa.float64(), "malformed"),
        ('"NaN"', pa.float64(), "malformed"),
        ("true", pa.bool_(), True),
        ('"true"', pa.bool_(), "malformed"),
        ("1", pa.string(), "malformed"),
        ('"\\ud83d\\ude00\\u0000"', pa.string(), "😀\0"),
        ('["2024-01-01",null]', pa.list_(pa.date32()), [date(2024, 1, 1), None]),
        ('["x"]', pa.list_(pa.date32()), "malformed"),
        ('{"d":"2024-01-01"}', pa.struct([("d", pa.date32())]), {"d": date(2024, 1, 1)}),
        ("null", pa.struct([("d", pa.date32())]), None),
        ("{}", pa.struct([("d", pa.date32())]), {"d": None}),
        ("[]", pa.struct([("d", pa.date32())]), "malformed"),
        (
            '[{"d":[1000]}]',
            pa.list_(pa.struct([("d", pa.list_(pa.decimal128(2, 0)))])),
            "malformed",
        ),
        (
            '[{"d":[10]},null]',
            pa.list_(pa.struct([("d", pa.list_(pa.int8()))])),
            [{"d": [10]}, None],
        ),
    ],
)
def test_values_of_each_type(text, kind, expected):
    assert one(text, kind) == expected


def test_columns_have_exactly_the_schema_asked_for():
    kind = pa.struct([pa.field("l", pa.list_(pa.field("element", pa.date32())))])
    schema = pa.schema([pa.field("s", kind, metadata={"m": "1"})], metadata={"n": "2"})

    parsed = parse([b'{"s":{"l":["2024-01-01"]}}', None, b"x"], schema)

    assert parsed.columns.schema.equals(schema, check_metadata=True)


@pytest.mark.parametrize(
    "schema",
    [
        pa.schema([]),
        pa.schema([("v", pa.binary())]),
        pa.schema([("v", pa.map_(pa.string(), pa.int32()))]),
        pa.schema([("v", pa.uint8())]),
        pa.schema([("v", pa.timestamp("ns"))]),
        pa.schema([("v", pa.time64("us"))]),
        pa.schema([("v", pa.null())]),
        pa.schema([("v", pa.struct([]))]),
        pa.schema([("v", pa.list_(pa.binary()))]),
        pa.schema([pa.field("v", pa.int32(), nullable=False)]),
        pa.schema([("v", pa.struct([pa.field("w", pa.int32(), nullable=False)]))]),
        pa.schema([("v", pa.int32()), ("v", pa.int32())]),
    ],
)
def test_a_schema_that_cannot_be_read_is_refused_before_anything_starts(schema):
    with pytest.raises(OptionError, match=r"JSON schema"):
        JsonReader(schema)


def test_the_reasons_are_those_of_failfast_in_the_order_of_the_rows():
    values = [b'{"a":""}', b"", b'{"a":1}', b"\xff", b'{"a":[]}', b"{}{}"]

    reasons = parse(values, INT).reasons

    assert list(reasons) == [0, 1, 3, 4, 5]
    for row, reason in reasons.items():
        with pytest.raises(RecordError, match=re.escape(reason)):
            parse(values[row : row + 1], INT, "failfast")


def test_the_schema_of_the_other_tests_is_accepted():
    check_schema(SCHEMA)


def test_json_checks_its_settings():
    assert Json("a int").mode == "failfast"
    with pytest.raises(OptionError, match="permissive"):
        Json("a int", mode="lenient")
    with pytest.raises(OptionError, match="DDL"):
        Json("  ")


def test_no_reason_names_a_row_of_a_block():
    records = [b'{"a":"b"}#{}', b'{"a":1}{', b'{"a":1}', b'{"a":"x"}', b'{"a":1e}', b'{"a":\\}']
    for values in (records, records[::-1]):
        reasons = parse(values, NESTED).reasons
        assert len(reasons) == 5
        assert not [reason for reason in reasons.values() if re.search(r"in row \d", reason)]


@given(
    st.sampled_from([(38, 18), (38, 0), (38, 37), (10, 2), (1, 0)]),
    st.lists(
        st.from_regex(r"-?(0|[1-9][0-9]{0,45})(\.[0-9]{1,38})?(e-?[0-9]{1,2})?", fullmatch=True)
    ),
)
@example((38, 37), ["25188"])
@example((38, 18), ["-0.3122635527633590890e27", "1208925819614629174706176"])
@example((38, 0), ["0.5e-38"])
@example((1, 0), ["9.0", "0e27"])
def test_a_decimal_is_the_number_that_was_written_or_the_record_is_malformed(
    kind: tuple[int, int], texts: list[str]
) -> None:
    precision, scale = kind
    schema = pa.schema([("a", pa.decimal128(precision, scale)), ("l", pa.list_(pa.string()))])
    records = pa.array([f'{{"a": {text}}}'.encode() for text in texts], pa.binary())
    (column, _) = parse_json(records, schema, "permissive", lambda row: "").columns
    with localcontext(prec=200):
        for text, read in zip(texts, column.to_pylist(), strict=True):
            number = Decimal(text)
            digits = len(text.partition("e")[0].strip("-").replace(".", ""))
            fits = abs(number) < 10 ** (precision - scale) and number == round(number, scale)
            may_refuse = digits > 38 or not number  # such as 0e60
            assert read == (number if fits else None) or (read is None and may_refuse), text
