"""Topics as people look at them: made, and read to their ends or followed, record by record.

For the command line: a pipeline plans its splits, and reads them as Arrow batches (`fetcher`).
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from tallystick.arguments import near
from tallystick.codec.records.plain import PlainRecord, plain_records
from tallystick.errors import OptionError
from tallystick.kafka import cluster, protocol
from tallystick.kafka.client import AnyBroker, Client
from tallystick.kafka.error_policy import Attempts, kafka_message
from tallystick.kafka.fetch_request import Part
from tallystick.kafka.fetcher import FETCH_BYTES_MAX, Turns
from tallystick.source.subscription import EARLIEST, LATEST, SKIP, LossPolicy
from tallystick.text import shortened
from tallystick.values import SplitRange, TopicPartition

LOOK_AGAIN_S = 0.2
"""The pause before the ends of a topic that is followed are looked up again."""
EXPIRED_IS_NO_LOSS = LossPolicy(expired=SKIP)
"""A reader of all that is there goes on at the first record that is left."""


def create_topic(
    client: Client,
    name: str,
    partitions: int = 1,
    replication_factor: int = -1,
    config: Mapping[str, str] | None = None,
) -> None:
    """Create a topic unless it exists, and return when every partition has a leader.

    Args:
        client: of the cluster.
        name: the topic.
        partitions: the number of partitions.
        replication_factor: replicas of each; -1 is the broker's default.
        config: topic settings, such as `retention.ms`.

    Raises:
        OptionError: the broker refused name, numbers or settings.
        AuthorizationError: CREATE is missing.
        BrokerUnavailableError: the deadline passed.
    """
    topic_class = protocol.CreateTopicsRequest.CreatableTopic
    config_class = topic_class.CreatableTopicConfig

    def make() -> Any:
        settings = [config_class(name=key, value=value) for key, value in (config or {}).items()]
        topic = topic_class(
            name=name,
            num_partitions=partitions,
            replication_factor=replication_factor,
            assignments=[],
            configs=settings,
        )
        return protocol.CreateTopicsRequest(
            topics=[topic], timeout_ms=client.config.request_timeout_ms * 3 // 4, min_version=4
        )

    def codes(response: Any) -> list[tuple[int, str]]:
        return [
            (topic.error_code, f"topic {topic.name!r}{kafka_message(topic)}")
            for topic in response.topics
        ]

    refused = frozenset(
        {
            "InvalidTopic",
            "InvalidPartitions",
            "InvalidReplicationFactor",
            "InvalidConfiguration",
            "PolicyViolation",
            "TopicAlreadyExists",
        }
    )
    answer = client.call(make, AnyBroker(), codes, accept=refused).topics[0]
    error_name = protocol.error_name(answer.error_code)
    if error_name not in (None, "TopicAlreadyExists"):
        raise OptionError(f"topic {name!r} cannot be created: {error_name}{kafka_message(answer)}.")
    _wait_for_leaders(client, name)


def _wait_for_leaders(client: Client, name: str) -> None:
    attempts = Attempts(client.deadline(), "Metadata", f"topic {name!r}")
    while True:
        topic = client.metadata([name]).topics[0]
        error_name = protocol.error_name(topic.error_code)
        leaderless = [part for part in topic.partitions if part.leader_id < 0]
        if error_name is None and not leaderless:
            return
        attempts.pause(error_name or "LeaderNotAvailable")


def partitions_of(client: Client, topic: str) -> list[TopicPartition]:
    """Return the partitions of an existing topic.

    Raises:
        OptionError: there is no such topic.
        AuthorizationError: the topic may not be described.
        BrokerUnavailableError: the deadline passed.
    """
    topics = cluster.describe_topics(client, None)
    if topic not in topics:  # not among those that may be listed: ask for the topic itself
        known = sorted(topics)
        topics = cluster.describe_topics(client, [topic])
        if topic not in topics:
            there = f"It has {shortened(known)}." if known else "It has no topic yet."
            raise OptionError(
                f"topic {topic!r} does not exist at {client.config.bootstrap_servers}."
                f"{near(topic, known)} {there} `tallystick topic create {topic}` makes it."
            )
    return [TopicPartition(topic, index) for index in range(topics[topic].partition_count)]


def read_topic(
    client: Client, topic: str, *, follow: bool
) -> Iterator[list[tuple[int, PlainRecord]]]:
    """Yield the committed records of a topic with their partitions, some at a time.

    Records of a partition come in their order; partitions take turns.

    Args:
        client: of the cluster.
        topic: an existing one.
        follow: go on at the ends, with whatever is committed later; else the ends at the beginning
            of the call are the ends, and records of transactions that are open then are not waited
            for.

    Raises:
        OptionError: there is no such topic.
        CorruptRecordError: bytes in the log are damaged.
        AuthorizationError: READ on the topic is missing.
        BrokerUnavailableError: nothing new came for a partition within delivery.timeout.ms.
        DataLossError: the topic was deleted meanwhile, or a log became shorter.
    """
    partitions = partitions_of(client, topic)
    positions = cluster.list_offsets(client, partitions, EARLIEST)
    while True:
        ends = cluster.list_offsets(client, partitions, LATEST)
        splits = [
            SplitRange(topic, one.partition, positions[one], max(positions[one], ends[one]))
            for one in partitions
        ]
        positions = {split.topic_partition: split.stop_offset for split in splits}
        yield from _read(client, splits)
        if not follow:
            return
        time.sleep(LOOK_AGAIN_S)


def _read(client: Client, splits: list[SplitRange]) -> Iterator[list[tuple[int, PlainRecord]]]:
    turns = Turns(client, splits, EXPIRED_IS_NO_LOSS, FETCH_BYTES_MAX, "read_committed")
    parts: deque[Part] = deque()
    try:
        while turns.receive(parts):
            while parts:
                part = parts.popleft()
                split = part.cursor.split
                records = plain_records(
                    part.records,
                    topic_partition=split.topic_partition,
                    start_offset=part.start,
                    stop_offset=split.stop_offset,
                    aborted=part.aborted,
                )
                if rows := [(split.partition, record) for record in records]:
                    shown_s = time.monotonic()
                    yield rows
                    turns.forgive(time.monotonic() - shown_s)
    finally:
        turns.close()
