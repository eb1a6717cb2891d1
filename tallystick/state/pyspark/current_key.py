"""The current key of a processor, with the key's entries, expiries and timers.

    by time:  key group | FC | time, highest byte first, its sign flipped | key
    by key:   key group | FE | key | time

Both are ordinary entries, so a timer is as durable as a value. A timer is its (key, time):
registered twice it fires once. Times to live have an index by time too (`FD`).
"""

import struct
from itertools import islice

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
    """An index by time of a task's entries in an epoch.

    Args:
        overlay: holds the entries of the index.
        state_id: the byte after the key group in the index's entries.
    """

    def __init__(self, overlay: Overlay, state_id: int) -> None:
        self._overlay = overlay
        self._id = bytes([state_id])
        self._changed: dict[bytes, bool] = {}

    def put(self, group: bytes, time_ms: int, what: bytes) -> None:
        """Add an item to the index, with its due time."""
        key = group + self._id + time_bytes(time_ms) + what
        self._overlay.put(key, b"")
        self._changed[key] = True

    def remove(self, group: bytes, time_ms: int, what: bytes) -> None:
        """Take an item out of the index; nothing happens if there is none."""
        key = group + self._id + time_bytes(time_ms) + what
        self._overlay.put(key, None)
        self._changed[key] = False

    def due(
        self, groups: KeyGroupRange, until_ms: int, most: int | None = None
    ) -> list[tuple[int, bytes, bytes]]:
        """Return the items due at or before a moment, by time: (time, what, group).

        Args:
            groups: those of the task.
            until_ms: the moment.
            most: of the committed items, by key group; None: all.
        """
        committed = islice(due_entries(self._overlay, groups, until_ms, self._id[0]), most)
        keys = {key for key in committed if self._changed.get(key, True)}
        keys.update(key for key, is_there in self._changed.items() if is_there)
        parts = ((time_of(key[REST_AT:_TIME_END]), key[_TIME_END:], key[:ID_AT]) for key in keys)
        return sorted(part for part in parts if part[0] <= until_ms)


class CurrentKey:
    """The key being processed, shared by all states of a processor.

    Args:
        overlay: None: on the driver, where no state can be reached.
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
            StateError: no key is being processed: the call came from `init` or `close`.
        """
        if self._overlay is None or not self.has_key:
            raise StateError(
                "state and timers belong to a key: use them in handleInputRows, "
                "handleExpiredTimer and handleInitialState, not in init() or close()"
            )
        return self._overlay

    def go_to(self, group: bytes, key: bytes) -> None:
        """Make a key the current key."""
        self.group, self.key, self.has_key = group, key, True

    def leave(self) -> None:
        """Process no key from now on."""
        self.has_key = False


class Entries:
    """The entries of one state; with a time to live, an expiry stands before each value.

    Args:
        field: of the state.
        current: the key whose entries are read and written.
    """

    def __init__(self, field: StateField, current: CurrentKey) -> None:
        self._current = current
        self._id = bytes([field.state_id])
        self._ttl_ms = field.ttl_ms

    def key(self) -> bytes:
        """Return the key of the current key's entry, or the prefix of its entries' keys."""
        current = self._current
        return current.group + self._id + current.key

    def read(self, key: bytes) -> bytes | None:
        """Return the value of an entry; None for a missing or an expired entry."""
        data = self._current.overlay.get(key)
        if not self._ttl_ms or data is None:
            return data
        return data[_EXPIRY.size :] if self._is_alive(data) else None

    def write(self, family: bytes | None, key: bytes, data: bytes, *, is_new: bool = False) -> None:
        """Write an entry, in a family where `walk` is to find it.

        The entry under the family's own key lives as long as any of the family: others may have
        been written when the time to live was longer.

        Args:
            family: the prefix of the keys of the family's entries; None: no family.
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
        """Take an entry's expiry out of the index, and return it; None without an entry.

        Else each write would leave an expiry in the index until its time.
        """
        data = self._current.overlay.get(key)
        if data is None:
            return None
        expiry = expiry_of(data)
        assert self._current.expiries is not None, "an overlay has them"
        self._current.expiries.remove(self._current.group, expiry, key[len(self._current.group) :])
        return expiry

    def has_any(self, family: bytes) -> bool:
        """True if a family has a living entry besides the entry under the family's own key."""
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
    """Return the expiry of an entry with a time to live."""
    if len(data) < _EXPIRY.size:
        raise BrokenInvariantError(f"an entry with a TTL has {len(data)} bytes, too few for one")
    return int(_EXPIRY.unpack_from(data)[0])


_BY_KEY = bytes([TIMERS_BY_KEY])


class Timers:
    """The timers of a task in an epoch, by key and by time."""

    def __init__(self, overlay: Overlay, current: CurrentKey) -> None:
        self._current = current
        self._by_time = TimeIndex(overlay, TIMERS_BY_TIME)

    def register(self, time_ms: int) -> None:
        """Set a timer of the current key."""
        time_ms = _checked(time_ms)
        family = self._family()
        self._current.overlay.put_in(family, family + time_bytes(time_ms), b"")
        self._by_time.put(self._current.group, time_ms, self._current.key)

    def delete(self, time_ms: int) -> None:
        """Remove a timer of the current key; nothing happens if there is none."""
        time_ms = _checked(time_ms)
        family = self._family()
        self._current.overlay.put_in(family, family + time_bytes(time_ms), None)
        self._by_time.remove(self._current.group, time_ms, self._current.key)

    def of_key(self) -> list[int]:
        """Return the current key's timers in ascending order; Spark's have no order."""
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
