"""A leader that lags behind the cluster's metadata: it still has a topic that was exchanged."""

import threading
from collections.abc import Iterator

import pytest
from confluent_kafka import Producer

from tallystick.kafka import protocol
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.client import AnyBroker, Client
from tallystick.kafka.cluster import describe_topics, list_offsets
from tallystick.kafka.config import KafkaConfig
from tallystick.options.source import parse_source_options
from tallystick.pipeline.planning import StreamPlanner
from tallystick.source.offsets import SourceOffsets
from tallystick.source.subscription import LATEST
from tallystick.testing import EmbeddedKafka
from tallystick.values import TopicPartition
from tests.kafka.real_kafka import delete_topic
from tests.waiting import WAIT_S, wait_until

pytestmark = pytest.mark.broker

OLD_RECORDS = 100
NEW_RECORDS = 5
IMPATIENT = {"request.timeout.ms": "2000"}
"""A node that stands still is asked as any other for what all know."""
TRIES = 5
"""How often a leader may notice the exchange before it answers what was asked while it slept."""


class Exchange:
    """A topic of one partition that is exchanged for a namesake while its leader stands still."""

    def __init__(self, kafka: EmbeddedKafka, topic: str) -> None:
        self.kafka, self.topic = kafka, topic
        self.partition = TopicPartition(topic, 0)
        active = active_controller(kafka)
        others = [node for node in kafka.nodes if node.node_id != active]
        self.leader, witness = others[0].node_id, others[1].address
        self.options = {"bootstrap.servers": witness}
        self.client = Client(KafkaConfig.from_options({**self.options, **IMPATIENT}))
        self.producer = Producer({**self.options, "linger.ms": 0})
        self.acknowledged: list[int] = []
        self.create()
        kafka.wait_until_in_sync([topic])
        self.feed(OLD_RECORDS)
        self.end_listed = -1
        """Where the log ends, as its leader says right after it went on."""
        self.old_id = self.id_shown()

    def create(self) -> None:
        """Create it on one node; librdkafka would ask any for it, also one that stands still."""
        topic_class = protocol.CreateTopicsRequest.CreatableTopic
        place = topic_class.CreatableReplicaAssignment(partition_index=0, broker_ids=[self.leader])
        new = topic_class(
            name=self.topic,
            num_partitions=-1,
            replication_factor=-1,
            assignments=[place],
            configs=[],
        )
        self.client.call(
            lambda: protocol.CreateTopicsRequest(topics=[new], timeout_ms=5000, min_version=4),
            AnyBroker(),
            lambda response: [(topic.error_code, topic.name) for topic in response.topics],
            accept=frozenset({"TopicAlreadyExists"}),
        )

    def feed(self, count: int) -> None:
        """Write records; the offsets that are acknowledged are in `acknowledged`."""
        self.acknowledged.clear()
        for number in range(count):
            self.producer.produce(
                self.topic,
                str(number),
                partition=0,
                on_delivery=lambda error, message: self.acknowledged.append(message.offset()),
            )
        assert self.producer.flush(WAIT_S) == 0

    def id_shown(self) -> str:
        """The topic's id, as a broker that does not lag knows it."""
        return describe_topics(self.client, [self.topic])[self.topic].topic_id

    def happen(self, look: threading.Thread) -> None:
        """Exchange the topic, begin to look, feed, and let the leader go on with what waits."""
        self.kafka.pause(self.leader)
        delete_topic(self.client, self.topic)
        self.create()
        wait_until(
            lambda: self.id_shown() not in ("", self.old_id),
            lambda: f"{self.topic} has its old id {self.old_id}",
        )
        is_asked = threading.Event()
        threads = [
            look,
            threading.Thread(target=self._list_end, args=(is_asked,)),
            threading.Thread(target=self.feed, args=(NEW_RECORDS,)),
        ]
        for thread in threads:
            thread.start()
        assert is_asked.wait(WAIT_S)
        threads[0].join(1.0)  # all of them wait for the leader by then
        self.kafka.resume(self.leader)
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), "it waits for an answer"

    def end(self) -> int:
        """Where the log ends, as its leader says."""
        return list_offsets(self.client, [self.partition], LATEST)[self.partition]

    def wait_until_noticed(self) -> None:
        """Wait until the leader has the new topic."""
        wait_until(
            lambda: self.end() <= NEW_RECORDS,
            lambda: f"{self.partition} ends at {self.end()}, as only the old topic did",
        )

    def _list_end(self, is_asked: threading.Event) -> None:
        client = Client(KafkaConfig(self.options["bootstrap.servers"]))
        client.metadata([self.topic])
        is_asked.set()
        self.end_listed = list_offsets(client, [self.partition], LATEST)[self.partition]
        client.close()


def active_controller(kafka: EmbeddedKafka) -> int:
    """Return the node that decides on topics; the answer to Metadata names any (KIP-590)."""
    topic_class = protocol.DescribeQuorumRequest.TopicData
    partition = topic_class.PartitionData(partition_index=0)
    topic_request = topic_class(topic_name="__cluster_metadata", partitions=[partition])
    client = Client(KafkaConfig(kafka.bootstrap_servers))
    try:
        response = client.call(
            lambda: protocol.DescribeQuorumRequest(topics=[topic_request], min_version=1),
            AnyBroker(),
            lambda response: [(response.error_code, "the quorum")],
        )
    finally:
        client.close()
    return int(response.topics[0].partitions[0].leader_id)


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmbeddedKafka]:
    with EmbeddedKafka(3) as kafka:
        yield kafka


def planner_of(topic: str, servers: str, start: str = "earliest") -> StreamPlanner:
    options = {
        "kafka.bootstrap.servers": servers,
        **{f"kafka.{name}": value for name, value in IMPATIENT.items()},
        "subscribe": topic,
        "startingOffsets": start,
        "failOnDataLoss": "false",
        "partition.discovery.interval.ms": "1",
    }
    parsed = parse_source_options(options, streaming=True)
    return StreamPlanner(KafkaBroker(parsed.config), parsed)


def plan_on(planner: StreamPlanner, plans: list[SourceOffsets]) -> None:
    """Add the next plan."""
    plans.append(planner.next(plans[-1], None))


def test_the_end_of_a_topic_that_was_exchanged_is_not_taken_for_its_namesakes(
    cluster: EmbeddedKafka,
) -> None:
    """A job waits for records up to there, which nobody has written, and passes over others."""
    plans: list[SourceOffsets] = []
    for number in range(TRIES):
        exchange = Exchange(cluster, f"exchanged-{number}")
        planner = planner_of(exchange.topic, exchange.options["bootstrap.servers"])
        plans[:] = [planner.next(planner.next(planner.first(), None), None)]
        assert plans[-1].positions == {exchange.partition: OLD_RECORDS}
        exchange.happen(threading.Thread(target=plan_on, args=(planner, plans)))
        # A plan of the old topic alone is right: the leader that lags was asked for the id too.
        is_of_old = plans[-1].topic_ids == {exchange.topic: exchange.old_id}
        has_lagged = exchange.end_listed >= OLD_RECORDS
        if has_lagged and exchange.acknowledged[0] == OLD_RECORDS and not is_of_old:
            break
    else:
        raise AssertionError(f"the leader never answered for the old topic in {TRIES} tries")

    positions = plans[-1].positions
    assert positions.get(exchange.partition, 0) == 0, "records that only the old topic had"
    exchange.wait_until_noticed()
    exchange.feed(NEW_RECORDS)
    end = exchange.end()

    def is_planned() -> bool:
        plans.append(planner.next(plans[-1], None))
        return plans[-1].positions == {exchange.partition: end}

    wait_until(is_planned, lambda: f"a plan up to {end} is expected, the newest is {plans[-1]}")
    assert plans[-1].topic_ids == {exchange.topic: exchange.id_shown()}


def test_a_new_query_starts_at_the_end_of_the_topic_that_is_there_now(
    cluster: EmbeddedKafka,
) -> None:
    """At the old one's it would wait for as many records as that had, and lose them."""
    for number in range(TRIES):
        exchange = Exchange(cluster, f"started-{number}")
        planner = planner_of(exchange.topic, exchange.options["bootstrap.servers"], "latest")
        exchange.happen(threading.Thread(target=planner.first))
        if exchange.end_listed >= OLD_RECORDS:
            break
    else:
        raise AssertionError(f"the leader never answered for the old topic in {TRIES} tries")
    (start,) = planner.first().positions.values()
    assert start <= NEW_RECORDS, "an offset that only the old topic had"
    assert planner.first().topic_ids == {exchange.topic: exchange.id_shown()}
