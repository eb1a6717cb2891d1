"""Schemas of state and of columns, given as Spark's DDL: `"n bigint, tags array<string>"`."""

import re

import pyarrow as pa

from tallystick.codec import ddl
from tallystick.codec.arrow import arrow_schema, arrow_type
from tallystick.errors import OptionError

_NAMES = {
    pa.bool_(): "boolean",
    pa.int8(): "tinyint",
    pa.int16(): "smallint",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.binary(): "binary",
    pa.date32(): "date",
    pa.timestamp("us", tz="UTC"): "timestamp",
    pa.timestamp("us"): "timestamp_ntz",
    pa.null(): "void",
}


def schema_of(schema: str | pa.Schema, name: str) -> pa.Schema:
    """The schema that a user gave, as DDL or ready.

    Args:
        schema: DDL, or any Arrow schema.
        name: what it is of, for errors.

    Raises:
        OptionError: it is neither.
    """
    if isinstance(schema, pa.Schema):
        return schema
    if not isinstance(schema, str):
        raise OptionError(
            f"{name}: expected DDL like 'n bigint, total double' or a pyarrow.Schema, not "
            f"{type(schema).__name__}."
        )
    found = arrow_schema(ddl.columns(schema, name), name)
    names = [each.lower() for each in found.names]
    if repeated := {each for each in names if names.count(each) > 1}:
        raise OptionError(f"{name}: {schema!r} has {sorted(repeated)[0]!r} twice.")
    return found


def type_of(text: str, name: str) -> pa.DataType:
    """The type that DDL names, in upper or lower case.

    Raises:
        OptionError: it is none.
    """
    return arrow_type(ddl.parse(text, name), name)


def ddl_of(schema: pa.Schema) -> str:
    """A schema as DDL, for people; types that it does not know by Arrow's names."""
    return ", ".join(f"{_quoted(field.name)} {_text_of(field.type)}" for field in schema)


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"\w+", name) else "`" + name.replace("`", "``") + "`"


def _text_of(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"array<{_text_of(kind.value_type)}>"
    if pa.types.is_map(kind):
        return f"map<{_text_of(kind.key_type)}, {_text_of(kind.item_type)}>"
    if pa.types.is_struct(kind):
        fields = (f"{_quoted(field.name)}: {_text_of(field.type)}" for field in kind)
        return f"struct<{', '.join(fields)}>"
    if pa.types.is_decimal128(kind):
        return f"decimal({kind.precision}, {kind.scale})"
    return _NAMES.get(kind, str(kind))
