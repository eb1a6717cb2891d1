"""What is due when: entries in the order of time, per key group.

    key group | id | time, highest byte first, its sign flipped | what is due

Invariant: nothing is missed: whatever is put in stands there until it is taken out.
"""

import struct

from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.view import Overlay

_TIME = struct.Struct(">Q")
_SIGN = 1 << 63
_GROUP = struct.Struct(">H")
TIME_SIZE = 8
_HEADER_SIZE = 3
TIME_MIN, TIME_MAX = -_SIGN, _SIGN - 1


def time_bytes(time_ms: int) -> bytes:
    """A moment as bytes whose order is that of time."""
    return _TIME.pack(time_ms + _SIGN)


def time_of(data: bytes) -> int:
    """The inverse of `time_bytes`."""
    return int(_TIME.unpack(data)[0]) - _SIGN


class TimeIndex:
    """The index of one task in one epoch.

    Args:
        overlay: where its entries are.
        state_id: the byte that its entries have behind the key group.
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
        """Take it out; nothing happens if it is not there."""
        key = group + self._id + time_bytes(time_ms) + what
        self._overlay.put(key, None)
        self._changed[key] = False

    def due(self, groups: KeyGroupRange, until_ms: int) -> list[tuple[int, bytes, bytes]]:
        """What is due at or before a moment: (time, what, group), by time and then by `what`."""
        found = {key for key in self._committed(groups, until_ms) if self._changed.get(key, True)}
        for key, is_there in self._changed.items():
            if is_there and time_of(key[_HEADER_SIZE : _HEADER_SIZE + TIME_SIZE]) <= until_ms:
                found.add(key)
        parts = (
            (
                time_of(key[_HEADER_SIZE : _HEADER_SIZE + TIME_SIZE]),
                key[_HEADER_SIZE + TIME_SIZE :],
                key[: _GROUP.size],
            )
            for key in found
        )
        return sorted(parts)

    def _committed(self, groups: KeyGroupRange, until_ms: int) -> list[bytes]:
        """The committed entries that are due.

        At most two seeks per key group that has any state: the entry behind the due ones says
        which group is next, so empty groups cost nothing however many there are.
        """
        found: list[bytes] = []
        end = _GROUP.pack(groups.last + 1)
        group = groups.first
        while group <= groups.last:
            head = _GROUP.pack(group) + self._id
            limit = head + time_bytes(until_ms)
            behind = None
            for key, _ in self._overlay.committed(head, end):
                if key[: len(limit)] > limit:
                    behind = key
                    break
                found.append(key)
            if behind is None:
                break
            next_group = int(_GROUP.unpack_from(behind)[0])
            is_ahead = next_group > group and behind[_GROUP.size : _HEADER_SIZE] <= self._id
            group = next_group if is_ahead else next_group + 1
        return found
