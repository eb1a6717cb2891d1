"""Joins against Flink's own operators, on the same rows and watermarks.

See `test_like_flink.py`. Interval joins are those of the DataStream API, late rows included, which
a step drops before its function sees them; and of tables, with rows of only one side. Temporal
joins are those of tables, window joins what coGroup makes of a window. These rows are all on time.
"""

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from co_keyed_tasks import CoKeyedTasks
from test_like_flink import CASES, ms

from tallystick.state.functions.inputs import KeyedInput, KeyedInputs
from tallystick.state.functions.joins import interval_join, temporal_join, window_join
from tallystick.state.functions.upsert_join import upsert_join
from tallystick.state.functions.vectorised import ByColumns

COLUMNS = pa.schema([(name, pa.int64()) for name in ("key", "time", "value")])
INPUTS = KeyedInputs([KeyedInput(name, COLUMNS, ("key",), "time") for name in ("left", "right")])


@pytest.mark.parametrize("parallelism", [1, 3])
@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c["kind"] == "interval_join" and "how" not in c],
    ids=lambda c: str(c["number"]),
)
def test_pairs_are_those_of_flink(case: dict[str, Any], parallelism: int) -> None:
    join = interval_join("left", "right", lower=case["lower"], upper=case["upper"])
    tasks = CoKeyedTasks(join, INPUTS)
    late: list[list[int]] = []
    for number, step in enumerate(case["steps"]):
        watermark = step["watermark"]
        is_late = [watermark is not None and row[2] <= watermark for row in step["rows"]]
        late += [row for row, is_row_late in zip(step["rows"], is_late, strict=True) if is_row_late]
        arrivals = [
            (side, {"key": key, "time": time, "value": value})
            for (side, key, time, value), is_row_late in zip(step["rows"], is_late, strict=True)
            if not is_row_late
        ]
        rows_out = tasks.epoch(arrivals, watermark_ms=watermark, parallelism=parallelism)

        wanted = [tuple(row[1:]) for row in case["flink"]["out"] if row[0] == number]
        assert Counter(tuple(row.values()) for row in rows_out) == Counter(wanted)
    assert Counter(map(tuple, late)) == Counter(map(tuple, case["flink"]["late"]))
    assert tasks.entries == {}


def join_of(case: dict[str, Any]) -> ByColumns:
    how = case["how"]
    if case["kind"] == "temporal_join":
        return temporal_join("left", "right", how=how)
    if case["kind"] == "window_join":
        size = {"size": case["size"], "offset": case["offset"]}
        return window_join("left", "right", **size, how=how)
    bounds = {"lower": case["lower"], "upper": case["upper"]}
    return interval_join("left", "right", **bounds, how=how)


@pytest.mark.parametrize("parallelism", [1, 3])
@pytest.mark.parametrize(
    "case",
    [c for c in CASES if "how" in c and c["kind"] != "upsert_join"],
    ids=lambda c: str(c["number"]),
)
def test_rows_with_and_without_a_partner_are_those_of_flink(
    case: dict[str, Any], parallelism: int
) -> None:
    """In all of a case; of a temporal join in each step, since both wait for the watermark."""
    tasks = CoKeyedTasks(join_of(case), INPUTS)
    ours, flinks = Counter[tuple[Any, ...]](), Counter[tuple[Any, ...]]()
    for number, step in enumerate(case["steps"]):
        assert all(step["watermark"] is None or row[2] > step["watermark"] for row in step["rows"])
        arrivals = [
            (side, {"key": key, "time": time, "value": value})
            for side, key, time, value in step["rows"]
        ]
        rows_out = tasks.epoch(arrivals, watermark_ms=step["watermark"], parallelism=parallelism)
        ours.update(pair(row) for row in rows_out)
        flinks.update(tuple(row[1:]) for row in case["flink"]["out"] if row[0] == number)
        if case["kind"] == "temporal_join":
            assert ours == flinks
    assert ours == flinks


def pair(row: dict[str, Any]) -> tuple[Any, ...]:
    """Key, and time and value of both sides; the rows of a window join lie in their window."""
    if "window_start" in row:
        start, end = ms(row["window_start"]), ms(row["window_end"])
        times = [row[name] for name in ("time", "right_time") if row[name] is not None]
        assert all(start <= time < end for time in times)
    return tuple(row[name] for name in ("key", "time", "value", "right_time", "right_value"))


DELETED = pa.schema([*COLUMNS, pa.field("gone", pa.bool_())])
TABLES = KeyedInputs([KeyedInput(name, DELETED, ("key",), None) for name in ("left", "right")])


@pytest.mark.parametrize("parallelism", [1, 3])
@pytest.mark.parametrize(
    "case", [c for c in CASES if c["kind"] == "upsert_join"], ids=lambda c: str(c["number"])
)
def test_joined_tables_become_those_of_flink(case: dict[str, Any], parallelism: int) -> None:
    """At the end of each step: of the changes within it ours puts out the last."""
    gone = {"left": "gone", "right": "gone"}
    tasks = CoKeyedTasks(upsert_join("left", "right", how=case["how"], deleted=gone), TABLES)
    ours: dict[int, tuple[Any, ...]] = {}
    for number, step in enumerate(case["steps"]):
        arrivals = [
            (side, {"key": k, "time": time, "value": value, "gone": not value % case["deletes"]})
            for side, k, time, value in step["rows"]
        ]
        for row in tasks.epoch(arrivals, parallelism=parallelism):
            before = ours.pop(row["key"], None)
            assert (before is None) == (row["change"] == "insert")
            if row["change"] != "delete":
                ours[row["key"]] = pair(row)
        flinks = [tuple(row[1:]) for row in case["flink"]["out"] if row[0] == number]
        assert sorted(ours.values(), key=str) == sorted(flinks, key=str)
