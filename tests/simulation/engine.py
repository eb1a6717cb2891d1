"""The Engine port: the tasks of one epoch as a Spark job, their attempts, and who writes too.

What a task does is the real code (`run.task.WritePlan`), over a simulated Kafka. A task writes one
output partition. What may go on besides it: a later attempt after a task died, the whole stage once
more after an executor was lost, and second attempts that nobody waits for and that write for as
long as they live (strays): beside their twin, and after their driver died.

Not simulated, because no guard sees it: two attempts that both found the partition untouched, and
then write different rows under the same sequence numbers; and a stray that touches a partition of
which nobody reports rows, where Kafka does not tell, or between the count and the commit. Spark's
`spark.stage.maxConsecutiveAttempts=1` excludes both.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from tallystick.codec.records.encoder import EncodedBatch, stamp
from tallystick.epoch.protocol import EpochRan
from tallystick.state.catalog import StepState
from tallystick.tasks.frames import Frame
from tallystick.tasks.read import Report, WritePlan
from tallystick.values import Producer, TopicPartition
from tests.simulation.faults import Fault, FaultPlan
from tests.simulation.kafka_cluster import KafkaCluster
from tests.simulation.produce import SimulatedProduce
from tests.simulation.rows import Row, rows_of, to_batch
from tests.simulation.scheduler import Process

BATCH_ROWS_MAX = 2
BY_NOBODY = Producer("", 0, 0)


class Attempt:
    """One attempt of a writing task, which goes on batch by batch.

    Args:
        cluster: where it writes.
        producer: with which it writes.
        frames: what it gets from the tasks before it.
        number: Spark's.
        stage: of the tasks before it.
        later: see `SimulatedProduce`.
    """

    def __init__(
        self,
        cluster: KafkaCluster,
        producer: Producer,
        frames: Iterable[Frame],
        number: int = 0,
        stage: int = 0,
        *,
        later: Callable[[Callable[[], object]], None],
    ) -> None:
        self.number = number
        self.frames = list(frames)
        self.report: Report | None = None
        self._plan = WritePlan(SimulatedProduce(cluster, self._pause, later), producer, stage)
        self._process: Process | None = None
        self._pauses = 0

    @property
    def has_written(self) -> bool:
        """Whether it got to its second batch, or to its end."""
        return self._pauses > 1 or self.report is not None

    def begin(self) -> None:
        """Pass the guards before the first write."""
        assert self._process is None, "it begins once"
        self._go_on()

    def step(self) -> Report | None:
        """Write the next batch; its report, if that was the last."""
        if self._pauses == 0 and self.report is None:
            self._go_on()
        if self.report is None:
            self._go_on()
        return self.report

    def end(self) -> None:
        """Let it die where it stands."""
        if self._process is not None:
            self._process.kill()

    def _go_on(self) -> None:
        if self._process is None:
            self._process = Process("an attempt", self._run)
        self._process.resume()
        if self._process.ended_by is not None:
            raise self._process.ended_by

    def _run(self, process: Process) -> None:
        self.report = self._plan.write(iter(self.frames), self.number)

    def _pause(self) -> None:
        assert self._process is not None, "it runs in it"
        self._pauses += 1
        self._process.give_back()


class Surroundings(Protocol):
    """What the tasks need of the world."""

    dice: random.Random
    plan: FaultPlan
    strays: list[Attempt]

    def later(self, do: Callable[[], object]) -> None:
        """Let something arrive later."""
        ...

    def pass_by(self, process: Process) -> None:
        """Let time pass; the process may be paused, or die, here."""
        ...


class SimulatedEngine:
    """Runs the tasks of one epoch.

    Args:
        world: what surrounds them.
        process: the driver that waits for them.
        cluster: where they write.
        rows: what each output partition gets; partitions without rows may be named too.
    """

    stage = 0
    """Of the tasks before the writing ones."""

    def __init__(
        self,
        world: Surroundings,
        process: Process,
        cluster: KafkaCluster,
        rows: Mapping[TopicPartition, Sequence[Row]],
    ) -> None:
        self._world = world
        self._process = process
        self._cluster = cluster
        self._rows = {
            partition: tuple(partition_rows)
            for partition, partition_rows in rows.items()
            if partition_rows
        }
        self._output = tuple(rows)
        self._sizes: dict[TopicPartition, list[int]] = {}
        self._running: dict[TopicPartition, Attempt] = {}
        self._reports: dict[TopicPartition, Report] = {}

    def run_epoch(
        self, checkpoint_id: int, producer: Producer, state: tuple[StepState, ...]
    ) -> EpochRan:
        """See `ports.Engine.run_epoch`."""
        reports = self._run_writers(producer, self._rows)
        return EpochRan(tuple(entry for report in reports for entry in report.produced))

    def _run_writers(
        self, producer: Producer, partitions: Iterable[TopicPartition]
    ) -> list[Report]:
        """Run the writing tasks of some partitions, and raise what one of them reports."""
        self._reports = {}
        self._running = {
            partition: self._attempt(producer, self._frames(partition)) for partition in partitions
        }
        try:
            self._invite_strays(producer)
            while self._running:
                self._world.pass_by(self._process)
                self._step(producer)
        except BaseException:
            self._world.strays += self._running.values()  # their driver died; they do not know
            raise
        for report in self._reports.values():
            if report.failure is not None:
                raise report.failure.to_error()
        return list(self._reports.values())

    def _step(self, producer: Producer) -> None:
        """One task writes one batch, or something happens to it."""
        plan = self._world.plan
        partition = self._world.dice.choice(list(self._running))
        attempt = self._running[partition]
        if plan.strikes(Fault.TASK_KILLED):
            self._leave(attempt)
            frames = self._frames(partition, reordered=True)
            self._running[partition] = self._attempt(producer, frames, attempt.number + 1)
            return
        if self._cluster.tells and plan.strikes(Fault.EXECUTOR_LOST):
            self._run_stage_again(producer)
            return
        if (report := attempt.step()) is not None:
            self._reports[partition] = report
            del self._running[partition]

    def _run_stage_again(self, producer: Producer) -> None:
        """Spark counts the attempts of a new stage attempt from 0 again."""
        for attempt in self._running.values():
            self._leave(attempt)
        for stray in [stray for stray in self._world.strays if not stray.has_written]:
            self._world.strays.remove(stray)
            stray.end()
        partitions = {*self._running, *self._reports}
        self._reports.clear()
        self._running = {
            partition: self._attempt(producer, self._frames(partition, reordered=True))
            for partition in self._output
            if partition in partitions
        }

    def _leave(self, attempt: Attempt) -> None:
        """What Spark takes for dead may live on, and write."""
        if attempt.has_written and self._world.dice.random() < 0.5:
            self._world.strays.append(attempt)
        else:
            attempt.end()

    def _attempt(self, producer: Producer, frames: Iterable[Frame], number: int = 0) -> Attempt:
        return Attempt(self._cluster, producer, frames, number, self.stage, later=self._world.later)

    def _invite_strays(self, producer: Producer) -> None:
        """Second attempts that passed all checks before anybody wrote."""
        for partition, attempt in self._running.items():
            has_rows = any(frame.record_count for frame in attempt.frames)
            if has_rows and self._world.plan.strikes(Fault.RACING_ATTEMPT):
                frames = attempt.frames
                if self._world.dice.random() < 0.3:
                    frames = self._frames(partition)
                if self._world.dice.random() < 0.7:
                    frames = [*frames, _foreign(frames)]
                stray = self._attempt(producer, frames)
                stray.begin()
                self._world.strays.append(stray)
        with_rows = {frame.topic_partition for frame in self._all_frames() if frame.record_count}
        empty = [partition for partition in self._output if partition not in with_rows]
        may_stray = self._cluster.tells and empty and with_rows
        if may_stray and self._world.plan.strikes(Fault.STRAY_ELSEWHERE):
            foreign = _foreign(self._all_frames())
            elsewhere = foreign._replace(topic=empty[0].topic, partition=empty[0].partition)
            self._attempt(producer, [elsewhere]).step()

    def _all_frames(self) -> list[Frame]:
        return [frame for attempt in self._running.values() for frame in attempt.frames]

    def _frames(self, partition: TopicPartition, *, reordered: bool = False) -> list[Frame]:
        """What a task gets; in another order when it runs again, since its rows were shuffled."""
        rows = self._rows[partition]
        if reordered:
            rows = tuple(sorted(rows, key=lambda row: row.source, reverse=True))
        batches = enumerate(map(to_batch, self._cut(partition, rows)))
        return [_frame(partition, at, batch) for at, batch in batches]

    def _cut(self, partition: TopicPartition, rows: tuple[Row, ...]) -> list[tuple[Row, ...]]:
        """Batches of some sizes; often the same sizes for all attempts of a task."""
        sizes = self._sizes.get(partition)
        if sizes is None or self._world.dice.random() < 0.3:
            sizes = [self._world.dice.randint(1, BATCH_ROWS_MAX) for _ in rows]
            self._sizes.setdefault(partition, sizes)
        cuts = [0, *itertools.accumulate(sizes)]
        batches = (rows[start:stop] for start, stop in itertools.pairwise(cuts))
        return [batch for batch in batches if batch]


def _frame(partition: TopicPartition, sequence: int, batch: EncodedBatch) -> Frame:
    return Frame(0, 0, sequence, *partition, batch.record_count, batch.data, 0)


def _foreign(frames: Sequence[Frame]) -> Frame:
    """A row that must not count, of the partition of the last one."""
    last = [frame for frame in frames if frame.record_count][-1]
    data = stamp(last.data, BY_NOBODY, 0)
    row = rows_of(data, last.topic_partition, last.record_count)[-1]
    return _frame(last.topic_partition, last.sequence + 1, to_batch([row._replace(foreign=True)]))
