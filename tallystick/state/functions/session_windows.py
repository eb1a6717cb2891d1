"""Aggregates per key and session.

A key has an entry with the bounds of its sessions; each session is a pane that begins with its
first row. Bounds are small, so an epoch reads the bounds of all its keys, and then reads only the
sessions that it needs:

    rows, and the bounds of their keys' sessions ─► sessions, merged ─► accumulators of those that
    rows touch: read, put together, written under the start that they have now

Invariant: at the end of an epoch the bounds of a key agree with its panes, and a pane's timer with
the pane's column `$timer`. A due pane that no bounds name is deleted with its timer.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tallystick.state.entries import distinct_keys
from tallystick.state.functions import fold_kernels
from tallystick.state.functions.folds import LATEST, picked
from tallystick.state.functions.keyed_batch import Int64Array
from tallystick.state.functions.processing import (
    COLUMNS,
    EVENT_TIME,
    SideRows,
    StateDeclaration,
    Work,
)
from tallystick.state.functions.window_engine import (
    Due,
    Panes,
    WindowFunction,
    numbered,
    panes_declaration,
)
from tallystick.state.functions.windows import (
    NEVER,
    US_PER_MS,
    WINDOW_END,
    Sessions,
)
from tallystick.state.keys import KeyCodec
from tallystick.state.numpy_columns import explode, lists_of
from tallystick.state.row_codec import ColumnsCodec, changed_rows
from tallystick.state.schema import text_of

BOUNDS = "sessions"
_BOUNDS_CODEC = ColumnsCodec(
    pa.schema([(name, pa.list_(pa.int64())) for name in ("session_starts", "session_ends")])
)
"""The first and the last row's time of each session of a key, in microseconds."""
SESSION_END, _TIMER = pa.field("$end", pa.int64()), pa.field("$timer", pa.int64())

Output = Iterator[pa.RecordBatch | SideRows]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class SessionFunction(WindowFunction):
    """Aggregates over sessions, as a processor.

    Args:
        sessions: the windows.
    """

    sessions: Sessions = field(kw_only=True)

    @cached_property
    def codec(self) -> ColumnsCodec:
        """The storage format of a session's accumulators, last row's time and timer."""
        return ColumnsCodec(pa.schema([SESSION_END, _TIMER, *self.folds.schema]))

    def declared(self, key: KeyCodec) -> tuple[StateDeclaration, ...]:
        """Return the state of the sessions, and of the bounds of each key's sessions."""
        bounds = StateDeclaration(BOUNDS, COLUMNS, "", text_of(_BOUNDS_CODEC.schema))
        return (panes_declaration(self.sessions.text, self.codec, self.folds), bounds)

    def lags_ms(self, key: Collection[str], times: Mapping[str, int]) -> Mapping[str, int] | None:
        """See `PutsOutTimes`; a session may have begun at any time."""
        if self.time_mode != EVENT_TIME:
            return None
        gap_ms = -(-self.sessions.gap_us // US_PER_MS)
        return {**dict.fromkeys(picked(self.folds.picks, times, LATEST), gap_ms), WINDOW_END: 0}

    def run(self, work: Work) -> Output:
        """See `Processor.run`."""
        panes = Panes(work, self.codec)
        due = panes.due(self.clock.until_ms(work.time))
        if due is not None or work.rows.num_rows:
            yield from _Epoch(self, work, panes).run(due)


@dataclass(frozen=True)
class _Bounds:
    """The bounds of sessions, in the order of their keys and starts."""

    codes: Int64Array
    starts: Int64Array
    ends: Int64Array

    def filter(self, mask: BoolArray) -> "_Bounds":
        return _Bounds(self.codes[mask], self.starts[mask], self.ends[mask])


@dataclass(frozen=True)
class _Panes:
    """Sessions with the columns of their panes, as committed or to be written.

    Args:
        codes, starts: the key and the start of each session.
        columns: of `SessionFunction.codec`.
    """

    codes: Int64Array
    starts: Int64Array
    columns: pa.RecordBatch

    def column(self, field: pa.Field) -> Int64Array:
        values: Int64Array = self.columns.column(field.name).to_numpy()
        return values

    def filter(self, mask: BoolArray) -> "_Panes":
        return _Panes(self.codes[mask], self.starts[mask], self.columns.filter(pa.array(mask)))

    def joined(self, other: "_Panes") -> "_Panes":
        columns = pa.concat_batches([self.columns, other.columns])
        codes = np.concatenate([self.codes, other.codes])
        starts = np.concatenate([self.starts, other.starts])
        order = np.lexsort((starts, codes))
        return _Panes(codes[order], starts[order], columns.take(pa.array(order)))


class _Epoch:
    """The work of a task on sessions in an epoch."""

    def __init__(self, function: SessionFunction, work: Work, panes: Panes) -> None:
        self._function, self._work, self._panes = function, work, panes
        self._folds, self._gap = function.folds, function.sessions.gap_us
        closed, gone = function.clock.closed_us(work.time), function.clock.gone_us(work.time)
        # A row right at the end joins a session, so one closes a millisecond later than a window.
        self._closed = NEVER if closed is None else closed - US_PER_MS
        self._gone = NEVER if gone is None else gone - US_PER_MS

    def run(self, due: Due | None) -> Output:
        """Close sessions, then take the rows in."""
        work = self._work
        keys_of = [work.rows.select(work.key.names)] + ([] if due is None else [due.keys])
        codes, keys = distinct_keys(
            pa.concat_batches(keys_of), work.key, work.max_parallelism, self._bounds_id
        )
        row_codes = codes[: work.rows.num_rows].astype(np.int64)
        values = work.overlay.get_many(keys.entries)
        bounds = _BOUNDS_CODEC.decode(values)
        of_key, held_bounds = explode(bounds.columns)
        committed = _Bounds(of_key, *(column.to_numpy() for column in held_bounds))
        is_gone = committed.ends + self._gap <= self._gone

        times = self._function.clock.times_us(work) if len(row_codes) else committed.starts[:0]
        merged = self._merged(committed.filter(~is_gone), row_codes, times)
        rows, late = work.rows, merged.is_late[merged.of_rows]
        if late.any():
            yield from self._function.clock.late_rows(work, rows.filter(pa.array(late)))
            rows, times = rows.filter(pa.array(~late)), times[~late]
        of_rows = merged.of_rows[~late]

        of_held = np.full(len(committed.codes), -1, np.int64)
        of_held[~is_gone] = merged.of_held
        is_changed = np.zeros(len(merged.codes) + 1, np.bool_)
        is_changed[of_rows] = True
        in_changed = is_changed[of_held]  # the last element, never true, is for gone sessions
        is_due = self._are_due(committed, due, codes[work.rows.num_rows :])
        # Gone sessions are due, unless the lateness was longer before: they go with the rest.
        is_read = is_due | in_changed | is_gone
        before, entries, texts = self._read(committed.filter(is_read), keys.columns)
        yield from self._close(before.filter(is_due[is_read]), keys.columns)

        changed = self._changed(
            merged, is_changed[:-1], rows, times, of_rows, before, of_held[is_read], keys.columns
        )
        is_kept = ~is_gone[is_read] & ~in_changed[is_read]
        after = changed.joined(before.filter(is_kept))
        self._write(before, entries, texts, self._timed(after), keys.columns)
        is_left = ~merged.is_late
        self._write_bounds(
            keys.entries,
            values,
            _Bounds(merged.codes[is_left], merged.starts[is_left], merged.ends[is_left]),
        )
        yield from self._put_out(changed, keys.columns)

    @property
    def _bounds_id(self) -> int:
        return self._work.fields[BOUNDS].state_id

    def _merged(self, committed: _Bounds, row_codes: Int64Array, times: Int64Array) -> "_Merge":
        """Merge committed sessions and new rows that are at most a gap apart."""
        codes = np.concatenate([committed.codes, row_codes])
        starts, ends = (
            np.concatenate([committed.starts, times]),
            np.concatenate([committed.ends, times]),
        )
        order = np.lexsort((starts, codes))
        numbers = np.empty(len(order), np.int64)
        ordered = codes[order], starts[order], ends[order]
        count = fold_kernels.session_numbers(*ordered, self._gap, numbers)
        firsts = np.searchsorted(numbers, np.arange(count))
        latest = np.maximum.reduceat(ordered[2], firsts) if count else ends[:0]
        number_of = np.empty(len(order), np.int64)
        number_of[order] = numbers
        return _Merge(
            ordered[0][firsts],
            ordered[1][firsts],
            latest,
            latest + self._gap <= self._gone,
            number_of[: len(committed.codes)],
            number_of[len(committed.codes) :],
        )

    def _are_due(
        self, committed: _Bounds, due: Due | None, due_codes: NDArray[np.int32]
    ) -> BoolArray:
        """Return a mask of the due sessions, and delete due panes without a session.

        Release 0.1.0 left such panes when `allowed_lateness` was made smaller.
        """
        if due is None:
            return np.zeros(len(committed.codes), np.bool_)
        codes = np.concatenate([committed.codes, due_codes])
        pairs = numbered(codes, np.concatenate([committed.starts, due.starts]))
        is_due = np.zeros(len(pairs.codes), np.bool_)
        is_due[pairs.numbers[len(committed.codes) :]] = True
        of_sessions, of_due = np.split(pairs.numbers, [len(committed.codes)])
        strays = ~np.isin(of_due, of_sessions)
        if strays.any():
            entries = due.entries.filter(pa.array(strays))
            self._panes.delete(entries)
            self._panes.unset_timers(entries, due.times_ms[strays])
        which: BoolArray = is_due[of_sessions]
        return which

    def _read(
        self, sessions: _Bounds, keys: pa.RecordBatch
    ) -> tuple[_Panes, pa.BinaryArray, pa.BinaryArray]:
        """Read sessions; return the panes, the panes' entries, and the entries' values."""
        entries = self._panes.entries(keys.take(pa.array(sessions.codes)), sessions.starts)
        values, columns = self._panes.read(entries)
        assert not values.null_count, "each session has its pane"
        return _Panes(sessions.codes, sessions.starts, columns), entries, values

    def _close(self, due: _Panes, keys: pa.RecordBatch) -> Output:
        """Yield the due sessions that close now; other due sessions had waited for late rows."""
        closes = closes_ms(due.column(SESSION_END) + self._gap)
        yield from self._put_out(due.filter(due.column(_TIMER) == closes), keys, is_closing=True)

    def _changed(
        self,
        merged: "_Merge",
        is_changed: BoolArray,
        rows: pa.RecordBatch,
        times: Int64Array,
        of_rows: Int64Array,
        before: _Panes,
        of_before: Int64Array,
        keys: pa.RecordBatch,
    ) -> _Panes:
        """Return the sessions with new rows, and their accumulators put together."""
        number = np.cumsum(is_changed) - 1
        codes, starts = merged.codes[is_changed], merged.starts[is_changed]
        own_keys = keys.take(pa.array(codes))
        names = self._folds.schema.names
        lines = before.columns.select(names)
        if len(of_rows):
            added = self._folds.add(rows, times, number[of_rows].astype(np.int32), own_keys)
        else:
            added = lines[:0]
        takes_in = np.append(is_changed, np.False_)[of_before]
        if takes_in.any():
            numbers = np.concatenate([number[of_before[takes_in]], np.arange(len(codes))])
            both = pa.concat_batches([lines.filter(pa.array(takes_in)), added])
            added = self._folds.merge(both, numbers.astype(np.int32), own_keys)
        ends = pa.array(merged.ends[is_changed])
        columns = [ends, pa.nulls(len(codes), pa.int64()), *added.columns]
        schema = self._function.codec.schema
        return _Panes(codes, starts, pa.RecordBatch.from_arrays(columns, schema=schema))

    def _timed(self, after: _Panes) -> _Panes:
        """Set the timers of sessions: at their end, or after their lateness."""
        ends = after.column(SESSION_END) + self._gap
        lateness = self._function.clock.lateness_ms
        timers = closes_ms(ends) + np.where(ends <= self._closed, lateness, 0)
        columns = after.columns.set_column(1, _TIMER, pa.array(timers))
        return _Panes(after.codes, after.starts, columns)

    def _write(
        self,
        before: _Panes,
        entries: pa.BinaryArray,
        values: pa.BinaryArray,
        after: _Panes,
        keys: pa.RecordBatch,
    ) -> None:
        """Write the changed sessions, and their changed timers."""
        codes = np.concatenate([before.codes, after.codes])
        pairs = numbered(codes, np.concatenate([before.starts, after.starts]))
        old, new = np.full((2, len(pairs.codes)), -1, np.int64)
        old[pairs.numbers[: len(before.codes)]] = np.arange(len(before.codes))
        new[pairs.numbers[len(before.codes) :]] = np.arange(len(after.codes))
        is_over = new[pairs.numbers[: len(before.codes)]] < 0
        self._panes.delete(entries.filter(pa.array(is_over)))
        own = self._panes.entries(keys.take(pa.array(after.codes)), after.starts)
        place = old[pairs.numbers[len(before.codes) :]]
        self._panes.put(own, values.take(pa.array(place, mask=place < 0)), after.columns)

        was, now = before.column(_TIMER), after.column(_TIMER)
        keeps = np.zeros(len(after.codes), np.bool_)
        keeps[place >= 0] = was[place[place >= 0]] == now[place >= 0]
        kept_old = np.zeros(len(before.codes), np.bool_)
        kept_old[place[keeps]] = True
        gone = pa.array(~kept_old)
        self._panes.unset_timers(entries.filter(gone), was[~kept_old])
        self._panes.set_timers(own.filter(pa.array(~keeps)), now[~keeps])

    def _write_bounds(
        self, entries: pa.BinaryArray, before: pa.BinaryArray, sessions: _Bounds
    ) -> None:
        counts = np.bincount(sessions.codes, minlength=len(entries))
        lists = [
            lists_of(counts, pa.array(moments)) for moments in (sessions.starts, sessions.ends)
        ]
        after = _BOUNDS_CODEC.encode(pa.RecordBatch.from_arrays(lists, schema=_BOUNDS_CODEC.schema))
        changed = pa.array(changed_rows(before, after))
        self._work.overlay.put_many(entries.filter(changed), after.filter(changed))

    def _put_out(
        self, sessions: _Panes, keys: pa.RecordBatch, *, is_closing: bool = False
    ) -> Output:
        """Yield closing sessions; of changed sessions, without updates only the closed ones."""
        ends = sessions.column(SESSION_END) + self._gap
        is_closed = ends <= self._closed
        if not (is_closing or self._function.result.has_updates):
            sessions, ends = sessions.filter(is_closed), ends[is_closed]
            is_closed = is_closed[is_closed]
        if not len(ends):
            return
        yield self._function.result.rows(
            keys.take(pa.array(sessions.codes)),
            sessions.starts,
            ends,
            self._folds.results(sessions.columns.select(self._folds.schema.names)),
            is_closed,
        )


def closes_ms(ends: Int64Array) -> Int64Array:
    """Round moments up to milliseconds, the unit of the watermark."""
    return -(-ends // US_PER_MS)


@dataclass(frozen=True)
class _Merge:
    """Sessions merged from committed sessions and new rows.

    Args:
        codes, starts, ends: of each session; in the order of keys and starts.
        is_late: true for a session of rows that are all too late.
        of_held: the number of the session into which each committed session went.
        of_rows: the number of each row's session.
    """

    codes: Int64Array
    starts: Int64Array
    ends: Int64Array
    is_late: BoolArray
    of_held: Int64Array
    of_rows: Int64Array
