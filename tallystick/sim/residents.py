"""A pipeline's run with resident tasks: its gangs, its epochs, and its rescales."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tallystick.errors import EpochAbortedError, RetriableError
from tallystick.exchange import Frame, Heard
from tallystick.fan_out import Branch, CollectPlan, FanOut
from tallystick.gang.share import Made, Writing
from tallystick.keyed_epoch import KeyedEpoch, KeyedSteps
from tallystick.keyed_task import Doors, ProcessPlan
from tallystick.ports import Prepared
from tallystick.sim.engine import Attempt
from tallystick.sim.faults import Fault
from tallystick.sim.gang import SLOT_COUNT, Around, GangLostError, Member, Order, SimulatedGang
from tallystick.sim.kafka_cluster import KafkaCluster
from tallystick.sim.keyed_engine import EpochInput, ToPartitions, read_batches, rewriting, rows_in
from tallystick.sim.other_systems import Fate, Held, OtherSystem
from tallystick.sim.rows import Row, output_partition
from tallystick.sim.scheduler import Process
from tallystick.sim.sink_engine import count_in, counted
from tallystick.sink.rows import RowLayout
from tallystick.sink.transaction import ProducedRange, Producer
from tallystick.sink.two_phase import Committable, Owner
from tallystick.sink.two_phase import Place as TransactionPlace
from tallystick.state.handles import StepState
from tallystick.task import EncodePlan, Report, Sent, send
from tallystick.topic_partition import TopicPartition

BATCH_ROWS_MAX = 3


class Residents:
    """The resident tasks of one run; see `spark.gang.tasks.GangTasks`.

    Args:
        world: what surrounds them.
        process: the driver.
        keyed: the steps of the pipeline; it may have none.
        has_limit: an epoch may not take for ever.
    """

    def __init__(
        self, world: Around, process: Process, keyed: KeyedSteps, *, has_limit: bool
    ) -> None:
        self.keyed = keyed
        self._has_limit = has_limit
        self._world = world
        self._process = process
        self._runs = itertools.count(1)
        self._gang: SimulatedGang | None = None
        self._attempt_number = 0

    def run(self, order: Callable[[int, int], Order]) -> list[Report]:
        """Run the tasks of an epoch.

        Args:
            order: makes what the members are told, of the number of the run, and of the attempt.
        """
        gang = self._started()
        try:
            return gang.run(order(next(self._runs), self._attempt_number))
        except Exception:
            if gang.is_lost:
                self._attempt_number = 1
            else:
                self._world.met["an epoch goes on in the same gang behind a failure"] += 1
            raise

    def _started(self) -> SimulatedGang:
        if self._gang is not None and self._gang.is_lost:
            self._gang.give_up()
            self._gang = None
        if self._gang is None:
            count = min(self.keyed.task_count, SLOT_COUNT)
            if self._world.plan.strikes(Fault.GANG_LATE):
                if count == 1 or self._world.dice.random() < 0.5:
                    raise GangLostError("not all resident tasks came up")
                count -= 1
            self._gang = SimulatedGang(self._world, self._process, count, has_limit=self._has_limit)
        return self._gang

    def rescale(self, parallelism: int, state: tuple[StepState, ...]) -> None:
        """See `spark.running.PipelineRun.rescale`; the process may die at each step."""
        self._world.met["a rescale began"] += 1
        self._world.pass_by(self._process)
        self.keyed = self.keyed.rescaled(parallelism, state)
        self._world.pass_by(self._process)
        if self._gang is not None and not self._gang.is_lost:
            self._gang.leave()
        self._gang = None
        self._world.pass_by(self._process)
        self._world.met["a rescale came through"] += 1

    def close(self) -> None:
        """Let the tasks go: the run is over, in order."""
        if self._gang is not None and not self._gang.is_lost:
            self._gang.leave()

    def give_up(self) -> None:
        """The driver's process is gone."""
        if self._gang is not None:
            self._gang.give_up()


@dataclass(frozen=True)
class Branches:
    """The other sinks of an epoch.

    Args:
        systems: by uid.
        run: the driver's process.
        nonce: draws names.
        decides_elsewhere: no transaction of Kafka's spans the epoch.
    """

    systems: Mapping[str, OtherSystem]
    run: str
    nonce: Callable[[], str]
    decides_elsewhere: bool

    def outlet(self, checkpoint_id: int, lineage: str, encode: EncodePlan) -> FanOut:
        """Where readers send their rows."""
        branches = tuple(
            Branch(
                Owner("sim", uid, lineage), TaskTransactions(system, lineage, self.run, self.nonce)
            )
            for uid, system in self.systems.items()
        )
        return FanOut(branches, None if self.decides_elsewhere else encode, checkpoint_id)


@dataclass(frozen=True)
class TaskTransactions:
    """How a task begins transactions in another system; see `two_phase.TransactionPlan`."""

    system: OtherSystem
    lineage: str
    run: str
    nonce: Callable[[], str]

    def begin(self, place: TransactionPlace) -> "TaskTransaction":
        """See `two_phase.TransactionPlan.begin`."""
        return TaskTransaction(self, place)


class TaskTransaction:
    """See `two_phase.Transaction`."""

    def __init__(self, plan: TaskTransactions, place: TransactionPlace) -> None:
        self._system = plan.system
        uid, epoch, task = plan.system.uid, place.checkpoint_id, place.task
        # Not the place's nonce: no seed decides it.
        name = f"{uid}-{epoch}-{task}-{place.attempt}-{plan.nonce()}"
        self._held = Held(Committable(uid, epoch, task, name, 0, 0), plan.lineage, plan.run)
        self._system.begin(self._held)

    def write(self, rows: Any) -> None:
        """See `two_phase.Transaction.write`."""
        assert isinstance(rows, RowBatch), rows
        self._system.write(self._held.committable.name, rows.rows)

    def prepare(self) -> list[Committable]:
        """See `two_phase.Transaction.prepare`."""
        self._system.prepare(self._held.committable.name)
        return [self._held.committable]

    def abort(self) -> None:
        """See `two_phase.Transaction.abort`: nobody has been told of it."""
        if self._held.fate is Fate.OPEN:
            self._held.fate = Fate.ABORTED


@dataclass(frozen=True)
class RowBatch:
    """Rows, where no keyed step needs them as columns."""

    rows: tuple[Row, ...]

    @property
    def num_rows(self) -> int:
        """As Arrow names it."""
        return len(self.rows)


@dataclass(frozen=True)
class RowsToPartitions(EncodePlan):
    """Rows as frames for output partitions; each has one writing task."""

    def frames(self, sent: Any, source: int, sequence: int, attempt: int) -> Iterator[Frame]:
        """See `Outlet.frames`."""
        assert isinstance(sent, RowBatch), sent
        targets = [output_partition(row.source, row.offset) for row in sent.rows]
        for at, target in enumerate(sorted(set(targets)), start=sequence):
            rows = [row for row, its in zip(sent.rows, targets, strict=True) if its == target]
            data = json.dumps([(*row.source, row.offset) for row in rows]).encode()
            yield Frame(target, source, at, "out", target, len(rows), data, attempt)


@dataclass(frozen=True)
class GangWrite:
    """What the writing tasks of a member do; see `task.WritePlan`."""

    world: Around
    member: Member
    cluster: KafkaCluster
    producer: Producer
    output: Sequence[TopicPartition]
    rows_in: Callable[[Iterable[Frame]], Iterator[Row]]
    stage: int

    def write(self, frames: Iterator[Frame], attempt_number: int) -> Report:
        """See `task.WritePlan.write`: there is no second attempt that it could ask Kafka for."""
        heard = Heard(self.stage)
        attempt: Attempt | None = None
        try:
            for frame in heard.with_rows(frames):
                if attempt is None:
                    partition = self.output[frame.target]
                    attempt = Attempt(self.cluster, self.producer, partition, [])
                for batch in self._cut(tuple(self.rows_in([frame]))):
                    attempt.batches.append(batch)
                    self._step(attempt)
        except EpochAbortedError as error:
            if self.member.is_cut:
                self.world.met["Kafka refused what an orphan wrote"] += 1
            return Report(error=type(error).__name__, message=str(error))
        produced = () if attempt is None else (self.report(attempt),)
        return Report(produced, attempts=heard.attempts, notes=tuple(heard.notes))

    def report(self, attempt: Attempt) -> ProducedRange:
        """Say what was written; nothing is written after."""
        return attempt.report()

    def _cut(self, rows: tuple[Row, ...]) -> list[tuple[Row, ...]]:
        """Batches of some sizes."""
        at = self.world.dice.randrange(len(rows) + 1)
        return [batch for batch in (rows[:at], rows[at:]) if batch]

    def _step(self, attempt: Attempt) -> None:
        self.world.advance(self.member.process)
        attempt.step()
        if self.member.is_cut:
            self.world.met["an orphan wrote"] += 1


@dataclass(frozen=True)
class Surface:
    """Where the tasks of an epoch read, and where they write.

    Args:
        unread: what they read.
        cluster: where they write.
        output: the output partitions.
        doors: what a member's keyed tasks reach, by its process and index.
        branches: the other sinks; None: there are none.
    """

    unread: EpochInput
    cluster: KafkaCluster
    output: Sequence[TopicPartition]
    doors: Callable[[Process, int], Doors]
    branches: Branches | None


class GangEngine:
    """The Engine port: an epoch in resident tasks; see `spark.engine.SplitsEngine`."""

    def __init__(self, world: Around, residents: Residents, place: Surface) -> None:
        self._world = world
        self._residents = residents
        self._place = place
        self._keyed = residents.keyed

    def run_epoch(
        self, checkpoint_id: int, producer: Producer, state: tuple[StepState, ...]
    ) -> Prepared:
        """See `ports.Engine.run_epoch`."""
        keyed, place, branches = self._keyed, self._place, self._place.branches
        if branches is not None:
            numbered, state = count_in(state), ()
        elif keyed.is_idle(state) and not any(place.unread.ranges.values()):
            return Prepared((), keyed.carried(state))
        count = len(place.output)
        kind = ToPartitions if keyed.steps else RowsToPartitions
        encode = kind(RowLayout({"out": count}, "out"), count, "none", 0)
        last: EncodePlan | FanOut = encode
        rows: Mapping[TopicPartition, tuple[Row, ...]] = {}
        if branches is not None:
            last = branches.outlet(checkpoint_id, place.unread.lineage, encode)
            rows = numbered_rows(place.unread, numbered)
        epoch = keyed.epoch(checkpoint_id, 0, self._world.nonce(), state, last)
        plans = rewriting(self._world, epoch.plans)
        epoch = replace(epoch, plans=plans)
        reports = self._residents.run(partial(self._order, epoch, producer, rows))
        for report in reports:
            if (error := report.to_error()) is not None:
                raise error
        found = epoch.prepared(reports)
        if branches is None:
            return found
        return found._replace(state=counted(numbered + sum(map(len, rows.values()))))

    def _order(
        self,
        epoch: KeyedEpoch,
        producer: Producer,
        rows: Mapping[TopicPartition, tuple[Row, ...]],
        run: int,
        attempt_number: int,
    ) -> Order:
        partitions = list(self._place.unread.ranges)
        reader_count = max(1, min(self._keyed.task_count, len(partitions)))

        def read(member: Member) -> Made:
            def send_share(at: int) -> Iterator[Frame]:
                mine = partitions[at::reader_count]
                batches = self._batches(member, mine, rows)
                return send(epoch.first, batches, at, attempt_number=attempt_number)

            return send_share

        def plans(member: Member) -> list[ProcessPlan]:
            doors = self._place.doors(member.process, member.index)
            return [replace(plan, doors=doors) for plan in epoch.plans]

        def write(member: Member) -> Writing:
            if not epoch.writer_count:
                return CollectPlan(epoch.stage)
            place = self._place
            read_rows = partial(self._rows_in, place.unread)
            return GangWrite(
                self._world,
                member,
                place.cluster,
                producer,
                place.output,
                read_rows,
                epoch.stage,
            )

        return Order(run, read, reader_count, plans, epoch.writer_count, write, attempt_number)

    def _batches(
        self,
        member: Member,
        partitions: Iterable[TopicPartition],
        rows: Mapping[TopicPartition, tuple[Row, ...]],
    ) -> Iterator[Sent]:
        unread = self._place.unread
        for partition in partitions:
            made: Iterable[Any] = self._cut(unread, partition, rows)
            if self._keyed.steps:
                made = read_batches(self._world, partition, unread.ranges[partition])
            for batch in made:
                self._world.advance(member.process)
                if self._world.plan.strikes(Fault.READ_FAILED):
                    raise RetriableError(f"{partition} cannot be read")
                yield batch

    def _cut(
        self,
        unread: EpochInput,
        partition: TopicPartition,
        rows: Mapping[TopicPartition, tuple[Row, ...]],
    ) -> Iterator[RowBatch]:
        offsets = unread.ranges[partition]
        found = rows.get(partition) or tuple(
            Row(unread.lineage, unread.epoch, partition, offset) for offset in offsets
        )
        size = self._world.dice.randint(1, BATCH_ROWS_MAX)
        for at in range(0, len(found), size):
            yield RowBatch(found[at : at + size])

    def _rows_in(self, unread: EpochInput, frames: Iterable[Frame]) -> Iterator[Row]:
        if self._keyed.steps:
            yield from rows_in(unread, frames)
            return
        for frame in frames:
            for topic, number, offset in json.loads(frame.data):
                source = TopicPartition(topic, number)
                yield Row(unread.lineage, unread.epoch, source, offset)


def numbered_rows(unread: EpochInput, before: int) -> dict[TopicPartition, tuple[Row, ...]]:
    """The rows of an epoch, each with its number in the whole input."""
    numbers = itertools.count(before)
    return {
        partition: tuple(
            Row(unread.lineage, unread.epoch, partition, offset, nth=next(numbers))
            for offset in offsets
        )
        for partition, offsets in unread.ranges.items()
    }
