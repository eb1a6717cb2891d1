"""Topics that take less than the sink makes, and records that are larger than a topic takes."""

import itertools
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)
from pyspark import cloudpickle
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.testing import EmbeddedKafka
from tests.spark.topics import WAIT_S, Record, read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need no tests

NOW = {"availableNow": True}
LIMIT = 20_000
_numbers = itertools.count()


class World:
    """An input, an output that takes little, a place for dead letters, and a checkpoint."""

    def __init__(self, kafka: EmbeddedKafka, spark: SparkSession, folder: Path) -> None:
        self.kafka, self.spark = kafka, spark
        self.name = f"large-{next(_numbers)}"
        self.checkpoint = str(folder / self.name)
        large = {"max.message.bytes": "5000000"}
        self.input = kafka.create_topic(f"{self.name}-in", 2, config=large)
        self.output = kafka.create_topic(
            f"{self.name}-out", 2, config={"max.message.bytes": str(LIMIT)}
        )
        self.dead = kafka.create_topic(f"{self.name}-dead", 1)

    def feed(self, *values: bytes, partition: int = 0) -> None:
        producer = Producer({**self.kafka.confluent_options(), "message.max.bytes": 5_000_000})
        for value in values:
            producer.produce(self.input, value, value[:3], partition=partition)
        assert producer.flush(WAIT_S) == 0

    def limit(self, size: int) -> None:
        entry = ConfigEntry(
            "max.message.bytes", str(size), incremental_operation=AlterConfigOpType.SET
        )
        resource = ConfigResource(ResourceType.TOPIC, self.output, incremental_configs=[entry])
        admin = AdminClient(self.kafka.confluent_options())
        admin.incremental_alter_configs([resource])[resource].result(WAIT_S)

    def source(self, **settings: Any) -> ts.KafkaSource:
        return ts.KafkaSource(
            self.kafka.bootstrap_servers,
            topics=[self.input],
            starting_offsets="earliest",
            **settings,
        )

    def run(self, *steps: Any, source: ts.KafkaSource | None = None, **sink: Any) -> None:
        pipeline = ts.Pipeline(self.name).read(source or self.source())
        for step in steps:
            pipeline = step(pipeline)
        to = {"topic": self.output, "compression": "none", **sink}
        pipeline = pipeline.write(ts.KafkaSink(self.kafka.bootstrap_servers, **to))
        query = pipeline.start(self.spark, checkpoint=self.checkpoint, trigger=NOW)
        query.awaitTermination(WAIT_S)

    def read(self, topic: str = "") -> list[Record]:
        return read_committed(self.kafka.confluent_options(), topic or self.output)


@pytest.fixture
def world(kafka: EmbeddedKafka, spark: SparkSession, tmp_path: Path) -> World:
    return World(kafka, spark, tmp_path)


def columns(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows.select(["key", "value"])


def copied(pipeline: Any) -> Any:
    return pipeline.map_batches(columns)


def json_of(record: Record) -> dict[str, Any]:
    return json.loads(record.value or "")


def noise(count: int, size: int, seed: int = 1) -> list[bytes]:
    """Values that no codec makes smaller, and that a reader takes for text."""
    chosen = random.Random(seed)
    return [
        b"%07d" % number + chosen.randbytes(size // 2).hex().encode() for number in range(count)
    ]


@pytest.mark.parametrize(
    "sink",
    [
        {},
        {"compression": "lz4"},
        {"transactions": "task"},
        {"guarantee": "at_least_once"},
        {"guarantee": "none"},
    ],
    ids=lambda sink: "-".join(sink.values()) or "epoch",
)
def test_small_records_pass_however_little_the_topic_takes(
    world: World, sink: dict[str, str]
) -> None:
    values = noise(300, 1000)
    world.feed(*values)

    world.run(copied, **sink)

    assert sorted(record.value or "" for record in world.read()) == sorted(
        v.decode() for v in values
    )


@pytest.mark.parametrize("transactions", ["epoch", "task"])
def test_rows_that_name_their_topics_follow_the_limit_of_each(
    world: World, transactions: str
) -> None:
    values = noise(200, 1000)
    world.feed(*values)

    names = [world.output, world.dead]

    def named(rows: pa.RecordBatch) -> pa.RecordBatch:
        topics = pa.array(names * rows.num_rows)[: rows.num_rows]
        return columns(rows).append_column("topic", topics)

    world.run(
        lambda p: p.map_batches(named),
        topic=None,
        token_topic=world.dead,
        transactions=transactions,
    )

    records = [*world.read(), *world.read(world.dead)]
    assert sorted(record.value or "" for record in records) == sorted(v.decode() for v in values)


@pytest.mark.parametrize("transactions", ["epoch", "task"])
def test_a_record_too_large_is_named_by_its_offset_and_is_a_dead_letter_where_there_are_some(
    world: World, transactions: str
) -> None:
    small = [b'{"id":%d}' % number for number in range(5)]
    big = b'{"id":7,"text":"' + noise(1, 30_000)[0] + b'"}'
    world.feed(*small, big, *small)
    letters = ts.Json("id bigint, text string", mode="deadletter")
    to = {"value": ts.Json(), "transactions": transactions}

    with pytest.raises(ts.RecordError) as refused:
        world.run(**to, source=world.source(value=ts.Json("id bigint, text string")))
    message = str(refused.value)
    for words in (
        f"topic {world.input}, partition 0, offset 5",
        f"the topic takes {LIMIT} (its max.message.bytes)",
        f"{world.output}-",
        "dead_letter_topic",
    ):
        assert words in message, message
    assert "takes 30" in message
    assert world.read() == []

    world.run(**to, source=world.source(value=letters), dead_letter_topic=world.dead)

    ids = sorted(json_of(record)["id"] for record in world.read())
    assert ids == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    (letter,) = world.read(world.dead)
    own = dict(letter.headers)
    assert own["tallystick.topic"] == world.input.encode()
    assert (own["tallystick.partition"], own["tallystick.offset"]) == (b"0", b"5")
    assert b"takes 30" in own["tallystick.error"]
    assert own["tallystick.cut"].startswith(b"value 200 of 30")
    assert (letter.value or "").encode() == big[:200]


def test_a_malformed_record_too_large_for_the_dead_letters_is_cut_there(world: World) -> None:
    world.dead, world.output = world.output, world.dead
    world.feed(b"no json " + noise(1, 30_000)[0], b'{"id":1}')

    world.run(
        source=world.source(value=ts.Json("id bigint", mode="deadletter")),
        value=ts.Json(),
        dead_letter_topic=world.dead,
    )

    assert [json_of(record)["id"] for record in world.read()] == [1]
    (letter,) = world.read(world.dead)
    own = dict(letter.headers)
    assert own["tallystick.error"] == b"it is not one JSON object, from { to }"
    assert own["tallystick.offset"] == b"0"
    assert own["tallystick.cut"].startswith(b"value 200 of 30")


def test_behind_functions_and_keyed_steps_a_record_too_large_is_named_as_far_as_is_known(
    world: World,
) -> None:
    values = noise(6, 200)
    values[3] = noise(1, 30_000, seed=2)[0]
    world.feed(*values)

    with pytest.raises(ts.RecordError, match=rf"topic {world.input}, partition 0, offset 3,"):
        world.run(copied)

    def repeated(rows: pa.RecordBatch) -> pa.Table:
        return pa.Table.from_batches([columns(rows)] * 2)

    world.checkpoint += "-twice"
    world.name += "-twice"
    with pytest.raises(
        ts.RecordError, match=rf"one of topic {world.input}, partition 0, offsets 0 to 5,"
    ):
        world.run(lambda p: p.map_batches(repeated))


@pytest.mark.parametrize("transactions", ["epoch", "task"])
def test_a_limit_that_is_lowered_while_the_pipeline_runs_costs_no_row_and_doubles_none(
    world: World, transactions: str
) -> None:
    """The driver still knows the old limit: the batches are cut when they are refused."""
    world.limit(1_000_000)
    values = noise(400, 1000)
    world.feed(*values[:100])
    pipeline = (
        ts.Pipeline(world.name)
        .read(world.source())
        .map_batches(columns)
        .write(
            ts.KafkaSink(
                world.kafka.bootstrap_servers,
                topic=world.output,
                compression="none",
                transactions=transactions,
            )
        )
    )
    query = pipeline.start(world.spark, checkpoint=world.checkpoint)
    try:
        wait_for(world, 100)
        world.limit(LIMIT)
        world.feed(*values[100:])
        wait_for(world, 400)
    finally:
        query.stop()
    assert sorted(record.value or "" for record in world.read()) == sorted(
        v.decode() for v in values
    )


def wait_for(world: World, count: int) -> None:
    """Wait until so many rows are visible."""
    deadline = time.monotonic() + WAIT_S
    while (row_count := len(world.read())) < count:
        assert time.monotonic() < deadline, f"{row_count} of {count} rows are visible"
        time.sleep(0.2)


def test_a_write_of_a_dataframe_follows_the_limit(world: World) -> None:
    values = [v.decode() for v in noise(300, 1000)]
    frame = world.spark.createDataFrame([(value,) for value in values], "value string")

    sink = ts.KafkaSink(world.kafka.bootstrap_servers, topic=world.output, compression="none")
    sink.write(frame.repartition(1))

    assert sorted(record.value or "" for record in world.read()) == sorted(values)
