"""A pipeline's run with resident tasks: its gangs, its epochs, and its rescales."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa

from tallystick.epoch.protocol import EpochRan
from tallystick.errors import RetriableError
from tallystick.spark.gang.inbox import FramesOf, WriteStep
from tallystick.state.catalog import StepState
from tallystick.tasks.epoch_plan import EpochPlan, PipelinePlan
from tallystick.tasks.frames import Frame
from tallystick.tasks.keyed import ProcessPlan, WorkerHost
from tallystick.tasks.read import EncodePlan, Report, WritePlan
from tallystick.tasks.read_plan import ReadPlan, send_read
from tallystick.tasks.write import CollectPlan, FanOut
from tallystick.values import Producer, TopicPartition
from tests.simulation.branches import Branches
from tests.simulation.faults import Fault
from tests.simulation.fetch import parts_of, read_plan
from tests.simulation.gang import SLOT_COUNT, Around, GangLostError, Member, Order, SimulatedGang
from tests.simulation.kafka_cluster import KafkaCluster
from tests.simulation.keyed_engine import (
    EpochInput,
    encode_plan,
    keys_plan,
    rewriting,
    with_records,
)
from tests.simulation.operator_state import memory_of, rules_splits
from tests.simulation.produce import SimulatedProduce
from tests.simulation.rows import Row, output_partition
from tests.simulation.scheduler import Process
from tests.simulation.sink_engine import count_in, counted

PLACE = ("topic", "partition", "offset")


class Residents:
    """The resident tasks of one run; see `spark.gang.gang.GangTasks`.

    Args:
        world: what surrounds them.
        process: the driver.
        keyed: the steps of the pipeline; it may have none.
        has_limit: an epoch may not take for ever.
    """

    def __init__(
        self, world: Around, process: Process, keyed: PipelinePlan, *, has_limit: bool
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
                self._world.met["an epoch goes on in the same gang after a failure"] += 1
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

    def pauses_ms(self, state: tuple[StepState, ...]) -> int:
        """The time by which the driver measures pauses."""
        return self._world.pauses_ms(self._process, state)

    def give_up(self) -> None:
        """The driver's process is gone."""
        if self._gang is not None:
            self._gang.give_up()


def row_batch(rows: Sequence[Row]) -> pa.RecordBatch:
    """Rows as columns, where no keyed step looks into them."""
    values = [row.to_value() for row in rows]
    partitions = [output_partition(row.source, row.offset) for row in rows]
    return pa.record_batch(
        {"value": pa.array(values, pa.binary()), "partition": pa.array(partitions, pa.int32())}
    )


@dataclass(frozen=True)
class Surface:
    """Where the tasks of an epoch read, and where they write.

    Args:
        unread: what they read.
        cluster: where they write.
        output: the output partitions.
        worker_host: what a member's keyed tasks reach, by its process and index.
        branches: the other sinks; None: there are none.
    """

    unread: EpochInput
    cluster: KafkaCluster
    output: Sequence[TopicPartition]
    worker_host: Callable[[Process, int], WorkerHost]
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
    ) -> EpochRan:
        """See `ports.Engine.run_epoch`."""
        keyed, place, branches = self._keyed, self._place, self._place.branches
        is_numbered = branches is not None and not keyed.steps
        if is_numbered:
            numbered, state = count_in(state), ()
        elif keyed.is_idle(state) and place.unread.is_empty:
            return EpochRan((), keyed.carried(state))
        encode = encode_plan(place.output)
        last: EncodePlan | FanOut = encode
        rows: Mapping[TopicPartition, tuple[Row, ...]] = {}
        if branches is not None:
            last = branches.outlet(checkpoint_id, place.unread.lineage, encode)
        if is_numbered:
            rows = numbered_rows(place.unread, numbered)
        if keyed.steps:
            keyed = with_records(keyed, place.unread)
        nonce = self._world.nonce()
        control = rules_splits(place.unread.rules)
        unread = place.unread.state(self._residents.pauses_ms(state))
        epoch = keyed.epoch(checkpoint_id, 0, nonce, state, last, unread, control)
        plans = rewriting(self._world, epoch.plans)
        epoch = replace(epoch, plans=plans)
        reports = self._residents.run(partial(self._order, epoch, producer, rows))
        prepared = epoch.prepared(reports)
        if not is_numbered:
            return prepared
        return replace(prepared, state=counted(numbered + sum(map(len, rows.values()))))

    def _order(
        self,
        epoch: EpochPlan,
        producer: Producer,
        rows: Mapping[TopicPartition, tuple[Row, ...]],
        run: int,
        attempt_number: int,
    ) -> Order:
        partitions = list(self._place.unread.ranges)
        reader_count = max(1, min(self._keyed.task_count, len(partitions)))
        reading = self._place.unread.reading(epoch, self._world.dice)
        if reading is not None:
            reader_count = reading.reader_count

        def read(member: Member) -> FramesOf:
            plan = self._read_plan(member, rows)

            def send_share(at: int) -> Iterator[Frame]:
                if reading is not None:
                    worker_host = self._place.worker_host(member.process, member.index)
                    memory = memory_of(worker_host, member.process.name)
                    before_answer = partial(self._befall, member)
                    return reading.send(at, plan, memory, before_answer, attempt_number)
                ranges = self._place.unread.ranges
                own_ranges = {
                    partition: ranges[partition] for partition in partitions[at::reader_count]
                }
                return send_read(parts_of(plan, own_ranges), epoch.first, at, attempt_number)

            return send_share

        def plans(member: Member) -> list[ProcessPlan]:
            worker_host = self._place.worker_host(member.process, member.index)
            return [replace(plan, worker_host=worker_host) for plan in epoch.plans]

        def write(member: Member) -> WriteStep:
            if not epoch.writer_count:
                return CollectPlan(epoch.stage)
            produce = self._produce(member)
            return WritePlan(produce, producer, epoch.stage, has_second_attempts=False)

        return Order(run, read, reader_count, plans, epoch.writer_count, write, attempt_number)

    def _produce(self, member: Member) -> SimulatedProduce:
        """How a member's writing tasks reach Kafka, alone or not."""
        world = self._world

        def answered(is_accepted: bool) -> None:
            if member.is_cut:
                did = "an orphan wrote" if is_accepted else "Kafka refused what an orphan wrote"
                world.met[did] += 1

        return SimulatedProduce(
            self._place.cluster, lambda: world.advance(member.process), world.later, answered
        )

    def _befall(self, member: Member, partition: TopicPartition) -> None:
        """Let time pass before a member gets an answer; there may be none."""
        self._world.advance(member.process)
        if self._world.plan.strikes(Fault.READ_FAILED):
            raise RetriableError(f"{partition} cannot be read")

    def _read_plan(
        self, member: Member, rows: Mapping[TopicPartition, tuple[Row, ...]]
    ) -> Callable[[str], ReadPlan]:
        """How a member's readers read each input."""
        world, unread = self._world, self._place.unread
        before_answer = partial(self._befall, member)

        def rows_read(read: pa.RecordBatch) -> pa.RecordBatch:
            places = zip(*(read[name].to_pylist() for name in PLACE), strict=True)
            return row_batch([row_at(TopicPartition(*place), offset) for *place, offset in places])

        def row_at(partition: TopicPartition, offset: int) -> Row:
            if partition in rows:
                return rows[partition][offset - unread.ranges[partition].start]
            return Row(unread.lineage, unread.epoch, partition, offset)

        if not self._keyed.steps:
            return lambda _: read_plan(world.dice, before_answer, rows_read)
        return partial(keys_plan, world, self._keyed.steps[0], before_answer)


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
