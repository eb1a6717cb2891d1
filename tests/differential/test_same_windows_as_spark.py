"""Spark's `groupBy(window)` in append mode and ours put the same windows out, from the same rows.

Rows are out of order by less than the delay, in epochs that are Spark's batches. Times are whole
seconds, so that many are equal, and stand on the edges of windows and sessions.
"""

import os
import random
from datetime import UTC, datetime, timedelta
from functools import reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as fn

import tallystick as ts
from tests.spark import jvm
from tests.state.one_keyed_task import OneTask

pytestmark = [pytest.mark.spark]

SCHEMA = pa.schema([("key", pa.string()), ("ts", pa.timestamp("us", "UTC")), ("x", pa.int64())])
DELAY_S = 20
BEGIN = datetime(2026, 11, 25, tzinfo=UTC)
AGGREGATES = {
    "n": ts.count(),
    "total": ts.sum("x"),
    "low": ts.minimum("x"),
    "high": ts.maximum("x"),
    "mean": ts.average("x"),
    "all": ts.collect("x"),
}


def batches() -> list[pa.RecordBatch]:
    """Rows of two minutes, some without a value, in five batches; and one far ahead."""
    chance = random.Random(7)
    times = sorted(range(120), key=lambda at: at + chance.randrange(DELAY_S))
    rows = [
        (f"k{chance.randrange(4)}", BEGIN + timedelta(seconds=at), chance.choice([None, at, -at]))
        for at in times
        for _ in range(chance.randrange(4))
    ]
    size = len(rows) // 5 + 1
    parts = [rows[at : at + size] for at in range(0, len(rows), size)]
    parts += [[("end", BEGIN + timedelta(hours=1), 0)], []]
    record_batches = []
    for part in parts:
        columns = list(zip(*part, strict=True)) or [[], [], []]
        arrays = [pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)]
        record_batches.append(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))
    return record_batches


def of_spark(
    spark: SparkSession, folder: Path, windows: dict[str, Column]
) -> dict[str, list[dict[str, Any]]]:
    """The rows that Spark puts out, of each kind of windows; all in one query."""
    for number, batch in enumerate(batches()):
        path = folder / f"{number}.parquet"
        pq.write_table(pa.Table.from_batches([batch]), path)
        os.utime(path, (number, number))  # Spark reads files in the order of their age
    rows = (
        spark.readStream.schema("key string, ts timestamp, x bigint")
        .option("maxFilesPerTrigger", 1)
        .parquet(str(folder))
        .withWatermark("ts", f"{DELAY_S} seconds")
    )
    frames = [_counted(rows, window, kind) for kind, window in windows.items()]
    query = reduce(DataFrame.union, frames).writeStream.format("memory").queryName("windows")
    started = query.outputMode("append").trigger(availableNow=True).start()
    assert started.awaitTermination(120)
    expected: dict[str, list[dict[str, Any]]] = {kind: [] for kind in windows}
    for row in spark.table(started.name).collect():
        values = row.asDict()
        expected[values.pop("kind")].append(values)
    return expected


def _counted(rows: DataFrame, window: Column, kind: str) -> DataFrame:
    return (
        rows.groupBy("key", window.alias("window"))
        .agg(
            fn.count("*").alias("n"),
            fn.sum("x").alias("total"),
            fn.min("x").alias("low"),
            fn.max("x").alias("high"),
            fn.avg("x").alias("mean"),
            fn.sort_array(fn.collect_list("x")).alias("all"),
        )
        .selectExpr(
            f"'{kind}' AS kind",
            "key",
            "unix_micros(window.start) AS window_start",
            "unix_micros(window.end) AS window_end",
            "n",
            "total",
            "low",
            "high",
            "mean",
            "all",
        )
    )


def of_ours(windows: Any) -> list[dict[str, Any]]:
    """The rows that we put out, with a watermark like Spark's."""
    task = OneTask(
        ts.windowed(windows, AGGREGATES), pa.schema([SCHEMA.field("key")]), SCHEMA, event_time="ts"
    )
    latest: datetime | None = None
    rows = []
    for batch in batches():
        behind = None if latest is None else latest - timedelta(seconds=DELAY_S)
        watermark = None if behind is None else round(behind.timestamp() * 1000)
        rows += task.epoch(batch, watermark_ms=watermark, parallelism=2)
        assert not task.late
        seen = batch["ts"].to_pylist() + ([] if latest is None else [latest])
        latest = max(seen, default=None)
    for row in rows:
        for name in ("window_start", "window_end"):
            row[name] = round(row[name].timestamp() * 1_000_000)
        row["all"].sort()
    return rows


@pytest.fixture(scope="module")
def spark(shared_spark: SparkSession) -> SparkSession:
    """A session of its own, that interprets its queries."""
    return jvm.interpreting_session(shared_spark)


@pytest.fixture(scope="module")
def expected(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """Return the rows that Spark gives, by the kind of windows."""
    windows = {
        kind: fn.session_window("ts", "3 seconds") if theirs is None else fn.window("ts", *theirs)
        for kind, (_, theirs) in KINDS.items()
    }
    return of_spark(spark, tmp_path_factory.mktemp("windows"), windows)


KINDS: dict[str, tuple[Any, tuple[str, ...] | None]] = {
    "tumbling": (
        ts.tumbling("10 seconds", offset="3 seconds"),
        ("10 seconds", "10 seconds", "3 seconds"),
    ),
    "hopping": (ts.hopping("15 seconds", every="5 seconds"), ("15 seconds", "5 seconds")),
    "hopping unevenly": (ts.hopping("10 seconds", every="4 seconds"), ("10 seconds", "4 seconds")),
    "session": (ts.session("3 seconds"), None),
}
"""Ours, and the arguments of Spark's `window`; None: its `session_window`."""


@pytest.mark.parametrize("kind", KINDS)
def test_windows_are_those_of_spark(expected: dict[str, list[dict[str, Any]]], kind: str) -> None:
    actual = of_ours(KINDS[kind][0])

    assert len(expected[kind]) > 40
    assert sorted(actual, key=str) == sorted(expected[kind], key=str)
