"""Where a processor is: the key whose state its calls mean, and the moment of the epoch."""

import struct

from tallystick.errors import BrokenInvariantError, StateError
from tallystick.processors.time_index import TimeIndex
from tallystick.state.entry_ids import TTL_INDEX
from tallystick.state.handles import StateField
from tallystick.state.view import Overlay

_EXPIRY = struct.Struct(">q")


class Place:
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
        """Where state is, once a key is being processed.

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
        """Process no key any more."""
        self.has_key = False


class Entries:
    """The entries of one state, those with a time to live with their expiry before the value.

    Args:
        field: of the state.
        place: whose key it is about.
    """

    def __init__(self, field: StateField, place: Place) -> None:
        self._place = place
        self._id = bytes([field.state_id])
        self._ttl_ms = field.ttl_ms

    def key(self) -> bytes:
        """Of the entry, or the beginning of the entries, of the present key."""
        place = self._place
        return place.group + self._id + place.key

    def read(self, key: bytes) -> bytes | None:
        """What was written, if it is still alive."""
        data = self._place.overlay.get(key)
        return self._alive(data) if self._ttl_ms and data is not None else data

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
        overlay = self._place.overlay
        if self._ttl_ms:
            expiry = self._place.now_ms + self._ttl_ms
            before = None if is_new else self._forget_expiry(key)
            if before is not None and key == family:
                expiry = max(expiry, before)
            data = _EXPIRY.pack(expiry) + data
            assert self._place.expiries is not None, "an overlay has them"
            self._place.expiries.put(self._place.group, expiry, key[len(self._place.group) :])
        if family is None:
            overlay.put(key, data)
        else:
            overlay.put_in(family, key, data)

    def remove(self, family: bytes | None, key: bytes) -> None:
        """Delete an entry."""
        if self._ttl_ms:
            self._forget_expiry(key)
        if family is None:
            self._place.overlay.put(key, None)
        else:
            self._place.overlay.put_in(family, key, None)

    def _forget_expiry(self, key: bytes) -> int | None:
        """Take an entry out of the index: else each write would leave one there till its expiry."""
        data = self._place.overlay.get(key)
        if data is None:
            return None
        expiry = expiry_of(data)
        assert self._place.expiries is not None, "an overlay has them"
        self._place.expiries.remove(self._place.group, expiry, key[len(self._place.group) :])
        return expiry

    def has_any(self, family: bytes) -> bool:
        """Whether a family has a living entry besides that of the family's own name."""
        entries = self._place.overlay.any_order(family)
        return any(key != family and self._is_alive(data) for key, data in entries)

    def walk(self, family: bytes) -> list[tuple[bytes, bytes]]:
        """The living entries of a family in the order of their keys."""
        entries = self._place.overlay.entries(family)
        if not self._ttl_ms:
            return entries
        return [(key, data[_EXPIRY.size :]) for key, data in entries if self._is_alive(data)]

    def _is_alive(self, data: bytes) -> bool:
        return not self._ttl_ms or expiry_of(data) > self._place.now_ms

    def _alive(self, data: bytes) -> bytes | None:
        return data[_EXPIRY.size :] if self._is_alive(data) else None


def expiry_of(data: bytes) -> int:
    """When an entry with a time to live ends."""
    if len(data) < _EXPIRY.size:
        raise BrokenInvariantError(f"an entry with a TTL has {len(data)} bytes, too few for one")
    return int(_EXPIRY.unpack_from(data)[0])
