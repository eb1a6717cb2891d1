"""Aggregates per key and number of rows.

Rows of a key are counted as they arrive; a *pane* is `pane_rows` of them in a row, a window some
panes. A key's head holds how many rows it has had, and the pane that is still filling:

    key | 0        rows so far, accumulators of the rows after the last whole pane; null if none
    key | 1 + n    whole pane n, for as long as a window to come needs it

Invariant: the stored whole panes are the panes from `first_pane` of the next window on. Where a
window is one pane, no whole pane is stored, the count starts at zero in each window, and a key
between two windows has no entry.

Source: Flink's `KeyedStream.countWindow`, which is a CountTrigger over GlobalWindows, and a
CountEvictor where windows overlap.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tallystick.arguments import checked
from tallystick.errors import OptionError
from tallystick.state.functions.folds import LATEST, Folds, picked
from tallystick.state.functions.keyed_batch import BoolArray, Int64Array, order_by_key
from tallystick.state.functions.processing import NO_TIME, StateDeclaration, Work
from tallystick.state.functions.vectorised import beside_key
from tallystick.state.functions.window_engine import Panes, numbered, panes_declaration
from tallystick.state.functions.windows import WINDOWS_PER_PANE_MAX
from tallystick.state.keys import KeyCodec
from tallystick.state.numpy_columns import places_in
from tallystick.state.row_codec import ColumnsCodec

_ROWS = pa.field("$rows", pa.int64())
_LINES_MAX = 1 << 20
"""The number of panes, counted in each window that shares them, that are merged at a time."""


@dataclass(frozen=True)
class CountWindows:
    """Windows of a number of a key's rows; made by `count_window`."""

    size: int
    every: int

    @cached_property
    def pane_rows(self) -> int:
        """The size of a pane."""
        return math.gcd(self.size, self.every)

    @property
    def is_single(self) -> bool:
        """True if a window is a single pane."""
        return self.size == self.pane_rows

    @property
    def text(self) -> str:
        """The windows in words: part of the state, so they stay the same in every release."""
        return f"count windows of {self.size} rows every {self.every}"

    def first_pane(self, ends: Int64Array) -> Int64Array:
        """Return the first pane of the windows that end after so many rows of a key."""
        panes: Int64Array = np.maximum(ends - self.size, 0) // self.pane_rows
        return panes

    def next_end(self, counts: Int64Array) -> Int64Array:
        """Return the number of rows at which a key's next window ends, from its rows so far."""
        ends: Int64Array = (counts // self.every + 1) * self.every
        return ends


@checked
def count_window(size: int, *, every: int | None = None) -> CountWindows:
    """Group each key's rows into windows of `size` rows, in the order of arrival.

    Args:
        size: of a window, in rows.
        every: after how many rows of a key the next window ends, over its last `size` rows; the
            first ones have fewer. None: each row is in one window.

    Raises:
        OptionError: there can be no such windows.
    """
    every = size if every is None else every
    for name, value in (("size", size), ("every", every)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise OptionError(f"count_window: {name}={value!r}, expected a number of rows above 0")
    if every > size:
        raise OptionError(
            f"count_window: every={every}, expected at most the size, {size}: rows between windows "
            f"would be lost"
        )
    windows = CountWindows(size, every)
    if size // windows.pane_rows > WINDOWS_PER_PANE_MAX:
        raise OptionError(
            f"count_window: {size} rows in panes of {windows.pane_rows}: a window would have more "
            f"than {WINDOWS_PER_PANE_MAX}. Let every divide the size, or make it greater"
        )
    return windows


@dataclass(frozen=True)
class CountFunction:
    """Aggregates over count windows, as a processor; see `WindowFunction` for its fields."""

    windows: CountWindows
    folds: Folds
    reads: frozenset[str] | None
    time_mode: str = NO_TIME
    has_timers: bool = False

    @cached_property
    def codec(self) -> ColumnsCodec:
        """The storage format of a head or a pane."""
        return ColumnsCodec(pa.schema([_ROWS, *self.folds.schema]))

    def declared(self, key: KeyCodec) -> tuple[StateDeclaration, ...]:
        """Return the state of the heads and panes."""
        return (panes_declaration(self.windows.text, self.codec, self.folds),)

    def output(self, key: pa.Schema, rows: pa.Schema) -> pa.Schema:
        """See `Processor.output`."""
        return beside_key(key, [], self.folds.output)

    def lags_ms(self, key: Collection[str], times: Mapping[str, int]) -> Mapping[str, int]:
        """See `PutsOutTimes`: a window is put out with the row that fills it."""
        of_key = {name: lag_ms for name, lag_ms in times.items() if name in key}
        return {**of_key, **picked(self.folds.picks, times, LATEST)}

    def run(self, work: Work) -> Iterator[pa.RecordBatch]:
        """See `Processor.run`."""
        if work.rows.num_rows:
            yield from _Epoch(self, work).run()


class _NewPanes(NamedTuple):
    """The panes with new rows, in the order of keys and panes.

    Args:
        codes, panes: the key of each pane, and the pane's number within the key.
        firsts: the position of each key's first pane.
        accumulators: of each pane.
    """

    codes: Int64Array
    panes: Int64Array
    firsts: Int64Array
    accumulators: pa.RecordBatch


class _Epoch:
    """The work of a task on count windows in an epoch."""

    def __init__(self, function: CountFunction, work: Work) -> None:
        self._windows, self._folds, self._codec = function.windows, function.folds, function.codec
        self._panes, self._rows = Panes(work, function.codec), work.rows
        self._codes, self._keys = self._panes.distinct_keys(work.rows)
        self._heads = self._panes.entries(self._keys, np.zeros(self._keys.num_rows, np.int64))
        self._values, self._committed = self._panes.read(self._heads)
        self._before: Int64Array = self._committed.column(_ROWS.name).fill_null(0).to_numpy()
        self._counts = np.bincount(self._codes, minlength=self._keys.num_rows)
        self._after = self._before + self._counts

    def run(self) -> Iterator[pa.RecordBatch]:
        """Add the rows; yield the windows that are full now."""
        filled, windows = self._filled(), self._windows
        is_whole = (filled.panes + 1) * windows.pane_rows <= self._after[filled.codes]
        if windows.is_single:
            whole = pa.array(is_whole)
            if is_whole.any():
                yield self._output(filled.codes[is_whole], filled.accumulators.filter(whole))
        else:
            yield from self._put_out(filled)
            self._write_panes(filled, is_whole)
        self._write_heads(filled)

    def _filled(self) -> _NewPanes:
        """Add up the new rows and the panes that were still filling."""
        order = order_by_key(self._codes, len(self._counts))
        ordinals = np.empty(len(order), np.int64)
        ordinals[order] = places_in(self._counts)
        ordinals += self._before[self._codes]
        pairs = numbered(self._codes, ordinals // self._windows.pane_rows)
        firsts = np.searchsorted(pairs.codes, np.arange(len(self._counts)))
        keys = self._keys.take(pa.array(pairs.codes))
        # Its number is a row's time: the first and the last value are so by arrival. Where the
        # count starts at zero in each window, so do the numbers.
        times = ordinals % self._windows.size if self._windows.is_single else ordinals
        added = self._folds.add(self._rows, times, pairs.numbers, keys)
        goes_on = self._before % self._windows.pane_rows > 0
        if goes_on.any():
            filling = self._committed.select(self._folds.schema.names).filter(pa.array(goes_on))
            numbers = np.concatenate([firsts[goes_on], np.arange(len(pairs.codes))])
            lines = pa.concat_batches([filling, added])
            added = self._folds.merge(lines, numbers.astype(np.int32), keys)
        return _NewPanes(pairs.codes, pairs.moments, firsts, added)

    def _stored(self, begins: Int64Array, ends: Int64Array) -> pa.BinaryArray:
        """Return the entries of each key's whole panes from `begins` to before `ends`."""
        counts = np.maximum(ends - begins, 0)
        keys = self._keys.take(pa.array(np.repeat(np.arange(len(counts)), counts)))
        return self._panes.entries(keys, np.repeat(begins, counts) + places_in(counts) + 1)

    def _put_out(self, filled: _NewPanes) -> Iterator[pa.RecordBatch]:
        """Yield the windows that are full now, made of all their panes, in parts."""
        windows, size = self._windows, self._windows.pane_rows
        counts = self._after // windows.every - self._before // windows.every
        if not counts.any():
            return
        first_ends, begun = windows.next_end(self._before), self._before // size
        lows = np.where(counts > 0, np.minimum(windows.first_pane(first_ends), begun), begun)
        values, columns = self._panes.read(self._stored(lows, begun))
        assert not values.null_count, "whole panes are kept for as long as a window needs them"
        stored = columns.select(self._folds.schema.names)
        lines = pa.concat_batches([stored, filled.accumulators])
        offsets = np.cumsum(begun - lows) - (begun - lows)

        codes = np.repeat(np.arange(len(counts)), counts)
        ends = np.repeat(first_ends, counts) + windows.every * places_in(counts)
        step = max(1, _LINES_MAX * size // windows.size)
        for start in range(0, len(codes), step):
            own, until = codes[start : start + step], ends[start : start + step] // size
            firsts = windows.first_pane(ends[start : start + step])
            window = np.repeat(np.arange(len(own)), until - firsts)
            panes, key = firsts[window] + places_in(until - firsts), own[window]
            is_stored = panes < begun[key]
            of_stored = offsets[key] + panes - lows[key]
            of_filled = stored.num_rows + filled.firsts[key] + panes - begun[key]
            parts = lines.take(pa.array(np.where(is_stored, of_stored, of_filled)))
            keys = self._keys.take(pa.array(own))
            yield self._output(own, self._folds.merge(parts, window.astype(np.int32), keys))

    def _output(self, codes: Int64Array, accumulators: pa.RecordBatch) -> pa.RecordBatch:
        keys, results = self._keys.take(pa.array(codes)), self._folds.results(accumulators)
        schema = pa.schema([*keys.schema, *results.schema])
        return pa.RecordBatch.from_arrays([*keys.columns, *results.columns], schema=schema)

    def _write_panes(self, filled: _NewPanes, is_whole: BoolArray) -> None:
        """Keep the whole panes that windows to come need, and drop the others."""
        windows, begun = self._windows, self._before // self._windows.pane_rows
        lows, next_lows = (
            windows.first_pane(windows.next_end(row_counts))
            for row_counts in (self._before, self._after)
        )
        self._panes.delete(self._stored(lows, np.minimum(next_lows, begun)))
        is_kept = is_whole & (filled.panes >= next_lows[filled.codes])
        kept = pa.array(is_kept)
        codes = filled.codes[is_kept]
        entries = self._panes.entries(self._keys.take(pa.array(codes)), filled.panes[is_kept] + 1)
        rows = pa.array(np.full(len(codes), windows.pane_rows))
        columns = [rows, *filled.accumulators.filter(kept).columns]
        after = pa.RecordBatch.from_arrays(columns, schema=self._codec.schema)
        self._panes.put(entries, pa.nulls(len(entries), pa.binary()), after)

    def _write_heads(self, filled: _NewPanes) -> None:
        rows = self._after
        if self._windows.is_single:
            rows = rows % self._windows.size
            was_there = self._values.is_valid().to_numpy(zero_copy_only=False)
            self._panes.delete(self._heads.filter(pa.array(was_there & (rows == 0))))
        last = np.append(filled.firsts[1:], len(filled.codes)) - 1
        is_filling = self._after % self._windows.pane_rows > 0
        filling = filled.accumulators.take(pa.array(last, mask=~is_filling))
        after = pa.RecordBatch.from_arrays(
            [pa.array(rows), *filling.columns], schema=self._codec.schema
        )
        kept = pa.array(rows > 0)
        self._panes.put(self._heads.filter(kept), self._values.filter(kept), after.filter(kept))
