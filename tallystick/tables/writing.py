"""The task's side of the sink: rows become Parquet files in the table's folder.

The first thing that a task writes is an *intent*, an empty file with the attempt's name in the
hidden folder: `lingering` lists intents, not the table. All files of an attempt begin with its name
and lie in one folder: where a file lies says nothing, its partition values stand in the commit.
"""

import contextlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tallystick.epoch.two_phase import Committable, Place
from tallystick.errors import RecordError, StorageError
from tallystick.files.drafts import hidden_folder, name_of, pending_folder
from tallystick.files.folder import Folder
from tallystick.files.parquet import OpenParquet, WaitingRows
from tallystick.files.writing import BUFFER_BYTES_MAX, OPEN_PARTITIONS_MAX
from tallystick.host.stopwatch import WRITTEN_FILE_BYTES, WRITTEN_FILES, count
from tallystick.tables.columns import conformed
from tallystick.tables.compacting import Share, rows_of
from tallystick.tables.due import Compaction
from tallystick.tables.port import DataFile, Layout

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TablePlan:
    """The settings by which tasks write files.

    Args:
        folder: of the table.
        table_id: the table's own id.
        columns: of the table.
        layout: of the kind of table.
        compression: of Parquet.
        row_group_rows: the most rows of a row group; None: as pyarrow has it.
        shares: what tasks compact beside their rows.
    """

    folder: Folder
    table_id: str
    columns: pa.Schema
    layout: Layout
    compression: str
    row_group_rows: int | None = None
    shares: tuple[Share, ...] = ()

    def begin(self, place: Place) -> "TableTransaction":
        """See `TransactionPlan.begin`; names of an attempt are unique, so none collide."""
        return TableTransaction(self, place)


class TableTransaction:
    """The files of one attempt of a task. See `epoch.two_phase.Transaction`."""

    def __init__(self, plan: TablePlan, place: Place) -> None:
        self._plan, self._place = plan, place
        self._name, self._hidden = name_of(place), hidden_folder(place.owner)
        self._parts: dict[tuple[str | None, ...], _Part] = {}  # of the rows
        self._all_parts: list[_Part] = []
        self._row_count = self._buffered = 0
        self._begun_ms = int(time.time() * 1000)
        plan.folder.put(f"{pending_folder(self._hidden)}/{self._name}", b"")

    def write(self, rows: pa.RecordBatch) -> None:
        """See `Transaction.write`."""
        plan = self._plan
        rows = conformed(rows, plan.columns, plan.folder.name)
        for values, part_rows in plan.layout.split(rows):
            part = self._parts.get((*values.values(),)) or self._new_part(values, part_rows.schema)
            self._buffered += part.waiting.take(part_rows)
        while self._buffered > BUFFER_BYTES_MAX:
            largest = max(self._parts.values(), key=lambda part: part.waiting.byte_count)
            self._buffered -= largest.flush()
        self._row_count += rows.num_rows

    def _new_part(self, values: dict[str, str | None], schema: pa.Schema) -> "_Part":
        layout = self._plan.layout
        if len(self._parts) == OPEN_PARTITIONS_MAX:
            raise RecordError(
                f"{self._plan.folder.name}: one task writes into more than {OPEN_PARTITIONS_MAX} "
                f"partitions of {layout.partitioned_by} in one epoch. Key the rows by the same "
                f"columns first, so that a task has few of them."
            )
        part = self._parts[(*values.values(),)] = self._part(values, schema)
        return part

    def _part(self, values: dict[str, str | None], schema: pa.Schema) -> "_Part":
        folder = self._plan.layout.folder
        name = f"part-{self._name}-{len(self._all_parts)}{self._plan.layout.ending}"
        part = _Part(self._plan, f"{folder}/{name}" if folder else name, values, schema)
        self._all_parts.append(part)
        return part

    def prepare(self) -> Sequence[Committable]:
        """See `Transaction.prepare`."""
        place = self._place
        files = [part.close() for part in self._parts.values()]
        shares = [share for share in self._plan.shares if share.task == place.task]
        compactions = [*filter(None, (self._compacted(share.sources) for share in shares))]
        written = [*files, *(compaction.file for compaction in compactions)]
        self._plan.folder.sync_files(file.path for file in written)
        count(WRITTEN_FILES, len(written))
        count(WRITTEN_FILE_BYTES, sum(file.size for file in written))
        details = {
            "location": self._plan.folder.location,
            "table": self._plan.table_id,
            "files": files,
            "compactions": compactions,
        }
        return (
            Committable(
                sink=place.owner.sink,
                checkpoint_id=place.checkpoint_id,
                task=place.task,
                name=self._name,
                record_count=self._row_count,
                begun_ms=self._begun_ms,
                details=json.dumps(details, separators=(",", ":")),
            ),
        )

    def _compacted(self, sources: Sequence[DataFile]) -> Compaction | None:
        """Write the rows of small files into one large file; None: publish them as they are."""
        part: _Part | None = None
        try:
            for rows in rows_of(self._plan.folder, sources):
                part = part or self._part(sources[0].values, rows.schema)
                for batch in rows.to_batches():
                    part.waiting.take(batch)
                if part.waiting.byte_count > BUFFER_BYTES_MAX:
                    part.flush()
            assert part is not None, "a share has files"
            file, size = part.close(), sum(source.size for source in sources)
            assert file.rows == sum(source.rows for source in sources), file
            return Compaction(tuple(source.path for source in sources), size, file)
        except (StorageError, OSError, pa.ArrowException) as error:
            logger.warning("%s: files are not compacted: %s", self._plan.folder.name, error)
            if part is not None:
                part.drop()
                self._plan.folder.remove_file(part.path)
            return None

    def abort(self) -> None:
        """See `Transaction.abort`."""
        folder = self._plan.folder
        with contextlib.suppress(Exception):
            for part in self._all_parts:
                part.drop()
            folder.remove_files(part.path for part in self._all_parts)
            folder.remove_file(f"{pending_folder(self._hidden)}/{self._name}")


class _Part:
    """The file of one partition, and the rows that wait to be written."""

    def __init__(
        self, plan: TablePlan, path: str, values: dict[str, str | None], schema: pa.Schema
    ) -> None:
        self.plan, self.path, self.values = plan, path, values
        self.waiting = WaitingRows(schema)
        self._footers: list[pq.FileMetaData] = []
        self._open: OpenParquet | None = None

    def flush(self) -> int:
        """Write the waiting rows; return their size in bytes."""
        with self._failing():
            self._written()
        return self.waiting.clear()

    def _written(self) -> OpenParquet:
        if self._open is None:
            plan = self.plan
            self._open = OpenParquet(
                plan.folder,
                self.path,
                self.waiting.schema,
                plan.compression,
                self._footers,
                _with_dictionary(self.waiting.schema),
            )
        self._open.write(self.waiting.table(), self.plan.row_group_rows)
        return self._open

    def close(self) -> DataFile:
        """Write the waiting rows, end the file, and describe it."""
        with self._failing():
            size = self._written().close()
        (footer,) = self._footers
        now_ms = int(time.time() * 1000)
        facts = self.plan.layout.statistics(footer)
        return DataFile(self.path, size, footer.num_rows, self.values, now_ms, facts)

    def drop(self) -> None:
        """Close the open file."""
        if self._open is not None:
            self._open.drop()

    @contextlib.contextmanager
    def _failing(self) -> Any:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise self.plan.folder.failed(f"writing {self.path}", error) from None


def _with_dictionary(schema: pa.Schema) -> list[str] | None:
    """Return the columns of text and bytes; None, which is all, if columns have fields.

    The dictionary of a column of numbers is half of the time of a small file, and seldom pays.
    """
    if any(pa.types.is_nested(field.type) for field in schema):
        return None
    return [field.name for field in schema if not pa.types.is_primitive(field.type)]
