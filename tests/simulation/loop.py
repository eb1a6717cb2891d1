"""A pipeline's own loop: it plans an epoch after the fence, and keeps no log but the manifests."""

import random
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

from tallystick.pipeline.input_planning import InputPlanners, text_of
from tallystick.ports import Engine, PlannedEpoch
from tallystick.run.driver import Driver
from tallystick.run.epoch_loop import EpochEnded, EpochLoop, Trigger
from tallystick.state.catalog import StepState
from tallystick.values import TopicPartition
from tests.simulation.checker import Checker
from tests.simulation.faults import Fault, FaultPlan
from tests.simulation.keyed_step import MAX_PARALLELISM
from tests.simulation.pipelines import Pipeline
from tests.simulation.planners import is_at_the_end, named_positions, next_ends, planners_of
from tests.simulation.residents import Residents
from tests.simulation.rows import RULES, Row
from tests.simulation.scheduler import Process
from tests.simulation.spark import Checkpoint, Positions, Source, positions_in


class Surroundings(Protocol):
    """What a loop needs of the world."""

    dice: random.Random
    plan: FaultPlan
    checker: Checker
    origin: Checkpoint
    checkpoint: Checkpoint
    available: dict[TopicPartition, int]
    stops: Positions | None
    begins_late: bool
    has_two_inputs: bool
    pipeline: Pipeline
    sources: tuple[Source, ...]

    def make_driver(self, process: Process) -> Driver:
        """The driver that is tested."""
        ...

    def plan_positions(self, starts: Positions) -> Positions | None:
        """The end of the next epoch; None when there is nothing to read."""
        ...

    def engine(self, process: Process, checkpoint: Checkpoint, epoch: int) -> Engine:
        """What runs an epoch whose input a checkpoint tells."""
        ...

    def residents(self, process: Process) -> Residents | None:
        """The resident tasks of a run; None: its epochs are Spark jobs."""
        ...

    def pass_by(self, process: Process) -> None:
        """Let time pass; the process may be paused, or die, here."""
        ...


class Loop:
    """The pipeline of a world, which each of its processes runs; instead of a `Query`."""

    is_users = False

    def __init__(self, world: Surroundings) -> None:
        self._world = world

    def run(self, process: Process) -> None:
        """Run until there is nothing left to read."""
        world = self._world
        if world.pipeline.recovers:
            world.make_driver(process).recover_newest()
        driver, residents = world.make_driver(process), world.residents(process)

        def rescale() -> None:
            assert residents is not None, "rescaled are resident tasks"
            newest = driver.coordinator.committed_manifest
            parallelism = world.dice.randint(1, MAX_PARALLELISM)
            has_state = newest is not None and (residents.keyed.steps or residents.keyed.lists)
            residents.rescale(parallelism, newest.state if newest and has_state else ())

        def judge(rescaled: Future[None]) -> None:
            if (error := rescaled.exception()) is not None and "has ended" not in str(error):
                world.checker.note(f"{process.name} was not rescaled: {error!r}")

        def on_end(_: EpochEnded) -> None:
            world.pass_by(process)
            if residents is not None and world.plan.strikes(Fault.RESCALED_LIVE):
                loop.between_epochs(rescale).add_done_callback(judge)

        epochs = _Epochs(world, process)
        loop = EpochLoop(driver, epochs, Trigger(is_available_now=True), on_end)
        if residents is None:
            loop.run()
        else:
            _run_with(residents, loop)

    def left_out_rows(self) -> list[Row]:
        """It leaves nothing out."""
        return []

    def give_up(self, refusal: str) -> None:
        """It catches nothing, so nobody is ever asked."""
        raise AssertionError(refusal)


def _run_with(residents: Residents, loop: EpochLoop) -> None:
    """Run the loop, and let its tasks go, however it ends."""
    try:
        try:
            loop.run()
        except Exception:
            residents.close()
            raise
        residents.close()
    except BaseException:
        residents.give_up()  # what the end of a process does to its connections
        raise


class _Epochs:
    """See `run.query.LoopSource`."""

    is_behind = False

    def __init__(self, world: Surroundings, process: Process) -> None:
        self._world = world
        self._process = process
        self._inputs = planners_of(world, self._first_positions()) if world.has_two_inputs else None

    def stop_at_what_is_there(self) -> None:
        """See `run.query.LoopSource.stop_at_what_is_there`: nothing is added while it runs."""

    def plan(
        self, checkpoint_id: int, start: tuple[str, ...], state: tuple[StepState, ...]
    ) -> PlannedEpoch:
        """See `ports.EpochSource.plan`."""
        world = self._world
        self._process.offered = checkpoint_id
        if self._inputs is not None:
            return self._plan_both(self._inputs, checkpoint_id, start)
        starts = positions_in(start) if start else self._first_positions()
        world.pass_by(self._process)
        ends = world.plan_positions(starts)
        sources = None if ends is None else self._texts(ends)
        return PlannedEpoch(self._texts(starts), sources, _looks_through(checkpoint_id))

    def _plan_both(self, inputs: InputPlanners, epoch: int, start: tuple[str, ...]) -> PlannedEpoch:
        """What `spark.pipeline_loop` does: positions go to inputs by their ids."""
        positions = inputs.positions(start)
        self._world.pass_by(self._process)
        ends = next_ends(self._world, inputs, positions)
        begins = start or tuple(map(text_of, positions))
        sources = None if ends is positions else tuple(map(text_of, ends))
        return PlannedEpoch(begins, sources, _looks_through(epoch))

    def _first_positions(self) -> Positions:
        """Where a lineage begins: it may read what comes from now on."""
        world = self._world
        base = world.checkpoint.base
        if not world.begins_late or world.checkpoint is not world.origin:
            return base
        # A table begins with the earliest record of its topic.
        return {at: base[at] if at == RULES else end for at, end in world.available.items()}

    def engine(
        self, checkpoint_id: int, start: tuple[str, ...], sources: tuple[str, ...]
    ) -> Engine:
        """See `ports.EpochSource.engine`."""
        read = positions_in if self._inputs is None else named_positions
        begins = {0: self._world.checkpoint.beginning}
        ends = {**begins, checkpoint_id - 1: read(start), checkpoint_id: read(sources)}
        is_over = self._inputs is not None and is_at_the_end(self._inputs, sources)
        planned = replace(self._world.checkpoint, recorded=ends, is_over=is_over)
        return self._world.engine(self._process, planned, checkpoint_id)

    def _texts(self, positions: Positions) -> tuple[str, ...]:
        return tuple(source.text(positions) for source in self._world.sources)


def _looks_through(epoch: int) -> bool:
    """Tell if there was nothing to read for so long that other sinks are looked through again."""
    return epoch % 2 == 0
