"""Protobuf schemas for tests, made with Google's own package, and messages of them."""

import base64
from typing import Any

from google.protobuf import descriptor_pool, message_factory, timestamp_pb2, wrappers_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Proto
from google.protobuf.descriptor_pb2 import FileDescriptorProto

SCALARS = [
    "double",
    "float",
    "int64",
    "uint64",
    "int32",
    "fixed64",
    "fixed32",
    "bool",
    "string",
    "bytes",
    "uint32",
    "sfixed32",
    "sfixed64",
    "sint32",
    "sint64",
]


def add_field(
    message: Any,
    name: str,
    kind: str,
    *,
    repeated: bool = False,
    optional: bool = False,
    **more: Any,
) -> None:
    """Add the next field to a DescriptorProto; a kind that is no scalar is a message or enum."""
    number = more.pop("number", len(message.field) + 1)
    field = message.field.add(name=name, number=number, **more)
    field.label = Proto.LABEL_REPEATED if repeated else Proto.LABEL_OPTIONAL
    if kind.startswith("enum "):
        field.type, field.type_name = Proto.TYPE_ENUM, kind.removeprefix("enum ")
    elif kind.startswith("."):
        field.type, field.type_name = Proto.TYPE_MESSAGE, kind
    else:
        field.type = getattr(Proto, f"TYPE_{kind.upper()}")
    if optional:
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")


def add_map(message: Any, package: str, name: str, key: str, value: str) -> None:
    """Add a map field to a DescriptorProto."""
    entry = message.nested_type.add(name=f"{name.capitalize()}Entry")
    add_field(entry, "key", key)
    add_field(entry, "value", value)
    entry.options.map_entry = True
    add_field(message, name, f".{package}.{message.name}.{entry.name}", repeated=True)


def shop() -> FileDescriptorProto:
    """Return a schema with everything that columns can be made of."""
    file = FileDescriptorProto(name="shop.proto", package="shop", syntax="proto3")
    file.dependency.extend(["google/protobuf/timestamp.proto", "google/protobuf/wrappers.proto"])
    color = file.enum_type.add(name="Color")
    for number, name in ((0, "NONE"), (1, "RED"), (7, "BLUE"), (-1, "DARK")):
        color.value.add(name=name, number=number)
    order = file.message_type.add(name="Order")
    order.oneof_decl.add(name="paid")  # before those of optional fields, which are made up
    for kind in SCALARS:
        add_field(order, f"a_{kind}", kind)
    for kind in SCALARS:
        add_field(order, f"maybe_{kind}", kind, optional=True)
    for kind in SCALARS:
        add_field(order, f"many_{kind}", kind, repeated=True)
    add_field(order, "color", "enum .shop.Color")
    add_field(order, "colors", "enum .shop.Color", repeated=True)
    add_field(order, "line", ".shop.Line")
    add_field(order, "lines", ".shop.Line", repeated=True)
    add_map(order, "shop", "prices", "string", "double")
    add_map(order, "shop", "stock", "int64", ".shop.Line")
    add_field(order, "at", ".google.protobuf.Timestamp")
    add_field(order, "times", ".google.protobuf.Timestamp", repeated=True)
    add_field(order, "boxed", ".google.protobuf.StringValue")
    for name, kind in (("cash", "int64"), ("card", "string"), ("gift", ".shop.Line")):
        add_field(order, name, kind, oneof_index=0)
    inner = order.nested_type.add(name="Inner")
    add_field(inner, "only", "int32")
    line = file.message_type.add(name="Line")
    add_field(line, "item", "string")
    add_field(line, "count", "int32", optional=True)
    add_field(line, "tags", "string", repeated=True)
    add_field(line, "sub", ".shop.Line", number=200)
    return file


def text_of(file: FileDescriptorProto, name: str = "") -> str:
    """Return a schema as the reader gets it from the registry."""
    return f"{name}:{base64.b64encode(file.SerializeToString()).decode()}"


def classes_of(file: FileDescriptorProto) -> dict[str, Any]:
    """Return Google's classes for the messages of a schema."""
    pool = descriptor_pool.DescriptorPool()
    for known in (timestamp_pb2, wrappers_pb2):
        pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    descriptor = pool.FindFileByName(file.name)
    return {
        name: message_factory.GetMessageClass(message_type)
        for name, message_type in descriptor.message_types_by_name.items()
    }
