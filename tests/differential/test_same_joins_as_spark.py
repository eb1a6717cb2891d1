"""Spark's stream-stream join in append mode and our interval join find the same rows.

Rows are out of order by less than the delay, in epochs that are Spark's batches. Times are whole
seconds, so that many are equal, and pairs stand on both bounds. At the end a row of either side,
far ahead, closes what is open.
"""

import os
import random
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn

import tallystick as ts
from tallystick.state.functions.inputs import KeyedInput, KeyedInputs
from tests.spark import jvm
from tests.state.co_keyed_tasks import CoKeyedTasks

pytestmark = [pytest.mark.spark]

DELAY_S = 12
BEGIN = datetime(2026, 11, 25, tzinfo=UTC)
SCHEMA = pa.schema([("key", pa.string()), ("ts", pa.timestamp("us", "UTC")), ("x", pa.int64())])
INPUTS = KeyedInputs([KeyedInput(name, SCHEMA, ("key",), "ts") for name in ("left", "right")])
Row = tuple[str, datetime, int]


def batches(seed: int) -> list[list[Row]]:
    """Rows of one side in five batches, one that ends it, and an empty one."""
    chance = random.Random(seed)
    times = sorted(range(100), key=lambda at: at + chance.randrange(DELAY_S))
    rows = [
        (f"k{chance.randrange(5)}", BEGIN + timedelta(seconds=at), seed * 1000 + number)
        for number, at in enumerate(times)
        for _ in range(chance.randrange(3))
    ]
    size = len(rows) // 5 + 1
    parts = [rows[at : at + size] for at in range(0, len(rows), size)]
    return [*parts, [("end", BEGIN + timedelta(hours=1 + seed), 0)], []]


def streamed(spark: SparkSession, folder: Path, seed: int, prefix: str) -> DataFrame:
    folder.mkdir()
    for number, rows in enumerate(batches(seed)):
        columns = list(zip(*rows, strict=True)) or [[], [], []]
        arrays = [pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)]
        path = folder / f"{number}.parquet"
        pq.write_table(pa.Table.from_arrays(arrays, schema=SCHEMA), path)
        os.utime(path, (number, number))  # Spark reads files in the order of their age
    read = spark.readStream.schema("key string, ts timestamp, x bigint")
    rows = read.option("maxFilesPerTrigger", 1).parquet(str(folder))
    return rows.withWatermark("ts", f"{DELAY_S} seconds").select(
        *(fn.col(name).alias(f"{prefix}_{name}") for name in SCHEMA.names)
    )


def of_spark(spark: SparkSession, folder: Path, how: str, lower: int, upper: int) -> list[Any]:
    left_rows = streamed(spark, folder / "left", 1, "l")
    right = streamed(spark, folder / "right", 2, "r")
    matching = fn.expr(
        f"l_key = r_key AND r_ts >= l_ts + INTERVAL {lower} SECONDS "
        f"AND r_ts <= l_ts + INTERVAL {upper} SECONDS"
    )
    pairs = left_rows.join(right, matching, how).selectExpr("coalesce(l_key, r_key)", "l_x", "r_x")
    query = pairs.writeStream.format("memory").queryName(re.sub(r"\W", "_", folder.name))
    started = query.outputMode("append").trigger(availableNow=True).start()
    assert started.awaitTermination(180)
    return [tuple(row) for row in spark.table(started.name).collect()]


def of_ours(how: str, lower: int, upper: int) -> list[Any]:
    bounds = {"lower": f"{lower} seconds", "upper": f"{upper} seconds"}
    tasks = CoKeyedTasks(ts.interval_join("left", "right", **bounds, how=how), INPUTS)
    latest: list[datetime | None] = [None, None]
    rows_out = []
    for step in zip(batches(1), batches(2), strict=True):
        arrivals = [
            (side, dict(zip(SCHEMA.names, row, strict=True)))
            for side, rows in enumerate(step)
            for row in rows
        ]
        watermark = None
        if None not in latest:
            earliest = min(time_ms for time_ms in latest if time_ms is not None)
            watermark = round((earliest - timedelta(seconds=DELAY_S)).timestamp() * 1000)
        assert all(
            watermark is None or row["ts"].timestamp() * 1000 > watermark for _, row in arrivals
        )
        rows_out += tasks.epoch(arrivals, watermark_ms=watermark, parallelism=2)
        for side, rows in enumerate(step):
            seen = [row[1] for row in rows] + [
                time_ms for time_ms in [latest[side]] if time_ms is not None
            ]
            latest[side] = max(seen, default=None)
    return [(row["key"], row["x"], row["right_x"]) for row in rows_out]


@pytest.fixture(scope="module")
def spark(shared_spark: SparkSession) -> SparkSession:
    """A session of its own, that interprets its queries."""
    return jvm.interpreting_session(shared_spark)


@pytest.mark.parametrize(
    ("how", "lower", "upper"), [("inner", -4, 6), ("left", 0, 5), ("right", -7, 0), ("full", 2, 3)]
)
def test_joined_rows_are_those_of_spark(
    spark: SparkSession, tmp_path: Path, how: str, lower: int, upper: int
) -> None:
    sparks = {"left": "leftOuter", "right": "rightOuter", "full": "fullOuter"}.get(how, how)
    expected = of_spark(spark, tmp_path, sparks, lower, upper)
    actual = of_ours(how, lower, upper)

    assert len(expected) > 40
    assert sorted(actual, key=str) == sorted(expected, key=str)
