"""Folds: the accumulators of aggregates in windows, which can be made in parts and merged.

A fold has accumulators, one line per group of rows; groups are numbered by `KeyedBatch.codes`.
`add` makes a line per group from rows, `merge` makes a line per group from earlier lines, `result`
reads lines. Each group has at least one row, or line.

Invariant: lines may be merged in any order and any grouping. Where two rows of one time compete,
the one that stands first in the batch arrived first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tallystick.codec.values import with_wide_decimals
from tallystick.errors import OptionError
from tallystick.state.functions import fold_kernels
from tallystick.state.functions.keyed_batch import Int64Array, KeyedBatch, order_by_key
from tallystick.state.meaning import Meaning, meaning_of
from tallystick.state.overlay import EpochTime

TIME = "$time"
"""The column with the rows' event times in microseconds, as `add` gets them."""

LATEST, ANY = "latest", "any"
"""The value that an aggregate picks of a column: of times, one not before the newest row's, or some
row's."""

Columns = Sequence[pa.Array]


class Pick(NamedTuple):
    """The value that an aggregate picks: the column, and `LATEST`, `ANY`, or "" for none."""

    column: str
    which: str


def picked(picks: Mapping[str, Pick], times: Mapping[str, int], *which: str) -> dict[str, int]:
    """Return the lag of each aggregate that picks a value of a time column, in ms.

    Args:
        picks: by the name of the aggregate's column in the output.
        times: the lag of each time column of the rows, in ms.
        which: the rules that count.
    """
    return {
        name: times[pick.column]
        for name, pick in picks.items()
        if pick.which in which and pick.column in times
    }


@dataclass(frozen=True)
class Fold:
    """One aggregate over groups of rows, with all types known.

    Args:
        schema: of the accumulators.
        kind: of the result.
        add: a line of accumulators per group, from rows.
        merge: a line per group, from lines with the columns of `schema`.
        result: the value of each line.
        text: the making of the accumulators in words, as `Aggregate.text`.
    """

    schema: pa.Schema
    kind: pa.DataType
    add: Callable[[KeyedBatch], Columns]
    merge: Callable[[KeyedBatch], Columns]
    result: Callable[[pa.RecordBatch], pa.Array]
    text: str = ""


@dataclass(frozen=True)
class Folds:
    """Several folds side by side, each under the name of its column in the output.

    Args:
        by_name: the folds.
        picks: the values that the aggregates pick, by name.
    """

    by_name: Mapping[str, Fold]
    picks: Mapping[str, Pick] = field(default_factory=dict)

    @cached_property
    def schema(self) -> pa.Schema:
        """The accumulators of all folds: `name`, or `name.part` where a fold has several."""
        fields = []
        for name, fold in self.by_name.items():
            for column in fold.schema:
                text = f"{name}.{column.name}" if len(fold.schema) > 1 else name
                fields.append(pa.field(text, column.type))
        return pa.schema(fields)

    @property
    def meaning(self) -> Meaning:
        """The meaning of the accumulators of windows."""
        texts = {f"aggregates.{name}": fold.text for name, fold in self.by_name.items()}
        return meaning_of("windowed", texts)

    @cached_property
    def output(self) -> pa.Schema:
        """The columns of the results."""
        return pa.schema([(name, fold.kind) for name, fold in self.by_name.items()])

    def add(
        self,
        rows: pa.RecordBatch,
        times: Int64Array,
        codes: NDArray[np.int32],
        keys: pa.RecordBatch,
    ) -> pa.RecordBatch:
        """Return a line of accumulators per group.

        Args:
            rows: in the order of their arrival.
            times: of each row, in microseconds.
            codes: the group of each row.
            keys: of each group, for messages.
        """
        batch = _batch(rows.append_column(TIME, pa.array(times)), codes, keys)
        columns = [column for fold in self.by_name.values() for column in fold.add(batch)]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def merge(
        self, lines: pa.RecordBatch, codes: NDArray[np.int32], keys: pa.RecordBatch
    ) -> pa.RecordBatch:
        """Merge the lines of each group into a single line."""
        columns: list[pa.Array] = []
        for fold, own in self._parts(lines):
            columns += fold.merge(_batch(own, codes, keys))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def results(self, lines: pa.RecordBatch) -> pa.RecordBatch:
        """Return the results of lines of accumulators."""
        values = [fold.result(own) for fold, own in self._parts(lines)]
        return pa.RecordBatch.from_arrays(values, schema=self.output)

    def _parts(self, lines: pa.RecordBatch) -> list[tuple[Fold, pa.RecordBatch]]:
        parts, at = [], 0
        for fold in self.by_name.values():
            own = lines.columns[at : at + len(fold.schema)]
            parts.append((fold, pa.RecordBatch.from_arrays(own, schema=fold.schema)))
            at += len(fold.schema)
        return parts


def _batch(rows: pa.RecordBatch, codes: NDArray[np.int32], keys: pa.RecordBatch) -> KeyedBatch:
    return KeyedBatch(rows, codes, keys, keys, np.zeros(keys.num_rows, np.bool_), EpochTime(0))


def single(
    kind: pa.DataType,
    add: Callable[[KeyedBatch], pa.Array],
    merge: Callable[[KeyedBatch, str], pa.Array],
) -> Fold:
    """Return a fold with a single accumulator, which is also the result.

    Args:
        kind: of the accumulator.
        add: as `Fold.add`, one column.
        merge: the same from a batch of lines, and the name of their column.
    """
    return Fold(
        pa.schema([("value", kind)]),
        kind,
        lambda batch: [add(batch)],
        lambda batch: [merge(batch, "value")],
        lambda lines: lines.column(0),
    )


def by_time(column: str, kind: pa.DataType, *, is_last: bool) -> Fold:
    """Return the fold that keeps the value of each group's first or last row in time, a null too.

    Args:
        column: of the rows.
        kind: of the column's values.
        is_last: of rows of one time the last to arrive; else the first one, of the first to arrive.
    """
    bounds = np.iinfo(np.int64)
    none = int(bounds.min if is_last else bounds.max)

    def add(batch: KeyedBatch) -> Columns:
        return edges(batch, TIME, typed(batch, column, kind).column(column))

    def edges(batch: KeyedBatch, time: str, values: pa.Array) -> Columns:
        # A window that was open before the program had the aggregate knows of no row.
        times: Int64Array = batch.column(time).fill_null(none).to_numpy()
        order = order_in_time(batch.codes, len(batch), times)
        ends = np.cumsum(np.bincount(batch.codes, minlength=len(batch)))
        places = ends - 1 if is_last else np.concatenate([[0], ends[:-1]])
        rows = pa.array(order[places])
        return [pa.array(times).take(rows), values.take(rows)]

    return Fold(
        pa.schema([("time", pa.int64()), ("value", kind)]),
        kind,
        add,
        lambda batch: edges(batch, "time", batch.column("value")),
        lambda lines: lines.column(1),
    )


def order_in_time(codes: NDArray[np.int32], count: int, times: Int64Array) -> Int64Array:
    """Return the row numbers group by group, within a group by time; ties stay in their order."""
    order = order_by_key(codes, count)
    grouped = codes[order].astype(np.int64)
    if fold_kernels.is_sorted(grouped, times[order]):  # mostly rows come in time's order
        return order
    return np.lexsort((times, codes))


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_floating(kind):
        return column.cast(kind, safe=False)
    return column.cast(with_wide_decimals(kind)).cast(kind)


def typed(batch: KeyedBatch, name: str, kind: pa.DataType) -> KeyedBatch:
    """Return the batch with a column of the rows cast to a type; to floats with rounding.

    Raises:
        OptionError: the column has values that the type does not hold.
    """
    column = batch.column(name)
    if column.type == kind:
        return batch
    try:
        return replace(
            batch,
            rows=pa.record_batch({name: _cast(column, kind)}),
        )
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise OptionError(
            f"column {name!r} is {column.type}, but the function was made for {kind}: {error}"
        ) from error
