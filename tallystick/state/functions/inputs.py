"""Rows of several inputs as a single table, for keyed steps with more than one input.

    key columns | $input | $time | bids: struct<…> | people: struct<…>

Each row comes from one input: the row's columns are in the input's struct, the other structs are
null. The key's columns have their names in the first input.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.arguments import missing_column
from tallystick.errors import OptionError

INPUT = "$input"
"""The column that holds the number of a row's input, as int8."""
TIME = "$time"
"""The column that holds a row's event time in ms, as int64; null where it has none."""


@dataclass(frozen=True)
class KeyedInput:
    """An input of a keyed step.

    Args:
        name: of the input.
        columns: of the rows.
        key: the names of the key columns.
        event_time: the column with the event time, a timestamp or bigint in ms; None: the rows have
            no event time.
        carried: the columns that travel to the step, which gets no others; None: all columns.
    """

    name: str
    columns: pa.Schema
    key: tuple[str, ...]
    event_time: str | None = None
    carried: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        named = (*self.key, *([self.event_time] if self.event_time else []))
        for name in named:
            if self.columns.names.count(name) != 1:
                what = f"input {self.name!r}: key_by or event_time names {name!r}"
                raise missing_column(what, name, self.columns.names)

    @cached_property
    def travelling(self) -> pa.Schema:
        """The columns of the input that travel to the step."""
        carried = self.columns.names if self.carried is None else self.carried
        return pa.schema([self.columns.field(name) for name in carried])


@dataclass(frozen=True)
class CarriedColumns:
    """The columns of named inputs that travel to a function: for the output, and for its work.

    Args:
        chosen: columns for the output, by input; of an input that is not named, all but Kafka's.
        needed: columns that the function reads, carried in any case, by input.
    """

    chosen: Mapping[str, Collection[str]]
    needed: Mapping[str, Collection[str]] = field(default_factory=dict)

    def of(self, name: str, columns: Sequence[str], kafkas: Collection[str]) -> tuple[str, ...]:
        """Return the carried columns of an input, in the input's order.

        Args:
            name: of the input.
            columns: all columns of the input.
            kafkas: the columns that Kafka has for each record.

        Raises:
            OptionError: the input has no such column.
        """
        needed = self.needed.get(name, ())
        wanted = self.chosen.get(name, [column for column in columns if column not in kafkas])
        if unknown := sorted({*wanted} - {*columns}):
            raise OptionError(
                f"columns= names {unknown[0]!r} of input {name!r}, which has only "
                f"{', '.join(columns)}"
            )
        return tuple(column for column in columns if column in wanted or column in needed)


@dataclass(frozen=True)
class KeyedInputs:
    """The inputs of a keyed step, in their order.

    Raises:
        OptionError: their keys are of different types, or names are taken twice.
    """

    inputs: Sequence[KeyedInput]

    def __post_init__(self) -> None:
        first = self.inputs[0]
        kinds = _key_types(first)
        for other in self.inputs[1:]:
            if _key_types(other) != kinds:
                raise OptionError(
                    f"the key of input {other.name!r} has types {_names(_key_types(other))}, that "
                    f"of {first.name!r} {_names(kinds)}: rows of equal keys go to one task, so "
                    f"cast one of them in a map_batches"
                )
        names = self.columns.names
        for name in names:
            if names.count(name) > 1:
                raise OptionError(
                    f"{name!r} is the name of an input and of a key's column: rename the input"
                )

    @cached_property
    def columns(self) -> pa.Schema:
        """The columns of the table of all rows."""
        first = self.inputs[0]
        return pa.schema(
            [
                *(first.columns.field(name).with_nullable(True) for name in first.key),
                pa.field(INPUT, pa.int8()),
                pa.field(TIME, pa.int64()),
                *(
                    pa.field(keyed_input.name, pa.struct(list(keyed_input.travelling)))
                    for keyed_input in self.inputs
                ),
            ]
        )

    def numbered(self, number: int, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Convert rows of one input to rows of the table."""
        own_input = self.inputs[number]
        count = rows.num_rows
        time = pa.nulls(count, pa.int64())
        if own_input.event_time is not None:
            time = _in_ms(rows.column(own_input.event_time))
        structs = [
            _struct(rows, keyed_input.travelling)
            if keyed_input is own_input
            else pa.nulls(count, pa.struct(list(keyed_input.travelling)))
            for keyed_input in self.inputs
        ]
        keys = [rows.column(name) for name in own_input.key]
        numbers = pa.array(np.full(count, number, np.int8))
        return pa.RecordBatch.from_arrays([*keys, numbers, time, *structs], schema=self.columns)

    def rows_of(self, number: int, table: pa.RecordBatch) -> pa.RecordBatch:
        """Extract the rows of one input from the table, in order, with the input's own columns."""
        own_input = self.inputs[number]
        of_it = table.filter(pc.equal(table.column(INPUT), number))
        return pa.RecordBatch.from_arrays(
            of_it.column(own_input.name).flatten(), schema=own_input.travelling
        )


def _struct(rows: pa.RecordBatch, columns: pa.Schema) -> pa.StructArray:
    arrays = [rows.column(name) for name in columns.names]
    mask = None if arrays else pa.array(np.zeros(rows.num_rows, np.bool_))  # its only length
    return pa.StructArray.from_arrays(arrays, fields=list(columns), mask=mask)


def _key_types(keyed_input: KeyedInput) -> list[pa.DataType]:
    return [keyed_input.columns.field(name).type for name in keyed_input.key]


def _names(kinds: Sequence[pa.DataType]) -> str:
    return ", ".join(map(str, kinds))


def _in_ms(column: pa.Array) -> pa.Int64Array:
    """Return event times in ms, rounded down."""
    if not pa.types.is_timestamp(column.type):
        return column.cast(pa.int64())
    zone = column.type.tz
    return (
        pc.floor_temporal(column, unit="millisecond")
        .cast(pa.timestamp("ms", zone), safe=False)
        .cast(pa.int64())
    )
