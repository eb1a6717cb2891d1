"""From a seed to a verdict: one life of a world, and what the oracle says about it."""

import logging
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tallystick.sim.checker import Violation
from tallystick.sim.faults import Fault
from tallystick.sim.rows import Row
from tallystick.sim.sabotage import sabotage
from tallystick.sim.world import OUTPUT, Endless, World
from tallystick.topic_partition import TopicPartition


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one world ended."""

    seed: int
    verdict: str
    violations: tuple[str, ...]
    faults: Counter[Fault]
    ends: Counter[str]
    epochs: int
    steps: int
    trace: tuple[str, ...]


def simulate(seed: int, kinds: Collection[Fault] | None = None) -> Outcome:
    """Live through one world.

    Args:
        seed: decides everything.
        kinds: only these kinds of faults; None draws some.
    """
    world = World(seed, kinds)
    with _silent_driver():
        try:
            verdict = _live(world)
        except Endless:
            world.checker.note(f"no end in sight after {world.step} steps")
            verdict = "endless"
        finally:
            world.close()
    return Outcome(
        seed=seed,
        verdict="broken" if world.checker.violations else verdict,
        violations=tuple(world.checker.violations),
        faults=world.plan.struck,
        ends=world.ends,
        epochs=world.checker.committed_epoch + 1,
        steps=world.step,
        trace=tuple(world.trace),
    )


def check(outcome: Outcome) -> None:
    """Raise what was broken, with the story that led to it.

    Raises:
        Violation: some promise was broken.
    """
    if outcome.violations:
        story = "\n".join(outcome.trace[-80:])
        broken = "\n".join(outcome.violations)
        raise Violation(f"seed {outcome.seed}:\n{story}\n{broken}")


def _live(world: World) -> str:
    world.run_storm()
    if world.dice.random() < 0.5:
        world.drain()
    world.release_input()
    world.run_quietly()
    world.drain()
    world.checker.at_the_end(_visible(world), _read(world))
    if world.checker.violations:
        return "broken"
    read = _read(world)
    world.release_input()
    act = world.plan.pick_sabotage()
    expected = sabotage(world, act) if act else None
    if expected is not None:
        world.expect(expected)
        world.checker.at_the_end(_visible(world), read)
        if act is not Fault.OTHER_CHECKPOINT or not world.accept_last():
            return "refused, rightly"
    world.run_quietly()
    world.checker.at_the_end(_visible(world), _read(world))
    world.check_positions()
    return "exactly once"


def _visible(world: World) -> dict[TopicPartition, list[Row]]:
    return {partition: world.sink.visible(partition) for partition in OUTPUT}


def _read(world: World) -> set[Row]:
    """All input so far, as the rows that it must have become (of no epoch in particular)."""
    return {
        Row("", 0, source, offset)
        for source, end in world.available.items()
        for offset in range(end)
    }


@contextmanager
def _silent_driver() -> Iterator[None]:
    """The driver warns of every failure; here failing is the point."""
    logger = logging.getLogger("tallystick.job")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
