"""Keyed functions that need no code: counts, sums, extremes, duplicates, sessions, the best n.

aggregate({"count": count(), "sum": sum("amount")}, each="record", keep=["ts"])
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.errors import OptionError, RecordError
from tallystick.state.functions import fold_kernels
from tallystick.state.functions.keyed_batch import (
    Int64Array,
    KeyedBatch,
    Update,
    order_by_key,
    sum_type,
    wide_type,
)
from tallystick.state.functions.processing import (
    EVENT_TIME,
    NO_TIME,
    PROCESSING_TIME,
    check_event_times,
)
from tallystick.state.functions.vectorised import (
    ByColumns,
    VectorisedFunction,
    beside_key,
    vectorised,
)
from tallystick.state.numpy_columns import explode, lists_of
from tallystick.state.schema import type_of

EACH_EPOCH = "epoch"
EACH_RECORD = "record"

_SESSIONS = pa.schema([(name, pa.list_(pa.int64())) for name in ("starts", "ends", "counts")])
"""The open sessions of a key; moments in microseconds."""
_MOMENT = pa.timestamp("us", tz="UTC")
_SESSION = pa.schema([("start", _MOMENT), ("end", _MOMENT), ("count", pa.int64())])
_MICROS = 1000

_PerKey = Callable[[KeyedBatch, str, pa.Array], pa.Array]
_PerRow = Callable[[KeyedBatch, str, pa.Array], tuple[pa.Array, pa.Array]]


@dataclass(frozen=True)
class Aggregate:
    """One value per key, kept from row to row; made by `count`, `sum` and the like.

    Args:
        column: of the rows; "" where it takes none.
        kind: of the value; None: by the column's.
        kind_of: the kind of the value, from the column's.
        at_end: the value after all rows, from the batch, the column and the value before.
        running: the value after each row, and after all.
    """

    column: str
    kind: pa.DataType | None
    kind_of: Callable[[pa.DataType], pa.DataType]
    at_end: _PerKey
    running: _PerRow


def count() -> Aggregate:
    """Count rows."""
    return Aggregate(
        "",
        pa.int64(),
        lambda kind: kind,
        lambda batch, _, start: pa.array(batch.count(start=start)),
        lambda batch, _, start: tuple(map(pa.array, batch.running_count(start=start))),
    )


def sum(column: str, type: str | None = None) -> Aggregate:
    """Sum a column, nulls apart; null as long as there was no value.

    A sum that its type does not hold stops the query, with the column and the key.

    Args:
        column: numbers.
        type: in which they are added: bigint, double, or a decimal, which then has 38 digits.
            None: as the column is: whole numbers, floats or decimals.

    Raises:
        OptionError: it is another type.
    """
    kind = None if type is None else type_of(type, f"sum({column!r})")
    if kind is not None:
        if not (kind in (pa.int64(), pa.float64()) or pa.types.is_decimal128(kind)):
            raise OptionError(
                f"sum({column!r}): type {type!r}, expected 'bigint', 'double' or a decimal"
            )
        kind = sum_type(kind)
    return Aggregate(
        column,
        kind,
        sum_type,
        lambda batch, name, start: _typed(batch, name, start.type).sum(name, start),
        lambda batch, name, start: _typed(batch, name, start.type).running_sum(name, start),
    )


def minimum(column: str, type: str | None = None) -> Aggregate:
    """Keep the least value of a column, nulls apart.

    Args:
        column: numbers, dates or timestamps.
        type: of the value. None: that of the column.

    Raises:
        OptionError: values of this type are not compared here.
    """
    return Aggregate(
        column,
        None if type is None else _comparable(type_of(type, f"minimum({column!r})")),
        _comparable,
        lambda batch, name, start: _typed(batch, name, start.type).min(name, start),
        lambda batch, name, start: _typed(batch, name, start.type).running_min(name, start),
    )


def maximum(column: str, type: str | None = None) -> Aggregate:
    """Keep the greatest value of a column, nulls apart; as `minimum`."""
    return Aggregate(
        column,
        None if type is None else _comparable(type_of(type, f"maximum({column!r})")),
        _comparable,
        lambda batch, name, start: _typed(batch, name, start.type).max(name, start),
        lambda batch, name, start: _typed(batch, name, start.type).running_max(name, start),
    )


def last_value(column: str, type: str | None = None) -> Aggregate:
    """Keep the newest row's value of a column, a null too.

    Args:
        column: any that state can hold.
        type: as in DDL. None: that of the column.

    Raises:
        OptionError: there is no such type.
    """

    def at_end(batch: KeyedBatch, name: str, start: pa.Array) -> pa.Array:
        return _typed(batch, name, start.type).column(name).take(pa.array(batch.last_rows()))

    return Aggregate(
        column,
        None if type is None else type_of(type, f"last_value({column!r})"),
        lambda kind: kind,
        at_end,
        lambda batch, name, start: (
            _typed(batch, name, start.type).column(name),
            at_end(batch, name, start),
        ),
    )


def aggregate(
    columns: Mapping[str, Aggregate], *, each: str = EACH_EPOCH, keep: Sequence[str] = ()
) -> VectorisedFunction | ByColumns:
    """Keep some values per key and emit them: the key's columns, the kept ones, the values.

    Args:
        columns: the names of the output's columns and what is in them.
        each: "epoch": one row per key and epoch, in no order to rely on. "record": one per row, in
            the order of the rows, with the values right after it, as Flink emits them.
        keep: columns of the rows to emit too; those of the key's newest row for "epoch".

    Raises:
        OptionError: no columns, or another `each`.
    """
    if each not in (EACH_EPOCH, EACH_RECORD):
        raise OptionError(f"aggregate: each={each!r}, expected {EACH_EPOCH!r} or {EACH_RECORD!r}")
    if not columns:
        raise OptionError("aggregate: no columns; name at least one, like {'count': count()}")
    columns, keep = dict(columns), tuple(keep)
    reads = frozenset({*keep, *(one.column for one in columns.values() if one.column)})
    if all(one.kind is not None for one in columns.values()):
        return _aggregate(columns, pa.schema([]), each, keep, reads)
    return ByColumns(lambda rows: _aggregate(columns, rows, each, keep, reads), reads)


def _aggregate(
    columns: Mapping[str, Aggregate],
    rows: pa.Schema,
    each: str,
    keep: tuple[str, ...],
    reads: frozenset[str],
) -> VectorisedFunction:
    """`aggregate`, with all that it needs to know of its rows."""
    schema = pa.schema([(name, _kind(name, one, rows)) for name, one in columns.items()])

    def per_epoch(batch: KeyedBatch) -> Update:
        state = {
            name: one.at_end(batch, one.column, batch.state.column(name))
            for name, one in columns.items()
        }
        newest = pa.array(batch.last_rows()) if keep else None
        kept = {name: batch.column(name).take(newest) for name in keep}
        return Update(_output(batch.keys, kept, state), state)

    def per_record(batch: KeyedBatch) -> Update:
        state, values = {}, {}
        for name, one in columns.items():
            start = batch.state.column(name)
            values[name], state[name] = one.running(batch, one.column, start)
        kept = {name: batch.column(name) for name in keep}
        keys = batch.rows.select(batch.keys.schema.names)
        return Update(_output(keys, kept, values), state)

    def output(key: pa.Schema, rows: pa.Schema) -> pa.Schema:
        return beside_key(key, [rows.field(name) for name in keep], schema)

    function = per_epoch if each == EACH_EPOCH else per_record
    return vectorised(function, state=schema, reads=reads, output=output)


def deduplicate(forget_after_ms: int | None = None) -> VectorisedFunction:
    """Emit the first row of each key and drop the others.

    Args:
        forget_after_ms: a key counts as new again this long after its first row; None: never, so
            the state grows with the number of keys.

    Raises:
        OptionError: the time is not positive.
    """
    if forget_after_ms is not None and forget_after_ms <= 0:
        raise OptionError(f"deduplicate: forget_after_ms={forget_after_ms}, expected more than 0")

    def first_only(batch: KeyedBatch) -> Update:
        if batch.is_due:
            return Update(None, {"seen": pa.nulls(len(batch), pa.bool_())})
        is_new, timers = ~batch.known, None
        if forget_after_ms is not None:
            now_ms = batch.time.timestamp_ms
            # Rows come before the call for due timers: a key may be due to be forgotten already.
            is_new |= pc.less_equal(batch.timers, now_ms).fill_null(False).to_numpy(False)
            at = pa.scalar(now_ms + forget_after_ms, pa.int64())
            timers = pc.if_else(pa.array(is_new), at, batch.timers)
        new = batch.rows.take(pa.array(np.sort(batch.first_rows()[is_new])))
        return Update(new, {"seen": np.ones(len(batch), np.bool_)}, timers)

    mode = NO_TIME if forget_after_ms is None else PROCESSING_TIME
    return vectorised(
        first_only, state="seen boolean", time_mode=mode, output=lambda key, rows: rows
    )


def top_n(n: int, column: str, type: str | None = None) -> VectorisedFunction | ByColumns:
    """Emit the n greatest values of each key, the greatest first, whenever it has rows.

    Args:
        n: how many are kept.
        column: what is compared; nulls do not count, NaN is above all numbers. Also the name of
            the list in the output.
        type: of the values. None: that of the column.

    Raises:
        OptionError: n is not positive, or values of this type are not compared here.
    """
    if n <= 0:
        raise OptionError(f"top_n: n={n}, expected at least 1")
    if type is not None:
        return _top_n(n, column, type_of(type, f"top_n({column!r})"))
    return ByColumns(lambda rows: _top_n(n, column, rows.field(column).type), frozenset([column]))


def _top_n(n: int, column: str, kind: pa.DataType) -> VectorisedFunction:
    wide_type(kind)
    state = pa.schema([("best", pa.list_(kind))])

    def greatest(batch: KeyedBatch) -> Update:
        lists = _typed(batch, column, kind).greatest(n, column, batch.state.column("best"))
        return Update(_output(batch.keys, {}, {column: lists}), {"best": lists})

    def output(key: pa.Schema, rows: pa.Schema) -> pa.Schema:
        return beside_key(key, [], [pa.field(column, pa.list_(kind))])

    return vectorised(greatest, state=state, reads=[column], output=output)


def sessions(gap_ms: int, time_column: str) -> VectorisedFunction:
    """Emit each key's sessions as they end: the key, `start`, `end` and `count` of its rows.

    A session takes in rows until none comes for `gap_ms`; one right at its end still belongs to
    it, as in Flink (TimeWindow.intersects). Rows may come in any order that the watermark permits:
    one that stands between two sessions makes them one. It is emitted once the watermark says that
    no row can join it; `end` is its last row's time.

    Args:
        gap_ms: how long a silence ends a session.
        time_column: of the rows: timestamps, or milliseconds since 1970 as bigint; the step's
            `event_time` too.

    Raises:
        OptionError: the gap is not positive.
    """
    if gap_ms <= 0:
        raise OptionError(f"sessions: gap_ms={gap_ms}, expected more than 0")

    def step(batch: KeyedBatch) -> Update:
        intervals = _sessions_merged(batch, time_column, gap_ms * _MICROS)
        closes_ms = -((intervals[2] + gap_ms * _MICROS) // -_MICROS)
        if not batch.is_due:
            return _sessions_kept(batch, intervals, closes_ms, None)
        assert batch.time.watermark_ms is not None
        ended = closes_ms <= batch.time.watermark_ms
        codes, starts, ends, counts = (column[ended] for column in intervals)
        keys = batch.keys.take(pa.array(codes))
        values = {
            "start": pa.array(starts).cast(_MOMENT),
            "end": pa.array(ends).cast(_MOMENT),
            "count": pa.array(counts),
        }
        columns = dict(zip(keys.schema.names, keys.columns, strict=True))
        output = pa.record_batch({**columns, **values})
        left = tuple(column[~ended] for column in intervals)
        return _sessions_kept(batch, left, closes_ms[~ended], output)

    def output(key: pa.Schema, rows: pa.Schema) -> pa.Schema:
        return beside_key(key, [], _SESSION)

    return VectorisedFunction(
        step, _SESSIONS, EVENT_TIME, [time_column], output, event_time=time_column
    )


def _sessions_merged(batch: KeyedBatch, time_column: str, gap: int) -> tuple[Int64Array, ...]:
    """Merge all open sessions by key and time: key number, start, end, count."""
    codes, held = explode([batch.state.column(name) for name in _SESSIONS.names])
    starts, ends, counts = (column.to_numpy() for column in held)
    if batch.rows.num_rows:
        times = _event_times(batch, time_column)
        codes = np.concatenate([codes, batch.codes])
        starts, ends = np.concatenate([starts, times]), np.concatenate([ends, times])
        counts = np.concatenate([counts, np.ones(len(times), np.int64)])
    order = order_by_key(codes, len(batch))
    if not fold_kernels.is_sorted(codes[order], starts[order]):  # mostly rows come in time's order
        order = np.lexsort((starts, codes))
    intervals = tuple(column[order] for column in (codes, starts, ends, counts))
    left = fold_kernels.merge_sessions(*intervals, gap)
    return tuple(column[:left] for column in intervals)


def _event_times(batch: KeyedBatch, name: str) -> Int64Array:
    """Return the rows' event times in microseconds."""
    column = batch.column(name)
    if column.null_count:
        raise RecordError(
            f"sessions: {column.null_count} rows have no {name!r}: give them one, or filter them "
            f"out before."
        )
    is_timestamp = pa.types.is_timestamp(column.type)
    if not (is_timestamp or pa.types.is_signed_integer(column.type)):
        raise OptionError(
            f"sessions: column {name!r} is {column.type}, expected timestamps or milliseconds as "
            f"bigint"
        )
    check_event_times(column, f"sessions: column {name!r}")
    if is_timestamp:
        micros = column.cast(pa.timestamp("us", tz=column.type.tz)).cast(pa.int64())
        times: Int64Array = micros.to_numpy()
        return times
    millis: Int64Array = column.cast(pa.int64()).to_numpy()
    return millis * _MICROS


def _sessions_kept(
    batch: KeyedBatch,
    intervals: tuple[Int64Array, ...],
    closes_ms: Int64Array,
    output: pa.RecordBatch | None,
) -> Update:
    """Return the sessions that stay open, and a timer for each key's first one to end."""
    codes, *columns = intervals
    counts = np.bincount(codes, minlength=len(batch))
    state = {
        name: lists_of(counts, pa.array(column))
        for name, column in zip(_SESSIONS.names, columns, strict=True)
    }
    timers = np.zeros(len(batch), np.int64)
    # From the last to the first, so that the first stays; a key's sessions are in order of time.
    timers[codes[::-1]] = closes_ms[::-1]
    return Update(output, state, pa.array(timers, mask=counts == 0))


def _kind(name: str, one: Aggregate, rows: pa.Schema) -> pa.DataType:
    """Return the type of an aggregate's value.

    Raises:
        OptionError: the column has none that it takes.
    """
    if one.kind is not None:
        return one.kind
    try:
        return one.kind_of(rows.field(one.column).type)
    except OptionError as error:
        raise OptionError(f"aggregate: {name!r} of column {one.column!r}: {error}") from None


def _comparable(kind: pa.DataType) -> pa.DataType:
    if not pa.types.is_decimal128(kind):
        wide_type(kind)
    return kind


def _typed(batch: KeyedBatch, name: str, kind: pa.DataType) -> KeyedBatch:
    """Return the batch with a column of the rows in another type; a double is the nearest.

    Raises:
        OptionError: it has values that the type does not hold.
    """
    column = batch.column(name)
    if column.type == kind:
        return batch
    try:
        return replace(
            batch,
            rows=pa.record_batch({name: column.cast(kind, safe=not pa.types.is_floating(kind))}),
        )
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise OptionError(
            f"column {name!r} is {column.type}, but the function was made for {kind}: {error}"
        ) from error


def _output(
    keys: pa.RecordBatch, kept: Mapping[str, pa.Array], values: Mapping[str, pa.Array]
) -> pa.RecordBatch:
    """Return the columns side by side: `beside_key` has seen to their names."""
    columns = dict(zip(keys.schema.names, keys.columns, strict=True))
    return pa.record_batch({**columns, **kept, **values})
