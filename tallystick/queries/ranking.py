"""ROW_NUMBER over windows of time: the rows with the greatest or least values of each window.

Source: Flink SQL's window top-n (FLIP-145).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tallystick.state.functions.aggregates import Aggregate
from tallystick.state.functions.folds import Columns, Fold
from tallystick.state.functions.keyed_batch import Int64Array, KeyedBatch, Update
from tallystick.state.functions.processing import NO_TIME
from tallystick.state.functions.vectorised import VectorisedFunction
from tallystick.state.functions.window_engine import numbered
from tallystick.state.functions.windows import US_PER_MS, Windows
from tallystick.state.meaning import meaning_of, name_text
from tallystick.state.overlay import EpochTime
from tallystick.state.schema import schema_of
from tallystick.tasks.event_times import in_units

ORDER, ROW = "_order", "_row"


@dataclass(frozen=True)
class Places:
    """The rows of a key that are kept.

    Args:
        order: the column of the values; null is below all of them.
        is_descending: the greatest ones are first.
        count: of the rows that are kept.
        with_ties: rows of one value have one place, as in RANK.
    """

    order: str
    is_descending: bool
    count: int = 1
    with_ties: bool = False


def ranked(order_of_rows: Places, place: str | None = None) -> VectorisedFunction:
    """Keep the first rows of each key among those of an epoch, in their order; no state.

    Args:
        order_of_rows: of the rows.
        place: the name of a column for their places, from 1; None: none.
    """

    def first(batch: KeyedBatch) -> Update:
        lines, places = _places(batch, order_of_rows)
        kept = places <= order_of_rows.count
        rows = batch.rows.take(pa.array(lines[kept]))
        if place is not None:
            rows = rows.append_column(place, pa.array(places[kept]))
        return Update(rows)

    def output(_: pa.Schema, rows: pa.Schema) -> pa.Schema:
        return rows if place is None else rows.append(pa.field(place, pa.int64()))

    return VectorisedFunction(
        first,
        schema_of("", "state"),
        NO_TIME,
        output=output,
        meaning=meaning_of("ranked"),
        lags=lambda key, times: times,
    )


def _places(batch: KeyedBatch, order_of_rows: Places) -> "tuple[np.ndarray, np.ndarray]":
    """Return the rows by key and place, and their places."""
    values, codes = batch.column(order_of_rows.order), np.asarray(batch.codes)
    way = "descending" if order_of_rows.is_descending else "ascending"
    is_nan = pc.is_nan(values) if pa.types.is_floating(values.type) else pa.nulls(len(values))
    table = pa.table(
        {
            "code": codes,
            "there": pc.is_valid(values),
            "nan": pc.fill_null(is_nan.cast(pa.bool_()), False),
            "value": values,
        }
    )
    order = [("code", "ascending"), ("there", way), ("nan", way), ("value", way)]
    lines = pc.sort_indices(table, sort_keys=order).to_numpy()
    ordered = codes[lines]
    at = np.arange(len(lines))
    starts = np.r_[True, ordered[1:] != ordered[:-1]] if len(lines) else np.zeros(0, bool)
    places = at - np.maximum.accumulate(np.where(starts, at, 0)) + 1
    if order_of_rows.with_ties and len(lines):
        sorted_values = values.take(pa.array(lines))
        same = pc.equal(sorted_values.slice(1), sorted_values.slice(0, len(lines) - 1))
        is_new = np.r_[True, ~pc.fill_null(same, False).to_numpy(zero_copy_only=False)] | starts
        places = places[np.maximum.accumulate(np.where(is_new, at, 0))]
    return lines, places


def _first_lines(batch: KeyedBatch, order_of_rows: Places) -> Int64Array:
    """Return the number of each key's first row in an order; of equal ones, the first to arrive."""
    values, codes = batch.column(order_of_rows.order), np.asarray(batch.codes)
    fold = batch.max if order_of_rows.is_descending else batch.min
    of_row = fold(order_of_rows.order).take(pa.array(codes))
    is_best = pc.fill_null(pc.equal(values, of_row), False)
    if pa.types.is_floating(values.type):
        both = pc.and_(pc.is_nan(values), pc.is_nan(of_row))
        is_best = pc.or_(is_best, pc.fill_null(both, False))
    is_best = pc.or_(is_best, pc.is_null(of_row))
    if not order_of_rows.is_descending and values.null_count:  # null is the least
        has_null = np.zeros(len(batch), np.bool_)
        has_null[codes[pc.is_null(values).to_numpy(zero_copy_only=False)]] = True
        is_best = pc.if_else(pa.array(has_null[codes]), pc.is_null(values), is_best)
    places = np.flatnonzero(is_best.to_numpy(zero_copy_only=False))[::-1]
    lines = np.zeros(len(batch), np.int64)
    lines[codes[places]] = places
    return lines


@dataclass(frozen=True)
class FirstOfBatch:
    """A predicate of `filter`: true for the first row of each key and window in a batch.

    The others change no result, and would only be sent. True too for the latest row, since it moves
    the watermark, and for rows without a time, which the keyed step refuses.

    Args:
        windows: of which all rows of a pane have the same ones.
        time: the column of event times.
        keys: the columns that tell rows of a window apart.
        order_of_rows: which row is the first; None: that which arrived first.
    """

    windows: Windows
    time: str
    keys: tuple[str, ...]
    order_of_rows: Places | None = None
    reuses_memory: ClassVar[bool] = False

    @property
    def __name__(self) -> str:
        """The rows that stay, as the function's name in messages."""
        return f"the first rows of {self.windows.text}"

    def __call__(self, rows: pa.RecordBatch) -> pa.Array:
        """Return the mask of the rows that stay."""
        times, per_ms = in_units(rows.column(self.time))
        if times.null_count == len(times):
            return pa.array(np.ones(len(times), np.bool_))
        latest = pc.max(times).as_py()
        moments = pc.fill_null(times, latest).to_numpy() * (US_PER_MS // per_ms)
        codes: NDArray[np.int32] = np.zeros(len(times), np.int32)
        for name in self.keys:
            coded = rows.column(name).dictionary_encode(null_encoding="encode")
            codes = numbered(codes, coded.indices.to_numpy().astype(np.int64)).numbers
        codes = numbered(codes, self.windows.edges_at(moments)).numbers
        keys = pa.record_batch({"key": np.arange(int(codes.max()) + 1)})
        batch = KeyedBatch(rows, codes, keys, keys, np.zeros(len(keys), np.bool_), EpochTime(0))
        order = self.order_of_rows
        lines = batch.first_rows() if order is None else _first_lines(batch, order)
        stays = times.is_null().to_numpy(zero_copy_only=False)
        stays[lines] = True
        stays[pc.index(times, latest).as_py()] = True
        return pa.array(stays)


def best_row(order_of_rows: Places, columns: Mapping[str, pa.DataType]) -> Aggregate:
    """Keep the first row of a window in an order, as a struct; of equal ones, the first to arrive.

    Args:
        order_of_rows: of one row.
        columns: of the struct; the order's may be one of them.
    """
    names = list(columns)
    stored = {name: kind for name, kind in columns.items() if name != order_of_rows.order}

    def first(batch: KeyedBatch) -> Columns:
        lines = pa.array(_first_lines(batch, order_of_rows))
        return [batch.column(name).take(lines) for name in (order_of_rows.order, *stored)]

    def fold(kind: pa.DataType, struct: pa.DataType) -> Fold:
        schema = pa.schema([(order_of_rows.order, kind), *stored.items()])

        def result(lines: pa.RecordBatch) -> pa.Array:
            by_name = dict(zip(schema.names, lines.columns, strict=True))
            return pa.StructArray.from_arrays([by_name[name] for name in names], names=names)

        return Fold(schema, struct, first, first, result)

    way = "greatest" if order_of_rows.is_descending else "least"
    return Aggregate(
        f"best_row({name_text(order_of_rows.order)}, {way}, {name_text(names)})",
        order_of_rows.order,
        pa.struct([(name, kind) for name, kind in columns.items()]),
        lambda kind: kind,
        fold,
        further=tuple(stored),
    )
