"""Interval joins against Flink's IntervalJoinOperator, on the same rows and watermarks.

See `test_like_flink.py`; a step drops rows that are late before its function sees them.
"""

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from co_keyed_tasks import CoKeyedTasks
from test_like_flink import CASES

from tallystick.state.functions.inputs import KeyedInput, KeyedInputs
from tallystick.state.functions.range_join import interval_join

COLUMNS = pa.schema([(name, pa.int64()) for name in ("key", "time", "value")])
INPUTS = KeyedInputs([KeyedInput(name, COLUMNS, ("key",), "time") for name in ("left", "right")])


@pytest.mark.parametrize("parallelism", [1, 3])
@pytest.mark.parametrize(
    "case", [c for c in CASES if c["kind"] == "interval_join"], ids=lambda c: str(c["number"])
)
def test_pairs_are_those_of_flink(case: dict[str, Any], parallelism: int) -> None:
    join = interval_join("left", "right", lower=case["lower"], upper=case["upper"])
    tasks = CoKeyedTasks(join, INPUTS)
    late: list[list[int]] = []
    for number, step in enumerate(case["steps"]):
        watermark = step["watermark"]
        is_late = [watermark is not None and row[2] <= watermark for row in step["rows"]]
        late += [row for row, each in zip(step["rows"], is_late, strict=True) if each]
        arrivals = [
            (side, {"key": key, "time": time, "value": value})
            for (side, key, time, value), each in zip(step["rows"], is_late, strict=True)
            if not each
        ]
        found = tasks.epoch(arrivals, watermark_ms=watermark, parallelism=parallelism)

        wanted = [tuple(row[1:]) for row in case["flink"]["out"] if row[0] == number]
        assert Counter(tuple(row.values()) for row in found) == Counter(wanted)
    assert Counter(map(tuple, late)) == Counter(map(tuple, case["flink"]["late"]))
    assert tasks.entries == {}
