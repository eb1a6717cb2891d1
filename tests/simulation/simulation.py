"""From a seed to a verdict: one life of a world, and what the oracle says about it."""

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from tallystick.checkpoint import decision_log, spark_log
from tallystick.epoch.manifest import FOLDER, KAFKA
from tallystick.run import driver, participants
from tallystick.tasks import epoch_plan, frames, operator_state
from tests.simulation.checker import Violation
from tests.simulation.faults import Fault
from tests.simulation.keyed_step import RECORDS
from tests.simulation.rows import OUTPUT, Row, rows_between
from tests.simulation.sabotage import sabotage
from tests.simulation.scheduler import Broken, Endless
from tests.simulation.world import OTHER, OWN, World

GROUP_FRAMES = 1
"""A task writes a batch as soon as it has it: in this small world it would wait for all of them."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one world ended."""

    seed: int
    verdict: str
    violations: tuple[str, ...]
    faults: Counter[Fault]
    met: Counter[str]
    ends: Counter[str]
    epochs: int
    steps: int
    trace: tuple[str, ...]


def simulate(
    seed: int,
    kinds: Collection[Fault] | None = None,
    is_keyed: bool | None = None,
    decided_by: str | None = None,
    without: Collection[Fault] = (),
    to_the_end: bool = True,
    **further: bool | None,
) -> Outcome:
    """Live through one world.

    Args:
        seed: decides everything.
        kinds: only these kinds of faults; None draws some.
        is_keyed: whether the pipeline has a keyed step; None: the seed says.
        decided_by: who decides for other sinks; see `Pipeline`.
        without: kinds of faults that are left out, drawn or not.
        to_the_end: also when a promise was broken.
        further: see `Pipeline`.
    """
    world = World(seed, kinds, is_keyed=is_keyed, decided_by=decided_by, **further)
    world.plan.kinds -= frozenset(without)
    world.ends_broken = not to_the_end
    with ExitStack() as stack:
        stack.enter_context(_silent_driver())
        stack.enter_context(patch.object(frames, "GROUP_FRAMES", GROUP_FRAMES))
        # No process remembers what those of another world did.
        for memory in (operator_state._lists, operator_state._tables):
            stack.enter_context(patch.dict(memory, clear=True))
        try:
            verdict = _live(world)
        except Endless:
            world.checker.note(f"no end in sight after {world.step} steps")
            verdict = "endless"
        except Broken:
            verdict = "broken"
        finally:
            world.close()
    return Outcome(
        seed=seed,
        verdict="broken" if world.checker.violations else verdict,
        violations=tuple(world.checker.violations),
        faults=world.plan.struck,
        met=world.met,
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
    _look(world, _read(world))
    if world.checker.violations:
        return "broken"
    if world.pipeline.has_end:
        _look_at_the_end(world)
        return "exactly once, to the end"
    world.release_input()
    act = world.plan.pick_sabotage()
    expected = sabotage(world, act) if act else None
    if expected is not None:
        _expect(world, expected)
        _look(world, _read(world))
        if not _is_made_good(world, act):
            return "refused, rightly"
    world.run_quietly()
    _look(world, [*_read(world), *world.repeated], is_last=True)
    check_positions(world)
    if world.sinks is not None and world.pipeline.has_loop:
        world.sinks.leave_behind(world.checkpoint.lineage, world.checker.committed_epoch + 1)
        world.run_quietly()  # with nothing to read
        _look(world, [*_read(world), *world.repeated], is_last=True)
    return "exactly once"


def _look_at_the_end(world: World) -> None:
    """Nothing waits any more in a window, and nothing else is left to do."""
    if waiting := sorted(world.checker.state.windows.now.waiting):
        world.checker.note(f"all inputs have ended, and {waiting} wait in windows")
    check_positions(world)


def _look(world: World, read: list[Row], *, is_last: bool = False) -> None:
    """Compare what is visible with what was read."""
    if world.decided_by == KAFKA:
        visible = {partition: world.sink.visible(partition) for partition in OUTPUT}
        world.checker.at_the_end(visible, read)
    if world.sinks is not None:
        wanted = world.checker.wanted(read)
        world.sinks.oracle.at_the_end(wanted, world.checkpoint.lineage, is_last)


def _expect(world: World, error: type[Exception]) -> None:
    """Start the query once; it has to refuse, and to leave everything as it is."""
    checkpoint, checker = world.checkpoint, world.checker
    files, offsets = dict(checkpoint.files), dict(world.sink.offsets)
    owner = world.sink.current
    left_out, called_twice = dict(checkpoint.left_out), set(checkpoint.called_twice)
    checker.expected_error = error
    world.run_driver()
    if not checker.expected_seen:
        checker.note(f"{error.__name__} was due, and the query went on")
    # Of epochs that it planned again, nothing ran: what the function did with them stands.
    checkpoint.left_out, checkpoint.called_twice = left_out, called_twice
    files_now = checkpoint.files
    # An empty entry of Spark's log, from an earlier power cut, may be cleared away.
    if gone := [path for path, data in files.items() if data and files_now.get(path) != data]:
        checker.note(f"a query that had to refuse has removed or changed {gone}")
    if world.sink.offsets != offsets:
        checker.note("a query that had to refuse has committed offsets")
    if world.has_other_decider:
        if new := [path for path in files_now if path not in files and path.startswith(FOLDER)]:
            checker.note(f"a start with another decider has written {new}")
        if world.sink.current != owner:
            checker.note("a start with another decider has fenced the one before")
        world.has_other_decider = False
    world.workers.counted = RECORDS
    checker.expected_error = None


def check_positions(world: World) -> None:
    """The group on the sink's cluster shows how far its source was read; no other is there."""
    if world.decided_by != KAFKA:
        return
    committed = world.checker.committed_epoch
    ends = world.checkpoint.start_of(committed + 1)
    is_all = not any(epoch > committed for epoch in world.checkpoint.left_out)
    ends = world.available if is_all else ends
    for partition in OWN.partitions:
        shown = world.sink.offsets.get((OWN.group, partition), (None, ""))[0]
        if shown != ends[partition]:
            world.checker.note(
                f"{OWN.group} shows {shown} for {partition}, which was read up to {ends[partition]}"
            )
    if any(group == OTHER.group for group, _ in world.sink.offsets):
        world.checker.note(f"{OTHER.group} is of another cluster, and is shown on the sink's")


def _is_made_good(world: World, act: Fault | None) -> bool:
    """Whether a person did what the refusal asks for, so that the job goes on."""
    if act in (Fault.STATE_FILE_DELETED, Fault.STATE_FILE_DAMAGED):
        world.checkpoint.files.update(world.backup)
        return True
    if act in (Fault.OTHER_DECIDER, Fault.OTHER_MEANING):
        return True  # started as before
    return act in (Fault.OTHER_CHECKPOINT, Fault.OLD_SAVEPOINT) and world.accept_last()


def _read(world: World) -> list[Row]:
    """All input that was written so far, as the rows that it must have become (of no epoch)."""
    left_out = {(row.source, row.offset) for row in world.query.left_out_rows()}
    rows = rows_between(world.origin.beginning, world.consumed)
    return [row for row in rows if (row.source, row.offset) not in left_out]


@contextmanager
def _silent_driver() -> Iterator[None]:
    """The driver warns of every failure; here failing is the point."""
    modules = (driver, participants, epoch_plan, decision_log, spark_log)
    loggers = [module.logger for module in modules]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, was in zip(loggers, before, strict=True):
            logger.disabled = was
