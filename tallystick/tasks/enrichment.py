"""The lookup join: columns of a broadcast table's row for each row with its key."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tallystick.arguments import missing_column
from tallystick.errors import OptionError
from tallystick.state.operator_state import TableContent
from tallystick.tasks.frames import conform

INNER, LEFT = "inner", "left"
HOW = (INNER, LEFT)


@dataclass(frozen=True)
class Enrichment:
    """A join of rows with a broadcast table.

    Args:
        uid: of the table.
        on: the columns of the rows, in the order of the table's key.
        how: one of `HOW`.
        columns: names in the table and in the result; None: all but the key's columns.
    """

    uid: str
    on: tuple[str, ...]
    how: str = INNER
    columns: tuple[tuple[str, str], ...] | None = None

    @property
    def __name__(self) -> str:
        """The name of the function, for messages."""
        return f"enrich({self.uid})"

    def join(self, rows: pa.RecordBatch, content: TableContent) -> pa.RecordBatch:
        """Return the rows with the columns of the table's row that has their key.

        A null in a row's key equals nothing, as in SQL.

        Raises:
            OptionError: a column is not there, or would be there twice.
            RecordError: the keys are not of the same kind.
        """
        pairs = self._columns_of(rows, content)
        key = content.codec.key
        mine = pa.RecordBatch.from_arrays(
            [rows[name] for name in self.on], schema=None, names=key.names
        )
        mine = conform(mine, key.schema, f"{self.__name__}: the columns {', '.join(self.on)}")
        places = content.index.find(key.encode(mine))
        for column in mine.columns:
            if column.null_count:
                places = np.where(column.is_null().to_numpy(zero_copy_only=False), -1, places)
        is_found = places >= 0
        if self.how == INNER and not is_found.all():
            rows = rows.filter(pa.array(is_found))
            places, is_found = places[is_found], is_found[is_found]
        taken = pa.array(places, mask=None if is_found.all() else ~is_found)
        arrays = [content.rows.column(name).take(taken).combine_chunks() for name, _ in pairs]
        names = [*rows.schema.names, *(name for _, name in pairs)]
        return pa.RecordBatch.from_arrays([*rows.columns, *map(_array, arrays)], names=names)

    def _columns_of(
        self, rows: pa.RecordBatch, content: TableContent
    ) -> tuple[tuple[str, str], ...]:
        columns, key, mine = content.codec.columns.names, content.codec.key.names, rows.schema.names
        pairs = self.columns
        if pairs is None:
            pairs = tuple((name, name) for name in columns if name not in key)
        for name, new in pairs:
            if name not in columns:
                raise missing_column(f"{self.__name__}: the table", name, columns)
            if mine.count(new) + sum(new == other for _, other in pairs) > 1:
                raise OptionError(
                    f"{self.__name__}: the result would have column {new!r} twice: choose the "
                    f"table's, or rename them, columns={{{name!r}: 'table_{name}'}}"
                )
        for name in self.on:
            if mine.count(name) != 1:
                raise missing_column(f"{self.__name__}: on={name!r}", name, mine)
        return pairs


def _array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        return pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)
    return column
