"""Copies of rows in memory that no function of the user's can change, for code that keeps rows.

Arrow takes a numpy array's memory as it is (`pa.array`, pandas' columns), and a function may use
such an array again for its next batch. No flag of a buffer tells: Arrow's own new buffers are
mutable too, and a view that cannot be written to may be of memory that can (pandas' copy on
write). So there is one rule: rows that leave a task at once, as bytes, are not copied; code that
keeps rows while a function of the user's may run copies them first, as the way to another process
would have.

Keepers of rows: sinks with transactions of their own (`tasks.write`), lists of readers
(`tasks.operator_state`), the state of a keyed function, and accumulators of windows; and rows that
wait, or go on, while the next function or another sink's runs (`tasks.read`).
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pyarrow as pa


def own(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return a copy of rows alone: a slice does not take the rest of its array along."""
    if not any(map(_has_dictionary, rows.schema.types)):
        return pa.ipc.read_record_batch(rows.serialize(), rows.schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    with pa.ipc.open_stream(sink.getvalue()) as reader:
        return reader.read_next_batch()


def own_values(values: Any) -> Any:
    """Return a copy of a column of Arrow's, numpy's, pandas' or another library's kind, as Arrow's.

    No `copy()` serves all of them: those of pandas' index and of Arrow columns in pandas share the
    memory. A value without a column's memory, such as a tuple or a mapping, is returned as it is.
    """
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    elif values is not None and not isinstance(values, pa.Array | tuple | list | Mapping):
        with suppress(pa.ArrowException, TypeError, ValueError):  # refused where it is looked at
            values = pa.array(values, from_pandas=False)
    if isinstance(values, pa.Array):
        return own(pa.RecordBatch.from_arrays([values], names=[""])).column(0)
    return values


def _has_dictionary(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind):
        return True
    return any(_has_dictionary(kind.field(at).type) for at in range(kind.num_fields))
