"""Lists in a state column, one per key, as flat arrays, and back."""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tallystick.state.fixed_width import validity_of

Int64Array = NDArray[np.int64]


def explode(columns: list[pa.ListArray]) -> tuple[Int64Array, list[pa.Array]]:
    """The elements of lists that have the same lengths, and the number of the key of each.

    Args:
        columns: a list or null per key; what is null in one is null in all.
    """
    lengths = columns[0].value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    numbers = np.repeat(np.arange(len(lengths)), lengths)
    return numbers, [column.flatten() for column in columns]


def lists_of(counts: NDArray[np.int64], elements: pa.Array) -> pa.ListArray:
    """A list per key of so many elements; null where there are none."""
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
