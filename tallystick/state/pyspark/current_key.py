"""The key that a processor works on, and what lies under it: entries, expiries, timers.

    by time:  key group | FC | time, highest byte first, its sign flipped | key
    by key:   key group | FE | key | time

Both are ordinary entries, so a timer is as durable as a value. A timer is its (key, time):
registered twice it fires once. Times to live have an index by time too (`FD`).
"""

import struct

import numpy as np

from tallystick.errors import BrokenInvariantError, StateError
from tallystick.state.catalog import StateField
from tallystick.state.entries import (
    ID_AT,
    REST_AT,
    TIME_MAX,
    TIME_MIN,
    TIME_SIZE,
    TIMERS_BY_KEY,
    TIMERS_BY_TIME,
    TTL_INDEX,
    due_entries,
    time_bytes,
    time_of,
)
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.overlay import Overlay

_EXPIRY = struct.Struct(">q")
_TIME_END = REST_AT + TIME_SIZE


class TimeIndex:
    """The index of one task in one epoch.

    Args:
        overlay: where its entries are.
        state_id: the byte that its entries have after the key group.
    """

    def __init__(self, overlay: Overlay, state_id: int) -> None:
        self._overlay = overlay
        self._id = bytes([state_id])
        self._changed: dict[bytes, bool] = {}

    def put(self, group: bytes, time_ms: int, what: bytes) -> None:
        """Note that something is due at a time."""
        key = group + self._id + time_bytes(time_ms) + what
        self._overlay.put(key, b"")
        self._changed[key] = True

    def remove(self, group: bytes, time_ms: int, what: bytes) -> None:
        """Take it out; nothing happens if there is none."""
        key = group + self._id + time_bytes(time_ms) + what
        self._overlay.put(key, None)
        self._changed[key] = False

    def due(self, groups: KeyGroupRange, until_ms: int) -> list[tuple[int, bytes, bytes]]:
        """Return all that is due at or before a moment, by time: (time, what, group)."""
        committed = due_entries(self._overlay, groups, until_ms, self._id[0])
        found = {key for key in committed if self._changed.get(key, True)}
        found.update(key for key, is_there in self._changed.items() if is_there)
        parts = ((time_of(key[REST_AT:_TIME_END]), key[_TIME_END:], key[:ID_AT]) for key in found)
        return sorted(part for part in parts if part[0] <= until_ms)


class CurrentKey:
    """The key that is being processed; the states of a processor share one.

    Args:
        overlay: None: there is no state to reach, on the driver.
        now_ms: the epoch's timestamp.
    """

    def __init__(self, overlay: Overlay | None, now_ms: int) -> None:
        self._overlay = overlay
        self.now_ms = now_ms
        self.expiries = None if overlay is None else TimeIndex(overlay, TTL_INDEX)
        self.group = self.key = b""
        self.has_key = False

    @property
    def overlay(self) -> Overlay:
        """The state, once a key is being processed.

        Raises:
            StateError: none is: the call came from `init` or `close`.
        """
        if self._overlay is None or not self.has_key:
            raise StateError(
                "state and timers belong to a key: use them in handleInputRows, "
                "handleExpiredTimer and handleInitialState, not in init() or close()"
            )
        return self._overlay

    def go_to(self, group: bytes, key: bytes) -> None:
        """Process this key now."""
        self.group, self.key, self.has_key = group, key, True

    def leave(self) -> None:
        """Process no key from now on."""
        self.has_key = False


class Entries:
    """The entries of one state, those with a time to live with their expiry before the value.

    Args:
        field: of the state.
        current: whose key it is about.
    """

    def __init__(self, field: StateField, current: CurrentKey) -> None:
        self._current = current
        self._id = bytes([field.state_id])
        self._ttl_ms = field.ttl_ms

    def key(self) -> bytes:
        """Return the key of the present key's entry, or the beginning of its entries' keys."""
        current = self._current
        return current.group + self._id + current.key

    def read(self, key: bytes) -> bytes | None:
        """Return the value that was written, if it is still alive."""
        data = self._current.overlay.get(key)
        if not self._ttl_ms or data is None:
            return data
        return data[_EXPIRY.size :] if self._is_alive(data) else None

    def write(self, family: bytes | None, key: bytes, data: bytes, *, is_new: bool = False) -> None:
        """Write an entry, of a family where `walk` is to find it.

        That of the family's own name lives as long as any of the family: others may have been
        written when the time to live was longer.

        Args:
            family: what the keys of the family's entries begin with; None: it belongs to none.
            key: of the entry.
            data: its value.
            is_new: there is no living entry of this key, so none is looked for.
        """
        overlay = self._current.overlay
        if self._ttl_ms:
            expiry = self._current.now_ms + self._ttl_ms
            before = None if is_new else self._forget_expiry(key)
            if before is not None and key == family:
                expiry = max(expiry, before)
            data = _EXPIRY.pack(expiry) + data
            assert self._current.expiries is not None, "an overlay has them"
            self._current.expiries.put(self._current.group, expiry, key[len(self._current.group) :])
        if family is None:
            overlay.put(key, data)
        else:
            overlay.put_in(family, key, data)

    def remove(self, family: bytes | None, key: bytes) -> None:
        """Delete an entry."""
        if self._ttl_ms:
            self._forget_expiry(key)
        if family is None:
            self._current.overlay.put(key, None)
        else:
            self._current.overlay.put_in(family, key, None)

    def _forget_expiry(self, key: bytes) -> int | None:
        """Take an entry out of the index: else each write would leave one there till its expiry."""
        data = self._current.overlay.get(key)
        if data is None:
            return None
        expiry = expiry_of(data)
        assert self._current.expiries is not None, "an overlay has them"
        self._current.expiries.remove(self._current.group, expiry, key[len(self._current.group) :])
        return expiry

    def has_any(self, family: bytes) -> bool:
        """True if a family has a living entry besides that of the family's own name."""
        entries = self._current.overlay.any_order(family)
        return any(key != family and self._is_alive(data) for key, data in entries)

    def walk(self, family: bytes) -> list[tuple[bytes, bytes]]:
        """Return the living entries of a family in the order of their keys."""
        entries = self._current.overlay.entries(family)
        if not self._ttl_ms:
            return entries
        return [(key, data[_EXPIRY.size :]) for key, data in entries if self._is_alive(data)]

    def _is_alive(self, data: bytes) -> bool:
        return not self._ttl_ms or expiry_of(data) > self._current.now_ms


def expiry_of(data: bytes) -> int:
    """Return the time at which an entry with a time to live ends."""
    if len(data) < _EXPIRY.size:
        raise BrokenInvariantError(f"an entry with a TTL has {len(data)} bytes, too few for one")
    return int(_EXPIRY.unpack_from(data)[0])


_BY_KEY = bytes([TIMERS_BY_KEY])


class Timers:
    """The timers of one task in one epoch."""

    def __init__(self, overlay: Overlay, current: CurrentKey) -> None:
        self._current = current
        self._by_time = TimeIndex(overlay, TIMERS_BY_TIME)

    def register(self, time_ms: int) -> None:
        """Set a timer of the present key."""
        time_ms = _checked(time_ms)
        family = self._family()
        self._current.overlay.put_in(family, family + time_bytes(time_ms), b"")
        self._by_time.put(self._current.group, time_ms, self._current.key)

    def delete(self, time_ms: int) -> None:
        """Remove a timer of the present key; nothing happens if there is none."""
        time_ms = _checked(time_ms)
        family = self._family()
        self._current.overlay.put_in(family, family + time_bytes(time_ms), None)
        self._by_time.remove(self._current.group, time_ms, self._current.key)

    def of_key(self) -> list[int]:
        """Return the present key's timers in ascending order; Spark's have no order."""
        return [
            time_of(key[-TIME_SIZE:]) for key, _ in self._current.overlay.entries(self._family())
        ]

    def due(self, groups: KeyGroupRange, until_ms: int) -> list[tuple[int, bytes, bytes]]:
        """Return all timers at or before a moment: (time, key, group) by time, then by key."""
        return self._by_time.due(groups, until_ms)

    def _family(self) -> bytes:
        return self._current.group + _BY_KEY + self._current.key


def _checked(time_ms: int) -> int:
    is_number = isinstance(time_ms, int | np.integer) and not isinstance(time_ms, bool)
    if not is_number or not TIME_MIN <= time_ms <= TIME_MAX:
        raise StateError(f"a timer was given {time_ms!r}: expected milliseconds since 1970, an int")
    return int(time_ms)
