"""Timers of keys: by key for the user's calls, by time for what is due.

    by key:   key group | FE | key | time
    by time:  key group | FC | time | key

Both are ordinary entries, so a timer is as durable as a value. A timer is its (key, time):
registered twice it fires once.
"""

import numpy as np

from tallystick.errors import StateError
from tallystick.processors.place import Place
from tallystick.processors.time_index import (
    TIME_MAX,
    TIME_MIN,
    TIME_SIZE,
    TimeIndex,
    time_bytes,
    time_of,
)
from tallystick.state.entry_ids import TIMERS_BY_KEY, TIMERS_BY_TIME
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.view import Overlay

_BY_KEY = bytes([TIMERS_BY_KEY])


class Timers:
    """The timers of one task in one epoch."""

    def __init__(self, overlay: Overlay, place: Place) -> None:
        self._place = place
        self._by_time = TimeIndex(overlay, TIMERS_BY_TIME)

    def register(self, time_ms: int) -> None:
        """Set a timer of the present key."""
        time_ms = _checked(time_ms)
        family = self._family()
        self._place.overlay.put_in(family, family + time_bytes(time_ms), b"")
        self._by_time.put(self._place.group, time_ms, self._place.key)

    def delete(self, time_ms: int) -> None:
        """Remove a timer of the present key; nothing happens if there is none."""
        time_ms = _checked(time_ms)
        family = self._family()
        self._place.overlay.put_in(family, family + time_bytes(time_ms), None)
        self._by_time.remove(self._place.group, time_ms, self._place.key)

    def of_key(self) -> list[int]:
        """The present key's, in ascending order; Spark's have none."""
        return [time_of(key[-TIME_SIZE:]) for key, _ in self._place.overlay.entries(self._family())]

    def due(self, groups: KeyGroupRange, until_ms: int) -> list[tuple[int, bytes, bytes]]:
        """All timers at or before a moment: (time, key, group) by time, then by key."""
        return self._by_time.due(groups, until_ms)

    def _family(self) -> bytes:
        return self._place.group + _BY_KEY + self._place.key


def _checked(time_ms: int) -> int:
    is_number = isinstance(time_ms, int | np.integer) and not isinstance(time_ms, bool)
    if not is_number or not TIME_MIN <= time_ms <= TIME_MAX:
        raise StateError(f"a timer was given {time_ms!r}: expected milliseconds since 1970, an int")
    return int(time_ms)
