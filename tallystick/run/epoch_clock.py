"""The clocks of a run: a monotonic clock for pauses, a wall clock without jumps for epochs.

The driver's wall clock may jump: NTP or a person puts it right, a virtual machine is moved. Pauses
(`idle_after`, `idle_advance`, how long a topic is missed) are measured by a monotonic clock, which
begins at the wall clock's time, so that pauses between two runs count too. The epochs' own clock
(timers, times to live, windows of processing time) never goes back, which would put windows out
twice; a jump is believed once it has lasted for a while, and one back is made up for slowly.

Source: the slewing of NTP's `adjtime`; Flink measures pauses by `System.nanoTime`
(WatermarksWithIdleness).
"""

import time
from collections.abc import Callable

JUMP_MIN_MS = 2000
"""The wall clock may run ahead of the monotonic one, or behind it, by this much in between."""
BELIEVED_AFTER_MS = 60_000
"""A jump of the wall clock that has lasted for so long is a clock that was put right."""
SLOWED_BY = 2
"""A clock that is ahead of the wall clock goes this many times slower, until it is right again."""


def wall_ms() -> int:
    """Return the time in ms since 1970, by the clock of the machine."""
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """Return the time of a clock that nobody sets, in ms."""
    return time.monotonic_ns() // 1_000_000


class SteadyClock:
    """A clock that begins at the wall clock's time, and then ignores jumps of the wall clock.

    Args:
        wall: the wall clock.
        monotonic: a clock that nobody sets.
    """

    def __init__(
        self, wall: Callable[[], int] = wall_ms, monotonic: Callable[[], int] = monotonic_ms
    ) -> None:
        self._monotonic = monotonic
        self._offset_ms = wall() - monotonic()

    def now_ms(self, known_ms: int = 0) -> int:
        """Return the time.

        Args:
            known_ms: a time that this clock had, perhaps in an earlier run: it goes on from there,
                if the wall clock was put back since.
        """
        now_ms = self._monotonic() + self._offset_ms
        if known_ms > now_ms:
            self._offset_ms += known_ms - now_ms
        return max(now_ms, known_ms)


class EpochClock:
    """The epochs' clock: the wall clock without jumps, which never goes back.

    Args:
        wall: the wall clock.
        monotonic: a clock that nobody sets.
    """

    def __init__(
        self, wall: Callable[[], int] = wall_ms, monotonic: Callable[[], int] = monotonic_ms
    ) -> None:
        self._wall, self._monotonic = wall, monotonic
        self._now_ms, self._read_at_ms = wall(), monotonic()
        self._jump_ms: int | None = None
        self._jumped_at_ms = 0

    def now_ms(self) -> int:
        """Return the time of an epoch that begins now."""
        wall, read_at_ms = self._wall(), self._monotonic()
        passed_ms, self._read_at_ms = read_at_ms - self._read_at_ms, read_at_ms
        jump_ms = wall - (self._now_ms + passed_ms)
        if abs(jump_ms) < JUMP_MIN_MS:
            self._jump_ms = None
            self._now_ms = max(self._now_ms, wall)
        elif not self._has_lasted(jump_ms, read_at_ms):
            self._now_ms += passed_ms
        elif jump_ms > 0:
            self._now_ms = wall
        else:
            self._now_ms += passed_ms // SLOWED_BY
            self._jump_ms = wall - self._now_ms
        return self._now_ms

    def _has_lasted(self, jump_ms: int, read_at_ms: int) -> bool:
        """True if the wall clock has been this far away for long enough to be believed."""
        if self._jump_ms is None or abs(jump_ms - self._jump_ms) >= JUMP_MIN_MS:
            self._jump_ms, self._jumped_at_ms = jump_ms, read_at_ms
        return read_at_ms - self._jumped_at_ms >= BELIEVED_AFTER_MS
