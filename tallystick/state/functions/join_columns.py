"""The parts of which joins are made: columns, keys at work, rows with times, pairs by time.

A row of output is

    key columns | columns of the left side | columns of the right side

without the sides' own columns of the key's names. A column of the right side whose name is taken
is called `<right>_<name>`, so the left side's names do not depend on the right's.

Pairs are numbers into arrays of rows that are sorted by the number of the key, then by time.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tallystick.arguments import near, not_one_of
from tallystick.codec.spans import Int64Array, spans_of
from tallystick.errors import OptionError, RecordError
from tallystick.state.entries import (
    TIMERS_BY_TIME,
    Keys,
    distinct_keys,
    due_keys,
    keys_of,
    time_keys,
)
from tallystick.state.functions.inputs import INPUT, TIME, CarriedColumns
from tallystick.state.functions.processing import Work, check_event_times
from tallystick.state.meaning import Meaning, meaning_of, name_text
from tallystick.state.overlay import Overlay

LEFT, RIGHT = range(2)
"""The sides of a join."""
INNER, LEFT_OUTER, RIGHT_OUTER, FULL_OUTER = "inner", "left", "right", "full"
HOWS = (INNER, LEFT_OUTER, RIGHT_OUTER, FULL_OUTER)
"""The kinds of joins, numbered by which sides are outer: 1 for the left one, 2 for the right."""

BoolArray = NDArray[np.bool_]


def outer_sides(function: str, how: str, among: Sequence[str] = HOWS) -> tuple[bool, bool]:
    """Return which sides' rows come out without a partner too.

    Args:
        function: the name of the join, for messages.
        how: as in SQL.
        among: the kinds that the join has.

    Raises:
        OptionError: there is no such kind of join.
    """
    if how not in among:
        raise not_one_of("how", how, among, of=function)
    return how in (LEFT_OUTER, FULL_OUTER), how in (RIGHT_OUTER, FULL_OUTER)


def carried(
    function: str,
    names: tuple[str, str],
    columns: Mapping[str, Collection[str]] | None,
    needed: Mapping[str, Collection[str]] | None = None,
) -> CarriedColumns:
    """Check the option `columns` of a join; return the columns to carry from each input.

    Args:
        function: the name of the join, for messages.
        names: of the inputs.
        columns: the option: columns for the output, by input.
        needed: columns that the join reads, by input.

    Raises:
        OptionError: the option is not columns by the name of an input.
    """
    given = {} if columns is None else columns
    is_right = isinstance(given, Mapping) and all(
        not isinstance(chosen, str) and all(isinstance(name, str) for name in chosen)
        for chosen in given.values()
    )
    if not is_right or given.keys() - set(names):
        raise OptionError(
            f"{function}: columns={columns!r}: expected names of columns by the name of an input, "
            f"{{{names[0]!r}: ['amount'], {names[1]!r}: []}}"
        )
    return CarriedColumns(given, needed or {})


def inputs_in(rows: pa.Schema, function: str) -> tuple[str, ...]:
    """Return the names of the inputs whose rows come as one table, in the order of their numbers.

    Args:
        rows: the columns of the table.
        function: the name of the function, for messages.

    Raises:
        OptionError: the rows are those of a single input.
    """
    if INPUT not in rows.names or TIME not in rows.names:
        raise OptionError(
            f"{function}: the step has a single input. Name several, and the key of each: "
            f"read(orders=…, payments=…).key_by(orders='id', payments='order_id')"
        )
    return tuple(rows.names[rows.names.index(TIME) + 1 :])


def columns_of_input(rows: pa.Schema, name: str, function: str) -> pa.Schema:
    """Return the columns of an input.

    Raises:
        OptionError: no input has this name.
    """
    names = inputs_in(rows, function)
    if name not in names:
        raise OptionError(
            f"{function}: there is no input {name!r}; read() and key_by() name {', '.join(names)}."
            f"{near(name, names)}"
        )
    return pa.schema(list(rows.field(name).type))


@dataclass(frozen=True)
class JoinColumns:
    """The columns of a join of two inputs.

    Args:
        function: the name of the join, for messages.
        rows: the columns of the step's rows.
        names: of the inputs, left and right.
        own: columns that the function adds, after the key's.
    """

    function: str
    rows: pa.Schema
    names: tuple[str, str]
    own: tuple[pa.Field, ...] = ()

    def __post_init__(self) -> None:
        left_name, right_name = self.names
        if left_name == right_name:
            raise OptionError(
                f"{self.function}: both sides are {left_name!r}: to join an input with itself, "
                f"read it twice, under two names"
            )
        inputs_in(self.rows, self.function)
        repeated = [name for name in self.output.names if self.output.names.count(name) > 1]
        if repeated:
            raise OptionError(
                f"{self.function}: the output would have {repeated[0]!r} twice: rename the column "
                f"in a map_batches of {right_name!r}"
            )

    @cached_property
    def key(self) -> pa.Schema:
        """The columns of the key."""
        return pa.schema(list(self.rows)[: self.rows.names.index(INPUT)])

    @cached_property
    def sides(self) -> tuple[pa.Schema, pa.Schema]:
        """The columns of each side besides the key's, under their own names."""
        left_columns, right_columns = (
            pa.schema(
                [
                    pa.field(column.name, column.type)
                    for column in columns_of_input(self.rows, name, self.function)
                    if column.name not in self.key.names
                ]
            )
            for name in self.names
        )
        return left_columns, right_columns

    @cached_property
    def output(self) -> pa.Schema:
        """The columns of the output."""
        left_columns, right_columns = self.sides
        head = [
            pa.field(column.name, column.type) for column in (*self.key, *self.own, *left_columns)
        ]
        taken = {column.name for column in head}
        prefix = self.names[RIGHT]
        return pa.schema(
            [
                *head,
                *(
                    column.with_name(f"{prefix}_{column.name}") if column.name in taken else column
                    for column in right_columns
                ),
            ]
        )

    def meaning(
        self, outer: tuple[bool, bool], arguments: Mapping[str, str] | None = None
    ) -> Meaning:
        """Return the meaning of the state of a join.

        Args:
            outer: which sides' rows come out without a partner too.
            arguments: of the function, as text.
        """
        sides = {"left": name_text(self.names[LEFT]), "right": name_text(self.names[RIGHT])}
        how = HOWS[outer[LEFT] + 2 * outer[RIGHT]]
        return meaning_of(self.function, {**sides, "how": name_text(how), **(arguments or {})})

    def lags_of(self, times: Mapping[str, int], sides: Sequence[int | None]) -> dict[str, int]:
        """Return the lag of each time column of the output, in ms.

        Args:
            times: the time columns of the rows, as `input.column`.
            sides: the lag of the times of either side, in ms; None: any time.
        """
        own = [(side, column.name) for side, of_it in enumerate(self.sides) for column in of_it]
        put_out = self.output.names[len(self.output) - len(own) :]
        lags_ms = {}
        for (side, name), column in zip(own, put_out, strict=True):
            lag_ms = sides[side]
            if lag_ms is not None and f"{self.names[side]}.{name}" in times:
                lags_ms[column] = lag_ms
        return lags_ms

    def numbers(self) -> tuple[int, int]:
        """Return the numbers of the left and the right input."""
        names = inputs_in(self.rows, self.function)
        return names.index(self.names[LEFT]), names.index(self.names[RIGHT])

    def joined(
        self,
        keys: Sequence[pa.Array],
        left_columns: Sequence[pa.Array] | None,
        right_columns: Sequence[pa.Array] | None,
        own: Sequence[pa.Array] = (),
    ) -> pa.RecordBatch:
        """Return rows of output.

        Args:
            keys: the key's columns.
            left_columns: the left side's columns; None: there is no partner.
            right_columns: the right side's.
            own: the function's columns.
        """
        count = len(keys[0])
        sides = [
            [pa.nulls(count, column.type) for column in self.sides[at]]
            if columns is None
            else columns
            for at, columns in enumerate((left_columns, right_columns))
        ]
        arrays = [*keys, *own, *sides[LEFT], *sides[RIGHT]]
        return pa.RecordBatch.from_arrays(arrays, schema=self.output)

    def part_of(self, side: int, rows: pa.RecordBatch) -> tuple[Int64Array, tuple[pa.Array, ...]]:
        """Return the numbers of a side's rows, and the side's columns of these rows."""
        wanted = np.int8(self.numbers()[side])
        at = np.flatnonzero(rows.column(INPUT).to_numpy() == wanted)
        structs = rows.column(self.names[side])
        if len(at) < len(structs):
            structs = structs.take(pa.array(at))
        columns = structs.flatten()
        kept = [structs.type.get_field_index(column.name) for column in self.sides[side]]
        return at, tuple(columns[index] for index in kept)

    def times_of(self, side: int, rows: pa.RecordBatch, at: Int64Array) -> Int64Array:
        """Return the event times of rows of a side in ms.

        Raises:
            RecordError: a row has none, or one that no event can have had.
        """
        times = rows.column(TIME).take(pa.array(at))
        what = f"{self.function}, input {self.names[side]!r}"
        if times.null_count:
            raise RecordError(
                f"{what}: {times.null_count} rows have no event time, by which they are joined: "
                f"give event_time= its column, and filter out rows in which it is null"
            )
        check_event_times(times, what)
        values: Int64Array = times.to_numpy()
        return values


def in_time(times: Int64Array, watermark_ms: int | None) -> NDArray[np.bool_]:
    """Return a mask of the rows after the watermark; all others are late."""
    if watermark_ms is None:
        return np.ones(len(times), np.bool_)
    return times > watermark_ms


def taken(columns: Sequence[pa.Array], rows: NDArray[np.int64]) -> list[pa.Array]:
    """Return some rows of columns."""
    numbers = pa.array(rows)
    return [column.take(numbers) for column in columns]


def end_to_end(one: Sequence[pa.Array], two: Sequence[pa.Array]) -> tuple[pa.Array, ...]:
    """Concatenate the rows of two tables of equal columns."""
    return tuple(pa.concat_arrays(pair) for pair in zip(one, two, strict=True))


def moments_of(times_ms: Int64Array) -> pa.Array:
    """Return moments as timestamps."""
    return pc.multiply(pa.array(times_ms), 1000).cast(pa.timestamp("us", tz="UTC"))


# ---- keys at work --------------------------------------------------------------------------------

NEVER = (1 << 63) - 1
"""The due time of a key without a timer."""


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


# ---- pairs by time -------------------------------------------------------------------------------


def ranges(
    codes: Int64Array,
    firsts: Int64Array,
    lasts: Int64Array,
    of_codes: Int64Array,
    of_times: Int64Array,
) -> tuple[Int64Array, Int64Array]:
    """Return which rows have a key and a time within bounds: from a start to before a stop.

    Args:
        codes: a key for each range.
        firsts: the least time of each, included.
        lasts: the greatest, included; none is before its first.
        of_codes: the key of each row.
        of_times: its time; rows are sorted by code, then time.
    """
    moments = np.unique(of_times)
    # One number for key and time, from 0: the rank of a moment instead of itself cannot overflow.
    width = len(moments) + 1
    places = of_codes * width + np.searchsorted(moments, of_times)
    starts = codes * width + np.searchsorted(moments, firsts, "left")
    stops = codes * width + np.searchsorted(moments, lasts, "right")
    return np.searchsorted(places, starts), np.searchsorted(places, stops)


def pairs(
    starts: Int64Array, stops: Int64Array, count_max: int
) -> Iterator[tuple[Int64Array, Int64Array]]:
    """Yield each range's number with each row in it, at most so many pairs at a time.

    Args:
        starts: of the ranges, as `ranges` returns them.
        stops: their ends.
        count_max: bounds the memory: a skewed key has many pairs.
    """
    counts = stops - starts
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    offsets = starts - (ends - counts)
    for first in range(0, total, count_max):
        numbers = np.arange(first, min(first + count_max, total))
        whose = np.searchsorted(ends, numbers, "right")
        yield whose, numbers + offsets[whose]


def covered(starts: Int64Array, stops: Int64Array, count: int) -> BoolArray:
    """Return which of `count` rows lie in a range."""
    opened = np.bincount(starts, minlength=count + 1)
    closed = np.bincount(stops, minlength=count + 1)
    inside: BoolArray = np.cumsum(opened - closed)[:count] > 0
    return inside


def order_of(codes: Int64Array, times: Int64Array) -> Int64Array:
    """Return the order of rows by code, then time; ties stay in their order."""
    order: Int64Array = np.lexsort((times, codes))
    return order


def least(values: Int64Array, codes: Int64Array, count: int, otherwise: int) -> Int64Array:
    """Return the least value of each code; `otherwise` for a code without values."""
    by_code = np.full(count, otherwise, np.int64)
    np.minimum.at(by_code, codes, values)
    return by_code


def greatest(values: Int64Array, codes: Int64Array, count: int, otherwise: int) -> Int64Array:
    """Return the greatest value of each code; `otherwise` for a code without values."""
    by_code = np.full(count, otherwise, np.int64)
    np.maximum.at(by_code, codes, values)
    return by_code


# ---- rows with times -----------------------------------------------------------------------------

ROW_BYTES = 16
"""The bytes that a row takes in state besides its own."""


@dataclass(frozen=True)
class Rows:
    """Some rows of one side of a join.

    Args:
        codes: the number of each row's key, or of its chunk.
        times: in ms.
        matched: whether the row has had a partner; changed in place.
        data: the rows as bytes.
        columns: their columns.
    """

    codes: Int64Array
    times: Int64Array
    matched: BoolArray
    data: pa.BinaryArray
    columns: tuple[pa.Array, ...]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.codes)

    def take(self, rows: Int64Array) -> Self:
        """Return the rows with some numbers, in the order of the numbers."""
        numbers = pa.array(rows)
        return type(self)(
            self.codes[rows],
            self.times[rows],
            self.matched[rows],
            self.data.take(numbers),
            tuple(column.take(numbers) for column in self.columns),
        )

    def filter(self, mask: BoolArray) -> Self:
        """Return the rows where the mask is true."""
        return self if mask.all() else self.take(np.flatnonzero(mask))

    def of_keys(self, first: int, stop: int) -> Self:
        """Return the rows of some keys, numbered from 0; they must be sorted by key."""
        begin, end = np.searchsorted(self.codes, [first, stop]).tolist()
        return type(self)(
            self.codes[begin:end] - first,
            self.times[begin:end],
            self.matched[begin:end],
            self.data.slice(begin, end - begin),
            tuple(column.slice(begin, end - begin) for column in self.columns),
        )

    def ordered(self) -> Self:
        """Sort the rows by key, then time; ties stay in their order."""
        order = order_of(self.codes, self.times)
        return self if (order[1:] > order[:-1]).all() else self.take(order)

    def and_then(self, later: Self) -> Self:
        """Add rows that arrived later; return all rows by key and time."""
        return self.followed_by(later).ordered() if len(later) else self

    def followed_by(self, later: Self) -> Self:
        """Append other rows, without sorting."""
        return type(self)(
            np.concatenate([self.codes, later.codes]),
            np.concatenate([self.times, later.times]),
            np.concatenate([self.matched, later.matched]),
            pa.concat_arrays([self.data, later.data]),
            end_to_end(self.columns, later.columns),
        )

    @property
    def sizes(self) -> Int64Array:
        """The size of each row in state, in bytes."""
        return np.maximum(spans_of(self.data, "state").lengths, 0) + ROW_BYTES
