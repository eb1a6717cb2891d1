"""The Engine port where tasks write into other systems: their attempts, and those nobody waits for.

Every attempt of a task has a transaction of its own. What may go on besides the one that reports:
an attempt that Spark takes for dead, before or behind its report, and that prepares all the same;
a second one from the start; and all attempts of a driver that died, for as long as they live.

The state is a count of all rows before the epoch: each row carries its number, so that what an
epoch went on from can be seen in what it wrote.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from tallystick.epoch.protocol import EpochRan
from tallystick.epoch.two_phase import Committable
from tallystick.errors import EpochAbortedError
from tallystick.ports import Engine
from tallystick.state.catalog import StepState
from tallystick.values import Producer
from tests.simulation.faults import Fault, FaultPlan
from tests.simulation.other_systems import Held, OtherSystem
from tests.simulation.rows import Row
from tests.simulation.scheduler import Process


class SinkAttempt:
    """One attempt of a task: begins and writes, then prepares; `step` does the next of it.

    Args:
        system: where it writes.
        transaction: its transaction.
        rows: to write; None: it has begun, and written all.
    """

    def __init__(
        self, system: OtherSystem, transaction: Held, rows: tuple[Row, ...] | None = None
    ) -> None:
        self.system = system
        self.transaction = transaction
        self._rows = rows

    @property
    def committable(self) -> Committable:
        """What it hands over."""
        return self.transaction.committable

    def step(self) -> bool:
        """Do the next thing; whether it was the last.

        Raises:
            EpochAbortedError: its transaction was aborted.
        """
        name = self.committable.name
        if self._rows is None:
            self.system.prepare(name)
            return True
        self.system.begin(self.transaction)
        self.system.write(name, self._rows)
        self._rows = None
        return False


class Around(Protocol):
    """What these tasks need of the world."""

    dice: random.Random
    plan: FaultPlan

    def pass_by(self, process: Process) -> None:
        """Let time pass; the process may be paused, or die, here."""
        ...

    def nonce(self) -> str:
        """A name that no other run will draw."""
        ...


TaskOf = tuple[str, int]
"""The sink's uid, and the task's index."""


class SinkEngine:
    """Runs the tasks of one epoch.

    Args:
        world: what surrounds them.
        process: the driver that waits for them.
        systems: where they write, by uid.
        zombies: where attempts go that nobody waits for.
        rows: the epoch's, in order.
        task_count: how many tasks share them.
        kafka: what writes the rows into Kafka too; None: nothing does.
    """

    def __init__(
        self,
        world: Around,
        process: Process,
        systems: Mapping[str, OtherSystem],
        zombies: list[SinkAttempt],
        rows: Sequence[Row],
        task_count: int,
        kafka: Engine | None,
    ) -> None:
        self._world = world
        self._process = process
        self._systems = systems
        self._zombies = zombies
        self._rows = rows
        self._task_count = task_count
        self._kafka = kafka
        self._running: dict[TaskOf, SinkAttempt] = {}

    def run_epoch(
        self, checkpoint_id: int, producer: Producer, state: tuple[StepState, ...]
    ) -> EpochRan:
        """See `ports.Engine.run_epoch`."""
        result = EpochRan(())
        if self._kafka is not None:
            result = self._kafka.run_epoch(checkpoint_id, producer, state)
        before = count_in(state)
        rows = [row._replace(nth=before + at) for at, row in enumerate(self._rows)]
        committables = self.prepare(checkpoint_id, rows)
        return replace(result, state=counted(before + len(rows)), committables=tuple(committables))

    def prepare(self, checkpoint_id: int, rows: Sequence[Row]) -> list[Committable]:
        """Run the tasks that write these rows, and return what they prepared."""
        shares: dict[TaskOf, tuple[Row, ...]] = {}
        for uid in self._systems:
            for task in range(self._task_count):
                if share := tuple(rows[task :: self._task_count]):
                    shares[uid, task] = share
        return self._run_tasks(checkpoint_id, shares)

    def _run_tasks(self, epoch: int, shares: Mapping[TaskOf, tuple[Row, ...]]) -> list[Committable]:
        plan, reports = self._world.plan, []
        self._running = {task: self._attempt(epoch, task, rows) for task, rows in shares.items()}
        for task, rows in shares.items():
            if plan.strikes(Fault.RACING_ATTEMPT):
                self._zombies.append(self._attempt(epoch, task, rows, number=1))
        try:
            while self._running:
                self._world.pass_by(self._process)
                task = self._world.dice.choice(list(self._running))
                attempt = self._running[task]
                is_through = attempt.step()
                if plan.strikes(Fault.TASK_KILLED):  # perhaps when it was through
                    if not is_through:
                        self._zombies.append(attempt)
                    self._running[task] = self._attempt(epoch, task, shares[task], number=1)
                elif is_through:
                    reports.append(attempt.committable)
                    del self._running[task]
        except EpochAbortedError:
            raise
        except BaseException:
            self._zombies += self._running.values()  # their driver died; they do not know
            raise
        return reports

    def _attempt(
        self, epoch: int, task: TaskOf, rows: tuple[Row, ...], number: int = 0
    ) -> SinkAttempt:
        uid, index = task
        name = f"{uid}-{epoch}-{index}-{number}-{self._world.nonce()}"
        committable = Committable(uid, epoch, index, name, len(rows), 0)
        transaction = Held(committable, rows[0].lineage, self._process.name)
        return SinkAttempt(self._systems[uid], transaction, rows)


def counted(rows: int) -> tuple[StepState, ...]:
    """The state after so many rows."""
    return (StepState(f"rows-{rows}", 128, 1, "[]", 1),)


def count_in(state: tuple[StepState, ...]) -> int:
    """How many rows came before."""
    return int(state[0].uid.removeprefix("rows-")) if state else 0
