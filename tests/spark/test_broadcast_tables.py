"""Broadcast tables and the join with them, on Spark and a real broker."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.testing import EmbeddedKafka
from tests.spark.flow import Flow
from tests.spark.topics import produce, read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark]

ROWS = "k string, n bigint"


@pytest.fixture(params=["resident", "jobs"])
def flow(
    request: pytest.FixtureRequest,
    tallystick_kafka: EmbeddedKafka,
    spark: SparkSession,
    tmp_path: Path,
) -> Flow:
    return Flow(tallystick_kafka, spark, tmp_path, execution=request.param)


def only_rows() -> Any:
    """Made here, so that workers need no tests."""
    return lambda rows: rows.select(["k", "n"])


class Rules:
    """Rows and rules: names by key, with the version that they have."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.topic = f"{flow.name}-rules"
        flow.kafka.create_topic(self.topic, 2)
        self.table: dict[str, int | None] = {}
        self.fed = 0
        self.expected: list[tuple[str, int, int | None]] = []

    def rule(self, key: str, version: int | None) -> None:
        value = None if version is None else json.dumps({"version": version})
        produce(self.flow.confluent, self.topic, [(key, value)])
        self.table.pop(key, None)
        if version is not None:
            self.table[key] = version

    def feed(self, count: int) -> None:
        rows = [(f"k{n % 7}", n) for n in range(self.fed, self.fed + count)]
        self.fed += count
        self.expected += [(k, n, self.table.get(k)) for k, n in rows]
        values = [(k, json.dumps({"k": k, "n": n})) for k, n in rows]
        produce(self.flow.confluent, self.flow.topic_in, values)

    def declared(self) -> ts.BroadcastTable:
        source = self.flow.source(
            topics=[self.topic], value=ts.Json("version bigint"), starting_offsets=None
        )
        return ts.broadcast(
            ts.stream(source).map_batches(keyed(), schema="key string, version bigint"),
            key="key",
            uid="rules",
            delete=gone(),
        )

    def pipeline(self, table: ts.BroadcastTable | None = None, *, inner: bool = False) -> Any:
        how = "inner" if inner else "left"
        return (
            ts.Pipeline(self.flow.name)
            .read(self.flow.source(value=ts.Json(ROWS)))
            .map_batches(only_rows())
            .map_batches(ts.enrich(table or self.declared(), on={"k": "key"}, how=how))
            .write(self.flow.sink(key="k", value=ts.Json()))
        )

    def run(self, pipeline: Any = None, checkpoint: Path | None = None) -> None:
        self.flow.run(
            pipeline or self.pipeline(), checkpoint=checkpoint, execution=self.flow.execution
        )

    def assert_exact(self) -> None:
        found = read_committed(self.flow.confluent, self.flow.topic_out)
        rows = [json.loads(each.value) for each in found]
        assert sorted((r["k"], r["n"], r.get("version")) for r in rows) == sorted(self.expected)


def keyed() -> Any:
    """The record's key as text: a tombstone has nothing else."""

    def named(rows: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"key": rows["key"].cast(pa.string()), "version": rows["version"]})

    return named


def gone() -> Any:
    return lambda rows: pc.is_null(rows["version"])


def test_rows_have_the_rules_of_their_epoch_after_restarts_too(flow: Flow) -> None:
    rules = Rules(flow)
    for key in range(5):
        rules.rule(f"k{key}", key)
    rules.feed(100)
    rules.run()
    rules.assert_exact()

    rules.rule("k1", 10)
    rules.rule("k2", None)
    rules.rule("k6", 60)
    rules.feed(50)
    rules.run()
    rules.assert_exact()

    rules.feed(20)
    rules.run()
    rules.assert_exact()
    rules.rule("k3", None)
    rules.run()
    rules.feed(20)
    rules.run()
    rules.assert_exact()
    held = ts.read_state(flow.spark, str(flow.checkpoint), "rules").collect()
    assert {row["key"]: row["version"] for row in held} == rules.table
