"""Keyed functions that need no code: aggregates per key, duplicates, sessions, the best n.

aggregate({"count": count(), "sum": sum("amount")}, each="record", keep=["ts"])
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.arguments import checked, not_one_of
from tallystick.errors import OptionError
from tallystick.state.functions import fold_kernels
from tallystick.state.functions.aggregates import Aggregate, kind_in
from tallystick.state.functions.folds import LATEST, picked, typed
from tallystick.state.functions.keyed_batch import (
    Int64Array,
    KeyedBatch,
    Update,
    order_by_key,
    wide_type,
)
from tallystick.state.functions.processing import (
    EVENT_TIME,
    NO_TIME,
    PROCESSING_TIME,
    event_times,
)
from tallystick.state.functions.vectorised import ByColumns, VectorisedFunction, beside_key
from tallystick.state.meaning import meaning_of, name_text
from tallystick.state.numpy_columns import explode, lists_of
from tallystick.state.schema import schema_of, type_of
from tallystick.text import SPAN_MAX_MS

EACH_EPOCH = "epoch"
EACH_RECORD = "record"

_SESSIONS = pa.schema([(name, pa.list_(pa.int64())) for name in ("starts", "ends", "counts")])
"""The open sessions of a key; moments in microseconds."""
_SEEN = pa.schema([("seen", pa.bool_())])
_MOMENT = pa.timestamp("us", tz="UTC")
_SESSION = pa.schema([("start", _MOMENT), ("end", _MOMENT), ("count", pa.int64())])
_MICROS = 1000


@checked
def aggregate(
    columns: Mapping[str, Aggregate], *, each: str = EACH_EPOCH, keep: Sequence[str] = ()
) -> VectorisedFunction | ByColumns:
    """Keep aggregates per key; emit the key's columns, the `keep` columns and the values.

    Args:
        columns: the aggregates by the names of their columns in the output.
        each: "epoch": one row per key and epoch, in no order to rely on. "record": one per row, in
            the order of the rows, with the values right after it, as Flink emits them.
        keep: columns of the rows to emit too; those of the key's newest row for "epoch".

    Raises:
        OptionError: no columns, or another `each`.
    """
    if each not in (EACH_EPOCH, EACH_RECORD):
        raise not_one_of("each", each, (EACH_EPOCH, EACH_RECORD), of="aggregate")
    if not columns:
        raise OptionError("aggregate: no columns; name at least one, like {'count': count()}")
    columns, keep = dict(columns), tuple(keep)
    for name, one in columns.items():
        if one.at_end is None:
            raise OptionError(
                f"aggregate: {name!r} is an aggregate of windows only: put it into windowed(...), "
                f"or write a function with vectorised(...)"
            )
    reads = frozenset(keep).union(*(one.reads for one in columns.values()))
    if all(one.kind is not None for one in columns.values()):
        return _aggregate(columns, pa.schema([]), each, keep, reads)
    return ByColumns(lambda rows: _aggregate(columns, rows, each, keep, reads), reads)


def _aggregate(
    columns: Mapping[str, Aggregate],
    rows: pa.Schema,
    frequency: str,
    keep: tuple[str, ...],
    reads: frozenset[str],
) -> VectorisedFunction:
    """Make the function of `aggregate`, once the types of the rows' columns are known."""
    schema = pa.schema([(name, kind_in(name, one, rows)) for name, one in columns.items()])

    def per_epoch(batch: KeyedBatch) -> Update:
        state = {}
        for name, one in columns.items():
            assert one.at_end is not None, "checked when it was made"
            state[name] = one.at_end(batch, one.column, batch.state.column(name))
        newest = pa.array(batch.last_rows()) if keep else None
        kept = {name: batch.column(name).take(newest) for name in keep}
        return Update(_output(batch.keys, kept, state), state)

    def per_record(batch: KeyedBatch) -> Update:
        state, values = {}, {}
        for name, one in columns.items():
            assert one.running is not None, "checked when it was made"
            start = batch.state.column(name)
            values[name], state[name] = one.running(batch, one.column, start)
        kept = {name: batch.column(name) for name in keep}
        keys = batch.rows.select(batch.keys.schema.names)
        return Update(_output(keys, kept, values), state)

    def output(key: pa.Schema, rows: pa.Schema) -> pa.Schema:
        return beside_key(key, [rows.field(name) for name in keep], schema)

    def lags(key: Collection[str], times: Mapping[str, int]) -> Mapping[str, int]:
        passed = {name: lag_ms for name, lag_ms in times.items() if name in {*key, *keep}}
        picks = {name: one.pick for name, one in columns.items()}
        return {**passed, **picked(picks, times, LATEST)}

    function = per_epoch if frequency == EACH_EPOCH else per_record
    meaning = meaning_of(
        "aggregate", {f"columns.{name}": one.text for name, one in columns.items()}
    )
    state = schema_of(schema, "state")
    return VectorisedFunction(function, state, NO_TIME, reads, output, meaning=meaning, lags=lags)


@checked
def deduplicate(forget_after_ms: int | None = None) -> VectorisedFunction:
    """Emit the first row of each key and drop the others.

    Args:
        forget_after_ms: a key counts as new again this long after its first row; None: never, so
            the state grows with the number of keys.

    Raises:
        OptionError: the time is not positive, or more than 140,000 years.
    """
    if forget_after_ms is not None:
        _check_ms("deduplicate: forget_after_ms", forget_after_ms)

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
    return VectorisedFunction(
        first_only,
        _SEEN,
        mode,
        output=lambda key, rows: rows,
        meaning=meaning_of("deduplicate"),
        lags=lambda key, times: times,
        ttl_ms=forget_after_ms or 0,
    )


@checked
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
        lists = typed(batch, column, kind).greatest(n, column, batch.state.column("best"))
        return Update(_output(batch.keys, {}, {column: lists}), {"best": lists})

    def output(key: pa.Schema, rows: pa.Schema) -> pa.Schema:
        return beside_key(key, [], [pa.field(column, pa.list_(kind))])

    meaning = meaning_of("top_n", {"n": str(n), "column": name_text(column)})
    return VectorisedFunction(
        greatest,
        schema_of(state, "state"),
        NO_TIME,
        [column],
        output,
        meaning=meaning,
        lags=lambda key, times: {name: lag for name, lag in times.items() if name in key},
    )


@checked
def sessions(gap_ms: int, time_column: str) -> VectorisedFunction:
    """Emit each key's sessions as they end: the key, `start`, `end` and `count` of its rows.

    A session takes in rows until none comes for `gap_ms`; a row right at its end still belongs to
    it, as in Flink (TimeWindow.intersects). Rows may come in any order that the watermark permits:
    a row between two sessions makes them one. A session is emitted once the watermark says that no
    row can join it; `end` is its last row's time.

    Args:
        gap_ms: how long a silence ends a session.
        time_column: of the rows: timestamps, or milliseconds since 1970 as bigint; the step's
            `event_time` too.

    Raises:
        OptionError: the gap is not positive, or more than 140,000 years.
    """
    _check_ms("sessions: gap_ms", gap_ms)

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
        open_sessions = tuple(column[~ended] for column in intervals)
        return _sessions_kept(batch, open_sessions, closes_ms[~ended], output)

    def output(key: pa.Schema, rows: pa.Schema) -> pa.Schema:
        return beside_key(key, [], _SESSION)

    meaning = meaning_of("sessions", {"gap_ms": str(gap_ms), "time_column": name_text(time_column)})
    return VectorisedFunction(
        step,
        _SESSIONS,
        EVENT_TIME,
        [time_column],
        output,
        event_time=time_column,
        meaning=meaning,
        lags=lambda key, times: {"end": gap_ms},
    )


def _sessions_merged(batch: KeyedBatch, time_column: str, gap: int) -> tuple[Int64Array, ...]:
    """Merge all open sessions by key and time: key number, start, end, count."""
    codes, stored = explode([batch.state.column(name) for name in _SESSIONS.names])
    starts, ends, counts = (column.to_numpy() for column in stored)
    if batch.rows.num_rows:
        times = event_times(batch.column(time_column), f"sessions: column {time_column!r}")
        codes = np.concatenate([codes, batch.codes])
        starts, ends = np.concatenate([starts, times]), np.concatenate([ends, times])
        counts = np.concatenate([counts, np.ones(len(times), np.int64)])
    order = order_by_key(codes, len(batch))
    if not fold_kernels.is_sorted(codes[order], starts[order]):  # mostly rows come in time's order
        order = np.lexsort((starts, codes))
    intervals = tuple(column[order] for column in (codes, starts, ends, counts))
    session_count = fold_kernels.merge_sessions(*intervals, gap)
    return tuple(column[:session_count] for column in intervals)


def _sessions_kept(
    batch: KeyedBatch,
    intervals: tuple[Int64Array, ...],
    closes_ms: Int64Array,
    output: pa.RecordBatch | None,
) -> Update:
    """Return an update with the open sessions, and a timer for each key's first session to end."""
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


def _check_ms(name: str, span_ms: int) -> None:
    if not 0 < span_ms <= SPAN_MAX_MS:
        raise OptionError(f"{name}={span_ms}, expected more than 0, and at most 140,000 years")


def _output(
    keys: pa.RecordBatch, kept: Mapping[str, pa.Array], values: Mapping[str, pa.Array]
) -> pa.RecordBatch:
    """Return the columns side by side: `beside_key` has seen to their names."""
    columns = dict(zip(keys.schema.names, keys.columns, strict=True))
    return pa.record_batch({**columns, **kept, **values})
