"""Rows on their way between tasks: with the columns that were declared, and as bytes."""

import pyarrow as pa

from tallystick.errors import OptionError, RecordError

COMPRESSED_BYTES_MIN = 4096
"""Smaller batches are not worth compressing."""


def conform(rows: pa.RecordBatch, columns: pa.Schema, what: str) -> pa.RecordBatch:
    """Rows with exactly these columns, in this order; types are cast where no value changes.

    Args:
        rows: as a function returned them.
        columns: as they were declared.
        what: they are, for messages.

    Raises:
        OptionError: a column is missing, or there is one too many.
        RecordError: a value does not fit the declared type.
    """
    if not isinstance(rows, pa.RecordBatch):
        raise OptionError(f"{what}: expected a pyarrow RecordBatch, found {type(rows).__name__}")
    if rows.schema.equals(columns):
        return rows
    names = rows.schema.names
    for name in columns.names:
        if names.count(name) != 1:
            found = "is not there" if name not in names else "is there more than once"
            raise OptionError(
                f"{what}: column {name!r} {found}: expected {columns.names}, found {names}"
            )
    if more := [name for name in names if name not in columns.names]:
        raise OptionError(
            f"{what}: column {more[0]!r} is not declared: expected {columns.names}, found {names}. "
            f"Declare it, or leave it out"
        )
    cast = [_cast(rows.column(each.name), each, what) for each in columns]
    return pa.RecordBatch.from_arrays(cast, schema=columns)


def _cast(column: pa.Array, declared: pa.Field, what: str) -> pa.Array:
    if column.type == declared.type:
        return column
    try:
        return column.cast(declared.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise RecordError(
            f"{what}: column {declared.name!r} is {column.type}, and was declared {declared.type}: "
            f"{error}"
        ) from None


def to_ipc(rows: pa.RecordBatch) -> bytes:
    """A batch with its schema, as it travels in a frame."""
    codec = "lz4" if rows.nbytes >= COMPRESSED_BYTES_MIN else None
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with pa.ipc.new_stream(sink, rows.schema, options=options) as writer:
        writer.write_batch(rows)
    return bytes(sink.getvalue())


def from_ipc(data: bytes) -> pa.RecordBatch:
    """Read back what `to_ipc` made."""
    with pa.ipc.open_stream(data) as reader:
        return reader.read_next_batch()
