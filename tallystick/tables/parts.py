"""The Parquet file of one partition while a task writes it."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from tallystick.files.folder import Folder
from tallystick.files.parquet import OpenParquet, WaitingRows
from tallystick.tables.port import DataFile, Layout


@dataclass(frozen=True)
class FileSettings:
    """The settings by which files are written.

    Args:
        folder: of the table.
        layout: of the kind of table.
        compression: of Parquet.
        row_group_rows: the most rows of a row group; None: as pyarrow has it.
        order: sorts the rows of a file; None: they stay in their order.
    """

    folder: Folder
    layout: Layout
    compression: str
    _: KW_ONLY
    row_group_rows: int | None = None
    order: Callable[[pa.Table], pa.Table] | None = None


class Part:
    """The file of one partition, and the rows that wait to be written.

    Args:
        settings: of the file.
        name: of the file, without its ending.
        values: of the partition.
        schema: of the rows.
    """

    def __init__(
        self, settings: FileSettings, name: str, values: dict[str, str | None], schema: pa.Schema
    ) -> None:
        layout = settings.layout
        self.path = "/".join(filter(None, (layout.folder, f"{name}{layout.ending}")))
        self.waiting = WaitingRows(schema)
        self._settings, self._values = settings, values
        self._footers: list[pq.FileMetaData] = []
        self._open: OpenParquet | None = None

    def flush(self) -> int:
        """Write the waiting rows; return their size in bytes. Not of a file that is sorted."""
        with self._failing():
            self._written()
        return self.waiting.clear()

    def _written(self) -> OpenParquet:
        if self._open is None:
            settings, schema = self._settings, self.waiting.schema
            self._open = OpenParquet(
                settings.folder,
                self.path,
                schema,
                settings.compression,
                self._footers,
                _with_dictionary(schema),
            )
        rows, order = self.waiting.table(), self._settings.order
        self._open.write(rows if order is None else order(rows), self._settings.row_group_rows)
        return self._open

    def close(self) -> DataFile:
        """Write the waiting rows, end the file, and describe it."""
        with self._failing():
            size = self._written().close()
        self.waiting.clear()
        (footer,) = self._footers
        now_ms = int(time.time() * 1000)
        facts = self._settings.layout.statistics(footer)
        return DataFile(self.path, size, footer.num_rows, self._values, now_ms, facts)

    def drop(self) -> None:
        """Close the open file."""
        if self._open is not None:
            self._open.drop()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise self._settings.folder.failed(f"writing {self.path}", error) from None


def _with_dictionary(schema: pa.Schema) -> list[str] | None:
    """Return the columns of text and bytes; None, which is all, if columns have fields.

    The dictionary of a column of numbers is half of the time of a small file, and seldom pays.
    """
    if any(pa.types.is_nested(field.type) for field in schema):
        return None
    return [field.name for field in schema if not pa.types.is_primitive(field.type)]
