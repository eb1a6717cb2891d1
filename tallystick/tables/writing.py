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

from tallystick.epoch.two_phase import Committable, Place
from tallystick.errors import RecordError
from tallystick.files.drafts import check_disk, hidden_folder, name_of, pending_folder
from tallystick.files.writing import BUFFER_BYTES_MAX, OPEN_PARTITIONS_MAX
from tallystick.host.stopwatch import WRITTEN_FILE_BYTES, WRITTEN_FILES, count
from tallystick.tables.background import go_on, jobs_of
from tallystick.tables.columns import conformed
from tallystick.tables.compacting import Share
from tallystick.tables.parts import FileSettings, Part
from tallystick.tables.port import DataFile


@dataclass(frozen=True)
class TablePlan(FileSettings):
    """The settings by which tasks write files, those of `FileSettings` and the table's.

    Args:
        table_id: the table's own id.
        columns: of the table.
        shares: what tasks compact beside their epochs.
    """

    table_id: str
    columns: pa.Schema
    shares: tuple[Share, ...] = ()

    def begin(self, place: Place) -> "TableTransaction":
        """See `TransactionPlan.begin`; names of an attempt are unique, so none collide."""
        check_disk(self.folder, place.owner)
        return TableTransaction(self, place)


class TableTransaction:
    """The files of one attempt of a task. See `epoch.two_phase.Transaction`."""

    def __init__(self, plan: TablePlan, place: Place) -> None:
        self._plan, self._place = plan, place
        self._name, self._hidden = name_of(place), hidden_folder(place.owner)
        self._parts: dict[tuple[str | None, ...], Part] = {}
        self._ended = list[DataFile]()
        self._row_count = self._buffered = 0
        self._begun_ms = int(time.time() * 1000)
        plan.folder.put(f"{pending_folder(self._hidden)}/{self._name}", b"")
        go_on(plan, self._hidden, plan.shares, place.task)

    def write(self, rows: pa.RecordBatch) -> None:
        """See `Transaction.write`."""
        plan = self._plan
        rows = conformed(rows, plan.columns, plan.folder.name)
        for values, part_rows in plan.layout.split(rows):
            part = self._parts.get((*values.values(),)) or self._new_part(values, part_rows.schema)
            self._buffered += part.waiting.take(part_rows)
        while self._buffered > BUFFER_BYTES_MAX:
            largest = max(self._parts, key=lambda values: self._parts[values].waiting.byte_count)
            self._buffered -= self._flush(largest)
        self._row_count += rows.num_rows

    def _flush(self, values: tuple[str | None, ...]) -> int:
        """Write the rows that wait for a partition, with which a sorted file ends."""
        part = self._parts[values]
        if self._plan.order is None:
            return part.flush()
        waiting_bytes = part.waiting.byte_count
        self._ended.append(part.close())
        del self._parts[values]
        return waiting_bytes

    def _new_part(self, values: dict[str, str | None], schema: pa.Schema) -> Part:
        layout = self._plan.layout
        if len(self._parts) == OPEN_PARTITIONS_MAX:
            raise RecordError(
                f"{self._plan.folder.name}: one task writes into more than {OPEN_PARTITIONS_MAX} "
                f"partitions of {layout.partitioned_by} in one epoch. Key the rows by the same "
                f"columns first, so that a task has few of them."
            )
        name = f"part-{self._name}-{len(self._ended) + len(self._parts)}"
        part = self._parts[(*values.values(),)] = Part(self._plan, name, values, schema)
        return part

    def prepare(self) -> Sequence[Committable]:
        """See `Transaction.prepare`; compactions that are done have committables of their own."""
        files = [*self._ended, *(part.close() for part in self._parts.values())]
        self._plan.folder.sync_files(file.path for file in files)
        jobs = jobs_of(self._plan, self._hidden, self._place.task)
        done = {job.share.name: job.compactions for job in jobs if job.compactions}
        compacted = [compaction.file for compactions in done.values() for compaction in compactions]
        written = [*files, *compacted]
        count(WRITTEN_FILES, len(written))
        count(WRITTEN_FILE_BYTES, sum(file.size for file in written))
        known = [job.share.name for job in jobs]
        failed = [job.share.name for job in jobs if job.has_failed]
        return (
            self._committable(self._name, files=files, known=known, failed=failed),
            *(
                self._committable(name, compactions=compactions)
                for name, compactions in done.items()
            ),
        )

    def _committable(self, name: str, **parts: Sequence[Any]) -> Committable:
        place, plan = self._place, self._plan
        details = {"location": plan.folder.location, "table": plan.table_id, **parts}
        return Committable(
            sink=place.owner.sink,
            checkpoint_id=place.checkpoint_id,
            task=place.task,
            name=name,
            record_count=self._row_count if name == self._name else 0,
            begun_ms=self._begun_ms,
            details=json.dumps(details, separators=(",", ":")),
        )

    def abort(self) -> None:
        """See `Transaction.abort`."""
        folder = self._plan.folder
        with contextlib.suppress(Exception):
            for part in self._parts.values():
                part.drop()
            folder.remove_files(file.path for file in self._ended)
            folder.remove_files(part.path for part in self._parts.values())
            folder.remove_file(f"{pending_folder(self._hidden)}/{self._name}")
