"""Aggregates: one value of many rows, for `aggregate` (per key) and for `windowed` (per window).

{"n": count(), "total": sum("amount"), "slow": quantiles("latency", at=[0.5, 0.99])}
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.arguments import checked
from tallystick.codec.own_memory import own_values
from tallystick.errors import OptionError
from tallystick.state.functions import sketches
from tallystick.state.functions.folds import (
    ANY,
    LATEST,
    TIME,
    Columns,
    Fold,
    Pick,
    by_time,
    order_in_time,
    single,
    typed,
)
from tallystick.state.functions.keyed_batch import (
    Int64Array,
    KeyedBatch,
    PerKey,
    sum_type,
    wide_type,
)
from tallystick.state.functions.vectorised import as_column
from tallystick.state.meaning import name_text
from tallystick.state.numpy_columns import explode, lists_of
from tallystick.state.row_codec import ColumnsCodec
from tallystick.state.schema import schema_of, type_of

_PerKey = Callable[[KeyedBatch, str, pa.Array], pa.Array]
_PerRow = Callable[[KeyedBatch, str, pa.Array], tuple[pa.Array, pa.Array]]


@dataclass(frozen=True)
class Aggregate:
    """One value of many rows; made by `count`, `sum` and the like.

    Args:
        text: the function and its columns in words: part of the state's meaning, so the same in
            every release. The words name no type: types are in the schema of the state.
        column: of the rows; "" where it takes none.
        kind: of the value; None: by the column's.
        kind_of: the kind of the value, from the column's.
        fold: the fold that windows keep, from the column's type (null where it takes none) and the
            value's.
        at_end: the value after all rows, from the batch, the column and the value before; None: the
            aggregate is for windows only.
        running: the value after each row, and after all; None as `at_end`.
        further: more columns to read.
        picks: the rule by which a value of the column is picked: `LATEST` or `ANY`; "": none is.
    """

    text: str
    column: str
    kind: pa.DataType | None
    kind_of: Callable[[pa.DataType], pa.DataType]
    fold: Callable[[pa.DataType, pa.DataType], Fold]
    at_end: _PerKey | None = None
    running: _PerRow | None = None
    further: tuple[str, ...] = ()
    picks: str = ""

    def __repr__(self) -> str:
        return f"ts.{self.text}"

    @property
    def reads(self) -> frozenset[str]:
        """The columns that the aggregate reads."""
        return frozenset({*self.further, *([self.column] if self.column else [])})

    @property
    def pick(self) -> Pick:
        """The column of which the aggregate picks a value, and the rule."""
        return Pick(self.column, self.picks)

    def folded(self, name: str, rows: pa.Schema) -> Fold:
        """Return the fold with which windows keep the aggregate.

        Args:
            name: of the column in the output, for errors.
            rows: the columns of the rows.

        Raises:
            OptionError: the aggregate does not take values of the column's type.
        """
        kind = kind_in(name, self, rows)
        try:
            column = rows.field(self.column).type if self.column else pa.null()
            fold = self.fold(column, kind)
        except OptionError as error:
            raise OptionError(f"{name!r} of column {self.column!r}: {error}") from None
        return replace(fold, text=f"{self.text}{fold.text}")


def kind_in(name: str, one: Aggregate, rows: pa.Schema) -> pa.DataType:
    """Return the type of an aggregate's value.

    Raises:
        OptionError: the aggregate does not take values of the column's type.
    """
    if one.kind is not None:
        return one.kind
    try:
        return one.kind_of(rows.field(one.column).type)
    except OptionError as error:
        raise OptionError(f"aggregate: {name!r} of column {one.column!r}: {error}") from None


def _same(kind: pa.DataType) -> pa.DataType:
    return kind


def _text(function: str, column: str) -> str:
    """Return an aggregate in words, after a check that it has a column."""
    if not column:
        raise OptionError(f"{function}(column=''): expected the name of a column")
    return f"{function}({name_text(column)})"


@checked
def count() -> Aggregate:
    """Count rows."""
    return Aggregate(
        "count()",
        "",
        pa.int64(),
        _same,
        lambda _, kind: single(
            kind, lambda batch: pa.array(batch.count()), lambda batch, name: batch.sum(name)
        ),
        lambda batch, _, start: pa.array(batch.count(start=start)),
        lambda batch, _, start: tuple(map(pa.array, batch.running_count(start=start))),
    )


@checked
def sum(column: str, type: str | None = None) -> Aggregate:
    """Sum a column, nulls apart; null as long as there was no value.

    A sum that its type does not hold stops the query, with the column and the key.

    Args:
        column: numbers; as in each aggregate, of the rows or in SQL: "price * quantity".
        type: in which they are added: bigint, double, or a decimal, which then has 38 digits.
            None: as the column is: whole numbers, floats or decimals.

    Raises:
        OptionError: `type` is of another kind.
    """
    kind = None if type is None else type_of(type, f"sum({column!r})")
    if kind is not None:
        if not (kind in (pa.int64(), pa.float64()) or pa.types.is_decimal128(kind)):
            raise OptionError(
                f"sum({column!r}): type {type!r}, expected 'bigint', 'double' or a decimal"
            )
        kind = sum_type(kind)
    return Aggregate(
        _text("sum", column),
        column,
        kind,
        sum_type,
        lambda _, kind: single(
            kind,
            lambda batch: typed(batch, column, kind).sum(column),
            lambda batch, name: batch.sum(name),
        ),
        lambda batch, name, start: typed(batch, name, start.type).sum(name, start),
        lambda batch, name, start: typed(batch, name, start.type).running_sum(name, start),
    )


@checked
def minimum(column: str, type: str | None = None) -> Aggregate:
    """Keep the least value of a column, nulls apart.

    Args:
        column: numbers, dates or timestamps.
        type: of the value. None: that of the column.

    Raises:
        OptionError: values of this type are not compared here.
    """
    return Aggregate(
        _text("minimum", column),
        column,
        None if type is None else comparable(type_of(type, f"minimum({column!r})")),
        comparable,
        lambda _, kind: single(
            kind,
            lambda batch: typed(batch, column, kind).min(column),
            lambda batch, name: batch.min(name),
        ),
        lambda batch, name, start: typed(batch, name, start.type).min(name, start),
        lambda batch, name, start: typed(batch, name, start.type).running_min(name, start),
        picks=ANY if type is None else "",
    )


@checked
def maximum(column: str, type: str | None = None) -> Aggregate:
    """Keep the greatest value of a column, nulls apart; as `minimum`."""
    return Aggregate(
        _text("maximum", column),
        column,
        None if type is None else comparable(type_of(type, f"maximum({column!r})")),
        comparable,
        lambda _, kind: single(
            kind,
            lambda batch: typed(batch, column, kind).max(column),
            lambda batch, name: batch.max(name),
        ),
        lambda batch, name, start: typed(batch, name, start.type).max(name, start),
        lambda batch, name, start: typed(batch, name, start.type).running_max(name, start),
        picks=LATEST if type is None else "",
    )


@checked
def last_value(column: str, type: str | None = None) -> Aggregate:
    """Keep the newest row's value of a column, a null too.

    Newest is the last to arrive; in a window the last in time, of rows of one time the last to
    arrive.

    Args:
        column: any that state can hold.
        type: as in DDL. None: that of the column.

    Raises:
        OptionError: there is no such type.
    """

    def at_end(batch: KeyedBatch, name: str, start: pa.Array) -> pa.Array:
        return typed(batch, name, start.type).column(name).take(pa.array(batch.last_rows()))

    return Aggregate(
        _text("last_value", column),
        column,
        None if type is None else type_of(type, f"last_value({column!r})"),
        _same,
        lambda _, kind: by_time(column, kind, is_last=True),
        at_end,
        lambda batch, name, start: (
            typed(batch, name, start.type).column(name),
            at_end(batch, name, start),
        ),
        picks=LATEST if type is None else "",
    )


@checked
def first_value(column: str) -> Aggregate:
    """Keep the value of a window's first row in time, a null too; of rows of one time the first.

    Args:
        column: any that state can hold.
    """
    return Aggregate(
        _text("first_value", column),
        column,
        None,
        _same,
        lambda _, kind: by_time(column, kind, is_last=False),
        picks=ANY,
    )


@checked
def average(column: str) -> Aggregate:
    """Average the values of a column in a window, nulls apart, as a double; null without a value.

    Args:
        column: numbers; whole ones and decimals are added exactly.
    """

    def fold(column_kind: pa.DataType, kind: pa.DataType) -> Fold:
        total = sum_type(column_kind)

        def result(lines: pa.RecordBatch) -> pa.Array:
            sums, counts = lines.column(0), lines.column(1)
            return pc.divide(sums.cast(kind, safe=False), counts.cast(kind, safe=False))

        return Fold(
            pa.schema([("sum", total), ("count", pa.int64())]),
            kind,
            lambda batch: [batch.sum(column), pa.array(batch.count(column))],
            lambda batch: [batch.sum("sum"), batch.sum("count")],
            result,
        )

    return Aggregate(_text("average", column), column, pa.float64(), _same, fold)


@checked
def approximate_distinct_count(column: str) -> Aggregate:
    """Count the different values of a column in a window, nulls apart, by HyperLogLog.

    The standard error is 1.6 %. The hash is fixed, so the same values give the same count
    everywhere. A window's state grows with the count, to 20 kB at most.

    Args:
        column: numbers, texts, dates or timestamps.
    """
    return Aggregate(
        _text("approximate_distinct_count", column),
        column,
        pa.int64(),
        _same,
        lambda kind, _: sketches.distinct_count(column, kind),
    )


@checked
def quantiles(column: str, *, at: Sequence[float]) -> Aggregate:
    """List quantiles of a column in a window, nulls apart; null without a value.

    A quantile `q` is the least value that at least the share `q` of the values are not above. Each
    is at most 0.4 % off, whatever the order of the rows.

    Args:
        column: numbers; NaN is above all.
        at: which, each from 0 to 1, like [0.5, 0.99].

    Raises:
        OptionError: `at` is empty, or has a number outside 0 to 1.
    """
    shares = tuple(at)
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise OptionError(f"quantiles({column!r}): at={at!r}, expected numbers from 0 to 1")

    def fold(column_kind: pa.DataType, _: pa.DataType) -> Fold:
        sum_type(column_kind)  # raises if they are no numbers
        return sketches.quantiles(column, shares)

    # Which quantiles are asked for is up to the result: the histogram has them all.
    return Aggregate(_text("quantiles", column), column, pa.list_(pa.float64()), _same, fold)


@checked
def collect(column: str) -> Aggregate:
    """List a column's values in a window, nulls apart, by time; of one time in order of arrival.

    All of them are in the state until the window is done.

    Args:
        column: any of fixed width, strings, binaries.
    """

    def fold(kind: pa.DataType, _: pa.DataType) -> Fold:
        def lists(codes: Int64Array, times: pa.Array, values: pa.Array, count: int) -> Columns:
            order = order_in_time(codes.astype(np.int32), count, times.to_numpy())
            counts, places = np.bincount(codes, minlength=count), pa.array(order)
            return [lists_of(counts, times.take(places)), lists_of(counts, values.take(places))]

        def add(batch: KeyedBatch) -> Columns:
            is_there = batch.column(column).is_valid()
            codes = batch.codes[is_there.to_numpy(zero_copy_only=False)]
            times, values = (batch.column(name).filter(is_there) for name in (TIME, column))
            return lists(codes.astype(np.int64), times, values, len(batch))

        def merge(batch: KeyedBatch) -> Columns:
            lines, (times, values) = explode(batch.rows.columns)
            return lists(batch.codes[lines].astype(np.int64), times, values, len(batch))

        def result(lines: pa.RecordBatch) -> pa.Array:
            empty = pa.array([[]], pa.list_(kind))
            return pc.coalesce(lines.column(1), empty[0])

        schema = pa.schema([("times", pa.list_(pa.int64())), ("values", pa.list_(kind))])
        return Fold(schema, pa.list_(kind), add, merge, result)

    return Aggregate(_text("collect", column), column, None, pa.list_, fold)


@checked
def vectorised_aggregate(
    *,
    add: Callable[[KeyedBatch], Mapping[str, PerKey]],
    merge: Callable[[KeyedBatch], Mapping[str, PerKey]],
    result: Callable[[pa.RecordBatch], PerKey],
    accumulators: str | pa.Schema,
    type: str,
    reads: Collection[str],
) -> Aggregate:
    """Aggregate windows with functions of your own, each called with many windows at once.

    Args:
        add: from a `KeyedBatch` of rows to a value of each accumulator per group, a column by name.
            What is a key in the docs of `KeyedBatch` is a group of rows here; each has some.
        merge: the same from earlier accumulators, which are the columns of the batch. The order in
            which they are merged must not matter.
        result: from accumulators, as columns, to the value of each line.
        accumulators: their columns, as DDL or as a schema.
        type: of the value, as in DDL.
        reads: the columns of the rows that `add` needs.

    Raises:
        OptionError: the accumulators cannot be stored, or there is no such type.
    """
    schema = ColumnsCodec(schema_of(accumulators, "accumulators"), "accumulators").schema
    kind = type_of(type, "vectorised_aggregate")

    def checked(returned: Mapping[str, PerKey], count: int) -> Columns:
        if sorted(returned) != sorted(schema.names):
            raise OptionError(
                f"an aggregate's function returned the columns {sorted(returned)}: its "
                f"accumulators are {sorted(schema.names)}. Return all of them"
            )
        return [as_column(own_values(returned[field.name]), field, count) for field in schema]

    fold = Fold(
        schema,
        kind,
        lambda batch: checked(add(batch), len(batch)),
        lambda batch: checked(merge(batch), len(batch)),
        lambda lines: as_column(
            own_values(result(lines)), pa.field("result", kind), lines.num_rows
        ),
    )
    names = f"reads={name_text(sorted(reads))}, accumulators={name_text(schema.names)}"
    return Aggregate(
        f"vectorised_aggregate({names})", "", kind, _same, lambda *_: fold, further=tuple(reads)
    )


def comparable(kind: pa.DataType) -> pa.DataType:
    """Return the type, if values of the type are compared here.

    Raises:
        OptionError: the values are not compared here.
    """
    if not pa.types.is_decimal128(kind):
        wide_type(kind)
    return kind


min = minimum
"""The same as `minimum`, by its name in Spark and Polars."""
max = maximum
"""The same as `maximum`, by its name in Spark and Polars."""
avg = average
"""The same as `average`, by its name in Spark and Polars."""
first = first_value
"""The same as `first_value`, by its name in Spark and Polars."""
last = last_value
"""The same as `last_value`, by its name in Spark and Polars."""
