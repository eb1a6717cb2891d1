"""Joins of two inputs by time: interval joins, window joins, and temporal joins.

For each row of an interval or window join there is a range of time in which its partners lie; once
the watermark has reached the end of the range none can come any more, and the row leaves the state.

A pair comes out in the epoch in which its second row arrives: new rows of one side meet the other
side's rows in heads and its new rows, then chunk after chunk (see `row_state`). An outer row
without a partner comes out when its range has ended. So each pair and each outer row comes out
once, and the output depends on the rows alone, not on where epochs are cut.

A temporal join gives each left row the right row that was the newest at its event time. A left row
waits until the watermark reaches its time: then all right rows that are not later have arrived. Of
the right rows a key keeps those after the watermark, and the newest before: later left rows may
need it, so one row per key stays for good. A right row is never late: a row behind the watermark
counts for the left rows to come, if it is newer than the kept row. Earlier output stays as it was.
Of two right rows of equal time the later arrived counts: rows of a key from one partition have an
order, rows from several partitions do not.

Source: Flink's IntervalJoinOperator, RowTimeIntervalJoin, WindowJoinOperator, and
TemporalRowTimeJoinOperator.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import pyarrow as pa

from tallystick.arguments import checked
from tallystick.codec.spans import Int64Array
from tallystick.errors import OptionError
from tallystick.state.entries import Keys
from tallystick.state.functions.join_columns import (
    INNER,
    LEFT,
    LEFT_OUTER,
    NEVER,
    RIGHT,
    BoolArray,
    JoinColumns,
    Rows,
    carried,
    covered,
    in_time,
    keys_at_work,
    least,
    moments_of,
    move_timers,
    order_of,
    outer_sides,
    pairs,
    ranges,
    taken,
)
from tallystick.state.functions.processing import EVENT_TIME, StateDeclaration, Work
from tallystick.state.functions.row_state import (
    Chunks,
    Head,
    LoadedChunks,
    RowState,
    due_of,
    of_state,
)
from tallystick.state.functions.vectorised import ByColumns
from tallystick.state.keys import KeyCodec
from tallystick.text import signed_duration_ms

OUTPUT_ROWS = 16_384
"""The rows of a batch of output."""
KEYS_MAX = 8192
"""The keys whose heads are in memory at a time."""
SIDES = ("left", "right")
"""The names of the states."""


class Reach(Protocol):
    """The rule by which rows of two sides match in time."""

    @property
    def fields(self) -> tuple[pa.Field, ...]:
        """The columns that the rule adds to the output."""
        ...

    def partners(self, side: int, times: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the first and last time of each row's partners; both ascend with `times`."""
        ...

    def values(self, times: Int64Array) -> list[pa.Array]:
        """Return the values of `fields`, for rows of either side."""
        ...

    @property
    def lags_ms(self) -> tuple[int, int, Mapping[str, int]]:
        """The greatest lag in ms of the left side's times, the right side's, and of `fields`."""
        ...


@dataclass(frozen=True)
class Interval:
    """Match where lower <= right time - left time <= upper, in ms."""

    lower: int
    upper: int
    fields: tuple[pa.Field, ...] = ()

    def partners(self, side: int, times: Int64Array) -> tuple[Int64Array, Int64Array]:
        """See `Reach.partners`."""
        if side == LEFT:
            return times + self.lower, times + self.upper
        return times - self.upper, times - self.lower

    def values(self, times: Int64Array) -> list[pa.Array]:
        """See `Reach.values`."""
        return []

    @property
    def lags_ms(self) -> tuple[int, int, Mapping[str, int]]:
        """See `Reach.lags_ms`; as Flink's RowTimeIntervalJoin delays the watermark."""
        return max(0, self.upper), max(0, -self.lower), {}


_MOMENT = pa.timestamp("us", tz="UTC")


@dataclass(frozen=True)
class Window:
    """Match in the same window of `size` ms; windows begin `offset` ms after 1970."""

    size: int
    offset: int
    fields: tuple[pa.Field, ...] = (
        pa.field("window_start", _MOMENT),
        pa.field("window_end", _MOMENT),
    )

    def partners(self, side: int, times: Int64Array) -> tuple[Int64Array, Int64Array]:
        """See `Reach.partners`."""
        starts = (times - self.offset) // self.size * self.size + self.offset
        return starts, starts + self.size - 1

    def values(self, times: Int64Array) -> list[pa.Array]:
        """See `Reach.values`."""
        first, last = self.partners(LEFT, times)
        return [moments_of(first), moments_of(last + 1)]

    @property
    def lags_ms(self) -> tuple[int, int, Mapping[str, int]]:
        """See `Reach.lags_ms`."""
        whole, (first, last) = self.size - 1, (field.name for field in self.fields)
        return whole, whole, {first: whole, last: 0}


@checked
def interval_join(
    left: str,
    right: str,
    *,
    lower: str | int,
    upper: str | int,
    how: str = INNER,
    columns: Mapping[str, Collection[str]] | None = None,
) -> ByColumns:
    """Join rows of a key whose event times are at most so far apart: both bounds are included.

    Puts out the key, the left input's columns and the right one's, as soon as both rows are there;
    a row without a partner, where `how` has it, when the watermark says that none can come.

    Args:
        left: the name of an input.
        right: the name of another input.
        lower: the least that a right row may be later than a left one, in ms or as a text; a
            negative one, such as "-1 hour": it may be earlier.
        upper: the most that a right row may be later.
        how: "inner", "left", "right" or "full".
        columns: for an input, the columns that it adds to the output, beside the key's; no others
            are sent to the step and held. An input that is not named: all, but Kafka's own (topic,
            offset, …) where they come right from the source.

    Raises:
        OptionError: an argument has a wrong type or value.
    """
    reach = Interval(signed_duration_ms("lower", lower), signed_duration_ms("upper", upper))
    if reach.lower > reach.upper:
        raise OptionError(
            f"interval_join: lower={lower!r} is after upper={upper!r}: no row would match; right "
            f"rows match from `lower` to `upper` after a left one"
        )
    return _range_join("interval_join", (left, right), reach, how, columns)


@checked
def window_join(
    left: str,
    right: str,
    *,
    size: str | int,
    offset: str | int = 0,
    how: str = INNER,
    columns: Mapping[str, Collection[str]] | None = None,
) -> ByColumns:
    """Join rows of a key that lie in the same window of event time.

    Puts out the key, `window_start` and `window_end`, the left input's columns and the right one's:
    pairs as soon as both rows are there; a row without a partner, where `how` has it, when the
    watermark has passed the window.

    Args:
        left: the name of an input.
        right: the name of another input.
        size: of a window, in ms or as a text such as "1 minute".
        offset: the start of windows, from 1970 in UTC.
        how: "inner", "left", "right" or "full".
        columns: as of `interval_join`.

    Raises:
        OptionError: an argument has a wrong type or value.
    """
    reach = Window(signed_duration_ms("size", size), signed_duration_ms("offset", offset))
    if reach.size <= 0:
        raise OptionError(f"window_join: size={size!r}: expected more than 0")
    return _range_join("window_join", (left, right), reach, how, columns)


def _range_join(
    function: str,
    names: tuple[str, str],
    reach: Reach,
    how: str,
    columns: Mapping[str, Collection[str]] | None,
) -> ByColumns:
    outer, carried_columns = outer_sides(function, how), carried(function, names, columns)

    def make(rows: pa.Schema) -> RangeJoin:
        return RangeJoin(JoinColumns(function, rows, names, reach.fields), reach, outer)

    return ByColumns(make, None, EVENT_TIME, has_timers=True, carried=carried_columns)


class RangeJoin:
    """The processor of `interval_join` and `window_join`.

    Args:
        columns: of both sides and the output.
        reach: which rows match.
        outer: which sides' rows come out without a partner too.
    """

    time_mode = EVENT_TIME
    has_timers = True
    reads = None

    def __init__(self, columns: JoinColumns, reach: Reach, outer: tuple[bool, bool]) -> None:
        self.columns, self.reach, self.outer = columns, reach, outer
        self.states = tuple(
            RowState(
                name,
                # Who had a partner is only noted in chunks where it is asked for.
                f"{columns.function}, {'outer' if outer[side] else 'inner'} side",
                f"{columns.function}, input {columns.names[side]!r}",
                side_columns,
                columns.meaning(outer),
            )
            for side, (name, side_columns) in enumerate(zip(SIDES, columns.sides, strict=True))
        )

    def declared(self, key: KeyCodec) -> tuple[StateDeclaration, ...]:
        """Return a state of rows for each side."""
        return tuple(state.declaration for state in self.states)

    def output(self, key: pa.Schema, rows: pa.Schema) -> pa.Schema:
        """Return the columns of the key and of both sides."""
        return self.columns.output

    def lags_ms(self, key: Collection[str], times: Mapping[str, int]) -> Mapping[str, int]:
        """See `PutsOutTimes`."""
        *sides, own = self.reach.lags_ms
        return {**self.columns.lags_of(times, sides), **own}

    def run(self, work: Work) -> Iterator[pa.RecordBatch]:
        """See `Processor.run`."""
        for keys, new in visits(self.columns, self.states, work):
            yield from _RangeVisit(self, work, keys, new).run()


def visits(
    columns: JoinColumns,
    states: Sequence[RowState],
    work: Work,
    judged: Collection[int] = (LEFT, RIGHT),
) -> Iterator[tuple[Keys, list[Rows]]]:
    """Yield the keys of an epoch, some at a time, with the rows of each side that are not late.

    Args:
        columns: of the join.
        states: of its sides.
        work: of the epoch.
        judged: the sides whose rows may be late; rows of other sides all stay.
    """
    codes, keys = keys_at_work(work, work.fields[SIDES[LEFT]].state_id)
    new = []
    for side, state in enumerate(states):
        at, values = columns.part_of(side, work.rows)
        times = columns.times_of(side, work.rows, at)
        on_time = in_time(times, work.time.watermark_ms if side in judged else None)
        if not on_time.all():
            work.late.append(int((~on_time).sum()))
            kept = np.flatnonzero(on_time)
            at, times, values = at[kept], times[kept], tuple(taken(values, kept))
        new.append(state.new_rows(codes[at], times, values))
    for first in range(0, len(keys.entries), KEYS_MAX):
        stop = min(first + KEYS_MAX, len(keys.entries))
        count = stop - first
        some = Keys(keys.columns.slice(first, count), keys.entries.slice(first, count))
        yield some, [side_rows.of_keys(first, stop) for side_rows in new]


class _RangeVisit:
    """The work on some keys: all their rows of an epoch, and what is due.

    Args:
        join: the processor.
        work: of the epoch.
        keys: the visited keys, with their entries of the left state.
        new: the rows that arrived, of each side.
    """

    def __init__(self, join: RangeJoin, work: Work, keys: Keys, new: list[Rows]) -> None:
        self._join, self._work, self._keys, self._new = join, work, keys, new
        until = work.time.watermark_ms
        self._until = -NEVER if until is None else until
        entries = [of_state(keys.entries, work.fields[name].state_id) for name in SIDES]
        self._heads: list[Head] = [
            state.load(work.overlay, state_entries)
            for state, state_entries in zip(join.states, entries, strict=True)
        ]
        self._chunks = [head.chunks for head in self._heads]

    def run(self) -> Iterator[pa.RecordBatch]:
        """Yield the output of the keys; the state is written at the end."""
        left_rows, right_rows = (head.rows for head in self._heads)
        new_left, new_right = self._new
        yield from self._pairs(LEFT, new_left, right_rows)
        yield from self._pairs(LEFT, new_left, new_right)
        yield from self._pairs(RIGHT, new_right, left_rows)
        for side in (LEFT, RIGHT):
            yield from self._visit_chunks(side)
        dues = []
        for side in (LEFT, RIGHT):
            rows = self._heads[side].rows.and_then(self._new[side])
            ended = self._ends(side, rows.times) <= self._until
            yield from self._alone(side, rows, ended)
            dues.append(self._write(side, rows.filter(~ended)))
        before = np.minimum(*(head.due for head in self._heads))
        move_timers(self._work.overlay, self._keys.entries, before, np.minimum(*dues))

    def _ends(self, side: int, times: Int64Array) -> Int64Array:
        """Return the time of the last possible partner of each row."""
        return self._join.reach.partners(side, times)[1]

    def _pairs(self, side: int, probing: Rows, others: Rows) -> Iterator[pa.RecordBatch]:
        """Yield the pairs of rows of a side and rows of the other, and note who had a partner."""
        if not (len(probing) and len(others)):
            return
        first, last = self._join.reach.partners(side, probing.times)
        starts, stops = ranges(probing.codes, first, last, others.codes, others.times)
        np.logical_or(probing.matched, stops > starts, out=probing.matched)
        np.logical_or(others.matched, covered(starts, stops, len(others)), out=others.matched)
        for one, two in pairs(starts, stops, OUTPUT_ROWS):
            mine, theirs = taken(probing.columns, one), taken(others.columns, two)
            sides = (mine, theirs) if side == LEFT else (theirs, mine)
            yield self._joined(probing.codes[one], probing.times[one], *sides)

    def _alone(self, side: int, rows: Rows, ended: BoolArray) -> Iterator[pa.RecordBatch]:
        """Yield the rows of an outer side that end without a partner."""
        if not self._join.outer[side]:
            return
        alone = np.flatnonzero(ended & ~rows.matched)
        for first in range(0, len(alone), OUTPUT_ROWS):
            some = alone[first : first + OUTPUT_ROWS]
            mine = taken(rows.columns, some)
            sides = (mine, None) if side == LEFT else (None, mine)
            yield self._joined(rows.codes[some], rows.times[some], *sides)

    def _joined(
        self,
        codes: Int64Array,
        times: Int64Array,
        left_columns: list[pa.Array] | None,
        right_columns: list[pa.Array] | None,
    ) -> pa.RecordBatch:
        keys = taken(self._keys.columns.columns, codes)
        return self._join.columns.joined(
            keys, left_columns, right_columns, self._join.reach.values(times)
        )

    def _visit_chunks(self, side: int) -> Iterator[pa.RecordBatch]:
        """Match a side's chunks with the other side's new rows, and end the rows that are due."""
        chunks, theirs = self._chunks[side], self._new[1 - side]
        if not len(chunks.codes):
            return
        first = self._join.reach.partners(side, chunks.firsts)[0]
        last = self._ends(side, chunks.lasts)
        starts, stops = ranges(chunks.codes, first, last, theirs.codes, theirs.times)
        wanted = (stops > starts) | (chunks.dues <= self._until)
        remaining = [chunks.take(~wanted)]
        for part in chunks.take(wanted).parts():
            state = self._join.states[side]
            loaded = state.load_chunks(self._work.overlay, self._heads[side], part)
            matched = loaded.rows.matched.copy()
            yield from self._pairs(1 - side, theirs, loaded.rows)
            is_due = part.dues <= self._until
            ended = is_due[loaded.lines] & (self._ends(side, loaded.rows.times) <= self._until)
            yield from self._alone(side, loaded.rows, ended)
            rewritten = is_due
            if self._join.outer[side]:
                changed = loaded.lines[loaded.rows.matched != matched]
                rewritten = is_due | (np.bincount(changed, minlength=len(is_due)) > 0)
            remaining += [
                part.take(~rewritten),
                self._written_again(side, loaded, ~ended, rewritten),
            ]
        self._chunks[side] = Chunks.of_all(remaining)

    def _written_again(
        self, side: int, loaded: LoadedChunks, kept: BoolArray, which: BoolArray
    ) -> Chunks:
        part = loaded.chunks.take(which)
        rows = loaded.by_line(kept, which)
        return self._join.states[side].write_chunks(
            self._work.overlay,
            self._heads[side],
            (part.codes, part.numbers),
            rows,
            self._dues(side, rows, len(part.codes)),
            loaded.before.filter(pa.array(which)),
        )

    def _dues(self, side: int, rows: Rows, count: int) -> Int64Array:
        pending = ~rows.matched if self._join.outer[side] else np.zeros(len(rows), np.bool_)
        return due_of(self._ends(side, rows.times), rows.codes, pending, count)

    def _write(self, side: int, rows: Rows) -> Int64Array:
        """Write the rows that stay, as chunks where they are many; return when keys are due."""
        head, state, overlay = self._heads[side], self._join.states[side], self._work.overlay
        rows, chunks = state.move_to_chunks(
            overlay, head, self._chunks[side], rows, partial(self._dues, side)
        )
        count = len(head.entries)
        due = self._dues(side, rows, count)
        due = np.minimum(due, least(chunks.dues, chunks.codes, count, NEVER))
        state.write_heads(overlay, head, rows, chunks, due)
        return due


@checked
def temporal_join(
    left: str,
    right: str,
    *,
    how: str = INNER,
    columns: Mapping[str, Collection[str]] | None = None,
) -> ByColumns:
    """Join each left row with the newest right row of its key whose event time is not later.

    Puts out the key, the left input's columns and the right one's, once the watermark has reached
    the left row's time.

    Args:
        left: the name of an input.
        right: the name of another input.
        how: "inner", or "left": left rows without a right one come out too.
        columns: as of `interval_join`.

    Raises:
        OptionError: an argument has a wrong type or value.
    """
    is_outer, _ = outer_sides("temporal_join", how, (INNER, LEFT_OUTER))
    carried_columns = carried("temporal_join", (left, right), columns)

    def make(rows: pa.Schema) -> TemporalJoin:
        return TemporalJoin(JoinColumns("temporal_join", rows, (left, right)), is_outer)

    return ByColumns(make, None, EVENT_TIME, has_timers=True, carried=carried_columns)


class TemporalJoin:
    """The processor of `temporal_join`.

    Args:
        columns: of both sides and the output.
        is_outer: whether left rows come out without a right one too.
    """

    time_mode = EVENT_TIME
    has_timers = True
    judges_lateness = True
    reads = None

    def __init__(self, columns: JoinColumns, is_outer: bool) -> None:
        self.columns, self.is_outer = columns, is_outer
        meaning = columns.meaning((is_outer, False))
        self.states = tuple(
            RowState(
                name,
                "temporal_join",
                f"temporal_join, input {columns.names[side]!r}",
                side_columns,
                meaning,
            )
            for side, (name, side_columns) in enumerate(zip(SIDES, columns.sides, strict=True))
        )

    def declared(self, key: KeyCodec) -> tuple[StateDeclaration, ...]:
        """Return a state of rows for each side."""
        return tuple(state.declaration for state in self.states)

    def output(self, key: pa.Schema, rows: pa.Schema) -> pa.Schema:
        """Return the columns of the key and of both sides."""
        return self.columns.output

    def lags_ms(self, key: Collection[str], times: Mapping[str, int]) -> Mapping[str, int]:
        """See `PutsOutTimes`: a left row comes out when its time has come; a right one is old."""
        return self.columns.lags_of(times, (0, None))

    def run(self, work: Work) -> Iterator[pa.RecordBatch]:
        """See `Processor.run`."""
        for keys, new in visits(self.columns, self.states, work, judged=[LEFT]):
            yield from _TemporalVisit(self, work, keys, new).run()


class _TemporalVisit:
    """The work on some keys: all their rows of an epoch, and what is due.

    New left rows are after the watermark, so only committed left rows are looked up. New right rows
    do not count for these: the newest late right row, if newer, takes the place of the kept row.
    """

    def __init__(self, join: TemporalJoin, work: Work, keys: Keys, new: list[Rows]) -> None:
        self._join, self._work, self._keys, self._new = join, work, keys, new
        until = work.time.watermark_ms
        self._until = -NEVER if until is None else until
        self._heads: list[Head] = []
        for state, name in zip(join.states, SIDES, strict=True):
            entries = of_state(keys.entries, work.fields[name].state_id)
            self._heads.append(state.load(work.overlay, entries))

    def run(self) -> Iterator[pa.RecordBatch]:
        """Yield the left rows whose time has come; the state is written at the end."""
        before = np.minimum(*(head.due for head in self._heads))
        is_due = before <= self._until
        versions, right_rows, right_chunks = self._versions(is_due)
        left_rows = self._heads[LEFT].rows
        ended = left_rows.times <= self._until
        yield from self._looked_up(left_rows.filter(ended), versions)
        left_chunks: list[Chunks] = []
        yield from self._left_ended(versions, left_chunks)
        dues = [
            self._write(LEFT, left_rows.filter(~ended), Chunks.of_all(left_chunks)),
            self._write(RIGHT, right_rows, right_chunks),
        ]
        move_timers(self._work.overlay, self._keys.entries, before, np.minimum(*dues))

    def _versions(self, is_due: BoolArray) -> tuple[Rows, Rows, Chunks]:
        """Return the right rows up to the watermark; and the rows and chunks that stay."""
        head, state = self._heads[RIGHT], self._join.states[RIGHT]
        wanted = is_due[head.chunks.codes] & (head.chunks.firsts <= self._until)
        some = head.chunks.take(wanted)
        loaded = state.load_chunks(self._work.overlay, head, some)
        rows = loaded.rows.followed_by(head.rows)
        order = order_of(rows.codes, rows.times)
        is_past = rows.times[order] <= self._until
        whose = rows.codes[order]
        has_later = np.zeros(len(rows), np.bool_)
        has_later[:-1] = (whose[1:] == whose[:-1]) & is_past[1:]
        kept = np.empty(len(rows), np.bool_)
        kept[order] = ~(is_past & has_later)
        in_chunks, in_head = kept[: len(loaded.rows)], kept[len(loaded.rows) :]
        rewritten = np.bincount(loaded.lines[~in_chunks], minlength=len(some.codes)) > 0
        part = some.take(rewritten)
        rewritten_chunks = state.write_chunks(
            self._work.overlay,
            head,
            (part.codes, part.numbers),
            loaded.by_line(in_chunks, rewritten),
            part.lasts,
            loaded.before.filter(pa.array(rewritten)),
        )
        chunks = Chunks.of_all([head.chunks.take(~wanted), some.take(~rewritten), rewritten_chunks])
        return rows.take(order[is_past]), head.rows.filter(in_head), chunks

    def _left_ended(self, versions: Rows, remaining: list[Chunks]) -> Iterator[pa.RecordBatch]:
        """Yield the ended rows in chunks of the left side; add chunks that stay to `remaining`."""
        head, state = self._heads[LEFT], self._join.states[LEFT]
        wanted = head.chunks.firsts <= self._until
        remaining.append(head.chunks.take(~wanted))
        for part in head.chunks.take(wanted).parts():
            loaded = state.load_chunks(self._work.overlay, head, part)
            ended = loaded.rows.times <= self._until
            yield from self._looked_up(loaded.rows.filter(ended), versions)
            rows = loaded.by_line(~ended, np.ones(len(part.codes), np.bool_))
            firsts = least(rows.times, rows.codes, len(part.codes), NEVER)
            places = (part.codes, part.numbers)
            remaining.append(
                state.write_chunks(self._work.overlay, head, places, rows, firsts, loaded.before)
            )

    def _looked_up(self, rows: Rows, versions: Rows) -> Iterator[pa.RecordBatch]:
        """Yield left rows, each joined with its version of the right side."""
        always = np.full(len(rows), -NEVER)
        starts, stops = ranges(rows.codes, always, rows.times, versions.codes, versions.times)
        has_version = stops > starts
        at = np.arange(len(rows)) if self._join.is_outer else np.flatnonzero(has_version)
        for first in range(0, len(at), OUTPUT_ROWS):
            some = at[first : first + OUTPUT_ROWS]
            partners = pa.array(stops[some] - 1, mask=~has_version[some])
            yield self._join.columns.joined(
                taken(self._keys.columns.columns, rows.codes[some]),
                taken(rows.columns, some),
                [column.take(partners) for column in versions.columns],
            )

    def _write(self, side: int, rows: Rows, chunks: Chunks) -> Int64Array:
        """Write the rows that stay; return when keys are due."""
        head, state, overlay = self._heads[side], self._join.states[side], self._work.overlay
        count = len(head.entries)
        rows = rows.and_then(self._new[side])
        if side == RIGHT:
            is_outdone = np.zeros(len(rows), np.bool_)
            is_outdone[:-1] = (np.diff(rows.codes) == 0) & (np.diff(rows.times) == 0)
            is_past = rows.times <= self._until
            is_outdone[:-1] |= (np.diff(rows.codes) == 0) & is_past[1:]
            rows = rows.filter(~is_outdone)
        rows, chunks = state.move_to_chunks(overlay, head, chunks, rows, _first_times)
        codes = np.concatenate([rows.codes, chunks.codes, chunks.codes])
        times = np.concatenate([rows.times, chunks.firsts, chunks.lasts])
        due = least(times, codes, count, NEVER)
        if side == RIGHT:  # the first one can go when there is a second, and not before
            later = times > due[codes]
            due = least(times[later], codes[later], count, NEVER)
        state.write_heads(overlay, head, rows, chunks, due)
        return due


def _first_times(rows: Rows, count: int) -> Int64Array:
    return least(rows.times, rows.codes, count, NEVER)
