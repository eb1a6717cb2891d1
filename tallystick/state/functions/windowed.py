"""`windowed`: aggregates per key and window, as a function after `key_by`."""

from collections.abc import Collection, Mapping

import pyarrow as pa

from tallystick.arguments import checked, not_one_of
from tallystick.errors import OptionError
from tallystick.state.functions.aggregates import Aggregate
from tallystick.state.functions.count_windows import CountFunction, CountWindows
from tallystick.state.functions.folds import Folds
from tallystick.state.functions.processing import DROP, EVENT_TIME, NO_TIME, PROCESSING_TIME
from tallystick.state.functions.session_windows import SessionFunction
from tallystick.state.functions.vectorised import ByColumns
from tallystick.state.functions.window_engine import GridFunction
from tallystick.state.functions.windows import (
    IS_FINAL,
    WINDOW_END,
    WINDOW_START,
    Clock,
    Sessions,
    WindowOutput,
    Windows,
)
from tallystick.text import duration_ms

FINAL, UPDATE = "final", "update"
_TIMES = {"event": EVENT_TIME, "processing": PROCESSING_TIME}


@checked
def windowed(
    windows: Windows | Sessions | CountWindows,
    aggregates: Mapping[str, Aggregate],
    *,
    time: str = "event",
    emit: str = FINAL,
    allowed_lateness: str | int = 0,
    late: str = DROP,
) -> ByColumns:
    """Aggregate each key's rows by windows of time, or of a number of rows.

    Puts out the key's columns, `window_start`, `window_end` and the aggregates. A window without
    rows is not put out. A count window is put out when it is full, without start and end; only
    windows of time have the settings after `aggregates`.

    Args:
        windows: `tumbling`, `hopping`, `cumulative`, `session` or `count_window`.
        aggregates: the aggregates by the names of their columns in the output.
        time: "event": that of the column `process(event_time=…)`; a row without one stops the
            query. "processing": the epoch's clock; all rows of an epoch have the same time.
        emit: "final": a window is put out once, when the watermark has passed its end. "update":
            whenever it changed too, with a column `is_final` that is false for as long as the
            watermark has not passed its end.
        allowed_lateness: for how long a window takes rows after that, like "1 minute", or ms; it
            is put out again in each epoch that has some.
        late: "drop": rows that are too late for all their windows are dropped and counted. Else
            the name of the output to which they go, with all their columns.

    Raises:
        OptionError: an argument has a wrong type or value.
    """
    clock = _clock(time, emit, allowed_lateness, late)
    aggregates = dict(aggregates)
    if isinstance(windows, CountWindows):
        if (clock, emit) != (Clock(EVENT_TIME), FINAL):
            raise OptionError(
                "windowed: a count window is put out once, when it is full, and no row is late for "
                "it: leave time=, emit=, allowed_lateness= and late= out"
            )
        _check_columns(aggregates, taken=set())
        return _by_count(windows, aggregates)
    bounds = {WINDOW_START, WINDOW_END}
    _check_columns(aggregates, taken=bounds | ({IS_FINAL} if emit == UPDATE else set()))
    result = WindowOutput(has_updates=emit == UPDATE)
    reads = None  # rows for an output of their own keep all their columns
    if late == DROP:
        reads = _reads(aggregates)

    def make(rows: pa.Schema) -> GridFunction | SessionFunction:
        folds = _folds(aggregates, rows)
        if isinstance(windows, Sessions):
            return SessionFunction(folds, clock, result, reads, sessions=windows)
        return GridFunction(folds, clock, result, reads, windows=windows)

    return ByColumns(make, reads, clock.time_mode, has_timers=True, aggregated=_reads(aggregates))


def _clock(time: str, emit: str, allowed_lateness: str | int, late: str) -> Clock:
    """Return the clock of windows of time.

    Raises:
        OptionError: an argument has a wrong type or value.
    """
    if time not in _TIMES:
        raise not_one_of("time", time, _TIMES, of="windowed")
    if emit not in (FINAL, UPDATE):
        raise not_one_of("emit", emit, (FINAL, UPDATE), of="windowed")
    if not late or not isinstance(late, str):
        raise OptionError(f"windowed: late={late!r}, expected {DROP!r} or the name of an output")
    lateness_ms = duration_ms("windowed: allowed_lateness", allowed_lateness)
    if time == "processing" and (lateness_ms or late != DROP):
        raise OptionError(
            "windowed: no row is late by processing time: leave allowed_lateness= and late= out"
        )
    return Clock(_TIMES[time], lateness_ms, late)


def _by_count(windows: CountWindows, aggregates: Mapping[str, Aggregate]) -> ByColumns:
    reads = _reads(aggregates)
    return ByColumns(
        lambda rows: CountFunction(windows, _folds(aggregates, rows), reads), reads, NO_TIME
    )


def _reads(aggregates: Mapping[str, Aggregate]) -> frozenset[str]:
    return frozenset[str]().union(*(aggregate.reads for aggregate in aggregates.values()))


def _folds(aggregates: Mapping[str, Aggregate], rows: pa.Schema) -> Folds:
    return Folds(
        {name: aggregate.folded(name, rows) for name, aggregate in aggregates.items()},
        {name: aggregate.pick for name, aggregate in aggregates.items()},
    )


def _check_columns(aggregates: Mapping[str, Aggregate], taken: Collection[str]) -> None:
    if not aggregates:
        raise OptionError("windowed: no aggregates; name at least one, like {'count': count()}")
    for name in aggregates:
        if name in taken or name.startswith("$") or "." in name:
            raise OptionError(
                f"windowed: {name!r} cannot be the name of an aggregate: it is taken, or has a dot "
                f"in it or a dollar before it. Give it another"
            )
