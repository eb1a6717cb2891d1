"""Random Protobuf schemas and any legal bytes of their messages, judged by Google's reader (upb).

Beside `test_protobuf_members.py`, whose one schema has all kinds of oneofs and enums: syntax or
edition, features, numbers of fields, groups, maps of every key, messages within messages. Bytes as
any writer may make them: fields in any order and number of pieces, numbers longer than they need
to be, lists packed, unpacked and in parts, unknown fields and groups between.
"""

import random
import struct
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf.descriptor_pb2 import Edition, FileDescriptorProto
from google.protobuf.descriptor_pb2 import FeatureSet as Features
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Proto
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from tests.codec.test_protobuf import framed, reader, where
from tests.examples import drawn
from tests.protobuf_schemas import SCALARS, add_field, add_map, classes_of, text_of

WIRE = {
    **dict.fromkeys(("double", "fixed64", "sfixed64"), 1),
    **dict.fromkeys(("string", "bytes"), 2),
    **dict.fromkeys(("float", "fixed32", "sfixed32"), 5),
}
COLUMNS = {
    **dict.fromkeys(("int32", "sint32", "sfixed32"), pa.int32()),
    **dict.fromkeys(("uint32", "fixed32", "int64", "sint64", "sfixed64"), pa.int64()),
    **dict.fromkeys(("uint64", "fixed64"), pa.decimal128(20, 0)),
    "double": pa.float64(),
    "float": pa.float32(),
    "bool": pa.bool_(),
    "string": pa.string(),
    "bytes": pa.binary(),
}
MESSAGES = ("A", "B", "C")
KINDS = [*SCALARS, "enum .p.E", *(f".p.{name}" for name in MESSAGES)]
NUMBERS = [*range(1, 20), 2047, 2048, 18999, 20000, 2**29 - 1]
SYNTAXES = ("proto2", "proto3", "editions")


def schema_at_random(draw: random.Random, syntax: str) -> FileDescriptorProto:
    """Return a schema of three messages that hold each other and themselves."""
    file = FileDescriptorProto(name="r.proto", package="p", syntax=syntax)
    if syntax == "editions":
        file.edition = Edition.EDITION_2023
        file.options.features.enum_type = draw.choice([Features.OPEN, Features.CLOSED])
        file.options.features.utf8_validation = Features.VERIFY
    symbols = file.enum_type.add(name="E")
    for name, number in (("Z", 0), ("Y", 1), ("X", 300), ("W", -1)):
        symbols.value.add(name=name, number=number)
    for name in MESSAGES:
        message = file.message_type.add(name=name)
        oneofs = draw.randrange(3)
        for at in range(oneofs):
            message.oneof_decl.add(name=f"o{at}")
        numbers = draw.sample(NUMBERS, draw.randrange(2, 10))
        for at in range(oneofs):  # one that has no member is refused
            add_field(message, f"m{at}", draw.choice(KINDS), number=numbers.pop(), oneof_index=at)
            numbers = numbers or [30 + at]
        for at, number in enumerate(numbers):
            add_any_field(draw, message, f"f{at}", number, oneofs, syntax)
    return file


def add_any_field(
    draw: random.Random, message: Any, name: str, number: int, oneofs: int, syntax: str
) -> None:
    kind = draw.choice(KINDS)
    shape = draw.choice(["plain", "plain", "list", "map", "oneof", "optional", "group"])
    more: dict[str, Any] = {"number": number}
    if shape == "map":
        key = draw.choice([name for name in SCALARS if name not in ("double", "float", "bytes")])
        add_map(message, "p", name, key, kind)
        message.field[-1].number = number
        return
    if shape == "oneof" and oneofs:
        more["oneof_index"] = draw.randrange(oneofs)
    add_field(message, name, kind, repeated=shape == "list", **more)
    field = message.field[-1]
    numeric = not kind.startswith(".") and kind not in ("string", "bytes")
    if syntax == "editions":
        features = field.options.features
        if shape == "list" and numeric and draw.randrange(2):
            features.repeated_field_encoding = draw.choice([Features.PACKED, Features.EXPANDED])
        if shape == "plain" and numeric and not kind.startswith("enum") and draw.randrange(2):
            features.field_presence = Features.IMPLICIT
        if shape == "group" and kind.startswith("."):
            features.message_encoding = Features.DELIMITED
    elif shape == "list" and numeric and draw.randrange(2):
        field.options.packed = bool(draw.randrange(2))
    if syntax == "proto2" and shape == "group":
        inner = message.nested_type.add(name=name.upper())
        add_field(inner, "x", "int32")
        field.type, field.type_name = Proto.TYPE_GROUP, f".p.{message.name}.{inner.name}"


def varint(draw: random.Random, value: int) -> bytes:
    """Return a number, now and then in more bytes than it needs."""
    out = bytearray()
    value &= 2**64 - 1
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    if draw.randrange(8) == 0 and len(out) < 10:
        out[-1] |= 0x80
        out += b"\x80" * draw.randrange(10 - len(out)) + b"\0"
    return bytes(out)


def tag(draw: random.Random, number: int, wire: int) -> bytes:
    plain = varint(random.Random(1), number << 3 | wire)
    if draw.randrange(8) == 0 and len(plain) < 5:
        plain = plain[:-1] + bytes([plain[-1] | 0x80]) + b"\0"
    return plain


def sized(draw: random.Random, data: bytes) -> bytes:
    plain = varint(random.Random(1), len(data))
    return plain + data


def scalar(draw: random.Random, kind: int) -> tuple[int, bytes]:
    name = Proto.Type.Name(kind).removeprefix("TYPE_").lower()
    wire = WIRE.get(name, 0)
    if name == "double":
        return wire, struct.pack("<d", draw.choice([0.0, -0.0, 1.5, -1e300, float("inf")]))
    if name == "float":
        return wire, struct.pack("<f", draw.choice([0.0, -0.0, 1.5, 1e-40]))
    if wire in (1, 5):
        return wire, draw.choice([bytes, lambda size: b"\xff" * size, draw.randbytes])(
            8 if wire == 1 else 4
        )
    if wire == 2:
        data = draw.choice([b"", b"a", "ü\0€".encode(), b"long" * 50])
        return wire, sized(draw, data)
    number = draw.choice([0, 1, 2, 300, -1, 2**31, 2**32, 2**32 + 1, 2**63, draw.getrandbits(64)])
    return wire, varint(draw, number)


def unknown(draw: random.Random, depth: int = 2) -> bytes:
    number = draw.choice([25, 1000, 100_000])
    kind = draw.randrange(5)
    if kind == 0 and depth:
        inner = b"".join(unknown(draw, depth - 1) for _ in range(draw.randrange(3)))
        return tag(draw, number, 3) + inner + tag(draw, number, 4)
    wire, value = scalar(draw, draw.choice([Proto.TYPE_INT64, Proto.TYPE_BYTES, Proto.TYPE_DOUBLE]))
    return tag(draw, number, wire) + value


def body(draw: random.Random, descriptor: Any, depth: int) -> bytes:
    """Return the bytes of some fields, in any order and number; of an entry its own alone."""
    is_entry = descriptor.GetOptions().map_entry
    fields = list(descriptor.fields)
    pieces = []
    for _ in range(draw.randrange(4 if is_entry else 9)):
        if draw.randrange(10) == 0 and not is_entry:
            pieces.append(unknown(draw))
        pieces.append(occurrence(draw, draw.choice(fields), depth))
    return b"".join(pieces)


def occurrence(draw: random.Random, field: Any, depth: int) -> bytes:
    if field.message_type is not None:
        inner = body(draw, field.message_type, depth - 1) if depth else b""
        if field.type == Proto.TYPE_GROUP:
            return tag(draw, field.number, 3) + inner + tag(draw, field.number, 4)
        return tag(draw, field.number, 2) + sized(draw, inner)
    wire, value = scalar(draw, field.type)
    if field.is_repeated and wire != 2 and draw.randrange(2):
        run = b"".join(scalar(draw, field.type)[1] for _ in range(draw.randrange(4)))
        return tag(draw, field.number, 2) + sized(draw, run)
    return tag(draw, field.number, wire) + value


def column_of(draw: random.Random, field: Any, depth: int) -> pa.DataType | None:
    """Return the type of a field's column; None for one that cannot be, or is left out."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        parts = single(draw, key, depth), single(draw, value, depth)
        return None if None in parts else pa.map_(*parts)
    kind = single(draw, field, depth)
    return pa.list_(kind) if kind is not None and field.is_repeated else kind


def single(draw: random.Random, field: Any, depth: int) -> pa.DataType | None:
    if field.type == Proto.TYPE_GROUP or (field.message_type is not None and not depth):
        return None
    if field.message_type is not None:
        parts = columns(draw, field.message_type, depth - 1)
        return pa.struct(parts) if parts else None
    if field.type == Proto.TYPE_ENUM:
        return draw.choice([pa.int32(), pa.int64()])
    return COLUMNS[Proto.Type.Name(field.type).removeprefix("TYPE_").lower()]


def columns(draw: random.Random, descriptor: Any, depth: int) -> list[tuple[str, pa.DataType]]:
    fields = draw.sample(list(descriptor.fields), draw.randrange(1, len(descriptor.fields) + 1))
    kinds = [(field.name, column_of(draw, field, depth)) for field in fields]
    return [(name, kind) for name, kind in kinds if kind is not None]


def seen(message: Any, kind: pa.DataType, name: str) -> Any:
    """Return what a column is to hold of what Google's reader read."""
    field = message.DESCRIPTOR.fields_by_name[name]
    value = getattr(message, name)
    if pa.types.is_map(kind):
        pairs = [(key, single_of(item, kind.item_type)) for key, item in value.items()]
        return [(single_of(key, kind.key_type), item) for key, item in by_key(pairs)]
    if pa.types.is_list(kind):
        return [single_of(item, kind.value_type) for item in value]
    if field.has_presence and not message.HasField(name):
        return None
    return single_of(value, kind)


def single_of(value: Any, kind: pa.DataType) -> Any:
    if pa.types.is_struct(kind):
        return {field.name: seen(value, field.type, field.name) for field in kind}
    return Decimal(value) if pa.types.is_decimal(kind) else value


def by_key(pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    return sorted(pairs, key=lambda pair: pair[0])


def in_order(value: Any, kind: pa.DataType) -> Any:
    """Return a value of a column with its maps in the order of their keys."""
    if value is None:
        return None
    if pa.types.is_map(kind):
        return by_key([(key, in_order(item, kind.item_type)) for key, item in value])
    if pa.types.is_list(kind):
        return [in_order(item, kind.value_type) for item in value]
    if pa.types.is_struct(kind):
        return {field.name: in_order(value[field.name], field.type) for field in kind}
    return value


@pytest.mark.parametrize("syntax", SYNTAXES)
@drawn(60)
@given(seed=st.integers(0, 2**40))
def test_any_schema_reads_what_googles_reader_reads(syntax: str, seed: int) -> None:
    check(syntax, seed)


def check(syntax: str, seed: int) -> int:
    """Compare some records of one schema; return how many were read."""
    draw = random.Random(seed)
    file = schema_at_random(draw, syntax)
    judge = classes_of(file)["A"]
    schema = pa.schema(columns(draw, judge.DESCRIPTOR, 3))
    if not len(schema):
        return 0
    bodies = [body(draw, judge.DESCRIPTOR, 3) for _ in range(10)]
    parsed = reader(schema, (text_of(file),)).parse(framed(bodies), "permissive", where)
    parsed.columns.validate(full=True)
    for at, (data, row) in enumerate(zip(bodies, parsed.columns.to_pylist(), strict=True)):
        try:
            message = judge.FromString(data)
        except DecodeError:
            assert at in parsed.reasons, (seed, data.hex())
            continue
        assert at not in parsed.reasons, (seed, parsed.reasons, data.hex())
        kind = pa.struct(list(schema))
        assert repr(in_order(row, kind)) == repr(single_of(message, kind)), (seed, data.hex())
    return len(bodies)
