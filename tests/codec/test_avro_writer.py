"""The writer against fastavro, an independent encoder and decoder."""

import io
import json
import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.codec.avro import writer
from tallystick.codec.avro.writer import AvroWriter
from tallystick.errors import OptionError, RecordError
from tests.examples import drawn

UTC_MICROS = pa.timestamp("us", tz="UTC")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
DATES = st.datetimes()
MILLIS = DATES.map(lambda at: at.replace(microsecond=at.microsecond // 1000 * 1000))


def integers(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def zoned(at: datetime) -> datetime:
    return at.replace(tzinfo=UTC)


def logical(carrier: str, name: str, **more: Any) -> dict[str, Any]:
    return {"type": carrier, "logicalType": name, **more}


Kind = tuple[Any, pa.DataType, st.SearchStrategy[Any]]
SCALARS: list[Kind] = [
    ("boolean", pa.bool_(), st.booleans()),
    ("int", pa.int32(), integers(32)),
    ("int", pa.int8(), integers(8)),
    ("long", pa.int64(), integers(64)),
    ("long", pa.uint32(), st.integers(0, 2**32 - 1)),
    ("float", pa.float32(), st.floats(width=32, allow_nan=False)),
    ("double", pa.float64(), st.floats(allow_nan=False)),
    ("double", pa.float32(), st.floats(width=32, allow_nan=False)),
    ("string", pa.string(), TEXT),
    ("string", pa.large_string(), TEXT),
    ("string", pa.dictionary(pa.int8(), pa.string()), TEXT),
    ("string", pa.string_view(), TEXT),
    ("bytes", pa.binary(), st.binary(max_size=70)),
    ("bytes", pa.large_binary(), st.binary(max_size=70)),
    ("bytes", pa.binary(3), st.binary(min_size=3, max_size=3)),
    (logical("long", "timestamp-micros"), pa.timestamp("ms", "UTC"), MILLIS.map(zoned)),
    (logical("int", "date"), pa.date32(), st.dates()),
    (logical("long", "timestamp-micros"), UTC_MICROS, DATES.map(zoned)),
    (logical("long", "timestamp-millis"), UTC_MICROS, MILLIS.map(zoned)),
    (logical("long", "local-timestamp-micros"), pa.timestamp("us"), DATES),
    (
        logical("bytes", "decimal", precision=38, scale=4),
        pa.decimal128(20, 3),
        st.decimals(-(10**16), 10**16, places=3),
    ),
]


def union(kind: Kind, null_first: bool) -> Kind:
    schema, arrow, values = kind
    branches = ["null", schema] if null_first else [schema, "null"]
    return (branches, arrow, st.none() | values)


def nested(inner: st.SearchStrategy[Kind]) -> st.SearchStrategy[Kind]:
    maybe_null = inner | st.tuples(inner, st.booleans()).map(
        lambda drawn: drawn[0] if isinstance(drawn[0][0], list) else union(*drawn)
    )
    lists = st.tuples(maybe_null, st.sampled_from([pa.list_, pa.large_list])).map(
        lambda drawn: (
            {"type": "array", "items": drawn[0][0]},
            drawn[1](drawn[0][1]),
            st.lists(drawn[0][2], max_size=3),
        )
    )
    maps = maybe_null.map(
        lambda kind: (
            {"type": "map", "values": kind[0]},
            pa.map_(pa.string(), kind[1]),
            st.dictionaries(TEXT, kind[2], max_size=3),
        )
    )
    return lists | maps | st.lists(maybe_null, min_size=1, max_size=3).map(struct_of)


def struct_of(kinds: list[Kind]) -> Kind:
    names = [f"f{index}" for index in range(len(kinds))]
    schema = {
        "type": "record",
        "name": "unnamed",
        "fields": [{"name": n, "type": k[0]} for n, k in zip(names, kinds, strict=True)],
    }
    arrow = pa.struct([(name, kind[1]) for name, kind in zip(names, kinds, strict=True)])
    values = st.fixed_dictionaries({n: k[2] for n, k in zip(names, kinds, strict=True)})
    return schema, arrow, values


def with_names(schema: Any, path: str = "r") -> Any:
    """Give each record a name of its own."""
    if isinstance(schema, list):
        return [with_names(member, path) for member in schema]
    if not isinstance(schema, dict):
        return schema
    named = {key: with_names(value, f"{path}_{key}") for key, value in schema.items()}
    if schema.get("type") == "record":
        named["name"] = path
        named["fields"] = [
            {"name": field["name"], "type": with_names(field["type"], f"{path}_{field['name']}")}
            for field in schema["fields"]
        ]
    return named


KINDS = st.recursive(st.sampled_from(SCALARS), nested, max_leaves=5)
RECORDS = st.lists(
    KINDS
    | st.tuples(KINDS, st.booleans()).map(
        lambda drawn: drawn[0] if isinstance(drawn[0][0], list) else union(*drawn)
    ),
    min_size=1,
    max_size=4,
).map(struct_of)


def read(schema: Any, values: pa.Array, schema_id: int = 7) -> list[Any]:
    parsed = fastavro.parse_schema(schema)
    records = []
    for value in values.to_pylist():
        assert value[:5] == b"\0" + schema_id.to_bytes(4, "big")
        body = io.BytesIO(value[5:])
        records.append(fastavro.schemaless_reader(body, parsed, None))
        assert not body.read()
    return records


def columns_of(arrow: pa.DataType, rows: list[Any]) -> pa.RecordBatch:
    struct = pa.array(rows, arrow)
    return pa.RecordBatch.from_struct_array(struct)


@given(st.data())
@drawn(150)
def test_fastavro_reads_what_was_written(data):
    schema, arrow, strategy = data.draw(RECORDS)
    schema = with_names(schema)
    rows = data.draw(st.lists(strategy, min_size=1, max_size=6))
    columns = columns_of(arrow, rows)
    first = data.draw(st.integers(0, len(rows) - 1))

    values = AvroWriter(7, (json.dumps(schema),)).write(columns.slice(first))

    assert read(schema, values) == rows[first:]


def written(schema: Any, columns: pa.RecordBatch) -> list[Any]:
    text = json.dumps(schema)
    AvroWriter(7, (text,)).check(columns.schema)
    return read(schema, AvroWriter(7, (text,)).write(columns))


def record(*fields: tuple[str, Any]) -> dict[str, Any]:
    named = [{"name": name, "type": kind} for name, kind in fields]
    return {"type": "record", "name": "r", "fields": named}


def batch(**columns: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def test_fields_are_found_by_name_and_one_that_may_be_null_needs_no_column():
    schema = record(("a", "int"), ("gone", ["string", "null"]), ("nothing", "null"), ("b", "long"))
    columns = batch(b=pa.array([2]), a=pa.array([1], pa.int32()))

    assert written(schema, columns) == [{"a": 1, "gone": None, "nothing": None, "b": 2}]


def test_an_enum_and_a_fixed_are_written_from_text_and_bytes():
    enum = {"type": "enum", "name": "e", "symbols": ["RED", "BLUE"]}
    fixed = {"type": "fixed", "name": "f", "size": 3}
    schema = record(("e", ["null", enum]), ("f", fixed))
    columns = batch(e=pa.array(["BLUE", None]), f=pa.array([b"abc", b"xyz"]))

    assert written(schema, columns) == [{"e": "BLUE", "f": b"abc"}, {"e": None, "f": b"xyz"}]


@pytest.mark.parametrize("size", [4, 9, 16, 20])
def test_a_decimal_fills_its_fixed_with_the_sign(size):
    fixed = {"type": "fixed", "name": "f", "size": size, "logicalType": "decimal", "precision": 9}
    numbers = [Decimal(n) for n in (0, 1, -1, 127, 128, -128, -129, 999999999, -999999999)]
    columns = batch(d=pa.array(numbers, pa.decimal128(9, 0)))

    assert [row["d"] for row in written(record(("d", fixed)), columns)] == numbers


def test_a_decimal_takes_the_least_bytes_as_javas_big_integer_does():
    schema = record(("d", logical("bytes", "decimal", precision=38)))
    numbers = [0, 127, 128, -128, -129, 10**38 - 1, 1 - 10**38]
    columns = batch(d=pa.array([Decimal(n) for n in numbers], pa.decimal128(38, 0)))

    values = AvroWriter(7, (json.dumps(schema),)).write(columns)

    least = [
        next(s for s in range(1, 17) if -(2 ** (8 * s - 1)) <= n < 2 ** (8 * s - 1))
        for n in numbers
    ]
    assert [len(value) - 6 for value in values.to_pylist()] == least


def test_not_a_number_and_infinities_are_numbers_of_avro():
    schema = record(("f", "float"), ("d", "double"))
    odd = [math.nan, math.inf, -math.inf, -0.0]
    rows = written(schema, batch(f=pa.array(odd, pa.float32()), d=pa.array(odd)))

    assert [repr(row["f"]) for row in rows] == [repr(row["d"]) for row in rows]
    assert [repr(row["d"]) for row in rows] == ["nan", "inf", "-inf", "-0.0"]


def test_a_list_that_is_null_may_cover_items():
    lists = pa.ListArray.from_arrays(
        pa.array([0, 2, 4]), pa.array([1, 2, 3, None]), mask=pa.array([False, True])
    )
    schema = record(("a", ["null", {"type": "array", "items": "long"}]))

    assert written(schema, batch(a=lists)) == [{"a": [1, 2]}, {"a": None}]


def test_records_far_larger_than_the_first_guess_get_more_room():
    schema = record(("a", {"type": "array", "items": "boolean"}), ("s", "string"))
    rows = [([True] * 100_000, "x" * 50), ([], ""), ([False] * 300_000, "y" * 100_000)]
    columns = batch(a=pa.array([a for a, _ in rows]), s=pa.array([s for _, s in rows]))

    assert written(schema, columns) == [{"a": a, "s": s} for a, s in rows]


def test_the_nulls_behind_a_null_record_are_none_of_a_required_field():
    inner = {"type": "record", "name": "i", "fields": [{"name": "n", "type": "long"}]}
    structs = pa.StructArray.from_arrays(
        [pa.array([1, None])], names=["n"], mask=pa.array([False, True])
    )

    assert written(record(("s", ["null", inner])), batch(s=structs)) == [
        {"s": {"n": 1}},
        {"s": None},
    ]


@pytest.mark.parametrize(
    ("field", "column", "message"),
    [
        ("int", pa.array([1]), "column 'a' is of type int64, and the Avro schema has it as int"),
        ("long", pa.array([1], pa.uint64()), "column 'a' is of type uint64"),
        ("float", pa.array([1.0]), "as float: cast it"),
        ("string", pa.array([b"x"]), "column 'a' is of type binary"),
        ("string", pa.array([None]), "column 'a' is of type null"),
        (logical("long", "timestamp-micros"), pa.array([1], pa.timestamp("us")), "timestamp[us]"),
        (["null", "int", "string"], pa.array(["x"]), "only unions of null and one other type"),
        ({"type": "array", "items": "int"}, pa.array([[1]]), "column 'a[]' is of type int64"),
        (logical("bytes", "decimal", precision=5, scale=2), pa.array([Decimal("1.234")]), "(4, 3)"),
        ("null", pa.array([1]), "as null"),
        (record(("x", "int")), pa.array([{"y": 1}]), "column 'a.y' would be lost"),
        (record(("x", "int")), pa.array([{}], pa.struct([])), "no column 'a.x'"),
    ],
)
def test_a_column_that_does_not_fit_is_refused_before_there_are_rows(field, column, message):
    columns = batch(a=column)
    field = {**field, "name": "inner"} if "fields" in field else field

    with pytest.raises(OptionError) as refused:
        AvroWriter(7, (json.dumps(record(("a", field))),)).check(columns.schema)
    assert message in str(refused.value)


def test_a_column_without_a_field_and_a_field_without_a_column_are_refused():
    one = AvroWriter(7, (json.dumps(record(("a", "long"))),))

    with pytest.raises(OptionError, match=r"column 'b' would be lost.*only \['a'\]"):
        one.check(pa.schema([("a", pa.int64()), ("b", pa.int64())]))
    with pytest.raises(OptionError, match="no column 'a'"):
        one.check(pa.schema([]))
    with pytest.raises(OptionError, match="column 'a' is there twice"):
        one.check(pa.schema([("a", pa.int64()), ("a", pa.int64())]))
    with pytest.raises(OptionError, match="of type string, and rows need a record"):
        AvroWriter(7, ('"string"',)).check(pa.schema([("a", pa.int64())]))


@pytest.mark.parametrize(
    ("field", "column", "message"),
    [
        ("long", pa.array([1, None]), "row 1 of a batch, column 'a': it is null"),
        (
            {"type": "array", "items": "long"},
            pa.array([[1], [2, None]]),
            "column 'a[]': it is null",
        ),
        ({"type": "enum", "name": "e", "symbols": ["A"]}, pa.array(["A", "B"]), "none of the sym"),
        ({"type": "fixed", "name": "f", "size": 2}, pa.array([b"ab", b"abc"]), "not as many bytes"),
        (
            {"type": "fixed", "name": "f", "size": 1, "logicalType": "decimal", "precision": 9},
            pa.array([Decimal(1), Decimal(128)], pa.decimal128(9, 0)),
            "needs more bytes",
        ),
        (
            logical("long", "local-timestamp-millis"),
            pa.array([1000, 1001], pa.timestamp("us")),
            "holds a time that the Avro schema's local-timestamp-millis as long cannot",
        ),
    ],
)
def test_a_value_that_its_field_cannot_hold_is_an_error_that_names_it(field, column, message):
    one = AvroWriter(7, (json.dumps(record(("a", field))),))
    one.check(batch(a=column).schema)

    with pytest.raises(RecordError) as failed:
        one.write(batch(a=column))
    assert message in str(failed.value)


def test_an_empty_batch_is_no_values():
    assert written(record(("a", "long")), batch(a=pa.array([], pa.int64()))) == []


def test_the_id_of_the_schema_stands_before_each_record():
    writer.warm_up()
    value = AvroWriter(0x01020304, (json.dumps(record(("d", logical("int", "date")))),)).write(
        batch(d=pa.array([date(2024, 2, 29)]))
    )

    assert value.to_pylist() == [b"\0\x01\x02\x03\x04\x8c\xb5\x02"]
