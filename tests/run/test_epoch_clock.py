"""The clocks of a run, while the machine's clock jumps."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from tallystick.run.epoch_clock import BELIEVED_AFTER_MS, JUMP_MIN_MS, EpochClock, SteadyClock

DAY_MS = 86_400_000
START_MS = 1_700_000_000_000


@dataclass
class Machine:
    """A machine whose wall clock is set."""

    passed_ms: int = 0
    jump_ms: int = 0

    def wall(self) -> int:
        return START_MS + self.passed_ms + self.jump_ms

    def monotonic(self) -> int:
        return self.passed_ms

    def clock(self) -> EpochClock:
        return EpochClock(self.wall, self.monotonic)

    def after(self, clock: EpochClock, ms: int) -> int:
        self.passed_ms += ms
        return clock.now_ms()


def test_an_epochs_clock_is_the_wall_clock_which_may_run_a_little_faster():
    machine = Machine()
    clock = machine.clock()
    for drift_ms in range(0, 10 * JUMP_MIN_MS, JUMP_MIN_MS // 2):
        machine.jump_ms = drift_ms
        assert machine.after(clock, 10) == machine.wall()


def test_a_clock_a_day_ahead_for_one_epoch_and_put_right_is_not_seen():
    for jump_ms in (DAY_MS, -DAY_MS):
        machine = Machine()
        clock = machine.clock()
        machine.jump_ms = jump_ms
        assert machine.after(clock, 1000) == START_MS + 1000
        machine.jump_ms = 0
        assert machine.after(clock, 1000) == START_MS + 2000


def test_a_clock_that_was_put_right_is_believed_after_a_minute():
    machine = Machine()
    clock = machine.clock()
    machine.jump_ms = DAY_MS
    assert machine.after(clock, 1000) == START_MS + 1000
    assert machine.after(clock, BELIEVED_AFTER_MS - 1) == START_MS + BELIEVED_AFTER_MS + 999
    assert machine.after(clock, 1) == machine.wall()
    assert machine.after(clock, 1000) == machine.wall()


def test_one_that_was_put_back_for_good_goes_slower_until_it_is_right_and_never_stands():
    machine = Machine()
    clock = machine.clock()
    machine.jump_ms = -3_600_000
    machine.after(clock, 0)
    before = machine.after(clock, BELIEVED_AFTER_MS)
    for _ in range(300):
        now = machine.after(clock, 60_000)
        assert before < now
        before = now
    assert now == machine.wall(), "an hour, at half the speed, after five"


@given(st.lists(st.tuples(st.integers(0, 100_000), st.integers(-DAY_MS, DAY_MS)), max_size=30))
def test_it_never_goes_back(readings):
    machine = Machine()
    clock = machine.clock()
    before = clock.now_ms()
    for passed_ms, jump_ms in readings:
        machine.jump_ms = jump_ms
        now = machine.after(clock, passed_ms)
        assert now >= before
        before = now


@given(st.lists(st.tuples(st.integers(0, 100_000), st.integers(-DAY_MS, DAY_MS)), max_size=30))
def test_no_jump_moves_the_clock_by_which_pauses_are_measured(readings):
    machine = Machine()
    pauses = SteadyClock(machine.wall, machine.monotonic)
    for passed_ms, jump_ms in readings:
        before, machine.jump_ms = pauses.now_ms(), jump_ms
        machine.passed_ms += passed_ms
        assert pauses.now_ms() == before + passed_ms


def test_pauses_go_on_where_an_earlier_run_was_if_the_clock_was_put_back_since():
    machine = Machine()
    pauses = SteadyClock(machine.wall, machine.monotonic)
    assert pauses.now_ms(START_MS + DAY_MS) == START_MS + DAY_MS
    machine.passed_ms += 30_000
    assert pauses.now_ms(START_MS + DAY_MS) == START_MS + DAY_MS + 30_000
