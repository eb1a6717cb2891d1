"""The columns of a join: of each side, and of the output.

A row of output is

    key columns | columns of the left side | columns of the right side

without the sides' own columns of the key's names. A column of the right side whose name is taken
is called `<right>_<name>`, so the left side's names do not depend on the right's.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tallystick.errors import OptionError, RecordError
from tallystick.state.functions.inputs import INPUT, TIME, CarriedColumns
from tallystick.state.functions.processing import check_event_times
from tallystick.state.meaning import Meaning, meaning_of, name_text

LEFT, RIGHT = range(2)
"""The sides of a join."""
INNER, LEFT_OUTER, RIGHT_OUTER, FULL_OUTER = "inner", "left", "right", "full"
HOWS = (INNER, LEFT_OUTER, RIGHT_OUTER, FULL_OUTER)
"""The kinds of joins, numbered by which sides are outer: 1 for the left one, 2 for the right."""

Int64Array = NDArray[np.int64]


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
        raise OptionError(f"{function}: how={how!r}, expected one of {', '.join(among)}")
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
            f"{function}: there is no input {name!r}; read() and key_by() name {', '.join(names)}"
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
