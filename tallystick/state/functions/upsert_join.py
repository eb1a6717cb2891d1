"""An upsert join: both inputs are tables, with the newest row of each key.

The state of a key is its row of each side; whenever rows arrive, the joined row is made again, and
put out if it has changed.

Source: Flink's StreamingJoinOperator on two upsert tables with one key, and Kafka Streams' joins of
two KTables.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.arguments import checked
from tallystick.errors import OptionError, RecordError
from tallystick.state.functions.join_columns import (
    INNER,
    LEFT,
    RIGHT,
    JoinColumns,
    carried,
    columns_of_input,
    order_of,
    outer_sides,
    taken,
)
from tallystick.state.functions.joins import SIDES
from tallystick.state.functions.keyed_batch import BoolArray, Int64Array, KeyedBatch, Update
from tallystick.state.functions.processing import NO_TIME
from tallystick.state.functions.vectorised import ByColumns, VectorisedFunction
from tallystick.state.meaning import name_text
from tallystick.state.numpy_columns import valid_of
from tallystick.state.row_codec import ColumnsCodec, changed_rows

CHANGE = "change"
INSERT, UPDATE, DELETE = "insert", "update", "delete"
_CHANGES = pa.array([INSERT, UPDATE, DELETE])


@checked
def upsert_join(
    left: str,
    right: str,
    *,
    how: str = INNER,
    newest_by: Mapping[str, str] | None = None,
    deleted: Mapping[str, str] | None = None,
    columns: Mapping[str, Collection[str]] | None = None,
) -> ByColumns:
    """Join two tables by their key: each input's row is the newest of the key.

    Puts out the key, `change`, the left input's columns and the right one's, when the joined row of
    a key has changed: "insert", "update", or "delete" with the row as it was. Of the changes within
    an epoch only the last comes out, so the number of changes depends on epochs, and the table that
    they add up to does not.

    Args:
        left: the name of an input.
        right: the name of another input.
        how: "inner", "left", "right" or "full".
        newest_by: for an input, the column by whose value a row is newer: whole numbers or moments,
            not null; of equal ones the later arrived. An input that is not named: as they arrive.
        deleted: for an input, a boolean column that is true in a row that deletes the key's row.
        columns: as of `interval_join`; those of `newest_by` and `deleted` are among them.

    Raises:
        OptionError: an argument has a wrong type or value.
    """
    outer = outer_sides("upsert_join", how)
    orders, gone = dict(newest_by or {}), dict(deleted or {})
    for option, given in (("newest_by", orders), ("deleted", gone)):
        for name in given.keys() - {left, right}:
            raise OptionError(
                f"upsert_join: {option} names {name!r}: expected {left!r} or {right!r}"
            )

    read = {
        name: [option[name] for option in (orders, gone) if name in option]
        for name in (left, right)
    }
    carried_columns = carried("upsert_join", (left, right), columns, read)

    def make(rows: pa.Schema) -> VectorisedFunction:
        own = (pa.field(CHANGE, pa.string()),)
        both = JoinColumns("upsert_join", rows, (left, right), own)
        tables = tuple(
            _Table(both, side, orders.get(name), gone.get(name))
            for side, name in enumerate((left, right))
        )
        state = pa.schema([field for table in tables for field in table.state])
        function = _UpsertJoin(both, tables, outer, ColumnsCodec(state, "upsert_join"))
        arguments = {name: text for table in tables for name, text in table.arguments.items()}
        return VectorisedFunction(
            function,
            state,
            NO_TIME,
            None,
            lambda key, rows: both.output,
            meaning=both.meaning(outer, arguments),
        )

    return ByColumns(make, None, carried=carried_columns)


@dataclass(frozen=True)
class _Table:
    """One side: the newest row of each key.

    Args:
        columns: of the join.
        side: `LEFT` or `RIGHT`.
        order: the column by whose value a row is newer; None: the order of arrival.
        deleted: the column that is true in a row that deletes; None: no row deletes.
    """

    columns: JoinColumns
    side: int
    order: str | None
    deleted: str | None

    def __post_init__(self) -> None:
        name = self.columns.names[self.side]
        schema = columns_of_input(self.columns.rows, name, "upsert_join")
        for option, column, fits, expected in (
            ("newest_by", self.order, _is_ordered, "whole numbers, date or timestamp"),
            ("deleted", self.deleted, pa.types.is_boolean, "boolean"),
        ):
            if column is None:
                continue
            if column not in schema.names:
                raise OptionError(
                    f"upsert_join: {option} of {name!r} is {column!r}, which is none of its "
                    f"columns {', '.join(schema.names)}"
                )
            if not fits(schema.field(column).type):
                raise OptionError(
                    f"upsert_join: {option} of {name!r}: column {column!r} is "
                    f"{schema.field(column).type}, expected {expected}"
                )

    @property
    def arguments(self) -> dict[str, str]:
        """The arguments that decide the row of a key in the state."""
        name = self.columns.names[self.side]
        return {
            f"newest_by[{name_text(name)}]": _named_or(self.order, "the order of arrival"),
            f"deleted[{name_text(name)}]": _named_or(self.deleted, "no column"),
        }

    @property
    def state(self) -> list[pa.Field]:
        """The columns of the state: a flag for a row, the row's version, and the row's columns."""
        name = SIDES[self.side]
        return [
            pa.field(f"${name}", pa.bool_()),
            pa.field(f"${name}_version", pa.int64()),
            *(
                column.with_name(f"{name}_{column.name}")
                for column in self.columns.sides[self.side]
            ),
        ]

    def column(self, rows: pa.RecordBatch, at: Int64Array, name: str) -> pa.Array:
        """Return a column of the side's rows."""
        structs = rows.column(self.columns.names[self.side])
        return pc.struct_field(structs, name).take(pa.array(at))

    def versions(self, rows: pa.RecordBatch, at: Int64Array) -> Int64Array:
        """Return the version of each row of this side: the value of the order column, else 0.

        Raises:
            RecordError: a row is null in the order column.
        """
        if self.order is None:
            return np.zeros(len(at), np.int64)
        column = self.column(rows, at, self.order)
        if column.null_count:
            raise RecordError(
                f"upsert_join, input {self.columns.names[self.side]!r}: {column.null_count} rows "
                f"have no {self.order!r}, which says which is the newest: filter them out before"
            )
        if pa.types.is_date32(column.type):
            column = column.cast(pa.int32())
        numbers: Int64Array = column.cast(pa.int64()).to_numpy()
        return numbers

    def after(self, batch: KeyedBatch, state: list[pa.Array]) -> list[pa.Array]:
        """Return the state of this side after the rows of the batch."""
        at, columns = self.columns.part_of(self.side, batch.rows)
        if not len(at):
            return state
        codes, versions = batch.codes[at].astype(np.int64), self.versions(batch.rows, at)
        order = order_of(codes, versions)
        newest = order[np.append(np.diff(codes[order]) > 0, True)]
        row = np.full(len(batch), -1)
        row[codes[newest]] = newest
        before = state[1].fill_null(np.iinfo(np.int64).min).to_numpy()
        wins = (row >= 0) & (versions[row] >= before)
        is_gone = np.zeros(len(at), np.bool_)
        if self.deleted is not None:
            flags = self.column(batch.rows, at, self.deleted).fill_null(False)
            is_gone = flags.to_numpy(zero_copy_only=False)
        is_there = np.where(wins, ~is_gone[row], _is_true(state[0]))
        is_known = is_there | ((wins | valid_of(state[1])) & (self.order is not None))
        version = np.where(wins, versions[row], before)
        source = np.where(wins, len(batch) + row, np.arange(len(batch)))
        chosen = pa.array(source, mask=~is_there)
        pairs = zip(state[2:], columns, strict=True)
        return [
            pa.array(is_there, mask=~is_known),
            pa.array(version, mask=~is_known),
            *(pa.concat_arrays(pair).take(chosen) for pair in pairs),
        ]


@dataclass(frozen=True)
class _UpsertJoin:
    """The function of `upsert_join`."""

    columns: JoinColumns
    tables: tuple[_Table, ...]
    outer: tuple[bool, bool]
    codec: ColumnsCodec

    def __call__(self, batch: KeyedBatch) -> Update:
        """Return the changes and the state after the rows."""
        width = len(self.tables[LEFT].state)
        before = list(batch.state.columns)
        after = [
            *self.tables[LEFT].after(batch, before[:width]),
            *self.tables[RIGHT].after(batch, before[width:]),
        ]
        state = pa.RecordBatch.from_arrays(after, schema=self.codec.schema)
        was, there = self._is_joined(before, width), self._is_joined(after, width)
        seen = [self._seen(columns, width) for columns in (before, after)]
        differs = changed_rows(*map(self.codec.encode, seen))
        kinds = np.where(there, np.where(was, 1, 0), 2)
        which = np.flatnonzero((there != was) | (there & differs))
        count = len(batch)
        chosen = np.where(there, np.arange(count) + count, np.arange(count))[which]
        both = [pa.concat_arrays(pair) for pair in zip(before, after, strict=True)]
        output = self.columns.joined(
            taken(batch.keys.columns, which),
            taken(both[2:width], chosen),
            taken(both[width + 2 :], chosen),
            [_CHANGES.take(pa.array(kinds[which]))],
        )
        return Update(output, state)

    def _is_joined(self, state: list[pa.Array], width: int) -> BoolArray:
        """Return a mask of the keys with a joined row."""
        has_left, has_right = _is_true(state[0]), _is_true(state[width])
        with_left = has_left & (has_right | self.outer[LEFT])
        joined: BoolArray = with_left | (has_right & (has_left | self.outer[RIGHT]))
        return joined

    def _seen(self, state: list[pa.Array], width: int) -> pa.RecordBatch:
        """Return the state without versions: a new version alone does not change the joined row."""
        nothing = pa.nulls(len(state[0]), pa.int64())
        arrays: list[Any] = list(state)
        for at in (0, width):
            arrays[at], arrays[at + 1] = pa.array(_is_true(state[at])), nothing
        return pa.RecordBatch.from_arrays(arrays, schema=self.codec.schema)


def _named_or(column: str | None, otherwise: str) -> str:
    return otherwise if column is None else name_text(column)


def _is_true(flags: pa.BooleanArray) -> BoolArray:
    mask: BoolArray = flags.fill_null(False).to_numpy(zero_copy_only=False)
    return mask


def _is_ordered(kind: pa.DataType) -> bool:
    is_type = pa.types
    return bool(
        is_type.is_signed_integer(kind) or is_type.is_date32(kind) or is_type.is_timestamp(kind)
    )
