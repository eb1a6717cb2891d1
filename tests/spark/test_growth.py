"""What an epoch leaves on the driver's disk: nothing. `growth.py` measures all else, for longer."""

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import tallystick as ts
from tests.spark.flow import Facts, Flow

pytestmark = [pytest.mark.broker, pytest.mark.spark]

EPOCHS = 24
LARGE = (1 << 20) + 1
"""Bytes: PySpark keeps a file of a task's function above 1 MiB."""


def looking_up(spark: SparkSession) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """A function that holds a table, and a broadcast variable of the user's own."""
    ballast, last = os.urandom(LARGE), spark.sparkContext.broadcast(LARGE - 1)

    def looked_up(rows: pa.RecordBatch) -> pa.RecordBatch:
        assert ballast[last.value] in range(256)
        return rows.select(["key", "value"])

    return looked_up


@pytest.mark.parametrize("way", ["resident", "jobs", "frames"])
def test_epochs_of_large_functions_leave_no_files(flow: Flow, spark: SparkSession, way: str):
    flow.feed(EPOCHS * 10)
    passing = ts.vectorised(lambda batch: ts.Update(batch.rows), state="")
    both, function = "key binary, value binary", looking_up(spark)
    rows = ts.Pipeline(flow.name).read(flow.source(max_offsets_per_trigger=10))
    rows = rows.map_batches(function, schema=both)
    if way == "frames":
        rows = rows.transform(lambda batch: batch)
    rows = rows.map_batches(function, schema=both).key_by("key").process(passing, output=both)
    facts, folder = Facts(), Path(spark.sparkContext._temp_dir)
    before = {path.name for path in folder.iterdir()}

    pipeline = rows.map_batches(function).write(flow.sink())
    flow.run(pipeline, listener=facts, execution=None if way == "frames" else way)

    flow.assert_exact()
    assert facts.names.count("EpochRan") >= EPOCHS
    assert {path.name for path in folder.iterdir()} == before
