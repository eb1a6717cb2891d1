"""Schemas as text that stays the same: what a checkpoint says of keys and of state."""

import json
import re

import pyarrow as pa

from tallystick.errors import ManifestError

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


def is_writable(kind: pa.DataType) -> bool:
    """Whether a type has a text that can be read back."""
    try:
        return bool(type_from_text(text_of_type(kind)) == kind)
    except ManifestError:
        return False


def text_of(schema: pa.Schema) -> str:
    """Names and types in their order, as JSON; whether a column may be null is not said."""
    columns = [[field.name, text_of_type(field.type)] for field in schema]
    return json.dumps(columns, separators=(",", ":"))


def schema_from_text(text: str) -> pa.Schema:
    """Read back what `text_of` wrote.

    Raises:
        ManifestError: it is of a release that knows more types, or damaged.
    """
    try:
        return pa.schema([pa.field(name, type_from_text(kind)) for name, kind in json.loads(text)])
    except (TypeError, ValueError) as error:
        raise ManifestError(
            f"a schema in the checkpoint is {text[:200]!r}: expected names and types, as JSON. It "
            f"was edited, or made by somebody else."
        ) from error


def text_of_type(kind: pa.DataType) -> str:
    """Arrow's name of the type; a list's without that of its element."""
    if pa.types.is_list(kind):
        return f"list<{text_of_type(kind.value_type)}>"
    return str(kind)


def type_from_text(text: str) -> pa.DataType:
    """Read back what `text_of_type` wrote.

    Raises:
        ManifestError: it says no type that this release knows.
    """
    if text in _NAMED:
        return _NAMED[text]
    if found := _ZONED.fullmatch(text):
        return pa.timestamp("us", tz=found[1])
    if found := _DECIMAL.fullmatch(text):
        return pa.decimal128(int(found[1]), int(found[2]))
    if found := _LIST.fullmatch(text):
        return pa.list_(type_from_text(found[1]))
    raise ManifestError(
        f"a schema in the checkpoint has a column of type {text!r}, which this release does not "
        f"know: use the release that wrote it, or a newer one."
    )
