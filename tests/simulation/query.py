"""A streaming query: Spark's loop over micro-batches, and the function that it calls.

A user's function for `foreachBatch` may leave a micro-batch out, or call the sink twice in one;
which it does follows from the rows, so it does so again in a replay. It may also catch what the
sink raises, and return; what the real sink does then stands in `spark/streaming/foreach_batch.py`:
it notes the failure, and refuses, and notes, all later calls of the run.
"""

import random
import re
from collections.abc import Collection
from enum import Enum
from typing import Protocol

from tallystick.checkpoint.spark_log import SparkLog
from tallystick.epoch import micro_batches
from tallystick.epoch.tokens import Token
from tallystick.errors import SecondCallError, SparkLogError, TallystickError
from tallystick.run.driver import Driver
from tests.simulation.checker import Checker
from tests.simulation.faults import Fault, FaultPlan
from tests.simulation.rows import Row, rows_between
from tests.simulation.scheduler import Process
from tests.simulation.spark import Checkpoint, Positions, Source
from tests.simulation.storage import Sender, SimulatedStorage

CATCHING_SPAN = 4
"""Of four spans of seeds with other sinks whose decisions the checkpoint keeps one catches."""
LINEAGES = frozenset({Fault.OTHER_CHECKPOINT, Fault.OLD_SAVEPOINT, Fault.SITE_SET_BACK})
"""Where these may strike no micro-batch is left out: they change what belongs to a checkpoint."""


class Function(Enum):
    """What Spark calls with each micro-batch."""

    NONE = "the sink itself, once for each"
    USERS = "a user's, which does all that such functions do"
    CATCHING = "a user's, which only catches what is raised after a decision, and ends"


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

    def judge(self, process: Process, error: BaseException | None) -> str:
        """Let the oracle look at what a driver raised; the word for it."""
        ...

    def pass_by(self, process: Process) -> None:
        """Let time pass; the process may be paused, or die, here."""
        ...

    def token(self) -> Token | None:
        """What is decided last."""
        ...

    def log_early(self, epoch: int) -> None:
        """Spark takes an epoch for done that may not be settled."""
        ...


class Query:
    """The query of a world, which each of its processes runs.

    Args:
        world: what surrounds it.
        function: what Spark calls.
    """

    def __init__(self, world: Surroundings, function: Function) -> None:
        self._world = world
        self._function = function
        self.is_users = function is not Function.NONE

    def run(self, process: Process) -> None:
        """Run until there is nothing left to read."""
        world, checkpoint = self._world, self._world.checkpoint
        known = frozenset(checkpoint.refused_twice)  # mended in the function before this start
        driver = world.make_driver(process)
        SparkLog(SimulatedStorage.of(world, process, checkpoint)).mend()
        epoch = checkpoint.read_log()
        has_failed = False
        while True:
            if epoch not in checkpoint.offsets:
                ends = world.plan_positions(checkpoint.start_of(epoch))
                if ends is None:
                    return
                world.pass_by(process)
                checkpoint.log_offsets(epoch, ends, world.sources)
                self._decide_calls(epoch)
            if has_failed:
                self._note_failure(driver, epoch)
            elif epoch not in checkpoint.left_out:
                has_failed = self._call(process, driver, epoch)
            if epoch in checkpoint.called_twice - known:
                self._call_again(process, driver, epoch, has_failed=has_failed)
            world.pass_by(process)
            checkpoint.log_commit(epoch)
            if has_failed and (self._function is Function.CATCHING or world.dice.random() < 0.5):
                return
            epoch += 1

    def _call(self, process: Process, driver: Driver, epoch: int) -> bool:
        """Call the sink; whether it failed, and the function caught that."""
        try:
            self._world.offer(process, driver, epoch)
        except SparkLogError:
            raise  # nothing is lost where it is caught, but Spark does not get far with its log
        except TallystickError as error:
            if not self._catches(epoch):
                raise
            self._world.judge(process, error)
            self._world.log_early(epoch)
            self._note_failure(driver, epoch)
            return True
        return False

    def _catches(self, epoch: int) -> bool:
        token = self._world.token()
        is_decided = token is not None and token.checkpoint_id == epoch
        may_catch = self._function is Function.USERS or is_decided
        if self._function is Function.NONE or not may_catch:
            return False
        return self._world.plan.strikes(Fault.CAUGHT)

    def _note_failure(self, driver: Driver, epoch: int, *, is_second: bool = False) -> None:
        """Leave the notes of `foreach_batch.note`; there a note that fails is a warning."""
        checkpoint, path = self._world.checkpoint, driver.coordinator.manifest_path(epoch)
        paths = micro_batches.failure_paths(
            list(checkpoint.files), epoch, path, is_second=is_second
        )
        checkpoint.files.update(dict.fromkeys(paths, b""))
        checkpoint.caught[epoch] = (checkpoint.start_of(epoch), checkpoint.offsets[epoch])

    def give_up(self, refusal: str) -> None:
        """A person states to go on without the epochs that a refusal names."""
        checkpoint = self._world.checkpoint
        first, last = map(int, re.findall(r"without-epochs-(\d+)-to-(\d+)", refusal)[0])
        for epoch in range(first, last + 1):
            if epoch in checkpoint.caught:
                checkpoint.left_out[epoch] = checkpoint.caught[epoch]
                checkpoint.called_twice.discard(epoch)

    def left_out_rows(self) -> list[Row]:
        """The input of micro-batches that the function left out."""
        ranges = self._world.checkpoint.left_out.values()
        return [row for starts, ends in ranges for row in rows_between(starts, ends)]

    def _decide_calls(self, epoch: int) -> None:
        checkpoint, plan = self._world.checkpoint, self._world.plan
        for planned_before in [
            epoch_left_out for epoch_left_out in checkpoint.left_out if epoch_left_out >= epoch
        ]:
            del checkpoint.left_out[planned_before]
        for planned_before in [
            epoch_caught for epoch_caught in checkpoint.caught if epoch_caught >= epoch
        ]:
            del checkpoint.caught[planned_before]
        checkpoint.called_twice -= {
            epoch_called for epoch_called in checkpoint.called_twice if epoch_called >= epoch
        }
        if self._function is not Function.USERS:
            return
        if plan.strikes(Fault.LEFT_OUT):
            span = (checkpoint.start_of(epoch), checkpoint.offsets[epoch])
            checkpoint.left_out[epoch] = span
        elif plan.strikes(Fault.CALLED_TWICE):
            checkpoint.called_twice.add(epoch)

    def _call_again(
        self, process: Process, driver: Driver, epoch: int, *, has_failed: bool
    ) -> None:
        """Call the sink with other rows of the same micro-batch."""
        if has_failed:  # refused without asking the driver, and caught too
            self._note_failure(driver, epoch, is_second=True)
            return
        try:
            self._world.offer(process, driver, epoch)
        except SecondCallError:
            self._world.checkpoint.refused_twice.add(epoch)
            raise
        self._world.checker.note(f"epoch {epoch}: a second call wrote nothing, and did not say so")


def whose_function(seed: int, decided_by: str, kinds: Collection[Fault]) -> Function:
    """What Spark calls in the world of a seed.

    Args:
        seed: of the world.
        decided_by: who decides for other sinks; empty where there are none.
        kinds: the faults that may strike.
    """
    if LINEAGES & frozenset(kinds):
        return Function.NONE
    if not decided_by:
        return Function.USERS
    return Function.CATCHING if seed // CATCHING_SPAN % 4 == 0 else Function.NONE
