"""The whole protocol against a world that breaks; the seed is the bug report."""

import os

import pytest

from tallystick.sim.simulation import check, simulate

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


@pytest.mark.parametrize("is_keyed", [False, True])
def test_a_seed_repeats_itself(is_keyed: bool) -> None:
    """Without that no failure could be looked into."""
    assert simulate(3, is_keyed=is_keyed) == simulate(3, is_keyed=is_keyed)
