"""The rows of an epoch as a processor gets them: by key, as Spark's sorted shuffle hands them over.

Keys are in ascending order, nulls first; the rows of a key are in the order of their arrival.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql import Row

from tallystick.processors.row_class import row_maker
from tallystick.state.key_bytes import KeyCodec
from tallystick.state.key_groups import key_groups_of

if TYPE_CHECKING:
    import pandas as pd

CHUNK_ROWS = 1 << 16
"""About so many rows are Python objects at a time."""

Int64Array = NDArray[np.int64]


class KeyedRows(NamedTuple):
    """Rows sorted by key, and where each key's begin.

    Args:
        rows: all of them.
        keys: the distinct keys, as bytes.
        groups: the key group of each.
        starts: of each key, the first row; and the row count at the end.
    """

    rows: pa.RecordBatch
    keys: pa.BinaryArray
    groups: NDArray[np.int32]
    starts: Int64Array

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Ranges of keys with about `CHUNK_ROWS` rows."""
        first = 0
        while first < len(self.keys):
            enough = int(self.starts[first]) + CHUNK_ROWS
            stop = int(np.searchsorted(self.starts, enough, "right")) - 1
            stop = min(max(stop, first + 1), len(self.keys))
            yield first, stop
            first = stop


def sort_by_key(rows: pa.RecordBatch, codec: KeyCodec, max_parallelism: int) -> KeyedRows:
    """Put rows in the order of their keys."""
    numbered = codec.encode(rows).dictionary_encode()
    by_rank = pc.sort_indices(numbered.dictionary)
    keys = numbered.dictionary.take(by_rank)
    ranks = np.empty(len(keys), np.int64)
    ranks[by_rank.to_numpy()] = np.arange(len(keys))
    codes = ranks[numbered.indices.to_numpy()]
    order = np.argsort(codes, kind="stable")
    starts = np.zeros(len(keys) + 1, np.int64)
    np.cumsum(np.bincount(codes, minlength=len(keys)), out=starts[1:])
    is_sorted = len(order) == 0 or bool((order[:-1] < order[1:]).all())
    sorted_rows = rows if is_sorted else rows.take(pa.array(order))
    first_rows = sorted_rows.select(codec.names).take(pa.array(starts[:-1]))
    groups = key_groups_of(codec.hash_codes(first_rows), max_parallelism)
    return KeyedRows(sorted_rows, keys, groups, starts)


def key_tuples(keys: pa.BinaryArray, codec: KeyCodec, timezone: str) -> list[tuple[Any, ...]]:
    """Keys as processors get them."""
    columns = in_timezone(codec.decode(keys), timezone).columns
    return list(zip(*map(python_values, columns), strict=True))


def as_rows(batch: pa.RecordBatch) -> list[Row]:
    """Each row as a `Row`, with Spark's Python types."""
    columns = zip(*map(python_values, batch.columns), strict=True)
    return list(map(row_maker(batch.schema.names), columns))


def as_frames(batch: pa.RecordBatch, spans: Sequence[tuple[int, int]]) -> "Iterator[pd.DataFrame]":
    """A frame per span of rows, with the dtypes that Spark's frames have.

    Where a null makes floats of a column's integers, it does so in its own frame alone; in Spark in
    all frames of an Arrow batch, whose integers lose digits by what another key's rows hold.
    """
    import pandas as pd

    table = pa.Table.from_batches([batch]).cast(_widest(batch.schema))
    frame = table.to_pandas(coerce_temporal_nanoseconds=True)
    beside_nulls = [
        (at, column.fill_null(pa.scalar(0).cast(column.type)).to_numpy(), _nulls_before(column))
        for at, column in enumerate(table.columns)
        if column.null_count and (pa.types.is_integer(column.type) or column.type == pa.bool_())
    ]
    for name in frame.columns:
        if isinstance(frame[name].dtype, pd.DatetimeTZDtype):
            frame[name] = frame[name].dt.tz_localize(None)
    for start, stop in spans:
        piece = frame.iloc[start:stop].reset_index(drop=True)
        for at, values, nulls_before in beside_nulls:
            if nulls_before[start] == nulls_before[stop]:
                piece.isetitem(at, values[start:stop].copy())
        yield piece


def _nulls_before(column: pa.ChunkedArray) -> Int64Array:
    """Of each row, how many nulls stand before it; and at the end how many there are."""
    counts = np.zeros(len(column) + 1, np.int64)
    np.cumsum(column.is_null().to_numpy(), out=counts[1:])
    return counts


def in_timezone(batch: pa.RecordBatch, timezone: str) -> pa.RecordBatch:
    """The same moments, shown in another time zone."""
    columns = [
        column.cast(pa.timestamp(column.type.unit, tz=timezone))
        if pa.types.is_timestamp(column.type) and column.type.tz is not None
        else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def python_values(column: pa.Array) -> list[Any]:
    """`to_pylist`, by numpy where that gives the same."""
    kind = column.type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if is_text or (is_number and not column.null_count):
        found: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
        return found
    values: list[Any] = column.to_pylist()
    return values


def _widest(schema: pa.Schema) -> pa.Schema:
    # Spark builds each frame of Python objects, so numbers get Python's width.
    return pa.schema([pa.field(field.name, _wide(field.type)) for field in schema])


def _wide(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_signed_integer(kind):
        return pa.int64()
    return pa.float64() if pa.types.is_floating(kind) else kind
