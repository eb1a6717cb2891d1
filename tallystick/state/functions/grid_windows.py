"""Aggregates per key and window, for windows on a grid.

An epoch first closes windows, then takes its rows in:

    panes that are due ─► their windows, put together from all panes ─► output; done panes go
    rows ─► panes (late ones apart) ─► accumulators ─► windows that changed, if they are put out

The watermark is that of earlier epochs, so a window that it has passed is put out without the rows
of this one, as if they had come after it. Invariant: a pane's timer is at the end of the first of
its windows that is not put out yet; so when a window is due, all of its panes are, and nothing else
is to be read. After its last window a pane waits for late rows, and goes.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tallystick.state.functions import panes as stored
from tallystick.state.functions.folds import ANY, LATEST, Folds, picked
from tallystick.state.functions.keyed_batch import Int64Array
from tallystick.state.functions.panes import Due, Panes, numbered
from tallystick.state.functions.processing import (
    EVENT_TIME,
    SideRows,
    StateDeclaration,
    Work,
)
from tallystick.state.functions.vectorised import beside_key
from tallystick.state.functions.window_output import (
    WINDOW_END,
    WINDOW_START,
    Clock,
    WindowOutput,
)
from tallystick.state.functions.windows import NEVER, US_PER_MS, Windows
from tallystick.state.keys import KeyCodec
from tallystick.state.numpy_columns import places_in
from tallystick.state.overlay import is_final
from tallystick.state.row_codec import ColumnsCodec

_OPEN = pa.field("$open", pa.bool_())
"""True in each stored pane: with accumulators that are all null there would be no entry."""
_LINES_MAX = 1 << 20

Output = Iterator[pa.RecordBatch | SideRows]


@dataclass(frozen=True)
class GridFunction:
    """Aggregates over windows on a grid, as a processor.

    Args:
        windows: on the grid.
        folds: the aggregates.
        clock: by which windows close.
        result: the columns of the output, and whether open windows are put out.
        reads: as `Processor.reads`.
    """

    windows: Windows
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

    @cached_property
    def codec(self) -> ColumnsCodec:
        """The storage format of a pane's accumulators."""
        return ColumnsCodec(pa.schema([_OPEN, *self.folds.schema]))

    def declared(self, key: KeyCodec) -> tuple[StateDeclaration, ...]:
        """Return the state of the panes."""
        return (stored.declared(self.windows.text, self.codec, self.folds),)

    def output(self, key: pa.Schema, rows: pa.Schema) -> pa.Schema:
        """See `Processor.output`."""
        return beside_key(key, [], self.result.columns(self.folds))

    def outputs(self, key: pa.Schema, rows: pa.Schema) -> dict[str, pa.Schema]:
        """Return the output of late rows, with all their columns; none if they are dropped."""
        return self.clock.outputs(rows)

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
