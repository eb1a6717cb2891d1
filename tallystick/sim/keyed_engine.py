"""An epoch with a keyed step: readers, keyed tasks with their attempts, and the frames in between.

Plans, routing, files, notes and what they add up to are the real ones; Spark's part is played here:
where tasks run, how often, and which attempt's frames a later task gets.
"""

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import pyarrow as pa

from tallystick.errors import EpochAbortedError, RetriableError
from tallystick.exchange import Frame, Heard
from tallystick.exchanged_rows import from_ipc, to_ipc
from tallystick.keyed_epoch import KeyedEpoch, KeyedSteps
from tallystick.keyed_task import Doors, ProcessPlan
from tallystick.ports import Prepared
from tallystick.sim.engine import SimulatedEngine, Surroundings
from tallystick.sim.faults import Fault, FaultPlan
from tallystick.sim.kafka_cluster import KafkaCluster
from tallystick.sim.keyed_step import COLUMNS, KEY_COUNT
from tallystick.sim.rows import Row, key_of, key_partition
from tallystick.sim.scheduler import Process
from tallystick.sink.rows import RowLayout
from tallystick.sink.transaction import Producer
from tallystick.state.handles import StepState
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.restore import Load
from tallystick.state.retention import due_merges, due_snapshots
from tallystick.task import EncodePlan, Report, Sent, send
from tallystick.topic_partition import TopicPartition

TASK_ATTEMPTS_MAX = 4
"""Spark's own number (spark.task.maxFailures)."""
READ_ROWS_MAX = 5
CHANGED_BYTES_MIN = 1500
MERGED_FILES_MIN = 3
"""Epochs of the simulated world are small: what is large here would be nothing for a real one."""


class TaskKilledError(Exception):
    """A task died; Spark starts its next attempt."""


@dataclass(frozen=True)
class ToPartitions(EncodePlan):
    """Rows as frames for output partitions: as columns, so that they can be looked into."""

    def frames(self, sent: Sent, source: int, sequence: int, attempt: int) -> Iterator[Frame]:
        """See `Outlet.frames`; each output partition has one writing task."""
        assert isinstance(sent, pa.RecordBatch), sent
        targets = [key_partition(key) for key in sent.column("key").to_pylist()]
        for at, target in enumerate(sorted(set(targets)), start=sequence):
            rows = sent.filter(pa.array([each == target for each in targets]))
            yield Frame(target, source, at, "out", target, rows.num_rows, to_ipc(rows), attempt)


class Drawn(Protocol):
    """What chance decides."""

    dice: random.Random
    plan: FaultPlan


class KeyedSurroundings(Surroundings, Protocol):
    """What keyed tasks need of the world."""

    def nonce(self) -> str:
        """A name that no other run will draw."""
        ...


@dataclass(frozen=True)
class EpochInput:
    """What an epoch reads, and what its rows are to say of where they come from."""

    lineage: str
    epoch: int
    ranges: Mapping[TopicPartition, range]


class KeyedEngine(SimulatedEngine):
    """Runs the tasks of one epoch.

    Args:
        world: what surrounds them.
        process: the driver that waits for them.
        cluster: where they write.
        output: the output partitions; each has one writing task.
        steps: the keyed steps.
        unread: what is to be read.
        doors: from a task's index to what it reaches where it is placed this time.
    """

    def __init__(
        self,
        world: KeyedSurroundings,
        process: Process,
        cluster: KafkaCluster,
        output: Sequence[TopicPartition],
        steps: KeyedSteps,
        unread: EpochInput,
        doors: Callable[[int], Doors],
    ) -> None:
        super().__init__(world, process, cluster, {})
        self._keyed_world = world
        self._output = output
        self._steps = steps
        self._unread = unread
        self._doors = doors
        self._heard: dict[TopicPartition, Heard] = {}

    def run_epoch(
        self, checkpoint_id: int, producer: Producer, state: tuple[StepState, ...]
    ) -> Prepared:
        """See `ports.Engine.run_epoch`."""
        if self._steps.is_idle(state) and not any(self._unread.ranges.values()):
            return Prepared((), self._steps.carried(state))
        token, encode = (
            self._keyed_world.nonce(),
            ToPartitions(
                RowLayout({"out": len(self._output)}, "out"), len(self._output), "none", 0
            ),
        )
        epoch = self._steps.epoch(checkpoint_id, 0, token, state, encode)
        epoch = replace(epoch, plans=rewriting(self._world, epoch.plans))
        self._stages = Stages(self._keyed_world, self._process, epoch, self._unread, self._doors)
        self._stages.run()
        for partition in self._output:
            self._fetch(partition)
        super().run_epoch(checkpoint_id, producer, state)
        return epoch.prepared([self._report_of(partition) for partition in self._output])

    def _report_of(self, partition: TopicPartition) -> Report:
        written, heard = self._reports.get(partition), self._heard[partition]
        produced = () if written is None else (written,)
        return Report(produced, attempts=heard.attempts, notes=tuple(heard.notes))

    def _fetch(self, partition: TopicPartition) -> None:
        """What the writing task of a partition gets from the tasks before it."""
        heard = Heard(stage=1)
        frames = self._stages.frames_for(partition.partition)
        rows = tuple(rows_in(self._unread, heard.with_rows(frames)))
        self._heard[partition] = heard
        self._rows.pop(partition, None)
        self._sizes.pop(partition, None)
        if rows:
            self._rows[partition] = rows
        self._empty = [each for each in self._output if each not in self._rows]

    def _step(self, producer: Producer) -> None:
        if self._world.plan.strikes(Fault.TASK_AGAIN):
            self._run_keyed_task_again(producer)
        if self._running:
            super()._step(producer)

    def _run_keyed_task_again(self, producer: Producer) -> None:
        """Writing tasks that have begun keep what they got, the others get what is there now."""
        self._stages.run_again()
        for partition in self._output:
            attempt = self._running.get(partition)
            is_done = partition in self._reports or (attempt is None and self._toss())
            if is_done or (attempt is not None and attempt.has_written):
                continue
            self._fetch(partition)
            self._running.pop(partition, None)
            if partition in self._rows:
                number = 0 if attempt is None else attempt.number
                self._running[partition] = self._attempt(producer, partition, number)

    def _run_stage_again(self, producer: Producer) -> None:
        for partition in self._output:
            self._fetch(partition)
        super()._run_stage_again(producer)

    def _reordered(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        """Frames are sorted on their way."""
        return rows

    def _toss(self) -> bool:
        return self._world.dice.random() < 0.5


def rows_in(unread: EpochInput, frames: Iterable[Frame]) -> Iterator[Row]:
    """What is to be written, as the keyed step made it."""
    for frame in frames:
        columns = [column.to_pylist() for column in from_ipc(frame.data).columns]
        for key, topic, number, offset, count in zip(*columns, strict=True):
            source = TopicPartition(topic, number)
            yield Row(unread.lineage, unread.epoch, source, offset, key=key, nth=count)


def read_batches(
    world: Drawn, partition: TopicPartition, offsets: range
) -> Iterator[pa.RecordBatch]:
    """What a reader makes of an input partition; the user's function may draw other keys."""
    rows = [
        (_key(world, partition, offset), partition.topic, partition.partition, offset)
        for offset in offsets
    ]
    size = world.dice.randint(1, READ_ROWS_MAX)
    return (_batch(rows[at : at + size]) for at in range(0, len(rows), size))


def _key(world: Drawn, partition: TopicPartition, offset: int) -> int:
    if world.plan.strikes(Fault.WHIM):
        return world.dice.randrange(KEY_COUNT)
    return key_of(partition, offset)


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
        epoch: KeyedEpoch,
        unread: EpochInput,
        doors: Callable[[int], Doors],
    ) -> None:
        self._world = world
        self._process = process
        self._first = epoch.first
        self._plan = epoch.plans[0]
        self._unread = unread
        self._doors = doors
        self._read: list[list[Frame]] = []
        self._processed: list[list[Frame]] = []

    def run(self) -> None:
        """Run each task at least once.

        Raises:
            RetriableError: the attempts of a task are used up.
        """
        sources = range(len(self._unread.ranges))
        self._read = [self._read_source(source) for source in sources]
        count = self._plan.base.parallelism
        self._processed = [[] for _ in range(count)]
        for index in self._world.dice.sample(range(count), count):
            self._world.pass_by(self._process)
            if self._world.plan.strikes(Fault.TASK_AGAIN):
                source = self._world.dice.choice(sources)
                self._read[source] = self._read_source(source)
            self._processed[index] = self._process_keys(index)

    def run_again(self) -> None:
        """Run one of the keyed tasks once more: what it left was lost."""
        index = self._world.dice.randrange(len(self._processed))
        self._processed[index] = self._process_keys(index)

    def frames_for(self, target: int) -> list[Frame]:
        """What a task behind the keyed ones gets."""
        return _routed(self._processed, target)

    def _read_source(self, source: int) -> list[Frame]:
        partition = list(self._unread.ranges)[source]
        batches = read_batches(self._world, partition, self._unread.ranges[partition])
        return list(send(self._first, batches, source))

    def _process_keys(self, index: int) -> list[Frame]:
        error: Exception | None = None
        for _ in range(TASK_ATTEMPTS_MAX):
            plan = replace(self._plan, doors=self._doors(index))
            try:
                return list(plan.run(_routed(self._read, index), index))
            except (TaskKilledError, RetriableError) as met:
                error = met
        raise EpochAbortedError(f"a task failed {TASK_ATTEMPTS_MAX} times: {error}")


def _routed(frames: Sequence[Sequence[Frame]], target: int) -> list[Frame]:
    found = [frame for each in frames for frame in each if frame.target == target]
    return sorted(found, key=lambda frame: (frame.source, frame.sequence))


def _batch(rows: Sequence[tuple[int, str, int, int]]) -> pa.RecordBatch:
    columns = zip(zip(*rows, strict=True), COLUMNS, strict=True)
    arrays = [pa.array(list(values), field.type) for values, field in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=COLUMNS)
