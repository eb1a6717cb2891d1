"""An epoch with a keyed step: readers, keyed tasks with their attempts, and the frames in between.

What tasks do, their plans, files and notes, and what they add up to are the real code; Spark's part
is played here: where tasks run, how often, and which attempt's frames a later task gets.
"""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import pyarrow as pa

from tallystick.codec.rows import RowLayout
from tallystick.epoch.protocol import EpochRan
from tallystick.errors import EpochAbortedError, RetriableError
from tallystick.source.offsets import of_input
from tallystick.state.catalog import StepState
from tallystick.state.file_sets import Load, due_merges, due_snapshots
from tallystick.state.key_groups import KeyGroupRange
from tallystick.tasks.epoch_plan import EpochPlan, PipelinePlan
from tallystick.tasks.event_times import InputState
from tallystick.tasks.frames import Frame
from tallystick.tasks.keyed import KeyedStep, ProcessPlan, WorkerHost
from tallystick.tasks.read import BatchFunction, EncodePlan, Report, Route
from tallystick.tasks.read_plan import ReadPlan, send_read
from tallystick.tasks.write import CollectPlan, FanOut
from tallystick.values import Producer, TopicPartition
from tests.simulation.branches import Branches
from tests.simulation.engine import SimulatedEngine, Surroundings
from tests.simulation.faults import Fault, FaultPlan
from tests.simulation.fetch import parts_of, read_plan
from tests.simulation.hosts import SimulatedWorkerHost
from tests.simulation.kafka_cluster import KafkaCluster
from tests.simulation.keyed_step import COLUMNS, KEY_COUNT, counted_in
from tests.simulation.operator_state import Reading, memory_of, rules_in, rules_splits
from tests.simulation.rows import Row, key_partition, time_of
from tests.simulation.scheduler import Process

TASK_ATTEMPTS_MAX = 4
"""Spark's own number (spark.task.maxFailures)."""
BATCH_BYTES = 200
"""Of a record batch: one or two rows."""
CHANGED_BYTES_MIN = 1500
MERGED_FILES_MIN = 3
"""Epochs of the simulated world are small: what is large here would be nothing for a real one."""


class TaskKilledError(Exception):
    """A task died; Spark starts its next attempt."""


def encode_plan(output: Sequence[TopicPartition]) -> EncodePlan:
    """How rows become record batches: small ones, in the partition that each row names."""
    topic, count = output[0].topic, len(output)
    return EncodePlan((Route(RowLayout({topic: count}, topic), "none", BATCH_BYTES),), count)


def with_records(steps: PipelinePlan, unread: "EpochInput") -> PipelinePlan:
    """Let the last step's output become records, in the partition of their key."""

    def records(rows: pa.RecordBatch) -> pa.RecordBatch:
        counted = counted_in(rows)
        values = [
            Row(
                unread.lineage,
                unread.epoch,
                TopicPartition(topic, number),
                offset,
                key=key,
                nth=count,
            ).to_value()
            for key, topic, number, offset, count in counted
        ]
        partitions = [key_partition(key) for key, *_ in counted]
        return pa.record_batch(
            {"value": pa.array(values, pa.binary()), "partition": pa.array(partitions, pa.int32())}
        )

    *others, last = steps.steps
    return replace(steps, steps=(*others, replace(last, functions=(records,))))


class Drawn(Protocol):
    """What chance decides."""

    dice: random.Random
    plan: FaultPlan


class KeyedSurroundings(Surroundings, Protocol):
    """What keyed tasks need of the world."""

    def nonce(self) -> str:
        """A name that no other run will draw."""
        ...

    def pauses_ms(self, process: Process, state: tuple[StepState, ...]) -> int:
        """The time by which a driver measures pauses."""
        ...


@dataclass(frozen=True)
class EpochInput:
    """What an epoch reads, and what its rows are to say of where they come from."""

    lineage: str
    epoch: int
    ranges: Mapping[TopicPartition, range]
    rules: range = range(0)
    """The new records of the table's topic."""
    all_rules: range = range(0)
    """All of its records up to there: the table is made of them."""
    is_over: bool = False
    """All inputs end where this epoch ends."""

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to read."""
        return not any((*self.ranges.values(), self.rules))

    def reading(self, epoch: EpochPlan, dice: random.Random) -> Reading | None:
        """Return how readers with operator state read it; None: they have none."""
        if not epoch.lists:
            return None
        return Reading(epoch, self.ranges, rules_in(self.all_rules), dice)

    def state(self, clock_ms: int) -> InputState:
        """The state of the input: no partition has more."""
        partitions = frozenset(self.ranges)
        return InputState(partitions, frozenset(), is_over=self.is_over, clock_ms=clock_ms)


class KeyedEngine(SimulatedEngine):
    """Runs the tasks of one epoch.

    Args:
        world: what surrounds them.
        process: the driver that waits for them.
        cluster: where they write.
        output: the output partitions; each has one writing task.
        steps: the keyed steps.
        unread: what is to be read.
        worker_host: from a task's index to what it reaches where it is placed this time.
        branches: the other sinks; None: there are none.
    """

    def __init__(
        self,
        world: KeyedSurroundings,
        process: Process,
        cluster: KafkaCluster,
        output: Sequence[TopicPartition],
        steps: PipelinePlan,
        unread: EpochInput,
        worker_host: Callable[[int], WorkerHost],
        branches: Branches | None,
    ) -> None:
        super().__init__(world, process, cluster, dict.fromkeys(output, ()))
        self._keyed_world = world
        self._steps = steps
        self._unread = unread
        self._worker_host = worker_host
        self._branches = branches
        self.stage = len(steps.steps)

    def run_epoch(
        self, checkpoint_id: int, producer: Producer, state: tuple[StepState, ...]
    ) -> EpochRan:
        """See `ports.Engine.run_epoch`."""
        if self._steps.is_idle(state) and self._unread.is_empty:
            return EpochRan((), self._steps.carried(state))
        token = self._keyed_world.nonce()
        self._encode = encode_plan(self._output)
        steps = with_records(self._steps, self._unread)
        unread = self._unread.state(self._keyed_world.pauses_ms(self._process, state))
        last: EncodePlan | FanOut = self._encode
        if self._branches is not None:
            last = self._branches.outlet(checkpoint_id, self._unread.lineage, self._encode)
        control = rules_splits(self._unread.rules)
        epoch = steps.epoch(checkpoint_id, 0, token, state, last, unread, control)
        epoch = replace(epoch, plans=rewriting(self._world, epoch.plans))
        self._stages = Stages(
            self._keyed_world, self._process, epoch, self._unread, self._worker_host
        )
        self._stages.run()
        if epoch.writer_count:
            return epoch.prepared(self._run_writers(producer, self._output))
        if self._world.plan.strikes(Fault.TASK_AGAIN):
            self._stages.run_again()
        reports = self._stages.collected()
        return epoch.prepared(reports)

    def _frames(self, partition: TopicPartition, *, reordered: bool = False) -> list[Frame]:
        """What there is for a writing task now; it is sorted on its way."""
        return self._stages.frames_for(self._encode.target(partition))

    def _step(self, producer: Producer) -> None:
        if self._world.plan.strikes(Fault.TASK_AGAIN):
            self._run_keyed_task_again(producer)
        super()._step(producer)

    def _run_keyed_task_again(self, producer: Producer) -> None:
        """Writing tasks that have begun keep what they got, the others get what is there now."""
        self._stages.run_again()
        for partition, attempt in self._running.items():
            if not attempt.has_written:
                attempt.end()
                frames = self._frames(partition)
                self._running[partition] = self._attempt(producer, frames, attempt.number)


def keys_plan(
    world: Drawn, step: KeyedStep, before_answer: Callable[[TopicPartition], None], input_: str
) -> ReadPlan:
    """How an input of a keyed step is read."""
    assert step.event_time is not None, "readers note it"
    event_time = step.columns.field(step.event_time)
    return read_plan(world.dice, before_answer, _keys_read(world, input_), event_time, input_)


def _keys_read(world: Drawn, input_: str) -> BatchFunction:
    """What a keyed step gets of what was read; the user's function may draw other keys."""

    def keys(rows: pa.RecordBatch) -> pa.RecordBatch:
        drawn = [
            world.dice.randrange(KEY_COUNT) if world.plan.strikes(Fault.WHIM) else int(value)
            for value in rows["value"].to_pylist()
        ]
        places = zip(
            *(rows[name].to_pylist() for name in ("topic", "partition", "offset")), strict=True
        )
        sources = [(of_input(input_, TopicPartition(*at)), offset) for *at, offset in places]
        columns = [
            pa.array(drawn),
            pa.array([source.topic for source, _ in sources]),
            rows["partition"].cast("int64"),
            rows["offset"],
            pa.array([time_of(source, offset) for source, offset in sources]),
        ]
        return pa.record_batch(columns, schema=COLUMNS)

    return keys


def rewriting(world: Drawn, plans: Sequence[ProcessPlan]) -> tuple[ProcessPlan, ...]:
    """The plans of an epoch in which perhaps state is written anew."""
    what: Collection[str] = ()
    if plans and world.plan.strikes(Fault.REWRITTEN):
        what = world.dice.choice((("snapshots",), ("merges",), ("snapshots", "merges")))
    return tuple(_rewriting(plan, what) for plan in plans)


def _rewriting(plan: ProcessPlan, what: Collection[str]) -> ProcessPlan:
    """The plan with what is written anew by the measures of this small world, not by the real."""
    base, count = plan.base, plan.base.parallelism
    snapshots: Mapping[int, KeyGroupRange] = {}
    merges: Mapping[int, tuple[Load, ...]] = {}
    if base.files and "snapshots" in what:
        snapshots = due_snapshots(base, count, changed_bytes_min=CHANGED_BYTES_MIN)
    if base.files and "merges" in what:
        merges = due_merges(base, count, files_min=MERGED_FILES_MIN)
    return replace(plan, snapshots=snapshots, merges=merges)


class Stages:
    """The tasks before the writing ones, and the frames that they leave on their hosts' disks."""

    def __init__(
        self,
        world: KeyedSurroundings,
        process: Process,
        epoch: EpochPlan,
        unread: EpochInput,
        worker_host: Callable[[int], WorkerHost],
    ) -> None:
        self._world = world
        self._process = process
        self._first = epoch.first
        self._plans = epoch.plans
        self._unread = unread
        self._worker_host = worker_host
        self._reading = unread.reading(epoch, world.dice)
        self._left: list[list[list[Frame]]] = []  # by stage, and by task

    def run(self) -> None:
        """Run each task at least once.

        Raises:
            RetriableError: the attempts of a task are used up.
        """
        reading = self._reading
        sources = range(len(self._unread.ranges) if reading is None else reading.reader_count)
        self._left = [[self._run_task(0, source) for source in sources]]
        for stage, plan in enumerate(self._plans, 1):
            count = plan.base.parallelism
            self._left.append([[] for _ in range(count)])
            before = range(len(self._left[stage - 1]))
            for index in self._world.dice.sample(range(count), count):
                self._world.pass_by(self._process)
                if self._world.plan.strikes(Fault.TASK_AGAIN):
                    again = self._world.dice.choice(before)
                    self._left[stage - 1][again] = self._run_task(stage - 1, again)
                self._left[stage][index] = self._run_task(stage, index)

    def run_again(self) -> None:
        """Run one of the last keyed tasks once more: what it left was lost."""
        index = self._world.dice.randrange(len(self._left[-1]))
        self._left[-1][index] = self._run_task(len(self._plans), index)

    def frames_for(self, target: int) -> list[Frame]:
        """What a task after the keyed ones gets."""
        return _routed(self._left[-1], target)

    def collected(self) -> list[Report]:
        """What the last keyed tasks tell themselves, where no task writes after them."""
        collect = CollectPlan(len(self._plans))
        return [collect.write(iter(frames), 0) for frames in self._left[-1]]

    def _run_task(self, stage: int, index: int) -> list[Frame]:
        error: Exception | None = None
        for _ in range(TASK_ATTEMPTS_MAX):
            try:
                return self._process_keys(stage, index) if stage else self._read_source(index)
            except (TaskKilledError, RetriableError) as met:
                error = met
        raise EpochAbortedError(f"a task failed {TASK_ATTEMPTS_MAX} times: {error}")

    def _read_source(self, source: int) -> list[Frame]:
        if self._reading is not None:
            worker_host = self._worker_host(source)
            assert isinstance(worker_host, SimulatedWorkerHost)
            memory = memory_of(worker_host, worker_host.host.name)
            return list(self._reading.send(source, self._plan_of, memory, lambda _: None))
        partition = list(self._unread.ranges)[source]
        parts = parts_of(self._plan_of, {partition: self._unread.ranges[partition]})
        return list(send_read(parts, self._first, source))

    def _plan_of(self, input_: str) -> ReadPlan:
        return keys_plan(self._world, self._plans[0].step, lambda _: None, input_)

    def _process_keys(self, stage: int, index: int) -> list[Frame]:
        plan = replace(self._plans[stage - 1], worker_host=self._worker_host(index))
        return list(plan.run(_routed(self._left[stage - 1], index), index))


def _routed(frames: Sequence[Sequence[Frame]], target: int) -> list[Frame]:
    frames_in = [frame for task_frames in frames for frame in task_frames if frame.target == target]
    return sorted(frames_in, key=lambda frame: (frame.source, frame.sequence))
