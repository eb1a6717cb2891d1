"""Random queries over random streams put out what Spark's batch puts out for the same rows.

RANDOM_QUERIES=300 asks more of them (`make stress`), RANDOM_QUERIES=17..18 those of a seed.
"""

import os
import random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.testing import Driver
from tests.differential.random_queries import (
    CLOSING,
    COLUMNS,
    DELAY,
    TIMES,
    Writer,
    closing,
    rows_of,
)
from tests.spark import jvm

pytestmark = [pytest.mark.spark]
FIRST, _, LAST = os.environ.get("RANDOM_QUERIES", "25").rpartition("..")
SEEDS = range(int(FIRST or 0), int(LAST))
TYPES = {"bigint": pa.int64(), "string": pa.string(), "double": pa.float64(), "int": pa.int32()}
TYPES["timestamp"] = pa.timestamp("us", "UTC")
EPOCHS = 3


def schema(table: str) -> pa.Schema:
    pairs = (column.split() for column in COLUMNS[table].split(", "))
    return pa.schema([(name, TYPES[kind]) for name, kind in pairs])


@pytest.fixture(scope="module")
def spark(shared_spark: SparkSession) -> SparkSession:
    return jvm.interpreting_session(shared_spark, {"spark.sql.ansi.enabled": "true"})


def streamed(text: str, rows: dict[str, list[dict[str, Any]]], chance: random.Random) -> pa.Table:
    """Return what a query puts out for rows that come in several epochs, in any order."""
    used = [table for table in COLUMNS if f"FROM {table}" in text or f"JOIN {table}" in text]
    sources = {
        table: ts.KafkaSource("x:1", topics=[table], value=ts.Json(COLUMNS[table]))
        for table in used
    }
    watermark = {table: f"{TIMES[table]} - {DELAY}" for table in used}
    sink = ts.KafkaSink("x:1", topic="out", value=ts.Json())
    driver = Driver(ts.sql(text, watermark=watermark, **sources).write(sink))
    for number in range(EPOCHS):
        for table in used:
            at = [len(rows[table]) * part // EPOCHS for part in (number, number + 1)]
            driver.feed(table, rows[table][slice(*at)])
        driver.epoch()
    for table in used:
        driver.feed(table, [closing(table)])
    return driver.drain().output()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_query_gives_what_it_gives_in_batch(spark: SparkSession, seed: int) -> None:
    chance = random.Random(seed)
    rows = rows_of(chance)
    text, replacing = Writer(chance).query()
    for table in COLUMNS:
        frame = pa.Table.from_pylist(rows[table], schema(table))
        spark.createDataFrame(frame).createOrReplaceTempView(table)
    expected = spark.sql(text).toArrow()

    actual = streamed(text, rows, chance)

    assert actual.column_names == expected.column_names, text
    values = [row for row in actual.to_pylist() if not is_closing(row)]
    if replacing:
        values = [*{tuple(row[name] for name in replacing): row for row in values}.values()]
    assert sorted(map(repr, values)) == sorted(map(repr, expected.to_pylist())), text


def is_closing(row: dict[str, Any]) -> bool:
    """True for what the closing rows lead to: their marks, or a window of their time."""
    marks = [str(value) for value in row.values()]
    far = CLOSING.replace(day=CLOSING.day - 1)
    late = [value for value in row.values() if hasattr(value, "tzinfo") and value > far]
    return bool(late) or any("~" in mark or mark in FAR for mark in marks)


FAR = {str(number) for number in (-(10**6), -(10**7), 10**6, 1e6, 2e6)}
