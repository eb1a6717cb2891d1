"""Keyed functions that use one buffer for all that they return: their state stays."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from one_keyed_task import OneTask

import tallystick as ts
from tallystick.codec.own_memory import own
from tallystick.state.functions.keyed_batch import KeyedBatch, Update
from tallystick.state.functions.processing import PROCESSING_TIME, Work
from tallystick.state.functions.vectorised import vectorised

KEY = pa.schema([("k", pa.string())])
ROWS = pa.record_batch({"k": ["a", "b", "c"], "x": pa.array([1, 2, 3])})
SCRATCH = np.zeros(100, np.int64)


class Disturbed:
    """A processor behind whose output another function uses the same buffer."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)

    def run(self, work: Work) -> Iterator[Any]:
        for batch in self._processor.run(work):
            yield own(batch)
            SCRATCH[:] = -1


def running_sum(batch: KeyedBatch) -> Update:
    count = len(batch)
    if batch.is_due:
        return Update(None, {"n": pa.nulls(count, pa.int64())})
    SCRATCH[:count] = batch.held("n") + batch.sum("x").to_numpy()
    sums = SCRATCH[:count]
    rows = pa.record_batch({"k": batch.keys["k"], "n": pa.array(sums)})
    timers = None if batch.timers is None else np.full(count, 10**15)
    return Update(rows, {"n": sums}, timers)


@pytest.mark.parametrize("mode", ["None", PROCESSING_TIME])
def test_a_vectorised_function(mode: str) -> None:
    function = vectorised(running_sum, state="n bigint", time_mode=mode)
    task = OneTask(Disturbed(function), KEY)
    for times in (1, 2, 3):
        out = task.epoch(ROWS, timestamp_ms=5)
        expected = {"a": times, "b": 2 * times, "c": 3 * times}
        assert {row["k"]: row["n"] for row in out} == expected


def test_two_aggregates_of_one_function() -> None:
    """Both are called before either is kept."""

    def of(column: str) -> Any:
        def add(batch: KeyedBatch) -> dict[str, Any]:
            SCRATCH[: len(batch)] = batch.sum(column).to_numpy()
            return {"total": SCRATCH[: len(batch)]}

        def merge(batch: KeyedBatch) -> dict[str, Any]:
            SCRATCH[: len(batch)] = batch.sum("total").to_numpy()
            return {"total": SCRATCH[: len(batch)]}

        def result(lines: pa.RecordBatch) -> Any:
            SCRATCH[: lines.num_rows] = lines["total"].to_numpy()
            return SCRATCH[: lines.num_rows]

        return ts.vectorised_aggregate(
            add=add,
            merge=merge,
            result=result,
            accumulators="total bigint",
            type="bigint",
            reads=[column],
        )

    rows = pa.record_batch(
        {
            "k": ["a", "b", "a"],
            "x": pa.array([1, 2, 3]),
            "y": pa.array([10, 20, 30]),
            "at": pa.array([0, 0, 1]),
        }
    )
    windowed = ts.windowed(ts.tumbling("1 second"), {"x": of("x"), "y": of("y")})
    task = OneTask(windowed, KEY, rows.schema, event_time="at")
    task.epoch(rows)
    out = task.epoch(rows.slice(0, 0), watermark_ms=5_000)

    assert {row["k"]: (row["x"], row["y"]) for row in out} == {"a": (4, 40), "b": (2, 20)}
