"""The reason why a JSON record does not fit a schema: the field, its type, and what is there.

Arrow, which refuses records, names columns of its own ("changed from string to number"). So a
refused record is read once more, by itself.
"""

import json
import re
from decimal import Decimal
from typing import Any, Self

import pyarrow as pa

from tallystick.codec.ddl import DECIMAL_DIGITS_MAX, ddl_of_type

SHOWN_LENGTH_MAX = 40
_INT64_BITS = 64
_DECIMAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def misfit(record: bytes, schema: pa.Schema, refusal: str) -> str:
    """Return the first field that does not fit, in words; "": the record is no such object.

    Args:
        record: that Arrow has refused.
        schema: the declared fields.
        refusal: Arrow's words.
    """
    try:
        document = json.loads(record, parse_float=_Float)
    except (ValueError, RecursionError):
        return ""
    return _misfit("", pa.struct(list(schema)), document, refusal) if document else ""


class _Float(float):
    """A number as it is written: a double has lost digits that a decimal holds."""

    text: str

    def __new__(cls, text: str) -> Self:
        number = super().__new__(cls, text)
        number.text = text
        return number


def no_object(record: bytes) -> str:
    """Return the kind of a document that is no object, and the way to read it; "": not known."""
    begin = record.lstrip()[:1]
    if begin == b"[":
        return (
            "it is an array, and a value is one row. Write each item as a record of its own, or "
            "read the values without a format and split them in a map_batches"
        )
    if begin == b"\0":
        return (
            "it begins with byte 0, as Confluent's wire format does. Read such values with "
            "ts.JsonSchema, ts.Avro or ts.Protobuf"
        )
    try:
        document = json.loads(record)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(document, dict):
        return (
            "it is a text, number, boolean or null, which names no columns. Read the values "
            "without a format, or as text with ts.Text()"
        )
    return ""


def _misfit(path: str, kind: pa.DataType, value: Any, refusal: str) -> str:
    if value is None:
        return ""
    inner: list[tuple[str, pa.DataType, Any]] = []
    if pa.types.is_struct(kind) and isinstance(value, dict):
        inner = [(_join(path, field.name), field.type, value.get(field.name)) for field in kind]
    elif pa.types.is_list(kind) and isinstance(value, list):
        inner = [(f"{path}[{at}]", kind.value_type, element) for at, element in enumerate(value)]
    elif better := _better(kind, value, refusal):
        return f"{path}: declared {ddl_of_type(kind)}, found {_shown(value)}: declare it {better}"
    reasons = (_misfit(*one, refusal) for one in inner)
    return next((reason for reason in reasons if reason), "")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _better(kind: pa.DataType, value: Any, refusal: str) -> str:
    """Return the type that a value should be declared with; "": it fits."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if pa.types.is_integer(kind):
        bits = kind.bit_width - 1
        fits = is_number and isinstance(value, int) and -(1 << bits) <= value < 1 << bits
    elif pa.types.is_floating(kind):
        fits = is_number
    elif pa.types.is_boolean(kind):
        fits = isinstance(value, bool)
    elif pa.types.is_decimal(kind) and (is_number or isinstance(value, str)):
        return _better_decimal(kind, value)
    else:
        fits = isinstance(value, str) and not pa.types.is_nested(kind)
    if not fits:
        return _type_of(value)
    if not isinstance(value, str) or pa.types.is_string(kind):
        return ""
    is_refused = value in refusal if value else pa.types.is_temporal(kind)
    return "string" if is_refused else ""


def _better_decimal(kind: pa.DataType, value: float | str) -> str:
    text = value.text if isinstance(value, _Float) else str(value)
    if not _DECIMAL.fullmatch(text):  # no number, or NaN and Infinity
        return _type_of(value)
    _, digits, exponent = Decimal(text).as_tuple()
    assert isinstance(exponent, int), text
    written = "".join(map(str, digits)).lstrip("0")
    number = written.rstrip("0")
    exponent += len(written) - len(number)
    whole, scale = max(0, len(number) + exponent), max(0, -exponent)
    if not number or (scale <= kind.scale and whole <= kind.precision - kind.scale):
        return ""
    scale = max(scale, kind.scale)
    precision = max(whole, kind.precision - kind.scale) + scale
    return f"decimal({precision}, {scale})" if precision <= DECIMAL_DIGITS_MAX else "string"


def _type_of(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "bigint" if value.bit_length() < _INT64_BITS else "decimal(38, 0)"
        case float():
            return "double"
        case list():
            return f"array<{_type_of(value[0]) if value else 'string'}>"
        case dict():
            return "a struct<…> of its fields"
        case _:
            return "string"


def _shown(value: Any) -> str:
    names = {bool: "the boolean", str: "the text", list: "the list", dict: "the object"}
    text = json.dumps(value, ensure_ascii=False)
    more = "…" if len(text) > SHOWN_LENGTH_MAX else ""
    return f"{names.get(type(value), 'the number')} {text[:SHOWN_LENGTH_MAX]}{more}"
