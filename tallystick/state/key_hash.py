"""The hash code of each key: Java's where Java has one, frozen for all types.

A key's hash code decides its key group for the life of its state, so this table never changes;
another function would be another `HASH_VERSION`.

| column | hash code | source |
| --- | --- | --- |
| null | 0 | |
| string | `31 * h + unit` from 0 over UTF-16 units | `String.hashCode` |
| binary | `31 * h + byte` from 1 over signed bytes | `Arrays.hashCode` |
| int8, int16, int32 | the number | `Integer.hashCode` |
| int64 | its two halves, xor | `Long.hashCode` |
| bool | 1231 or 1237 | `Boolean.hashCode` |
| float, double | IEEE 754 bits; a double's as int64. One NaN; -0.0 is 0.0, as in Spark's keys | \
`Double.hashCode` |
| date | days since 1970, as int32 | `LocalDate` has another one |
| timestamp | microseconds since 1970, as int64 | |
| decimal | `31 * unscaled + scale`, the column's scale | `BigDecimal.hashCode` |
| several columns | `31 * h + next`, from the first one's | Flink's `Tuple2.hashCode` |
"""

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tallystick.spans import spans_of
from tallystick.state import key_kernels
from tallystick.state.fixed_width import valid_of, values_of

HASH_VERSION = 1

Int32Array = NDArray[np.int32]
UInt32Array = NDArray[np.uint32]

_TRUE, _FALSE = 1231, 1237
_FACTOR = np.uint32(31)
_LOW = np.uint64(0xFFFFFFFF)


def hash_codes(columns: list[pa.Array]) -> Int32Array:
    """The hash code of each row's key.

    Args:
        columns: the key's, of one length, in the order of `key_by`; types that `KeyCodec` takes.
    """
    code = _codes_of(columns[0])
    for column in columns[1:]:
        code = _FACTOR * code + _codes_of(column)
    return code.view(np.int32)


def _codes_of(column: pa.Array) -> UInt32Array:
    """The hash codes of one column, as Java's bits."""
    kind = column.type
    is_type = pa.types
    if is_type.is_string(kind) or is_type.is_large_string(kind):
        return _codes_of_spans(column, key_kernels.hash_texts)
    if is_type.is_binary(kind) or is_type.is_large_binary(kind):
        return _codes_of_spans(column, key_kernels.hash_bytes)
    codes = _codes_of_values(values_of(column), kind)
    return np.where(valid_of(column), codes, np.uint32(0)) if column.null_count else codes


def _codes_of_spans(column: pa.Array, kernel: Any) -> UInt32Array:
    spans = spans_of(column, "key")
    codes = np.empty(len(column), np.int32)
    kernel(spans.data, spans.starts, spans.lengths, codes)
    return codes.view(np.uint32)


def _codes_of_values(values: NDArray[Any], kind: pa.DataType) -> UInt32Array:
    if pa.types.is_boolean(kind):
        return np.where(values != 0, np.uint32(_TRUE), np.uint32(_FALSE))
    if pa.types.is_decimal128(kind):
        return _FACTOR * _of_unscaled(values) + np.uint32(kind.scale & 0xFFFFFFFF)
    if values.dtype.kind == "f":
        values = one_of_each(values).view(f"i{values.itemsize}")
    if values.itemsize == 8:
        return _of_longs(values.view(np.uint64))
    return values.astype(np.int32).view(np.uint32)


def one_of_each(numbers: NDArray[Any]) -> NDArray[Any]:
    """Floats with one NaN and one zero: those that are the same key have the same bits."""
    nan, zero = numbers.dtype.type("nan"), numbers.dtype.type(0)
    same: NDArray[Any] = np.where(np.isnan(numbers), nan, numbers + zero)
    return same


def _of_longs(bits: NDArray[np.uint64]) -> UInt32Array:
    return ((bits ^ (bits >> np.uint64(32))) & _LOW).astype(np.uint32)


def _of_unscaled(values: NDArray[Any]) -> UInt32Array:
    """Java's BigInteger.hashCode: over the words of the magnitude, with the sign."""
    low, high = values["low"], values["high"].view(np.uint64)
    negative = values["high"] < 0
    low, high = (
        np.where(negative, ~low + np.uint64(1), low),
        np.where(negative, ~high + (low == 0).astype(np.uint64), high),
    )
    code = np.zeros(len(values), np.uint32)
    for word in (high >> np.uint64(32), high & _LOW, low >> np.uint64(32), low & _LOW):
        code = _FACTOR * code + word.astype(np.uint32)
    return np.where(negative, np.uint32(0) - code, code)
