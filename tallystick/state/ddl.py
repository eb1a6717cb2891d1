"""Schemas from DDL, as Spark writes them: `"n bigint, total double, tags array<string>"`.

Spark's own parser is in the JVM, which tasks do not have; this one knows the plain types and arrays
of them.
"""

import re

import pyarrow as pa

from tallystick.errors import OptionError

_PLAIN = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "byte": pa.int8(),
    "smallint": pa.int16(),
    "short": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "long": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ltz": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "decimal": pa.decimal128(10, 0),
    "dec": pa.decimal128(10, 0),
    "numeric": pa.decimal128(10, 0),
}
_DECIMAL = re.compile(r"(?:decimal|dec|numeric)\s*\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?\)")
_ARRAY = re.compile(r"array\s*<(.+)>", re.DOTALL)
_COLUMN = re.compile(
    r"""\s*(?:`(?P<quoted>(?:[^`]|``)+)`|(?P<plain>\w+))   # the name
        (?:\s*:\s*|\s+)
        (?P<kind>.+?)
        (?P<strict>\s+not\s+null)?
        \s*""",
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)
_PRECISION_MAX = 38
_NAMES = {kind: name for name, kind in reversed(_PLAIN.items())}
"""The first of the names of each type."""


def schema_of(schema: str | pa.Schema, name: str) -> pa.Schema:
    """The schema that a user gave, as DDL or ready.

    Args:
        schema: DDL of plain types and arrays, or any Arrow schema.
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
    fields = [_field(part, name) for part in _parts(schema)] if schema.strip() else []
    names = [field.name.lower() for field in fields]
    if repeated := {each for each in names if names.count(each) > 1}:
        raise OptionError(f"{name}: {schema!r} has {sorted(repeated)[0]!r} twice.")
    return pa.schema(fields)


def type_of(text: str, name: str) -> pa.DataType:
    """The type that DDL names, in upper or lower case.

    Raises:
        OptionError: it is not a plain type or an array of one.
    """
    text = text.strip().lower()
    if text in _PLAIN:
        return _PLAIN[text]
    if found := _DECIMAL.fullmatch(text):
        precision, scale = int(found[1]), int(found[2] or 0)
        if not (1 <= precision <= _PRECISION_MAX and scale <= precision):
            raise OptionError(
                f"{name}: {text}: expected 1 to {_PRECISION_MAX} digits, at most so many of them "
                f"behind the point."
            )
        return pa.decimal128(precision, scale)
    if found := _ARRAY.fullmatch(text):
        return pa.list_(type_of(found[1], name))
    raise OptionError(
        f"{name}: {text!r} is not a type that can be read here: expected "
        f"{', '.join(sorted(_PLAIN))}, decimal(p, s) or array<...>. Give a pyarrow.Schema for "
        f"anything else."
    )


def ddl_of(schema: pa.Schema) -> str:
    """A schema as DDL, for people; types that it does not know by Arrow's names."""
    return ", ".join(f"{_quoted(field.name)} {_text_of(field.type)}" for field in schema)


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"\w+", name) else "`" + name.replace("`", "``") + "`"


def _text_of(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"array<{_text_of(kind.value_type)}>"
    if pa.types.is_decimal128(kind):
        return f"decimal({kind.precision}, {kind.scale})"
    return _NAMES.get(kind, str(kind))


def _field(part: str, name: str) -> pa.Field:
    found = _COLUMN.fullmatch(part)
    if found is None:
        raise OptionError(
            f"{name}: {part.strip()!r} is not a column: expected name and type, like 'n bigint'."
        )
    column = found["plain"] or found["quoted"].replace("``", "`")
    kind = type_of(found["kind"], f"{name}, column {column}")
    return pa.field(column, kind, nullable=found["strict"] is None)


def _parts(text: str) -> list[str]:
    """Split at the commas that stand in no brackets and no backquotes."""
    parts, depth, quoted, begin = [], 0, False, 0
    for at, letter in enumerate(text):
        quoted ^= letter == "`"
        if quoted:
            continue
        depth += (letter in "<(") - (letter in ">)")
        if letter == "," and depth == 0:
            parts.append(text[begin:at])
            begin = at + 1
    return [*parts, text[begin:]]
