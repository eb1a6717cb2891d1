"""A temporal join: each left row with the right row that was the newest at its event time.

A left row waits until the watermark reaches its time: then all right rows that are not later have
arrived. Of the right rows a key keeps those after the watermark, and the newest before: later left
rows may need it, so one row per key stays for good.

A right row is never late: a row behind the watermark counts for the left rows to come, if it is
newer than the kept row. Earlier output stays as it was.

Of two right rows of equal time the later arrived counts: rows of a key from one partition have an
order, rows from several partitions do not.

Source: Flink's TemporalRowTimeJoinOperator.
"""

from collections.abc import Collection, Iterator, Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tallystick.state.entries import Keys
from tallystick.state.functions.join_columns import (
    INNER,
    LEFT,
    LEFT_OUTER,
    RIGHT,
    JoinColumns,
    carried,
    outer_sides,
    taken,
)
from tallystick.state.functions.join_keys import NEVER, move_timers
from tallystick.state.functions.join_rows import Rows
from tallystick.state.functions.matching import least, order_of, ranges
from tallystick.state.functions.processing import EVENT_TIME, StateDeclaration, Work
from tallystick.state.functions.range_join import OUTPUT_ROWS, SIDES, visits
from tallystick.state.functions.row_state import Chunks, Head, RowState, of_state
from tallystick.state.functions.vectorised import ByColumns
from tallystick.state.keys import KeyCodec

Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


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
            yield from _Visit(self, work, keys, new).run()


class _Visit:
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
