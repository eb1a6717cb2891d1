"""The tasks of a keyed step: rows go to the owners of their keys, and change state there.

    frames ─► rows of this task's key groups ─► function with state ─► frames for the next tasks
                        view of the committed state ─┘ └─ changes ─► a file; its name is noted

Like reading, all of it may run twice: what an attempt leaves is files that only its own note names,
and the note travels with the frames of that very attempt (see `exchange`). The copy of the state on
the worker's host holds committed epochs only, and nothing of this one.
"""

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Protocol, Self

import pyarrow as pa
import pyarrow.compute as pc

from tallystick.checkpoint.state_files import (
    bring_forward,
    write_changelog,
    write_merged,
    write_snapshot,
)
from tallystick.errors import EpochAbortedError
from tallystick.host.origin import Place, place_to_be_set
from tallystick.host.stopwatch import EXCHANGE, FUNCTIONS, STATE, WAIT, counted_as, timed
from tallystick.ports import StateStore, Storage
from tallystick.state.catalog import StateFile, StepState
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
from tallystick.state.key_groups import KeyGroupRange, key_group_range
from tallystick.state.keys import KeyCodec
from tallystick.state.overlay import EmptyView, EpochTime, Overlay, StateView
from tallystick.tasks.event_times import WatermarkRule, in_units, not_after
from tallystick.tasks.exchange import NO_TOPIC, Attempt, Frame, FrameSources
from tallystick.tasks.frames import conform, from_ipc
from tallystick.tasks.keyed_slices import SLICE_BYTES, Slices
from tallystick.tasks.outputs import conformed, passed_by
from tallystick.tasks.read import (
    BatchFunction,
    Outlet,
    Sent,
    send,
)
from tallystick.tasks.tables import TablePlan

KEEP_UP_EPOCHS = TRAIL_LENGTH // 4
OVERTAKEN_MAX = 5
"""A task gives its epoch up once other processes have moved its local copy on so often."""


@dataclass(frozen=True)
class KeyedStep:
    """A keyed step, checked and with all types known.

    Args:
        uid: the name of the step's state.
        key: the codec of the key's columns.
        columns: of the rows that come to the step.
        processor: the step's function.
        declared: the states that the function uses.
        output: the columns of the main output.
        outputs: the columns of the side outputs.
        functions: the functions that the main output passes through.
        max_parallelism: how many key groups; None: as the state has it.
        parallelism: how many tasks; None: as many as Spark runs at a time.
        event_time: the column that holds a row's event time; None: rows have none.
        watermark_delay_ms: how much later than the latest row of its partition another row may
            come.
        idle_after_ms: how long a partition that is read to its end is waited for.
        max_drift_ms: how far a partition with unread records may be ahead of the slowest such one,
            before it is not read on; 0: as far as it gets.
        watermark_column: the column of producers' watermarks; None: they follow from event times.
        idle_advance: see `WatermarkRule`.
        event_time_max_ahead_ms: how far a row's event time may be ahead of the epoch's clock; None:
            as far as it says.
        input_times: the column of event times of each named input that has one.
    """

    uid: str
    key: KeyCodec
    columns: pa.Schema
    processor: Processor
    declared: tuple[StateDeclaration, ...]
    output: pa.Schema
    functions: tuple[BatchFunction, ...] = ()
    max_parallelism: int | None = None
    parallelism: int | None = None
    event_time: str | None = None
    watermark_delay_ms: int = 0
    idle_after_ms: int = 0
    max_drift_ms: int = 0
    outputs: Mapping[str, pa.Schema] = field(default_factory=dict)
    watermark_column: str | None = None
    idle_advance: bool = False
    event_time_max_ahead_ms: int | None = None
    input_times: Mapping[str, str] = field(default_factory=dict)

    @property
    def watermark_rule(self) -> WatermarkRule:
        """The rule of the step's watermark, for rows that come from partitions."""
        return WatermarkRule(
            self.watermark_delay_ms,
            self.idle_after_ms,
            is_promised=self.watermark_column is not None,
            idle_advance=self.idle_advance,
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

    def to_json(self) -> str:
        """Return the text that travels in a frame."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read back what `to_json` made."""
        fields = json.loads(text)
        fields["files"] = tuple(StateFile(**file) for file in fields["files"])
        fields["attempts"] = tuple(Attempt(*attempt) for attempt in fields["attempts"])
        return cls(**fields)


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

        def notes() -> list[str]:
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
            return [own.to_json(), *sources.notes, *of_tables]

        sent = self._sent(timed(WAIT, sources.with_rows(frames)), index, result)
        with place_to_be_set() as rows_come_from:
            rows_come_from(self._place)
            yield from send(self.outlet, sent, index, notes, attempt_number, self.stage)

    def _place(self, rows: pa.RecordBatch, row: int) -> Place:
        """Return the place of a row: the step, and the key if the row still has its columns."""
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
        store = self.worker_host.store(self.base.uid, groups)
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
            yield write_merged(*name, self.merges[index], written_in=epoch)
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
        store = self.worker_host.store(self.base.uid, groups)
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
            for batch in timed(FUNCTIONS, self.step.processor.run(work)):
                if isinstance(batch, SideRows):
                    yield from conformed(batch, self.step.outputs, what, "vectorised")
                elif batch.num_rows:
                    yield conform(batch, self.step.output, f"{what}: the output")
            result.late += sum(work.late)
            with counted_as(STATE):
                changes.append(work.overlay.changes())
