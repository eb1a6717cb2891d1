"""The same pipelines in this process and on Spark with a real Kafka: the same rows come out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.testing import Driver, EmbeddedKafka
from tests.spark.flow import finish
from tests.spark.topics import produce, read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(300)]

COLUMNS = "k string, n bigint, at bigint"
PARTITIONS = 2
Phase = list[tuple[str, int, bytes]]
"""Topic, partition and value of the records that are there when a run begins."""


def value(k: str, n: int, at: int) -> bytes:
    return json.dumps({"k": k, "n": n, "at": at}).encode()


FIRST: Phase = [
    ("rows", 0, value("a", 1, 1000)),
    ("rows", 1, value("b", 5, 2000)),
    ("rows", 0, value("a", 7, 3000)),
    ("rows", 1, b"{no"),
    ("others", 0, value("a", 100, 1500)),
    ("rows", 0, value("a", 2, 60_000)),
    ("rows", 1, value("b", 2, 61_000)),
    ("others", 1, value("c", 200, 2500)),
]
SECOND: Phase = [
    ("rows", 0, value("a", 9, 4000)),  # late by now
    ("rows", 0, b"[]"),
    ("rows", 1, value("b", 3, 90_000)),
    ("others", 0, value("b", 300, 90_500)),
    ("others", 1, value("d", 0, 500_000)),
    ("rows", 0, value("a", 4, 95_000)),
]


class Topics:
    """Topics of one pipeline, under a prefix."""

    def __init__(self, kafka: EmbeddedKafka, prefix: str) -> None:
        self.kafka, self.prefix = kafka, prefix
        options = dict(kafka.kafka_options)
        self.servers = options.pop("kafka.bootstrap.servers")
        self.options = options

    def source(self, topic: str = "rows") -> ts.KafkaSource:
        return ts.KafkaSource(
            self.servers,
            topics=[self.prefix + topic],
            starting_offsets="earliest",
            value=ts.Json(COLUMNS, mode="deadletter"),
            options=self.options,
        )

    def sink(self, topic: str = "out", **settings: Any) -> ts.KafkaSink:
        return ts.KafkaSink(
            self.servers,
            topic=self.prefix + topic,
            value=ts.Json(),
            options=self.options,
            **settings,
        )

    def last(self, **settings: Any) -> ts.KafkaSink:
        return self.sink(key="k", dead_letter_topic=f"{self.prefix}dead", **settings)


def doubled(topics: Topics) -> ts.Pipeline:
    def double(rows: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"k": rows["k"], "n": pc.multiply(rows["n"], 2)})

    return ts.Pipeline(topics.prefix).read(topics.source()).map_batches(double).write(topics.last())


def summed(topics: Topics) -> ts.Pipeline:
    sums = ts.aggregate({"n": ts.sum("n"), "rows": ts.count()})
    keyed = ts.Pipeline(topics.prefix).read(topics.source()).key_by("k")
    return keyed.process(sums, uid="sums").write(topics.last())


def windowed(topics: Topics) -> ts.Pipeline:
    windows = ts.windowed(ts.tumbling("10 seconds"), {"n": ts.sum("n")}, late="late")
    keyed = ts.Pipeline(topics.prefix).read(topics.source()).key_by("k")
    timed = keyed.process(windows, uid="windows", event_time="at", watermark_delay="5 seconds")
    return timed.write(topics.last(), late=topics.sink("late"))


def joined(topics: Topics) -> ts.Pipeline:
    both = ts.Pipeline(topics.prefix).read(left=topics.source(), right=topics.source("others"))
    join = ts.interval_join("left", "right", lower="-2 seconds", upper="2 seconds", how="full")
    times = {"left": "at", "right": "at"}
    step = both.key_by(left="k", right="k").process(join, uid="join", event_time=times)
    return step.write(topics.last())


OUTPUTS = ("out", "late", "dead")
UNLIKE = {"timestamp", "right_timestamp"}


def plain(key: bytes | str | None, data: bytes | str | None) -> str:
    """Return a record without the times at which records were written."""
    text = (data.encode() if isinstance(data, str) else data or b"").decode()
    try:
        row = json.loads(text)
    except ValueError:
        return text  # a dead letter
    if isinstance(row, dict):
        row = {name: field for name, field in row.items() if name not in UNLIKE}
        row = {name: field for name, field in row.items() if name not in ("topic", "right_topic")}
    return f"{key if isinstance(key, str) or key is None else key.decode()} {row}"


@pytest.mark.parametrize("make", [doubled, summed, windowed, joined])
def test_rows_are_the_same_as_on_spark_and_kafka(
    make: Callable[[Topics], ts.Pipeline],
    tallystick_kafka: EmbeddedKafka,
    spark: SparkSession,
    tmp_path: Path,
) -> None:
    topics = Topics(tallystick_kafka, f"same-{make.__name__}-")
    names = {"rows", "others", *OUTPUTS}
    for name in sorted(names):
        tallystick_kafka.create_topic(topics.prefix + name, PARTITIONS)
    counts = dict.fromkeys((topics.prefix + name for name in names), PARTITIONS)
    test = Driver(make(topics), parallelism=2, partitions=counts)
    witness = tallystick_kafka.confluent_options()
    for phase in (FIRST, SECOND):
        read = [record for record in phase if make is joined or record[0] == "rows"]
        for topic, partition, data in read:
            produce(witness, topics.prefix + topic, [(None, data)], partition=partition)
            test.feed(topics.prefix + topic, [data], partition=partition)
        test.drain().restart()
        finish(
            lambda: make(topics).start(
                spark, checkpoint=tmp_path / "checkpoint", trigger={"availableNow": True}
            )
        )
    compared = 0
    for name in OUTPUTS:
        topic = topics.prefix + name
        records = read_committed(witness, topic)
        expected = sorted(plain(record.key, record.value) for record in records)
        own = [plain(row["key"], row["value"]) for row in test.records(topic).to_pylist()]
        assert sorted(own) == expected, name
        compared += len(expected)
        if name == "dead":
            places = sorted(dict(record.headers)["tallystick.offset"] for record in records)
            offsets = test.dead_letters()["offset"].to_pylist()
            assert sorted(str(offset).encode() for offset in offsets) == places
            assert len(places) == 2
    assert compared > 4, "there is something to compare"
    if make is windowed:
        assert test.output("late").num_rows == 1
