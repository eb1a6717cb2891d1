"""Spark's types as Arrow has them, as PySpark's `to_arrow_schema` makes them; moments in UTC."""

import re
from typing import Any

import pyarrow as pa

from tallystick.codec.ddl import Json
from tallystick.errors import OptionError

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
_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")
_STARTS = {"time(": pa.time64("ns"), "string collate ": pa.string()}
_DURATION = re.compile(r"interval (day|hour|minute|second)( to .*)?")


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


def _fields(struct: dict[str, Any], name: str) -> list[pa.Field]:
    return [
        _field(
            each["name"], each["type"], f"{name}, column {each['name']}", nullable=each["nullable"]
        )
        for each in struct["fields"]
    ]


def _field(field: str, kind: Json, name: str, *, nullable: bool) -> pa.Field:
    if kind == "void" and not nullable:
        raise _unknown("void NOT NULL", name)
    return pa.field(field, arrow_type(kind, name), nullable=nullable)


def _plain(kind: str, name: str) -> pa.DataType:
    if kind in _PLAIN:
        return _PLAIN[kind]
    if (found := _DECIMAL.fullmatch(kind)) and int(found[1]) > 0:
        return pa.decimal128(int(found[1]), int(found[2]))
    if _DURATION.fullmatch(kind):
        return pa.duration("us")
    for start, arrow in _STARTS.items():
        if kind.startswith(start):
            return arrow
    raise _unknown(kind, name)


def _unknown(kind: str, name: str) -> OptionError:
    return OptionError(
        f"{name}: type {kind} has no counterpart in Arrow, in which rows are kept: choose another, "
        f"such as string, bigint or decimal(p, s)"
    )
