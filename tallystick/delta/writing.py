"""The task's side of the sink: rows become Parquet files in the table's folder.

The first thing that a task writes is an *intent*, an empty file with the attempt's name in the
hidden folder: `lingering` lists intents, not the table. All files of an attempt begin with its name
and lie in the table's folder itself: where a file lies says nothing in Delta, its partition values
stand in the log.
"""

import contextlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from tallystick.delta.table import conformed
from tallystick.epoch.two_phase import Committable, Place
from tallystick.errors import RecordError
from tallystick.files.drafts import hidden_folder, name_of, pending_folder
from tallystick.files.folder import Folder
from tallystick.files.parquet import OpenParquet, WaitingRows
from tallystick.files.writing import BUFFER_BYTES_MAX, OPEN_PARTITIONS_MAX, split_by_values
from tallystick.host.stopwatch import WRITTEN_FILE_BYTES, WRITTEN_FILES, count

TEXT_MAX = 32
"""A bound that is longer is left out of the statistics; Spark cuts texts at this length."""
INDEXED_COLUMNS = 32
"""The columns with statistics, as many as `delta.dataSkippingNumIndexedCols` says by default."""


class DataFile(NamedTuple):
    """A file that a Delta commit adds.

    Args:
        path: below the table's folder.
        size: in bytes.
        values: of the partition's columns, as Delta writes them; null and "" are both None.
        modified_ms: when it was written, in ms since 1970.
        statistics: JSON, as Delta's log has it.
    """

    path: str
    size: int
    values: dict[str, str | None]
    modified_ms: int
    statistics: str


@dataclass(frozen=True)
class DeltaPlan:
    """The settings by which tasks write files.

    Args:
        folder: of the table.
        table_id: the table's own id.
        columns: of the table.
        partition_by: the table's partition columns.
        compression: of Parquet.
    """

    folder: Folder
    table_id: str
    columns: pa.Schema
    partition_by: tuple[str, ...]
    compression: str

    def begin(self, place: Place) -> "DeltaTransaction":
        """See `TransactionPlan.begin`; names of an attempt are unique, so none collide."""
        return DeltaTransaction(self, place)


class DeltaTransaction:
    """The files of one attempt of a task. See `epoch.two_phase.Transaction`."""

    def __init__(self, plan: DeltaPlan, place: Place) -> None:
        self._plan, self._place = plan, place
        self._name, self._hidden = name_of(place), hidden_folder(place.owner)
        self._parts: dict[tuple[str | None, ...], _Part] = {}
        self._row_count = self._buffered = 0
        self._begun_ms = int(time.time() * 1000)
        plan.folder.put(f"{pending_folder(self._hidden)}/{self._name}", b"")

    def write(self, rows: pa.RecordBatch) -> None:
        """See `Transaction.write`."""
        plan = self._plan
        rows = conformed(rows, plan.columns, plan.folder.location)
        by = plan.partition_by
        for values, part_rows in split_by_values(rows, by) if by else [([], rows)]:
            key = tuple(value or None for value in values)
            part = self._parts.get(key) or self._new_part(key, part_rows.schema)
            self._buffered += part.waiting.take(part_rows)
        while self._buffered > BUFFER_BYTES_MAX:
            largest = max(self._parts.values(), key=lambda part: part.waiting.byte_count)
            self._buffered -= largest.flush()
        self._row_count += rows.num_rows

    def _new_part(self, key: tuple[str | None, ...], schema: pa.Schema) -> "_Part":
        by = self._plan.partition_by
        if len(self._parts) == OPEN_PARTITIONS_MAX:
            raise RecordError(
                f"Delta table {self._plan.folder.location}: one task writes into more than "
                f"{OPEN_PARTITIONS_MAX} partitions of {', '.join(by)} in one epoch. Key the rows "
                f"by the same columns first, so that a task has few of them."
            )
        path = f"part-{self._name}-{len(self._parts)}.parquet"
        values = dict(zip(by, key, strict=True))
        self._parts[key] = _Part(self._plan, path, values, schema)
        return self._parts[key]

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
        self, plan: DeltaPlan, path: str, values: dict[str, str | None], schema: pa.Schema
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
        return DataFile(self.path, size, self.values, now_ms, statistics(footer))

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


def statistics(footer: pq.FileMetaData) -> str:
    """Return what a file's footer says about columns without fields, as Delta's log has it.

    Left out are bounds of floats, which a NaN makes wrong, of decimals, and of long texts.
    """
    bounds: dict[str, list[Any]] = {}
    nulls: dict[str, int] = {}
    for place in range(min(footer.num_columns, INDEXED_COLUMNS)):
        groups = [footer.row_group(n).column(place) for n in range(footer.num_row_groups)]
        name = groups[0].path_in_schema if groups else ""
        column = footer.schema.column(place)
        if not groups or column.max_repetition_level or column.max_definition_level > 1:
            continue
        if "." in name or any(group.statistics is None for group in groups):
            continue
        facts = [group.statistics for group in groups]
        if all(fact.has_null_count for fact in facts):
            nulls[name] = sum(fact.null_count for fact in facts)
        limits = [(fact.min, fact.max) for fact in facts if fact.has_min_max]
        with_rows = [fact for fact in facts if fact.num_values]
        if limits and len(limits) == len(with_rows):
            lowest, highest = min(low for low, _ in limits), max(high for _, high in limits)
            texts = _bound(lowest, is_upper=False), _bound(highest, is_upper=True)
            if None not in texts:
                bounds[name] = list(texts)
    return json.dumps(
        {
            "numRecords": footer.num_rows,
            "minValues": {name: low for name, (low, _) in bounds.items()},
            "maxValues": {name: high for name, (_, high) in bounds.items()},
            "nullCount": nulls,
        },
        separators=(",", ":"),
    )


def _bound(value: Any, *, is_upper: bool) -> int | str | None:
    """Return a bound as JSON has it in Delta; None: it is left out."""
    if type(value) is int:
        return value
    if type(value) is str and len(value) <= TEXT_MAX:
        return value
    if isinstance(value, datetime):
        at = value if value.tzinfo else value.replace(tzinfo=UTC)
        us = round((at - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1_000_000)
        ms = math.ceil(us / 1000) if is_upper else us // 1000
        text = datetime.fromtimestamp(ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        suffix = "Z" if value.tzinfo else ""
        return f"{text}.{ms % 1000:03d}{suffix}" if 1900 <= value.year <= 9000 else None
    if type(value) is date:
        return value.isoformat()
    return None
