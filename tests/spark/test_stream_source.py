"""`format("tallystick")`: the options and columns of Spark's own connector, on a real broker."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as t

from tallystick.testing import EmbeddedKafka
from tests.spark.flow import finish
from tests.spark.topics import WAIT_S, numbered, produce, read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark]

NewTopic = Callable[..., str]

CONNECTOR_SCHEMA = t.StructType(
    [
        t.StructField("key", t.BinaryType()),
        t.StructField("value", t.BinaryType()),
        t.StructField("topic", t.StringType()),
        t.StructField("partition", t.IntegerType()),
        t.StructField("offset", t.LongType()),
        t.StructField("timestamp", t.TimestampType()),
        t.StructField("timestampType", t.IntegerType()),
        t.StructField(
            "headers",
            t.ArrayType(
                t.StructType(
                    [t.StructField("key", t.StringType()), t.StructField("value", t.BinaryType())]
                )
            ),
        ),
    ]
)
"""As `KafkaRecordToRowConverter` of Spark's connector declares it, with includeHeaders."""


class Reader:
    """Reads a topic in both ways, and gives offsets per partition or values."""

    def __init__(self, spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path) -> None:
        self.spark, self.kafka, self.folder = spark, kafka, tmp_path
        self.batches: list[list[Any]] = []

    def load(self, **options: Any) -> DataFrame:
        """`spark.read`."""
        return self._with(self.spark.read.format("tallystick"), options).load()

    def offsets(self, **options: Any) -> list[tuple[str, int, int]]:
        """(topic, partition, offset) of what `spark.read` returns, sorted."""
        rows = self.load(**options).select("topic", "partition", "offset").collect()
        return sorted((row.topic, row.partition, row.offset) for row in rows)

    def follow(self, *, fail: bool = False, **options: Any) -> list[str]:
        """Run a stream over what is there, from its checkpoint on; the values that are new."""
        before = len(self.batches)
        query = finish(self._stream(fail, options).trigger(availableNow=True).start)
        self.progress = query.recentProgress
        return sorted(row.value.decode() for batch in self.batches[before:] for row in batch)

    def start(self, **options: Any) -> Any:
        """The same without an end."""
        return self._stream(False, options).start()

    def _stream(self, fail: bool, options: dict[str, Any]) -> Any:
        def keep(rows: DataFrame, _: int) -> None:
            if fail:
                raise RuntimeError("the first micro-batch dies")
            self.batches.append(rows.collect())

        frame = self._with(self.spark.readStream.format("tallystick"), options).load()
        return frame.writeStream.option(
            "checkpointLocation", str(self.folder / "checkpoint")
        ).foreachBatch(keep)

    def _with(self, reader: Any, options: dict[str, Any]) -> Any:
        settings = {"kafka.bootstrap.servers": self.kafka.bootstrap_servers, **options}
        return reader.options(**settings)


@pytest.fixture
def reader(spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path) -> Reader:
    return Reader(spark, kafka, tmp_path)


def feed(
    kafka: EmbeddedKafka, topic: str, count: int, first: int = 0, partition: int = -1
) -> list[str]:
    """Append numbered records; their values, sorted as text."""
    records = numbered(count, first=first, keys=13)
    produce(kafka.confluent_options(), topic, records, partition=partition)
    return sorted(value for _, value in records)


def values(first: int, stop: int) -> list[str]:
    """The values of numbered records."""
    return sorted(str(i) for i in range(first, stop))


def test_rows_and_schema_are_those_of_sparks_connector(
    reader: Reader, kafka: EmbeddedKafka, tallystick_topic: NewTopic
) -> None:
    topic = tallystick_topic("columns", config={"message.timestamp.type": "LogAppendTime"})
    producer = Producer(kafka.confluent_options())
    producer.produce(topic, key="k", value="v", headers=[("h", b"1"), ("h", None), ("", b"")])
    producer.produce(topic, key=None, value=None)
    producer.flush(WAIT_S)
    witness = read_committed(kafka.confluent_options(), topic)

    frame = reader.load(subscribe=topic, includeHeaders="true")
    first, second = sorted(frame.collect(), key=lambda row: row.offset)

    assert frame.schema == CONNECTOR_SCHEMA
    assert reader.load(subscribe=topic).schema == t.StructType(CONNECTOR_SCHEMA.fields[:-1])
    assert (first.key, first.value, first.topic, first.partition, first.offset) == (
        bytearray(b"k"), bytearray(b"v"), topic, 0, 0,
    )  # fmt: skip
    assert [(h.key, h.value) for h in first.headers] == [("h", b"1"), ("h", None), ("", b"")]
    assert round(first.timestamp.timestamp() * 1000) == witness[0].timestamp
    assert first.timestampType == 1
    assert (second.key, second.value, second.headers) == (None, None, None)


def test_what_is_read_follows_subscription_and_offsets(
    reader: Reader, kafka: EmbeddedKafka, tallystick_topic: NewTopic
) -> None:
    one, two = tallystick_topic("pick", partitions=2), tallystick_topic("pick")
    for partition in (0, 1):
        feed(kafka, one, 10, partition=partition)
    feed(kafka, two, 10)

    def span(topic: str, partition: int, start: int, stop: int) -> list[tuple[str, int, int]]:
        return [(topic, partition, offset) for offset in range(start, stop)]

    everything = sorted([*span(one, 0, 0, 10), *span(one, 1, 0, 10), *span(two, 0, 0, 10)])
    assert reader.offsets(subscribe=f"{one}, {two}") == everything
    assert reader.offsets(subscribePattern=f"({one}|{two[:-1]}.)") == everything
    assert reader.offsets(assign=json.dumps({one: [1]})) == span(one, 1, 0, 10)
    assert reader.offsets(
        subscribe=one,
        startingOffsets=json.dumps({one: {"0": 4, "1": -2}}),
        endingOffsets=json.dumps({one: {"0": -1, "1": 3}}),
    ) == [*span(one, 0, 4, 10), *span(one, 1, 0, 3)]
    cut = reader.load(subscribe=two, minPartitions="4")
    assert cut.rdd.getNumPartitions() == 4
    assert sorted(row.offset for row in cut.select("offset").collect()) == list(range(10))


def test_only_committed_records_are_read_and_none_behind_an_open_transaction(
    reader: Reader, kafka: EmbeddedKafka, tallystick_topic: NewTopic
) -> None:
    topic = tallystick_topic("isolation")
    producer = Producer({**kafka.confluent_options(), "transactional.id": topic})
    producer.init_transactions(WAIT_S)

    def write(value: str) -> None:
        producer.begin_transaction()
        producer.produce(topic, value=value)
        producer.flush(WAIT_S)

    write("committed")
    producer.commit_transaction(WAIT_S)
    write("aborted")
    producer.abort_transaction(WAIT_S)
    write("open")
    feed(kafka, topic, 1)

    def read() -> list[str]:
        return [row.value.decode() for row in reader.load(subscribe=topic).collect()]

    assert read() == ["committed"]
    producer.commit_transaction(WAIT_S)
    assert sorted(read()) == ["0", "committed", "open"]


def test_a_stream_loses_nothing_of_a_first_batch_that_dies_nor_of_partitions_that_are_added(
    reader: Reader, kafka: EmbeddedKafka, tallystick_topic: NewTopic
) -> None:
    topic = tallystick_topic("growing", partitions=1)
    admin = AdminClient(kafka.confluent_options())

    def grow(partitions: int) -> None:
        futures = admin.create_partitions([NewPartitions(topic, partitions)])
        for future in futures.values():
            future.result(WAIT_S)
        kafka.wait_until_in_sync([topic])

    feed(kafka, topic, 5)  # before the start at "latest": not ours
    with pytest.raises(StreamingQueryException, match="the first micro-batch dies"):
        reader.follow(fail=True, subscribe=topic)
    feed(kafka, topic, 10, first=100)
    assert reader.follow(subscribe=topic) == values(100, 110)

    grow(2)
    feed(kafka, topic, 30, first=110, partition=1)
    assert reader.follow(subscribe=topic, maxOffsetsPerTrigger="12") == values(110, 140)
    assert [p.numInputRows for p in reader.progress if p.numInputRows] == [12, 12, 6]

    query = reader.start(subscribe=topic, **{"partition.discovery.interval.ms": "1"})
    try:
        grow(3)
        feed(kafka, topic, 10, first=140, partition=2)
        seen = len(reader.batches)
        query.processAllAvailable()
    finally:
        query.stop()
    new = [row.value.decode() for batch in reader.batches[seen - 1 :] for row in batch]
    assert set(values(140, 150)) <= set(new)
    every = [row.value.decode() for batch in reader.batches for row in batch]
    assert sorted(every) == values(100, 150)


def test_records_deleted_unread_stop_the_query_unless_that_is_accepted(
    reader: Reader, kafka: EmbeddedKafka, tallystick_topic: NewTopic
) -> None:
    topic = tallystick_topic("expired")
    options = {"subscribe": topic, "startingOffsets": "earliest"}
    feed(kafka, topic, 30)
    assert reader.follow(**options) == values(0, 30)
    feed(kafka, topic, 30, first=30)
    admin = AdminClient(kafka.confluent_options())
    for future in admin.delete_records([TopicPartition(topic, 0, 45)]).values():
        future.result(WAIT_S)

    lost = rf"RecordsExpiredError.*{topic}-0\[30,60\).*earliest left is 45: 15 offsets"
    with pytest.raises(StreamingQueryException, match=lost):
        reader.follow(**options)
    assert reader.follow(**options, failOnDataLoss="false") == values(45, 60)


def test_json_values_are_typed_columns_and_a_malformed_one_is_named_kept_or_dropped(
    reader: Reader, kafka: EmbeddedKafka, tallystick_topic: NewTopic
) -> None:
    topic = tallystick_topic("json")
    texts = ['{"n": 0, "s": "a"}', '{"n": 1}', '{"n": "x"', '{"n": 3, "more": []}']
    produce(kafka.confluent_options(), topic, [(None, text) for text in texts])
    options = {"subscribe": topic, "value.format": "json", "value.schema": "n bigint, s string"}

    frame = reader.load(**options)
    assert frame.columns[:3] == ["n", "s", "key"]
    with pytest.raises(Exception, match=rf"RecordError.*topic {topic}, partition 0, offset 2"):
        frame.collect()
    dropped = reader.load(**options, **{"value.mode": "dropmalformed"}).orderBy("offset")
    assert [(r.n, r.s, r.offset) for r in dropped.collect()] == [(0, "a", 0), (1, None, 1), (3, None, 3)]  # fmt: skip  # noqa: E501
    kept = reader.load(**options, **{"value.mode": "permissive"}).orderBy("offset").collect()
    assert [(r.n, r._corrupt_record) for r in kept] == [
        (0, None), (1, None), (None, bytearray(texts[2].encode())), (3, None),
    ]  # fmt: skip


WRONG: list[tuple[dict[str, str], str]] = [
    ({"subscribe": "a", "subcribe": "a"}, "unknown option 'subcribe'.*Did you mean 'subscribe'"),
    ({"subscribe": "a", "minPartitions": "two"}, "minPartitions='two': expected a whole number"),
    ({"subscribe": "a", "assign": '{"a": [0]}'}, "exactly one of .*; found subscribe, assign"),
    ({"subscribe": "a", "kafka.bootstrap.servers": ""}, "kafka.bootstrap.servers is missing"),
    ({"subscribe": "a", "kafka.sasl.mechanisms": "PLAIN"}, "name; use kafka.sasl.mechanism"),
    ({"subscribe": "no-such-topic"}, "'no-such-topic'"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[words for _, words in WRONG])
def test_a_wrong_option_is_told_in_our_words(
    reader: Reader, options: dict[str, str], message: str
) -> None:
    with pytest.raises(Exception, match=rf"OptionError: .*{message}") as raised:
        reader.load(**options).collect()
    assert isinstance(raised.value, AnalysisException) or "OptionError" in str(raised.value)
