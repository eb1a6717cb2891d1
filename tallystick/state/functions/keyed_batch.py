"""The input and the output of a vectorised function: all keys of an epoch at once.

Invariant: rows are in the order in which they arrived. `codes` says which key each row has, as its
number in `keys`; `keys`, `state`, `known` and `timers` have a line per key.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tallystick.arguments import missing_column
from tallystick.codec.own_memory import own, own_values
from tallystick.errors import OptionError, RecordError
from tallystick.state.functions import fold_kernels
from tallystick.state.numpy_columns import (
    column_of,
    explode,
    is_fixed_width,
    lists_of,
    valid_of,
    values_of,
)
from tallystick.state.overlay import EpochTime

Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
Column: TypeAlias = str | pa.Array
"""A column of the rows by name, or an array with a value for each row."""
PerKey: TypeAlias = pa.Array | NDArray[Any]

_BIGINT = (-(2**63), 2**63 - 1)
_DIGITS = 38
_DECIMAL = np.array(
    [
        [most & (2**64 - 1), (most >> 64) & (2**64 - 1)]
        for most in (1 - 10**_DIGITS, 10**_DIGITS - 1)
    ],
    np.uint64,
)
_ALL_VALID = np.zeros(0, np.bool_)


@dataclass(frozen=True)
class KeyedBatch:
    """An epoch's rows, and their distinct keys with the state of each key.

    Args:
        rows: in the order of their arrival, with all their columns; none where `is_due`.
        codes: the number of each row's key.
        keys: the distinct keys, as columns.
        state: of each key, before these rows; null in all columns for a key without state.
        known: whether the key has state.
        time: of the epoch.
        timers: when each key's function is to be called again, in ms; null: not. None where the
            function has no timers.
        is_due: whether this is the call for keys with due timers; afterwards a key has a timer only
            if the function sets a new one.
    """

    rows: pa.RecordBatch
    codes: NDArray[np.int32]
    keys: pa.RecordBatch
    state: pa.RecordBatch
    known: BoolArray
    time: EpochTime
    timers: pa.Int64Array | None = None
    is_due: bool = False

    def __len__(self) -> int:
        """Return the number of keys."""
        return int(self.keys.num_rows)

    def held(self, name: str, default: Any = 0) -> NDArray[Any]:
        """Return a state column as a numpy array of your own; `default` where it is null."""
        column = self.state.column(name)
        if column.null_count:
            column = column.fill_null(pa.scalar(default, column.type))
        values: NDArray[Any] = column.to_numpy(zero_copy_only=False)
        return values if values.flags.writeable else values.copy()

    def first_rows(self) -> Int64Array:
        """Return the number of each key's first row; -1 for a key without rows."""
        first: Int64Array = self._edges()[0]
        return first

    def last_rows(self) -> Int64Array:
        """Return the number of each key's last row; -1 for a key without rows."""
        last: Int64Array = self._edges()[1]
        return last

    def by_key(self) -> Int64Array:
        """Return the row numbers key by key, within a key in their order."""
        return order_by_key(self.codes, len(self))

    def count(self, column: Column | None = None, start: PerKey | None = None) -> Int64Array:
        """Return how many rows each key has, or how many that are not null in a column.

        Args:
            column: None: all rows count.
            start: a count per key to go on from.
        """
        totals = self._counts(start)
        fold_kernels.count(self.codes, self._valid(column), totals)
        return totals

    def running_count(
        self, column: Column | None = None, start: PerKey | None = None
    ) -> tuple[Int64Array, Int64Array]:
        """Return the `count` after each row, and the total of each key."""
        totals, out = self._counts(start), np.empty(len(self.codes), np.int64)
        fold_kernels.running_count(self.codes, self._valid(column), totals, out)
        return out, totals

    def sum(self, column: Column, start: PerKey | None = None) -> pa.Array:
        """Return the sum of each key, bigint, double or decimal(38, …); null without a value.

        Args:
            column: numbers; nulls do not count.
            start: a sum per key to go on from; null: none.

        Raises:
            RecordError: a sum is beyond bigint, or has more digits than a decimal.
        """
        return self._fold(fold_kernels.SUM, column, start)

    def min(self, column: Column, start: PerKey | None = None) -> pa.Array:
        """Return the least value of each key, `start` among them; NaN is above all numbers."""
        return self._fold(fold_kernels.MINIMUM, column, start)

    def max(self, column: Column, start: PerKey | None = None) -> pa.Array:
        """Return the greatest value of each key, `start` among them; NaN is above all numbers."""
        return self._fold(fold_kernels.MAXIMUM, column, start)

    def running_sum(self, column: Column, start: PerKey | None = None) -> tuple[pa.Array, pa.Array]:
        """Return the `sum` after each row, and the total of each key."""
        return self._running(fold_kernels.SUM, column, start)

    def running_min(self, column: Column, start: PerKey | None = None) -> tuple[pa.Array, pa.Array]:
        """Return the `min` after each row, and the least value of each key."""
        return self._running(fold_kernels.MINIMUM, column, start)

    def running_max(self, column: Column, start: PerKey | None = None) -> tuple[pa.Array, pa.Array]:
        """Return the `max` after each row, and the greatest value of each key."""
        return self._running(fold_kernels.MAXIMUM, column, start)

    def column(self, column: Column) -> pa.Array:
        """Return a column of the rows.

        Raises:
            OptionError: no column has this name.
        """
        if not isinstance(column, str):
            return column
        at = self.rows.schema.get_field_index(column)
        if at < 0:
            raise missing_column("KeyedBatch", column, self.rows.schema.names)
        return self.rows.column(at)

    def greatest(
        self, size: int, column: Column, start: pa.ListArray | None = None
    ) -> pa.ListArray:
        """Return the greatest values of each key, the greatest first; null where there was none.

        Args:
            size: how many at most.
            column: numbers, dates or timestamps; nulls do not count, NaN is above all.
            start: lists per key to go on from.
        """
        source = self.column(column)
        wide = wide_type(source.type)
        values = values_of(_widened(source, wide))
        best, counts = np.empty(len(self) * size, values.dtype), np.zeros(len(self), np.int64)
        if start is not None:
            numbers, (start_values,) = explode([start])
            start_values = values_of(_widened(start_values, wide))
            fold_kernels.keep_greatest(numbers, start_values, _ALL_VALID, size, best, counts)
        valid = self._valid(source)
        fold_kernels.keep_greatest(self.codes, values, valid, size, best, counts)
        is_there = np.arange(size) < counts[:, None]
        kept = best.reshape(len(self), size)[is_there]
        return lists_of(counts, _narrowed(kept, np.ones(len(kept), np.bool_), source.type))

    def _edges(self) -> Int64Array:
        edges = np.full((2, len(self)), -1, np.int64)
        fold_kernels.edges(self.codes, edges[0], edges[1])
        return edges

    def _counts(self, start: PerKey | None) -> Int64Array:
        if start is None:
            return np.zeros(len(self), np.int64)
        column = start if isinstance(start, pa.Array) else pa.array(start)
        return values_of(column.cast(pa.int64())).copy()

    def _valid(self, column: Column | None) -> BoolArray:
        source = None if column is None else self.column(column)
        return valid_of(source) if source is not None and source.null_count else _ALL_VALID

    def _start(self, start: PerKey | None, wide: pa.DataType) -> tuple[NDArray[Any], BoolArray]:
        """Return the total with which each key starts, and a mask of the keys that have one."""
        if start is None:
            return values_of(pa.nulls(len(self), wide)).copy(), np.zeros(len(self), np.bool_)
        column = (start if isinstance(start, pa.Array) else pa.array(start)).cast(wide)
        return values_of(column).copy(), valid_of(column).copy()

    def _fold(self, operation: int, column: Column, start: PerKey | None) -> pa.Array:
        source = self.column(column)
        if pa.types.is_decimal128(source.type):
            return self._fold_decimals(operation, column, start, keeps=False)[1]
        wide = wide_type(source.type)
        totals, known = self._start(start, wide)
        values = values_of(_widened(source, wide))
        valid = self._valid(source)
        bounds = _bounds(wide)
        beyond = fold_kernels.fold(operation, self.codes, values, valid, totals, known, bounds)
        self._check_sum(beyond, column)
        return _narrowed(totals, known, source.type if operation else wide)

    def _running(
        self, operation: int, column: Column, start: PerKey | None
    ) -> tuple[pa.Array, pa.Array]:
        source = self.column(column)
        if pa.types.is_decimal128(source.type):
            return self._fold_decimals(operation, column, start, keeps=True)
        wide = wide_type(source.type)
        totals, known = self._start(start, wide)
        values = values_of(_widened(source, wide))
        out, present = np.empty(len(values), values.dtype), np.empty(len(values), np.bool_)
        valid, bounds = self._valid(source), _bounds(wide)
        beyond = fold_kernels.running(
            operation, self.codes, values, valid, totals, known, bounds, out, present
        )
        self._check_sum(beyond, column)
        kind = source.type if operation else wide
        return _narrowed(out, present, kind), _narrowed(totals, known, kind)

    def _fold_decimals(
        self, operation: int, column: Column, start: PerKey | None, *, keeps: bool
    ) -> tuple[pa.Array, pa.Array]:
        """Return the values after each row (none unless `keeps`), and at the end of each key."""
        source = self.column(column)
        if operation == fold_kernels.SUM:
            source = source.cast(sum_type(source.type))
        kind, count = source.type, len(source) if keeps else 0
        totals, known = self._start(start, kind)
        out, present = np.empty(count, totals.dtype), np.empty(count, np.bool_)
        beyond = fold_kernels.fold_decimals(
            operation,
            self.codes,
            _words(values_of(source)),
            self._valid(source),
            _words(totals),
            known,
            _DECIMAL,
            _words(out),
            present,
        )
        self._check_sum(beyond, column)
        return column_of(out, present, kind), column_of(totals, known, kind)

    def _check_sum(self, beyond: int, column: Column) -> None:
        if beyond < 0:
            return
        name = f"column {column!r}" if isinstance(column, str) else "a column"
        (key,) = self.keys.slice(self.codes[beyond], 1).to_pylist()
        if pa.types.is_decimal(self.column(column).type):
            what = f"has more than {_DIGITS} digits, the most of a decimal: add it as double"
        else:
            what = (
                f"is beyond what bigint holds ({_BIGINT[0]} to {_BIGINT[1]}): add it as double, or "
                f"as decimal(38, 0)"
            )
        raise RecordError(f"the sum of {name} for key {key} {what}")


@dataclass(frozen=True)
class Update:
    """The result of a vectorised function for a batch.

    Args:
        output: rows for the next step; None: none.
        state: a line per key, as columns by name; a row of nulls deletes. None: it stays.
        timers: per key, when its function is to be called again, in ms; null: not. None: they
            stay as they are.
        outputs: rows of side outputs, by the names that `vectorised(outputs=...)` declares; a name
            that is left out has none.
    """

    output: pa.RecordBatch | None = None
    state: pa.RecordBatch | Mapping[str, PerKey] | None = None
    timers: PerKey | None = None
    outputs: Mapping[str, pa.RecordBatch] = field(default_factory=dict)


@dataclass(frozen=True)
class OwnUpdates:
    """A user's function whose results are copied into memory of our own; see `codec.own_memory`.

    The state is kept while the function is called for due timers, and while later functions run;
    these may use the same buffers as the output, of which the parts wait for each other.
    """

    function: Callable[[KeyedBatch], Update]

    def __call__(self, batch: KeyedBatch) -> Update:
        """Call the function."""
        update: Any = self.function(batch)
        if not isinstance(update, Update):
            return cast(Update, update)  # refused where it is looked at
        state: Any = update.state
        if isinstance(state, pa.RecordBatch):
            state = own(state)
        elif hasattr(state, "items"):  # a mapping; a frame of pandas goes by it too
            state = {name: own_values(values) for name, values in state.items()}
        output, outputs = update.output, update.outputs
        if isinstance(outputs, Mapping):
            outputs = {name: _own_rows(rows) for name, rows in outputs.items()}
        return replace(
            update,
            output=_own_rows(output),
            state=state,
            timers=own_values(update.timers),
            outputs=outputs,
        )


def _own_rows(rows: Any) -> Any:
    return own(rows) if isinstance(rows, pa.RecordBatch) else rows  # refused where it is looked at


def order_by_key(codes: NDArray[Any], key_count: int) -> Int64Array:
    """Return the row numbers key by key, within a key in their order."""
    places = np.zeros(key_count, np.int64)
    places[1:] = np.cumsum(np.bincount(codes, minlength=key_count))[:-1]
    order = np.empty(len(codes), np.int64)
    fold_kernels.sort_by_key(codes, places, order)
    return order


def sum_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of a sum: bigint, double, or a decimal of as many digits as there can be.

    Raises:
        OptionError: values of this type are not added.
    """
    if pa.types.is_decimal128(kind):
        return pa.decimal128(_DIGITS, kind.scale)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return pa.int64() if pa.types.is_integer(kind) else pa.float64()
    raise OptionError(f"a column of type {kind} cannot be summed: expected numbers")


def wide_type(kind: pa.DataType) -> pa.DataType:
    """Return the type in which values are added and compared: bigint or double.

    Raises:
        OptionError: values of this type are neither added nor compared here.
    """
    if pa.types.is_floating(kind):
        return pa.float64()
    if is_fixed_width(kind) and not pa.types.is_decimal(kind):
        return pa.int64()
    raise OptionError(
        f"a column of type {kind} cannot be summed or compared here: expected integers, floats, "
        f"bool, date or timestamp. Cast it in the function before."
    )


def _bounds(wide: pa.DataType) -> tuple[int, int] | tuple[float, float]:
    """Return the least and the greatest possible sum of a type."""
    return _BIGINT if pa.types.is_int64(wide) else (-math.inf, math.inf)


def warm_up() -> None:
    """Compile the kernels, or load them from the cache; the kernels of most steps come first."""
    rows = pa.record_batch({"n": [1, None], "x": [0.5, None], "m": [1, 2]})
    codes = np.zeros(2, np.int32)
    batch = KeyedBatch(rows, codes, rows[:1], rows[:1], np.zeros(1, np.bool_), EpochTime(0))
    batch.running_count()
    batch.by_key()
    batch.first_rows()
    batch.count()
    for column in rows.schema.names:
        batch.running_sum(column)
        batch.sum(column)
    for column in rows.schema.names:
        batch.greatest(1, column, start=pa.array([[1]]).cast(pa.list_(rows[column].type)))
    order_by_key(codes.astype(np.int64), 1)
    fold_kernels.is_sorted(*np.zeros((2, 1), np.int64))
    fold_kernels.merge_sessions(*np.zeros((4, 1), np.int64), 0)
    intervals = np.zeros((4, 1), np.int64)
    fold_kernels.session_numbers(*intervals[:3], 0, intervals[3])
    batch.sum(rows["n"].cast(pa.decimal128(_DIGITS, 0)))


def _words(decimals: NDArray[Any]) -> NDArray[np.uint64]:
    """View decimals as pairs of 64-bit words for `fold_decimals`."""
    return decimals.view(np.uint64).reshape(-1, 2)


def _widened(column: pa.Array, wide: pa.DataType) -> pa.Array:
    if pa.types.is_date32(column.type):
        column = column.cast(pa.int32())
    return column.cast(wide)


def _narrowed(values: NDArray[Any], valid: BoolArray, kind: pa.DataType) -> pa.Array:
    column = column_of(values, valid, pa.float64() if values.dtype.kind == "f" else pa.int64())
    return column.cast(pa.int32()).cast(kind) if pa.types.is_date32(kind) else column.cast(kind)
