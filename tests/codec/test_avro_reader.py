"""The reader against fastavro, an independent encoder and decoder, and against damaged bytes."""

import io
import json
import pickle
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tallystick.codec import wire_format
from tallystick.codec.avro.kernels import FRAMES_MAX
from tallystick.codec.avro.reader import AvroReader
from tallystick.codec.values import ParsedValues
from tallystick.errors import OptionError, RecordError
from tests.examples import drawn

UTC_MICROS = pa.timestamp("us", tz="UTC")
NAIVE_MICROS = pa.timestamp("us")


@dataclass(frozen=True)
class Schemas:
    """A `SchemaSource` from memory."""

    texts: tuple[tuple[int, tuple[str, ...]], ...]

    def schema(self, schema_id: int) -> tuple[str, ...] | None:
        return dict(self.texts).get(schema_id)


def schemas(**by_id: Any) -> Schemas:
    """`schemas(_1=...)`: the schema with id 1."""
    return Schemas(tuple((int(name[1:]), (json.dumps(schema),)) for name, schema in by_id.items()))


def record(*fields: tuple[str, Any], name: str = "r") -> dict[str, Any]:
    return {
        "type": "record",
        "name": name,
        "fields": [{"name": field, "type": kind} for field, kind in fields],
    }


def body(schema: Any, row: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), row)
    return out.getvalue()


def framed(body: bytes, schema_id: int = 1) -> bytes:
    return b"\0" + schema_id.to_bytes(4, "big", signed=True) + body


def where(row: int) -> str:
    return f"topic t, partition 3, offset {1000 + row}"


def parse(
    values: list[bytes | None], columns: pa.Schema, source: Schemas, mode: str = "failfast"
) -> ParsedValues:
    parsed = AvroReader(columns, source).parse(pa.array(values, pa.binary()), mode, where)
    parsed.columns.validate(full=True)
    assert parsed.columns.schema == columns
    return parsed


def read(schema: Any, rows: list[dict[str, Any]], columns: pa.Schema) -> list[dict[str, Any]]:
    """Rows written by fastavro and read as these columns."""
    values: list[bytes | None] = [framed(body(schema, row)) for row in rows]
    rows_read: list[dict[str, Any]] = parse(values, columns, schemas(_1=schema)).columns.to_pylist()
    return rows_read


def read_one(kind: Any, value: Any, arrow: pa.DataType) -> Any:
    """One value of a type, with neighbours that show where its bytes end."""
    schema = record(("before", "int"), ("x", kind), ("after", "string"))
    row = {"before": 1, "x": value, "after": "z"}
    columns = pa.schema([("after", pa.string()), ("x", arrow), ("before", pa.int32())])
    (row_read,) = read(schema, [row], columns)
    assert (row_read["before"], row_read["after"]) == (1, "z")
    return row_read["x"]


# ---- types ----

MOMENT = datetime(2024, 2, 29, 12, 30, 15, 123000, UTC)


def logical(kind: str, name: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": name, **more}


def decimal(precision: int, scale: int) -> dict[str, Any]:
    return logical("bytes", "decimal", precision=precision, scale=scale)


ENUM = {"type": "enum", "name": "e", "symbols": ["A", "B"]}
FIXED = {"type": "fixed", "name": "f", "size": 3}
FIXED_DECIMAL = {
    "type": "fixed", "name": "d", "size": 20, "logicalType": "decimal", "precision": 38, "scale": 4,
}  # fmt: skip
LARGEST = Decimal("9" * 34 + "." + "9" * 4)


@pytest.mark.parametrize(
    ("kind", "value", "arrow"),
    [
        ("boolean", True, pa.bool_()),
        ("boolean", False, pa.bool_()),
        ("int", -(2**31), pa.int32()),
        ("long", 2**63 - 1, pa.int64()),
        ("long", -(2**63), pa.int64()),
        ("float", 1.5, pa.float32()),
        ("double", -1e300, pa.float64()),
        ("string", "", pa.string()),
        ("string", "é😀" * 9, pa.string()),
        ("bytes", b"\x00\xff", pa.binary()),
        (ENUM, "B", pa.string()),
        (FIXED, b"\x00\x01\xff", pa.binary()),
        (logical("int", "date"), date(1969, 12, 31), pa.date32()),
        (logical("long", "timestamp-millis"), MOMENT, UTC_MICROS),
        (logical("long", "timestamp-micros"), MOMENT, UTC_MICROS),
        (logical("long", "local-timestamp-millis"), MOMENT.replace(tzinfo=None), NAIVE_MICROS),
        (logical("long", "local-timestamp-micros"), MOMENT.replace(tzinfo=None), NAIVE_MICROS),
        (decimal(5, 2), Decimal("-123.45"), pa.decimal128(5, 2)),
        (decimal(5, 2), Decimal("1.28"), pa.decimal128(9, 4)),
        (FIXED_DECIMAL, LARGEST, pa.decimal128(38, 4)),
        (FIXED_DECIMAL, LARGEST.copy_negate(), pa.decimal128(38, 4)),
        (["null", "string"], None, pa.string()),
        (["null", "string"], "a", pa.string()),
        (["string", "null"], None, pa.string()),
        (["string", "null"], "a", pa.string()),
        (["int"], 7, pa.int32()),
        ("null", None, pa.string()),
        (["null"], None, pa.int32()),
        ({"type": "array", "items": "int"}, [], pa.list_(pa.int32())),
        ({"type": "array", "items": ["null", "int"]}, [1, None, 3], pa.list_(pa.int32())),
        (["null", {"type": "array", "items": "int"}], None, pa.list_(pa.int32())),
        ({"type": "map", "values": "long"}, [("a", 1), ("b", 2)], pa.map_(pa.string(), pa.int64())),
        (["null", {"type": "map", "values": "long"}], None, pa.map_(pa.string(), pa.int64())),
        (record(("y", "int"), name="s"), {"y": 4}, pa.struct([("y", pa.int32())])),
        (["null", record(("y", "int"), name="s")], None, pa.struct([("y", pa.int32())])),
    ],
    ids=str,
)
def test_what_was_written_is_read(kind, value, arrow):
    written = dict(value) if pa.types.is_map(arrow) and value else value

    assert read_one(kind, written, arrow) == value


@pytest.mark.parametrize(
    ("kind", "value", "arrow", "expected"),
    [
        ("int", 7, pa.int64(), 7),
        ("int", 7, pa.float32(), 7.0),
        ("int", 7, pa.float64(), 7.0),
        ("long", 2**40, pa.float32(), 2.0**40),
        ("long", 2**40, pa.float64(), 2.0**40),
        ("float", 0.5, pa.float64(), 0.5),
        ("bytes", b"\xc3\xa9", pa.string(), "é"),
        ("string", "é", pa.binary(), b"\xc3\xa9"),
        (logical("int", "date"), date(1970, 1, 3), pa.int32(), 2),
        (logical("long", "timestamp-millis"), MOMENT, pa.int64(), 1709209815123),
        (logical("string", "uuid"), "00000000-0000-0000-0000-000000000001", pa.string(),
         "00000000-0000-0000-0000-000000000001"),
        (decimal(4, 1), Decimal("12.8"), pa.binary(), b"\x00\x80"),
        (logical("long", "no-such-type"), 5, pa.int64(), 5),
    ],
    ids=str,
)  # fmt: skip
def test_types_are_promoted_as_avro_says(kind, value, arrow, expected):
    assert read_one(kind, value, arrow) == expected


@pytest.mark.parametrize(
    ("kind", "arrow", "names"),
    [
        ("long", pa.int32(), "long.*int32"),
        ("double", pa.float32(), "double.*float"),
        ("double", pa.int64(), "double.*int64"),
        ("string", pa.int32(), "string.*int32"),
        ("boolean", pa.int32(), "boolean.*int32"),
        ("int", pa.string(), "int.*string"),
        ("int", pa.date32(), "int.*date32"),
        ("long", UTC_MICROS, "long.*timestamp"),
        (logical("long", "timestamp-nanos"), UTC_MICROS, "nanos.*timestamp"),
        (logical("long", "timestamp-micros"), NAIVE_MICROS, "timestamp-micros.*timestamp"),
        (decimal(9, 2), pa.decimal128(8, 2), r"decimal\(9,2\).*decimal128\(8, 2\)"),
        (decimal(9, 2), pa.decimal128(20, 1), r"decimal\(9,2\).*decimal128\(20, 1\)"),
        (decimal(40, 2), pa.decimal128(38, 2), r"decimal\(40,2\).*decimal128"),
        (decimal(9, 2), pa.string(), "decimal.*string"),
        (FIXED, pa.string(), "fixed f.*string"),
        (record(("y", "int"), name="s"), pa.string(), "record s.*string"),
        ({"type": "array", "items": "int"}, pa.list_(pa.string()), r"\[\].*int.*string"),
        (["null", "int", "string"], pa.string(), r"union \[null, int, string\]"),
        ({"type": "array", "items": "null"}, pa.list_(pa.int32()), "take no bytes"),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["failfast", "permissive", "dropmalformed", "deadletter"])
def test_a_type_that_does_not_fit_is_an_error_in_every_mode(kind, arrow, names, mode):
    """Not a malformed record: all of the schema would be nulls, or gone."""
    source = schemas(_7=record(("x", kind)))
    with pytest.raises(RecordError, match=f"(?s)offset 1001.*id 7.*field 'x.*{names}"):
        parse([None, framed(b"", 7)], pa.schema([("x", arrow)]), source, mode)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "no JSON"),
        ('"string"', "needs? a record|need a record"),
        ('{"type":"record","name":"r","fields":[{"name":"x","type":"y.Z"}]}', "'y.Z'"),
        ('{"type":"record","name":"r"}', "no valid Avro schema"),
        ("7", "no valid Avro schema"),
        ('{"type":"record","name":"r","fields":[{"name":"f","type":{"type":"fixed",'
         '"name":"f","size":-1}}]}', "size"),
        ("[" * 9999 + "]" * 9999, "nested"),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_read_is_named_by_its_id(text, what):
    source = Schemas(((5, (text,)),))
    with pytest.raises(RecordError, match=f"(?s)offset 1000.*id 5.*({what})"):
        parse([framed(b"", 5)], pa.schema([("x", pa.int32())]), source)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ([], "no fields"),
        ([("a", pa.int32()), ("a", pa.int32())], "'a' twice"),
        ([("a", pa.int8())], "'a'.*int8"),
        ([("a", pa.map_(pa.int32(), pa.int32()))], "string keys"),
        ([("a", pa.list_(pa.timestamp("ns")))], "element of field 'a'.*timestamp"),
        ([("a", pa.struct([pa.field("b", pa.int32(), nullable=False)]))], "'b'.*NOT NULL"),
    ],
)
def test_columns_that_no_avro_can_give_are_refused_at_once(fields, what):
    with pytest.raises(OptionError, match=what):
        AvroReader(pa.schema(fields), schemas())


# ---- records ----


def test_columns_are_found_by_name_and_missing_ones_are_null():
    schema = record(("a", "int"), ("b", record(("c", "int"), name="s")), ("d", "string"))
    inner = pa.struct([("gone", pa.list_(pa.int32())), ("c", pa.int64())])
    columns = pa.schema([("z", pa.decimal128(5, 2)), ("b", inner), ("a", pa.int32())])

    rows = read(schema, [{"a": 1, "b": {"c": 2}, "d": "x"}], columns)

    assert rows == [{"z": None, "b": {"gone": None, "c": 2}, "a": 1}]


def test_a_column_that_only_others_have_is_null_within_items():
    schema = record(("l", {"type": "array", "items": record(("a", "int"), name="i")}))
    item = pa.struct([("a", pa.int32()), ("gone", pa.string())])

    rows = read(schema, [{"l": [{"a": 1}, {"a": 2}]}], pa.schema([("l", pa.list_(item))]))

    assert rows == [{"l": [{"a": 1, "gone": None}, {"a": 2, "gone": None}]}]


def test_a_logical_type_of_a_wrong_form_is_ignored():
    """As the specification says; fastavro refuses the schema."""
    source = schemas(_1=record(("x", decimal(2, 9))))
    parsed = parse([framed(b"\x04ab")], pa.schema([("x", pa.binary())]), source)

    assert parsed.columns.to_pylist() == [{"x": b"ab"}]


LINKED = record(
    ("value", "int"),
    ("other", ["null", "string", "boolean", {"type": "map", "values": ["int", ENUM]}]),
    ("next", ["null", "r"]),
)


def test_fields_that_nobody_asked_for_may_be_of_any_type():
    """Unions of many types, maps of them, and records that hold themselves are skipped."""
    end = {"value": 3, "other": {"a": 1, "b": "B"}, "next": None}
    middle = {"value": 2, "other": "text", "next": end}
    rows = [{"value": 1, "other": True, "next": middle}, end]
    inner = pa.struct([("value", pa.int64())])

    assert read(LINKED, rows, pa.schema([("value", pa.int32())])) == [{"value": 1}, {"value": 3}]
    assert read(LINKED, rows, pa.schema([("next", inner)])) == [
        {"next": {"value": 2}},
        {"next": None},
    ]


def test_records_that_hold_themselves_without_end_are_malformed():
    deep = b"\x02\x00\x02" * (FRAMES_MAX + 1)  # value 1, other null, next ...
    parsed = parse(
        [framed(deep)], pa.schema([("value", pa.int32())]), schemas(_1=LINKED), "permissive"
    )

    assert "nested" in parsed.reasons[0]


def test_named_types_are_found_by_namespace_and_in_references():
    address = {"type": "record", "name": "Address", "namespace": "a.b", "fields": [
        {"name": "city", "type": "string"}]}  # fmt: skip
    person = {"type": "record", "name": "a.b.Person", "fields": [
        {"name": "home", "type": "Address"}, {"name": "work", "type": "a.b.Address"}]}  # fmt: skip
    source = Schemas(((1, (json.dumps(address), json.dumps(person))),))
    city = pa.struct([("city", pa.string())])
    columns = pa.schema([("work", city), ("home", city)])

    rows = parse([framed(b"\x02x\x02y")], columns, source).columns.to_pylist()

    assert rows == [{"home": {"city": "x"}, "work": {"city": "y"}}]


def test_records_of_several_schemas_stay_in_order():
    old, new = record(("a", "int")), record(("b", "string"), ("a", ["null", "long"]))
    source = schemas(_1=old, _2=new)
    values = []
    for number in range(100):
        is_old = number % 3 == 0
        row = {"a": number} if is_old else {"a": number, "b": str(number)}
        values.append(framed(body(old if is_old else new, row), 1 if is_old else 2))
    values[50] = None
    columns = pa.schema([("a", pa.int64()), ("b", pa.string())])

    rows = parse(values, columns, source).columns.to_pylist()

    expected = [{"a": n, "b": str(n) if n % 3 else None} for n in range(100)]
    expected[50] = {"a": None, "b": None}
    assert rows == expected


def test_lists_longer_than_the_room_at_first_are_read_whole():
    schema = record(
        ("l", {"type": "array", "items": {"type": "array", "items": "string"}}),
        ("m", {"type": "map", "values": "int"}),
    )
    rows = [
        {"l": [["x" * (i % 5)] * i for i in range(80)], "m": {str(i): i for i in range(1500)}},
        {"l": [], "m": {}},
        {"l": [["y"] * 5000], "m": {}},
    ]
    columns = pa.schema(
        [("l", pa.list_(pa.list_(pa.string()))), ("m", pa.map_(pa.string(), pa.int32()))]
    )

    rows_read = read(schema, rows * 3, columns)

    assert [{"l": row["l"], "m": dict(row["m"])} for row in rows_read] == rows * 3


def test_blocks_with_their_size_are_read_too():
    """A negative count is followed by the block's bytes; fastavro writes none such."""
    schema = record(("l", {"type": "array", "items": "int"}))
    in_blocks = bytes([3, 4, 2, 4, 2, 6, 0])  # 2 items in 2 bytes: 1, 2; 1 item: 3; end
    columns = pa.schema([("l", pa.list_(pa.int32()))])

    rows = parse([framed(in_blocks)], columns, schemas(_1=schema)).columns.to_pylist()

    assert rows == [{"l": [1, 2, 3]}]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view()])
def test_slices_and_other_binary_types_are_read(kind):
    schema = record(("a", "int"))
    values = pa.array([framed(body(schema, {"a": n})) for n in range(9)], kind).slice(2, 4)
    reader = AvroReader(pa.schema([("a", pa.int32())]), schemas(_1=schema))

    assert reader.parse(values, "failfast", where).columns.column(0).to_pylist() == [2, 3, 4, 5]


def test_no_records_are_no_rows():
    columns = pa.schema([("a", pa.int32())])

    assert parse([], columns, schemas()).columns.num_rows == 0
    assert parse([None, None], columns, schemas()).columns.to_pylist() == [{"a": None}] * 2


def test_batches_are_cut_by_bytes(monkeypatch):
    monkeypatch.setattr(wire_format, "BATCH_BYTES_MAX", 20)
    schema = record(("a", "string"))
    values = [framed(body(schema, {"a": "x" * n})) for n in range(40)] + [b"bad", None]
    source = schemas(_1=schema)

    parsed = parse(values, pa.schema([("a", pa.string())]), source, "dropmalformed")

    assert parsed.columns.column(0).to_pylist() == ["x" * n for n in range(40)] + [None]
    assert list(parsed.reasons) == [40]


# ---- malformed records ----

SCHEMA = record(
    ("n", "int"),
    ("s", "string"),
    ("u", ["null", "long"]),
    ("e", ENUM),
    ("b", "boolean"),
    ("d", decimal(3, 0)),
    ("t", logical("long", "timestamp-millis")),
    ("l", {"type": "array", "items": "int"}),
    ("skipped", "bytes"),
)
COLUMNS = pa.schema(
    [
        ("n", pa.int32()),
        ("s", pa.string()),
        ("u", pa.int64()),
        ("e", pa.string()),
        ("b", pa.bool_()),
        ("d", pa.decimal128(3, 0)),
        ("t", UTC_MICROS),
        ("l", pa.list_(pa.int32())),
    ]
)
SOURCE = schemas(_1=SCHEMA)
ROW = {
    "n": 5,
    "s": "é",
    "u": 6,
    "e": "B",
    "b": True,
    "d": Decimal("-7"),
    "t": MOMENT,
    "l": [1, 2],
}
GOOD = framed(body(SCHEMA, {**ROW, "skipped": b"x"}))
NULLS = dict.fromkeys(ROW)

N, S, U, E, B, D, T, L, SKIPPED = (  # one good field each
    b"\x0a", b"\x04\xc3\xa9", b"\x02\x0c", b"\x02", b"\x01", b"\x02\xf9", b"\x02", b"\x00", b"\x00"
)  # fmt: skip
TEN = b"\xff" * 9

MALFORMED = [
    (b"", "0 bytes"),
    (b"\0\0\0\0", "4 bytes"),
    (b"{}   ", "0x7b"),
    (framed(b"", 404), "schema id is 404, which is unknown"),
    (framed(b"", -1), "schema id is -1, which is unknown"),
    (framed(b""), "'n'.*ends inside"),
    (GOOD[:-1], "'skipped'.*ends inside"),
    (GOOD + b"xy", "2 bytes are left over"),
    (framed(TEN + b"\x02"), "'n'.*64 bits"),
    (framed(TEN + b"\x80\x00"), "'n'.*64 bits"),
    (framed(b"\xfe\xff\xff\xff\x1f"), "'n'.*4294967295 is no 32-bit int"),
    (framed(N + b"\x01"), "'s'.*length is -1"),
    (framed(N + TEN + b"\x01"), "'s'.*length is -9223372036854775808"),
    (framed(N + b"\xfe" + TEN[2:] + b"\x7e"), "'s'.*ends inside"),
    (framed(N + b"\x04\xc3\x28"), "'s'.*UTF-8"),
    (framed(N + b"\x14" + b"x" * 9 + b"\xff"), "'s'.*UTF-8"),
    (framed(N + S + b"\x04"), "'u'.*no branch of index 2"),
    (framed(N + S + b"\x01"), "'u'.*no branch of index -1"),
    (framed(N + S + U + b"\x04"), "'e'.*no symbol of index 2"),
    (framed(N + S + U + b"\x01"), "'e'.*no symbol of index -1"),
    (framed(N + S + U + E + b"\x02"), "'b'.*byte 2"),
    (framed(N + S + U + E + B + b"\x00"), "'d'.*no bytes"),
    (framed(N + S + U + E + B + b"\x04\x03\xe8"), "'d'.*more digits"),
    (framed(N + S + U + E + B + b"\x04\xfc\x18"), "'d'.*more digits"),
    (framed(N + S + U + E + B + b"\x22\x01" + b"\x00" * 16), "'d'.*more digits"),
    (framed(N + S + U + E + B + b"\x22\xfe" + b"\xff" * 16), "'d'.*more digits"),
    (framed(N + S + U + E + B + D + TEN + b"\x01"), "'t'.*beyond a timestamp"),
    (framed(N + S + U + E + B + D + T + b"\x64\x02"), "'l'.*50 items"),
    (framed(N + S + U + E + B + D + T + TEN + b"\x01\x02\x02"), "'l'.*items"),
    (framed(N + S + U + E + B + D + T + b"\x01\x01\x02\x00"), "'l'.*length is -1"),
    (framed(N + S + U + E + B + D + T + b"\x04\x02\x02"), "'l'.*ends inside"),
    (framed(N + S + U + E + B + D + T + L + b"\x01"), "'skipped'.*length is -1"),
]


def test_the_pieces_that_malformed_records_are_made_of_are_good_ones():
    parsed = parse([framed(N + S + U + E + B + D + T + L + SKIPPED)], COLUMNS, SOURCE)

    assert parsed.columns.num_rows == 1


@pytest.mark.parametrize(("value", "reason"), MALFORMED)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_malformed_record_is_a_row_of_nulls_and_its_neighbours_stay(value, reason, place):
    values, expected = [GOOD, GOOD], [ROW, ROW]
    values.insert(place, value)
    expected.insert(place, NULLS)

    parsed = parse(values, COLUMNS, SOURCE, "permissive")

    assert parsed.columns.to_pylist() == expected
    assert parsed.rows is None
    assert list(parsed.reasons) == [place]
    with pytest.raises(RecordError, match=f"(?s){reason}"):
        raise RecordError(parsed.reasons[place])


@pytest.mark.parametrize(("value", "reason"), MALFORMED)
def test_failfast_names_the_first_malformed_record(value, reason):
    with pytest.raises(RecordError, match=f"(?s)topic t, partition 3, offset 1002: .*{reason}"):
        parse([GOOD, None, value, b"other"], COLUMNS, SOURCE)


@pytest.mark.parametrize("mode", ["dropmalformed", "deadletter"])
def test_malformed_records_are_left_out_with_their_reasons(mode):
    values = [GOOD, None]
    for value, _ in MALFORMED:
        values += [value, GOOD]

    parsed = parse(values, COLUMNS, SOURCE, mode)

    assert parsed.columns.to_pylist() == [ROW, NULLS] + [ROW] * len(MALFORMED)
    assert parsed.rows is not None
    assert [row for row in range(len(values)) if row not in parsed.reasons] == parsed.rows.tolist()


def test_a_malformed_record_leaves_no_items_behind():
    """Its lists were written before it turned out malformed."""
    schema = record(("l", {"type": "array", "items": "string"}), ("z", "int"))
    good = framed(body(schema, {"l": ["a", "b"], "z": 1}))
    source = schemas(_1=schema)
    columns = pa.schema([("l", pa.list_(pa.string()))])

    parsed = parse([good, good[:-1], good], columns, source, "permissive")

    assert parsed.columns.column(0).to_pylist() == [["a", "b"], None, ["a", "b"]]
    assert len(parsed.columns.column(0).flatten()) == 4


def test_a_long_malformed_record_is_shown_in_part():
    with pytest.raises(RecordError, match=r"\(3000 bytes\)"):
        parse([b"\1" * 3000], COLUMNS, SOURCE)


def test_a_reader_travels_small():
    reader = AvroReader(COLUMNS, SOURCE)

    assert pickle.loads(pickle.dumps(reader)) == reader  # noqa: S301  our own bytes
    assert len(pickle.dumps(reader)) < 3000


# ---- random schemas and records, against fastavro ----


def timestamps(unit: timedelta) -> st.SearchStrategy[datetime]:
    start = datetime(1970, 1, 1, tzinfo=UTC)
    return st.integers(-(10**10), 10**10).map(lambda count: start + count * unit)


Leaf = tuple[Any, pa.DataType, st.SearchStrategy[Any]]
LEAVES: list[Leaf] = [
    ("boolean", pa.bool_(), st.booleans()),
    ("int", pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    ("int", pa.int64(), st.integers(-(2**31), 2**31 - 1)),
    ("long", pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    ("float", pa.float32(), st.floats(width=32, allow_nan=False)),
    ("float", pa.float64(), st.floats(width=32, allow_nan=False)),
    ("double", pa.float64(), st.floats(allow_nan=False)),
    ("string", pa.string(), st.text(max_size=20)),
    ("bytes", pa.binary(), st.binary(max_size=20)),
    (ENUM, pa.string(), st.sampled_from(["A", "B"])),
    (FIXED, pa.binary(), st.binary(min_size=3, max_size=3)),
    (logical("int", "date"), pa.date32(), st.dates()),
    (logical("long", "timestamp-millis"), UTC_MICROS, timestamps(timedelta(milliseconds=1))),
    (logical("long", "timestamp-micros"), UTC_MICROS, timestamps(timedelta(microseconds=1))),
    (
        decimal(20, 3),
        pa.decimal128(20, 3),
        st.decimals(-(10**16), 10**16, places=3, allow_nan=False),
    ),
]


def nullable(leaf: Leaf) -> list[Leaf]:
    kind, arrow, values = leaf
    return [
        (kind_or_null, arrow, st.none() | values)
        for kind_or_null in (["null", kind], [kind, "null"])
    ]


FIELDS = [field for leaf in LEAVES for field in (leaf, *nullable(leaf))]


def nested(items: st.SearchStrategy[Leaf]) -> st.SearchStrategy[Leaf]:
    """Lists of what there is, nullable or not; and records of two of it."""
    lists = items.map(
        lambda leaf: (
            {"type": "array", "items": leaf[0]},
            pa.list_(leaf[1]),
            st.lists(leaf[2], max_size=4),
        )
    )
    return lists.flatmap(lambda leaf: st.sampled_from([leaf, *nullable(leaf)]))


def distinct_names(kind: Any, suffix: str) -> Any:
    """The type with names of its own: a name may be defined once."""
    if isinstance(kind, list):
        return [distinct_names(member, suffix) for member in kind]
    if not isinstance(kind, dict):
        return kind
    changed = {name: distinct_names(member, suffix) for name, member in kind.items()}
    return {**changed, "name": kind["name"] + suffix} if "name" in kind else changed


def check_against_fastavro(fields: list[Leaf], data: st.DataObject) -> None:
    schema = record(
        *((f"f{i}", distinct_names(kind, str(i))) for i, (kind, _, _) in enumerate(fields))
    )
    row = st.fixed_dictionaries({f"f{i}": values for i, (_, _, values) in enumerate(fields)})
    rows = data.draw(st.lists(row, max_size=5), label="rows")
    names = st.sampled_from([f"f{i}" for i in range(len(fields))])
    wanted = data.draw(st.lists(names, min_size=1, unique=True), label="columns")
    columns = pa.schema([(name, fields[int(name[1:])][1]) for name in wanted])
    parsed_schema = fastavro.parse_schema(schema)
    bodies = [body(schema, record) for record in rows]
    decoded = [fastavro.schemaless_reader(io.BytesIO(encoded), parsed_schema) for encoded in bodies]

    parsed = parse([framed(encoded) for encoded in bodies], columns, schemas(_1=schema))

    assert parsed.columns.to_pylist() == [
        {name: record[name] for name in wanted} for record in decoded
    ]


@given(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=8), st.data())
@settings(deadline=None)  # the first run compiles
def test_flat_records_are_what_fastavro_reads(fields, data):
    check_against_fastavro(fields, data)


@given(
    st.lists(
        st.recursive(st.sampled_from(FIELDS), nested, max_leaves=4), min_size=1, max_size=4
    ),
    st.data(),
)  # fmt: skip
@drawn(60)
def test_nested_records_are_what_fastavro_reads(fields, data):
    check_against_fastavro(fields, data)


# ---- damage ----


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A good value with some bytes changed, cut out or put in."""
    value = bytearray(GOOD)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(value)))
        length = draw(st.integers(0, 3))
        odd = st.sampled_from([0, 1, 2, 0x7F, 0x80, 0xFF]) | st.integers(0, 255)
        value[at : at + length] = bytes(draw(st.lists(odd, max_size=12)))
    return bytes(value)


@given(st.lists(damaged(), min_size=1, max_size=6))
@drawn(300)
def test_damage_never_reaches_a_neighbour(values):
    """And what becomes of a damaged value does not depend on what stands beside it."""
    between: list[bytes | None] = [GOOD]
    for value in values:
        between += [value, GOOD]

    parsed = parse(between, COLUMNS, SOURCE, "permissive")

    good = parse([GOOD], COLUMNS, SOURCE).columns
    for row in range(0, len(between), 2):
        assert parsed.columns.slice(row, 1) == good
    for row in range(1, len(between), 2):
        alone = parse([between[row]], COLUMNS, SOURCE, "permissive")
        assert parsed.columns.slice(row, 1) == alone.columns
        assert parsed.reasons.get(row) == alone.reasons.get(0)


@given(st.lists(damaged(), min_size=1, max_size=6))
@settings(deadline=None)
def test_what_passes_is_the_same_once_an_encoder_has_written_it(values):
    """Nothing is read that the type cannot hold; damage that passes is another good record."""
    columns = COLUMNS.set(COLUMNS.get_field_index("t"), pa.field("t", pa.int64()))  # any number
    parsed = parse(values, columns, SOURCE, "deadletter")
    rows = parsed.columns.to_pylist()
    again: list[bytes | None] = [framed(body(SCHEMA, {**row, "skipped": b""})) for row in rows]

    assert parse(again, columns, SOURCE).columns == parsed.columns


@pytest.mark.parametrize("more", [0, 3, 40], ids=["alone", "among few", "among many"])
def test_of_two_entries_of_one_key_the_last_counts(more: int) -> None:
    schema = record(("m", {"type": "map", "values": "long"}), ("z", "int"))
    others = b"".join(bytes([4, 0x62, 0x30 + number]) + b"\x00" for number in range(more))
    twice = bytes([2 * 2]) + b"\x02a\x0a" + b"\x02a\x0c"
    block = bytes([2 * more]) + others if more else b""
    rest = b"\x00\x12"
    once = b"\x02" + b"\x02a\x0a"
    values = [framed(twice + block + rest), framed(once + block + rest), None, framed(rest)]
    columns = pa.schema([("m", pa.map_(pa.string(), pa.int64())), ("z", pa.int32())])
    whole = parse(values, columns, schemas(_1=schema)).columns
    whole.validate(full=True)
    rows_read = whole.to_pylist()
    reference = fastavro.schemaless_reader(io.BytesIO(values[0][5:]), schema)
    assert dict(rows_read[0]["m"]) == reference["m"]
    assert [len(row["m"] or ()) for row in rows_read] == [1 + more, 1 + more, 0, 0]
    assert dict(rows_read[1]["m"])["a"] == 5
    assert [row["z"] for row in rows_read] == [9, 9, None, 9]


@pytest.mark.parametrize(
    "items",
    [
        "null",
        record(name="e"),
        record(("n", "null"), name="e"),
        {"type": "fixed", "name": "f", "size": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "skipped",
    [b"\x00", b"\x06\x00", b"\x05\x00\x00", b"\x06\x02\x05\x00\x00", b"\xff" * 9 + b"\x01\x00\x00"],
    ids=["none", "a block", "a block with its size", "blocks", "2^63 items"],
)
def test_an_array_of_items_without_bytes_is_skipped_by_its_counts(
    items: Any, skipped: bytes
) -> None:
    schema = record(
        ("a", "int"),
        ("skipped", {"type": "array", "items": items}),
        ("z", "int"),
    )
    values = [framed(b"\x02" + skipped + b"\x12"), framed(b"\x04\x02"), framed(b"\x02\x05\x7e")]
    columns = pa.schema([("a", pa.int32()), ("z", pa.int32())])
    parsed = parse(values, columns, schemas(_1=schema), "permissive")
    assert parsed.columns.to_pylist()[0] == {"a": 1, "z": 9}
    assert list(parsed.reasons) == [1, 2]
    inner = record(
        ("l", {"type": "array", "items": {"type": "array", "items": items}}), ("z", "int")
    )
    values = [framed(b"\x04" + skipped * 2 + b"\x00\x12")]
    parsed = parse(values, columns, schemas(_1=inner))
    assert parsed.columns.to_pylist() == [{"a": None, "z": 9}]
