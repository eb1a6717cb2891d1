"""The keys that a join visits in an epoch: keys of new rows, and keys with due timers."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tallystick.state.entries import (
    TIMERS_BY_TIME,
    Keys,
    distinct_keys,
    due_keys,
    keys_of,
    time_keys,
)
from tallystick.state.functions.processing import Work
from tallystick.state.overlay import Overlay

NEVER = (1 << 63) - 1
"""The due time of a key without a timer."""

Int64Array = NDArray[np.int64]


def keys_at_work(work: Work, state_id: int) -> tuple[Int64Array, Keys]:
    """Return the number of each row's key, and the keys: of the rows, and with due timers.

    Args:
        work: of the epoch.
        state_id: of the state whose entries the keys have.
    """
    codes, keys = distinct_keys(work.rows, work.key, work.max_parallelism, state_id)
    until_ms = work.time.watermark_ms
    if until_ms is None:
        return codes.astype(np.int64), keys
    due = due_keys(work.overlay, work.groups, until_ms, state_id)
    due = due.filter(pc.invert(pc.is_in(due, keys.entries)))
    if not len(due):
        return codes.astype(np.int64), keys
    others = keys_of(due, work.key)
    entries = pa.concat_arrays([keys.entries, due])
    order = pc.sort_indices(entries)
    places = np.empty(len(order), np.int64)
    places[order.to_numpy()] = np.arange(len(order))
    pairs = zip(keys.columns.columns, others.columns.columns, strict=True)
    columns = [pa.concat_arrays(pair).take(order) for pair in pairs]
    both = pa.RecordBatch.from_arrays(columns, schema=keys.columns.schema)
    return places[codes], Keys(both, entries.take(order))


def move_timers(
    overlay: Overlay, entries: pa.BinaryArray, before: Int64Array, after: Int64Array
) -> None:
    """Write the changed timers of keys; the time `NEVER` stands for no timer."""
    for times, value in ((before, None), (after, b"")):
        which = np.flatnonzero((before != after) & (times != NEVER))
        owners = entries.take(pa.array(which))
        timers = time_keys(owners, pa.array(times[which]), TIMERS_BY_TIME)
        overlay.put_many(timers, pa.array([value] * len(which), pa.binary()))
