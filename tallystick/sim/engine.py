"""The Engine port: the tasks of one epoch, their attempts, and the guards that tasks have.

A task writes one output partition. What may go on besides it: a later attempt after a task died,
the whole stage once more after an executor was lost, and second attempts that nobody waits for and
that write for as long as they live (strays): after their twin reported, after their driver died.

Invariants of the tasks (those of `tallystick/task.py`, which a simulated attempt keeps too):
    * Only attempt 0 writes; a later one gives the epoch up.
    * Before its first write it asks whether its partition holds rows of this transaction already.
    * An attempt that reported never writes again; so a stray is one that never reports.

Not simulated, because no guard sees it: two attempts that both found the partition untouched, and
then write different rows under the same sequence numbers; and a stray that touches a partition of
which nobody reports rows, where Kafka does not tell, or between the count and the commit. Spark's
`spark.stage.maxConsecutiveAttempts=1` excludes both.
"""

import contextlib
import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Protocol

from tallystick.errors import EpochAbortedError
from tallystick.ports import Prepared
from tallystick.sim.faults import Fault, FaultPlan
from tallystick.sim.kafka_cluster import KafkaCluster
from tallystick.sim.rows import Row
from tallystick.sim.scheduler import Process
from tallystick.sink.transaction import ProducedRange, Producer
from tallystick.state.handles import StepState
from tallystick.topic_partition import TopicPartition

BATCH_ROWS_MAX = 2


def may_write(attempt_number: int) -> bool:
    """The first guard of a task: only its first attempt may write."""
    return attempt_number == 0


def is_free(cluster: KafkaCluster, producer: Producer, partition: TopicPartition) -> bool:
    """The second guard of a task: nobody else has written to its partition."""
    return not cluster.is_touched(producer, partition)


class Attempt:
    """One attempt of a task; `step` writes its next batch."""

    def __init__(
        self,
        cluster: KafkaCluster,
        producer: Producer,
        partition: TopicPartition,
        batches: Sequence[tuple[Row, ...]],
        number: int = 0,
    ) -> None:
        self.cluster = cluster
        self.producer = producer
        self.partition = partition
        self.batches = list(batches)
        self.number = number
        self._written = 0
        self._rows = 0
        self._first_offset = -1
        self._last_offset = -1

    @property
    def has_written(self) -> bool:
        """Whether any of its batches was accepted."""
        return self._written > 0

    def check(self) -> None:
        """The guards before the first write.

        Raises:
            EpochAbortedError: another attempt may have written.
        """
        if not may_write(self.number):
            raise EpochAbortedError(f"attempt {self.number} of {self.partition} does not write")
        if not is_free(self.cluster, self.producer, self.partition):
            raise EpochAbortedError(f"{self.partition} is written to by another attempt")

    def step(self) -> bool:
        """Write the next batch; whether it was the last."""
        rows = self.batches[self._written]
        offset = self.cluster.write(self.producer, self.partition, self._rows, rows)
        if not self._written:
            self._first_offset = offset
        self._last_offset = offset + len(rows) - 1
        self._rows += len(rows)
        self._written += 1
        return self._written == len(self.batches)

    def report(self) -> ProducedRange:
        """What it wrote."""
        where = self.partition
        return ProducedRange(
            where.topic, where.partition, self._rows, self._first_offset, self._last_offset
        )


class Surroundings(Protocol):
    """What the tasks need of the world."""

    dice: random.Random
    plan: FaultPlan
    strays: list[Attempt]

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
        self._rows = {partition: tuple(found) for partition, found in rows.items() if found}
        self._empty = [partition for partition, found in rows.items() if not found]
        self._sizes: dict[TopicPartition, list[int]] = {}
        self._running: dict[TopicPartition, Attempt] = {}
        self._reports: dict[TopicPartition, ProducedRange] = {}

    def run_epoch(
        self, checkpoint_id: int, producer: Producer, state: tuple[StepState, ...]
    ) -> Prepared:
        """See `ports.Engine.run_epoch`."""
        self._reports = {}
        self._running = {partition: self._attempt(producer, partition) for partition in self._rows}
        try:
            self._invite_strays(producer)
            while self._running:
                self._world.pass_by(self._process)
                self._step(producer)
        except EpochAbortedError:
            raise
        except BaseException:
            self._world.strays += self._running.values()  # their driver died; they do not know
            raise
        return Prepared(tuple(self._reports.values()))

    def _step(self, producer: Producer) -> None:
        """One task writes one batch, or something happens to it."""
        plan = self._world.plan
        partition = self._world.dice.choice(list(self._running))
        attempt = self._running[partition]
        if not attempt.has_written:
            attempt.check()
        if plan.strikes(Fault.TASK_KILLED):
            self._leave(attempt)
            self._running[partition] = self._attempt(producer, partition, attempt.number + 1)
            return
        if self._cluster.tells and plan.strikes(Fault.EXECUTOR_LOST):
            self._run_stage_again(producer)
            return
        if attempt.step():
            self._reports[partition] = attempt.report()
            del self._running[partition]

    def _run_stage_again(self, producer: Producer) -> None:
        """Spark counts the attempts of a new stage attempt from 0 again."""
        for attempt in self._running.values():
            if attempt.has_written:
                self._leave(attempt)
        self._world.strays[:] = [stray for stray in self._world.strays if stray.has_written]
        self._reports.clear()
        self._running = {
            partition: self._attempt(producer, partition, reordered=True)
            for partition in self._rows
        }

    def _leave(self, attempt: Attempt) -> None:
        """What Spark takes for dead may live on, and write."""
        if attempt.has_written and self._world.dice.random() < 0.5:
            self._world.strays.append(attempt)

    def _attempt(
        self,
        producer: Producer,
        partition: TopicPartition,
        number: int = 0,
        *,
        reordered: bool = False,
    ) -> Attempt:
        """An attempt; one that runs again may get its rows in another order: they were shuffled."""
        rows = self._rows[partition]
        if number or reordered:
            rows = self._reordered(rows)
        batches = self._cut(partition, rows)
        return Attempt(self._cluster, producer, partition, batches, number)

    def _reordered(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        return tuple(sorted(rows, key=lambda row: row.source, reverse=True))

    def _invite_strays(self, producer: Producer) -> None:
        """Second attempts that passed all checks before anybody wrote."""
        for partition, attempt in self._running.items():
            if self._world.plan.strikes(Fault.RACING_ATTEMPT):
                batches = list(attempt.batches)
                if self._world.dice.random() < 0.3:
                    batches = self._cut(partition, self._rows[partition])
                if self._world.dice.random() < 0.7:
                    batches.append((_foreign(self._rows[partition][-1]),))
                self._world.strays.append(Attempt(self._cluster, producer, partition, batches))
        may_stray = self._cluster.tells and self._empty and self._running
        if may_stray and self._world.plan.strikes(Fault.STRAY_ELSEWHERE):
            row = next(iter(self._rows.values()))[-1]
            with contextlib.suppress(EpochAbortedError):  # the transaction is lost already
                Attempt(self._cluster, producer, self._empty[0], [(_foreign(row),)]).step()

    def _cut(self, partition: TopicPartition, rows: tuple[Row, ...]) -> list[tuple[Row, ...]]:
        """Batches of some sizes; often the same sizes for all attempts of a task."""
        sizes = self._sizes.get(partition)
        if sizes is None or self._world.dice.random() < 0.3:
            sizes = [self._world.dice.randint(1, BATCH_ROWS_MAX) for _ in rows]
            self._sizes.setdefault(partition, sizes)
        cuts = [0, *itertools.accumulate(sizes)]
        found = (rows[start:stop] for start, stop in itertools.pairwise(cuts))
        return [batch for batch in found if batch]


def _foreign(row: Row) -> Row:
    return row._replace(foreign=True)
