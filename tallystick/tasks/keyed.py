"""The tasks of a keyed step: rows go to the owners of their keys, and change state there.

    frames ─► rows of this task's key groups ─► function with state ─► frames for the next tasks
                        view of the committed state ─┘ └─ changes ─► a file; its name is noted

Like reading, all of it may run twice: what an attempt leaves is files that only its own note names,
and the note travels with the frames of that very attempt (see `frames`). The copy of the state on
the worker's host holds committed epochs only, and nothing of this one.
"""

import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import IO, Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.checkpoint.state_files import (
    bring_forward,
    write_changelog,
    write_merged,
    write_snapshot,
)
from tallystick.errors import EpochAbortedError
from tallystick.host.origin import ALL_ROWS, Place, place_to_be_set
from tallystick.host.stopwatch import EXCHANGE, FUNCTIONS, STATE, WAIT, counted_as, timed
from tallystick.host.user_code import calling_user
from tallystick.ports import StateStore, Storage
from tallystick.state.catalog import StateFile, StepState
from tallystick.state.compatibility import AS_BEFORE, Succession
from tallystick.state.file_sets import TRAIL_LENGTH, Load
from tallystick.state.functions.processing import (
    EVENT_TIME,
    JudgesLateness,
    Processor,
    SideRows,
    StateDeclaration,
    Work,
    check_event_times,
    late_output,
)
from tallystick.state.key_groups import KeyGroupRange, key_group_range, key_groups_of
from tallystick.state.keys import KeyCodec
from tallystick.state.overlay import EmptyView, EpochTime, Overlay, StateView, one_batch
from tallystick.tasks.event_times import WatermarkRule, in_units, not_after
from tallystick.tasks.frames import (
    NO_TOPIC,
    Attempt,
    Frame,
    FrameSources,
    Note,
    NoteKind,
    conform,
    from_ipc,
    to_ipc,
)
from tallystick.tasks.operator_state import TablePlan
from tallystick.tasks.outputs import conformed, passed_by, passing
from tallystick.tasks.read import (
    BatchFunction,
    OpenOutlet,
    Outlet,
    Sent,
    StatelessOutlet,
    apply,
    send,
)

SLICE_BYTES = 64 << 20
"""The default number of bytes of rows that a task holds at a time."""
RUN_COUNT = 64
"""The key groups of a task are at most this many runs; larger slices are several of them."""
FOLDERS_VARIABLE = "SPARK_LOCAL_DIRS"
"""The variable in which Spark gives its Python workers the folders for what exceeds memory."""


class Slice(NamedTuple):
    """Some of a task's key groups, with all their rows."""

    groups: KeyGroupRange
    rows: pa.RecordBatch


class _Piece(NamedTuple):
    """Rows of one run in the file."""

    offset: int
    length: int
    size: int  # in memory


class Slices:
    """Takes in a task's rows, and gives them back in slices.

    The rows of a keyed task need not be in memory at once. A slice is what a task of its own would
    have: all rows of some key groups, in their order of arrival. So each key is in one slice only,
    and a function sees no difference between ten slices of one task and ten tasks.

    Rows stay in memory as long as they fit. Else they go to a file of this host, sorted by runs of
    key groups; its pieces are read back run by run. The rows of one key group are always one slice:
    only the size of an epoch bounds them.

    Args:
        columns: of the rows.
        key: of the step.
        max_parallelism: of the step.
        groups: those of the task.
        bytes_max: rows to hold at a time.
        what: they are, for messages.
    """

    def __init__(
        self,
        columns: pa.Schema,
        key: KeyCodec,
        max_parallelism: int,
        groups: KeyGroupRange,
        bytes_max: int,
        what: str,
    ) -> None:
        self._columns, self._key, self._max_parallelism = columns, key, max_parallelism
        self._groups, self._bytes_max, self._what = groups, bytes_max, what
        self._batches: list[pa.RecordBatch] = []
        self._batch_bytes = 0
        self._open = ExitStack()
        self._file: IO[bytes] | None = None
        self._file_size = 0
        group_count = groups.last + 1 - groups.first
        count = min(RUN_COUNT, group_count)
        self._firsts = groups.first + np.arange(count + 1) * group_count // count
        self._runs: list[list[_Piece]] = [[] for _ in range(count)]
        self.row_count = 0
        self.byte_count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def add(self, rows: pa.RecordBatch) -> None:
        """Take in rows that arrived after all others."""
        if rows.num_rows == 0:
            return
        size = rows.nbytes
        if self._batches and self._batch_bytes + size > self._bytes_max:
            self._put_away()
        self._batches.append(rows)
        self._batch_bytes += size
        self.row_count += rows.num_rows
        self.byte_count += size

    def __iter__(self) -> Iterator[Slice]:
        """Yield all key groups of the task, ascending; those without rows too. Works only once."""
        if self._file is None:
            rows, self._batches = self._together(self._batches), []
            yield Slice(self._groups, rows)
            return
        self._put_away()
        first, pieces, size = 0, list[_Piece](), 0
        for run, run_pieces in enumerate(self._runs):
            more = sum(piece.size for piece in run_pieces)
            if pieces and size + more > self._bytes_max:
                yield self._slice(first, run, pieces)
                first, pieces, size = run, [], 0
            pieces, size = pieces + run_pieces, size + more
        yield self._slice(first, len(self._runs), pieces)

    def _slice(self, first: int, stop: int, pieces: list[_Piece]) -> Slice:
        groups = KeyGroupRange(int(self._firsts[first]), int(self._firsts[stop]) - 1)
        # In the order of the file: that of arrival.
        return Slice(groups, self._together([self._read(piece) for piece in sorted(pieces)]))

    def _read(self, piece: _Piece) -> pa.RecordBatch:
        assert self._file is not None, "there are pieces"
        self._file.seek(piece.offset)
        return from_ipc(self._file.read(piece.length))

    def _put_away(self) -> None:
        """Sort what is held by runs of key groups, and append it to the file."""
        if self._file is None:
            self._file = self._open.enter_context(overflow_file())
        rows, self._batches, self._batch_bytes = self._together(self._batches), [], 0
        groups = key_groups_of(self._key.hash_codes(rows), self._max_parallelism)
        runs = (np.searchsorted(self._firsts, groups, "right") - 1).astype(np.uint16)
        order = np.argsort(runs, kind="stable")
        ordered = rows.take(pa.array(order))
        del rows
        bounds = np.searchsorted(runs[order], np.arange(len(self._runs) + 1))
        self._file.seek(0, os.SEEK_END)
        for run in np.flatnonzero(np.diff(bounds)).tolist():
            first, stop = int(bounds[run]), int(bounds[run + 1])
            part = ordered.slice(first, stop - first)
            data = to_ipc(part)
            self._file.write(data)
            self._runs[run].append(_Piece(self._file_size, len(data), part.nbytes))
            self._file_size += len(data)

    def _together(self, batches: list[pa.RecordBatch]) -> pa.RecordBatch:
        return one_batch(
            pa.Table.from_batches(batches, self._columns),
            self._what,
            "set max_offsets_per_trigger, or a larger parallelism",
        )


def overflow_file() -> IO[bytes]:
    """Make a file without a name in the first folder that Spark names, or the system's own."""
    folder = os.environ.get(FOLDERS_VARIABLE, "").split(",")[0] or None
    return tempfile.TemporaryFile(prefix="tallystick-", dir=folder)


KEEP_UP_EPOCHS = TRAIL_LENGTH // 4
OVERTAKEN_MAX = 5
"""A task gives its epoch up once other processes have moved its local copy on so often."""


@dataclass(frozen=True, kw_only=True)
class KeyedSettings:
    """The settings of a keyed step that are in use as the user declares them."""

    max_parallelism: int | None = None
    """The number of key groups; None: as the state has it, or by Flink's formula."""
    parallelism: int | None = None
    """The number of tasks; None: as many as Spark runs at a time."""
    event_time: str | None = None
    """The column that holds a row's event time; None: rows have none."""
    watermark_delay_ms: int = 0
    """The time by which a row may come later than the latest row of its partition."""
    idle_after_ms: int = 0
    """The time for which a partition that is read to its end is waited for."""
    max_drift_ms: int = 0
    """The time by which a partition with unread records may be ahead of the slowest such one.

    Beyond it the partition is not read on; 0: as far as it gets.
    """
    watermark_column: str | None = None
    """The column of producers' watermarks; None: they follow from event times."""
    idle_advance: bool = False
    """The watermark goes on with the epochs' clock where all partitions are idle."""
    event_time_max_ahead_ms: int | None = None
    """The time by which a row may be ahead of the epoch's clock; None: as far as it says."""
    succession: Succession = AS_BEFORE
    """The way from the state in the checkpoint to that of the step."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by their names, for another class that has them."""
        return {setting.name: getattr(self, setting.name) for setting in fields(KeyedSettings)}


@dataclass(frozen=True)
class KeyedStep(KeyedSettings):
    """A keyed step, checked and with all types known.

    Args:
        uid: the name of the step's state.
        key: the codec of the key's columns.
        columns: of the rows that come to the step.
        processor: the step's function.
        declared: the states that the function uses.
        output: the columns of the main output.
        functions: the functions that the main output passes through.
        outputs: the columns of the side outputs.
        input_times: the column of event times of each named input that has one.
    """

    uid: str
    key: KeyCodec
    columns: pa.Schema
    processor: Processor
    declared: tuple[StateDeclaration, ...]
    output: pa.Schema
    functions: tuple[BatchFunction, ...] = ()
    outputs: Mapping[str, pa.Schema] = field(default_factory=dict)
    input_times: Mapping[str, str] = field(default_factory=dict)

    @property
    def watermark_rule(self) -> WatermarkRule:
        """The rule of the step's watermark, for rows that come from partitions."""
        return WatermarkRule(
            self.watermark_delay_ms,
            self.idle_after_ms,
            is_promised=self.watermark_column is not None,
            idle_advance=self.idle_advance,
            column=self.watermark_column or self.event_time or "",
        )

    @cached_property
    def routed(self) -> pa.Schema:
        """The columns that travel to the step's tasks, without those the function never reads."""
        reads = self.processor.reads
        if reads is None:
            return self.columns
        wanted = {*reads, *self.key.names, *([self.event_time] if self.event_time else [])}
        return pa.schema([column for column in self.columns if column.name in wanted])


class WorkerHost(Protocol):
    """A task's access to the checkpoint, and to local copies of state on the worker's host."""

    def storage(self) -> Storage:
        """The checkpoint's files."""
        ...

    def store(self, uid: str, groups: KeyGroupRange) -> StateStore:
        """The copy of a step's key groups on this host."""
        ...


@dataclass(frozen=True)
class TaskNote:
    """A report to the driver of the results of a keyed task's attempt.

    Args:
        uid: of the step.
        index: of the task.
        files: of changed state, and snapshots.
        attempts: the attempts of sources from which the task had rows.
        event_time_max_ms: the latest event time among the task's rows; None: no event time.
        late: how many rows were dropped with an event time that had passed, or was too far ahead.
        byte_count: the size in memory of the rows processed.
        early: how many of the late ones were too far ahead of the clock.
    """

    uid: str
    index: int
    files: tuple[StateFile, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    event_time_max_ms: int | None = None
    late: int = 0
    byte_count: int = 0
    early: int = 0

    def to_note(self) -> Note:
        """Return the note that travels in a frame."""
        return Note(NoteKind.KEYED, asdict(self))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Read back the fields of a note."""
        files = tuple(StateFile(**file) for file in fields["files"])
        attempts = tuple(Attempt(*attempt) for attempt in fields["attempts"])
        return cls(**{**fields, "files": files, "attempts": attempts})


@dataclass
class _TaskResult:
    """The result of a task, gathered while it runs."""

    files: list[StateFile] = field(default_factory=list)
    event_time_max_ms: int | None = None
    late: int = 0
    byte_count: int = 0
    early: int = 0


@dataclass(frozen=True)
class ProcessPlan:
    """The plan of a keyed step in an epoch, sent to the step's tasks.

    Args:
        step: the step.
        stage: 1 for the first keyed step.
        checkpoint_id: the epoch.
        base: the committed state, with this epoch's parallelism and fields.
        time: the epoch's.
        snapshots: the key groups that a task writes whole, by task index.
        merges: the changelogs that a task merges into one, by task index.
        worker_host: the access to local state and the checkpoint.
        outlet: where its output goes.
        slice_bytes: bytes of rows that a task holds at a time.
        tables: the broadcast tables that functions after the step may use.
    """

    step: KeyedStep
    stage: int
    checkpoint_id: int
    base: StepState
    time: EpochTime
    snapshots: Mapping[int, KeyGroupRange]
    merges: Mapping[int, tuple[Load, ...]]
    worker_host: WorkerHost
    outlet: Outlet
    slice_bytes: int = SLICE_BYTES
    tables: tuple[TablePlan, ...] = ()

    def run(self, frames: Iterable[Frame], index: int, attempt_number: int = 0) -> Iterator[Frame]:
        """Process the frames of one task, and yield frames for the next tasks.

        Args:
            frames: sorted by source and sequence.
            index: of the task.
            attempt_number: Spark's number of the attempt.

        Raises:
            OptionError, RecordError: the rows, or the function's output, are not as declared.
            DataLossError: a file of state is missing or damaged.
        """
        result, sources = _TaskResult(), FrameSources(self.stage - 1)

        def notes() -> list[Note]:
            own = TaskNote(
                uid=self.step.uid,
                index=index,
                files=tuple(result.files),
                attempts=sources.attempts,
                event_time_max_ms=result.event_time_max_ms,
                late=result.late,
                byte_count=result.byte_count,
                early=result.early,
            )
            of_tables = [note for table in self.tables for note in table.notes()]
            return [own.to_note(), *sources.notes, *of_tables]

        sent = self._sent(timed(WAIT, sources.with_rows(frames)), index, result)
        with place_to_be_set() as rows_come_from:
            rows_come_from(self._place)
            yield from send(self.outlet, sent, index, notes, attempt_number, self.stage)

    def _place(self, rows: pa.RecordBatch, row: int) -> Place:
        """Return the place of a row: the step, and the key if the row still has its columns."""
        if row == ALL_ROWS:
            return Place()  # of many records; the step is named
        names = [name for name in self.step.key.names if name in rows.schema.names]
        key = ", ".join(f" {name}={str(rows[name][row].as_py())[:100]!r}" for name in names)
        return Place(f"a row of keyed step {self.step.uid!r}", values=key and f" for{key}")

    def _sent(self, frames: Iterable[Frame], index: int, result: _TaskResult) -> Iterator[Sent]:
        groups = key_group_range(self.base.max_parallelism, self.base.parallelism, index)
        with ExitStack() as stack:
            slices = stack.enter_context(self._slices(groups, index))
            for frame in frames:
                if frame.topic != NO_TOPIC:
                    with counted_as(EXCHANGE):
                        passed = passed_by(frame)
                    yield passed
                else:
                    with counted_as(EXCHANGE):
                        believed, early = self._believed(from_ipc(frame.data), result)
                        slices.add(self._in_time(believed, result))
                    if early is not None:
                        yield early
            result.byte_count = slices.byte_count
            is_first = self.base.version is None  # there may be an initial state
            has_work = slices.row_count > 0 or self.step.processor.has_timers or is_first
            rewrites = index in self.merges or index in self.snapshots
            if not has_work and not rewrites:
                with counted_as(STATE):
                    self._refresh_idle_copy(index)
                return
            with counted_as(STATE):
                storage, nonce = self.worker_host.storage(), secrets.token_hex(8)
                view = self._view(stack, groups, storage)
                if rewrites:
                    result.files += self._rewritten(view, storage, index, nonce)
            if has_work:
                changes: list[pa.Table] = []
                yield from self._processed(slices, view, changes, result)
                name = (storage, self.step.uid, self.checkpoint_id, index, nonce)
                with counted_as(STATE):
                    changed = write_changelog(*name, pa.concat_tables(changes))
                result.files += [] if changed is None else [changed]

    def _slices(self, groups: KeyGroupRange, index: int) -> Slices:
        return Slices(
            self.step.routed,
            self.step.key,
            self.base.max_parallelism,
            groups,
            self.slice_bytes,
            f"step {self.step.uid}, the rows of task {index}",
        )

    def _refresh_idle_copy(self, index: int) -> None:
        """Every KEEP_UP_EPOCHS epochs, bring the local copy forward though no rows came.

        A copy that is too far behind would have to be rebuilt when rows come.
        """
        if self.base.version is None or (self.checkpoint_id + index) % KEEP_UP_EPOCHS:
            return
        groups = key_group_range(self.base.max_parallelism, self.base.parallelism, index)
        store = self.worker_host.store(self.base.copy_name, groups)
        bring_forward(store, self.base, groups, self.worker_host.storage())

    def _rewritten(
        self, view: StateView, storage: Storage, index: int, nonce: str
    ) -> Iterator[StateFile]:
        """Yield the committed state that is due to be written again; before anything changes."""
        version = self.base.version
        assert version is not None, "there is something to write again"
        name = (storage, self.step.uid, version.epoch, index, nonce)
        # A step's state may be older than the epoch before: that one may have changed nothing.
        epoch = self.checkpoint_id
        if index in self.merges:
            yield write_merged(*name, self.merges[index], base=self.base, written_in=epoch)
        if index in self.snapshots:
            yield write_snapshot(
                *name,
                view,
                self.snapshots[index],
                written_in=epoch,
                state_ids=[state_field.state_id for state_field in self.base.fields],
            )

    def _believed(
        self, rows: pa.RecordBatch, result: _TaskResult
    ) -> tuple[pa.RecordBatch, SideRows | None]:
        """Split off rows with event times too far ahead of the clock, and treat them as late."""
        column, most_ms = self.step.event_time, self.step.event_time_max_ahead_ms
        if column is None or most_ms is None:
            return rows, None
        _, after = not_after(rows.column(column), self.time.timestamp_ms + most_ms)
        if after is None:
            return rows, None
        early, output = rows.filter(after), late_output(self.step.processor)
        rows = rows.filter(pc.invert(after))
        if output is not None:
            return rows, SideRows(output, early)
        result.early += early.num_rows
        result.late += early.num_rows
        return rows, None

    def _in_time(self, rows: pa.RecordBatch, result: _TaskResult) -> pa.RecordBatch:
        """Return the rows that are not late, and count the late ones.

        Source: Spark's WatermarkSupport: an event time up to the watermark is late, null is not.
        """
        column = self.step.event_time
        if column is None or rows.num_rows == 0:
            return rows
        check_event_times(rows.column(column), f"step {self.step.uid}: event_time={column!r}")
        times, per_ms = in_units(rows.column(column))
        latest = pc.max(times).as_py()
        if latest is not None:
            known_ms = result.event_time_max_ms
            latest_ms = latest // per_ms
            result.event_time_max_ms = latest_ms if known_ms is None else max(known_ms, latest_ms)
        watermark_ms = self.time.watermark_ms
        processor = self.step.processor
        if watermark_ms is None or processor.time_mode != EVENT_TIME:
            return rows
        if isinstance(processor, JudgesLateness) and processor.judges_lateness:
            return rows
        late = pc.less_equal(times, watermark_ms * per_ms).fill_null(False)
        late_count = pc.sum(late).as_py()
        result.late += late_count
        return rows.filter(pc.invert(late)) if late_count else rows

    def _view(self, stack: ExitStack, groups: KeyGroupRange, storage: Storage) -> StateView:
        """The committed state of these key groups."""
        version = self.base.version
        if version is None:
            return EmptyView()
        store = self.worker_host.store(self.base.copy_name, groups)
        for _ in range(OVERTAKEN_MAX):
            bring_forward(store, self.base, groups, storage)
            view = stack.enter_context(store.view(version))
            if view is not None:
                return view
        raise EpochAbortedError(
            f"step {self.base.uid}, key groups {groups.first} to {groups.last}: the local copy of "
            f"the state was moved to another version {OVERTAKEN_MAX} times while epoch "
            f"{self.checkpoint_id} wanted to read it: another run uses it"
        )

    def _called(self, work: Work) -> Iterator[pa.RecordBatch | SideRows]:
        """Yield the function's output; an error of the user's code names the step."""
        with calling_user(f"process {self.step.uid!r}", work.rows):
            yield from self.step.processor.run(work)

    def _processed(
        self, slices: Slices, view: StateView, changes: list[pa.Table], result: _TaskResult
    ) -> Iterator[pa.RecordBatch | SideRows]:
        """Yield the function's output, slice by slice; append changes of state, sorted by key."""
        what = f"step {self.step.uid}"
        for groups, rows in slices:
            work = Work(
                rows=rows,
                key=self.step.key,
                max_parallelism=self.base.max_parallelism,
                groups=groups,
                fields={state_field.name: state_field for state_field in self.base.fields},
                overlay=Overlay(view),
                time=self.time,
                is_first=self.base.version is None,
                event_time=self.step.event_time,
            )
            for batch in timed(FUNCTIONS, self._called(work)):
                if isinstance(batch, SideRows):
                    yield from conformed(batch, self.step.outputs, what, "vectorised")
                elif batch.num_rows:
                    yield conform(batch, self.step.output, f"{what}: the output")
            result.late += sum(work.late)
            with counted_as(STATE):
                changes.append(work.overlay.changes())


@dataclass(frozen=True)
class RoutePlan:
    """The way of rows to the tasks that own their keys.

    Args:
        step: whose tasks they are.
        max_parallelism: its key groups.
        target_count: its tasks.
        functions: what rows pass through first.
    """

    step: KeyedStep
    max_parallelism: int
    target_count: int
    functions: tuple[BatchFunction, ...] = ()
    part: ClassVar[str] = EXCHANGE

    def begun(self, source: int, attempt: int, attempt_number: int) -> OpenOutlet:
        """See `Outlet.begun`."""
        return StatelessOutlet(self.frames, source, attempt)

    def frames(self, sent: Sent, source: int, sequence: int, attempt: int) -> Iterator[Frame]:
        """Yield a batch's frames; what only passes through goes by one task, and stays in order."""
        parts = apply(self.functions, sent) if isinstance(sent, pa.RecordBatch) else [sent]
        for part in parts:
            if not isinstance(part, pa.RecordBatch):
                yield passing(part, source % self.target_count, source, sequence, attempt)
                sequence += 1
                continue
            for target, rows in self._split(part):
                yield Frame(
                    target, source, sequence, NO_TOPIC, 0, rows.num_rows, to_ipc(rows), attempt
                )
                sequence += 1

    def _split(self, rows: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows of each task, in their order."""
        rows = conform(rows, self.step.columns, f"step {self.step.uid}: the rows that come to it")
        rows = rows.select(self.step.routed.names)
        if self.target_count == 1:
            yield 0, rows
            return
        groups = key_groups_of(self.step.key.hash_codes(rows), self.max_parallelism)
        # As `operator_index`; 16 bits are sorted by radix.
        targets = (groups * self.target_count // self.max_parallelism).astype(np.uint16)
        order = np.argsort(targets, kind="stable")
        ordered = rows.take(pa.array(order))
        bounds = np.searchsorted(targets[order], np.arange(self.target_count + 1))
        for target in np.flatnonzero(np.diff(bounds)).tolist():
            first, stop = int(bounds[target]), int(bounds[target + 1])
            yield target, ordered.slice(first, stop - first)
