"""The task's side of the sink: rows become Parquet files in the table's folder.

The first thing that a task writes is an *intent*, an empty file with the attempt's name in the
hidden folder: `lingering` lists intents, not the table. All files of an attempt begin with its name
and lie in one folder: where a file lies says nothing, its partition values stand in the commit.
"""

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tallystick.epoch.two_phase import Committable, Place
from tallystick.errors import RecordError
from tallystick.files.drafts import hidden_folder, name_of, pending_folder
from tallystick.files.folder import Folder
from tallystick.files.parquet import OpenParquet, WaitingRows
from tallystick.files.writing import BUFFER_BYTES_MAX, OPEN_PARTITIONS_MAX
from tallystick.host.stopwatch import WRITTEN_FILE_BYTES, WRITTEN_FILES, count
from tallystick.tables.columns import conformed
from tallystick.tables.port import DataFile, Layout


@dataclass(frozen=True)
class TablePlan:
    """The settings by which tasks write files.

    Args:
        folder: of the table.
        table_id: the table's own id.
        columns: of the table.
        layout: of the kind of table.
        compression: of Parquet.
    """

    folder: Folder
    table_id: str
    columns: pa.Schema
    layout: Layout
    compression: str

    def begin(self, place: Place) -> "TableTransaction":
        """See `TransactionPlan.begin`; names of an attempt are unique, so none collide."""
        return TableTransaction(self, place)


class TableTransaction:
    """The files of one attempt of a task. See `epoch.two_phase.Transaction`."""

    def __init__(self, plan: TablePlan, place: Place) -> None:
        self._plan, self._place = plan, place
        self._name, self._hidden = name_of(place), hidden_folder(place.owner)
        self._parts: dict[tuple[str | None, ...], _Part] = {}
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
        name = f"part-{self._name}-{len(self._parts)}.parquet"
        path = f"{layout.folder}/{name}" if layout.folder else name
        part = self._parts[(*values.values(),)] = _Part(self._plan, path, values, schema)
        return part

    def prepare(self) -> Sequence[Committable]:
        """See `Transaction.prepare`."""
        files = [part.close() for part in self._parts.values()]
        self._plan.folder.sync_files(file.path for file in files)
        count(WRITTEN_FILES, len(files))
        count(WRITTEN_FILE_BYTES, sum(file.size for file in files))
        place = self._place
        details = {
            "location": self._plan.folder.location,
            "table": self._plan.table_id,
            "files": files,
            "compactions": [],
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

    def abort(self) -> None:
        """See `Transaction.abort`."""
        folder = self._plan.folder
        with contextlib.suppress(Exception):
            for part in self._parts.values():
                part.drop()
            folder.remove_files(part.path for part in self._parts.values())
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
                plan.folder, self.path, self.waiting.schema, plan.compression, self._footers
            )
        self._open.write(self.waiting.table())
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
