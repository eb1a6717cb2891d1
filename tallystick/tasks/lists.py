"""List state of functions in readers: each task has a list, which goes on in the next epoch.

    committed lists ─► the task's own ─► function, batch after batch ─► what changed: a file

A task reads its list when its function is first called, and keeps it in the memory of its process,
by version. All tasks run in each epoch, so that a partition is always read by the task that has it.
Where the number of tasks has changed, each one takes its share of all lists and writes it, called
or not.
"""

import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa

from tallystick.checkpoint.state_files import write_changelog
from tallystick.codec.own_memory import own
from tallystick.errors import BrokenInvariantError, OptionError
from tallystick.host import stopwatch as clock
from tallystick.state.catalog import StateFile, StepState, Version
from tallystick.state.file_sets import extend
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.operator_state import (
    ALL_TASKS,
    ListCodec,
    deletions_beyond,
    list_changes,
    shared_values,
)
from tallystick.state.overlay import one_batch
from tallystick.tasks.frames import conform
from tallystick.tasks.operator_files import FIRST_READER, CommittedEntries, rewritten
from tallystick.tasks.outputs import Batch, DeclaredFunction, Rows
from tallystick.tasks.read import BatchFunction
from tallystick.tasks.tables import StateFiles, TableFunction

NOTE = "list"
"""The field that makes a task's note one of a list."""
TOO_MANY = "keep fewer elements, or spread them over more tasks"
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
    """

    uid: str
    codec: ListCodec
    union: "UnionFunction | None" = None


UnionFunction = Callable[[pa.RecordBatch, int, int], pa.RecordBatch | pa.Table]
"""Gets the elements of all tasks, the number of its own, and how many there are."""

_versions: dict[tuple[str, str, int], dict[Version, pa.BinaryArray]] = {}
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
            elements = one_batch(elements, self._what, TOO_MANY)
        # They are kept while the function is called again.
        return own(conform(elements, self._codec.columns, f"{self._what}: {what}"))

    @property
    def elements(self) -> pa.RecordBatch:
        """The elements of the list, as the attempt has left them so far."""
        if self._elements is None:
            with clock.counted_as(clock.STATE):
                self._elements = self._begun()
        return self._elements

    def notes(self) -> list[str]:
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
        fields = {NOTE: plan.step.uid, "task": self._task, "files": file_fields}
        return [json.dumps(fields)] if file_fields or plan.is_rescaled else []

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
        values = _versions.get(self._place, {}).get(version)
        if values is None:
            values = self._read(KeyGroupRange(self._task, self._task)).column(1)
        return self._hold(version, values)

    def _read(self, groups: KeyGroupRange) -> pa.RecordBatch:
        committed = CommittedEntries(self._plan.base, self._plan.files.storage())
        (entries,) = committed.batches(groups)
        return entries

    @property
    def _place(self) -> tuple[str, str, int]:
        return self._plan.files.storage().location, self._plan.step.uid, self._task

    def _hold(self, version: Version, values: pa.BinaryArray) -> pa.BinaryArray:
        others = [
            (at, array) for at, array in _versions.pop(self._place, {}).items() if at != version
        ]
        _versions[self._place] = {**dict(others[-1:]), version: values}
        while len(_versions) > LISTS_MAX:
            del _versions[next(iter(_versions))]
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
        if isinstance(function, DeclaredFunction | TableFunction | ListFunction):
            inner: Any = function.function
            yield from parts_of((inner,))


def with_lists(
    functions: tuple[BatchFunction, ...], opened: Sequence[tuple[str, OpenList]]
) -> tuple[BatchFunction, ...]:
    """Return functions with the lists of one attempt of a task."""
    by_uid = dict(opened)

    def bound(function: BatchFunction) -> BatchFunction:
        match function:
            case ListFunction(uid=uid):
                return replace(function, opened=by_uid[uid])
            case DeclaredFunction(function=ListFunction() as inner):
                return replace(function, function=bound(inner))
        return function

    return tuple(map(bound, functions)) if opened else functions


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
        _after(plan, [note for note in all_notes if note[NOTE] == plan.step.uid]) for plan in plans
    ]


def _after(plan: ListPlan, notes: Sequence[dict[str, Any]]) -> StepState:
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
