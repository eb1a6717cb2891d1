"""The number of offsets of the next epoch: small first, then as many as fit into its time.

    bound() ─► the epoch runs ─► ended(…) or failed(…) ─► bound() …

An epoch costs a fixed time, and some time for each offset. Both are measured: the sizes differ
while the bound grows, so a line through the newest epochs separates one from the other. The bound
is what fits into the target time by that line. It is lower where the rows of one task would not fit
into its memory, or where the user's option says so.

Only an epoch that was cut short, or was half as large as it might have been, says what an offset
costs. The median of three such costs counts: one slow epoch changes nothing, two do; below what a
run begins with, only three do: on a busy machine small epochs take long too. All is forgotten at
the end of a run: the next one begins small, and is up to size after a few epochs.

No IO, clock or threads.
"""

import math
from collections import deque
from dataclasses import dataclass
from enum import Enum
from statistics import median

START_COUNT = 1_000
"""The first epoch of a run, whose cost is unknown; small enough to be mostly fixed cost."""
TARGET_S = 1.0
FIXED_SHARE = 0.1
"""An epoch is made longer than the target where its fixed cost would be more of it than this."""
PATIENCE_S = 5.0
"""But no longer than this."""
TIMEOUT_SHARE = 0.1
"""The share of the transaction timeout that an epoch is to take, at most."""
ALARM_SHARE = 0.25
"""An epoch that took more of the timeout than this counts at once, without a second one."""
GROWTH_MIN, GROWTH_MAX = 4, 8
"""The growth from the newest epoch to the next, at most; the lower one while it is quick."""
TOLERANCE = 1.25
"""A bound this near to the best one stays."""
SPREAD_MIN = 4
"""Fixed cost can be separated from the rest where the largest epoch is this much larger."""
_COST_COUNT = 3
_HISTORY_COUNT = 16


class Reason(Enum):
    """The reason for a bound; the value is for the query's progress."""

    START = "a run begins with small epochs"
    GROWING = "it grows while epochs are quick"
    TIME = "more would take too long"
    BYTES = "more would not fit into a task's memory"
    OPTION = "max_offsets_per_trigger"
    FAILED = "an epoch that took long has failed"


@dataclass(frozen=True, slots=True)
class SizeLimits:
    """The limits of an epoch's size and time.

    Args:
        interval_s: of the trigger; 0: no interval.
        timeout_s: of the transaction.
        task_bytes_max: bytes of rows that one task may hold.
        offset_count_max: the user's bound; None: no bound.
    """

    interval_s: float
    timeout_s: float
    task_bytes_max: int
    offset_count_max: int | None = None

    def __post_init__(self) -> None:
        assert self.interval_s >= 0, self
        assert self.timeout_s > 0, self
        assert self.task_bytes_max > 0, self
        assert self.offset_count_max is None or self.offset_count_max > 0, self

    def target_s(self, fixed_s: float) -> float:
        """Return the time an epoch is to take, if `fixed_s` of it does not depend on its size."""
        worthwhile_s = min(fixed_s / FIXED_SHARE, PATIENCE_S)
        wanted_s = max(self.interval_s, TARGET_S, worthwhile_s)
        return min(wanted_s, self.timeout_s * TIMEOUT_SHARE)


@dataclass(frozen=True, slots=True)
class SizedEpoch:
    """The measured size and time of an epoch.

    Args:
        offset_count: how many offsets the epoch spanned.
        took_s: the time from the plan to the end of the epoch.
        task_bytes: bytes of rows that the busiest keyed task held; 0: no keyed task.
        is_cut: whether more records were there to be read.
    """

    offset_count: int
    took_s: float
    task_bytes: int
    is_cut: bool


@dataclass(frozen=True, slots=True)
class SizeBound:
    """The most that an epoch may span, and why."""

    offset_count: int
    reason: Reason

    def __post_init__(self) -> None:
        assert self.offset_count > 0, self


class EpochSizes:
    """The sizes of a run's epochs, learned from the time and memory of earlier epochs.

    Args:
        limits: of every epoch.
    """

    def __init__(self, limits: SizeLimits) -> None:
        self._limits = limits
        self._count = START_COUNT
        self._reason = Reason.START
        self._is_first = True  # it pays for all that is loaded and compiled
        self._is_growing = True  # no epoch has come near the target yet
        self._fixed_s, self._is_fitted = 0.0, False
        self._costs_s: deque[float] = deque(maxlen=_COST_COUNT)  # per offset
        self._bytes: deque[float] = deque(maxlen=_COST_COUNT)  # of one task, per offset
        self._history: deque[tuple[int, float]] = deque(maxlen=_HISTORY_COUNT)

    @property
    def target_s(self) -> float:
        """Return the time an epoch is to take."""
        return self._limits.target_s(self._fixed_s)

    def bound(self) -> SizeBound:
        """Return the bound of the next epoch."""
        bounds = [SizeBound(self._count, self._reason)]
        if self._bytes and max(self._bytes) > 0:
            fitting = int(self._limits.task_bytes_max / max(self._bytes))
            bounds.append(SizeBound(max(1, fitting), Reason.BYTES))
        if self._limits.offset_count_max is not None:
            bounds.append(SizeBound(self._limits.offset_count_max, Reason.OPTION))
        return min(bounds, key=lambda bound: bound.offset_count)

    def ended(self, epoch: SizedEpoch) -> None:
        """Take in an epoch that was committed."""
        if epoch.offset_count == 0:  # timers only: says nothing of what records cost
            return
        self._bytes.append(epoch.task_bytes / epoch.offset_count)
        if self._is_first and epoch.took_s < self._limits.timeout_s * ALARM_SHARE:
            self._is_first = False
            return
        self._is_first = False
        self._history.append((epoch.offset_count, epoch.took_s))
        if epoch.is_cut or 2 * epoch.offset_count >= self.bound().offset_count:
            self._learn(epoch.offset_count, epoch.took_s)
            return
        self._fit()
        if epoch.took_s > self.target_s:  # so little took so long: what will much more take?
            self._count = min(self._count, max(START_COUNT, GROWTH_MAX * epoch.offset_count))

    def failed(self, offset_count: int, took_s: float) -> None:
        """Take in an aborted epoch, which may have been too large if the timeout was near."""
        self._is_first = False
        if offset_count == 0 or took_s <= self._limits.timeout_s * ALARM_SHARE:
            return
        shrunk = int(min(self._count, offset_count) * min(0.5, self.target_s / took_s))
        self._count, self._reason = max(1, shrunk), Reason.FAILED
        self._is_growing = False
        self._costs_s.clear()
        self._history.clear()

    def _learn(self, count: int, took_s: float) -> None:
        """Set the size of the next epochs by the cost of an offset in this one."""
        known = median(self._costs_s) if self._costs_s and not self._is_growing else None
        if known is not None and not 0.5 < self._cost_s(count, took_s) / known < 2:
            while len(self._history) > 2:  # what was before says nothing of what is now
                self._history.popleft()
        self._fit()
        if took_s > self._limits.timeout_s * ALARM_SHARE or self._is_growing:
            self._costs_s.clear()
        self._costs_s.append(self._cost_s(count, took_s))
        target_s = self.target_s
        free_s = max(target_s - self._fixed_s, target_s / 2)
        floor = self._floor(free_s)
        fitting = max(free_s / median(self._costs_s), floor)
        if self._is_growing and took_s <= target_s / 2:
            self._set(max(fitting, GROWTH_MIN * count), count, Reason.GROWING)
            return
        was_growing, self._is_growing = self._is_growing, False
        off = fitting / self._count
        if not self._is_fitted:  # go where the fixed cost shows
            is_too_small = count < SPREAD_MIN
            other = count * SPREAD_MIN if is_too_small else min(fitting, count / SPREAD_MIN)
            is_trusted = len(self._costs_s) == _COST_COUNT
            self._set(other if is_trusted else max(other, floor), count, Reason.TIME)
        elif 1 / TOLERANCE < off < TOLERANCE:
            self._reason = Reason.TIME
        elif 0.5 < off < 2 and not was_growing:  # half of the way: it may be noise
            self._set(math.sqrt(fitting * self._count), count, Reason.TIME)
        else:
            self._set(fitting, count, Reason.TIME)

    def _floor(self, free_s: float) -> float:
        """Return a size that no epoch need go below, if the newest ones may have been hindered.

        Args:
            free_s: what an epoch's offsets may take.
        """
        longest_s = min(PATIENCE_S, self._limits.timeout_s * TIMEOUT_SHARE)
        if START_COUNT * median(self._costs_s) > longest_s:  # slow functions, not a busy machine
            return 0.0
        if len(self._costs_s) < _COST_COUNT:
            return START_COUNT
        return min(START_COUNT, free_s / min(self._costs_s))

    def _cost_s(self, count: int, took_s: float) -> float:
        """Return what an offset cost: never nothing, as the fixed cost is an estimate."""
        return max(took_s - self._fixed_s, 0.05 * took_s, 1e-9) / count

    def _set(self, fitting: float, count: int, reason: Reason) -> None:
        is_held_back = fitting > GROWTH_MAX * count
        self._count = max(1, int(min(fitting, GROWTH_MAX * count)))
        self._reason = Reason.GROWING if is_held_back else reason

    def _fit(self) -> None:
        """Estimate the fixed cost by a line through the newest epochs, if they show it.

        Errors grow with an epoch's duration, so the quick ones weigh more.
        """
        counts = [count for count, _ in self._history]
        if max(counts) < SPREAD_MIN * min(counts):
            return
        weights = [1 / max(took_s, 1e-6) ** 2 for _, took_s in self._history]
        total = math.fsum(weights)
        pairs = list(zip(weights, self._history, strict=True))
        count_mean = math.fsum(w * count for w, (count, _) in pairs) / total
        took_mean = math.fsum(w * took_s for w, (_, took_s) in pairs) / total
        spread = math.fsum(w * (count - count_mean) ** 2 for w, (count, _) in pairs)
        slope = math.fsum(
            w * (count - count_mean) * (took_s - took_mean) for w, (count, took_s) in pairs
        )
        least_s = min(took_s for _, took_s in self._history)
        fixed_s = took_mean - count_mean * slope / spread
        self._fixed_s, self._is_fitted = min(max(fixed_s, 0.0), least_s), True
