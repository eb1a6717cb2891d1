"""A Parquet file while a task writes it, and the rows that wait to be written."""

import contextlib
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tallystick.files.folder import Folder


class WaitingRows:
    """The rows of one partition that wait to be written, so that row groups get large.

    Args:
        schema: of the rows.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.row_count = self.byte_count = 0
        self._batches: list[pa.RecordBatch] = []

    def __bool__(self) -> bool:
        """True if batches wait, even without rows."""
        return bool(self._batches)

    def take(self, rows: pa.RecordBatch) -> int:
        """Let rows wait; return their size in bytes."""
        byte_count = int(rows.nbytes)
        self._batches.append(rows)
        self.row_count += rows.num_rows
        self.byte_count += byte_count
        return byte_count

    def table(self) -> pa.Table:
        """Return all rows that wait."""
        return pa.Table.from_batches(self._batches, self.schema)

    def clear(self) -> int:
        """Forget the rows, which are written; return their size in bytes."""
        byte_count, self._batches = self.byte_count, []
        self.row_count = self.byte_count = 0
        return byte_count


class OpenParquet:
    """An open Parquet file.

    Args:
        folder: where it lies.
        path: below the folder.
        schema: of the rows.
        compression: as Parquet names it.
        footers: gets the file's footer when the file is closed; None: nobody asks for it.
        dictionary: the columns that get a dictionary; None: all do, as long as that is small.
    """

    def __init__(
        self,
        folder: Folder,
        path: str,
        schema: pa.Schema,
        compression: str,
        footers: list[pq.FileMetaData] | None = None,
        dictionary: list[str] | None = None,
    ) -> None:
        self._stream = folder.create(path)
        self._writer: Any = pq.ParquetWriter(
            self._stream,
            schema,
            compression=compression,
            metadata_collector=footers,
            use_dictionary=True if dictionary is None else dictionary,
        )

    def write(self, rows: pa.Table, row_group_rows: int | None = None) -> int:
        """Write rows; return the size of the file so far, in bytes."""
        self._writer.write_table(rows, row_group_size=row_group_rows)
        return int(self._stream.tell())

    def close(self) -> int:
        """End the file; return its size in bytes."""
        self._writer.close()
        size = int(self._stream.tell())
        self._stream.close()
        return size

    def drop(self) -> None:
        """Close a file that nobody will name."""
        with contextlib.suppress(Exception):
            self._writer.close()
        self._stream.close()
