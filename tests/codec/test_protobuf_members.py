"""What a Protobuf record holds, judged by Google's own reader (upb): oneofs, pieces, closed enums.

Messages are made field by field, as concatenated encodings and hand-made encoders write them: any
member after any other, in any number of pieces, at every depth.
"""

import random
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Proto
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from tallystick.codec.protobuf.schema import _known_file, _known_files
from tallystick.codec.wire_format import SchemaError, SchemaTexts
from tests.codec.test_protobuf import framed, reader, where
from tests.examples import drawn
from tests.protobuf_schemas import add_field, add_map, classes_of, text_of

INT, TEXT, LONG = pa.int32(), pa.string(), pa.int64()
FAR = 5000


def members(syntax: str) -> FileDescriptorProto:
    """Return a schema with oneofs, one inside another's member, and enums in every place."""
    file = FileDescriptorProto(name="m.proto", package="p", syntax=syntax)
    symbols = file.enum_type.add(name="E")
    for name, number in (("A", 0), ("B", 1), ("C", 900), ("D", -5)):
        symbols.value.add(name=name, number=number)
    whole = file.message_type.add(name="M")
    for name in ("o", "p", "q"):
        whole.oneof_decl.add(name=name)
    for name, kind, oneof in (
        ("u", "uint32", 0),
        ("s", "string", 0),
        ("m", ".p.S", 0),
        ("e", "enum .p.E", 0),
        ("d", "double", 0),
        ("f", "fixed32", 0),
        ("v", "sint32", 1),
        ("n", ".p.S", 1),
        ("k", "enum .p.E", 1),
    ):
        add_field(whole, name, kind, oneof_index=oneof)
    add_field(whole, "near", "int32", oneof_index=2)
    add_field(whole, "far", "int32", oneof_index=2, number=FAR)
    add_field(whole, "many", "enum .p.E", repeated=True)
    add_field(whole, "packed", "enum .p.E", repeated=True, number=20)
    whole.field[-1].options.packed = True
    add_map(whole, "p", "by", "int32", "enum .p.E")
    add_map(whole, "p", "parts", "string", ".p.S")
    add_field(whole, "list", ".p.S", repeated=True, number=30)
    add_field(whole, "one", ".p.S", number=31)
    add_field(whole, "alone", "enum .p.E", number=32)
    if syntax == "proto2":
        group = whole.nested_type.add(name="G")
        add_field(group, "x", "int32")
        add_field(whole, "g", "int32", number=33, oneof_index=0)
        whole.field[-1].type, whole.field[-1].type_name = Proto.TYPE_GROUP, ".p.M.G"
    inner = file.message_type.add(name="S")
    inner.oneof_decl.add(name="o")
    for name, kind in (("a", "int32"), ("deep", ".p.S"), ("e", "enum .p.E"), ("t", "string")):
        add_field(inner, name, kind, oneof_index=0)
    add_field(inner, "c", "int32")
    add_field(inner, "nums", "int32", repeated=True)
    return file


FILES = {syntax: members(syntax) for syntax in ("proto2", "proto3")}
CLASSES = {syntax: classes_of(file)["M"] for syntax, file in FILES.items()}


def varint(value: int) -> bytes:
    out = bytearray()
    value &= 2**64 - 1
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def body_of(descriptor: Any, draw: random.Random, depth: int) -> bytes:
    """Return some fields of a message, in any order, each any number of times."""
    fields = list(descriptor.fields)
    return b"".join(field_of(draw.choice(fields), draw, depth) for _ in range(draw.randrange(7)))


def field_of(field: Any, draw: random.Random, depth: int) -> bytes:
    """Return one occurrence of a field; now and then of another wire type, or nobody's.

    But not in the entries of maps: upb gives up such an entry, which Java and C++ read.
    """
    is_entry = field.containing_type.GetOptions().map_entry
    number = field.number if is_entry else draw.choice([field.number] * 30 + [900])
    if field.type == Proto.TYPE_GROUP:
        return (
            varint(number << 3 | 3) + b"\x08" + varint(draw.randrange(9)) + varint(number << 3 | 4)
        )
    wire, value = value_of(field, draw, depth)
    if draw.randrange(30) == 0 and not is_entry:
        wire, value = draw.choice([(0, b"\x01"), (2, b"\0"), (5, b"\0\0\0\1"), (1, bytes(8))])
    return varint(number << 3 | wire) + value


def value_of(field: Any, draw: random.Random, depth: int) -> tuple[int, bytes]:
    if field.message_type is not None:
        inner = body_of(field.message_type, draw, depth - 1) if depth else b""
        return 2, varint(len(inner)) + inner
    if field.type == Proto.TYPE_ENUM:
        numbers = [draw.choice([0, 1, 900, -5, 7, 901, 2**31, 2**32 + 1]) for _ in range(3)]
        if field.is_repeated and draw.randrange(2):
            run = b"".join(map(varint, numbers))
            return 2, varint(len(run)) + run
        return 0, varint(numbers[0])
    if field.type == Proto.TYPE_STRING:
        text = draw.choice([b"", b"a", "ü".encode(), b"long" * 9])
        return 2, varint(len(text)) + text
    if field.type == Proto.TYPE_DOUBLE:
        return 1, bytes(draw.choices(range(100), k=8))
    if field.type == Proto.TYPE_FIXED32:
        return 5, bytes(draw.choices(range(256), k=4))
    if field.is_repeated and draw.randrange(2):
        return 2, b"\x03\x01\x05\x07"
    return 0, varint(draw.choice([0, 1, 300, -1]))


def inner_type(draw: random.Random, depth: int) -> pa.DataType:
    enum = draw.choice([INT, LONG])
    kinds = [("a", INT), ("e", enum), ("t", TEXT), ("c", INT), ("nums", pa.list_(INT))]
    if depth:
        kinds.append(("deep", inner_type(draw, depth - 1)))
    return pa.struct(draw.sample(kinds, draw.randrange(1, len(kinds) + 1)))


def columns(draw: random.Random) -> pa.Schema:
    """Return some of the columns that there can be."""
    part = [inner_type(draw, draw.randrange(3)) for _ in range(5)]
    kinds = {
        **{"u": LONG, "s": TEXT, "m": part[0], "e": INT, "d": pa.float64(), "f": LONG, "v": INT},
        **{"n": part[1], "k": LONG, "near": INT, "far": INT, "many": pa.list_(INT)},
        **{"packed": pa.list_(LONG), "by": pa.map_(INT, INT), "parts": pa.map_(TEXT, part[2])},
        **{"list": pa.list_(part[3]), "one": part[4], "alone": INT},
    }
    names = draw.sample(list(kinds), draw.randrange(1, len(kinds) + 1))
    return pa.schema([(name, kinds[name]) for name in names])


def seen(message: Any, kind: pa.DataType, name: str) -> Any:
    """Return what a column is to hold of what Google's reader read."""
    field = message.DESCRIPTOR.fields_by_name[name]
    value = getattr(message, name)
    if pa.types.is_map(kind):
        item = kind.item_type
        pairs = {
            key: struct(member, item) if pa.types.is_struct(item) else member
            for key, member in value.items()
        }
        return sorted(pairs.items())
    if pa.types.is_list(kind):
        item = kind.value_type
        return [struct(member, item) if pa.types.is_struct(item) else member for member in value]
    if field.has_presence and not message.HasField(name):
        return None
    return struct(value, kind) if pa.types.is_struct(kind) else value


def struct(message: Any, kind: pa.DataType) -> dict[str, Any]:
    return {field.name: seen(message, field.type, field.name) for field in kind}


def compare(syntax: str, schema: pa.Schema, body: bytes) -> None:
    parsed = reader(schema, (text_of(FILES[syntax]),)).parse(framed([body]), "permissive", where)
    parsed.columns.validate(full=True)
    try:
        message = CLASSES[syntax].FromString(body)
    except DecodeError:
        assert 0 in parsed.reasons, body.hex()
        return
    assert not parsed.reasons, (parsed.reasons, body.hex())
    (row,) = parsed.columns.to_pylist()
    row = {
        name: sorted(v) if pa.types.is_map(schema.field(name).type) else v
        for name, v in row.items()
    }
    assert repr(row) == repr(struct(message, pa.struct(list(schema)))), body.hex()


@pytest.mark.parametrize("syntax", ["proto2", "proto3"])
@drawn(300)
@given(seed=st.integers(0, 2**40))
def test_every_choice_of_columns_reads_what_googles_reader_reads(syntax: str, seed: int) -> None:
    draw = random.Random(seed)
    descriptor = CLASSES[syntax].DESCRIPTOR
    pieces = [body_of(descriptor, draw, 3) for _ in range(draw.randrange(1, 4))]
    compare(syntax, columns(draw), b"".join(pieces))


def rows(syntax: str, schema: pa.Schema, *bodies: bytes) -> list[Any]:
    texts = (text_of(FILES[syntax]),)
    return reader(schema, texts).parse(framed(bodies), "failfast", where).columns.to_pylist()


def test_a_member_that_nobody_asks_for_takes_the_value_of_one_that_is() -> None:
    number, text, message = b"\x08\x05", b"\x12\x01x", b"\x1a\x02\x28\x07"
    group = varint(33 << 3 | 3) + varint(33 << 3 | 4)
    far = varint(FAR << 3) + b"\x01"
    for column, bodies in (
        (("u", LONG), [number + text, number + message, number + group]),
        (("s", TEXT), [text + number, text + message + number]),
        (("m", pa.struct([("c", INT)])), [message + number, message + group]),
        (("near", INT), [b"\x50\x01" + far]),
    ):
        assert rows("proto2", pa.schema([column]), *bodies) == [{column[0]: None}] * len(bodies)


def test_a_message_set_again_after_another_member_begins_anew() -> None:
    first, text, again = b"\x1a\x02\x08\x07", b"\x12\x01x", b"\x1a\x02\x28\x09"
    kind = pa.schema([("m", pa.struct([("a", INT), ("c", INT)]))])
    many = [first + again, first + text + again, first * 3 + text + again, first + text]
    assert rows("proto2", kind, *many) == [
        {"m": {"a": 7, "c": 9}},
        {"m": {"a": None, "c": 9}},
        {"m": {"a": None, "c": 9}},
        {"m": None},
    ]


def test_what_another_member_replaced_is_not_looked_at() -> None:
    """A number without a name in an open enum makes a record malformed only where it stands."""
    nameless = b"\x18\x4d"  # in S: e, as text
    inner = pa.struct([("e", TEXT), ("c", INT)])
    schema = pa.schema(
        [("m", inner), ("u", LONG), ("list", pa.list_(pa.struct([("deep", inner)])))]
    )
    replaced = b"\x1a\x02" + nameless + b"\x08\x05"
    assert rows("proto3", schema, replaced) == [{"m": None, "u": 5, "list": []}]
    # One deep in a list, where `a` replaces it.
    deep = b"\x12\x02" + nameless + b"\x08\x01"
    body = varint(30 << 3 | 2) + varint(len(deep)) + deep
    assert rows("proto3", schema, body) == [{"m": None, "u": None, "list": [{"deep": None}]}]
    parsed = reader(schema, (text_of(FILES["proto3"]),)).parse(
        framed([replaced[:4]]), "permissive", where
    )
    assert list(parsed.reasons) == [0]


def test_numbers_that_a_closed_enum_lacks_are_unknown_fields() -> None:
    alone, many, entry = varint(32 << 3), b"\x60", b"\x72\x04\x08\x01\x10"
    body = alone + b"\x01" + alone + b"\x4d" + many + b"\x01" + many + b"\x4d" + b"\x42\x00"
    body += entry + b"\x01" + b"\x72\x04\x08\x02\x10\x4d" + varint(20 << 3 | 2) + b"\x02\x4d\x00"
    assert CLASSES["proto2"].FromString(body).by == {1: 1}
    for kind, names in ((TEXT, "AB"), (INT, (0, 1))):
        schema = pa.schema(
            [
                *(("alone", kind), ("many", pa.list_(kind)), ("packed", pa.list_(kind))),
                ("by", pa.map_(INT, kind)),
            ]
        )
        a, b = names
        assert rows("proto2", schema, body) == [
            {"alone": b, "many": [b], "packed": [a], "by": [(1, b)]}
        ]
    open_ones = rows("proto3", pa.schema([("alone", INT), ("many", pa.list_(INT))]), body)
    assert open_ones == [{"alone": 77, "many": [1, 77]}]


@pytest.mark.parametrize(
    "body",
    [b"\x88\x80\x80\x80\x80\x80\x00\x05", b"\xc2\xb8\x82\x80\x80\x00\x00"],
    ids=["of a field that is a column", "of one that nobody asks for"],
)
def test_tags_longer_than_five_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(DecodeError):
        CLASSES["proto3"].FromString(body)
    schema = pa.schema([("u", LONG), ("s", TEXT)])
    texts = (text_of(FILES["proto3"]),)
    parsed = reader(schema, texts).parse(framed([body, b"\x08\x05"]), "permissive", where)
    assert parsed.reasons == {0: "a tag takes more than five bytes"}
    assert parsed.columns.to_pylist()[1] == {"u": 5, "s": None}


KNOWN = sorted(_known_files())


def importing(*names: str) -> FileDescriptorProto:
    file = FileDescriptorProto(name="k.proto", package="p", syntax="proto3", dependency=names)
    add_field(file.message_type.add(name="M"), "n", "int64")
    return file


@pytest.mark.parametrize("name", KNOWN)
def test_files_that_a_registry_knows_by_itself_are_known(name: str) -> None:
    assert rows_of(pa.schema([("n", LONG)]), (text_of(importing(name)),), b"\x08\x05") == [{"n": 5}]


def rows_of(schema: pa.Schema, texts: SchemaTexts, body: bytes) -> list[Any]:
    return reader(schema, texts).parse(framed([body]), "failfast", where).columns.to_pylist()


def test_types_of_known_files_are_columns() -> None:
    file = importing("google/type/money.proto", "confluent/type/decimal.proto")
    add_field(file.message_type[0], "cost", ".google.type.Money")
    add_field(file.message_type[0], "exact", ".confluent.type.Decimal")
    money = pa.struct([("currency_code", TEXT), ("units", LONG), ("nanos", INT)])
    exact = pa.struct([("value", pa.binary()), ("scale", INT)])
    body = b"\x12\x07\x0a\x03EUR\x10\x02" + b"\x1a\x05\x0a\x01\x07\x18\x02"
    (row,) = rows_of(pa.schema([("cost", money), ("exact", exact)]), (text_of(file),), body)
    assert row["cost"] == {"currency_code": "EUR", "units": 2, "nanos": 0}
    assert row["exact"] == {"value": b"\x07", "scale": 2}


@pytest.mark.parametrize("name", ["google/protobuf/timestamp.proto", "google/type/date.proto"])
def test_a_known_file_may_be_a_reference_too_with_other_bytes(name: str) -> None:
    own = FileDescriptorProto.FromString(_known_file(name).SerializeToString())
    own.ClearField("options")
    other = importing(name)
    other.message_type[0].name = "R"
    other.name = "ref.proto"
    top = importing("ref.proto", name)
    files = [text_of(other, "ref.proto"), text_of(own, name)]
    for known in (files, files[::-1], [*files, text_of(_known_file(name), name)]):
        texts = (*known, text_of(top))
        assert rows_of(pa.schema([("n", LONG)]), texts, b"\x08\x05") == [{"n": 5}]


def test_a_file_that_differs_from_its_other_copy_or_imports_itself_is_named() -> None:
    one, other = importing(), importing()
    other.message_type[0].name = "R"
    for texts, says in (
        ((text_of(one, "a.proto"), text_of(other, "a.proto"), text_of(importing())), "there twice"),
        (
            (text_of(importing("b.proto"), "b.proto"), text_of(importing("b.proto"))),
            "imports itself",
        ),
        ((text_of(importing("google/type/no.proto")),), "google/type/no.proto"),
    ):
        with pytest.raises(SchemaError, match=says):
            rows_of(pa.schema([("n", LONG)]), texts, b"")
