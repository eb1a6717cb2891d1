"""Session windows: rows of a key that follow one another closely are one session."""

import numpy as np
import pyarrow as pa

from tallystick.errors import OptionError, RecordError
from tallystick.state.functions import fold_kernels
from tallystick.state.functions.keyed_batch import Int64Array, KeyedBatch, Update, order_by_key
from tallystick.state.functions.processing import EVENT_TIME, check_event_times
from tallystick.state.functions.vectorised import VectorisedFunction, beside_key
from tallystick.state.numpy_columns import explode, lists_of

_STATE = pa.schema([(name, pa.list_(pa.int64())) for name in ("starts", "ends", "counts")])
"""The open sessions of a key; moments in microseconds."""

_MOMENT = pa.timestamp("us", tz="UTC")
_EMITTED = pa.schema([("start", _MOMENT), ("end", _MOMENT), ("count", pa.int64())])
_MICROS = 1000


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
        intervals = _merged(batch, time_column, gap_ms * _MICROS)
        closes_ms = -((intervals[2] + gap_ms * _MICROS) // -_MICROS)
        if not batch.is_due:
            return _kept(batch, intervals, closes_ms, None)
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
        return _kept(batch, left, closes_ms[~ended], output)

    def output(key: pa.Schema, rows: pa.Schema) -> pa.Schema:
        return beside_key(key, [], _EMITTED)

    return VectorisedFunction(
        step, _STATE, EVENT_TIME, [time_column], output, event_time=time_column
    )


def _merged(batch: KeyedBatch, time_column: str, gap: int) -> tuple[Int64Array, ...]:
    """Merge all open sessions by key and time: key number, start, end, count."""
    codes, held = explode([batch.state.column(name) for name in _STATE.names])
    starts, ends, counts = (column.to_numpy() for column in held)
    if batch.rows.num_rows:
        times = _times_of(batch, time_column)
        codes = np.concatenate([codes, batch.codes])
        starts, ends = np.concatenate([starts, times]), np.concatenate([ends, times])
        counts = np.concatenate([counts, np.ones(len(times), np.int64)])
    order = order_by_key(codes, len(batch))
    if not fold_kernels.is_sorted(codes[order], starts[order]):  # mostly rows come in time's order
        order = np.lexsort((starts, codes))
    intervals = tuple(column[order] for column in (codes, starts, ends, counts))
    left = fold_kernels.merge_sessions(*intervals, gap)
    return tuple(column[:left] for column in intervals)


def _times_of(batch: KeyedBatch, name: str) -> Int64Array:
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


def _kept(
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
        for name, column in zip(_STATE.names, columns, strict=True)
    }
    timers = np.zeros(len(batch), np.int64)
    # From the last to the first, so that the first stays; a key's sessions are in order of time.
    timers[codes[::-1]] = closes_ms[::-1]
    return Update(output, state, pa.array(timers, mask=counts == 0))
