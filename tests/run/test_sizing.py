"""How large epochs become, against models of engines: a fixed cost, a cost per record, and trouble.

A model's clock only; nothing runs.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.pipeline.sizing import (
    GROWTH_MAX,
    START_COUNT,
    EpochSizes,
    Reason,
    SizeBound,
    SizedEpoch,
    SizeLimits,
)

LIMITS = SizeLimits(interval_s=0, timeout_s=900, task_bytes_max=64 << 20)
MILLION = 1_000_000


@dataclass
class Model:
    """An engine: how long an epoch of so many records takes, beginning at some moment.

    Args:
        fixed_s: of each epoch.
        record_s: of each record, by the time at which its epoch begins.
        cold_s: how much longer the first epoch takes.
        noise: the spread of what an epoch takes; lognormal.
        record_bytes: of the rows that the busiest task holds, by the time as well.
    """

    fixed_s: float | Callable[[float], float] = 0.04
    record_s: Callable[[float], float] = lambda _: 1e-6
    cold_s: float = 2.0
    noise: float = 0.0
    record_bytes: Callable[[float], float] = lambda _: 0.0
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    def took_s(self, count: int, at_s: float, *, is_first: bool) -> float:
        fixed_s = self.fixed_s if isinstance(self.fixed_s, float) else self.fixed_s(at_s)
        work_s = fixed_s + count * self.record_s(at_s)
        return (self.cold_s if is_first else 0) + work_s * self.chance.lognormvariate(0, self.noise)


@dataclass
class Ran:
    """An epoch of a simulated run."""

    at_s: float
    count: int
    took_s: float
    bound: SizeBound
    has_failed: bool = False


@dataclass
class World:
    """A run of a pipeline over a model; records come at a rate, some wait at the start.

    An epoch that takes longer than the transaction timeout fails, and is planned anew.
    """

    model: Model
    limits: SizeLimits = LIMITS
    backlog: int = 0
    arrived: Callable[[float], float] = lambda _: 0.0
    sizes: EpochSizes = field(init=False)
    ran: list[Ran] = field(default_factory=list)
    now_s: float = 0.0
    read: int = 0

    def __post_init__(self) -> None:
        self.sizes = EpochSizes(self.limits)

    def run(self, until_s: float) -> "World":
        while self.now_s < until_s:
            waiting = self.backlog + int(self.arrived(self.now_s)) - self.read
            if waiting:
                self.epoch(waiting)
            elif self.backlog and self.arrived(until_s) == 0:
                break
            else:
                self.now_s += 0.05
        return self

    def epoch(self, waiting: int) -> None:
        at_s, bound = self.now_s, self.sizes.bound()
        count = min(waiting, bound.offset_count)
        took_s = self.model.took_s(count, at_s, is_first=not self.ran)
        has_failed = took_s > self.limits.timeout_s
        if has_failed:
            took_s = self.limits.timeout_s
            self.sizes.failed(count, took_s)
        else:
            self.read += count
            size = int(count * self.model.record_bytes(at_s))
            self.sizes.ended(SizedEpoch(count, took_s, size, is_cut=count < waiting))
        self.now_s += took_s
        self.ran.append(Ran(at_s, count, took_s, bound, has_failed))

    def since(self, at_s: float) -> list[Ran]:
        return [ran for ran in self.ran if ran.at_s >= at_s]


def full(epochs: list[Ran]) -> list[Ran]:
    """But for the last, which takes what is left."""
    return epochs[:-1]


def test_the_first_commit_is_early_and_the_bound_is_reached_after_a_few_epochs():
    world = World(Model(), backlog=50 * MILLION).run(60)

    assert world.ran[0].count == START_COUNT
    assert world.ran[0].took_s < 2.1, "all of it is the cold start"
    settled = next(at for at, ran in enumerate(world.ran) if ran.count > 800_000)
    assert settled <= 6
    assert sum(ran.took_s for ran in world.ran[1:settled]) < 0.8


@pytest.mark.parametrize("fixed_s", [0.02, 0.04, 0.25, 0.5])
@pytest.mark.parametrize("record_us", [0.7, 2, 20])
@pytest.mark.parametrize("noise", [0, 0.15])
def test_throughput_is_that_of_large_fixed_epochs(fixed_s, record_us, noise):
    """Of epochs of a million, where they are not much longer than the target."""
    per_epoch = min(MILLION, int(2.5 / (record_us * 1e-6)))
    backlog = 100 * per_epoch
    record_s = record_us * 1e-6
    world = World(Model(fixed_s, lambda _: record_s, 0, noise), backlog=backlog).run(1e6)
    fixed_epochs_s = backlog / per_epoch * (fixed_s + per_epoch * record_s)

    assert world.read == backlog
    assert world.now_s < fixed_epochs_s * 1.05


@pytest.mark.parametrize("record_us", [0.5, 5, 50, 1_000, 20_000])
@pytest.mark.parametrize("fixed_s", [0.02, 0.25, 1.5])
@pytest.mark.parametrize("interval_s", [0, 0.1, 10])
def test_an_epoch_stays_near_its_time(record_us, fixed_s, interval_s):
    limits = replace(LIMITS, interval_s=interval_s)
    model = Model(fixed_s, lambda _: record_us * 1e-6, noise=0.05)
    world = World(model, limits, backlog=100_000 * MILLION).run(400)

    target_s = limits.target_s(fixed_s)
    settled = full(world.since(100))
    assert settled
    for ran in settled:
        assert 0.6 * limits.target_s(0) < ran.took_s < 1.7 * target_s + fixed_s, ran
    assert max(ran.took_s for ran in world.ran[2:]) < 3 * target_s + fixed_s, "nor before that"


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("fixed_s", [0.02, 0.25])
def test_a_steady_backlog_is_read_in_steady_epochs(noise, fixed_s):
    """No oscillation: the bound seldom moves, and never far."""
    world = World(Model(fixed_s, noise=noise), backlog=10_000 * MILLION).run(300)

    counts = [ran.count for ran in full(world.since(30))]
    changes = sum(one != two for one, two in pairwise(counts))
    assert max(counts) < 2.6 * min(counts) if noise > 0.2 else max(counts) < 1.6 * min(counts)
    assert changes <= len(counts) * (0.5 if noise > 0.2 else 0.1)


def test_one_slow_epoch_changes_nothing():
    model = Model(record_s=lambda at_s: 8e-6 if 30 <= at_s < 30.9 else 1e-6)
    world = World(model, backlog=10_000 * MILLION).run(90)

    slow = [ran for ran in world.ran if ran.took_s > 4]
    assert len(slow) == 1
    assert {ran.count for ran in full(world.since(10))} == {slow[0].count}


@pytest.mark.parametrize("factor", [3, 30, 1000])
def test_a_sudden_slowdown_shrinks_epochs_and_its_end_lets_them_grow(factor):
    model = Model(record_s=lambda at_s: (factor if 30 <= at_s < 3000 else 1) * 1e-6)
    world = World(model, backlog=100_000 * MILLION).run(3100)

    before = [ran.count for ran in world.ran if 20 <= ran.at_s < 30]
    meant = [ran for ran in world.ran if 2950 <= ran.at_s < 2990]
    assert all(ran.took_s < 2 for ran in meant), meant[:3]
    assert len([ran for ran in world.ran if ran.at_s >= 30 and ran.took_s > 5]) <= 2
    after = [ran.count for ran in full(world.since(3030))]
    assert min(after) > 0.7 * min(before)


def test_a_function_that_takes_longer_than_the_transaction_lives_gets_through():
    """Seconds per record: the first epoch is aborted, and a smaller one is planned."""
    limits = replace(LIMITS, timeout_s=60)
    world = World(Model(record_s=lambda _: 0.5, noise=0.1), limits, backlog=500).run(1000)

    assert world.read == 500
    assert 1 <= sum(ran.has_failed for ran in world.ran) <= 2
    assert all(ran.took_s < limits.timeout_s / 4 for ran in world.ran[4:])


def test_a_fixed_cost_above_the_target_does_not_starve_the_records():
    """A checkpoint far away: 8 s an epoch whatever it reads."""
    world = World(Model(fixed_s=8.0, cold_s=0), backlog=100 * MILLION).run(600)

    assert world.read > 50 * MILLION
    assert max(ran.took_s for ran in world.ran) < 25


def test_a_fixed_cost_that_rises_is_not_taken_for_slow_records():
    """Else epochs would shrink for ever, and each would still take as long."""
    model = Model(fixed_s=lambda at_s: 0.04 if at_s < 60 else 3.0)
    world = World(model, backlog=10_000 * MILLION).run(300)

    assert min(ran.count for ran in full(world.since(90))) > 0.8 * MILLION


def test_after_a_failure_epochs_grow_again_whatever_their_fixed_cost():
    for fixed_s in (0.02, 0.25, 3.0):
        world = World(Model(fixed_s), backlog=10_000 * MILLION)
        world.sizes.failed(START_COUNT, 10_000.0)
        assert world.sizes.bound() == SizeBound(1, Reason.FAILED)
        world.run(120)

        assert world.ran[-1].count > 0.7 * MILLION, fixed_s


def test_a_trickle_leaves_the_bound_as_it_was_and_a_burst_is_read_at_once():
    bursts = lambda at_s: 200 * at_s + 600_000 * (at_s // 60)  # noqa: E731
    model = Model(noise=0.2)
    world = World(model, backlog=20 * MILLION, arrived=bursts).run(600)

    large = [ran for ran in world.since(65) if ran.count > 300_000]
    assert len(large) == 8, "each burst is one epoch"
    assert max(ran.took_s for ran in world.since(65)) < 2


def test_hiccups_of_small_epochs_make_the_next_burst_careful_and_no_more():
    bursts = lambda at_s: 50 * at_s + (2 * MILLION if at_s >= 100 else 0)  # noqa: E731
    model = Model(record_s=lambda at_s: 0.05 if 90 <= at_s < 95 else 1e-6)
    world = World(model, backlog=20 * MILLION, arrived=bursts).run(140)

    behind = next(ran.at_s + ran.took_s for ran in reversed(world.ran) if ran.count > 10_000)
    assert behind < 110


@pytest.mark.parametrize("took_s", [0.7, 1.5, 3.0, 4.5])
@pytest.mark.parametrize("slow_count", [1, 2])
def test_a_busy_machine_makes_no_epoch_smaller_than_the_first_of_a_run(took_s, slow_count):
    """One or two epochs of that size took long: others had the processor."""
    sizes = EpochSizes(LIMITS)
    sizes.ended(SizedEpoch(START_COUNT, 2.0, 0, is_cut=True))  # the cold one

    for _ in range(slow_count):
        sizes.ended(SizedEpoch(START_COUNT, took_s, 0, is_cut=True))

    assert sizes.bound().offset_count == START_COUNT


def test_hiccups_in_a_run_of_small_epochs_make_none_smaller_than_its_first():
    """Records of 0.7 ms; then two epochs wait for the processor."""
    world = World(Model(fixed_s=0.02, record_s=lambda _: 0.7e-3, cold_s=0), backlog=MILLION)
    world.run(60)
    settled = world.ran[-1].count
    assert START_COUNT < settled < 2 * START_COUNT

    for _ in range(2):
        world.sizes.ended(SizedEpoch(settled, 4.0, 0, is_cut=True))

    assert world.sizes.bound().offset_count >= START_COUNT


def test_a_function_that_is_slow_for_three_epochs_has_smaller_ones():
    sizes = EpochSizes(LIMITS)
    for took_s in (2.0, 3.0, 3.0, 3.0):
        sizes.ended(SizedEpoch(START_COUNT, took_s, 0, is_cut=True))

    assert sizes.bound().offset_count <= START_COUNT / 3


def test_epochs_of_timers_alone_say_nothing():
    sizes = EpochSizes(LIMITS)
    for _ in range(20):
        sizes.ended(SizedEpoch(0, 30.0, 0, is_cut=False))
        sizes.failed(0, 100.0)

    assert sizes.bound() == SizeBound(START_COUNT, Reason.START)


def test_a_backlog_that_ends_in_one_partition_is_read_in_smaller_epochs_there():
    """Skew: all records from one reader, so each costs four times as much."""
    skewed_at = 40 * MILLION
    world = World(Model(), backlog=60 * MILLION)
    world.model.record_s = lambda _: 4e-6 if world.read >= skewed_at else 1e-6
    world.run(1e6)

    late = [ran for ran in full(world.ran) if ran.took_s > 1.3]
    assert world.read == 60 * MILLION
    assert len(late) <= 3


def test_a_tasks_rows_stay_within_its_memory():
    """Of records that become ten times as large in the middle of the backlog."""
    size = lambda at_s: 10_000.0 if at_s > 10 else 1_000.0  # noqa: E731
    world = World(Model(record_bytes=size), backlog=10 * MILLION).run(1e6)

    most = LIMITS.task_bytes_max
    over = [ran for ran in world.ran if ran.count * size(ran.at_s) > 1.01 * most]
    assert len(over) <= 1, "the epoch in which they do"
    assert max(ran.count for ran in world.ran) == most // 1000
    assert world.ran[-2].count == most // 10_000
    assert world.ran[-2].bound.reason is Reason.BYTES


def test_the_users_bound_holds_and_is_said():
    limits = replace(LIMITS, offset_count_max=5_000)
    world = World(Model(), limits, backlog=MILLION).run(1e6)

    assert {ran.count for ran in full(world.ran[2:])} == {5_000}
    assert world.ran[-2].bound == SizeBound(5_000, Reason.OPTION)


def test_an_epoch_that_fails_at_once_leaves_the_bound_as_it_is():
    """A broker that is gone for a moment has nothing to do with sizes."""
    world = World(Model(), backlog=20 * MILLION).run(15)
    before = world.sizes.bound()
    world.sizes.failed(before.offset_count, 0.3)

    assert world.sizes.bound() == before


# --- whatever happens -----------------------------------------------------------------------------

EPOCHS = st.lists(
    st.tuples(
        st.floats(0, 1),  # of the bound, how much there was to read
        st.floats(1e-6, 1e4),
        st.integers(0, 1 << 40),
        st.booleans(),
        st.booleans(),
    ),
    max_size=40,
)


def bounds_of(limits: SizeLimits, epochs: list) -> Iterator[SizeBound]:
    sizes = EpochSizes(limits)
    yield sizes.bound()
    for filled, took_s, task_bytes, is_cut, has_failed in epochs:
        count = int(filled * sizes.bound().offset_count)
        if has_failed:
            sizes.failed(count, took_s)
        else:
            sizes.ended(SizedEpoch(count, took_s, task_bytes, is_cut))
        yield sizes.bound()


LIMITS_GIVEN = st.builds(
    SizeLimits,
    interval_s=st.floats(0, 3600),
    timeout_s=st.floats(1, 3600),
    task_bytes_max=st.integers(1, 1 << 40),
    offset_count_max=st.none() | st.integers(1, 10**9),
)


@given(LIMITS_GIVEN, EPOCHS)
def test_a_bound_is_never_nothing_nor_above_the_users_and_grows_step_by_step(limits, epochs):
    largest = START_COUNT
    for bound in bounds_of(limits, epochs):
        assert bound.offset_count >= 1
        if limits.offset_count_max is not None:
            assert bound.offset_count <= limits.offset_count_max
        assert bound.offset_count <= GROWTH_MAX * largest
        largest = max(largest, bound.offset_count)


@given(LIMITS_GIVEN, EPOCHS, st.integers(1, 1000))
def test_a_larger_limit_never_makes_the_next_epoch_smaller(limits, epochs, factor):
    """With the same past."""
    sizes, larger = EpochSizes(limits), EpochSizes(limits)
    for filled, took_s, task_bytes, is_cut, has_failed in epochs:
        count = int(filled * sizes.bound().offset_count)
        for size in (sizes, larger):
            if has_failed:
                size.failed(count, took_s)
            else:
                size.ended(SizedEpoch(count, took_s, task_bytes, is_cut))
    most = limits.offset_count_max
    larger._limits = replace(
        limits,
        task_bytes_max=limits.task_bytes_max * factor,
        offset_count_max=None if most is None else most * factor,
    )

    assert larger.bound().offset_count >= sizes.bound().offset_count


@given(
    st.floats(0.01, 2), st.floats(0.5e-6, 1e-3), st.floats(1, 30), st.floats(1, 4), st.booleans()
)
def test_more_time_never_makes_epochs_smaller_in_the_end(fixed_s, record_s, seconds, factor, short):
    def settled(limits: SizeLimits) -> int:
        world = World(Model(fixed_s, lambda _: record_s), limits, backlog=10**13).run(600)
        return world.ran[-1].count

    timeout_s = 120.0 if short else 900.0
    less = SizeLimits(seconds, timeout_s, 1 << 40)
    more = SizeLimits(seconds * factor, timeout_s * factor, 1 << 40)
    assert settled(more) > 0.6 * settled(less), "but for the tolerance"
