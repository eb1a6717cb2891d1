"""Kinds of windows, where in time their panes lie, when they close, and the rows of their output.

Windows that share rows share *panes*: each row is in one pane, each window is some panes in a row.
Times are microseconds since 1970. Panes lie on a *grid*, whose edges are `offset` plus whole panes;
with a time zone the grid is one of local days, and `instants` says when an edge is.

Source: tumbling, hopping and cumulative windows as Flink's window table-valued functions have them
(TumblingWindowSpec, HoppingWindowSpec, CumulativeWindowSpec), panes as its PaneWindow.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tallystick.arguments import checked
from tallystick.errors import OptionError, RecordError
from tallystick.state.functions.folds import Folds
from tallystick.state.functions.keyed_batch import Int64Array
from tallystick.state.functions.processing import (
    DROP,
    PROCESSING_TIME,
    SideRows,
    Work,
    event_times,
)
from tallystick.state.overlay import EpochTime, is_final
from tallystick.text import duration_ms, signed_duration_ms

US_PER_MS = 1000
_DAY_US = 24 * 3_600_000 * US_PER_MS
WINDOWS_PER_PANE_MAX = 10_000
NEVER = -(1 << 60)
"""An edge before all others: 36,000 years before 1970."""


@dataclass(frozen=True)
class Windows:
    """Windows of a fixed size; made by `tumbling`, `hopping` and `cumulative`.

    Args:
        kind: the name of the function that made the windows.
        size_us: of the longest window.
        every_us: from one end of a window to the next.
        offset_us: the shift of window edges; of all offsets with the same windows the least from 0
            on, as Flink and Beam take it modulo (TimeWindow.getWindowStartWithOffset).
        time_zone: the zone whose days the windows follow; None: UTC.
    """

    kind: str
    size_us: int
    every_us: int
    offset_us: int = 0
    time_zone: str | None = None

    def __post_init__(self) -> None:
        what = f"{self.kind}: size {self.size_us // US_PER_MS} ms"
        if not 0 < self.every_us <= self.size_us:
            raise OptionError(
                f"{what}, {self._step_name} {self.every_us // US_PER_MS} ms: expected more than 0, "
                f"and at most the size, or rows between windows would be lost"
            )
        if self.kind == CUMULATIVE and self.size_us % self.every_us:
            raise OptionError(f"{what}: expected whole steps of {self.every_us // US_PER_MS} ms")
        object.__setattr__(self, "offset_us", self.offset_us % self.period_us)
        if self.size_us // self.pane_us > WINDOWS_PER_PANE_MAX:
            raise OptionError(
                f"{what} in panes of {self.pane_us // US_PER_MS} ms: a window would have more than "
                f"{WINDOWS_PER_PANE_MAX}. Let {self._step_name} divide the size, or make it longer"
            )
        if self.time_zone is None:
            return
        if self.size_us % _DAY_US or self.every_us % _DAY_US:
            raise OptionError(
                f"{what}, time_zone={self.time_zone!r}: a time zone is for windows of whole days, "
                f"which there have 23 to 25 hours; shorter ones are the same in each, up to an "
                f"offset="
            )
        try:
            _at_zone(np.zeros(1, np.int64), self.time_zone)
        except pa.ArrowInvalid as error:
            raise OptionError(f"{self.kind}: time_zone={self.time_zone!r}: {error}") from None

    @property
    def _step_name(self) -> str:
        return "step" if self.kind == CUMULATIVE else "every"

    @property
    def period_us(self) -> int:
        """The period of the windows: offsets a whole number of periods apart are the same."""
        return self.size_us if self.kind == CUMULATIVE else self.every_us

    @cached_property
    def pane_us(self) -> int:
        """The size of a pane."""
        return math.gcd(self.size_us, self.every_us)

    @property
    def text(self) -> str:
        """The windows in words: part of the state, so they stay the same in every release."""
        zone = "" if self.time_zone is None else f" in {self.time_zone}"
        return (
            f"{self.kind} windows of {self.size_us} us every {self.every_us} us from "
            f"{self.offset_us} us{zone}"
        )

    @property
    def longest_ms(self) -> int:
        """The greatest length of a window in ms; a zone may put its clocks back by up to a day."""
        return -(-(self.size_us + (_DAY_US if self.time_zone else 0)) // US_PER_MS)

    @property
    def is_single(self) -> bool:
        """True if a window is a single pane."""
        return self.size_us == self.pane_us

    def check_times(self, times: Int64Array) -> None:
        """Refuse rows whose windows may end when nobody knows yet what the clocks of a zone show.

        Raises:
            RecordError: there is such a row.
        """
        if self.time_zone is None:
            return
        latest = int(times.max(initial=0))
        if latest + self.size_us > _ZONES_END_US:
            raise RecordError(
                f"{self.kind} windows, time_zone={self.time_zone!r}: a row's time is "
                f"{pa.scalar(latest, pa.timestamp('us'))} UTC, and its windows may end after 2036, "
                f"up to which Arrow knows when clocks change. Correct it in a map_batches before, "
                f"or filter it out there; process(event_time_max_ahead=…) leaves out rows from the "
                f"future."
            )

    def edges_at(self, times: Int64Array) -> Int64Array:
        """Return the last edge of a pane at or before each moment."""
        if self.time_zone is None:
            return self._floor(times, self.pane_us)
        edges = self._floor(_at_zone(times, self.time_zone), self.pane_us)
        # A clock that was put back may show a time before an edge again: a day begins only once.
        after = edges + self.pane_us
        last_edges: Int64Array = np.where(times >= self.instants(after), after, edges)
        return last_edges

    def instants(self, edges: Int64Array) -> Int64Array:
        """Return the moment of each edge."""
        if self.time_zone is None:
            return edges
        distinct, numbers = np.unique(edges, return_inverse=True)
        local = pa.array(distinct).cast(pa.timestamp("us"))
        moments = pc.assume_timezone(
            local, self.time_zone, ambiguous="earliest", nonexistent="latest"
        )
        instants: Int64Array = moments.cast(pa.int64()).to_numpy()[numbers]
        return instants

    def ends_of(self, panes: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the end of the first and of the last window that each pane is in.

        The others are between, `every_us` apart.
        """
        if self.kind == CUMULATIVE:
            return panes + self.pane_us, self._floor(panes, self.size_us) + self.size_us
        behind = (panes - self.offset_us) % self.every_us
        # Windows end where they begin, plus the size.
        first = panes + self.pane_us + (self.size_us - self.pane_us - behind) % self.every_us
        return first, panes + self.size_us - behind

    def starts_of(self, ends: Int64Array) -> Int64Array:
        """Return the starts of windows from their ends."""
        if self.kind == CUMULATIVE:
            return self._floor(ends - 1, self.size_us)
        return ends - self.size_us

    def closes_ms(self, ends: Int64Array) -> Int64Array:
        """Return the watermark that closes each window: the last millisecond before its end."""
        return last_ms(self.instants(ends))

    def _floor(self, times: Int64Array, size: int) -> Int64Array:
        return (times - self.offset_us) // size * size + self.offset_us


@dataclass(frozen=True)
class Sessions:
    """Windows of a key's rows, divided by gaps in time; made by `session`."""

    gap_us: int

    @property
    def text(self) -> str:
        """The windows in words: part of the state, so they stay the same in every release."""
        return f"session windows with a gap of {self.gap_us} us"


_ZONES_END_US = 2_114_380_800_000_000
"""The end of 2036, up to which Arrow has the rules of all zones."""
TUMBLING, HOPPING, CUMULATIVE = "tumbling", "hopping", "cumulative"


def last_ms(ends: Int64Array) -> Int64Array:
    """Return the last millisecond before each moment, in microseconds."""
    return (ends - 1) // US_PER_MS


def _at_zone(times: Int64Array, zone: str) -> Int64Array:
    """Return the local time of a zone at each moment, in microseconds."""
    local = pc.local_timestamp(pa.array(times).cast(pa.timestamp("us", zone)))
    local_us: Int64Array = local.cast(pa.int64()).to_numpy()
    return local_us


def _us(name: str, duration: str | int) -> int:
    return duration_ms(name, duration) * US_PER_MS


def _offset_us(name: str, duration: str | int) -> int:
    return signed_duration_ms(name, duration) * US_PER_MS


_HOPPING = re.compile(r"(hopping windows of \d+ us every (\d+) us from )(\d+)( us.*)")


def windows_text(words: str) -> str:
    """Convert the words of windows in a checkpoint to the words of `Windows.text`.

    Before offsets were taken modulo, hopping windows could have an offset above their `every`.
    """
    if parts := _HOPPING.fullmatch(words):
        return f"{parts[1]}{int(parts[3]) % int(parts[2])}{parts[4]}"
    return words


@checked
def tumbling(size: str | int, *, offset: str | int = 0, time_zone: str | None = None) -> Windows:
    """Cut time into windows of equal size, without gaps or overlaps.

    Args:
        size: like "1 minute", or ms.
        offset: by which windows begin later than whole sizes since 1970, which was a Thursday:
            weeks with "4 days" begin on Mondays. A negative one, such as "-8 hours": earlier.
        time_zone: like "Europe/Berlin", for windows of whole days from midnight to midnight there.

    Raises:
        OptionError: no such windows can be.
    """
    size_us = _us("tumbling: size", size)
    return Windows(TUMBLING, size_us, size_us, _offset_us("tumbling: offset", offset), time_zone)


@checked
def hopping(
    size: str | int,
    *,
    every: str | int,
    offset: str | int = 0,
    time_zone: str | None = None,
) -> Windows:
    """Begin a window of equal size at each step of `every`; windows overlap, a row is in several.

    Others call them sliding windows. State that windows share is kept once.

    Args:
        size: like "1 minute", or ms.
        every: from the start of one window to that of the next; best a part of the size.
        offset: as of `tumbling`.
        time_zone: as of `tumbling`.

    Raises:
        OptionError: no such windows can be.
    """
    size_us, every_us = _us("hopping: size", size), _us("hopping: every", every)
    return Windows(HOPPING, size_us, every_us, _offset_us("hopping: offset", offset), time_zone)


@checked
def cumulative(
    size: str | int,
    *,
    step: str | int,
    offset: str | int = 0,
    time_zone: str | None = None,
) -> Windows:
    """Let windows grow by steps up to a size, and begin again: the total so far today.

    Args:
        size: of the longest window, like "1 day", or ms.
        step: the span by which each window is longer than the window before.
        offset: as of `tumbling`.
        time_zone: as of `tumbling`.

    Raises:
        OptionError: no such windows can be.
    """
    size_us, step_us = _us("cumulative: size", size), _us("cumulative: step", step)
    offset_us = _offset_us("cumulative: offset", offset)
    return Windows(CUMULATIVE, size_us, step_us, offset_us, time_zone)


@checked
def session(gap: str | int) -> Sessions:
    """Group a key's rows into sessions, each ended by a longer gap without rows.

    A session begins with its first row and ends the gap after its last row. A row that fills the
    gap between two sessions makes them one.

    Args:
        gap: like "30 minutes", or ms.

    Raises:
        OptionError: the gap is not positive.
    """
    gap_us = _us("session: gap", gap)
    if gap_us <= 0:
        raise OptionError(f"session: gap={gap!r}, expected more than 0")
    return Sessions(gap_us)


# ---- clock and output ----------------------------------------------------------------------------

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
