"""Rows of a join, with the number of their key and their time."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tallystick.codec.spans import spans_of
from tallystick.state.functions.join_columns import end_to_end
from tallystick.state.functions.matching import order_of

ROW_BYTES = 16
"""The bytes that a row takes in state besides its own."""

Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class Rows:
    """Some rows of one side of a join.

    Args:
        codes: the number of each row's key, or of its chunk.
        times: in ms.
        matched: whether the row has had a partner; changed in place.
        data: the rows as bytes.
        columns: their columns.
    """

    codes: Int64Array
    times: Int64Array
    matched: BoolArray
    data: pa.BinaryArray
    columns: tuple[pa.Array, ...]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.codes)

    def take(self, rows: Int64Array) -> Self:
        """Return the rows with some numbers, in the order of the numbers."""
        numbers = pa.array(rows)
        return type(self)(
            self.codes[rows],
            self.times[rows],
            self.matched[rows],
            self.data.take(numbers),
            tuple(column.take(numbers) for column in self.columns),
        )

    def filter(self, mask: BoolArray) -> Self:
        """Return the rows where the mask is true."""
        return self if mask.all() else self.take(np.flatnonzero(mask))

    def of_keys(self, first: int, stop: int) -> Self:
        """Return the rows of some keys, numbered from 0; they must be sorted by key."""
        begin, end = np.searchsorted(self.codes, [first, stop]).tolist()
        return type(self)(
            self.codes[begin:end] - first,
            self.times[begin:end],
            self.matched[begin:end],
            self.data.slice(begin, end - begin),
            tuple(column.slice(begin, end - begin) for column in self.columns),
        )

    def ordered(self) -> Self:
        """Sort the rows by key, then time; ties stay in their order."""
        order = order_of(self.codes, self.times)
        return self if (order[1:] > order[:-1]).all() else self.take(order)

    def and_then(self, later: Self) -> Self:
        """Add rows that arrived later; return all rows by key and time."""
        return self.followed_by(later).ordered() if len(later) else self

    def followed_by(self, later: Self) -> Self:
        """Append other rows, without sorting."""
        return type(self)(
            np.concatenate([self.codes, later.codes]),
            np.concatenate([self.times, later.times]),
            np.concatenate([self.matched, later.matched]),
            pa.concat_arrays([self.data, later.data]),
            end_to_end(self.columns, later.columns),
        )

    @property
    def sizes(self) -> Int64Array:
        """The size of each row in state, in bytes."""
        return np.maximum(spans_of(self.data, "state").lengths, 0) + ROW_BYTES
