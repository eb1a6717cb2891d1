"""State entries as columns: the layout of keys, indexes by time, and moves to other key groups.

An entry's key begins with the key group (2 bytes) and an id (1 byte). Ids from 1 on are a step's
states (`StateField.state_id`); the greatest ids are indexes:

    0xFC  timers by time   key group | FC | time | key
    0xFD  times to live    key group | FD | expiry | entry key without its group
    0xFE  timers by key    key group | FE | key | time
"""

import struct
from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tallystick.codec.spans import spans_of
from tallystick.state.key_groups import KeyGroupRange, key_groups_of
from tallystick.state.keys import KeyCodec, bodies, entry_keys, tails
from tallystick.state.overlay import ENTRIES, Overlay, one_batch

TIMERS_BY_TIME = 0xFC
TTL_INDEX = 0xFD
TIMERS_BY_KEY = 0xFE
INDEXES = frozenset({TIMERS_BY_TIME, TTL_INDEX, TIMERS_BY_KEY})

ID_AT = 2
"""The offset of the id in an entry's key."""
REST_AT = 3
TIME_SIZE = 8
TIME_MIN, TIME_MAX = -(1 << 63), (1 << 63) - 1

_GROUP = struct.Struct(">H")
_TIME = struct.Struct(">Q")
_SIGN = 1 << 63


def ids_of(keys: pa.BinaryArray) -> NDArray[np.uint8]:
    """Return the id in each entry's key."""
    spans = spans_of(keys, "key")
    ids: NDArray[np.uint8] = spans.data[spans.starts + ID_AT]
    return ids


def living(entries: pa.RecordBatch, state_ids: Collection[int]) -> pa.RecordBatch:
    """Drop the entries of deleted states; keep the entries of given states and of the indexes.

    Args:
        entries: `ENTRIES`.
        state_ids: the ids in use.
    """
    is_living = np.isin(ids_of(entries.column(0)), [*state_ids, *INDEXES])
    return entries if is_living.all() else entries.filter(pa.array(is_living))


class Keys(NamedTuple):
    """Distinct keys in the order of their entries: by key group, then by value.

    Args:
        columns: the key's columns.
        entries: their keys in the state.
    """

    columns: pa.RecordBatch
    entries: pa.BinaryArray


def distinct_keys(
    rows: pa.RecordBatch, key: KeyCodec, max_parallelism: int, state_id: int
) -> tuple[NDArray[np.int32], Keys]:
    """Number the distinct keys of rows; return the number of each row's key, and the keys."""
    columns = key.columns(rows)
    if len(columns) == 1 and not pa.types.is_floating(columns[0].type):
        coded = columns[0].dictionary_encode(null_encoding="encode")
        key_columns = pa.RecordBatch.from_arrays([coded.dictionary], schema=key.schema)
        key_bytes = key.encode(key_columns)
    else:  # equal keys have equal bytes, which Arrow does not know of NaN and -0.0
        coded = key.encode(rows).dictionary_encode()
        key_bytes = coded.dictionary
        key_columns = key.decode(key_bytes)
    groups = key_groups_of(key.hash_codes(key_columns), max_parallelism)
    entries = entry_keys(groups, state_id, key_bytes)
    order = pc.sort_indices(entries)
    number = np.empty(len(order), np.int32)
    number[order.to_numpy()] = np.arange(len(order), dtype=np.int32)
    return number[coded.indices.to_numpy()], Keys(key_columns.take(order), entries.take(order))


def keys_of(entries: pa.BinaryArray, key: KeyCodec) -> Keys:
    """Decode the keys of sorted entries."""
    return Keys(key.decode(bodies(entries)), entries)


def time_bytes(time_ms: int) -> bytes:
    """Encode a moment as bytes that sort in the order of time."""
    return _TIME.pack(time_ms + _SIGN)


def time_of(data: bytes) -> int:
    """Decode a moment from the bytes of `time_bytes`."""
    return int(_TIME.unpack(data)[0]) - _SIGN


def times_in(keys: pa.BinaryArray, at: int) -> NDArray[np.int64]:
    """Decode the moment that each key has from an offset on, in the bytes of `time_bytes`."""
    width = pa.binary(TIME_SIZE)
    moments = pc.binary_slice(keys, at, at + TIME_SIZE).cast(width)
    words = np.frombuffer(moments.buffers()[1] or b"", ">u8", len(keys), moments.offset * TIME_SIZE)
    times: NDArray[np.int64] = (words.astype(np.uint64) ^ np.uint64(_SIGN)).view(np.int64)
    return times


def time_keys(entries: pa.BinaryArray, times_ms: pa.Int64Array, state_id: int) -> pa.BinaryArray:
    """Return the entries of some keys in an index by time.

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
        pc.binary_slice(entries, 0, _GROUP.size), middle.cast(pa.binary()), bodies(entries), b""
    )


def due_entries(
    overlay: Overlay, groups: KeyGroupRange, until_ms: int, index_id: int
) -> Iterator[bytes]:
    """Yield the keys of the committed entries of an index by time, up to a moment.

    At most two seeks per key group that has any state: the entry after the due ones says which
    group is next, so empty groups cost nothing however many there are.
    """
    group, end = groups.first, _GROUP.pack(groups.last + 1)
    while group <= groups.last:
        head = _GROUP.pack(group) + bytes([index_id])
        limit = head + time_bytes(until_ms)
        for key, _ in overlay.committed(head, end):
            if key[: len(limit)] > limit:
                next_group = int(_GROUP.unpack_from(key)[0])
                is_before_index = key[ID_AT] <= index_id
                break
            yield key
        else:
            return
        group = next_group if next_group > group and is_before_index else next_group + 1


def due_keys(
    overlay: Overlay, groups: KeyGroupRange, until_ms: int, state_id: int
) -> pa.BinaryArray:
    """Return the keys with a committed timer up to a moment, as entries of a state, sorted."""
    own, time_end = bytes([state_id]), REST_AT + TIME_SIZE
    due = due_entries(overlay, groups, until_ms, TIMERS_BY_TIME)
    return pa.array(sorted(key[:ID_AT] + own + key[time_end:] for key in due), pa.binary())


KEY_AT = {TIMERS_BY_TIME: REST_AT + TIME_SIZE, TTL_INDEX: REST_AT + TIME_SIZE + 1}
"""The offset of the step's key in entries of indexes by time: after the time, in the index of
expiries also after the id of the state. In all other entries the key follows the id."""


def regrouped(entries: pa.RecordBatch, codec: KeyCodec, max_parallelism: int) -> pa.RecordBatch:
    """Move entries to the key groups of another `max_parallelism`.

    Args:
        entries: `ENTRIES`.
        codec: of the step's key.
        max_parallelism: the new number of key groups.

    Returns:
        The entries, sorted by key.

    Raises:
        ManifestError: an entry's key is not of the codec's columns.
    """
    ids = ids_of(entries.column(0))
    parts = []
    for state_id in np.unique(ids).tolist():
        keys, values = (column.filter(pa.array(ids == state_id)) for column in entries.columns)
        rows, _ = codec.decode_start(tails(keys, KEY_AT.get(state_id, REST_AT)))
        groups = key_groups_of(codec.hash_codes(rows), max_parallelism)
        moved = entry_keys(groups, state_id, tails(keys, REST_AT))
        parts.append(pa.RecordBatch.from_arrays([moved, values], schema=ENTRIES))
    together = pa.Table.from_batches(parts, ENTRIES).combine_chunks()
    ordered = together.take(pc.sort_indices(together, sort_keys=[("key", "ascending")]))
    return one_batch(ordered, "entries in other key groups", "migrate to more key groups")
