"""Operator state in the tasks of an epoch: broadcast tables, and lists of readers.

**Tables**: each task reads what is new of the control topic.

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

**Lists**: each reading task has a list, which goes on in the next epoch.

    committed lists ─► the task's own ─► function, batch after batch ─► what changed: a file

A task reads its list when its function is first called, and keeps it in the memory of its process,
by version. All tasks run in each epoch, so that a partition is always read by the task that has it.
Where the number of tasks has changed, each one takes its share of all lists and writes it, called
or not.

One task writes files again for all: merged changelogs and snapshots.
"""

import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.checkpoint.state_files import (
    changes_since,
    newest_entries,
    write_changelog,
    write_merged,
    write_snapshot,
)
from tallystick.codec.own_memory import own
from tallystick.codec.spans import spans_of
from tallystick.errors import BrokenInvariantError, EpochAbortedError, OptionError
from tallystick.host import stopwatch as clock
from tallystick.ports import Storage
from tallystick.state.catalog import StateFile, StepState, Version
from tallystick.state.compatibility import AS_BEFORE, Succession
from tallystick.state.file_sets import due_merges, due_snapshots, extend
from tallystick.state.functions.processing import StateDeclaration
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.meaning import Meaning
from tallystick.state.operator_state import (
    ALL_TASKS,
    WHOLE,
    ListCodec,
    TableCodec,
    TableContent,
    deletions_beyond,
    list_changes,
    shared_values,
)
from tallystick.state.overlay import EmptyView, one_batch
from tallystick.tasks.dataframes import DataFrameFunction
from tallystick.tasks.frames import Note, NoteKind, conform
from tallystick.tasks.outputs import Batch, DeclaredFunction, Predicate, Rows, mask_of
from tallystick.tasks.read import BatchFunction
from tallystick.tasks.read_plan import ReadPlan
from tallystick.values import SplitRange, TopicPartition

FIRST_READER = 0
"""The task that writes the files of tables, and merged changelogs and snapshots of lists."""


def rewritten(base: StepState, epoch: int, storage: Storage, nonce: str) -> Iterator[StateFile]:
    """Write again what is due of the committed state.

    Args:
        base: the committed state.
        epoch: the one that runs.
        storage: the checkpoint's files.
        nonce: that no other attempt has drawn.
    """
    if base.version is None or not base.files:
        return
    name = (storage, base.uid, base.version.epoch, FIRST_READER, nonce)
    if FIRST_READER in (merges := due_merges(base, 1)):
        yield write_merged(*name, merges[FIRST_READER], base=base, written_in=epoch)
    if FIRST_READER in (due := due_snapshots(base, 1)):
        view = CommittedEntries(base, storage)
        yield write_snapshot(*name, view, due[FIRST_READER], written_in=epoch)


class CommittedEntries(EmptyView):
    """The committed entries of operator state, read from its files."""

    def __init__(self, base: StepState, storage: Storage) -> None:
        self._base, self._storage = base, storage

    def batches(self, groups: KeyGroupRange) -> Iterator[pa.RecordBatch]:
        """See `StateView.batches`."""
        entries = changes_since(self._base, None, groups, self._storage).entries
        yield entries.filter(pc.is_valid(entries.column(1)))


TOO_MANY_ROWS = "narrow the rows that it keeps, or spread them over several tables"
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
        succession: the way from the state in the checkpoint to the table.
        meaning: of its state: the definitions of its columns.
    """

    uid: str
    codec: TableCodec
    read: ReadPlan
    deleted: Predicate | None = None
    succession: Succession = AS_BEFORE
    meaning: Meaning = ()

    @property
    def declaration(self) -> StateDeclaration:
        """The declaration of the table's state."""
        return replace(self.codec.declaration, meaning=self.meaning)

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


_tables: dict[tuple[str, str], dict[Version, _Version]] = {}
"""The two newest versions of tables, by place of the checkpoint and uid."""


def _hold(place: tuple[str, str], version: Version, table: _Version) -> _Version:
    others = {at: other for at, other in _tables.pop(place, {}).items() if at != version}
    _tables[place] = {**dict(list(others.items())[-1:]), version: table}
    while len(_tables) > TABLES_MAX:
        del _tables[next(iter(_tables))]
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

    def notes(self, task: int | None = None) -> list[Note]:
        """Return what the driver is to be told: a digest, and by the first reader all files.

        Args:
            task: the index of a reader; None: it is another task.
        """
        if not self.splits:
            return []
        fields: dict[str, Any] = {"uid": self.step.uid, "files": None}
        table = _tables.get(self._place, {}).get(self.version)
        if task == FIRST_READER:
            table = self._epoch  # others may push it out of the memory while it is written
            clock.count(clock.READ_RECORDS, table.record_count)
            with clock.counted_as(clock.STATE):
                fields["files"] = [asdict(file) for file in self._written(table)]
        if table is None:
            return []
        return [Note(NoteKind.TABLE, {**fields, "digest": table.digest})]

    @property
    def _place(self) -> tuple[str, str]:
        return self.files.storage().location, self.base.copy_name

    @property
    def _epoch(self) -> _Version:
        kept_table = _tables.get(self._place, {}).get(self.version)
        if kept_table is not None:
            return kept_table
        base = self._base()
        changes, record_count = self._changes()
        content = base.changed(changes)
        table = _Version(content, changes, _digest(changes), record_count)
        return _hold(self._place, self.version, table)

    def _base(self) -> TableContent:
        """Return the committed table."""
        base, kept = self.base, _tables.get(self._place, {})
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
        return one_batch(
            newest, f"the changes of table {self.step.uid}", TOO_MANY_ROWS
        ), record_count

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


def with_tables(
    functions: tuple[BatchFunction, ...], plans: Sequence[TablePlan]
) -> tuple[BatchFunction, ...]:
    """Return functions with the tables of an epoch; the same ones where none has any."""
    return _filled(functions, TableFunction, "plan", {plan.step.uid: plan for plan in plans})


def _filled(
    functions: tuple[BatchFunction, ...],
    kind: "type[TableFunction] | type[ListFunction]",
    field: str,
    values: Mapping[str, Any],
) -> tuple[BatchFunction, ...]:
    """Return functions, a field of those of one kind set to the value under the uid."""

    def filled(function: BatchFunction) -> BatchFunction:
        if isinstance(function, kind):
            return replace(function, **{field: values[function.uid]})
        if isinstance(function, DeclaredFunction) and isinstance(function.function, kind):
            return replace(function, function=filled(function.function))
        return function

    return tuple(map(filled, functions)) if values else functions


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
        _table_after(plan, [note for note in all_notes if note["uid"] == plan.step.uid])
        for plan in plans
    ]


def _table_after(plan: TablePlan, notes: Sequence[dict[str, Any]]) -> StepState:
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


TOO_MANY_ELEMENTS = "keep fewer elements, or spread them over more tasks"
LISTS_MAX = 256
"""The most lists that a process remembers."""


@dataclass(frozen=True)
class ListStep:
    """A list state with all types known.

    Args:
        uid: names it.
        codec: of its elements.
        union: of another number of tasks each gets all elements, and this says which are its own;
            None: they are divided evenly.
        succession: the way from the state in the checkpoint to the list.
    """

    uid: str
    codec: ListCodec
    union: "UnionFunction | None" = None
    succession: Succession = AS_BEFORE


UnionFunction = Callable[[pa.RecordBatch, int, int], pa.RecordBatch | pa.Table]
"""Gets the elements of all tasks, the number of its own, and how many there are."""

_lists: dict[tuple[str, str, int], dict[Version, pa.BinaryArray]] = {}
"""The lists of tasks at their newest versions, by place of the checkpoint, uid and task."""


@dataclass(frozen=True)
class ListPlan:
    """The plan of a list state in an epoch, sent to the reading tasks.

    Args:
        step: the state.
        base: the committed state, with this epoch's parallelism.
        before: the parallelism of the epoch that left the state.
        version: of the state that the epoch leaves, if it changes anything.
        files: the way to the checkpoint.
    """

    step: ListStep
    base: StepState
    before: int
    version: Version
    files: StateFiles

    @property
    def is_rescaled(self) -> bool:
        """True if each task gets its share of all lists."""
        return self.base.version is not None and self.before != self.base.parallelism

    def opened(self, task: int) -> "OpenList":
        """Return the list of a task, opened for one attempt."""
        return OpenList(self, task)


class OpenList:
    """The list of a task, opened for an attempt that reads and changes its elements.

    Args:
        plan: of the epoch.
        task: its number.
    """

    def __init__(self, plan: ListPlan, task: int) -> None:
        self._plan, self._task = plan, task
        self._codec = plan.step.codec
        self._what = f"list state {plan.step.uid!r}"
        self._committed: pa.BinaryArray | None = None  # of the task of this number
        self._all: pa.RecordBatch | None = None  # of all tasks, where they share anew
        self._elements: pa.RecordBatch | None = None

    def call(self, function: "ListFunctionType", rows: pa.RecordBatch) -> Batch | Rows:
        """Pass a batch, with the elements as they are now, through a function.

        Raises:
            OptionError: it did not return a pair, or other columns than were declared.
        """
        result = function(rows, self.elements)
        if not isinstance(result, tuple) or len(result) != 2:
            raise OptionError(
                f"{self._what}: the function returned {type(result).__name__}: expected a pair, "
                f"the rows and the elements that the list is to have: return rows, elements"
            )
        output, elements = result
        self._elements = self._conformed(elements, "the elements")
        return output

    def _conformed(self, elements: pa.RecordBatch | pa.Table, what: str) -> pa.RecordBatch:
        if isinstance(elements, pa.Table):
            elements = one_batch(elements, self._what, TOO_MANY_ELEMENTS)
        # They are kept while the function is called again.
        return own(conform(elements, self._codec.columns, f"{self._what}: {what}"))

    @property
    def elements(self) -> pa.RecordBatch:
        """The elements of the list, as the attempt has left them so far."""
        if self._elements is None:
            with clock.counted_as(clock.STATE):
                self._elements = self._begun()
        return self._elements

    def notes(self) -> list[Note]:
        """Write the attempt's changes to a file, and return the notes for the driver."""
        plan, files = self._plan, list[StateFile]()
        storage, nonce, epoch = plan.files.storage(), secrets.token_hex(8), plan.version.epoch
        with clock.counted_as(clock.STATE):
            if self._task == FIRST_READER:
                files += rewritten(plan.base, epoch, storage, nonce)
            if self._elements is not None or plan.is_rescaled:
                after = self._codec.encode(self.elements)
                table = pa.Table.from_batches(self._changes(after))
                name = (storage, plan.step.uid, epoch, self._task, nonce)
                changed = write_changelog(*name, table)
                files += [] if changed is None else [changed]
                self._hold(plan.version, after)
                if changed is None and plan.base.version is not None:
                    self._hold(plan.base.version, after)
        file_fields = [asdict(file) for file in files]
        fields = {"uid": plan.step.uid, "task": self._task, "files": file_fields}
        return [Note(NoteKind.LIST, fields)] if file_fields or plan.is_rescaled else []

    def _changes(self, after: pa.BinaryArray) -> list[pa.RecordBatch]:
        assert self._committed is not None, "read before it is written"
        changes = [list_changes(self._task, self._committed, after)]
        if self._task == FIRST_READER and self._all is not None:
            changes.append(deletions_beyond(self._all, self._plan.base.parallelism))
        return changes

    def _begun(self) -> pa.RecordBatch:
        """Return the elements with which the task begins."""
        plan, base = self._plan, self._plan.base
        self._committed = pa.array([], pa.binary())
        if base.version is None:
            return self._codec.decode(self._committed)
        if not plan.is_rescaled:
            self._committed = self._known(base.version)
            return self._codec.decode(self._committed)
        self._all = self._read(ALL_TASKS)
        self._committed = self._read(KeyGroupRange(self._task, self._task)).column(1)
        keep, shared = plan.step.union, (self._all, self._task, plan.before, base.parallelism)
        if keep is None:
            return self._codec.decode(shared_values(*shared))
        everything = self._codec.decode(shared_values(*shared, is_union=True))
        return self._conformed(keep(everything, self._task, base.parallelism), "those of union=")

    def _known(self, version: Version) -> pa.BinaryArray:
        """Return the committed values of the task, which the process may remember."""
        values = _lists.get(self._place, {}).get(version)
        if values is None:
            values = self._read(KeyGroupRange(self._task, self._task)).column(1)
        return self._hold(version, values)

    def _read(self, groups: KeyGroupRange) -> pa.RecordBatch:
        committed = CommittedEntries(self._plan.base, self._plan.files.storage())
        (entries,) = committed.batches(groups)
        return entries

    @property
    def _place(self) -> tuple[str, str, int]:
        return self._plan.files.storage().location, self._plan.base.copy_name, self._task

    def _hold(self, version: Version, values: pa.BinaryArray) -> pa.BinaryArray:
        others = [(at, array) for at, array in _lists.pop(self._place, {}).items() if at != version]
        _lists[self._place] = {**dict(others[-1:]), version: values}
        while len(_lists) > LISTS_MAX:
            del _lists[next(iter(_lists))]
        return values


ListFunctionType = Callable[
    [pa.RecordBatch, pa.RecordBatch], tuple[Batch | Rows, pa.RecordBatch | pa.Table]
]


@dataclass(frozen=True)
class ListFunction:
    """A function of `map_batches` with a list state.

    Args:
        function: as the user wrote it.
        uid: of the state.
        opened: the list of the task; None until an attempt of a task opens it.
    """

    function: ListFunctionType
    uid: str
    opened: OpenList | None = None

    @property
    def __name__(self) -> str:
        """The name of the user's function, for messages."""
        return str(getattr(self.function, "__name__", self.function))

    def __call__(self, rows: pa.RecordBatch) -> Batch | Rows:
        """Call the function with the rows and the elements."""
        assert self.opened is not None, "a reader's attempt opens it"
        return self.opened.call(self.function, rows)


def parts_of(functions: Iterable[BatchFunction]) -> Iterator[object]:
    """Yield functions and the functions they wrap, all of them the same in every epoch."""
    for function in functions:
        yield function
        if isinstance(
            function, DeclaredFunction | TableFunction | ListFunction | DataFrameFunction
        ):
            inner: Any = function.function
            yield from parts_of((inner,))


def with_lists(
    functions: tuple[BatchFunction, ...], opened: Sequence[tuple[str, OpenList]]
) -> tuple[BatchFunction, ...]:
    """Return functions with the lists of one attempt of a task."""
    return _filled(functions, ListFunction, "opened", dict(opened))


def lists_after(plans: Sequence[ListPlan], notes: Iterable[dict[str, Any]]) -> list[StepState]:
    """Return the lists at the end of an epoch.

    Args:
        plans: of the epoch.
        notes: of its tasks.

    Raises:
        BrokenInvariantError: a task was not heard of that had to write its share, or one twice.
    """
    all_notes = list(notes)
    return [
        _list_after(plan, [note for note in all_notes if note["uid"] == plan.step.uid])
        for plan in plans
    ]


def _list_after(plan: ListPlan, notes: Sequence[dict[str, Any]]) -> StepState:
    noted_tasks = sorted(note["task"] for note in notes)
    expected = list(range(plan.base.parallelism)) if plan.is_rescaled else sorted(set(noted_tasks))
    if noted_tasks != expected:
        raise BrokenInvariantError(
            f"list state {plan.step.uid}, epoch {plan.version.epoch}: notes of the tasks "
            f"{noted_tasks} came back, expected {expected}"
        )
    files = [StateFile(**file) for note in notes for file in note["files"]]
    return extend(plan.base, plan.version, files) if files else plan.base


def refuse_lists(functions: Iterable[BatchFunction]) -> None:
    """Refuse list state where no reader has it.

    Raises:
        OptionError: a function has one.
    """
    for function in functions:
        inner = function.function if isinstance(function, DeclaredFunction) else function
        if isinstance(inner, ListFunction):
            raise OptionError(
                f"map_batches {inner.__name__}: list state {inner.uid!r} is that of tasks that "
                f"read: behind a keyed step state has keys, as has that of another process step; "
                f"put the function before key_by"
            )
