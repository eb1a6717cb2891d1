"""A running query or pipeline on real Spark while topics come, grow, go and are exchanged."""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming import StreamingQuery

from tallystick.errors import TopicRecreatedError
from tallystick.run.query import Query
from tallystick.testing import EmbeddedKafka
from tests.spark.flow import Flow, finish
from tests.spark.topics import WAIT_S, numbered, produce, read_committed
from tests.waiting import wait_for, wait_until

pytestmark = [pytest.mark.broker, pytest.mark.spark]

NewTopic = Callable[..., str]
INTERVAL_MS = 300


class World:
    """Topics that the test changes, and a query over them that collects values."""

    def __init__(self, spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path) -> None:
        self.spark, self.kafka, self.checkpoint = spark, kafka, tmp_path / "checkpoint"
        self.admin = AdminClient(kafka.confluent_options())
        self.batches: list[list[str]] = []

    @property
    def values(self) -> list[str]:
        """All that was read."""
        return [value for batch in self.batches for value in batch]

    def feed(self, topic: str, *values: str, partition: int = 0) -> None:
        """Append values."""
        records = [(None, value) for value in values]
        produce(self.kafka.confluent_options(), topic, records, partition=partition)

    def grow(self, topic: str, partitions: int) -> None:
        """Add partitions."""
        for future in self.admin.create_partitions([NewPartitions(topic, partitions)]).values():
            future.result(WAIT_S)
        self.kafka.wait_until_in_sync([topic])

    def delete(self, topic: str) -> None:
        """Delete a topic, and wait until it is gone."""
        for future in self.admin.delete_topics([topic]).values():
            future.result(WAIT_S)
        wait_until(
            lambda: topic not in self.admin.list_topics(timeout=WAIT_S).topics,
            f"the deleted topic {topic} is still listed",
        )

    def query(self, trigger: dict[str, Any], **options: Any) -> StreamingQuery:
        """Start the query, or go on with it; what it reads is in `values`."""

        def keep(rows: DataFrame, _: int) -> None:
            self.batches.append([row.value for row in rows.select("value").collect()])

        settings = {
            "kafka.bootstrap.servers": self.kafka.bootstrap_servers,
            "partition.discovery.interval.ms": str(INTERVAL_MS),
            "startingOffsets": "earliest",
            "value.format": "string",
            **options,
        }
        rows = self.spark.readStream.format("tallystick").options(**settings).load()
        writer = rows.writeStream.option("checkpointLocation", str(self.checkpoint))
        return writer.foreachBatch(keep).trigger(**trigger).start()

    def follow(self, **options: Any) -> list[str]:
        """Read what is there, from the checkpoint on; the values that are new, sorted."""
        before = len(self.values)
        self.progress = finish(lambda: self.query({"availableNow": True}, **options)).recentProgress
        return sorted(self.values[before:])

    @contextmanager
    def running(self, **options: Any) -> Iterator[StreamingQuery]:
        """The query, triggered again and again until the block ends."""
        query = self.query({"processingTime": "100 milliseconds"}, **options)
        try:
            yield query
        finally:
            query.stop()

    def wait_for(self, query: StreamingQuery, *values: str) -> None:
        """Wait until these values have been read; the query must live."""

        def arrived() -> bool:
            error = query.exception()
            assert error is None, error
            return set(values) <= set(self.values)

        wait_until(
            arrived,
            lambda: f"not read are {sorted(set(values) - set(self.values))}; {where_it_is(query)}",
        )


def where_it_is(query: StreamingQuery) -> str:
    """Where the query has come to, for a failure of waiting."""
    progress = query.lastProgress
    return "no epoch has ended" if progress is None else f"the newest epoch: {progress.json}"


@pytest.fixture
def world(spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path) -> World:
    return World(spark, kafka, tmp_path)


def test_partitions_and_topics_that_appear_are_read_from_their_first_record_while_it_runs(
    world: World, tallystick_topic: NewTopic
) -> None:
    first = tallystick_topic("appear")
    pattern = first[:-8] + ".*"
    world.feed(first, "a")

    with world.running(subscribePattern=pattern, startingOffsets="latest") as query:
        wait_until((world.checkpoint / "offsets" / "0").exists, "no first epoch is planned")
        world.feed(first, "b")
        world.wait_for(query, "b")
        world.grow(first, 2)
        world.feed(first, "c", partition=1)
        second = tallystick_topic("appear", partitions=2)
        world.feed(second, "d", partition=1)
        world.wait_for(query, "c", "d")

    assert sorted(world.values) == ["b", "c", "d"]


def test_without_discovery_a_new_partition_waits_for_the_restart(
    world: World, tallystick_topic: NewTopic
) -> None:
    topic = tallystick_topic("no-discovery")
    off = {"subscribe": topic, "partition.discovery.interval.ms": "0"}

    with world.running(**off) as query:
        world.feed(topic, "a")
        world.wait_for(query, "a")
        world.grow(topic, 2)
        world.feed(topic, "late", partition=1)
        for value in ("b", "c", "d"):
            world.feed(topic, value)
            world.wait_for(query, value)
        assert "late" not in world.values

    assert "late" in world.follow(**off)  # and what the stop may have left uncommitted


def test_a_topic_exchanged_for_a_namesake_is_noticed_whatever_its_offsets(
    world: World, tallystick_topic: NewTopic
) -> None:
    """The namesake has more records than the old one had: only its id gives it away."""
    topic = tallystick_topic("exchanged")
    world.feed(topic, "old 1", "old 2")
    assert world.follow(subscribe=topic) == ["old 1", "old 2"]

    world.delete(topic)
    world.kafka.create_topic(topic, 1)
    world.feed(topic, *(f"new {i}" for i in range(5)))

    with pytest.raises(StreamingQueryException, match=r"TopicRecreatedError: .*created again"):
        world.follow(subscribe=topic)
    again = world.follow(subscribe=topic, **{"when.recreated": "restart"})
    assert again == [f"new {i}" for i in range(5)]


def test_an_exchange_between_two_looks_is_noticed_by_the_task_that_reads(
    world: World, tallystick_topic: NewTopic
) -> None:
    topic = tallystick_topic("exchanged-unseen")
    blind = {"subscribe": topic, "partition.discovery.interval.ms": "3600000"}
    with world.running(**blind) as query:
        world.feed(topic, "old")
        world.wait_for(query, "old")
        world.delete(topic)
        world.kafka.create_topic(topic, 1)
        world.feed(topic, *(f"new {i}" for i in range(5)))
        with pytest.raises(StreamingQueryException, match="TopicRecreatedError"):
            query.awaitTermination(WAIT_S)

    assert world.values == ["old"]


def test_a_pipeline_reads_what_appears_while_it_runs_and_notices_an_exchange(flow: Flow) -> None:
    """The exchange between two looks, so that a task notices it."""

    def start(interval_ms: int) -> Query:
        pipeline = flow.pipeline(
            topics=re.compile(f"{flow.topic_in}.*"),
            options={"partition.discovery.interval.ms": str(interval_ms)},
        )
        trigger = {"processingTime": "100 milliseconds"}
        return pipeline.start(flow.spark, checkpoint=str(flow.checkpoint), trigger=trigger)

    def wait_until_written(query: Query) -> None:
        def count() -> int:
            assert query.exception() is None
            return len(read_committed(flow.confluent, flow.topic_out))

        wait_for(count, len(flow.input), "the number of rows")

    flow.feed(20)
    query = start(INTERVAL_MS)
    try:
        wait_until_written(query)
        flow.grow(10)
        second = f"{flow.topic_in}-2"
        flow.kafka.create_topic(second, 1)
        appeared = [("of the second", value) for _, value in numbered(10)]
        produce(flow.confluent, second, appeared)
        flow.input += appeared
        wait_until_written(query)
    finally:
        query.stop()
    flow.assert_exact()

    admin = AdminClient(flow.confluent)
    query = start(3_600_000)
    try:
        produce(flow.confluent, second, appeared)
        flow.input += appeared
        wait_until_written(query)
        admin.delete_topics([second])[second].result(WAIT_S)
        wait_until(
            lambda: second not in admin.list_topics(timeout=WAIT_S).topics,
            f"the deleted topic {second} is still listed",
        )
        flow.kafka.create_topic(second, 1)
        produce(flow.confluent, second, appeared * 3)
        with pytest.raises(TopicRecreatedError):
            query.awaitTermination(WAIT_S)
    finally:
        query.stop()
    flow.assert_exact()


def test_a_topic_that_is_gone_stops_the_query_or_is_left_as_told(
    world: World, tallystick_topic: NewTopic
) -> None:
    stays, goes = tallystick_topic("stays"), tallystick_topic("goes")
    both = {"subscribe": f"{stays},{goes}"}
    world.feed(stays, "a")
    world.feed(goes, "b")
    assert world.follow(**both) == ["a", "b"]
    world.delete(goes)
    world.feed(stays, "c")

    with pytest.raises(StreamingQueryException, match=rf"PartitionRemovedError: topic '{goes}'"):
        world.follow(**both)
    assert world.follow(**both, **{"when.removed": "drop"}) == ["c"]
    world.kafka.create_topic(goes, 1)
    world.feed(goes, "back")
    assert world.follow(**both) == ["back"]


def test_a_query_starts_where_a_group_stands_and_shows_its_lag(
    world: World, tallystick_topic: NewTopic
) -> None:
    topic = tallystick_topic("committed", partitions=2)
    world.feed(topic, "read by the old job", "a", "b")
    world.feed(topic, "never read", partition=1)
    old = Consumer({**world.kafka.confluent_options(), "group.id": topic})
    old.commit(offsets=[TopicPartition(topic, 0, 1)], asynchronous=False)
    old.close()
    start = {"subscribe": topic, "startingOffsets": "committed", "kafka.group.id": topic}

    with pytest.raises(StreamingQueryException, match=rf"{topic}-1: no offset committed by group"):
        world.follow(**start)
    limited = {**start, "committed.fallback": "latest", "maxOffsetsPerTrigger": "1"}
    assert world.follow(**limited) == ["a", "b"]

    def ends(position: str) -> list[list[int]]:
        positions = [p.sources[0] for p in world.progress if p.numInputRows]
        return [json.loads(getattr(source, position))["topics"][topic] for source in positions]

    assert ends("endOffset") == [[2, 1], [3, 1]]
    assert ends("latestOffset") == [[3, 1], [3, 1]]


def test_a_stream_with_an_end_stops_there_and_remembers_it(
    world: World, tallystick_topic: NewTopic
) -> None:
    topic = tallystick_topic("bounded")
    world.feed(topic, "a", "b")
    bounded = {"subscribe": topic, "endingOffsets": json.dumps({topic: {"0": 3}})}

    assert world.follow(**bounded) == ["a", "b"]
    world.feed(topic, "c", "beyond")
    assert world.follow(**bounded) == ["c"]
    assert world.follow(**bounded) == []


def test_few_records_wait_for_more_or_for_the_longest_delay(
    world: World, tallystick_topic: NewTopic
) -> None:
    topic = tallystick_topic("few")
    world.feed(topic, "first")
    rate = {"subscribe": topic, "minOffsetsPerTrigger": "3", "maxTriggerDelay": "1h"}

    with world.running(**rate) as query:
        world.wait_for(query, "first")  # the first epoch of a run does not wait
        world.feed(topic, "a", "b")
        time.sleep(1.0)
        assert world.values == ["first"]
        world.feed(topic, "c")
        world.wait_for(query, "a", "b", "c")
    assert [len(batch) for batch in world.batches if batch] == [1, 3]
    world.feed(topic, "d")
    with world.running(**{**rate, "maxTriggerDelay": "500ms"}) as query:
        world.wait_for(query, "d")
        world.feed(topic, "e")
        world.wait_for(query, "e")


def test_windows_close_behind_a_watermark_of_the_records_times(
    spark: SparkSession, kafka: EmbeddedKafka, tallystick_topic: NewTopic, tmp_path: Path
) -> None:
    topic = tallystick_topic("event-time")
    minute = 60_000
    options = {"kafka.bootstrap.servers": kafka.bootstrap_servers, "subscribe": topic}
    stream = spark.readStream.format("tallystick").options(
        **options, startingOffsets="earliest", maxOffsetsPerTrigger="4"
    )
    counts = (
        stream.load()
        .withWatermark("timestamp", "1 minute")
        .groupBy(f.window("timestamp", "1 minute"))
        .count()
    )
    at = [0, 0, minute, minute, *[10 * minute] * 8, 0]
    feed_at(kafka, topic, [1_700_000_040_000 + ms for ms in at])
    closed: list[tuple[int, int]] = []

    def keep(rows: DataFrame, _: int) -> None:
        closed.extend((int(r.window.start.timestamp()), r["count"]) for r in rows.collect())

    finish(
        counts.writeStream.outputMode("append")
        .option("checkpointLocation", str(tmp_path / "windows"))
        .foreachBatch(keep)
        .trigger(availableNow=True)
        .start
    )

    begin = 1_700_000_040
    assert sorted(closed) == [(begin, 2), (begin + 60, 2)]


def feed_at(kafka: EmbeddedKafka, topic: str, times: list[int]) -> None:
    """One record at each time, in ms."""
    producer = Producer(kafka.confluent_options())
    for number, at in enumerate(times):
        producer.produce(topic, value=numbered(1, first=number)[0][1], timestamp=at)
    assert producer.flush(WAIT_S) == 0
