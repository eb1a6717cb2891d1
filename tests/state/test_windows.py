"""Windows against plain Python: rows in any order, cut into any epochs, on any number of tasks."""

import datetime as dt
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_keyed_task import MAX_PARALLELISM, OneTask

import tallystick as ts
from tallystick.errors import OptionError, RecordError
from tallystick.state.catalog import StepState
from tallystick.state.compatibility import settle
from tallystick.state.entries import regrouped
from tallystick.state.functions.vectorised import ByColumns
from tallystick.state.functions.windows import Sessions, Windows
from tallystick.state.keys import KeyCodec
from tallystick.state.overlay import ENTRIES
from tests.examples import drawn

SCHEMA = pa.schema([("key", pa.string()), ("ts", pa.int64()), ("x", pa.int64())])
KEY = pa.schema([SCHEMA.field("key")])
AGGREGATES = {
    "n": ts.count(),
    "total": ts.sum("x"),
    "low": ts.minimum("x"),
    "high": ts.maximum("x"),
    "mean": ts.average("x"),
}
END_OF_TIME_MS = 10**9

Record = tuple[Any, int, int | None]
Finals = dict[tuple[Any, int, int], dict[str, Any]]


def task_of(windows: Windows | Sessions, **settings: Any) -> OneTask:
    aggregates = settings.pop("aggregates", AGGREGATES)
    schema = settings.pop("schema", SCHEMA)
    function = ts.windowed(windows, aggregates, **settings)
    return OneTask(function, KEY, schema, event_time="ts")


def rows_of(records: Iterable[Record]) -> pa.RecordBatch:
    columns = list(zip(*records, strict=True)) or [[], [], []]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def ms(moment: dt.datetime) -> int:
    return (moment - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(milliseconds=1)


def finals_of(output: Iterable[dict[str, Any]]) -> Finals:
    """The output by key and window; each only once."""
    finals: Finals = {}
    for row in output:
        window = (row.pop("key"), ms(row.pop("window_start")), ms(row.pop("window_end")))
        assert window not in finals, f"{window} was put out twice"
        finals[window] = row
    return finals


def values(xs: list[int | None]) -> dict[str, Any]:
    there = [x for x in xs if x is not None]
    return {
        "n": len(xs),
        "total": sum(there) if there else None,
        "low": min(there, default=None),
        "high": max(there, default=None),
        "mean": sum(there) / len(there) if there else None,
    }


# Naive: each row into each of its windows, one at a time.
def hopping_windows(size: int, every: int, offset: int) -> Callable[[int], list[tuple[int, int]]]:
    def windows(at: int) -> list[tuple[int, int]]:
        last = at - (at - offset) % every
        return [(start, start + size) for start in range(last, at - size, -every)]

    return windows


def cumulative_windows(size: int, step: int, offset: int) -> Callable[[int], list[tuple[int, int]]]:
    def windows(at: int) -> list[tuple[int, int]]:
        start = at - (at - offset) % size
        return [(start, end) for end in range(start + step, start + size + 1, step) if end > at]

    return windows


def naive(records: list[Record], windows: Callable[[int], list[tuple[int, int]]]) -> Finals:
    values_by_window: dict[tuple[Any, int, int], list[int | None]] = {}
    for key, at, x in records:
        for start, end in windows(at):
            values_by_window.setdefault((key, start, end), []).append(x)
    return {window: values(xs) for window, xs in values_by_window.items()}


def naive_sessions(records: list[Record], gap: int) -> Finals:
    finals: Finals = {}
    for key in {record[0] for record in records}:
        times = sorted(((a, x) for k, a, x in records if k == key), key=lambda record: record[0])
        sessions: list[list[tuple[int, int | None]]] = []
        for at, x in times:
            if sessions and at - sessions[-1][-1][0] <= gap:
                sessions[-1].append((at, x))
            else:
                sessions.append([(at, x)])
        for rows in sessions:
            finals[(key, rows[0][0], rows[-1][0] + gap)] = values([x for _, x in rows])
    return finals


RECORD = st.tuples(
    st.sampled_from([None, "a", "b", "cc"]), st.integers(-40, 60), st.none() | st.integers(-9, 9)
)
RECORDS = st.lists(RECORD, max_size=40)
GRIDS = st.sampled_from(
    [
        (ts.tumbling(10), hopping_windows(10, 10, 0)),
        (ts.tumbling(7, offset=3), hopping_windows(7, 7, 3)),
        (ts.tumbling(7, offset=-3), hopping_windows(7, 7, -3)),
        (ts.tumbling(7, offset=17), hopping_windows(7, 7, 17)),
        (ts.hopping(10, every=4, offset=-3), hopping_windows(10, 4, -3)),
        (ts.hopping(10, every=4, offset=11), hopping_windows(10, 4, 11)),
        (ts.hopping(10, every=7, offset=-10), hopping_windows(10, 7, -10)),
        (ts.cumulative(12, step=4, offset=-5), cumulative_windows(12, 4, -5)),
        (ts.cumulative(12, step=4, offset=19), cumulative_windows(12, 4, 19)),
        (ts.hopping(10, every=5), hopping_windows(10, 5, 0)),
        (ts.hopping(10, every=4, offset=3), hopping_windows(10, 4, 3)),
        (ts.hopping(9, every=9, offset=1), hopping_windows(9, 9, 1)),
        (ts.hopping(12, every=1), hopping_windows(12, 1, 0)),
        (ts.cumulative(12, step=4, offset=5), cumulative_windows(12, 4, 5)),
        (ts.cumulative(10, step=10), cumulative_windows(10, 10, 0)),
    ]
)
CUTS = st.lists(st.integers(0, 40), max_size=6)


def epochs_of(records: list[Record], cuts: list[int]) -> list[list[Record]]:
    edges = [0, *sorted(min(cut, len(records)) for cut in cuts), len(records)]
    return [records[a:b] for a, b in itertools.pairwise(edges)]


def in_time(records: list[Record], delay: int) -> list[Record]:
    """The records that are not behind the latest of those before by the delay."""
    latest, kept = -(10**9), []
    for record in records:
        if record[1] > latest - delay:
            kept.append(record)
        latest = max(latest, record[1])
    return kept


def run(
    task: OneTask, records: list[Record], cuts: list[int], delay: int, tasks: list[int]
) -> list[dict[str, Any]]:
    """All output of epochs, with a watermark like a pipeline's and another parallelism in each."""
    latest: int | None = None
    output, late = [], 0
    for number, epoch in enumerate(epochs_of(records, cuts)):
        watermark = None if latest is None else latest - delay
        output += task.epoch(
            rows_of(epoch), watermark_ms=watermark, parallelism=tasks[number % len(tasks)]
        )
        late += task.late
        seen = [record[1] for record in epoch] + ([] if latest is None else [latest])
        latest = max(seen, default=None)
    output += task.epoch(rows_of([]), watermark_ms=END_OF_TIME_MS)
    assert not task.entries, "state is freed when the watermark has passed"
    assert late == 0
    return output


TASKS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@drawn(150)
@given(grid=GRIDS, records=RECORDS, cuts=CUTS, delay=st.integers(0, 50), tasks=TASKS)
def test_finals_are_those_of_all_rows_wherever_epochs_are_cut(
    grid: Any, records: list[Record], cuts: list[int], delay: int, tasks: list[int]
) -> None:
    windows, oracle = grid
    records = in_time(records, delay)

    output = run(task_of(windows), records, cuts, delay, tasks)

    assert finals_of(output) == naive(records, oracle)


@drawn(150)
@given(gap=st.integers(1, 15), records=RECORDS, cuts=CUTS, delay=st.integers(0, 50), tasks=TASKS)
def test_sessions_are_those_of_all_rows_wherever_epochs_are_cut(
    gap: int, records: list[Record], cuts: list[int], delay: int, tasks: list[int]
) -> None:
    records = in_time(records, delay)

    output = run(task_of(ts.session(gap)), records, cuts, delay, tasks)

    assert finals_of(output) == naive_sessions(records, gap)


@drawn(100)
@given(
    grid=GRIDS,
    records=RECORDS,
    cuts=CUTS,
    lateness=st.sampled_from([0, 3, 20]),
    emit=st.sampled_from(["final", "update"]),
    delay=st.integers(0, 10),
)
def test_late_rows_count_for_windows_that_still_take_them(
    grid: Any, records: list[Record], cuts: list[int], lateness: int, emit: str, delay: int
) -> None:
    """As Flink: windows fire by the watermark, then rows come; each window judges by itself."""
    windows, oracle = grid
    task = task_of(windows, allowed_lateness=lateness, emit=emit, late="too late")
    counted: dict[tuple[Any, int, int], list[int | None]] = {}
    fired: set[tuple[Any, int, int]] = set()
    watermark: int | None = None
    for epoch in [*epochs_of(records, cuts), []]:
        if not epoch:
            watermark = END_OF_TIME_MS if records and watermark is not None else watermark
        until = -(10**9) if watermark is None else watermark
        expected = []
        for window in sorted(counted, key=str):
            if window not in fired and window[2] - 1 <= until:
                fired.add(window)
                expected.append((window, values(counted[window]), True))
        changed, late = set(), []
        for key, at, x in epoch:
            of_row = [(key, *window) for window in oracle(at) if window[1] - 1 + lateness > until]
            for window in of_row:
                counted.setdefault(window, []).append(x)
                changed.add(window)
            late += [] if of_row else [(key, at, x)]
        for window in changed:
            is_closed = window[2] - 1 <= until
            if is_closed:
                fired.add(window)
            if is_closed or emit == "update":
                expected.append((window, values(counted[window]), is_closed))

        windows_out = []
        for row in task.epoch(rows_of(epoch), watermark_ms=watermark, parallelism=2):
            window = (row.pop("key"), ms(row.pop("window_start")), ms(row.pop("window_end")))
            windows_out.append((window, row, row.pop("is_final", True)))
        assert sorted(windows_out, key=str) == sorted(expected, key=str)
        side = [
            tuple(row.values()) for side_output in task.side for row in side_output.rows.to_pylist()
        ]
        assert sorted(side, key=str) == sorted(late, key=str)
        assert {side_output.output for side_output in task.side} <= {"too late"}
        seen = [record[1] - delay for record in epoch] + ([] if watermark is None else [watermark])
        watermark = max(seen, default=None)


@drawn(100)
@given(
    gap=st.integers(1, 15),
    records=RECORDS,
    cuts=CUTS,
    lateness=st.sampled_from([0, 3, 20]),
    emit=st.sampled_from(["final", "update"]),
    delay=st.integers(0, 10),
)
def test_late_rows_join_sessions_that_still_take_them(
    gap: int, records: list[Record], cuts: list[int], lateness: int, emit: str, delay: int
) -> None:
    """A row counts if the session that it makes with the others of its epoch is not gone."""
    task = task_of(ts.session(gap), allowed_lateness=lateness, emit=emit)
    sessions: list[tuple[Any, list[tuple[int, int | None]]]] = []
    fired: list[Any] = []
    watermark: int | None = None
    late_count = 0
    for epoch in [*epochs_of(records, cuts), []]:
        if not epoch:
            watermark = END_OF_TIME_MS if records and watermark is not None else watermark
        until = -(10**9) if watermark is None else watermark

        def window(key: Any, rows: list[tuple[int, int | None]]) -> tuple[Any, int, int]:
            return (key, rows[0][0], rows[-1][0] + gap)

        expected = []
        for key, rows in sessions:
            if (key, rows) not in fired and rows[-1][0] + gap <= until:
                fired.append((key, rows))
                expected.append((window(key, rows), values([x for _, x in rows]), True))
        sessions = [session for session in sessions if session[1][-1][0] + gap + lateness > until]

        pieces = [(key, rows, False) for key, rows in sessions]
        pieces += [(key, [(at, x)], True) for key, at, x in epoch]
        sessions, merged = [], list[Any]()
        for key, rows, is_new in sorted(pieces, key=lambda piece: (str(piece[0]), piece[1][0][0])):
            if merged and merged[-1][0] == key and rows[0][0] - merged[-1][1][-1][0] <= gap:
                together = sorted(merged[-1][1] + rows, key=lambda timed: timed[0])
                merged[-1] = (key, together, merged[-1][2] or is_new)
            else:
                merged.append((key, rows, is_new))
        for key, rows, is_new in merged:
            if rows[-1][0] + gap + lateness <= until:
                late_count += len(rows)
                continue
            sessions.append((key, rows))
            is_closed = rows[-1][0] + gap <= until
            if is_closed and is_new:
                fired.append((key, rows))
            if is_new and (is_closed or emit == "update"):
                expected.append((window(key, rows), values([x for _, x in rows]), is_closed))

        windows_out = []
        for row in task.epoch(rows_of(epoch), watermark_ms=watermark, parallelism=2):
            bounds = (row.pop("key"), ms(row.pop("window_start")), ms(row.pop("window_end")))
            windows_out.append((bounds, row, row.pop("is_final", True)))
        assert sorted(windows_out, key=str) == sorted(expected, key=str)
        late_count -= task.late
        seen = [record[1] - delay for record in epoch] + ([] if watermark is None else [watermark])
        watermark = max(seen, default=None)
    assert late_count == 0


def records_at(*times: int, key: str = "a") -> list[Record]:
    return [(key, at, 1) for at in times]


def test_a_row_behind_the_watermark_counts_while_its_window_is_open() -> None:
    task = task_of(ts.tumbling(10), aggregates={"n": ts.count()})

    task.epoch(rows_of(records_at(3, 15)))
    finals = finals_of(task.epoch(rows_of(records_at(8, 11, 9)), watermark_ms=12))

    assert finals == {("a", 0, 10): {"n": 1}}
    assert task.late == 2
    assert finals_of(task.epoch(rows_of([]), watermark_ms=19)) == {("a", 10, 20): {"n": 2}}
    assert not task.entries


def test_a_row_that_is_late_for_one_of_its_windows_counts_in_the_others() -> None:
    task = task_of(ts.hopping(10, every=5), aggregates={"n": ts.count()})

    task.epoch(rows_of(records_at(6)))
    closing = finals_of(task.epoch(rows_of(records_at(7)), watermark_ms=9))
    later = finals_of(task.epoch(rows_of([]), watermark_ms=14))

    assert closing == {("a", 0, 10): {"n": 1}}
    assert later == {("a", 5, 15): {"n": 2}}
    assert task.late == 0


def test_a_late_row_joins_sessions_that_are_kept_and_they_are_put_out_again() -> None:
    task = task_of(ts.session(5), aggregates={"n": ts.count()}, allowed_lateness=10)

    task.epoch(rows_of(records_at(0, 8)))
    first = finals_of(task.epoch(rows_of([]), watermark_ms=6))
    # 4 is behind the watermark; it makes one session of the closed one and the open one.
    second = task.epoch(rows_of(records_at(4)), watermark_ms=7)
    third = finals_of(task.epoch(rows_of([]), watermark_ms=13))
    fourth = finals_of(task.epoch(rows_of(records_at(2)), watermark_ms=21))
    late = task.epoch(rows_of(records_at(8)), watermark_ms=23)

    assert first == {("a", 0, 5): {"n": 1}}
    assert second == []
    assert third == {("a", 0, 13): {"n": 3}}
    assert fourth == {("a", 0, 13): {"n": 4}}
    assert (late, task.late) == ([], 1)
    assert not task.entries


def test_a_row_right_at_the_end_of_a_session_belongs_to_it_whenever_it_comes() -> None:
    task = task_of(ts.session(5), aggregates={"n": ts.count()})

    task.epoch(rows_of(records_at(0)))
    assert task.epoch(rows_of(records_at(5)), watermark_ms=4) == []
    assert finals_of(task.epoch(rows_of([]), watermark_ms=10)) == {("a", 0, 10): {"n": 2}}


def test_sessions_with_updates_say_which_are_final() -> None:
    task = task_of(ts.session(5), aggregates={"n": ts.count()}, emit="update")

    first = task.epoch(rows_of(records_at(0, 3)))
    second = task.epoch(rows_of(records_at(20, key="b")), watermark_ms=10)

    assert [(row["key"], row["n"], row["is_final"]) for row in first] == [("a", 2, False)]
    assert [(row["key"], row["n"], row["is_final"]) for row in second] == [
        ("a", 2, True),
        ("b", 1, False),
    ]


def test_windows_by_the_clock_of_epochs() -> None:
    task = task_of(ts.tumbling(1000), aggregates={"n": ts.count()}, time="processing")

    assert task.epoch(rows_of(records_at(0, 0)), timestamp_ms=5000) == []
    assert task.epoch(rows_of(records_at(0)), timestamp_ms=5999) == []
    finals = finals_of(task.epoch(rows_of(records_at(0)), timestamp_ms=6000))

    assert finals == {("a", 5000, 6000): {"n": 3}}
    assert finals_of(task.epoch(rows_of([]), timestamp_ms=7500)) == {("a", 6000, 7000): {"n": 1}}


ZONED = pa.schema([SCHEMA.field("key"), ("ts", pa.timestamp("us", "UTC")), SCHEMA.field("x")])


@pytest.mark.parametrize(
    ("zone", "first"),
    [
        ("Europe/Berlin", dt.date(2026, 3, 27)),  # 23 hours on the 29th
        ("Europe/Berlin", dt.date(2026, 10, 23)),  # 25 hours on the 25th
        ("America/Havana", dt.date(2026, 3, 6)),  # no midnight on the 8th
        ("America/Havana", dt.date(2026, 10, 30)),  # midnight is twice on November 1
        ("Asia/Kolkata", dt.date(2026, 1, 1)),
    ],
)
@pytest.mark.parametrize("windows", ["tumbling", "hopping"])
def test_days_of_a_time_zone(zone: str, first: dt.date, windows: str) -> None:
    """Each quarter of an hour of five days is in the day that a calendar there shows."""
    place = ZoneInfo(zone)
    begin = dt.datetime.combine(first, dt.time(), place).astimezone(dt.UTC)
    times = [begin + dt.timedelta(minutes=15 * n) for n in range(4 * 24 * 5)]
    days = [at.astimezone(place).date() for at in times]
    if windows == "tumbling":
        task = task_of(ts.tumbling("1 day", time_zone=zone), schema=ZONED)
        expected = {day: days.count(day) for day in days}
    else:
        task = task_of(ts.hopping("2 days", every="1 day", time_zone=zone), schema=ZONED)
        span = {day - dt.timedelta(1) for day in days} | {*days}
        expected = {day: sum(days.count(day + dt.timedelta(n)) for n in (0, 1)) for day in span}

    rows = pa.record_batch([["a"] * len(times), times, [1] * len(times)], schema=ZONED)
    rows_out = task.epoch(rows)
    rows_out += task.epoch(rows[:0], watermark_ms=ms(times[-1]) + 3 * 86_400_000)

    assert {row["window_start"].astimezone(place).date(): row["n"] for row in rows_out} == expected
    starts = sorted(row["window_start"] for row in rows_out)
    ends = sorted(row["window_end"] for row in rows_out)
    step = 1 if windows == "tumbling" else 2
    assert ends[:-step] == starts[step:], "one day begins where the other ends"


def test_a_row_after_the_last_known_change_of_clocks_is_refused_and_not_an_hour_off() -> None:
    summer, later = (dt.datetime(year, 7, 1, 22, 30, tzinfo=dt.UTC) for year in (2036, 2050))
    task = task_of(ts.tumbling("1 day", time_zone="Europe/Berlin"), schema=ZONED)
    known, row = (pa.record_batch([["a"], [at], [1]], schema=ZONED) for at in (summer, later))
    (day,) = [*task.epoch(known), *task.epoch(known[:0], watermark_ms=ms(summer) + 86_400_000)]
    assert day["window_start"] == dt.datetime(2036, 7, 1, 22, tzinfo=dt.UTC)
    with pytest.raises(RecordError, match=r"2050-07-01 22:30:00 UTC, .* after 2036"):
        task.epoch(row)


@pytest.mark.parametrize("first", [dt.date(2026, 3, 28), dt.date(2026, 10, 24)])
def test_a_day_that_begins_in_an_hour_that_is_twice_or_missing_begins_once(
    first: dt.date,
) -> None:
    place = ZoneInfo("Europe/Berlin")
    begin = dt.datetime.combine(first, dt.time(12), place).astimezone(dt.UTC)
    times = [begin + dt.timedelta(minutes=5 * n) for n in range(12 * 36)]
    windows = ts.tumbling("1 day", offset="150 minutes", time_zone="Europe/Berlin")
    aggregates = {"n": ts.count(), "first": ts.first_value("ts"), "last": ts.last_value("ts")}
    task = task_of(windows, aggregates=aggregates, schema=ZONED)

    task.epoch(pa.record_batch([["a"] * len(times), times, [1] * len(times)], schema=ZONED))
    rows_out = task.epoch(rows_of([]).cast(ZONED), watermark_ms=ms(times[-1]) + 3 * 86_400_000)

    assert [row["window_end"] for row in rows_out[:-1]] == [
        row["window_start"] for row in rows_out[1:]
    ]
    for row in rows_out:
        assert row["window_start"] <= row["first"]
        assert row["last"] < row["window_end"]
    assert sum(row["n"] for row in rows_out) == len(times)


def test_moments_within_a_millisecond_and_before_1970() -> None:
    zone = pa.schema([SCHEMA.field("key"), ("ts", pa.timestamp("us", "UTC")), SCHEMA.field("x")])
    task = task_of(ts.tumbling(10), aggregates={"n": ts.count()}, schema=zone)
    times = pa.array([-1, -10_000, -10_001, 9999], pa.int64()).cast(zone.field("ts").type)

    task.epoch(pa.record_batch([["a"] * 4, times, [1] * 4], schema=zone))

    finals = finals_of(task.epoch(rows_of([]).cast(zone), watermark_ms=100))
    assert finals == {
        ("a", -20, -10): {"n": 1},
        ("a", -10, 0): {"n": 2},
        ("a", 0, 10): {"n": 1},
    }


def test_a_far_jump_of_the_watermark_closes_many_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tallystick.state.functions.window_engine._LINES_MAX", 100)
    records = [(key, at, at) for key in "abc" for at in range(0, 500, 7)]
    task = task_of(ts.hopping(100, every=1))
    task.epoch(rows_of(records))

    finals = finals_of(task.epoch(rows_of([]), watermark_ms=END_OF_TIME_MS))

    assert len(task.output) > 1
    assert finals == naive(records, hopping_windows(100, 1, 0))


@pytest.mark.parametrize("windows", [ts.hopping(60, every=4), ts.cumulative(60, step=3)])
def test_updates_of_many_windows_come_in_parts(
    monkeypatch: pytest.MonkeyPatch, windows: Any
) -> None:
    records = [(key, at, at) for key in "ab" for at in range(0, 200, 9)]
    whole = task_of(windows, emit="update").epoch(rows_of(records))
    monkeypatch.setattr("tallystick.state.functions.window_engine._LINES_MAX", 50)
    task = task_of(windows, emit="update")

    rows_out = task.epoch(rows_of(records))

    assert len(task.output) > 2
    assert finals_of(rows_out) == finals_of(whole)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ts.hopping(10, every=20), "at most the size, or rows between"),
        (lambda: ts.tumbling(0), "expected more than 0"),
        (lambda: ts.tumbling("soon"), "tumbling: size='soon'"),
        (lambda: ts.cumulative(10, step=3), "expected whole steps of 3 ms"),
        (lambda: ts.hopping("1 day", every=1), "more than 10000"),
        (lambda: ts.tumbling("1 hour", time_zone="Europe/Berlin"), "windows of whole days"),
        (lambda: ts.tumbling("1 day", time_zone="Nowhere"), "time_zone='Nowhere'"),
        (lambda: ts.session(0), "expected more than 0"),
        (lambda: ts.windowed("1 minute", AGGREGATES), r"expected ts\.tumbling"),
        (lambda: ts.windowed(ts.tumbling(1), {}), "no aggregates"),
        (lambda: ts.windowed(ts.tumbling(1), {"window_end": ts.count()}), "it is taken, or"),
        (lambda: ts.windowed(ts.tumbling(1), {"a.b": ts.count()}), "or has a dot"),
        (lambda: ts.windowed(ts.tumbling(1), {"$open": ts.count()}), "or a dollar"),
        (lambda: ts.windowed(ts.tumbling(1), {"n": 1}), r"expected ts\.count"),
        (lambda: ts.windowed(ts.tumbling(1), AGGREGATES, emit="late"), "emit='late'"),
        (lambda: ts.windowed(ts.tumbling(1), AGGREGATES, time="now"), "time='now'"),
        (lambda: ts.windowed(ts.tumbling(1), AGGREGATES, late=""), "late=''"),
        (
            lambda: ts.windowed(ts.tumbling(1), AGGREGATES, time="processing", allowed_lateness=1),
            "no row is late by processing time",
        ),
    ],
)
def test_mistakes_are_told(make: Callable[[], object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


def test_rows_without_a_time_or_beyond_all_calendars_are_refused() -> None:
    task = task_of(ts.tumbling(10))
    with pytest.raises(RecordError, match="event_time='ts': 1 rows have no time"):
        task.epoch(pa.record_batch([["a"], [None], [1]], schema=SCHEMA))
    with pytest.raises(RecordError, match="not within the years 1 to 9999"):
        task.epoch(rows_of(records_at(10**15)))


def test_the_key_has_columns_of_other_names() -> None:
    schema = pa.schema([("window_start", pa.string()), *list(SCHEMA)[1:]])
    function = ts.windowed(ts.tumbling(10), AGGREGATES)
    with pytest.raises(OptionError, match="'window_start', and the key has one"):
        function.output(pa.schema([schema.field(0)]), schema)


@pytest.mark.parametrize(
    "other", [ts.tumbling(20), ts.tumbling(10, offset=1), ts.session(10), ts.hopping(10, every=5)]
)
def test_state_of_other_windows_is_refused(other: Any) -> None:
    def states(windows: Any) -> Any:
        function = ts.windowed(windows, AGGREGATES)
        assert isinstance(function, ByColumns)
        return function.make(SCHEMA).declared(KeyCodec(KEY))

    fields_of = settle("per-minute", states(ts.tumbling(10)), None)
    step = StepState("per-minute", 16, 1, "", 1, *fields_of)
    with pytest.raises(OptionError, match=r"tumbling windows of 10000 us.*Declare it as it was"):
        settle("per-minute", states(other), step)


def test_what_is_stored_does_not_depend_on_how_rows_come() -> None:
    """A pane's bytes are those of its rows: attempts and parallelism do not show in the state."""
    chance = np.random.default_rng(1)
    records = [(f"k{n % 5}", int(chance.integers(0, 50)), n % 7) for n in range(300)]
    tasks = []
    for cuts, parallelism in (([], 1), ([100, 200], 3), ([1, 2, 3], 2)):
        task = task_of(ts.hopping(20, every=5))
        for epoch in epochs_of(records, list(cuts)):
            task.epoch(rows_of(epoch), parallelism=parallelism)
        tasks.append(task.entries)

    assert tasks[0] == tasks[1] == tasks[2]


def test_panes_and_timers_go_with_their_keys_to_other_key_groups() -> None:
    """`tallystick savepoint migrate` moves entries; a pane's group is that of its key alone."""
    task = task_of(ts.hopping(20, every=5))
    task.epoch(rows_of([(f"k{n}", n, n) for n in range(40)]))
    entries = pa.RecordBatch.from_pylist(
        [{"key": key, "value": task.entries[key]} for key in sorted(task.entries)], schema=ENTRIES
    )

    moved = regrouped(entries, KeyCodec(KEY), 100)

    groups = {key[:2] for key in moved["key"].to_pylist()}
    assert len(groups) > MAX_PARALLELISM
    assert regrouped(moved, KeyCodec(KEY), MAX_PARALLELISM).equals(entries)


@pytest.mark.parametrize(
    ("windows", "same"),
    [
        (ts.tumbling("1 day", offset="-8 hours"), ts.tumbling("1 day", offset="16 hours")),
        (ts.tumbling("5 seconds", offset="12 seconds"), ts.tumbling(5000, offset=2000)),
        (ts.hopping(120, every=60, offset=70), ts.hopping(120, every=60, offset=10)),
        (ts.hopping(10, every=7, offset=-10), ts.hopping(10, every=7, offset=4)),
        (ts.cumulative(12, step=4, offset=-5), ts.cumulative(12, step=4, offset=7)),
        (
            ts.tumbling("7 days", offset="-3 days", time_zone="Europe/Berlin"),
            ts.tumbling("7 days", offset="4 days", time_zone="Europe/Berlin"),
        ),
    ],
)
def test_an_offset_counts_modulo_and_equal_windows_have_one_text(windows: Any, same: Any) -> None:
    """As in Flink and Beam: `of(Time.days(1), Time.hours(-8))` are the days of China."""
    assert windows == same
    assert windows.text == same.text


def test_windows_of_a_checkpoint_with_the_offset_as_it_was_given_are_the_same() -> None:
    """Release 0.1.0 wrote an offset of hopping windows that was above their `every` as it was."""
    function = ts.windowed(ts.hopping(120, every=60, offset=70), AGGREGATES)
    assert isinstance(function, ByColumns)
    (state,) = function.make(SCHEMA).declared(KeyCodec(KEY))
    assert state.key_schema == "hopping windows of 120000 us every 60000 us from 10000 us"
    old = replace(state, key_schema=state.key_schema.replace("10000 us", "70000 us"))
    assert "from 70000 us" in old.key_schema
    fields, next_id = settle("s", [old], None)
    base = StepState("s", 16, 1, "", 1, fields, next_id)
    assert settle("s", [state], base)[0][0].key_schema == state.key_schema
    other = replace(state, key_schema=state.key_schema.replace("from 10000", "from 20000"))
    with pytest.raises(OptionError, match="from 10000 us"):
        settle("s", [other], base)


@pytest.mark.parametrize("rows_come", [True, False])
def test_sessions_with_a_shorter_lateness_leave_nothing_behind(rows_come: bool) -> None:
    def task(lateness: int) -> OneTask:
        windows = ts.windowed(ts.session(10), {"n": ts.count()}, allowed_lateness=lateness)
        return OneTask(windows, KEY, rows=SCHEMA, event_time="ts")

    before, after = task(100_000), task(0)
    before.epoch(rows_of([(f"k{n}", 10, n) for n in range(9)]))
    assert len(before.epoch(rows_of([]), watermark_ms=50)) == 9
    assert len(before.entries) == 27
    after.entries = before.entries
    new = [(f"k{n}", 900, n) for n in range(0, 9, 2)] if rows_come else []
    assert after.epoch(rows_of(new), watermark_ms=100) == []
    assert len(after.epoch(rows_of([]), watermark_ms=2000)) == len(new)
    assert after.epoch(rows_of([]), watermark_ms=200_000) == []
    assert after.entries == {}


def test_a_pane_that_no_session_names_goes_with_its_timer_when_it_is_due() -> None:
    """Release 0.1.0 left such ones behind."""
    windows = ts.windowed(ts.session(10), {"n": ts.count()}, allowed_lateness=1000)
    task = OneTask(windows, KEY, rows=SCHEMA, event_time="ts")
    task.epoch(rows_of([("a", 10, 1), ("b", 15, 1), ("a", 90, 1)]))
    bounds = [key for key in task.entries if key[2] == 2]
    assert len(bounds) == 2
    for key in bounds:
        del task.entries[key]
    assert task.epoch(rows_of([("b", 200, 1)]), watermark_ms=150) == []
    assert len(task.entries) == 3, "the pane, the timer and the bounds of the new session"
    assert len(task.epoch(rows_of([]), watermark_ms=5000)) == 1
    assert task.entries == {}


@pytest.mark.parametrize(
    "windows", [ts.tumbling(10), ts.hopping(10, every=5), ts.session(5), ts.cumulative(10, step=5)]
)
def test_event_times_with_nanoseconds_are_rounded_down(windows: Any) -> None:
    """As for the watermark; Arrow refuses to cast them."""
    starts = []
    for unit, number in (("ns", -1), ("us", -1), ("ns", 10**9 + 999), ("us", 10**6)):
        rows = pa.schema([("u", pa.string()), ("ts", pa.timestamp(unit))])
        counts = ts.windowed(windows, {"n": ts.count()})
        task = OneTask(counts, pa.schema([("u", pa.string())]), rows, "ts")
        times = pa.array([number], pa.int64()).cast(rows.types[1])
        task.epoch(pa.record_batch([["a"], times], rows))
        closed = task.epoch(pa.RecordBatch.from_pylist([], rows), watermark_ms=10**6)
        starts.append([row["window_start"] for row in closed])
    assert starts[0] == starts[1]
    assert starts[2] == starts[3]
