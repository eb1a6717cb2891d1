"""The clock by which windows close, and the rows of their output, for all kinds of windows."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tallystick.state.functions.folds import Folds
from tallystick.state.functions.keyed_batch import Int64Array
from tallystick.state.functions.processing import (
    DROP,
    PROCESSING_TIME,
    SideRows,
    Work,
    event_times,
)
from tallystick.state.functions.windows import US_PER_MS
from tallystick.state.overlay import EpochTime, is_final

MOMENT = pa.timestamp("us", tz="UTC")
WINDOW_START, WINDOW_END, IS_FINAL = "window_start", "window_end", "is_final"


@dataclass(frozen=True)
class Clock:
    """The time by which windows close and rows are late.

    A window is closed once the watermark has reached its last millisecond, as in Flink
    (EventTimeTrigger), and gone when it is `lateness_ms` further (WindowOperator.isWindowLate).
    By processing time all rows of an epoch have the epoch's time, and windows that ended before
    that time are closed.

    Args:
        time_mode: one of `TIME_MODES`.
        lateness_ms: for how long a closed window takes late rows in.
        late: `DROP`, or the name of the output for rows that are too late.
    """

    time_mode: str
    lateness_ms: int = 0
    late: str = DROP

    def until_ms(self, time: EpochTime) -> int | None:
        """Return the watermark up to which timers are due; None: no watermark yet."""
        if self.time_mode == PROCESSING_TIME:
            return time.timestamp_ms - 1
        return time.watermark_ms

    def closed_us(self, time: EpochTime) -> int | None:
        """Return the moment at or before which closed windows end; None: no watermark yet."""
        until_ms = self.until_ms(time)
        return None if until_ms is None else (until_ms + 1) * US_PER_MS

    def gone_us(self, time: EpochTime) -> int | None:
        """Return the moment at or before which gone windows end; None: no watermark yet.

        At the end of all inputs nothing is late any more, and nothing is kept for it.
        """
        closed_us = self.closed_us(time)
        if closed_us is None or is_final(self.until_ms(time)):
            return closed_us
        return closed_us - self.lateness_ms * US_PER_MS

    def times_us(self, work: Work) -> Int64Array:
        """Return the time of each row.

        Raises:
            RecordError: a row has none, or one that is not within the years 1 to 9999.
        """
        if self.time_mode == PROCESSING_TIME:
            return np.full(work.rows.num_rows, work.time.timestamp_ms * US_PER_MS)
        assert work.event_time is not None, "checked before the start"
        what = f"event_time={work.event_time!r}"
        return event_times(work.rows.column(work.event_time), what)

    def outputs(self, rows: pa.Schema) -> dict[str, pa.Schema]:
        """Return the output of late rows; none if they are dropped."""
        return {} if self.late == DROP else {self.late: rows}

    def late_rows(self, work: Work, rows: pa.RecordBatch) -> Iterator[SideRows]:
        """Count rows that are too late, or yield them for the output of late rows."""
        if self.late == DROP:
            work.late.append(rows.num_rows)
        else:
            yield SideRows(self.late, rows)


@dataclass(frozen=True)
class WindowOutput:
    """The output rows of windows.

    Args:
        has_updates: windows are put out after each change, with a column that is true once they are
            closed; else only once they are closed.
    """

    has_updates: bool

    def columns(self, folds: Folds) -> list[pa.Field]:
        """Return the columns besides the key's."""
        final = [pa.field(IS_FINAL, pa.bool_())] if self.has_updates else []
        bounds = [pa.field(name, MOMENT) for name in (WINDOW_START, WINDOW_END)]
        return [*bounds, *folds.output, *final]

    def rows(
        self,
        keys: pa.RecordBatch,
        starts: Int64Array,
        ends: Int64Array,
        results: pa.RecordBatch,
        is_final: NDArray[np.bool_],
    ) -> pa.RecordBatch:
        """Return a row per window."""
        moments = [pa.array(edges).cast(MOMENT) for edges in (starts, ends)]
        final = [pa.array(is_final)] if self.has_updates else []
        bounds = [pa.field(name, MOMENT) for name in (WINDOW_START, WINDOW_END)]
        last = [pa.field(IS_FINAL, pa.bool_())] if self.has_updates else []
        schema = pa.schema([*keys.schema, *bounds, *results.schema, *last])
        columns = [*keys.columns, *moments, *results.columns, *final]
        return pa.RecordBatch.from_arrays(columns, schema=schema)
