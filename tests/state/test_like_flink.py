"""Windows against Flink's own operators, on the same rows and watermarks, lateness included.

`tests/golden/flink_operators/` has the cases and the program that has Flink answer them. A step of
a case is an epoch: the watermark that it begins with, and its rows.

Flink puts a window out again for each late row that it takes, one by one; an epoch of ours does
once, with all its rows. So of what came out in one step the newest counts, and of sessions that
grew within it the one that swallowed the others.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from one_keyed_task import OneTask

import tallystick as ts
from tallystick.state.functions.windows import Sessions, Windows

CASES = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "golden" / "flink_operators.jsonl").open()
]
ROWS = pa.schema([(name, pa.int64()) for name in ("side", "key", "time", "value")])
KEY = pa.schema([ROWS.field("key")])
TIMED = ("tumbling", "hopping", "cumulative", "session")
AGGREGATES = {
    "count": ts.count(),
    "sum": ts.sum("value"),
    "first": ts.first_value("value"),
    "last": ts.last_value("value"),
}


def windows_of(case: dict[str, Any]) -> Windows | Sessions:
    if case["kind"] == "session":
        return ts.session(case["size"])
    if case["kind"] == "tumbling":
        return ts.tumbling(case["size"], offset=case["offset"] % case["size"])
    if case["kind"] == "cumulative":
        return ts.cumulative(case["size"], step=case["step"], offset=case["offset"] % case["size"])
    return ts.hopping(case["size"], every=case["every"], offset=case["offset"])


def ms(moment: Any) -> int:
    return round(moment.timestamp() * 1000)


def newest(rows: Iterable[tuple[int, ...]], kind: str) -> set[tuple[int, ...]]:
    """What counts of the rows (key, start, end, …) of one step."""
    by_window = {row[:3]: row for row in rows}
    if kind != "session":
        return set(by_window.values())
    return {
        row
        for (key, start, end), row in by_window.items()
        if not any(
            other != (key, start, end) and other[0] == key and other[1] <= start and end <= other[2]
            for other in by_window
        )
    }


def watermark_of(flinks: int | None, kind: str) -> int | None:
    """Return the watermark at which ours does what Flink does at its own.

    A row right at the end of a session belongs to it, in both. Flink closes it a ms before such a
    row is late, so whether it still comes in time hangs on when watermarks are sent; ours then.
    """
    return flinks if flinks is None or kind != "session" else flinks + 1


def rows_of(step: dict[str, Any]) -> pa.RecordBatch:
    columns = zip(*step["rows"], strict=True) if step["rows"] else [()] * 4
    arrays = [pa.array(list(column), pa.int64()) for column in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=ROWS)


def windows_by_step(case: dict[str, Any]) -> Iterator[list[tuple[int, ...]]]:
    for step in range(len(case["steps"])):
        yield [tuple(row[1:]) for row in case["flink"]["out"] if row[0] == step]


@pytest.mark.parametrize(
    "case", [c for c in CASES if c["kind"] in TIMED], ids=lambda c: str(c["number"])
)
def test_windows_are_those_of_flink(case: dict[str, Any]) -> None:
    function = ts.windowed(
        windows_of(case), AGGREGATES, allowed_lateness=case["lateness"], late="late"
    )
    task = OneTask(function, KEY, ROWS, event_time="time")
    late: Counter[tuple[int, ...]] = Counter()
    for step, wanted in zip(case["steps"], windows_by_step(case), strict=True):
        rows = rows_of(step)
        rows_out = task.epoch(rows, watermark_ms=watermark_of(step["watermark"], case["kind"]))

        keys = ("key", "window_start", "window_end", *AGGREGATES)
        ours = [
            tuple(row[k] if "window" not in k else ms(row[k]) for k in keys) for row in rows_out
        ]
        if not case["lateness"]:
            assert Counter(ours) == Counter(wanted)
        assert newest(ours, case["kind"]) == newest(wanted, case["kind"])
        late.update(
            tuple(row.values()) for side_output in task.side for row in side_output.rows.to_pylist()
        )
    assert late == Counter(map(tuple, case["flink"]["late"]))
    assert task.entries == {}, "Flink holds nothing either"
    assert case["flink"]["entries"] == 0


@pytest.mark.parametrize(
    "case", [c for c in CASES if c["kind"] == "count"], ids=lambda c: str(c["number"])
)
def test_count_windows_are_those_of_flink(case: dict[str, Any]) -> None:
    windows = ts.count_window(case["size"], every=case["every"])
    task = OneTask(ts.windowed(windows, AGGREGATES), KEY, ROWS)
    for step, wanted in zip(case["steps"], windows_by_step(case), strict=True):
        rows_out = [tuple(row.values()) for row in task.epoch(rows_of(step))]
        for key in range(3):  # a key's windows in their order
            assert [row for row in rows_out if row[0] == key] == [w for w in wanted if w[0] == key]
