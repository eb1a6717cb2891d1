"""The driver side of a stream on a real broker, without Spark around it."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from tallystick.errors import BrokerUnavailableError, DataLossError
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.config import KafkaConfig
from tallystick.options import parse_source_options
from tallystick.source.offsets import SourceOffsets
from tallystick.source.planner import plan_splits
from tallystick.spark.planning import StreamPlanner
from tallystick.testing import EmbeddedKafka
from tallystick.topic_partition import TopicPartition as Partition
from tests.spark.test_changing_topics import wait_until
from tests.spark.topics import WAIT_S, numbered, produce

pytestmark = pytest.mark.broker

NewTopic = Callable[..., str]
NewPlanner = Callable[..., StreamPlanner]


@pytest.fixture
def planner(kafka: EmbeddedKafka) -> Iterator[NewPlanner]:
    """Makes the planner of a query run, as Spark's source process has one."""
    brokers = []

    def make(**options: str) -> StreamPlanner:
        asked = {"kafka.bootstrap.servers": kafka.bootstrap_servers, **options}
        parsed = parse_source_options(asked, streaming=True)
        brokers.append(KafkaBroker(KafkaConfig.from_options(parsed.client)))
        return StreamPlanner(brokers[-1], parsed)

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
    wait_until(lambda: begun.next(start, None) is not start)  # the marker may come a little later
    assert begun.next(start, None).positions == {Partition(topic, 0): 5}


def test_the_offsets_of_another_cluster_are_refused(
    planner: NewPlanner, tallystick_topic: NewTopic
) -> None:
    here = planner(subscribe=tallystick_topic("elsewhere"))
    start = here.first()

    with pytest.raises(DataLossError, match=r"belong to cluster elsewhere.*correct bootstrap"):
        here.next(replace(start, cluster_id="elsewhere"), None)


def test_a_failed_look_at_the_topics_is_the_querys_failure(
    planner: NewPlanner, tallystick_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking = planner(
        subscribe=tallystick_topic("look"), **{"partition.discovery.interval.ms": "1"}
    )
    start = looking.next(looking.first(), None)

    def gone(*_: object) -> dict[str, object]:
        raise BrokerUnavailableError("nobody is there")

    monkeypatch.setattr(KafkaBroker, "describe_topics", gone)
    with pytest.raises(BrokerUnavailableError, match="nobody is there"):
        wait_until(lambda: looking.next(start, None) is not start)


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
