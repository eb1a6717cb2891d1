"""Broadcast tables in the tasks of an epoch: each task reads what is new of the control topic.

    committed table ─┐
    control topic ───┴─► the epoch's table, the same in each task ─► functions, with their rows
                                      └─► what changed: one file, which the first reader writes

A table has all control rows of the epoch before a function sees the first row of its own, and of
the next epoch none: so its output follows from its offsets, wherever its tasks run.

The ranges of offsets are the plan's. A record may vanish between two readings all the same
(compaction), and a function may not give the same twice: tasks note a digest of what changed, and
an epoch whose tasks do not agree is aborted.

Tables lie in the memory of worker processes, by version: what is not there is read from the
checkpoint. Nothing else keeps them.
"""

import hashlib
import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from tallystick.checkpoint.state_files import (
    changes_since,
    newest_entries,
    write_changelog,
)
from tallystick.codec.spans import spans_of
from tallystick.errors import BrokenInvariantError, EpochAbortedError, OptionError
from tallystick.host import stopwatch as clock
from tallystick.ports import Storage
from tallystick.state.catalog import StateFile, StepState, Version
from tallystick.state.file_sets import extend
from tallystick.state.operator_state import WHOLE, TableCodec, TableContent
from tallystick.state.overlay import one_batch
from tallystick.tasks.operator_files import FIRST_READER, rewritten
from tallystick.tasks.outputs import Batch, DeclaredFunction, Predicate, Rows, mask_of
from tallystick.tasks.read import BatchFunction
from tallystick.tasks.read_plan import ReadPlan
from tallystick.values import SplitRange, TopicPartition

NOTE = "table"
"""The field that makes a task's note one of a table."""
TOO_MANY = "narrow the rows that it keeps, or spread them over several tables"
HELD_BYTES = 64 << 20
"""The changes of a partition, about, before they are reduced to the newest of each key."""
TABLES_MAX = 32
"""The most tables that a process remembers."""


class StateFiles(Protocol):
    """The way of a task to the checkpoint's files; see `keyed.WorkerHost`."""

    def storage(self) -> Storage:
        """The checkpoint's files."""
        ...


@dataclass(frozen=True)
class TableStep:
    """A broadcast table, checked and with all types known.

    Args:
        uid: names the table's state, and the positions in the control topic.
        codec: of its rows.
        read: how the control topic is read.
        deleted: true for rows that delete the row of their key; None: no row deletes.
    """

    uid: str
    codec: TableCodec
    read: ReadPlan
    deleted: Predicate | None = None

    def entries(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the entries of rows of the control topic; see `TableCodec.entries`."""
        is_deleted = pa.array(np.zeros(rows.num_rows, np.bool_))
        if self.deleted is not None:
            what = f"table {self.uid}, delete="
            is_deleted = mask_of(self.deleted, rows, what).fill_null(False)
        return self.codec.entries(rows, is_deleted)


class _Version(NamedTuple):
    """A table in memory, with the changes of its epoch; no changes if it was only read."""

    content: TableContent
    changes: pa.RecordBatch | None = None
    digest: str = ""
    record_count: int = 0


_versions: dict[tuple[str, str], dict[Version, _Version]] = {}
"""The two newest versions of tables, by place of the checkpoint and uid."""


def _hold(place: tuple[str, str], version: Version, table: _Version) -> _Version:
    others = {at: other for at, other in _versions.pop(place, {}).items() if at != version}
    _versions[place] = {**dict(list(others.items())[-1:]), version: table}
    while len(_versions) > TABLES_MAX:
        del _versions[next(iter(_versions))]
    return table


@dataclass(frozen=True)
class TablePlan:
    """The plan of a broadcast table in an epoch, sent to the tasks.

    Args:
        step: the table.
        base: the committed state.
        version: of the state that the epoch leaves, if it changes anything.
        splits: what is new in the control topic.
        files: the way to the checkpoint.
    """

    step: TableStep
    base: StepState
    version: Version
    splits: tuple[SplitRange, ...]
    files: StateFiles

    @property
    def rows(self) -> pa.Table:
        """The table's rows, with all control rows of the epoch."""
        return self.content.rows

    @property
    def content(self) -> TableContent:
        """The table after all control rows of the epoch.

        Raises:
            DataLossError, RecordError: of the control topic, as any input may.
            StateFileError: a file of state is missing or damaged.
        """
        with clock.counted_as(clock.STATE):
            return self._epoch.content if self.splits else self._base()

    def notes(self, task: int | None = None) -> list[str]:
        """Return what the driver is to be told: a digest, and by the first reader all files.

        Args:
            task: the index of a reader; None: it is another task.
        """
        if not self.splits:
            return []
        fields: dict[str, Any] = {NOTE: self.step.uid, "files": None}
        if task == FIRST_READER:
            table = self._epoch
            clock.count(clock.READ_RECORDS, table.record_count)
            with clock.counted_as(clock.STATE):
                fields["files"] = [asdict(file) for file in self._written(table)]
        kept_table = _versions.get(self._place, {}).get(self.version)
        return [] if kept_table is None else [json.dumps({**fields, "digest": kept_table.digest})]

    @property
    def _place(self) -> tuple[str, str]:
        return self.files.storage().location, self.step.uid

    @property
    def _epoch(self) -> _Version:
        kept_table = _versions.get(self._place, {}).get(self.version)
        if kept_table is not None:
            return kept_table
        base = self._base()
        changes, record_count = self._changes()
        content = base.changed(changes)
        table = _Version(content, changes, _digest(changes), record_count)
        return _hold(self._place, self.version, table)

    def _base(self) -> TableContent:
        """Return the committed table."""
        base, kept = self.base, _versions.get(self._place, {})
        if base.version is None:
            return TableContent.empty(self.step.codec)
        if base.version in kept:
            return _hold(self._place, base.version, kept[base.version]).content
        have = next((version for version in reversed(base.trail) if version in kept), None)
        since = changes_since(base, have, WHOLE, self.files.storage())
        before = TableContent.empty(self.step.codec)
        if have is not None and not since.is_whole:
            before = kept[have].content
        return _hold(self._place, base.version, _Version(before.changed(since.entries))).content

    def _changes(self) -> tuple[pa.RecordBatch, int]:
        """Return the changes by the epoch's control rows, and the number of control rows.

        Rows of the same key count in the order of partitions, and of offsets within a partition.
        """
        entries_by_partition: dict[TopicPartition, list[pa.RecordBatch]] = {}
        sizes: dict[TopicPartition, int] = {}
        record_count = 0
        # Each task reads them: they are counted where they are written.
        with clock.stopwatch():
            for partition, rows in self.step.read.read_by_partition(self.splits):
                entries = self.step.entries(rows)
                record_count += rows.num_rows
                entries_by_partition.setdefault(partition, []).append(entries)
                sizes[partition] = sizes.get(partition, 0) + entries.nbytes
                if sizes[partition] > HELD_BYTES:
                    entries_by_partition[partition] = newest_entries(
                        entries_by_partition[partition]
                    ).to_batches()
                    sizes[partition] = 0
        newest = newest_entries(
            [batch for at in sorted(entries_by_partition) for batch in entries_by_partition[at]]
        )
        return one_batch(newest, f"the changes of table {self.step.uid}", TOO_MANY), record_count

    def _written(self, epoch_table: _Version) -> Iterator[StateFile]:
        """Write due snapshots of the committed table, then the epoch's changes; yield the files."""
        storage, nonce = self.files.storage(), secrets.token_hex(8)
        uid, epoch = self.step.uid, self.version.epoch
        yield from rewritten(self.base, epoch, storage, nonce)
        assert epoch_table.changes is not None, "made in this epoch"
        table = pa.Table.from_batches([epoch_table.changes])
        changed = write_changelog(storage, uid, epoch, FIRST_READER, nonce, table)
        if changed is not None:
            yield changed


def _digest(entries: pa.RecordBatch) -> str:
    """Return a digest of entries: of their values, not of how Arrow laid them out."""
    digest = hashlib.blake2b(digest_size=16)
    for column in entries.columns:
        spans = spans_of(column, "entries")
        digest.update(spans.lengths.tobytes())
        if len(column):
            stop = int(spans.starts[-1] + max(spans.lengths[-1], 0))
            digest.update(spans.data[int(spans.starts[0]) : stop].tobytes())
    return digest.hexdigest()


class TableUser(Protocol):
    """A function, made by `ts.enrich`, that takes the table's content with an index."""

    def join(self, rows: pa.RecordBatch, content: TableContent) -> pa.RecordBatch:
        """Return rows with columns of the table."""
        ...


TableFunctionType = Callable[[pa.RecordBatch, pa.Table], Batch | Rows]


@dataclass(frozen=True)
class TableFunction:
    """A function of `map_batches` with a broadcast table.

    Args:
        function: as the user wrote it, or a `TableUser`.
        uid: of the table.
        plan: of the epoch; None until an epoch is planned.
    """

    function: TableFunctionType | TableUser
    uid: str
    plan: TablePlan | None = None

    @property
    def __name__(self) -> str:
        """The name of the user's function, for messages."""
        return str(getattr(self.function, "__name__", self.function))

    def __call__(self, rows: pa.RecordBatch) -> Batch | Rows:
        """Call the function with the rows and the table."""
        assert self.plan is not None, "an epoch's tasks have the table's plan"
        if callable(self.function):
            return self.function(rows, self.plan.rows)
        return self.function.join(rows, self.plan.content)


Function = TypeVar("Function", bound=BatchFunction)


def with_tables(
    functions: tuple[BatchFunction, ...], plans: Sequence[TablePlan]
) -> tuple[BatchFunction, ...]:
    """Return functions with the tables of an epoch; the same ones where none has any."""
    by_uid = {plan.step.uid: plan for plan in plans}

    def bound(function: BatchFunction) -> BatchFunction:
        match function:
            case TableFunction(uid=uid):
                return replace(function, plan=by_uid[uid])
            case DeclaredFunction(function=TableFunction() as inner):
                return replace(function, function=bound(inner))
        return function

    return tuple(map(bound, functions)) if plans else functions


def tables_after(plans: Sequence[TablePlan], notes: Iterable[dict[str, Any]]) -> list[StepState]:
    """Return the tables at the end of an epoch.

    Args:
        plans: of the epoch.
        notes: of its tasks.

    Raises:
        EpochAbortedError: tasks did not have the same table.
        BrokenInvariantError: the task that writes the changes was not heard of, or twice.
    """
    all_notes = list(notes)
    return [
        _after(plan, [note for note in all_notes if note[NOTE] == plan.step.uid]) for plan in plans
    ]


def _after(plan: TablePlan, notes: Sequence[dict[str, Any]]) -> StepState:
    if not plan.splits:
        return plan.base
    uid, epoch = plan.step.uid, plan.version.epoch
    if len({note["digest"] for note in notes}) > 1:
        raise EpochAbortedError(
            f"table {uid}: the tasks of epoch {epoch} did not read the same from its topic "
            f"({', '.join(sorted({str(split.topic) for split in plan.splits}))}). Records were "
            f"compacted or deleted meanwhile, and the epoch runs again; or, if that goes on, a "
            f"function of the table's stream does not return the same for the same rows"
        )
    written = [note["files"] for note in notes if note["files"] is not None]
    if len(written) != 1:
        raise BrokenInvariantError(
            f"table {uid}, epoch {epoch}: {len(written)} tasks wrote what changed, expected 1"
        )
    files = [StateFile(**fields) for fields in written[0]]
    return extend(plan.base, plan.version, files) if files else plan.base


def refuse_transform(uids: Iterable[str]) -> None:
    """Refuse operator state where DataFrame code runs.

    Raises:
        OptionError: there are some.
    """
    for uid in uids:
        raise OptionError(
            f"state {uid!r}: a pipeline with transform steps has no operator state: its readers "
            f"send their rows through the JVM, without a word to the driver. Put the DataFrame "
            f"code into map_batches"
        )
