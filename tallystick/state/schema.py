"""Schemas of keys and of state: as JSON in a checkpoint, and as DDL for users.

A checkpoint holds names and Arrow's types as JSON, which stays the same in every release. Users
write Spark's DDL, `"n bigint, tags array<string>"`, or give a `pyarrow.Schema`. Spark's types
become what PySpark's `to_arrow_schema` makes of them, with moments in UTC.
"""

import json
import re
from typing import Any

import pyarrow as pa

from tallystick.codec import ddl
from tallystick.codec.ddl import Json
from tallystick.errors import UNREADABLE, ManifestError, OptionError

_NAMED = {
    str(kind): kind
    for kind in (
        pa.bool_(),
        pa.int8(),
        pa.int16(),
        pa.int32(),
        pa.int64(),
        pa.float32(),
        pa.float64(),
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.large_binary(),
        pa.date32(),
        pa.timestamp("us"),
    )
}
_ZONED = re.compile(r"timestamp\[us, tz=(.+)\]")
_DECIMAL = re.compile(r"decimal128\((\d+), (-?\d+)\)")
_LIST = re.compile(r"list<(.+)>")


def text_of(schema: pa.Schema) -> str:
    """Encode the names and types of columns as JSON, in their order, without nullability."""
    columns = [[field.name, text_of_type(field.type)] for field in schema]
    return json.dumps(columns, separators=(",", ":"))


def schema_from_text(text: str) -> pa.Schema:
    """Decode a schema from the JSON of `text_of`.

    Raises:
        ManifestError: the text is of a release that knows more types, or damaged.
    """
    try:
        return pa.schema([pa.field(name, type_from_text(kind)) for name, kind in json.loads(text)])
    except UNREADABLE as error:
        raise ManifestError(
            f"a schema in the checkpoint is {text[:200]!r}: expected names and types, as JSON. It "
            f"was edited, or made by somebody else."
        ) from error


def text_of_type(kind: pa.DataType) -> str:
    """Return Arrow's name of a type, without the field name of a list's elements."""
    if pa.types.is_list(kind):
        return f"list<{text_of_type(kind.value_type)}>"
    return str(kind)


def type_from_text(text: str) -> pa.DataType:
    """Decode a type from the text of `text_of_type`.

    Raises:
        ManifestError: this release does not know the type.
    """
    if text in _NAMED:
        return _NAMED[text]
    if match := _ZONED.fullmatch(text):
        return pa.timestamp("us", tz=match[1])
    if match := _DECIMAL.fullmatch(text):
        return pa.decimal128(int(match[1]), int(match[2]))
    if match := _LIST.fullmatch(text):
        return pa.list_(type_from_text(match[1]))
    raise ManifestError(
        f"a schema in the checkpoint has a column of type {text!r}, which this release does not "
        f"know: use the release that wrote it, or a newer one."
    )


_PLAIN = {
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "void": pa.null(),
    "variant": pa.struct(
        [
            pa.field("value", pa.binary(), nullable=False),
            pa.field("metadata", pa.binary(), nullable=False, metadata={"variant": "true"}),
        ]
    ),
}
_DDL_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")
_DDL_STARTS = {"time(": pa.time64("ns"), "string collate ": pa.string()}
_DDL_DURATION = re.compile(r"interval (day|hour|minute|second)( to .*)?")


def arrow_schema(columns: dict[str, Any], name: str) -> pa.Schema:
    """Return the Arrow schema of columns that `ddl.columns` read.

    Raises:
        OptionError: Arrow has no such type.
    """
    return pa.schema(_fields(columns, name))


def arrow_type(kind: Json, name: str) -> pa.DataType:
    """Return the Arrow type of a type that `ddl.parse` read.

    Raises:
        OptionError: Arrow has no such type.
    """
    if isinstance(kind, str):
        return _plain(kind, name)
    match kind["type"]:
        case "array":
            nullable = kind["containsNull"]
            return pa.list_(_field("element", kind["elementType"], name, nullable=nullable))
        case "map":
            return pa.map_(
                _field("key", kind["keyType"], name, nullable=False),
                _field("value", kind["valueType"], name, nullable=kind["valueContainsNull"]),
            )
        case "struct":
            return pa.struct(_fields(kind, name))
    raise _unknown(str(kind["type"]), name)


def schema_of(schema: str | pa.Schema, name: str) -> pa.Schema:
    """Return the Arrow schema of a user's DDL; an Arrow schema stays as it is.

    Args:
        schema: DDL, or any Arrow schema.
        name: what the schema is of, for errors.

    Raises:
        OptionError: the schema is of another type, or the DDL is wrong or has a name twice.
    """
    if isinstance(schema, pa.Schema):
        return schema
    if not isinstance(schema, str):
        raise OptionError(
            f"{name}: expected DDL like 'n bigint, total double' or a pyarrow.Schema, not "
            f"{type(schema).__name__}."
        )
    parsed = arrow_schema(ddl.columns(schema, name), name)
    names = [column.lower() for column in parsed.names]
    if repeated := {column for column in names if names.count(column) > 1}:
        raise OptionError(f"{name}: {schema!r} has {sorted(repeated)[0]!r} twice.")
    return parsed


def type_of(text: str, name: str) -> pa.DataType:
    """Return the type that DDL names, in upper or lower case.

    Raises:
        OptionError: the text names no type.
    """
    return arrow_type(ddl.parse(text, name), name)


def _fields(struct: dict[str, Any], name: str) -> list[pa.Field]:
    return [
        _field(
            field["name"],
            field["type"],
            f"{name}, column {field['name']}",
            nullable=field["nullable"],
        )
        for field in struct["fields"]
    ]


def _field(field: str, kind: Json, name: str, *, nullable: bool) -> pa.Field:
    if kind == "void" and not nullable:
        raise _unknown("void NOT NULL", name)
    return pa.field(field, arrow_type(kind, name), nullable=nullable)


def _plain(kind: str, name: str) -> pa.DataType:
    if kind in _PLAIN:
        return _PLAIN[kind]
    if (match := _DDL_DECIMAL.fullmatch(kind)) and int(match[1]) > 0:
        return pa.decimal128(int(match[1]), int(match[2]))
    if _DDL_DURATION.fullmatch(kind):
        return pa.duration("us")
    for start, arrow in _DDL_STARTS.items():
        if kind.startswith(start):
            return arrow
    raise _unknown(kind, name)


def _unknown(kind: str, name: str) -> OptionError:
    return OptionError(
        f"{name}: type {kind} has no counterpart in Arrow, in which rows are kept: choose another, "
        f"such as string, bigint or decimal(p, s)"
    )
