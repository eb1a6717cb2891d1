"""Panes in the state: accumulators per key and stretch of time, each with one timer.

    key group | state id | key | start            accumulators
    key group | FC | time | key | start           the pane's timer

The key group is that of the key alone, so a key's panes move together when a step is rescaled.
Starts are microseconds, stored like a column of the key, so that panes are in the order of time.
"""

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tallystick.codec.spans import spans_of
from tallystick.state.entries import (
    ID_AT,
    REST_AT,
    TIME_SIZE,
    TIMERS_BY_TIME,
    distinct_keys,
    due_entries,
    time_keys,
)
from tallystick.state.functions.folds import Folds
from tallystick.state.functions.keyed_batch import Int64Array
from tallystick.state.functions.processing import PANES, StateDeclaration, Work
from tallystick.state.key_groups import key_groups_of
from tallystick.state.keys import KeyCodec, bodies, entry_keys, tails
from tallystick.state.row_codec import ColumnsCodec, changed_rows
from tallystick.state.schema import text_of

STATE = "state"
"""The name of the state; other vectorised functions use it too, so that none takes its place."""
START = "$start"

_SIGN = np.uint64(1 << 63)
_DENSE = 4


class Pairs(NamedTuple):
    """Distinct pairs of a key and a moment, sorted, and the number of each line's pair."""

    numbers: NDArray[np.int32]
    codes: Int64Array
    moments: Int64Array


def numbered(codes: NDArray[np.int64] | NDArray[np.int32], moments: Int64Array) -> Pairs:
    """Number the distinct pairs of key and moment in lines.

    Args:
        codes: the key of each line.
        moments: of each line; mostly far fewer distinct ones than lines.
    """
    if not len(codes):
        nothing = np.zeros(0, np.int64)
        return Pairs(np.zeros(0, np.int32), nothing, nothing)
    low, key_count = int(moments.min()), int(codes.max()) + 1
    places, width, scale = moments - low, int(moments.max()) - low + 1, 1
    step = int(np.gcd.reduce(places)) if width > 1 else 1
    if step > 1:
        places, width, scale = places // step, (width - 1) // step + 1, step
    if width * key_count > _DENSE * len(codes) + (1 << 16):
        distinct, places = np.unique(moments, return_inverse=True)
        width = len(distinct)
    else:
        distinct = low + scale * np.arange(width)
    pairs = codes.astype(np.int64) * width + places
    if width * key_count <= _DENSE * len(codes) + (1 << 16):
        is_there = np.zeros(width * key_count, np.bool_)
        is_there[pairs] = True
        distinct_pairs = np.flatnonzero(is_there)
        numbers = (np.cumsum(is_there, dtype=np.int32) - 1)[pairs].astype(np.int32)
    else:
        distinct_pairs, inverse = np.unique(pairs, return_inverse=True)
        numbers = inverse.astype(np.int32)
    return Pairs(numbers, distinct_pairs // width, distinct[distinct_pairs % width])


class Due(NamedTuple):
    """Panes whose timers are due, in the order of their entries.

    Args:
        entries: their keys in the state.
        keys: their keys' columns.
        starts: of each.
        times_ms: when each was to be due.
    """

    entries: pa.BinaryArray
    keys: pa.RecordBatch
    starts: Int64Array
    times_ms: Int64Array


class Panes:
    """The panes of a task in an epoch.

    Args:
        work: of the task.
        codec: of the accumulators; in each pane one is not null.
    """

    def __init__(self, work: Work, codec: ColumnsCodec) -> None:
        self._work, self._codec = work, codec
        self._key = _pane_key(work.key)
        self._id = work.fields[STATE].state_id

    def distinct_keys(self, rows: pa.RecordBatch) -> tuple[NDArray[np.int32], pa.RecordBatch]:
        """Return the number of each row's key, and the keys, in the order of their entries."""
        work = self._work
        codes, keys = distinct_keys(rows, work.key, work.max_parallelism, self._id)
        return codes, keys.columns

    def entries(self, keys: pa.RecordBatch, starts: Int64Array) -> pa.BinaryArray:
        """Return the entry of each pane, by its key and start."""
        groups = key_groups_of(self._work.key.hash_codes(keys), self._work.max_parallelism)
        panes = pa.RecordBatch.from_arrays(
            [*keys.columns, pa.array(starts)], schema=self._key.schema
        )
        return entry_keys(groups, self._id, self._key.encode(panes))

    def read(self, entries: pa.BinaryArray) -> tuple[pa.BinaryArray, pa.RecordBatch]:
        """Read entries; return each committed value or null, and the columns of the values."""
        values = self._work.overlay.get_many(entries)
        return values, self._codec.decode(values)

    def due(self, until_ms: int | None) -> Due | None:
        """Return the panes with timers up to a moment, or None."""
        if until_ms is None:
            return None
        due_keys = list(
            due_entries(self._work.overlay, self._work.groups, until_ms, TIMERS_BY_TIME)
        )
        if not due_keys:
            return None
        timers = pa.array(due_keys, pa.binary())
        spans = spans_of(timers, "timer")
        words = spans.data[spans.starts[:, None] + np.arange(REST_AT, REST_AT + TIME_SIZE)]
        times = (np.ascontiguousarray(words).view(">u8").ravel().astype(np.uint64) ^ _SIGN).view(
            np.int64
        )
        heads = spans.data[spans.starts[:, None] + np.arange(ID_AT)]
        groups = np.ascontiguousarray(heads).view(">u2").ravel().astype(np.int32)
        entries = entry_keys(groups, self._id, tails(timers, REST_AT + TIME_SIZE))
        order = pc.sort_indices(entries)
        entries = entries.take(order)
        columns = self._key.decode(bodies(entries))
        keys = columns.select(self._work.key.names)
        starts: Int64Array = columns.column(START).to_numpy()
        return Due(entries, keys, starts, times[order.to_numpy()])

    def put(self, entries: pa.BinaryArray, before: pa.BinaryArray, after: pa.RecordBatch) -> None:
        """Write the panes that changed.

        Args:
            entries: of the panes; no pane is written twice in an epoch.
            before: their committed values.
            after: their columns now.
        """
        values = self._codec.encode(after)
        changed = pa.array(changed_rows(before, values))
        self._work.overlay.put_many(entries.filter(changed), values.filter(changed))

    def delete(self, entries: pa.BinaryArray) -> None:
        """Delete panes that exist."""
        self._work.overlay.put_many(entries, pa.nulls(len(entries), pa.binary()))

    def set_timers(self, entries: pa.BinaryArray, times_ms: Int64Array) -> None:
        """Add a timer to each pane."""
        timers = time_keys(entries, pa.array(times_ms), TIMERS_BY_TIME)
        self._work.overlay.put_many(timers, pa.array([b""] * len(timers), pa.binary()))

    def unset_timers(self, entries: pa.BinaryArray, times_ms: Int64Array) -> None:
        """Delete the timer of each pane."""
        self.delete(time_keys(entries, pa.array(times_ms), TIMERS_BY_TIME))


def declared(what: str, codec: ColumnsCodec, folds: Folds) -> StateDeclaration:
    """Return the declaration of panes.

    Args:
        what: the panes in words; state of panes with other words is refused.
        codec: of the accumulators.
        folds: the aggregates of the accumulators.
    """
    return StateDeclaration(STATE, PANES, what, text_of(codec.schema), meaning=folds.meaning)


def _pane_key(key: KeyCodec) -> KeyCodec:
    return KeyCodec(pa.schema([*key.schema, pa.field(START, pa.int64())]))
