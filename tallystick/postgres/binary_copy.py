"""Record batches as the stream of `COPY … FROM STDIN (FORMAT binary)`, column by column."""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tallystick.postgres import kernels
from tallystick.postgres.columns import Encoder, Fields, TableColumn, encoder_for

HEADER = b"PGCOPY\n\xff\r\n\x00" + bytes(8)
TRAILER = b"\xff\xff"
CHUNK_ROWS = 8192
"""So many rows at a time stay in the processor's cache while column after column is written."""


def encoders_for(
    schema: pa.Schema, columns: Sequence[TableColumn], table: str
) -> tuple[Encoder, ...]:
    """How each column of a schema is written into the table's column of the same place.

    Raises:
        OptionError: a column's type cannot be written into the table's; all such are named.
    """
    return tuple(
        encoder_for(field, each, table) for field, each in zip(schema, columns, strict=True)
    )


def chunks(rows: pa.RecordBatch, encoders: Sequence[Encoder]) -> Iterator[memoryview]:
    """The tuples of a batch, between the stream's header and its trailer.

    Raises:
        RecordError: a value has no place in the table's column.
    """
    for start in range(0, rows.num_rows, CHUNK_ROWS):
        piece = rows.slice(start, CHUNK_ROWS)
        fields = [encode(column) for encode, column in zip(encoders, piece.columns, strict=True)]
        yield _tuples(fields, piece.num_rows).data


def _tuples(columns: Sequence[Fields], row_count: int) -> NDArray[np.uint8]:
    sizes = np.full(row_count, 2 + 4 * len(columns), np.int64)
    for column in columns:
        lengths = column.width if column.width >= 0 else np.diff(column.offsets) + column.more
        sizes += lengths * column.valid if len(column.valid) else lengths
    ends = np.cumsum(sizes)
    out = np.empty(ends[-1] if row_count else 0, np.uint8)
    at = ends - sizes
    kernels.put_counts(out, at, len(columns))
    for column in columns:
        if column.width >= 0:
            kernels.put_fixed(out, at, column.data, column.width, column.valid)
        else:
            kernels.put_ragged(out, at, column.data, column.offsets, column.valid, column.version)
    return out


def warm_up() -> None:
    """Compile the kernels, or load them from the cache."""
    decimal = pa.array([1, None]).cast(pa.decimal128(24, 1))
    rows = pa.record_batch({"n": pa.array([1, None]), "t": pa.array(["a", None]), "d": decimal})
    kinds = {"n": "int8", "t": "text", "d": "numeric"}
    columns = [TableColumn(name, kind, kind) for name, kind in kinds.items()]
    list(chunks(rows, encoders_for(rows.schema, columns, "")))
