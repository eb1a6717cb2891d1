"""Protobuf against Google's own package, an independent encoder and decoder."""

import math
import pickle
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from tallystick.codec import wire_format
from tallystick.codec.protobuf.reader import ProtobufReader
from tallystick.codec.protobuf.schema import indexes_as_bytes, path_of
from tallystick.codec.protobuf.writer import ProtobufWriter
from tallystick.codec.wire_format import SchemaError, SchemaTexts
from tallystick.errors import OptionError, RecordError
from tallystick.state.schema import schema_of
from tests.examples import drawn
from tests.protobuf_schemas import SCALARS, add_field, add_map, classes_of, shop, text_of

SHOP = shop()
TEXTS = (text_of(SHOP),)
ORDER = classes_of(SHOP)["Order"]
HEADER = b"\0\0\0\0\5"
DDL_OF = {
    "double": "double",
    "float": "float",
    "int64": "bigint",
    "uint64": "decimal(20,0)",
    "int32": "int",
    "fixed64": "decimal(20,0)",
    "fixed32": "bigint",
    "bool": "boolean",
    "string": "string",
    "bytes": "binary",
    "uint32": "bigint",
    "sfixed32": "int",
    "sfixed64": "bigint",
    "sint32": "int",
    "sint64": "bigint",
}
SUB = "struct<item:string,count:int,tags:array<string>>"
LINE = f"struct<item:string,count:int,tags:array<string>,sub:{SUB}>"
COLUMNS = [
    *(f"a_{kind} {DDL_OF[kind]}" for kind in SCALARS),
    *(f"maybe_{kind} {DDL_OF[kind]}" for kind in SCALARS),
    *(f"many_{kind} array<{DDL_OF[kind]}>" for kind in SCALARS),
    "color string",
    "colors array<string>",
    f"line {LINE}",
    f"lines array<{LINE}>",
    "prices map<string,double>",
    f"stock map<bigint,{SUB}>",
    "at timestamp",
    "times array<timestamp>",
    "boxed string",
    "cash bigint",
    "card string",
    f"gift {SUB}",
]
ALL = schema_of(", ".join(COLUMNS), "value.schema")


class Schemas:
    """A registry with one schema, of id 5."""

    def __init__(self, texts: SchemaTexts = TEXTS) -> None:
        self.texts = texts

    def schema(self, schema_id: int) -> SchemaTexts | None:
        return self.texts if schema_id == 5 else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schemas)


def where(row: int) -> str:
    return f"topic t, partition 0, offset {row}"


def reader(ddl: str | pa.Schema, texts: SchemaTexts = TEXTS) -> ProtobufReader:
    schema = ddl if isinstance(ddl, pa.Schema) else schema_of(ddl, "value.schema")
    return ProtobufReader(schema, Schemas(texts))


def framed(messages: Sequence[Any], indexes: bytes = b"\0") -> pa.Array:
    bodies = [
        message if isinstance(message, bytes) else message.SerializeToString()
        for message in messages
    ]
    return pa.array([HEADER + indexes + body for body in bodies], pa.binary())


def read(ddl: str | pa.Schema, messages: Sequence[Any], texts: SchemaTexts = TEXTS) -> list[Any]:
    parsed = reader(ddl, texts).parse(framed(messages), "failfast", where)
    parsed.columns.validate(full=True)
    return parsed.columns.to_pylist()


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SIGNED = {bits: st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (32, 64)}
UNSIGNED = {bits: st.integers(0, 2**bits - 1) for bits in (32, 64)}
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "double": st.floats(allow_nan=False),
    "float": st.floats(width=32, allow_nan=False),
    "bool": st.booleans(),
    "string": TEXT,
    "bytes": st.binary(max_size=40),
    **{
        kind: (UNSIGNED if kind[0] in "uf" and kind != "float" else SIGNED)[
            64 if kind.endswith("64") else 32
        ]
        for kind in SCALARS
        if kind[-2:] in ("32", "64")
    },
}
TIMES = st.datetimes().map(lambda at: at.replace(tzinfo=UTC))
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def line_dicts(depth: int) -> st.SearchStrategy[dict[str, Any]]:
    parts: dict[str, Any] = {
        "item": TEXT,
        "count": st.none() | SIGNED[32],
        "tags": st.lists(TEXT, max_size=3),
    }
    if depth:
        parts["sub"] = st.none() | line_dicts(depth - 1)
    return st.fixed_dictionaries(parts)


COLORS = st.sampled_from(["NONE", "RED", "BLUE", "DARK"])
ROWS = st.fixed_dictionaries(
    {
        **{f"a_{kind}": VALUES[kind] for kind in SCALARS},
        **{f"maybe_{kind}": st.none() | VALUES[kind] for kind in SCALARS},
        **{f"many_{kind}": st.lists(VALUES[kind], max_size=4) for kind in SCALARS},
        "color": COLORS,
        "colors": st.lists(COLORS, max_size=4),
        "line": st.none() | line_dicts(1),
        "lines": st.lists(line_dicts(1), max_size=3),
        "prices": st.dictionaries(TEXT, st.floats(allow_nan=False), max_size=3),
        "stock": st.dictionaries(SIGNED[64], line_dicts(0), max_size=3),
        "at": st.none() | TIMES,
        "times": st.lists(TIMES, max_size=2),
        "boxed": st.none() | TEXT,
        "paid": st.none()
        | st.tuples(st.just("cash"), SIGNED[64])
        | st.tuples(st.just("card"), TEXT)
        | st.tuples(st.just("gift"), line_dicts(0)),
    }
)


def fill_line(line: Any, row: dict[str, Any]) -> None:
    line.SetInParent()
    line.item = row["item"]
    if row["count"] is not None:
        line.count = row["count"]
    line.tags.extend(row["tags"])
    if row.get("sub") is not None:
        fill_line(line.sub, row["sub"])


def fill_time(stamp: Any, at: datetime) -> None:
    micros = (at - EPOCH) // timedelta(microseconds=1)
    stamp.seconds, stamp.nanos = micros // 10**6, micros % 10**6 * 1000


def order_of(row: dict[str, Any]) -> Any:
    """Return Google's message of a row."""
    order = ORDER()
    for kind in SCALARS:
        setattr(order, f"a_{kind}", row[f"a_{kind}"])
        if row[f"maybe_{kind}"] is not None:
            setattr(order, f"maybe_{kind}", row[f"maybe_{kind}"])
        getattr(order, f"many_{kind}").extend(row[f"many_{kind}"])
    order.color = row["color"]
    order.colors.extend(row["colors"])
    if row["line"] is not None:
        fill_line(order.line, row["line"])
    for line in row["lines"]:
        fill_line(order.lines.add(), line)
    order.prices.update(row["prices"])
    for key, value in row["stock"].items():
        fill_line(order.stock[key], value)
    if row["at"] is not None:
        fill_time(order.at, row["at"])
    for time in row["times"]:
        fill_time(order.times.add(), time)
    if row["boxed"] is not None:
        order.boxed.value = row["boxed"]
    match row["paid"]:
        case ("gift", value):
            fill_line(order.gift, value)
        case (name, value):
            setattr(order, name, value)
    return order


def columns_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return what a row is as columns."""
    members = {
        **row,
        "prices": sorted(row["prices"].items()),
        "stock": sorted(row["stock"].items()),
    }
    paid = members.pop("paid") or ("", None)
    return {
        **members,
        **{name: paid[1] if paid[0] == name else None for name in ("cash", "card", "gift")},
    }


def sorted_maps(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without what has no meaning: the order of a map, the type of a number."""
    stock = sorted((key, value) for key, value in row["stock"])
    members = {**row, "prices": sorted(row["prices"]), "stock": stock}
    for kind in ("uint64", "fixed64"):
        members[f"a_{kind}"] = int(row[f"a_{kind}"])
        members[f"many_{kind}"] = [int(number) for number in row[f"many_{kind}"]]
        if row[f"maybe_{kind}"] is not None:
            members[f"maybe_{kind}"] = int(row[f"maybe_{kind}"])
    return members


@drawn(150)
@given(st.lists(ROWS, min_size=1, max_size=4))
def test_messages_of_another_writer_are_read(rows: list[dict[str, Any]]) -> None:
    rows_read = read(ALL, [order_of(row) for row in rows])
    assert [sorted_maps(row) for row in rows_read] == [columns_of(row) for row in rows]


@drawn(150)
@given(st.lists(ROWS, min_size=1, max_size=4))
def test_what_is_written_is_read_by_another_reader(rows: list[dict[str, Any]]) -> None:
    batch = pa.RecordBatch.from_pylist([columns_of(row) for row in rows], schema=ALL)
    written = ProtobufWriter(5, TEXTS).write(batch)
    for value, row in zip(written.to_pylist(), rows, strict=True):
        assert value[:6] == HEADER + b"\0"
        assert ORDER.FromString(value[6:]) == order_of(row)


@drawn(300)
@given(ROWS, st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=3))
def test_damaged_messages_are_not_read_differently(
    row: dict[str, Any], damage: list[tuple[int, int]]
) -> None:
    body = bytearray(order_of(row).SerializeToString(deterministic=True))
    for place, byte in damage:
        if body:
            body[place % len(body)] = byte
    parsed = reader(ALL).parse(framed([bytes(body), order_of(row)]), "permissive", where)
    assert sorted_maps(parsed.columns.to_pylist()[1]) == columns_of(row), "the neighbour is read"
    try:
        theirs = ORDER.FromString(bytes(body))
    except DecodeError:
        assert 0 in parsed.reasons, f"read, and theirs refuses it: {bytes(body)!r}"
        return
    if 0 not in parsed.reasons:
        again = reader(ALL).parse(framed([theirs]), "failfast", where)
        assert same(again.columns.to_pylist()[0], parsed.columns.to_pylist()[0])


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return repr(sorted_maps(one)) == repr(sorted_maps(other))


def test_a_message_in_pieces_is_merged_and_the_last_member_of_a_oneof_counts() -> None:
    first = ORDER(a_int64=1, cash=5, many_int32=[1, 2])
    first.line.item, first.line.count = "a", 3
    first.line.tags.append("x")
    second = ORDER(a_int64=2, card="c", many_int32=[3])
    second.line.item = "b"
    second.line.tags.append("y")
    ddl = f"a_int64 bigint, line {LINE}, cash bigint, card string, many_int32 array<int>"
    body = first.SerializeToString() + second.SerializeToString()
    merged = ORDER.FromString(body)
    assert read(ddl, [first, body]) == [
        {
            "a_int64": 1,
            "line": {"item": "a", "count": 3, "tags": ["x"], "sub": None},
            "cash": 5,
            "card": None,
            "many_int32": [1, 2],
        },
        {
            "a_int64": 2,
            "line": {"item": "b", "count": 3, "tags": ["x", "y"], "sub": None},
            "cash": None,
            "card": "c",
            "many_int32": [1, 2, 3],
        },
    ]
    assert (merged.line.count, merged.card, merged.HasField("cash")) == (3, "c", False)


def test_of_two_entries_of_one_key_the_last_counts() -> None:
    parts = [ORDER(prices={"a": 1.0, "b": 2.0}), ORDER(prices={"a": 3.0})]
    body = b"".join(part.SerializeToString() for part in parts)
    (row,) = read("prices map<string,double>", [body])
    assert dict(row["prices"]) == dict(ORDER.FromString(body).prices) == {"a": 3.0, "b": 2.0}
    assert len(row["prices"]) == 2


def test_unpacked_numbers_and_unknown_fields_are_read() -> None:
    old = FileDescriptorProto(name="old.proto", package="shop", syntax="proto2")
    order = old.message_type.add(name="Order")
    number = next(f.number for f in SHOP.message_type[0].field if f.name == "many_int32")
    add_field(order, "many_int32", "int32", repeated=True, number=number)
    add_field(order, "unknown", "string", number=5000)
    message = classes_of(old)["Order"](many_int32=[1, -1, 300], unknown="?")
    assert read("many_int32 array<int>", [message]) == [{"many_int32": [1, -1, 300]}]
    group = bytes([5001 << 3 & 0x7F | 0x80 | 3, 5001 >> 4 & 0x7F | 0x80, 5001 >> 11]) + b"\x08\x01"
    group += bytes([5001 << 3 & 0x7F | 0x80 | 4, 5001 >> 4 & 0x7F | 0x80, 5001 >> 11])
    assert ORDER.FromString(group).ByteSize() == len(group), "it is a group for others too"
    assert read("a_int64 bigint", [group + ORDER(a_int64=4).SerializeToString()]) == [
        {"a_int64": 4}
    ]


def test_absent_fields_are_their_defaults_unless_they_have_presence() -> None:
    ddl = f"a_int64 bigint, a_string string, maybe_int64 bigint, line {LINE}, lines array<{LINE}>"
    ddl += ", color string, gone string"
    assert read(ddl, [ORDER()]) == [
        {
            "a_int64": 0,
            "a_string": "",
            "maybe_int64": None,
            "line": None,
            "lines": [],
            "color": "NONE",
            "gone": None,
        }
    ]


def test_messages_of_several_types_lie_in_one_topic() -> None:
    texts = TEXTS
    line = classes_of(SHOP)["Line"](item="it")
    line.SetInParent()
    inner = ORDER.DESCRIPTOR.nested_types_by_name
    assert "Inner" in inner
    values = pa.array(
        [
            HEADER + b"\0" + ORDER(a_string="o").SerializeToString(),
            HEADER + indexes_as_bytes((1,)) + line.SerializeToString(),
            HEADER + b"\2\0" + ORDER(a_string="p").SerializeToString(),
            HEADER + indexes_as_bytes((9,)),
            HEADER + b"\xff",
            HEADER,
            None,
        ],
        pa.binary(),
    )
    parsed = reader("a_string string, item string", texts).parse(values, "permissive", where)
    assert parsed.columns.to_pylist() == [
        {"a_string": "o", "item": None},
        {"a_string": None, "item": "it"},
        {"a_string": "p", "item": None},
        *[{"a_string": None, "item": None}] * 4,
    ]
    assert sorted(parsed.reasons) == [3, 4, 5]
    assert "[9] name no message of schema 5" in parsed.reasons[3]


def test_indexes_are_numbered_as_others_do() -> None:
    file = FileDescriptorProto(name="n.proto", package="n", syntax="proto3")
    file.message_type.add(name="First")
    outer = file.message_type.add(name="Outer")
    outer.nested_type.add(name="Before")
    add_map(outer, "n", "some", "string", "string")
    outer.nested_type.add(name="After")
    texts = (text_of(file),)
    assert path_of(texts, None) == (0,)
    assert path_of(texts, "Outer") == path_of(texts, "n.Outer") == (1,)
    assert path_of(texts, "Outer.Before") == (1, 0)
    assert indexes_as_bytes((1, 0)) == b"\4\2\0"
    with pytest.raises(SchemaError, match="declare it before the map"):
        path_of(texts, "Outer.After")
    with pytest.raises(SchemaError, match=r"no message 'Nobody', only \['n.First'"):
        path_of(texts, "Nobody")


def test_a_malformed_record_is_named_and_takes_no_neighbour_along() -> None:
    good = ORDER(a_string="good")
    good.lines.add(item="l")
    bad = good.SerializeToString()[:-1]
    utf8 = good.SerializeToString().replace(b"good", b"\xff\xff\xff\xff")
    values = framed([good, bad, utf8, good])
    copy = reader(f"a_string string, lines array<{LINE}>")
    parsed = copy.parse(values, "permissive", where)
    assert [row["a_string"] for row in parsed.columns.to_pylist()] == ["good", None, None, "good"]
    assert parsed.columns.column(1).to_pylist()[1:3] == [None, None]
    assert "'lines': the value ends inside of it" in parsed.reasons[1]
    assert "'a_string': the string is not valid UTF-8" in parsed.reasons[2]
    dropped = copy.parse(values, "dropmalformed", where)
    assert list(dropped.rows) == [0, 3]
    with pytest.raises(RecordError, match="offset 1: the value is not Protobuf in Confluent"):
        copy.parse(values, "failfast", where)


def test_values_beyond_a_column_are_malformed() -> None:
    nanos = ORDER()
    nanos.at.nanos = 5
    ddl = "a_uint64 bigint, color string, at timestamp"
    parsed = reader(ddl).parse(
        framed([ORDER(a_uint64=2**63), ORDER(color=3), nanos]), "permissive", where
    )
    assert "9223372036854775808 is above what a bigint holds" in parsed.reasons[0]
    assert "3 is no value of the enum" in parsed.reasons[1]
    assert "ask for struct<seconds bigint, nanos int>" in parsed.reasons[2]
    ddl = "a_uint64 decimal(20,0), color int, at struct<seconds:bigint,nanos:int>"
    (row,) = read(ddl, [ORDER.FromString(ORDER(a_uint64=2**63, color=3).SerializeToString())])
    assert (row["a_uint64"], row["color"]) == (2**63, 3)


@pytest.mark.parametrize(
    ("ddl", "says"),
    [
        ("a_int64 int", "field 'a_int64' is int64, and its column is int32: make it bigint"),
        ("a_double float", "make it double"),
        ("line string", "is shop.Line, .*make it a struct"),
        ("lines " + LINE, "is repeated shop.Line, .*make it an array of a struct"),
        ("many_int32 int", "make it an array of int or bigint"),
        ("prices array<string>", "is a map, .*make it a map"),
        ("prices map<string,int>", "field 'prices.value' is double"),
        ("at string", "timestamp, or a struct"),
    ],
)
def test_a_field_of_another_type_is_named(ddl: str, says: str) -> None:
    with pytest.raises(RecordError, match=f"offset 0: .*schema of id 5, .*{says}"):
        reader(ddl).parse(framed([ORDER()]), "permissive", where)


def test_schemas_refer_to_each_other() -> None:
    base = FileDescriptorProto(name="other name", package="b", syntax="proto3")
    add_field(base.message_type.add(name="Base"), "n", "int64")
    file = FileDescriptorProto(name="top", package="t", syntax="proto3")
    file.dependency.append("b/base.proto")
    add_field(file.message_type.add(name="Top"), "base", ".b.Base")
    texts = (text_of(base, "b/base.proto"), text_of(file))
    assert read("base struct<n:bigint>", [b"\x0a\x02\x08\x07"], texts) == [{"base": {"n": 7}}]
    for broken, says in (((texts[1],), "do not fit together"), ((":%%",), "format=serialized")):
        with pytest.raises(RecordError, match=says):
            read("base struct<n:bigint>", [b""], broken)


def written(columns: dict[str, pa.Array]) -> list[bytes]:
    return ProtobufWriter(5, TEXTS).write(pa.record_batch(columns)).to_pylist()


def test_columns_of_other_widths_are_written_without_loss() -> None:
    columns = {
        "a_int32": pa.array([1, -5], pa.int8()),
        "a_int64": pa.array([1, 2**32 - 1], pa.uint32()),
        "a_uint32": pa.array([1, 2**32 - 1], pa.int64()),
        "a_double": pa.array([0.5, 0.25], pa.float32()),
        "a_string": pa.array(["x", "y"], pa.large_string()).dictionary_encode(),
        "a_bytes": pa.array([b"ab", b"cd"], pa.binary(2)),
        "many_int32": pa.array([[], [1, 2]], pa.large_list(pa.int16())).slice(0),
        "color": pa.array([7, 0], pa.int32()),
        "at": pa.array([0, 10**9], pa.timestamp("ns")),
    }
    orders = [ORDER.FromString(value[6:]) for value in written(columns)]
    assert [order.a_int32 for order in orders] == [1, -5]
    assert [order.a_uint32 for order in orders] == [1, 2**32 - 1]
    assert [order.a_string for order in orders] == ["x", "y"]
    assert [list(order.many_int32) for order in orders] == [[], [1, 2]]
    assert (orders[0].color, orders[1].at.seconds, orders[0].HasField("at")) == (7, 1, True)


def test_slices_are_written_as_they_are() -> None:
    rows = [{"tags": [f"{i}"] * i, "line": None if i % 2 else {"item": f"{i}"}} for i in range(6)]
    lines = pa.array([row["line"] for row in rows], pa.struct([("item", pa.string())]))
    names = pa.array([row["tags"] for row in rows], pa.list_(pa.string()))
    maps = pa.array(
        [[(f"{i}", float(i))] * (i > 0) for i in range(6)], pa.map_(pa.string(), pa.float64())
    )
    batch = pa.record_batch({"line": lines, "many_string": names, "prices": maps}).slice(2, 3)
    orders = [ORDER.FromString(v[6:]) for v in ProtobufWriter(5, TEXTS).write(batch).to_pylist()]
    assert [list(order.many_string) for order in orders] == [["2"] * 2, ["3"] * 3, ["4"] * 4]
    assert [order.line.item for order in orders] == ["2", "", "4"]
    assert [order.HasField("line") for order in orders] == [True, False, True]
    assert [dict(order.prices) for order in orders] == [{"2": 2.0}, {"3": 3.0}, {"4": 4.0}]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"a_int32": pa.array([2**31])}, "'a_int32' holds what .* cannot: 2147483648"),
        ({"a_uint32": pa.array([-1])}, "'a_uint32' holds what .* cannot: -1"),
        ({"a_uint64": pa.array([-1])}, "'a_uint64' holds what .* cannot: -1"),
        ({"color": pa.array(["GREEN"])}, "cannot: 'GREEN'"),
        ({"a_int64": pa.array([None], pa.int64())}, "'a_int64' holds null, .* make the field"),
        ({"many_int32": pa.array([[None]], pa.list_(pa.int32()))}, "'many_int32' holds null"),
        ({"cash": pa.array([1]), "card": pa.array(["c"])}, "are one oneof"),
        ({"at": pa.array([5], pa.timestamp("ns"))}, "'at' .* holds what cannot be written"),
    ],
)
def test_what_a_field_cannot_hold_is_refused(columns: dict[str, pa.Array], says: str) -> None:
    with pytest.raises(RecordError, match=says):
        written(columns)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"nothing": pa.int64()}, "column 'nothing' would be lost, message shop.Order has no such"),
        ({"line": pa.struct([("x", pa.int64())])}, "column 'line.x' would be lost"),
        ({"a_float": pa.float64()}, "'a_float' is float, and its column is double"),
        ({"a_string": pa.int64()}, "'a_string' is string, and its column is int64"),
    ],
)
def test_columns_without_a_fitting_field_are_refused(columns: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        ProtobufWriter(5, TEXTS).check(pa.schema(list(columns.items())))


def test_a_required_field_needs_a_column() -> None:
    file = FileDescriptorProto(name="r.proto", package="r", syntax="proto2")
    message = file.message_type.add(name="R")
    add_field(message, "must", "int32")
    add_field(message, "may", "int32")
    message.field[0].label = message.field[0].LABEL_REQUIRED
    with pytest.raises(OptionError, match="no column for field 'must'"):
        ProtobufWriter(5, (text_of(file),)).check(pa.schema([("may", pa.int32())]))


def test_a_null_in_a_required_field_is_refused_at_every_depth() -> None:
    file = FileDescriptorProto(name="q.proto", package="q", syntax="proto2")
    inner, outer = file.message_type.add(name="In"), file.message_type.add(name="Out")
    add_field(inner, "must", "int32")
    inner.field[0].label = inner.field[0].LABEL_REQUIRED
    add_field(outer, "one", ".q.In")
    add_field(outer, "many", ".q.In", repeated=True)
    add_field(outer, "id", "int32")
    outer.field[2].label = outer.field[2].LABEL_REQUIRED
    writer = ProtobufWriter(5, (text_of(file),), "q.Out")
    must = pa.struct([("must", pa.int32())])
    kinds = {"one": must, "many": pa.list_(must), "id": pa.int32()}

    def rows(**columns: list[Any]) -> pa.Array:
        arrays = {name: pa.array(values, kinds[name]) for name, values in columns.items()}
        return writer.write(pa.record_batch(arrays))

    good = rows(one=[{"must": 0}, None], many=[[{"must": 1}], []], id=[0, 1])
    assert [value[7:] for value in good.to_pylist()] == [
        b"\x0a\x02\x08\x00\x12\x02\x08\x01\x18\x00",
        b"\x18\x01",
    ]
    for name, columns in {
        "id": {"id": [1, None]},
        "one.must": {"id": [1, 2], "one": [{"must": 1}, {"must": None}]},
        "many.must": {"id": [1, 2], "many": [[], [{"must": 1}, {"must": None}]]},
    }.items():
        with pytest.raises(RecordError, match=f"column '{name}' holds null, .* never null"):
            rows(**columns)


def test_floats_keep_their_bits() -> None:
    values = [math.nan, -0.0, math.inf]
    value = pa.array(values, pa.float64())
    numbers = [ORDER.FromString(v[6:]).a_double for v in written({"a_double": value})]
    assert repr(numbers) == "[nan, -0.0, inf]"
    back = read("a_double double", [ORDER(a_double=number) for number in values])
    assert math.copysign(1, back[1]["a_double"]) == -1


def test_runs_are_cut_and_readers_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_format, "BATCH_BYTES_MAX", 20)
    copy = pickle.loads(pickle.dumps(reader("a_string string")))  # noqa: S301  our own bytes
    parsed = copy.parse(framed([ORDER(a_string=f"{i}") for i in range(50)]), "failfast", where)
    assert parsed.columns.column(0).to_pylist() == [f"{i}" for i in range(50)]
