"""Rows in memory that nobody writes to any more, for whoever keeps them.

Arrow takes a numpy array's memory as it is (`pa.array`, pandas' columns), and a function may use
such an array again for its next batch. No flag of a buffer tells: Arrow's own new buffers are
mutable too, and a view that cannot be written to may be of memory that can (pandas' copy on
write). So a column is taken as it is only where its memory is that of rows which were ours before;
any other is copied, as it would be on its way to another process.

Invariant: what a user's function returns passes here once, where it comes in; nothing behind that
copies for this reason, or has to.
"""

from collections.abc import Iterable
from typing import Any

import pyarrow as pa


def own(rows: pa.RecordBatch, *ours: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows of which no memory is a user's: columns that have some are copied.

    Args:
        rows: as a function returned them.
        ours: batches that it was given, whose memory is ours.
    """
    sizes = dict(_places(column for batch in ours for column in batch.columns))
    foreign = [at for at, column in enumerate(rows.columns) if not _is_ours(column, sizes)]
    if not foreign:
        return rows
    columns = rows.columns
    for at, column in zip(foreign, _copied(rows.select(foreign)).columns, strict=True):
        columns[at] = column
    return pa.RecordBatch.from_arrays(columns, schema=rows.schema)


def own_values(values: Any) -> Any:
    """Return a column, of Arrow's, numpy's or pandas' kind, of which no memory is a user's.

    What has no columns' memory, such as a tuple or a mapping, is returned as it is.
    """
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if isinstance(values, pa.Array):
        return own(pa.RecordBatch.from_arrays([values], names=[""])).column(0)
    return values.copy() if hasattr(values, "__array__") else values


def _places(columns: Iterable[pa.Array]) -> Iterable[tuple[int, int]]:
    """Yield where the buffers of columns are, and how many bytes they have."""
    for column in columns:
        for buffer in column.buffers():
            if buffer is not None:
                yield buffer.address, buffer.size


def _is_ours(column: pa.Array, sizes: dict[int, int]) -> bool:
    # A dictionary's buffers are not among the column's.
    return not _has_dictionary(column.type) and all(
        size <= sizes.get(address, 0) for address, size in _places([column])
    )


def _copied(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return a copy of these rows alone: a slice does not take the rest of its array along."""
    if not any(map(_has_dictionary, rows.schema.types)):
        return pa.ipc.read_record_batch(rows.serialize(), rows.schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    with pa.ipc.open_stream(sink.getvalue()) as reader:
        return reader.read_next_batch()


def _has_dictionary(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind):
        return True
    return any(_has_dictionary(kind.field(at).type) for at in range(kind.num_fields))
