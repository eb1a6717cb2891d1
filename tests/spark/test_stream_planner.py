"""The driver side of a stream on a real broker, without Spark around it."""

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

import tallystick as ts
from tallystick.codec.layout import Layout
from tallystick.errors import BrokerUnavailableError, DataLossError, OptionError
from tallystick.kafka.broker import KafkaBroker
from tallystick.options.source import OFFSETS_MAX, SourceOptions, parse_source_options
from tallystick.pipeline import planning, topics
from tallystick.pipeline.planning import StreamPlanner
from tallystick.source.offsets import SourceOffsets, from_json, next_tick
from tallystick.source.splits import plan_splits
from tallystick.spark.streaming.source import StreamReader
from tallystick.testing import EmbeddedKafka
from tallystick.values import TopicPartition as Partition
from tests.spark.topics import WAIT_S, numbered, produce
from tests.waiting import wait_until

pytestmark = pytest.mark.broker

NewTopic = Callable[..., str]
NewPlanner = Callable[..., StreamPlanner]


@pytest.fixture
def planner(kafka: EmbeddedKafka) -> Iterator[NewPlanner]:
    """Makes the planner of a query run, as Spark's source process has one."""
    brokers = []

    def make(
        typed: SourceOptions | None = None, *, ticks: dict[str, int] | None = None, **options: str
    ) -> StreamPlanner:
        source_options = {"kafka.bootstrap.servers": kafka.bootstrap_servers, **options}
        parsed = typed or parse_source_options(source_options, streaming=True)
        brokers.append(KafkaBroker(parsed.config))
        return StreamPlanner(brokers[-1], parsed, **(ticks or {}))

    yield make
    for broker in brokers:
        broker.close()


def test_a_new_process_goes_on_from_the_log_alone(
    planner: NewPlanner, kafka: EmbeddedKafka, tallystick_topic: NewTopic
) -> None:
    topic = tallystick_topic("planned")
    first = planner(subscribe=topic)
    start = first.next(first.first(), None)
    produce(kafka.confluent_options(), topic, numbered(5))

    logged = first.next(start, 3)
    after = planner(subscribe=topic).next(logged, None)

    ranges = [(s.start_offset, s.stop_offset) for s in plan_splits(start, logged)]
    assert ranges == [(0, 3)]
    assert [(s.start_offset, s.stop_offset) for s in plan_splits(logged, after)] == [(3, 5)]
    assert planner(subscribe=topic).next(after, None) is after


def test_a_position_behind_an_open_transaction_waits_for_it_and_is_no_truncation(
    planner: NewPlanner, kafka: EmbeddedKafka, tallystick_topic: NewTopic
) -> None:
    """A group that read uncommitted records may stand there."""
    topic = tallystick_topic("uncommitted")
    confluent = kafka.confluent_options()
    producer = Producer({**confluent, "transactional.id": topic})
    producer.init_transactions(WAIT_S)
    producer.begin_transaction()
    for number in range(4):
        producer.produce(topic, value=str(number))
    producer.flush(WAIT_S)
    reader = Consumer({**confluent, "group.id": topic})
    reader.commit(offsets=[TopicPartition(topic, 0, 3)], asynchronous=False)
    reader.close()
    begun = planner(subscribe=topic, startingOffsets="committed", **{"kafka.group.id": topic})

    start = begun.next(begun.first(), None)
    assert start.positions == {Partition(topic, 0): 3}
    assert begun.next(start, None) is start
    producer.commit_transaction(WAIT_S)
    wait_until(  # the marker may come a little later
        lambda: begun.next(start, None) is not start, f"no epoch is planned behind {start}"
    )
    assert begun.next(start, None).positions == {Partition(topic, 0): 5}


def test_the_offsets_of_another_cluster_are_refused(
    planner: NewPlanner, tallystick_topic: NewTopic
) -> None:
    here = planner(subscribe=tallystick_topic("elsewhere"))
    start = here.first()

    with pytest.raises(DataLossError, match=r"belong to cluster elsewhere.*correct bootstrap"):
        here.next(replace(start, cluster_id="elsewhere"), None)


def test_spark_hears_of_a_bound_unless_the_query_wants_all() -> None:
    given = {"kafka.bootstrap.servers": "nowhere:9092", "subscribe": "t"}
    limits = [
        StreamReader(parse_source_options({**given, **own}), Layout()).getDefaultReadLimit()
        for own in ({}, {"maxOffsetsPerTrigger": "all"}, {"maxOffsetsPerTrigger": "3"})
    ]

    assert limits == [ReadMaxRows(OFFSETS_MAX), ReadAllAvailable(), ReadMaxRows(3)]


def test_a_replayed_epoch_is_not_read_from_another_cluster(
    kafka: EmbeddedKafka, tallystick_topic: NewTopic
) -> None:
    """Spark reads it before anything is planned."""
    source_options = {
        "kafka.bootstrap.servers": kafka.bootstrap_servers,
        "subscribe": tallystick_topic("mirror"),
    }
    reader = StreamReader(parse_source_options(source_options, streaming=True), Layout())
    logged = replace(from_json(reader.initialOffset()), cluster_id="elsewhere").to_json()

    with pytest.raises(DataLossError, match="belong to cluster elsewhere"):
        reader.partitions(logged, logged)


def test_what_is_wrong_with_a_start_matters_to_a_new_query_only(
    planner: NewPlanner, tallystick_topic: NewTopic
) -> None:
    """Spark asks for the start also when it runs the first epoch again."""
    topic = tallystick_topic("once")
    begun = planner(subscribe=topic)
    logged = begun.next(begun.first(), None)
    wrong = planner(subscribe=topic, startingOffsets=json.dumps({topic: {"0": 99}}))

    placeholder = wrong.first()
    assert wrong.next(logged, None) is logged
    with pytest.raises(OptionError, match=r"is to start at 99, but its log begins at 0"):
        wrong.next(placeholder, None)


def test_the_end_of_a_query_cannot_be_changed(
    planner: NewPlanner, tallystick_topic: NewTopic
) -> None:
    topic = tallystick_topic("ends")
    free, bounded = planner(subscribe=topic), planner(subscribe=topic, endingTimestamp="5")
    logged = [
        limited_planner.next(limited_planner.first(), None) for limited_planner in (free, bounded)
    ]

    for other, start in zip((bounded, free), logged, strict=True):
        with pytest.raises(OptionError, match="the end of a query cannot be changed"):
            other.next(start, None)


def test_a_topic_that_one_list_lacks_is_asked_for_by_name_before_it_counts_as_gone(
    planner: NewPlanner, tallystick_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker may lag behind, and leaves out of its list what the user may not describe."""
    topic = tallystick_topic("listed")
    by_pattern = planner(subscribePattern=topic, **{"partition.discovery.interval.ms": "1"})
    start = by_pattern.next(by_pattern.first(), None)
    look = topics.describe_topics
    monkeypatch.setattr(
        topics,
        "describe_topics",
        lambda client, names: {} if names is None else look(client, names),
    )

    for _ in range(3):
        assert by_pattern.next(start, None) is start


def test_a_pattern_that_occurs_within_names_or_nowhere_is_warned_about_once(
    planner: NewPlanner, tallystick_topic: NewTopic, caplog: pytest.LogCaptureFixture
) -> None:
    """Spark's connector searches within names, and reads these topics."""
    topic = tallystick_topic("warned")
    part, nowhere = topic[1:], f"no-{topic}"
    for pattern in (part, part, nowhere, nowhere, topic):
        assert (not planner(subscribePattern=pattern).first().positions) == (pattern != topic)

    within, none = [r.getMessage() for r in caplog.records if "subscribePattern" in r.getMessage()]
    assert within.startswith(f"subscribePattern={part!r} is matched against whole names")
    assert f"it occurs within {topic}, which are not read" in within
    assert re.fullmatch(rf"subscribePattern='{nowhere}' matches none of \d+ topics", none)


@pytest.mark.parametrize("how", ["subscribe", "assign"])
def test_what_is_named_and_gone_by_a_restart_is_warned_about(
    planner: NewPlanner, tallystick_topic: NewTopic, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """A new query is refused; in one that goes on it may have been dropped."""
    topic = tallystick_topic("named")
    more = {"subscribe": f"{topic},absent", "assign": json.dumps({topic: [0, 7]})}[how]
    fresh = planner(**{how: more})
    with pytest.raises(OptionError, match=r"does not exist|has 1 partitions"):
        fresh.next(fresh.first(), None)
    first = planner(subscribe=topic)
    logged = first.next(first.first(), None)

    restarted = planner(**{how: more})
    assert restarted.next(logged, None) is logged

    missing = {"subscribe": "absent", "assign": f"{topic}-7"}[how]
    warning = f"named, but not there: {missing}; read from the first offset once it is"
    assert [r.getMessage() for r in caplog.records].count(warning) == 1


def test_a_missed_topic_is_looked_for_even_without_discovery(
    planner: NewPlanner, kafka: EmbeddedKafka, tallystick_topic: NewTopic,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    topic = tallystick_topic("missed")
    monkeypatch.setattr(planning, "MISSED_INTERVAL_MS", 1)
    kept = planner(
        subscribe=topic, **{"when.removed": "keep", "partition.discovery.interval.ms": "0"}
    )
    start = kept.next(kept.first(), None)
    with monkeypatch.context() as patch:
        patch.setattr(planning, "list_offsets", lambda *_, **__: {})
        patch.setattr(topics, "describe_topics", lambda *_: {})
        assert kept.next(start, None) is start
    produce(kafka.confluent_options(), topic, numbered(2))

    wait_until(lambda: kept.next(start, None) is not start, f"no epoch is planned behind {start}")


def test_a_failed_look_at_the_topics_is_the_querys_failure(
    planner: NewPlanner, tallystick_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking = planner(
        subscribe=tallystick_topic("look"), **{"partition.discovery.interval.ms": "1"}
    )
    start = looking.next(looking.first(), None)

    def gone(*_: object) -> dict[str, object]:
        raise BrokerUnavailableError("nobody is there")

    monkeypatch.setattr(topics, "describe_topics", gone)
    with pytest.raises(BrokerUnavailableError, match="nobody is there"):
        wait_until(lambda: looking.next(start, None) is not start, "nobody looks at the topics")


def test_ends_that_are_asked_for_by_time_are_settled_once(
    planner: NewPlanner, kafka: EmbeddedKafka, tallystick_topic: NewTopic
) -> None:
    topic = tallystick_topic("times")
    producer = Producer(kafka.confluent_options())
    for at in (1000, 2000, 3000, 4000):
        producer.produce(topic, value=str(at), timestamp=at)
    producer.flush(WAIT_S)
    bounded = planner(subscribe=topic, startingTimestamp="1500", endingTimestamp="3500")

    first = bounded.first()
    done = bounded.next(first, None)

    assert first.stops == {Partition(topic, 0): 3}
    splits = plan_splits(SourceOffsets("", ""), done)
    assert [(s.start_offset, s.stop_offset) for s in splits] == [(1, 3)]
    produce(kafka.confluent_options(), topic, numbered(2))
    assert bounded.next(done, None) is done


def test_a_partition_without_a_record_as_late_as_the_start_begins_at_its_end_for_good(
    planner: NewPlanner,
    kafka: EmbeddedKafka,
    tallystick_topic: NewTopic,
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic = tallystick_topic("late_start", partitions=3)  # the last one stays empty
    producer = Producer(kafka.confluent_options())
    for partition, at in ((0, 1000), (0, 3000), (1, 1000), (1, 1500)):
        producer.produce(topic, value=str(at), timestamp=at, partition=partition)
    producer.flush(WAIT_S)
    source = ts.KafkaSource(
        kafka.bootstrap_servers,
        topics=[topic],
        starting_time=datetime.fromtimestamp(2, UTC),
    )
    strict = replace(source, starting_time_fallback="error")

    with pytest.raises(OptionError, match=rf"{topic}-1, {topic}-2: no record as late as its time"):
        _begun(planner(strict.read_options("p")))
    with pytest.raises(OptionError, match=rf"{topic}-1, {topic}-2: no record as late as its time"):
        _begun(planner(subscribe=topic, startingTimestamp="2000"))  # Spark's default: an error
    first = _begun(planner(source.read_options("p")))
    assert first.starts == {Partition(topic, 0): 1, Partition(topic, 1): 2, Partition(topic, 2): 0}
    assert "no record is as late as the time, so each is at its end now" in caplog.text
    assert f"{topic}-1 at 2, {topic}-2 at 0" in caplog.text

    for partition in (1, 2):  # older than the start, and behind it all the same
        producer.produce(topic, value="late", timestamp=1700, partition=partition)
    producer.flush(WAIT_S)
    again = planner(source.read_options("p"))
    assert [
        (s.partition, s.start_offset, s.stop_offset)
        for s in plan_splits(first, again.next(first, None))
    ] == [(1, 2, 3), (2, 0, 1)]


def test_a_record_that_comes_while_the_end_is_asked_for_is_not_passed_over(
    planner: NewPlanner,
    kafka: EmbeddedKafka,
    tallystick_topic: NewTopic,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = tallystick_topic("meanwhile")
    produce(kafka.confluent_options(), topic, numbered(3))
    list_offsets = topics.list_offsets
    written = []

    def after_a_record(*arguments: Any, **named: Any) -> dict[Partition, int]:
        if not written:
            written.append(produce(kafka.confluent_options(), topic, numbered(2)))
        return list_offsets(*arguments, **named)

    monkeypatch.setattr(topics, "list_offsets", after_a_record)
    now = str(time.time_ns() // 1_000_000 + 1)
    time.sleep(0.01)
    starting = planner(
        subscribe=topic, startingTimestamp=now, startingOffsetsByTimestampStrategy="latest"
    )

    assert starting.first().positions == {Partition(topic, 0): 3}
    assert written, "the record came in between"


def test_a_partition_that_is_given_no_time_to_start_at_is_refused(
    planner: NewPlanner, tallystick_topic: NewTopic
) -> None:
    topic = tallystick_topic("untimed", partitions=2)
    times = json.dumps({topic: {"0": 1000}})
    starting = planner(
        subscribe=topic,
        startingOffsetsByTimestamp=times,
        startingOffsetsByTimestampStrategy="latest",
    )
    with pytest.raises(OptionError, match=rf"{topic}-1: no time is given"):
        _begun(starting)


def _begun(starting: StreamPlanner) -> SourceOffsets:
    return starting.next(starting.first(), None)


def test_timers_of_the_clock_get_epochs_without_records_that_read_nothing_twice(
    planner: NewPlanner, kafka: EmbeddedKafka, tallystick_topic: NewTopic
) -> None:
    topic = tallystick_topic("ticks")
    ticking = planner(subscribe=topic, startingOffsets="earliest", ticks={"tick_interval_ms": 1})
    produce(kafka.confluent_options(), topic, numbered(3))
    begun = ticking.next(ticking.first(), None)
    assert begun.starts
    assert not begun.tick

    wait_until(lambda: ticking.next(begun, None) is not begun, "no tick is planned")
    tick = next_tick(begun)
    time.sleep(0.01)
    later = ticking.next(tick, None)

    assert (tick.tick, later.tick) == (1, 2)
    assert plan_splits(begun, tick) == plan_splits(tick, later) == ()
    produce(kafka.confluent_options(), topic, numbered(2))
    read = planner(subscribe=topic).next(later, None)
    assert [(s.start_offset, s.stop_offset) for s in plan_splits(later, read)] == [(3, 5)]
    assert not read.tick
    bounded = planner(subscribe=topic, ticks={"tick_interval_ms": 1})
    bounded.stop_at_what_is_there()
    assert bounded.next(read, None) is read


def test_event_time_gets_as_many_epochs_behind_records_as_steps_can_move_each_other(
    planner: NewPlanner, kafka: EmbeddedKafka, tallystick_topic: NewTopic
) -> None:
    topic = tallystick_topic("event-time")
    produce(kafka.confluent_options(), topic, numbered(1))
    moving = planner(subscribe=topic, startingOffsets="earliest", ticks={"tick_count_max": 2})
    moving.stop_at_what_is_there()

    offsets = [moving.next(moving.first(), None)]
    while (following := moving.next(offsets[-1], None)) is not offsets[-1]:
        offsets.append(following)

    assert [offset.tick for offset in offsets] == [0, 1, 2]
