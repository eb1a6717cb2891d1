"""What the tests on a real Kafka share: who writes, who reads back."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import confluent_kafka

from tallystick.kafka import cluster, protocol
from tallystick.kafka.audit import transaction_state
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.client import AnyBroker, Client
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.error_policy import kafka_message
from tallystick.kafka.fetcher import fetch
from tallystick.kafka.protocol import partitions_of
from tallystick.kafka.writer import PartitionWriter
from tallystick.source.subscription import LATEST
from tallystick.values import ProducedRange, Producer, SplitRange, TopicPartition

GROUP = "tallystick-test-token"
numbers = itertools.count()
Write = Callable[..., tuple[ProducedRange, ...]]


def continue_at(writer: PartitionWriter, partition: TopicPartition, sequence: int) -> None:
    """Make a writer what no writer of ours is: one that goes on where another one stopped."""
    from tallystick.codec.output_records import PartitionLog

    if writer._adds_partitions:
        writer._add_partitions([partition])
    writer._logs[partition] = PartitionLog(next_sequence=sequence)


def commit(broker: KafkaBroker, producer: Producer) -> Producer:
    """Commit, and wait until readers see it: Kafka answers before it has written its markers."""
    following = broker.commit_transaction(producer)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        state = transaction_state(broker.client, producer.transactional_id)
        if not state.transaction_state.startswith("Prepare"):
            break
        time.sleep(0.01)
    return following


def read_back(config: KafkaConfig, topic: str, isolation: str = "read_committed") -> list[str]:
    """What an independent client finds, each partition to its end; sorted."""
    return sorted(read_in_order(config, topic, isolation))


def read_in_order(config: KafkaConfig, topic: str, isolation: str = "read_committed") -> list[str]:
    """The same, in the order of each partition."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": config.bootstrap_servers,
            "group.id": "audit",
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "check.crcs": True,
        }
    )
    parts = list(consumer.list_topics(topic).topics[topic].partitions)
    consumer.assign([confluent_kafka.TopicPartition(topic, part, 0) for part in parts])
    texts, ended = [], 0
    while ended < len(parts):
        message = consumer.poll(20)
        assert message is not None, f"only {texts} within 20 s"
        if message.error() is None:
            texts.append(message.value().decode())
        else:
            ended += message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF
    consumer.close()
    return texts


def read(client: Client, topic: str, stop: int, isolation: Any = "read_committed") -> list[str]:
    batches = fetch(client, SplitRange(topic, 0, 0, stop), isolation=isolation)
    return [value.decode() for batch in batches for value in batch.column("value").to_pylist()]


def end_of(client: Client, partition: TopicPartition) -> int:
    offsets = cluster.list_offsets(client, [partition], LATEST, isolation=cluster.READ_UNCOMMITTED)
    return offsets[partition]


def delete_topic(client: Client, name: str) -> None:
    """Delete a topic; one that does not exist is fine."""

    def make() -> Any:
        return protocol.DeleteTopicsRequest(
            topic_names=[name], timeout_ms=client.config.request_timeout_ms * 3 // 4, max_version=5
        )

    def codes(response: Any) -> list[tuple[int, str]]:
        return [
            (topic.error_code, f"topic {name!r}{kafka_message(topic)}")
            for topic in response.responses
        ]

    client.call(make, AnyBroker(), codes, accept=frozenset({"UnknownTopicOrPartition"}))


def delete_before(client: Client, partition: TopicPartition, offset: int) -> None:
    """DeleteRecords; at -1 up to the end."""
    topic_class = protocol.DeleteRecordsRequest.DeleteRecordsTopic
    part_class = topic_class.DeleteRecordsPartition

    def make(partitions: list[TopicPartition]) -> Any:
        parts = [
            part_class(partition_index=partition.partition, offset=offset)
            for partition in partitions
        ]
        topics = [topic_class(name=partition.topic, partitions=parts)]
        return protocol.DeleteRecordsRequest(topics=topics, timeout_ms=5_000)

    client.ask_leaders([partition], make, partitions_of)
