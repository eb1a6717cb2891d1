"""The keyed steps of one epoch, on the driver: plans for tasks, and the state from their notes.

The committed state goes in, the next state comes out; nothing is kept in between.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import pyarrow as pa

from tallystick.epoch.protocol import EpochRan
from tallystick.errors import BrokenInvariantError
from tallystick.host.stopwatch import TaskTimes
from tallystick.state.catalog import StateFile, StepState, Version
from tallystick.state.compatibility import (
    StepRequirement,
    check,
    settle,
    starting_point,
    taken_up,
)
from tallystick.state.evolution import change_texts, evolved
from tallystick.state.file_sets import due_merges, due_snapshots, extend
from tallystick.state.functions.processing import (
    EVENT_TIME,
    PROCESSING_TIME,
    HasInitialState,
    StateDeclaration,
)
from tallystick.state.operator_state import ALL_TASKS, PLACE, WHOLE
from tallystick.state.overlay import EpochTime
from tallystick.state.pyspark.defaults import stored_defaults
from tallystick.tasks.event_times import (
    EventTimesOfEpoch,
    InputState,
    advanced,
    ahead,
    in_use,
    latest_of,
)
from tallystick.tasks.frames import check_same_attempts
from tallystick.tasks.handed_on import first_timed, makes_rows_later, noted_column, with_watermarks
from tallystick.tasks.keyed import (
    SLICE_BYTES,
    KeyedStep,
    ProcessPlan,
    RoutePlan,
    TaskNote,
    WorkerHost,
)
from tallystick.tasks.operator_state import (
    ListPlan,
    ListStep,
    TablePlan,
    TableStep,
    lists_after,
    tables_after,
    with_tables,
)
from tallystick.tasks.read import BatchFunction, EncodePlan, Outlet, Report
from tallystick.tasks.write import FanOut, check_notes, split_notes
from tallystick.values import SplitRange, TopicPartition

logger = logging.getLogger(__name__)


TICK_INTERVAL_MS = 1000


def _ignore(_: object) -> None:
    return


@dataclass(frozen=True)
class PipelinePlan:
    """The plan of a pipeline for all epochs of a run: its keyed steps, tables and lists, if any.

    Args:
        steps: in their order.
        task_count: how many tasks Spark runs at a time.
        worker_host: the access of tasks to the checkpoint and to copies of state on their hosts.
        allow_dropped: uids whose state may be given up.
        accepted: the words of the user's decisions.
        functions: what rows pass through before the first step, if not in the reader.
        slice_bytes: bytes of rows that a task holds at a time.
        on_share: called after each epoch with the bytes of rows of the busiest task.
        on_times: called after each epoch with the times that tasks took.
        on_event_times: called after each epoch of which readers note event times, with these.
        tables: the broadcast tables of the pipeline.
        lists: the list states of its readers.
        is_noted: readers note event times; not behind DataFrame code.
    """

    steps: tuple[KeyedStep, ...] = ()
    task_count: int = 1
    worker_host: WorkerHost | None = None
    allow_dropped: frozenset[str] = frozenset()
    accepted: frozenset[str] = frozenset()
    functions: tuple[BatchFunction, ...] = ()
    slice_bytes: int = SLICE_BYTES
    on_share: Callable[[int], None] = _ignore
    on_times: Callable[[Sequence[TaskTimes]], None] = _ignore
    on_event_times: Callable[[EventTimesOfEpoch], None] = _ignore
    tables: tuple[TableStep, ...] = ()
    lists: tuple[ListStep, ...] = ()
    is_noted: bool = True

    def check(self, state: Iterable[StepState]) -> tuple[StepState, ...]:
        """Return what each step goes on from.

        Raises:
            OptionError: the pipeline does not fit the state.
        """
        return self._bases(state)[: len(self.steps)]

    def state_changes(self, state: Iterable[StepState]) -> list[str]:
        """Return the changes of state that the next epoch brings, in words.

        Raises:
            OptionError: the pipeline does not fit the state.
        """
        state = tuple(state)
        kept = {step.uid: step for step in self.taken_up(state)}
        bases = [base for base in self._bases(state) if base.uid in kept]
        known = {step.uid for step in state}
        texts = [
            f"step {uid} takes up the state of {previous!r} with the next epoch"
            for uid, previous in self.previous_uids.items()
            if previous in known
        ]
        return texts + [text for base in bases for text in change_texts(kept[base.uid], base)]

    def taken_up(self, state: Iterable[StepState]) -> tuple[StepState, ...]:
        """Return committed state under the uids of this program.

        Raises:
            OptionError: `previous_uid` of a step does not fit the state or the program.
        """
        previous = self.previous_uids
        if not previous:
            return tuple(state)
        return taken_up(state, [*previous.items()], [owner.uid for owner in self._owners])

    @property
    def previous_uids(self) -> dict[str, str]:
        """The earlier uid of each state with a `previous_uid`, by the uid in this program."""
        pairs = ((owner.uid, owner.succession.previous_uid) for owner in self._owners)
        return {uid: previous for uid, previous in pairs if previous}

    @property
    def _owners(self) -> tuple[KeyedStep | TableStep | ListStep, ...]:
        return (*self.steps, *self.tables, *self.lists)

    def _bases(self, state: Iterable[StepState], timestamp_ms: int = 0) -> tuple[StepState, ...]:
        """Return what the steps, then the tables, then the lists go on from.

        Args:
            state: what is committed.
            timestamp_ms: the clock of the epoch; 0: there is none, and nothing is kept.
        """
        wanted = [*map(_wanted_of_step, self.steps), *map(_wanted_of_table, self.tables)]
        wanted += [_wanted_of_list(step, self.task_count) for step in self.lists]
        kept = check(wanted, self.taken_up(state), self.allow_dropped)
        declared: list[tuple[StateDeclaration, ...]] = [step.declared for step in self.steps]
        declared += [(table.declaration,) for table in self.tables]
        declared += [(step.codec.declaration,) for step in self.lists]
        bases = []
        for requirement, states, owner in zip(wanted, declared, self._owners, strict=True):
            kept_state, names = kept.get(owner.uid), owner.succession.renamed
            base = starting_point(requirement, kept_state, self.task_count)
            fields, next_id = settle(owner.uid, states, kept_state, names, self.accepted)
            defaults = stored_defaults(owner.uid, states, owner.succession.defaults)
            bases.append(evolved(base, fields, next_id, names, timestamp_ms, defaults))
        return tuple(bases)

    def rescaled(self, parallelism: int, state: Iterable[StepState]) -> "PipelinePlan":
        """Return the steps with their readers and keys divided anew.

        Args:
            parallelism: how many tasks read, and hold the keys of each step.
            state: what is committed.

        Raises:
            OptionError: a step has fewer key groups.
        """
        steps = tuple(replace(step, parallelism=parallelism) for step in self.steps)
        rescaled = replace(self, steps=steps, task_count=parallelism)
        rescaled.check(state)
        return rescaled

    def is_idle(self, state: Iterable[StepState]) -> bool:
        """True if an epoch without rows has nothing to do: no timers, and no initial state."""
        has_timers = any(step.processor.has_timers for step in self.steps)
        return not has_timers and all(base.version is not None for base in self.check(state))

    @property
    def tick_interval_ms(self) -> int:
        """The interval of epochs without rows, for timers of the clock; 0: none are run."""
        return TICK_INTERVAL_MS if self._timed_by(PROCESSING_TIME) else 0

    @property
    def tick_count(self) -> int:
        """The number of epochs without rows that new rows may need: each step moves the next."""
        fires = [
            at
            for at, step in enumerate(self.steps)
            if step.processor.has_timers and step.processor.time_mode == EVENT_TIME
        ]
        through = self.steps[: max(fires, default=-1) + 1]
        return sum(step.event_time is not None for step in through)

    @property
    def event_time(self) -> pa.Field | None:
        """The column that readers note the latest time of by partition; None: none."""
        timed = self.first_timed
        if timed is None or not self.is_noted:
            return None
        return noted_column(self.steps[0], timed)

    @cached_property
    def first_timed(self) -> KeyedStep | None:
        """The first step with event time, whose watermark follows from the partitions."""
        at = first_timed(self.steps)
        return None if at is None else self.steps[at]

    @property
    def has_idle_partitions(self) -> bool:
        """True if timers may wait for a partition to become idle."""
        timed = self.first_timed
        return timed is not None and timed.idle_after_ms > 0 and self._timed_by(EVENT_TIME) > 0

    @property
    def event_time_max_ahead_ms(self) -> int | None:
        """The most that noted times may be ahead of the clock; None: any are believed."""
        return None if self.first_timed is None else self.first_timed.event_time_max_ahead_ms

    @property
    def max_drift_ms(self) -> int:
        """The most that a partition may be ahead of the slowest; 0: none waits."""
        return self.first_timed.max_drift_ms if self.first_timed else 0

    def ahead(
        self,
        state: Iterable[StepState],
        mute: frozenset[TopicPartition],
        source: InputState,
    ) -> frozenset[TopicPartition]:
        """Return the partitions that are to wait; see `event_times.ahead`."""
        uid = None if self.first_timed is None else self.first_timed.uid
        times = [
            it for step in self.taken_up(state) if step.uid == uid for it in step.partition_times
        ]
        return ahead(times, source, self.max_drift_ms, mute)

    def is_watermark_due(
        self, state: Iterable[StepState], source: InputState, timestamp_ms: int
    ) -> bool:
        """True if an epoch without rows would move the watermark of the first timed step.

        Args:
            state: the committed one.
            source: the state of the input, when nothing is to be read.
            timestamp_ms: the clock that the epoch would have.
        """
        first = self.first_timed
        assert first is not None, "asked where partitions may become idle"
        standing = replace(first.watermark_rule, idle_advance=False)
        for step_state in self.taken_up(state):
            if step_state.uid != first.uid:
                continue
            stands = advanced(step_state, {}, source, timestamp_ms, standing).watermark_ms
            if stands != step_state.watermark_ms:
                return True
            goes = advanced(step_state, {}, source, timestamp_ms, first.watermark_rule).watermark_ms
            if stands is not None and goes is not None and goes - stands >= TICK_INTERVAL_MS:
                return True
        return False

    def _timed_by(self, mode: str) -> int:
        timed = [step.processor for step in self.steps if step.processor.has_timers]
        return sum(processor.time_mode == mode for processor in timed)

    def carried(self, state: Iterable[StepState]) -> tuple[StepState, ...]:
        """Return the state after an epoch without work, less the steps that may be dropped."""
        uids = {base.uid for base in self._bases(state)}
        return tuple(step for step in self.taken_up(state) if step.uid in uids)

    def epoch(
        self,
        checkpoint_id: int,
        timestamp_ms: int,
        token: str,
        state: tuple[StepState, ...],
        last: EncodePlan | FanOut,
        source: InputState | None = None,
        control: Mapping[str, tuple[SplitRange, ...]] | None = None,
        is_over: bool = False,
    ) -> "EpochPlan":
        """Plan one epoch.

        Args:
            checkpoint_id: its number.
            timestamp_ms: its clock.
            token: drawn for this attempt.
            state: the committed one.
            last: where the rows go in the end; with the functions of a pipeline without steps.
            source: the state of the input; None: rows come with no partition.
            control: the new splits of the tables' control topics, by uid.
            is_over: all inputs end here, where `source` does not say it.
        """
        version, all_bases = Version(checkpoint_id, token), iter(self._bases(state, timestamp_ms))
        bases = _bases_in_use(self.steps, tuple(islice(all_bases, len(self.steps))), source)
        of_tables = tuple(islice(all_bases, len(self.tables)))
        tables = self._table_plans(version, of_tables, control or {})
        lists = self._list_plans(version, tuple(all_bases), state)
        outlet: Outlet = last
        if bases:
            outlet = replace(last, functions=with_tables(self.steps[-1].functions, tables))
        encode = last.encode if isinstance(last, FanOut) else last
        plans: list[ProcessPlan] = []
        for at in reversed(range(len(self.steps))):
            step, base = _started(self.steps[at], bases[at]), bases[at]
            assert self.worker_host is not None, "a pipeline with keyed steps has one"
            plan = ProcessPlan(
                step=step,
                stage=at + 1,
                checkpoint_id=checkpoint_id,
                base=base,
                time=EpochTime(timestamp_ms, base.watermark_ms),
                snapshots=due_snapshots(base, base.parallelism) if base.files else {},
                merges=due_merges(base, base.parallelism) if base.files else {},
                worker_host=self.worker_host,
                outlet=outlet,
                slice_bytes=self.slice_bytes,
                tables=tables,
            )
            plans.insert(0, plan)
            before = self.steps[at - 1].functions if at else self.functions
            outlet = RoutePlan(
                step, base.max_parallelism, base.parallelism, with_tables(before, tables)
            )
        writer_count = 0 if encode is None else encode.target_count
        return EpochPlan(
            tuple(plans),
            outlet,
            writer_count,
            version,
            has_sinks=isinstance(last, FanOut),
            may_leave_strays=isinstance(last, FanOut) and last.may_leave_strays,
            on_share=self.on_share,
            on_times=self.on_times,
            on_event_times=self.on_event_times,
            source=None if self.event_time is None else source,
            final_stage=final_stage(self.steps) if is_over or (source and source.is_over) else 0,
            tables=tables,
            lists=lists,
        )

    def _list_plans(
        self, version: Version, bases: Sequence[StepState], state: Iterable[StepState]
    ) -> tuple[ListPlan, ...]:
        """Return the plans of the lists in an epoch."""
        before = {step.uid: step.parallelism for step in state}
        plans = []
        for step, base in zip(self.lists, bases, strict=True):
            assert self.worker_host is not None, "a pipeline with lists has one"
            old = before.get(step.uid, base.parallelism)
            plans.append(ListPlan(step, base, old, version, self.worker_host))
        return tuple(plans)

    def _table_plans(
        self,
        version: Version,
        bases: Sequence[StepState],
        control: Mapping[str, tuple[SplitRange, ...]],
    ) -> tuple[TablePlan, ...]:
        """Return the plans of the tables in an epoch."""
        plans = []
        for table, base in zip(self.tables, bases, strict=True):
            assert self.worker_host is not None, "a pipeline with tables has one"
            splits = control.get(table.uid, ())
            plans.append(TablePlan(table, base, version, splits, self.worker_host))
        return tuple(plans)


NO_STEPS = PipelinePlan()


def _started(step: KeyedStep, base: StepState) -> KeyedStep:
    """Return the step, without its initial state after the first epoch."""
    if base.version is None or not isinstance(step.processor, HasInitialState):
        return step
    return replace(step, processor=step.processor.started())


@dataclass(frozen=True)
class EpochPlan:
    """The plan of an epoch's tasks, and the sum of their notes.

    Args:
        plans: of the keyed steps.
        first: where readers send their rows.
        writer_count: how many tasks write into the epoch's own transaction; 0: no transaction, and
            the last tasks report themselves.
        version: of the state that the epoch leaves.
        has_sinks: the last tasks note their transactions in sinks.
        may_leave_strays: see `FanOut`.
        on_share: see `PipelinePlan`.
        on_times: see `PipelinePlan`.
        on_event_times: see `PipelinePlan`.
        source: see `PipelinePlan.epoch`; also None where readers note no times.
        final_stage: see `final_stage`; 0: more may come.
        tables: the broadcast tables in this epoch.
        lists: the list states in this epoch.
    """

    plans: tuple[ProcessPlan, ...]
    first: Outlet
    writer_count: int
    version: Version
    has_sinks: bool = False
    may_leave_strays: bool = False
    on_share: Callable[[int], None] = _ignore
    on_times: Callable[[Sequence[TaskTimes]], None] = _ignore
    on_event_times: Callable[[EventTimesOfEpoch], None] = _ignore
    source: InputState | None = None
    final_stage: int = 0
    tables: tuple[TablePlan, ...] = ()
    lists: tuple[ListPlan, ...] = ()

    @property
    def stage(self) -> int:
        """The stage of the tasks whose frames are written."""
        return len(self.plans)

    def prepared(self, reports: Sequence[Report]) -> EpochRan:
        """Return the result of an epoch from the reports of the writing tasks.

        Raises:
            Exception: the first failure that a task reports.
            EpochAbortedError: tasks saw different attempts of a source.
            BrokenInvariantError: the note of a task is missing.
        """
        for report in reports:
            if report.failure is not None:
                raise report.failure.to_error()
        by_kind = split_notes(note for report in reports for note in report.notes)
        notes, prepared, times, read, of_tables, of_lists = by_kind
        check_same_attempts(
            [*(report.attempts for report in reports), *(note.attempts for note in notes)]
        )
        self._check_complete(reports, notes)
        if self.has_sinks:
            attempts = [attempt for report in reports for attempt in report.attempts]
            check_notes(prepared, attempts, self.stage)
        by_step = [[note for note in notes if note.uid == p.base.uid] for p in self.plans]
        steps = [self._after(plan, own) for plan, own in zip(self.plans, by_step, strict=True)]
        own_ms = [[note.event_time_max_ms for note in own] for own in by_step]
        read_ms = latest_of(read)
        steps = with_watermarks(self.plans, steps, self.source, read_ms, own_ms, self.final_stage)
        self._tell_event_times(steps, read_ms)
        state = (*steps, *tables_after(self.tables, of_tables), *lists_after(self.lists, of_lists))
        self.on_share(max((note.byte_count for note in notes), default=0))
        self.on_times(times)
        late = Counter[str]()
        for note in notes:
            late[note.uid] += note.late
        return EpochRan(
            produced=tuple(
                produced_range for report in reports for produced_range in report.produced
            ),
            state=state,
            late=tuple((uid, count) for uid, count in late.items() if count),
            committables=tuple(
                committable for note in prepared for committable in note.committables
            ),
            has_strays=self.may_leave_strays or any(note.attempt_number for note in prepared),
        )

    def _check_complete(self, reports: Collection[Report], notes: Iterable[TaskNote]) -> None:
        """Raise if a note or a report of a task is missing or doubled: changes would be lost."""
        expected = [(p.base.uid, i) for p in self.plans for i in range(p.base.parallelism)]
        noted_tasks = sorted((note.uid, note.index) for note in notes)
        count = self.writer_count or (self.plans[-1].base.parallelism if self.plans else 0)
        if noted_tasks != sorted(expected) or (self.plans and len(reports) != count):
            raise BrokenInvariantError(
                f"epoch {self.version.epoch}: notes of the keyed tasks {noted_tasks} and "
                f"{len(reports)} reports came back, expected {sorted(expected)} and {count}"
            )

    def _after(self, plan: ProcessPlan, notes: Sequence[TaskNote]) -> StepState:
        """A step's state at the end of the epoch, with the watermark that it had."""
        _warn_of_dropped(plan, notes)
        files: list[StateFile] = [file for note in notes for file in note.files]
        # The first epoch counts even if it left nothing: initial state is put in once.
        is_new = files or plan.base.version is None
        return extend(plan.base, self.version, files) if is_new else plan.base

    def _tell_event_times(
        self, steps: Sequence[StepState], read_ms: Mapping[TopicPartition, int | None]
    ) -> None:
        """Report the times of the partitions, as the first step with event time goes by them."""
        at = first_timed([plan.step for plan in self.plans])
        if at is None or self.source is None:
            return
        now_ms, rule = self.plans[at].time.timestamp_ms, self.plans[at].step.watermark_rule
        self.on_event_times(EventTimesOfEpoch.of(steps[at], read_ms, self.source, now_ms, rule))


def final_stage(steps: Sequence[KeyedStep]) -> int:
    """Return the step that gets the final watermark at the end of all inputs, from 1; 0: none.

    The first step with event times gets it, unless a step before has timers of the clock, which
    may still make rows.
    """
    for stage, step in enumerate(steps, 1):
        if step.event_time:
            return stage
        if makes_rows_later(step):
            return 0
    return 0


def _bases_in_use(
    steps: Sequence[KeyedStep], bases: tuple[StepState, ...], source: InputState | None
) -> tuple[StepState, ...]:
    """Return what steps go on from, with the watermark that an epoch goes by; see `in_use`."""
    at = first_timed(steps)
    if source is None or at is None:
        return bases
    return (
        *bases[:at],
        in_use(bases[at], source, steps[at].watermark_rule),
        *bases[at + 1 :],
    )


def _wanted_of_step(step: KeyedStep) -> StepRequirement:
    """Return the requirements of a keyed step on its state."""
    return StepRequirement(
        step.uid,
        step.key.schema_text,
        step.max_parallelism,
        step.parallelism,
        step.processor.time_mode,
    )


def _wanted_of_table(table: TableStep) -> StepRequirement:
    """Return the requirements of a broadcast table on its state."""
    return StepRequirement(table.uid, table.codec.key.schema_text, WHOLE.count, 1)


def _wanted_of_list(list_step: ListStep, task_count: int) -> StepRequirement:
    """Return the requirements of a list state of readers."""
    return StepRequirement(list_step.uid, PLACE.schema_text, ALL_TASKS.count, task_count)


def _warn_of_dropped(plan: ProcessPlan, notes: Sequence[TaskNote]) -> None:
    """Warn of rows that a step dropped because of their event times."""
    early = sum(note.early for note in notes)
    late = sum(note.late for note in notes) - early
    where = (plan.base.uid, plan.checkpoint_id)
    if late:
        logger.warning(
            "step %s, epoch %d: %d rows came later than the watermark (%s ms) and were dropped",
            *where,
            late,
            plan.base.watermark_ms,
        )
    if early:
        logger.warning(
            "step %s, epoch %d: %d rows were further ahead of the clock than event_time_max_ahead "
            "(%s ms) and were dropped",
            *where,
            early,
            plan.step.event_time_max_ahead_ms,
        )
