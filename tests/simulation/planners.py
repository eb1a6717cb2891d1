"""Where the epochs of two inputs end: the real plan over all, and a simulated look at each."""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from tallystick.pipeline import input_planning
from tallystick.pipeline.input_planning import InputPlanner, InputPlanners
from tallystick.pipeline.input_planning import Positions as InputPositions
from tallystick.source.offsets import SourceOffsets, next_tick, of_input, unmoved
from tallystick.values import TopicPartition
from tests.simulation.faults import Fault, FaultPlan
from tests.simulation.spark import EPOCH_ROWS_MAX, Positions, Source

TICK_COUNT = 2
"""Epochs without records after the last: each keyed step moves the watermark of the next."""


class Logs(Protocol):
    """What a planner needs of the world."""

    dice: random.Random
    plan: FaultPlan
    available: dict[TopicPartition, int]
    stops: Positions | None
    sources: tuple[Source, ...]


class SimulatedPlanner:
    """Plans one input; see `input_planning.Planner`.

    Args:
        world: where its log ends.
        source: the input.
        first: where a lineage begins.
    """

    waiting = 0

    def __init__(self, world: Logs, source: Source, first: Positions) -> None:
        self._world = world
        self._source = source
        self._first = first

    def stop_at_what_is_there(self) -> None:
        """See `Planner.stop_at_what_is_there`: nothing is added while it runs."""

    def first(self) -> SourceOffsets:
        """See `Planner.first`."""
        return self._source.offsets(self._first)

    def look(self, start: SourceOffsets) -> None:
        """See `Planner.look`."""
        ends = self._ends()
        self.waiting = sum(max(0, ends[at] - offset) for at, offset in start.positions.items())

    def hold(self, partitions: frozenset[TopicPartition]) -> None:
        """See `Planner.hold`."""
        raise AssertionError(f"no partition may be too far ahead, and {partitions} are")

    def plan(self, start: SourceOffsets, offset_count_max: int | None) -> SourceOffsets:
        """See `Planner.plan`: some of what is there, in one partition at least."""
        if not self.waiting:
            return start if self._is_done(start) else self._ending(next_tick(start))
        dice, ends = self._world.dice, self._ends()
        drawn = {
            at: max(offset, min(ends[at], offset + dice.randint(0, EPOCH_ROWS_MAX)))
            for at, offset in start.positions.items()
        }
        named = {of_input(self._source.input, at): offset for at, offset in drawn.items()}
        is_any = drawn != start.positions
        return self._ending(self._source.offsets(named if is_any else self._world.available))

    def _is_done(self, start: SourceOffsets) -> bool:
        """Tell if no epoch without records is due, which the last windows of a stream need."""
        return self._world.stops is None or start.tick >= TICK_COUNT

    def _ending(self, offsets: SourceOffsets) -> SourceOffsets:
        """Return offsets with those where reading ends for good, if it does."""
        if self._world.stops is None:
            return offsets
        return replace(offsets, stops=self._source.offsets(self._world.stops).positions)

    def next(self, start: SourceOffsets, offset_count_max: int | None) -> SourceOffsets:
        """See `Planner.next`."""
        self.look(start)
        return self.plan(start, offset_count_max)

    def latest(self) -> SourceOffsets:
        """See `Planner.latest`."""
        return self._source.offsets(self._world.available)

    def _ends(self) -> Mapping[TopicPartition, int]:
        return self.latest().positions


def planners_of(world: Logs, first: Positions) -> InputPlanners:
    """What plans the inputs of a run, which may have another order than in the run before."""
    order = world.dice.sample(world.sources, len(world.sources))
    return InputPlanners(
        [InputPlanner(planner.input, SimulatedPlanner(world, planner, first)) for planner in order]
    )


def is_at_the_end(planners: InputPlanners, texts: tuple[str, ...]) -> bool:
    """Tell if all inputs end where an epoch ends."""
    return planners.state(tuple(input_planning.by_input(texts).values())).is_over


def next_ends(world: Logs, planners: InputPlanners, starts: InputPositions) -> InputPositions:
    """Where the next epoch ends; `starts` when there is nothing to read."""
    ends = planners.next(starts, None)
    if ends is starts or not world.plan.strikes(Fault.EMPTY_EPOCH):
        return ends
    return tuple(map(unmoved, starts))


def named_positions(texts: tuple[str, ...]) -> Positions:
    """What `spark.pipeline_run` takes for the positions of both inputs, when it reads."""
    return {
        of_input(uid, partition): offset
        for uid, position in input_planning.by_input(texts).items()
        for partition, offset in position.positions.items()
    }
