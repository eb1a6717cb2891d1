"""A pipeline in a loop of our own: no query of Spark's, no log but the manifests.

Spark runs the tasks: one job for all epochs, or a job each. What Structured Streaming did is here:
the planner lives in the driver, an epoch is planned after the fence, and where it begins stands in
the manifest of the one before.
"""

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pyspark import SparkContext

from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.checkpoint.local.store import disk_space
from tallystick.checkpoint.newest_run import newer_run, note_run
from tallystick.checkpoint.requests import Inbox
from tallystick.checkpoint.savepoint_folder import refuse_savepoint
from tallystick.epoch.manifest import Identity
from tallystick.epoch.micro_batches import OWN_LOOP
from tallystick.epoch.refusals import no_base
from tallystick.errors import BrokerUnavailableError, FencedError, StorageError
from tallystick.host.stopwatch import (
    READ_BYTES,
    READ_RECORDS,
    WRITTEN_BYTES,
    WRITTEN_FILE_BYTES,
    WRITTEN_FILES,
)
from tallystick.kafka.broker import KafkaBroker
from tallystick.pipeline.compiled import PipelineRun, check_checkpoint
from tallystick.pipeline.dry_run import dry_run
from tallystick.pipeline.group_offsets import GroupOffsets, GroupOffsetsBeside, SourceClient
from tallystick.pipeline.input_planning import (
    InputPlanner,
    InputPlanners,
    Planner,
    Positions,
    by_input,
    count_of,
    text_of,
)
from tallystick.pipeline.inputs import PipelineInput
from tallystick.pipeline.lag_watch import LagWatch
from tallystick.pipeline.listeners import PIPELINES, observe
from tallystick.pipeline.planning import StreamPlanner
from tallystick.pipeline.sizing import EpochSizes, Reason, SizeBound, SizedEpoch, SizeLimits
from tallystick.pipeline.watch import RunWatch, start_text
from tallystick.ports import Engine, PlannedEpoch
from tallystick.run.console import Console
from tallystick.run.epoch_clock import EpochClock, SteadyClock
from tallystick.run.epoch_loop import EpochEnded, EpochLoop, Trigger
from tallystick.run.query import Query, refuse_second
from tallystick.source.offsets import from_text, next_tick, of_input, unmoved
from tallystick.spark.cluster import JOBS
from tallystick.spark.context import kill_jvm
from tallystick.spark.jvm import reason_of_end
from tallystick.state.catalog import StepState
from tallystick.storage.file_storage import FileStorage
from tallystick.tasks.epoch_plan import PipelinePlan, final_stage
from tallystick.tasks.event_times import EventTimesOfEpoch, InputState
from tallystick.values import TopicPartition

logger = logging.getLogger(__name__)

TELL_AGAIN_S = 60.0
"""The time between two lines of the log about partitions that wait."""
NAMED_MAX = 50
"""The most partitions that a progress names of each kind: it is kept for 100 epochs."""


LOOK_AGAIN_S = 10.0
"""The time between two looks, without new records, for what a replaced run has done since."""


@dataclass(frozen=True, slots=True)
class LoopEpoch:
    """An epoch's input; see `pipeline_run.EpochInput`."""

    sources: tuple[str, ...]
    previous_sources: tuple[str, ...]
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class _Begun:
    """An epoch that was planned, and is not known to have ended.

    Args:
        at_s: when its plan began, by the monotonic clock.
        bound: of its size; None: the user wants none.
        offset_count: how many it spans.
        is_cut: whether more could have been read.
        is_held_back: only users' bounds of single inputs leave something.
    """

    at_s: float
    bound: SizeBound | None
    offset_count: int
    is_cut: bool
    is_held_back: bool = False


class PipelinePlanner:
    """The planner of a pipeline's epochs, which also makes each engine; see `ports.EpochSource`.

    Args:
        run: the pipeline.
        inputs: the planners of the inputs.
        sizes: bounds the epochs; None: no bounds.
        on_idle: called with the positions where nothing is to be read; says if other sinks are due.
        clock: of the epochs.
        pauses: the clock that measures pauses.
        on_begin: called at the first plan with the newest committed epoch (None: there is none),
            and where each input begins.
    """

    def __init__(
        self,
        run: PipelineRun,
        inputs: InputPlanners,
        sizes: EpochSizes | None,
        on_idle: Callable[[Positions], bool] = lambda _: False,
        clock: EpochClock | None = None,
        pauses: SteadyClock | None = None,
        on_begin: Callable[[int | None, Positions], None] | None = None,
    ) -> None:
        self._on_begin = on_begin
        self._run = run
        self._inputs = inputs
        self._sizes = sizes
        self._on_idle = on_idle
        self._clock, self._pauses = clock or EpochClock(), pauses or SteadyClock()
        self._times = TimeProgress(run.name)
        run.keyed = replace(
            run.keyed,
            on_share=self._note_share,
            on_times=run.parts.note_tasks,
            on_event_times=self._times.note,
        )
        self._share_bytes = 0
        self._begun: _Begun | None = None
        self._has_run = False
        self._newest: _Begun | None = None
        self._planned_at_ms = self._paused_at_ms = 0
        self._ends_with_records = False
        self._ran = LoopEpoch((), (), 0)
        self._checkpoint_id = -1
        self._reached: tuple[str, ...] = ()

    def stop_at_what_is_there(self) -> None:
        """See `run.query.LoopSource.stop_at_what_is_there`."""
        self._ends_with_records = True
        self._inputs.stop_at_what_is_there()

    def plan(
        self, checkpoint_id: int, start: tuple[str, ...], state: tuple[StepState, ...]
    ) -> PlannedEpoch:
        """See `ports.EpochSource.plan`."""
        self._run.check_tasks()
        self._run.keyed.check(state)
        self._planned_at_ms = self._clock.now_ms()
        self._paused_at_ms = self._pauses.now_ms(_newest_seen_ms(state))
        at_s = time.monotonic()
        # The first plan of a lineage is made twice: for its seed, and for its first epoch.
        if self._begun is not None and self._has_run and self._sizes is not None:
            self._sizes.failed(self._begun.offset_count, at_s - self._begun.at_s)
        bound = None if self._sizes is None else self._sizes.bound()
        positions = self._inputs.positions(start)
        self._report_begin(checkpoint_id, start, positions)
        count_max, keyed = None if bound is None else bound.offset_count, self._run.keyed
        ahead = partial(self._times.ahead, keyed, state) if keyed.max_drift_ms else None
        stops = self._inputs.next(positions, count_max, ahead)
        begins = self._reached = start or _texts(positions)
        self._begun, self._has_run, self._share_bytes = None, False, 0
        is_tick = stops[0].tick > positions[0].tick  # as one is planned after records
        if (stops is positions or is_tick) and self._is_watermark_due(positions, state):
            first = replace(next_tick(positions[0]), tick=0)  # others follow, as after records
            stops = (first, *(stops[1:] if is_tick else map(unmoved, positions[1:])))
        elif stops is positions and self._inputs.has_dropped(start):
            stops = tuple(map(unmoved, positions))  # so that it is so from now on
        elif stops is positions:
            return PlannedEpoch(begins, None, self._on_idle(positions))
        count = count_of(positions, stops)
        is_held_back = len(stops) > 1 and self._inputs.is_held_back(positions, stops)
        self._begun = _Begun(at_s, bound, count, count < self._inputs.waiting, is_held_back)
        return PlannedEpoch(begins, _texts(stops))

    def _report_begin(
        self, checkpoint_id: int, start: tuple[str, ...], positions: Positions
    ) -> None:
        report, self._on_begin = self._on_begin, None
        if report is not None:
            report(checkpoint_id - 1 if start else None, positions)

    def ended(self) -> None:
        """Learn from the epoch that was planned last and is committed now."""
        self._newest, self._begun = self._begun, None
        self._reached = self._ran.sources
        if self._newest is not None and self._sizes is not None:
            count, is_cut = self._newest.offset_count, self._newest.is_cut
            took_s = time.monotonic() - self._newest.at_s
            self._sizes.ended(SizedEpoch(count, took_s, self._share_bytes, is_cut))

    @property
    def is_behind(self) -> bool:
        """See `run.query.LoopSource.is_behind`."""
        newest = self._newest
        if newest is None or newest.bound is None or newest.is_held_back:
            return False
        return newest.is_cut and newest.bound.reason is not Reason.OPTION

    def _note_share(self, byte_count: int) -> None:
        self._share_bytes = byte_count

    def engine(
        self, checkpoint_id: int, start: tuple[str, ...], sources: tuple[str, ...]
    ) -> Engine:
        """See `ports.EpochSource.engine`."""
        at_ms = self._planned_at_ms or self._clock.now_ms()
        self._ran = LoopEpoch(sources, start, at_ms)
        paused_at_ms = self._paused_at_ms or self._pauses.now_ms()
        self._checkpoint_id = checkpoint_id
        self._has_run = True
        source = self._inputs.state(self.shown, paused_at_ms)
        if self._run.keyed.event_time is not None:
            source = replace(source, arrived=self._times.planned(start, sources))
        return self._run.make_engine(self._ran, source)

    def _is_watermark_due(self, positions: Positions, state: tuple[StepState, ...]) -> bool:
        """True if an epoch is to be run only for a partition that became idle, or at the end."""
        keyed = self._run.keyed
        if any(position.initial for position in positions) or not keyed.tick_count:
            return False
        source = self._inputs.state(tuple(map(unmoved, positions)), self._paused_at_ms)
        may_become_idle = keyed.has_idle_partitions and not self._ends_with_records
        if not (may_become_idle or (source.is_over and final_stage(keyed.steps))):
            return False
        return keyed.is_watermark_due(state, source, self._planned_at_ms)

    def positions_reached(self) -> Positions:
        """Return the positions before which all is committed; empty before the first plan."""
        return tuple(by_input(self._reached).values())

    @property
    def shown(self) -> Positions:
        """The positions where the newest epoch has ended."""
        return tuple(by_input(self._ran.sources).values())

    def describe(self, ended: EpochEnded) -> dict[str, Any]:
        """Return what the newest epoch read, and where its time went, for the progress."""
        parts = self._run.parts
        return {
            "batchId": self._checkpoint_id,
            "durationMs": parts.duration_ms(ended.took_s),
            "tasks": parts.tasks([step.uid for step in self._run.keyed.steps]),
            "execution": self._run.execution.kind,
            "numInputRows": parts.count(READ_RECORDS),
            "bytes": {"read": parts.count(READ_BYTES), "written": parts.count(WRITTEN_BYTES)},
            "files": {
                "written": parts.count(WRITTEN_FILES),
                "bytes": parts.count(WRITTEN_FILE_BYTES),
            },
            "epochSize": self._size(),
            "eventTimes": self._times.describe(),
            "sources": self._sources(),
        }

    def _sources(self) -> list[dict[str, Any]]:
        """Return where each input is, as a progress has it."""
        latest, before = self._inputs.latest(), by_input(self._ran.previous_sources)
        descriptions = []
        for uid, stop in by_input(self._ran.sources).items():
            start, ends = before.get(uid), latest.get(uid)
            descriptions.append(
                {
                    "description": "tallystick",
                    "input": uid,
                    "startOffset": None if start is None or start.initial else text_of(start),
                    "endOffset": text_of(stop),
                    "latestOffset": None if ends is None else text_of(ends),
                }
            )
        return descriptions

    def _size(self) -> dict[str, Any] | None:
        """Return the newest epoch's size and its bound; None if an earlier run planned it."""
        if self._newest is None:
            return None
        bound = self._newest.bound
        return {
            "offsets": self._newest.offset_count,
            "isCut": self._newest.is_cut,
            "offsetsMax": None if bound is None else bound.offset_count,
            "because": "max_offsets_per_trigger is 'all'" if bound is None else bound.reason.value,
            "bytesOfBusiestTask": self._share_bytes,
        }


class _Run:
    """One run of a pipeline's loop: driver, planners and connections, used by a `Query`.

    Args:
        run: the pipeline, checked.
        storage: its checkpoint.
        when: when epochs begin.
        accepted: decisions that the user stated.
        watch: reports the run.
    """

    def __init__(
        self,
        run: PipelineRun,
        storage: FileStorage,
        when: Trigger,
        accepted: frozenset[str],
        watch: RunWatch,
    ) -> None:
        self._watch, self._storage = watch, storage
        self._loop: EpochLoop | None = None
        self.id = str(uuid.uuid4())
        self._run = run
        self._when = when
        self._brokers = {source.config: KafkaBroker(source.config) for source in run.all_inputs}
        try:
            folder = CheckpointFolder(storage)
            self.lineage = folder.begin()
            folder.note(OWN_LOOP)
            identity = Identity(run.name, self.lineage, storage.location, accepted)
            self._driver = run.make_driver(identity, storage)
            self._driver.check_name(run.newest_token(self.lineage))
            note_run(storage, self.id, PIPELINES[run.name].graph)
            self._driver.collection.begin_beside()
            run.start_tasks()
            planners = planners_of(
                run,
                lambda source: StreamPlanner(
                    self._brokers[source.config],
                    source.options,
                    tick_interval_ms=run.keyed.tick_interval_ms,
                    tick_count_max=run.keyed.tick_count,
                ),
                accepted,
            )
            self.source = PipelinePlanner(
                *(run, planners, _sizes_of(run, when), self._look_again),
                on_begin=self._report_begin,
            )
        except BaseException:
            self._hang_up()
            raise
        clients = [
            SourceClient(source.options.shown_group, source.config) for source in run.all_inputs
        ]
        self._groups = GroupOffsetsBeside(GroupOffsets(run.name, clients))
        configs = {source.uid: source.config for source in run.all_inputs}
        PIPELINES[run.name].runs += 1
        self._lag = LagWatch(run.name, configs, self.source.positions_reached)
        self._look_again_s = 0.0

    def loop(self, note: Callable[[EpochEnded], dict[str, Any]]) -> EpochLoop:
        """Return the loop that runs the epochs; `note` makes an epoch's progress."""

        def on_end(ended: EpochEnded) -> None:
            self.source.ended()
            self._show(self.source.shown)
            progress = note(ended)
            self._watch.note(progress)
            PIPELINES[self._run.name].tasks = self._run.parts.newest
            observe(self._run.name, progress)
            self._lag.epoch_ended()

        strays_live_s = self._run.strays_live_s
        self._loop = EpochLoop(self._driver, self.source, self._when, on_end, strays_live_s)
        return self._loop

    def _report_begin(self, newest_epoch: int | None, positions: Positions) -> None:
        assert self._loop is not None, "its thread plans"
        loop, run = self._loop, self._run
        brokers = {source.uid: self._brokers[source.config] for source in run.all_inputs}
        text, hint = start_text(
            run.all_inputs, brokers, run.topology, positions, newest_epoch, self._storage.location
        )
        newest = self._driver.coordinator.committed_manifest
        changes = run.keyed.state_changes(() if newest is None else newest.state)
        line = "; ".join([text, *changes])
        self._watch.started(lambda: loop.idle_since_s, line, hint)

    def explain(self, error: BaseException) -> BaseException:
        """Add the newer run to the error of a run that was replaced."""
        if isinstance(error, FencedError) and (newer := newer_run(self._storage)):
            return FencedError(f"{error} {newer}").with_traceback(error.__traceback__)
        return error

    def ended(self, error: BaseException | None) -> None:
        """Report the end."""
        self._watch.ended(error)

    def rescale(self, parallelism: int) -> None:
        """See `Query.rescale`; called between two epochs."""
        newest = self._driver.coordinator.committed_manifest
        self._run.rescale(parallelism, () if newest is None else newest.state)

    def _show(self, positions: Positions, *, forward_only: bool = False) -> None:
        """Show how far is read, where the epochs' transactions do not."""
        cluster_id = self._driver.cluster_id
        beside = [
            position
            for position in positions
            if position.cluster_id != cluster_id and not position.initial
        ]
        if beside:
            self._groups.show(*beside, forward_only=forward_only)

    def _look_again(self, positions: Positions) -> bool:
        """Show positions again that an earlier run left or put back, or that Kafka refused.

        A run that was replaced shows its old positions if it wakes up late: nobody fences offsets
        of groups. It ends when it has nothing to read, and its successor shows its own.

        Returns:
            True if other sinks are due: such a run may have begun a transaction there too.

        Raises:
            FencedError: this run was replaced.
            RetriableError: a fence will tell if it was.
        """
        due_s, now_s = self._look_again_s, time.monotonic()
        if now_s < due_s:
            return False
        self._look_again_s = now_s + LOOK_AGAIN_S
        is_owner = False
        try:
            self._driver.check_owner()
            is_owner = True
        except (StorageError, BrokerUnavailableError) as error:
            logger.warning("who owns pipeline %s cannot be asked: %s", self._run.name, error)
        if is_owner or self._groups.is_due:
            self._show(positions, forward_only=True)
        return due_s > 0  # the start has just looked through them

    def prepare(self) -> None:
        """Name the jobs of the thread that runs the loop."""
        self._run.cluster.context.setJobGroup(
            self.id, f"pipeline {self._run.name}", interruptOnCancel=True
        )

    def cancel(self) -> None:
        """Cancel the running tasks."""
        if self._run.execution.kind == JOBS:
            _cancel_jobs(self._run.cluster.context, self.id)
        else:
            self._run.cancel()

    def close(self) -> None:
        """Hang up: the run is over."""
        self._driver.collection.end()
        self._lag.close()
        PIPELINES[self._run.name].runs -= 1
        observe(self._run.name, None)
        self._groups.close()
        self._hang_up()

    def _hang_up(self) -> None:
        for broker in self._brokers.values():
            broker.close()
        self._run.close()


def opened(checkpoint: str, name: str) -> FileStorage:
    """Return the storage of a pipeline's checkpoint, which may be new.

    Raises:
        OptionError: it is a savepoint.
        DataLossError: it is another pipeline's.
        ManifestError: a manifest is damaged, or a query of Spark's has left none.
    """
    storage = FileStorage(checkpoint)
    refuse_savepoint(storage)
    check_checkpoint(storage, name)
    folder = CheckpointFolder(storage)
    if not folder.manifest_paths() and folder.planned_by_spark():
        raise no_base(Identity(name, "", storage.location))
    return storage


def _newest_seen_ms(state: tuple[StepState, ...]) -> int:
    """Return the latest time that an epoch, perhaps of an earlier run, gave to its partitions."""
    seen = (times.seen_ms for step in state for times in step.partition_times)
    return max(seen, default=0)


def start_loop(
    run: PipelineRun,
    checkpoint: str,
    trigger: Trigger,
    accepted: frozenset[str],
    is_dry: bool = False,
    *,
    is_quiet: bool = False,
    save: Callable[[str], None] | None = None,
) -> Query:
    """Check, then start the loop that runs the pipeline's epochs; none if it `is_dry`."""
    console = Console(run.name, is_quiet=is_quiet)
    watch = RunWatch(run.name, [config.bootstrap_servers for config in run.configs], console)
    watch.begin()
    try:
        return _started(run, checkpoint, trigger, accepted, watch, console, save, is_dry)
    except BaseException:
        watch.close()
        raise


def _started(
    run: PipelineRun,
    checkpoint: str,
    when: Trigger,
    accepted: frozenset[str],
    watch: RunWatch,
    console: Console,
    save: Callable[[str], None] | None,
    is_dry: bool,
) -> Query:
    storage = opened(checkpoint, run.name)
    run.keyed = replace(run.keyed, accepted=accepted)
    if not is_dry:
        refuse_second(run.name, storage.location)
    run.keyed.check(())  # against what is committed it is checked before the first epoch is planned
    is_new = not CheckpointFolder(storage).manifest_paths()
    run.check(when.interval_ms or None, is_new=is_new, accepted=accepted, is_dry=is_dry)
    if is_dry:
        return dry_run(run, storage, when, accepted, console, watch.close)
    for warning in disk_space(storage.uri):
        logger.warning("%s", warning)
    query_run = _Run(run, storage, when, accepted, watch)
    query = Query(
        run.name,
        query_run.lineage,
        query_run.id,
        loop=query_run.loop,
        prepare=query_run.prepare,
        cancel=query_run.cancel,
        close=query_run.close,
        describe=query_run.source.describe,
        rescale=query_run.rescale,
        key=storage.location,
        console=console,
        explain=lambda error: reason_of_end(query_run.explain(error)),
        on_end=query_run.ended,
        save=save,
        inbox=Inbox(storage, query_run.id),
        kill=kill_jvm,
    )
    query.begin()
    return query


def _cancel_jobs(context: SparkContext, run_id: str) -> None:
    try:
        context.cancelJobGroup(run_id)
    except Exception:
        if context._jsc is not None:  # else it is stopped, and so are its jobs
            raise


def _texts(positions: Positions) -> tuple[str, ...]:
    return tuple(map(text_of, positions))


def _sizes_of(run: PipelineRun, when: Trigger) -> EpochSizes | None:
    """Return the sizes of a run's epochs; None if the user wants all records in one epoch."""
    inputs = run.inputs
    if all(source.options.takes_all for source in inputs):
        return None
    counts = [source.options.own_count_max for source in inputs]
    known = [count for count in counts if count is not None]
    limits = SizeLimits(
        interval_s=when.interval_ms / 1000,
        timeout_s=run.transaction_timeout_ms / 1000,
        task_bytes_max=min(source.options.task_bytes_max for source in inputs),
        offset_count_max=sum(known) if len(known) == len(inputs) else None,
    )
    return EpochSizes(limits)


def planners_of(
    run: PipelineRun,
    planner_of: Callable[[PipelineInput], Planner],
    accepted: frozenset[str] = frozenset(),
) -> InputPlanners:
    """Return the planners of all inputs of a run.

    Args:
        run: the pipeline.
        planner_of: returns the planner of an input, which asks its cluster.
        accepted: decisions that the user stated.
    """
    return InputPlanners(
        [
            InputPlanner(
                uid=source.uid,
                planner=planner_of(source),
                offset_count_max=source.options.own_count_max,
                takes_all=not source.waits or source.options.takes_all,
                waits=source.is_timed,
                previous_uid=run.previous_inputs.get(source.uid),
            )
            for source in run.all_inputs
        ],
        accepted,
    )


class TimeProgress:
    """The event times of a run's partitions, and the partitions that wait for slower ones.

    A partition is mute if the newest records that were read of it gave no event time: functions
    drop the rows, or the rows have none. How far it is then is not known, and nobody waits for it.

    Args:
        name: of the pipeline.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._newest: EventTimesOfEpoch | None = None
        self._moving: frozenset[TopicPartition] = frozenset()
        self._mute: frozenset[TopicPartition] = frozenset()
        self._waiting: frozenset[TopicPartition] = frozenset()
        self._warned_s: float | None = None

    def planned(self, start: Iterable[str], stops: Iterable[str]) -> frozenset[TopicPartition]:
        """Take in what the next epoch reads; return the partitions that may bring event times.

        Args:
            start: the positions before, as a manifest has them.
            stops: those where it ends.
        """
        known = {offsets.input: offsets.positions for offsets in map(from_text, start)}
        self._moving = frozenset(
            of_input(stop.input, at)
            for stop in map(from_text, stops)
            for at, position in stop.positions.items()
            if position != known.get(stop.input, {}).get(at) or at in stop.starts
        )
        return self._moving - self._mute

    def note(self, times: EventTimesOfEpoch) -> None:
        """Take in what an epoch left; see `PipelinePlan.on_event_times`."""
        self._newest, self._mute = times, (self._mute | self._moving) - times.timed

    def ahead(
        self, keyed: PipelinePlan, state: tuple[StepState, ...], source: InputState
    ) -> frozenset[TopicPartition]:
        """Return the partitions that wait in the next epoch, and warn of them now and then."""
        self._waiting = keyed.ahead(state, self._mute, source)
        if not self._waiting:
            self._warned_s = None
        elif self._warned_s is None or time.monotonic() >= self._warned_s + TELL_AGAIN_S:
            self._warned_s = time.monotonic()
            logger.warning(
                "pipeline %s: %s wait: their event times are more than max_drift (%d ms) ahead of "
                "the slowest partition with unread records",
                self._name,
                ", ".join(_names(self._waiting)[:5])
                + (" and others" if len(self._waiting) > 5 else ""),
                keyed.max_drift_ms,
            )
        return self._waiting

    def describe(self) -> Mapping[str, Any] | None:
        """Return the newest epoch's event times for the progress, or None without event times."""
        newest = self._newest
        if newest is None:
            return None
        kinds = {
            "waitedFor": newest.waited_for,
            "idle": newest.idle,
            "ended": newest.ended,
            "held": self._waiting,
        }
        return {
            "watermark": newest.watermark_ms,
            "slowest": None if newest.slowest is None else str(newest.slowest),
            "counts": {kind: len(partitions) for kind, partitions in kinds.items()},
            **{kind: _names(partitions)[:NAMED_MAX] for kind, partitions in kinds.items()},
        }


def _names(partitions: Iterable[TopicPartition]) -> list[str]:
    return [str(partition) for partition in sorted(partitions)]
