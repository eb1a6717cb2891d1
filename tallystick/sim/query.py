"""A streaming query: Spark's loop over micro-batches, and the function that it calls.

A pipeline's function is the driver itself. A user's own function may leave a micro-batch out, or
call the sink twice in one; which it does follows from the rows, so it does so again in a replay.
"""

import random
from typing import Protocol

from tallystick.errors import SecondCallError
from tallystick.job import Driver
from tallystick.sim.checker import Checker
from tallystick.sim.faults import Fault, FaultPlan
from tallystick.sim.rows import Row, rows_between
from tallystick.sim.scheduler import Process
from tallystick.sim.spark import Checkpoint, Positions, Source
from tallystick.sim.storage import Sender, SimulatedStorage
from tallystick.spark_log import SparkLog

LINEAGES = frozenset({Fault.OTHER_CHECKPOINT, Fault.OLD_SAVEPOINT, Fault.SITE_SET_BACK})
"""Where these may strike no micro-batch is left out: they change what belongs to a checkpoint."""


class Surroundings(Sender, Protocol):
    """What a query needs of the world."""

    dice: random.Random
    plan: FaultPlan
    checker: Checker
    checkpoint: Checkpoint
    sources: tuple[Source, ...]

    def make_driver(self, process: Process) -> Driver:
        """The driver that is tested."""
        ...

    def plan_positions(self, starts: Positions) -> Positions | None:
        """The end of the next micro-batch; None when there is nothing to read."""
        ...

    def offer(self, process: Process, driver: Driver, epoch: int) -> None:
        """Ask a driver for one epoch."""
        ...

    def pass_by(self, process: Process) -> None:
        """Let time pass; the process may be paused, or die, here."""
        ...


class Query:
    """The query of a world, which each of its processes runs.

    Args:
        world: what surrounds it.
        is_users: a user's own function stands between Spark and the driver.
    """

    def __init__(self, world: Surroundings, *, is_users: bool) -> None:
        self._world = world
        self._is_users = is_users and not LINEAGES & world.plan.kinds

    def run(self, process: Process) -> None:
        """Run until there is nothing left to read."""
        world, checkpoint = self._world, self._world.checkpoint
        known = frozenset(checkpoint.refused_twice)  # mended in the function before this start
        driver = world.make_driver(process)
        SparkLog(SimulatedStorage.of(world, process, checkpoint)).mend()
        epoch = checkpoint.read_log()
        while True:
            if epoch not in checkpoint.offsets:
                ends = world.plan_positions(checkpoint.start_of(epoch))
                if ends is None:
                    return
                world.pass_by(process)
                checkpoint.log_offsets(epoch, ends, world.sources)
                self._decide_calls(epoch)
            if epoch not in checkpoint.left_out:
                world.offer(process, driver, epoch)
            if epoch in checkpoint.called_twice - known:
                self._offer_again(process, driver, epoch)
            world.pass_by(process)
            checkpoint.log_commit(epoch)
            epoch += 1

    def left_out_rows(self) -> list[Row]:
        """The input of micro-batches that the function left out."""
        found = self._world.checkpoint.left_out.values()
        return [row for starts, ends in found for row in rows_between(starts, ends)]

    def _decide_calls(self, epoch: int) -> None:
        checkpoint, plan = self._world.checkpoint, self._world.plan
        for planned_before in [each for each in checkpoint.left_out if each >= epoch]:
            del checkpoint.left_out[planned_before]
        checkpoint.called_twice -= {each for each in checkpoint.called_twice if each >= epoch}
        if self._is_users and plan.strikes(Fault.LEFT_OUT):
            span = (checkpoint.start_of(epoch), checkpoint.offsets[epoch])
            checkpoint.left_out[epoch] = span
        elif self._is_users and plan.strikes(Fault.CALLED_TWICE):
            checkpoint.called_twice.add(epoch)

    def _offer_again(self, process: Process, driver: Driver, epoch: int) -> None:
        """Call the sink with other rows of the same micro-batch."""
        try:
            self._world.offer(process, driver, epoch)
        except SecondCallError:
            self._world.checkpoint.refused_twice.add(epoch)
            raise
        self._world.checker.note(f"epoch {epoch}: a second call wrote nothing, and did not say so")
