"""Arrow columns of fixed width, and lists of them, to the numpy arrays of kernels and back.

Nulls are apart: a null's value in the array is 0.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray


def is_fixed_width(kind: pa.DataType) -> bool:
    """True if `values_of` takes columns of this type."""
    is_type = pa.types
    return bool(
        is_type.is_boolean(kind)
        or is_type.is_signed_integer(kind)
        or is_type.is_float32(kind)
        or is_type.is_float64(kind)
        or is_type.is_date32(kind)
        or (is_type.is_timestamp(kind) and kind.unit == "us")
        or is_type.is_decimal128(kind)
    )


def numpy_type_of(kind: pa.DataType) -> np.dtype[Any]:
    """Return the numpy type of such a column; a bool is a byte, a decimal its two's complement."""
    is_type = pa.types
    if is_type.is_boolean(kind):
        return np.dtype(np.uint8)
    if is_type.is_date32(kind):
        return np.dtype(np.int32)
    if is_type.is_timestamp(kind):
        return np.dtype(np.int64)
    if is_type.is_decimal128(kind):
        return np.dtype([("low", "<u8"), ("high", "<i8")])
    numpy_type: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
    return numpy_type


def values_of(column: pa.Array) -> NDArray[Any]:
    """Return the values, a null's as 0; read-only, always, so that kernels are compiled once."""
    kind = column.type
    if pa.types.is_boolean(kind):
        column = pc.cast(column, pa.uint8())
    values = np.frombuffer(column.buffers()[1] or b"", numpy_type_of(kind))
    values = values[column.offset : column.offset + len(column)]
    if column.null_count:  # what stands under a null is undefined
        values = values.copy()
        values[column.is_null().to_numpy(zero_copy_only=False)] = np.zeros(1, values.dtype)[0]
    values.flags.writeable = False
    return values


def valid_of(column: pa.Array) -> NDArray[np.bool_]:
    """Return an array that is true where a value is not null."""
    if not column.null_count:
        return np.ones(len(column), np.bool_)
    valid: NDArray[np.bool_] = column.is_valid().to_numpy(zero_copy_only=False)
    return valid


def column_of(values: NDArray[Any], valid: NDArray[np.bool_] | None, kind: pa.DataType) -> pa.Array:
    """Return an Arrow column of values, null where `valid` is false.

    Args:
        values: of the type of `numpy_type_of`.
        valid: None: all values are valid.
        kind: of the column.
    """
    assert values.dtype == numpy_type_of(kind), (values.dtype, kind)
    present, null_count = validity_of(valid)
    if pa.types.is_boolean(kind):
        data = pa.array(values.view(np.bool_)).buffers()[1]
    else:
        data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(kind, len(values), [present, data], null_count)


def checked_digits(column: pa.Array) -> pa.Array:
    """Return the column, unless a decimal has more digits than the column's type allows.

    Raises:
        ArrowInvalid: a decimal has more digits.
    """
    if pa.types.is_decimal(column.type):
        column.validate(full=True)
    return column


def validity_of(valid: NDArray[np.bool_] | None) -> tuple[pa.Buffer | None, int]:
    """Return Arrow's validity bitmap and the number of nulls; without nulls no bitmap."""
    if valid is None or valid.all():
        return None, 0
    bitmap = pa.array(np.ascontiguousarray(valid)).buffers()[1]
    return bitmap, int(len(valid) - np.count_nonzero(valid))


Int64Array = NDArray[np.int64]


def explode(columns: list[pa.ListArray]) -> tuple[Int64Array, list[pa.Array]]:
    """Flatten lists of equal lengths; return the key number of each element, and the elements.

    Args:
        columns: a list or null per key; a key is null in all columns or in none.
    """
    lengths = columns[0].value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    numbers = np.repeat(np.arange(len(lengths)), lengths)
    return numbers, [column.flatten() for column in columns]


def places_in(counts: Int64Array) -> Int64Array:
    """Return the numbers from 0 to below each count, end to end."""
    ends = np.cumsum(counts)
    places: Int64Array = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return places


def lists_of(counts: NDArray[np.int64], elements: pa.Array) -> pa.ListArray:
    """Cut elements into a list per key, of the counted lengths; an empty list becomes null."""
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    assert offsets[-1] == len(elements), (offsets[-1], len(elements))
    present, null_count = validity_of(counts > 0)
    return pa.Array.from_buffers(
        pa.list_(elements.type),
        len(counts),
        [present, pa.py_buffer(offsets)],
        null_count,
        children=[elements],
    )
