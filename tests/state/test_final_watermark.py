"""The watermark at the end of all inputs: all comes out, nothing stays, and nothing comes twice."""

from typing import Any

import pyarrow as pa
import pytest

import tallystick as ts
from tallystick.state.functions.joins import interval_join, temporal_join, window_join
from tallystick.state.functions.keyed_batch import Update
from tallystick.state.functions.processing import EVENT_TIME
from tallystick.state.functions.ready_made import sessions
from tallystick.state.functions.vectorised import vectorised
from tallystick.state.overlay import FINAL_WATERMARK_MS
from tests.state.co_keyed_tasks import CoKeyedTasks
from tests.state.one_keyed_task import OneTask
from tests.state.test_temporal_join import INPUTS

KEY = pa.schema([pa.field("k", pa.string())])
SCHEMA = pa.schema([*KEY, pa.field("ts", pa.int64())])
NOW_MS = 1_700_000_000_000
LAST_DAY_MS = 253_402_128_000_000
"""The last event time that there may be."""
FAR_MS = (1 << 63) - 1
WINDOWS = {
    "tumbling": ts.tumbling("1 hour"),
    "hopping": ts.hopping("1 hour", every="10 minutes"),
    "cumulative": ts.cumulative("1 day", step="1 hour"),
    "days of a zone": ts.tumbling("1 day", time_zone="Europe/Berlin"),
    "hopping days of a zone": ts.hopping("7 days", every="1 day", time_zone="Asia/Kathmandu"),
    "sessions": ts.session("30 minutes"),
    "a window of a thousand years": ts.tumbling("365000 days"),
}
ZONES_KNOWN_MS = 2_100_000_000_000
"""A moment of 2036: later ones are refused by windows of a time zone."""
LAST_MS = {
    "days of a zone": ZONES_KNOWN_MS,
    "hopping days of a zone": ZONES_KNOWN_MS,
    # Windows that end after the year 9999 cannot be shown as dates of Python's.
    "a window of a thousand years": 3 * NOW_MS,
}


def rows(*times_ms: int) -> pa.RecordBatch:
    return pa.record_batch([["a"] * len(times_ms), list(times_ms)], schema=SCHEMA)


@pytest.mark.parametrize("less", [0, 3_600_000], ids=["itself", "as a later step gets it"])
@pytest.mark.parametrize("lateness", [0, "2 hours"])
@pytest.mark.parametrize("emit", ["final", "update"])
@pytest.mark.parametrize("kind", WINDOWS)
def test_all_windows_come_out_and_no_state_is_left(kind, emit, lateness, less):
    function = ts.windowed(WINDOWS[kind], {"n": ts.count()}, emit=emit, allowed_lateness=lateness)
    task = OneTask(function, KEY, SCHEMA, event_time="ts")
    last_ms = LAST_MS.get(kind, LAST_DAY_MS)
    task.epoch(rows(0, NOW_MS, NOW_MS + 1, NOW_MS + 7_200_000, last_ms), watermark_ms=None)
    finals = task.epoch(rows(), watermark_ms=FINAL_WATERMARK_MS - less)
    finals = [row for row in finals if row.get("is_final", True)]
    assert sum(row["n"] for row in finals) >= 5
    assert len({(row["window_start"], row["window_end"]) for row in finals}) == len(finals)
    assert task.entries == {}
    assert task.epoch(rows(), watermark_ms=FINAL_WATERMARK_MS - less) == []
    assert task.epoch(rows(NOW_MS), watermark_ms=FINAL_WATERMARK_MS - less) == []
    assert (task.late, task.entries) == (1, {})


@pytest.mark.parametrize("how", ["left", "full"])
@pytest.mark.parametrize("kind", ["interval", "window", "temporal"])
def test_rows_without_a_partner_come_out_of_joins(kind, how):
    joins: Any = {
        "interval": lambda: interval_join(
            "orders", "rates", lower="-1000 days", upper="300000 days", how=how
        ),
        "window": lambda: window_join("orders", "rates", size="1 hour", how=how),
        "temporal": lambda: temporal_join("orders", "rates", how="left"),
    }
    tasks = CoKeyedTasks(joins[kind](), INPUTS)
    order = {"coin": "a", "at": NOW_MS, "amount": 1}
    rate = {"coin": "b", "at": NOW_MS, "rate": 2}
    assert tasks.epoch([(0, order), (1, rate)]) == []
    rows_out = tasks.epoch([], watermark_ms=FINAL_WATERMARK_MS)
    assert len(rows_out) == (2 if how == "full" and kind != "temporal" else 1)
    assert tasks.epoch([], watermark_ms=FINAL_WATERMARK_MS) == []
    if kind != "temporal":
        assert tasks.entries == {}


def test_the_ready_made_sessions_end():
    task = OneTask(sessions(60_000, "ts"), KEY, event_time="ts")
    task.epoch(rows(NOW_MS, NOW_MS + 1))
    assert len(task.epoch(rows(), watermark_ms=FINAL_WATERMARK_MS)) == 1
    assert task.entries == {}


@pytest.mark.parametrize("at_ms", [NOW_MS, LAST_DAY_MS, FINAL_WATERMARK_MS + 1, FAR_MS])
def test_timers_of_a_vectorised_function_are_due_however_far_they_are(at_ms):
    def waits(batch: Any) -> Update:
        count = batch.keys.num_rows
        if batch.is_due:
            return Update(output=batch.keys, timers=pa.nulls(count, pa.int64()))
        return Update(timers=pa.array([at_ms] * count, pa.int64()))

    task = OneTask(
        vectorised(waits, state="n bigint", time_mode=EVENT_TIME, output=lambda *_: KEY), KEY
    )
    assert task.epoch(rows(NOW_MS), watermark_ms=NOW_MS - 1) == []
    assert task.epoch(rows(), watermark_ms=FINAL_WATERMARK_MS) == [{"k": "a"}]
    assert task.epoch(rows(), watermark_ms=FINAL_WATERMARK_MS) == []
