"""The whole protocol against a world that breaks; the seed is the bug report."""

import contextlib
import os
from collections import Counter

import pytest

from tallystick.epoch.manifest import CHECKPOINT, KAFKA
from tests.simulation.faults import RECENT, RECENT_FROM, Fault
from tests.simulation.pipelines import pipeline_of
from tests.simulation.scheduler import Endless
from tests.simulation.simulation import check, simulate
from tests.simulation.world import World

WORLDS = int(os.environ.get("WORLDS", "20"))
"""`make stress` has 200. Worlds of any kind are in `make sim` and in `test_digests.py`."""
SEEDS = [int(os.environ["SEED"])] if "SEED" in os.environ else range(WORLDS)
"""`SEED=17` repeats one."""
WHOLE = SEEDS if {"SEED", "WORLDS"} & os.environ.keys() else ()
"""Worlds that draw all of themselves are in `test_digests.py`, and none of them may be broken."""
FEW = SEEDS[: max(1, WORLDS // 5)]
"""Of each kind that the seeds of `make sim` choose by themselves."""

GANG_FAULTS = (
    Fault.MEMBER_LOST,
    Fault.MEMBER_HUNG,
    Fault.MEMBERS_CUT,
    Fault.READ_FAILED,
    Fault.GANG_LATE,
    Fault.ORPHANED,
    Fault.REPORT_LATE,
    Fault.FRAMES_LATE,
    Fault.RESCALED_LIVE,
)
FAILED_ONCE = (2406, 4701, 4971, 7791, 21450, 26026, 26333, 31860)
"""Two runs of a restored savepoint noted at the same time that nothing of it is left to do; a
checkpoint that was set back to its beginning was expected to be told from a new one; a table left
the memory of a process while a task wrote its changes, and the task said nothing of them; a
checkpoint of which nothing was committed was expected to be told from a new one; a loss
of power kept the note of a failed call and took Spark's entry of its epoch."""
LOSING = (Fault.SINK_TIMEOUT, Fault.CRASH_AFTER, Fault.SINK_LOST_REPLY)
LOSING_SEEDS = (1, 2, 31)
"""With these faults all that a decision names is lost there, and its epoch runs again."""
WHAT_COMES = (
    "an epoch goes on in the same gang after a failure",
    "a member woke up after the end of its gang",
    "a frame of an earlier run arrived",
    "an orphan wrote",
    "Kafka refused what an orphan wrote",
    "what an orphan said was refused",
    "a rescale came through",
)


@pytest.mark.parametrize("seed", [*WHOLE, *FAILED_ONCE])
def test_every_record_counts_exactly_once(seed: int) -> None:
    """Whatever crashes, races or is lost: nothing lost, nothing twice, in order, or a refusal."""
    check(simulate(seed))


@pytest.mark.parametrize("seed", FEW)
def test_every_record_is_counted_exactly_once_under_its_key(seed: int) -> None:
    """The same with keyed state: on hosts that lose, tear and keep old copies, at any scale."""
    check(simulate(seed, is_keyed=True))


@pytest.mark.parametrize("decided_by", [KAFKA, CHECKPOINT])
@pytest.mark.parametrize("seed", FEW)
def test_several_sinks_never_disagree(seed: int, decided_by: str) -> None:
    """Each shows every row once, or the loss is told by name; nothing waits at the end."""
    check(simulate(seed, is_keyed=False, decided_by=decided_by))


@pytest.mark.parametrize("decided_by", ["", KAFKA, CHECKPOINT])
@pytest.mark.parametrize("seed", FEW)
def test_resident_tasks_keep_every_promise(seed: int, decided_by: str) -> None:
    """Lost, hung, orphaned and rescaled at every step: what counts is what the driver decided."""
    check(simulate(seed, is_keyed=False, decided_by=decided_by, has_loop=True, has_gang=True))


@pytest.mark.parametrize("has_gang", [False, True])
@pytest.mark.parametrize("seed", FEW)
def test_two_inputs_keep_their_positions_and_one_watermark(seed: int, has_gang: bool) -> None:
    """Each record of both is counted once, or was late by the slowest partition of both."""
    check(simulate(seed, is_keyed=True, has_gang=has_gang, has_two_inputs=True))


def test_rows_of_both_inputs_are_late_in_some_of_these_worlds() -> None:
    """Else nothing would be known of the watermark; seeds alone choose such worlds too."""
    late: Counter[str] = Counter()
    for seed in (6, 66):
        world = World(seed)
        assert world.has_two_inputs
        with contextlib.suppress(Endless):
            world.run_storm()
        world.close()
        late += Counter(source.topic for source, _ in world.checker.state.late.elements())

    assert late["in"] > 0
    assert late["second/in"] > 0


@pytest.mark.parametrize("decided_by", ["", KAFKA, CHECKPOINT])
@pytest.mark.parametrize("seed", FEW)
def test_recoveries_lose_and_repeat_nothing(seed: int, decided_by: str) -> None:
    """Also beside a run that is at work, and when one dies in the middle of another one."""
    check(simulate(seed, is_keyed=False, decided_by=decided_by, has_loop=True, recovers=True))


@pytest.mark.parametrize("decided_by", ["", KAFKA, CHECKPOINT])
@pytest.mark.parametrize("seed", FEW)
def test_one_pipeline_may_have_it_all(seed: int, decided_by: str) -> None:
    """Two keyed steps, windows, other sinks, two inputs, a recovery before each run."""
    check(
        simulate(
            seed,
            is_keyed=True,
            decided_by=decided_by,
            has_two_inputs=seed % 3 == 0,
            has_windows=seed % 4 != 3 or not decided_by,
            recovers=seed % 5 == 0,
        )
    )


@pytest.mark.parametrize("has_gang", [False, True])
@pytest.mark.parametrize("seed", FEW)
def test_the_end_of_all_inputs_closes_all_windows(seed: int, has_gang: bool) -> None:
    """Whatever befalls the last epochs, and those without records behind them."""
    wanted = {"is_keyed": True, "has_two_inputs": True, "has_windows": True, "has_end": True}
    outcome = simulate(seed, has_gang=has_gang, **wanted)

    check(outcome)
    assert outcome.verdict == "exactly once, to the end"


def test_later_seeds_alone_choose_what_came_later() -> None:
    """An end, and the kinds of faults that seeds before do not draw."""
    worlds = [World(seed) for seed in range(RECENT_FROM, RECENT_FROM + 200)]

    assert any(world.pipeline.has_end for world in worlds)
    assert {kind for world in worlds for kind in world.plan.kinds} >= set(RECENT)
    assert not any(world.plan.kinds & set(RECENT) for world in map(World, range(RECENT_FROM)))


def test_windows_and_lost_output_meet_in_some_of_these_worlds() -> None:
    """Else nothing would be known of it: rows are put out, late, and of epochs run again."""
    fired, late, replays = 0, 0, 0
    for seed in LOSING_SEEDS:
        world = World(seed, LOSING, is_keyed=True, decided_by=CHECKPOINT, has_windows=True)
        with contextlib.suppress(Endless):
            world.run_storm()
        world.close()
        assert world.sinks is not None
        fired += world.checker.state.windows.fired.total()
        late += world.checker.state.windows.late
        replays += world.sinks.oracle.replays

    assert fired > 0
    assert late > 0
    assert replays > 0


@pytest.mark.parametrize("seed", FEW)
def test_resident_tasks_keep_state(seed: int) -> None:
    """The same with a keyed step, whose keys move when it is rescaled."""
    check(simulate(seed, is_keyed=True, has_gang=True))


@pytest.mark.parametrize("is_keyed", [False, True])
@pytest.mark.parametrize("seed", FEW)
def test_lists_and_tables_are_those_of_the_epoch(seed: int, is_keyed: bool) -> None:
    """Each reader has its own elements, however many readers there are, and all have one table."""
    has_gang = not is_keyed or seed % 3 != 0
    further = {"has_loop": True, "has_gang": has_gang, "has_operator_state": True}
    check(simulate(seed, is_keyed=is_keyed, decided_by="", **further))


def test_some_seeds_alone_choose_operator_state_beside_all_else() -> None:
    """Else it would meet nothing of the rest: jobs, two inputs, windows, other sinks."""
    chosen = [pipeline for pipeline in map(pipeline_of, range(600)) if pipeline.has_operator_state]

    assert any(not pipeline.is_keyed for pipeline in chosen)
    for name in ("is_keyed", "decided_by", "has_two_inputs", "has_windows", "recovers"):
        assert any(getattr(pipeline, name) for pipeline in chosen), name
    assert any(pipeline.is_keyed and not pipeline.has_gang for pipeline in chosen)


def test_what_befalls_resident_tasks_really_does() -> None:
    """Else nothing would be known of it: each fault strikes, and each guard has something to do."""
    faults: Counter[Fault] = Counter()
    met: Counter[str] = Counter()
    for seed in range(250):
        outcome = simulate(seed, is_keyed=seed % 2 == 0, has_loop=True, has_gang=True)
        faults += outcome.faults
        met += outcome.met

    assert {fault for fault in GANG_FAULTS if faults[fault] < 3} == set()
    assert {what for what in WHAT_COMES if not met[what]} == set()


@pytest.mark.parametrize("is_keyed", [False, True])
def test_a_seed_repeats_itself(is_keyed: bool) -> None:
    """Without that no failure could be looked into."""
    for has_gang in (False, True):
        first, second = (
            simulate(3, is_keyed=is_keyed, has_loop=True, has_gang=has_gang) for _ in range(2)
        )
        assert first == second


def test_output_is_lost_and_run_again_in_some_of_these_worlds() -> None:
    """Else nothing would be known of it."""
    ends: Counter[str] = Counter()
    replays = 0
    for seed in range(250):
        world = World(seed, is_keyed=False, decided_by=CHECKPOINT)
        with contextlib.suppress(Endless):
            world.run_storm()
        world.close()
        ends += world.ends
        replays += world.sinks.oracle.replays
        if ends["lost output"] > 0 and replays > 0:
            return

    raise AssertionError(f"lost output ended {ends['lost output']} drivers; replays: {replays}")
