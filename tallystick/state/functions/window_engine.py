"""Panes in the state, for all kinds of windows, and the aggregates of windows on a grid.

A pane has accumulators per key and stretch of time, and one timer:

    key group | state id | key | start            accumulators
    key group | FC | time | key | start           the pane's timer

The key group is that of the key alone, so a key's panes move together when a step is rescaled.
Starts are microseconds, stored like a column of the key, so that panes are in the order of time.

For windows on a grid, an epoch first closes windows, then takes its rows in:

    panes that are due ─► their windows, put together from all panes ─► output; done panes go
    rows ─► panes (late ones apart) ─► accumulators ─► windows that changed, if they are put out

The watermark is that of earlier epochs, so a window that it has passed is put out without the rows
of this one, as if they had come after it. Invariant: a pane's timer is at the end of the first of
its windows that is not put out yet; so when a window is due, all of its panes are, and nothing else
is to be read. After its last window a pane waits for late rows, and goes.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
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
from tallystick.state.functions.folds import ANY, LATEST, Folds, picked
from tallystick.state.functions.keyed_batch import Int64Array
from tallystick.state.functions.processing import (
    EVENT_TIME,
    PANES,
    SideRows,
    StateDeclaration,
    Work,
)
from tallystick.state.functions.vectorised import beside_key
from tallystick.state.functions.windows import (
    NEVER,
    US_PER_MS,
    WINDOW_END,
    WINDOW_START,
    Clock,
    WindowOutput,
    Windows,
)
from tallystick.state.key_groups import key_groups_of
from tallystick.state.keys import KeyCodec, bodies, entry_keys, tails
from tallystick.state.numpy_columns import places_in
from tallystick.state.overlay import is_final
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
        self._key = pane_key(work.key)
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


def panes_declaration(what: str, codec: ColumnsCodec, folds: Folds) -> StateDeclaration:
    """Return the declaration of panes.

    Args:
        what: the panes in words; state of panes with other words is refused.
        codec: of the accumulators.
        folds: the aggregates of the accumulators.
    """
    return StateDeclaration(STATE, PANES, what, text_of(codec.schema), meaning=folds.meaning)


def pane_key(key: KeyCodec) -> KeyCodec:
    """Return the key of panes: that of the step, and the start."""
    return KeyCodec(pa.schema([*key.schema, pa.field(START, pa.int64())]))


# ---- windows on a grid ---------------------------------------------------------------------------

OPEN = pa.field("$open", pa.bool_())
"""True in each stored pane: with accumulators that are all null there would be no entry."""
_LINES_MAX = 1 << 20

Output = Iterator[pa.RecordBatch | SideRows]


@dataclass(frozen=True)
class WindowFunction:
    """The part of a processor that all windows of time share.

    Args:
        folds: the aggregates.
        clock: by which windows close.
        result: the columns of the output, and whether open windows are put out.
        reads: as `Processor.reads`.
    """

    folds: Folds
    clock: Clock
    result: WindowOutput
    reads: frozenset[str] | None
    has_timers: bool = True
    judges_lateness: bool = True

    @property
    def time_mode(self) -> str:
        """See `Processor.time_mode`."""
        return self.clock.time_mode

    def output(self, key: pa.Schema, rows: pa.Schema) -> pa.Schema:
        """See `Processor.output`."""
        return beside_key(key, [], self.result.columns(self.folds))

    def outputs(self, key: pa.Schema, rows: pa.Schema) -> dict[str, pa.Schema]:
        """Return the output of late rows, with all their columns; none if they are dropped."""
        return self.clock.outputs(rows)


@dataclass(frozen=True)
class GridFunction(WindowFunction):
    """Aggregates over windows on a grid, as a processor.

    Args:
        windows: on the grid.
    """

    windows: Windows = field(kw_only=True)

    @cached_property
    def codec(self) -> ColumnsCodec:
        """The storage format of a pane's accumulators."""
        return ColumnsCodec(pa.schema([OPEN, *self.folds.schema]))

    def declared(self, key: KeyCodec) -> tuple[StateDeclaration, ...]:
        """Return the state of the panes."""
        return (panes_declaration(self.windows.text, self.codec, self.folds),)

    def lags_ms(self, key: Collection[str], times: Mapping[str, int]) -> Mapping[str, int] | None:
        """See `PutsOutTimes`: no window is put out that an earlier watermark closed."""
        if self.time_mode != EVENT_TIME:
            return None
        whole_ms = self.windows.longest_ms - 1
        within = [*picked(self.folds.picks, times, LATEST, ANY), *(times.keys() & key)]
        return {**dict.fromkeys(within, whole_ms), WINDOW_START: whole_ms, WINDOW_END: 0}

    def run(self, work: Work) -> Output:
        """See `Processor.run`."""
        epoch = _Epoch(self, work, Panes(work, self.codec))
        due = epoch.panes.due(self.clock.until_ms(work.time))
        if due is not None:
            yield from epoch.close(due)
        if work.rows.num_rows:
            yield from epoch.take_in()


@dataclass(frozen=True)
class _Lines:
    """Lines that put panes into windows: a key, a window and a pane each, in the order of keys.

    Args:
        keys: the distinct keys.
        codes: the key of each line.
        ends: the end of the window of each line.
        accumulators: of panes.
        panes: the pane of each line, as a row of `accumulators`.
    """

    keys: pa.RecordBatch
    codes: Int64Array
    ends: Int64Array
    accumulators: pa.RecordBatch
    panes: Int64Array


class _Epoch:
    """The work of a task on grid windows in an epoch."""

    def __init__(self, function: GridFunction, work: Work, panes: Panes) -> None:
        self.panes = panes
        self._function, self._work = function, work
        self._windows, self._folds = function.windows, function.folds
        self._is_over = is_final(function.clock.until_ms(work.time))
        self._closed = self._edge(function.clock.closed_us(work.time))
        """Windows that end here or before are closed."""
        self._gone = self._edge(function.clock.gone_us(work.time))
        """Windows that end here or before take no late rows any more."""

    def _edge(self, moment_us: int | None) -> int:
        if moment_us is None:
            return NEVER
        if self._is_over:
            return moment_us  # after the edges of all windows; calendars end before
        return int(self._windows.edges_at(np.array([moment_us]))[0])

    def close(self, due: Due) -> Output:
        """Yield the windows that the watermark has passed, and set panes to their next timer."""
        windows, every = self._windows, self._windows.every_us
        codes, keys = self.panes.distinct_keys(due.keys)
        _, columns = self.panes.read(due.entries)
        first, last = windows.ends_of(due.starts)
        # The first window of each pane that was not put out yet, and those from there.
        begun = windows.edges_at(due.times_ms * US_PER_MS)
        begin = first + np.maximum((begun - first) // every + 1, 0) * every
        until = np.minimum(last, self._closed)
        accumulators = columns.select(self._folds.schema.names)
        for lines, ends in _lines(codes, begin, until, every, _LINES_MAX):
            yield from self._put_out(
                _Lines(keys, codes[lines].astype(np.int64), ends, accumulators, lines)
            )
        is_gone = last <= self._gone
        self.panes.delete(due.entries.filter(pa.array(is_gone)))
        self.panes.unset_timers(due.entries, due.times_ms)
        kept = pa.array(~is_gone)
        self.panes.set_timers(due.entries.filter(kept), self._next_ms(due.starts[~is_gone]))

    def take_in(self) -> Output:
        """Add the rows to their panes; yield late rows, and changed windows to be put out now."""
        work, clock = self._work, self._function.clock
        codes, keys = self.panes.distinct_keys(work.rows)
        times = clock.times_us(work)
        self._windows.check_times(times)
        rows, pairs = work.rows, numbered(codes, self._windows.edges_at(times))
        late = self._windows.ends_of(pairs.moments)[1] <= self._gone
        if late.any():
            is_late = late[pairs.numbers]
            yield from clock.late_rows(work, rows.filter(pa.array(is_late)))
            if is_late.all():
                return
            rows, times = rows.filter(pa.array(~is_late)), times[~is_late]
            new_numbers = (np.cumsum(~late) - 1).astype(np.int32)
            numbers = new_numbers[pairs.numbers[~is_late]]
            pairs = pairs._replace(
                numbers=numbers, codes=pairs.codes[~late], moments=pairs.moments[~late]
            )
        pane_keys = keys.take(pa.array(pairs.codes))
        entries = self.panes.entries(pane_keys, pairs.moments)
        before, stored = self.panes.read(entries)
        known = before.is_valid().to_numpy(zero_copy_only=False)
        names = self._folds.schema.names
        after = self._folds.add(rows, times, pairs.numbers, pane_keys)
        if known.any():
            both = pa.concat_batches([stored.select(names).filter(pa.array(known)), after])
            numbers = np.concatenate([np.flatnonzero(known), np.arange(len(known))])
            after = self._folds.merge(both, numbers.astype(np.int32), pane_keys)
        is_open = pa.array(np.ones(len(known), np.bool_))
        self.panes.put(
            entries,
            before,
            pa.RecordBatch.from_arrays(
                [is_open, *after.columns], schema=self._function.codec.schema
            ),
        )
        new = pa.array(~known)
        self.panes.set_timers(entries.filter(new), self._next_ms(pairs.moments[~known]))
        yield from self._changed(keys, pairs.codes, pairs.moments, after)

    def _next_ms(self, starts: Int64Array) -> Int64Array:
        """Return the next due time of each pane: the end of a window, or the end of lateness."""
        first, last = self._windows.ends_of(starts)
        every = self._windows.every_us
        following = first + np.maximum((self._closed - first) // every + 1, 0) * every
        at_end = self._windows.closes_ms(np.minimum(following, last))
        waits = np.where(following > last, self._function.clock.lateness_ms, 0)
        next_ms: Int64Array = at_end + waits
        return next_ms

    def _changed(
        self, keys: pa.RecordBatch, codes: Int64Array, starts: Int64Array, after: pa.RecordBatch
    ) -> Output:
        """Yield the changed windows to be put out now: closed ones, and with updates open ones.

        Late rows change windows that are closed.
        """
        windows, every = self._windows, self._windows.every_us
        first, last = windows.ends_of(starts)
        begin = first + np.maximum((self._gone - first) // every + 1, 0) * every
        until = last if self._function.result.has_updates else np.minimum(last, self._closed)
        lines_max = _LINES_MAX * windows.pane_us // windows.size_us + 1
        for touched, ends in _lines(codes, begin, until, every, lines_max):
            whole = numbered(codes[touched], ends)
            if windows.is_single:
                lines = _Lines(keys, whole.codes, whole.moments, after, touched)
            else:
                lines = self._with_all_panes(
                    keys, whole.codes, whole.moments, (codes, starts), after
                )
            yield from self._put_out(lines)

    def _with_all_panes(
        self,
        keys: pa.RecordBatch,
        codes: Int64Array,
        ends: Int64Array,
        changed: tuple[Int64Array, Int64Array],
        after: pa.RecordBatch,
    ) -> _Lines:
        """Return windows with all of their panes: changed panes, and the others as stored."""
        begins, size = self._windows.starts_of(ends), self._windows.pane_us
        counts = (ends - begins) // size
        window = np.repeat(np.arange(len(ends)), counts)
        starts = begins[window] + size * places_in(counts)
        every = numbered(
            np.concatenate([changed[0], codes[window]]), np.concatenate([changed[1], starts])
        )
        place = np.full(len(every.codes), -1, np.int64)
        place[every.numbers[: len(changed[0])]] = np.arange(len(changed[0]))
        others = np.flatnonzero(place < 0)
        entries = self.panes.entries(
            keys.take(pa.array(every.codes[others])), every.moments[others]
        )
        values, columns = self.panes.read(entries)
        known = values.is_valid()
        kept = others[known.to_numpy(zero_copy_only=False)]
        place[kept] = len(changed[0]) + np.arange(len(kept))
        accumulators = pa.concat_batches(
            [after, columns.select(self._folds.schema.names).filter(known)]
        )
        places = place[every.numbers[len(changed[0]) :]]
        there = places >= 0
        return _Lines(keys, codes[window][there], ends[window][there], accumulators, places[there])

    def _put_out(self, lines: _Lines) -> Output:
        """Merge lines by window, and yield the output rows of the windows."""
        if not len(lines.codes):
            return
        whole = numbered(lines.codes, lines.ends)
        keys = lines.keys.take(pa.array(whole.codes))
        accumulators = lines.accumulators.take(pa.array(lines.panes))
        if self._windows.is_single:
            accumulators = accumulators.take(pa.array(np.argsort(whole.numbers)))
        else:
            accumulators = self._folds.merge(accumulators, whole.numbers, keys)
        yield self._function.result.rows(
            keys,
            self._windows.instants(self._windows.starts_of(whole.moments)),
            self._windows.instants(whole.moments),
            self._folds.results(accumulators),
            whole.moments <= self._closed,
        )


def _lines(
    codes: NDArray[np.int64] | NDArray[np.int32],
    begin: Int64Array,
    until: Int64Array,
    every: int,
    lines_max: int,
) -> Iterator[tuple[Int64Array, Int64Array]]:
    """Yield a line for each window of some panes, in parts, so that few are in memory at a time.

    Args:
        codes: the key of each pane; panes of a key stand together.
        begin: the end of each pane's first window to yield.
        until: the latest end of a window to yield.
        every: from one end to the next; all ends are whole multiples apart.
        lines_max: how many lines a part has, more or less.

    Returns:
        The pane of each line, and the end of its window; all lines of a window are in one part.
    """
    counts = np.maximum((until - begin) // every + 1, 0)
    for part in _parts(codes, counts, lines_max):
        first, last = int(begin[part].min()), int(until[part].max())
        blocks = int(counts[part].sum()) // lines_max + 1
        span = ((last - first) // every // blocks + 1) * every
        for start in range(first, last + 1, span):  # one, unless a single key has too many
            low = np.maximum(begin[part], start)
            high = np.minimum(until[part], start + span - every)
            some = np.maximum((high - low) // every + 1, 0)
            yield np.repeat(part, some), np.repeat(low, some) + every * places_in(some)


def _parts(
    codes: NDArray[np.int64] | NDArray[np.int32], counts: Int64Array, lines_max: int
) -> Iterator[Int64Array]:
    """Yield the numbers of panes with windows, in parts; a key's panes stay together."""
    chosen = np.flatnonzero(counts)
    if not len(chosen):
        return
    codes, ends = codes[chosen], np.cumsum(counts[chosen])
    stops = np.append(np.flatnonzero(np.diff(codes)) + 1, len(codes))
    first, done = 0, 0
    while first < len(codes):
        wanted = int(np.searchsorted(ends[stops - 1], done + lines_max, side="right"))
        place = int(np.searchsorted(stops, first, side="right"))
        stop = int(stops[max(wanted - 1, place)])
        yield chosen[first:stop]
        first, done = stop, int(ends[stop - 1])
