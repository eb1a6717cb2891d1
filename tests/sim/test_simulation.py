"""The whole protocol against a world that breaks; the seed is the bug report."""

import contextlib
import os
from collections import Counter

import pytest

from tallystick.checkpoint.manifest import CHECKPOINT, KAFKA
from tallystick.sim.simulation import check, simulate
from tallystick.sim.world import Endless, World

SEEDS = [int(os.environ["SEED"])] if "SEED" in os.environ else range(200)
"""`make sim` goes further; `SEED=17` repeats one."""


@pytest.mark.parametrize("seed", SEEDS)
def test_every_record_counts_exactly_once(seed: int) -> None:
    """Whatever crashes, races or is lost: nothing lost, nothing twice, in order, or a refusal."""
    check(simulate(seed))


@pytest.mark.parametrize("seed", SEEDS[:40])
def test_every_record_is_counted_exactly_once_under_its_key(seed: int) -> None:
    """The same with keyed state: on hosts that lose, tear and keep old copies, at any scale."""
    check(simulate(seed, is_keyed=True))


@pytest.mark.parametrize("decided_by", [KAFKA, CHECKPOINT])
@pytest.mark.parametrize("seed", SEEDS[:80])
def test_several_sinks_never_disagree(seed: int, decided_by: str) -> None:
    """Each shows every row once, or the loss is told by name; nothing waits at the end."""
    check(simulate(seed, is_keyed=False, decided_by=decided_by))


@pytest.mark.parametrize("is_keyed", [False, True])
def test_a_seed_repeats_itself(is_keyed: bool) -> None:
    """Without that no failure could be looked into."""
    assert simulate(3, is_keyed=is_keyed) == simulate(3, is_keyed=is_keyed)


def test_output_is_lost_and_run_again_in_some_of_these_worlds() -> None:
    """Else nothing would be known of it."""
    worlds = [World(seed, is_keyed=False, decided_by=CHECKPOINT) for seed in range(150)]
    ends: Counter[str] = Counter()
    replays = 0
    for world in worlds:
        with contextlib.suppress(Endless):
            world.run_storm()
        world.close()
        ends += world.ends
        replays += world.sinks.oracle.replays

    assert ends["lost output"] > 0
    assert replays > 0
