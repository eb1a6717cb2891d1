"""The timers of a vectorised function, by time: `key group | 0xFC | time | key`."""

import struct

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.state.entry_ids import TIMERS_BY_TIME
from tallystick.state.key_bytes import bodies
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.view import Overlay

"""Behind the key group of a timer by time; ids of states are smaller."""

_GROUP = struct.Struct(">H")
_TIME = struct.Struct(">Q")
_SIGN = 1 << 63


def time_keys(entries: pa.BinaryArray, times_ms: pa.Int64Array, state_id: int) -> pa.BinaryArray:
    """The entries by time of some keys.

    Args:
        entries: the keys' entries, of any state.
        times_ms: when each is due.
        state_id: of the index.
    """
    words = times_ms.to_numpy().view(np.uint64) ^ np.uint64(_SIGN)
    heads = np.empty(len(words), [("id", np.uint8), ("time", ">u8")])
    heads["id"], heads["time"] = state_id, words
    width = heads.dtype.itemsize
    middle = pa.Array.from_buffers(pa.binary(width), len(words), [None, pa.py_buffer(heads)])
    return pc.binary_join_element_wise(
        pc.binary_slice(entries, 0, _GROUP.size),
        middle.cast(pa.binary()),
        bodies(entries),
        b"",
    )


def due_keys(
    overlay: Overlay, groups: KeyGroupRange, until_ms: int, state_id: int
) -> pa.BinaryArray:
    """The keys with a committed timer at or before a moment, as entries of a state, sorted.

    One seek per key group that has entries: the first that is not due says which group is next.
    """
    found: list[bytes] = []
    group = groups.first
    end = _GROUP.pack(groups.last + 1)
    while group <= groups.last:
        head = _GROUP.pack(group) + bytes([TIMERS_BY_TIME])
        limit = head + _TIME.pack(until_ms + _SIGN)
        behind = None
        for key, _ in overlay.committed(head, end):
            if key[: len(limit)] > limit:
                behind = key
                break
            found.append(key[: _GROUP.size] + bytes([state_id]) + key[len(limit) :])
        if behind is None:
            break
        next_group = int(_GROUP.unpack_from(behind)[0])
        is_ahead = next_group > group and behind[_GROUP.size] <= TIMERS_BY_TIME
        group = next_group if is_ahead else next_group + 1
    return pa.array(sorted(found), pa.binary())
