"""The offsets of a consumer group with their metadata, as requests carry them."""

from collections.abc import Iterable, Mapping
from typing import Any

from tallystick.kafka import protocol
from tallystick.kafka.client import Client, Coordinator
from tallystick.kafka.error_policy import kafka_message
from tallystick.kafka.protocol import by_topic
from tallystick.values import TopicPartition

NO_OFFSET = -1
"""The offset that Kafka answers where a group has committed none."""

Offsets = Mapping[TopicPartition, tuple[int, str]]
"""(offset, metadata) by partition."""


def fetch(
    client: Client,
    group: str,
    partitions: Iterable[TopicPartition] | None,
    *,
    stable: bool = True,
    deadline: float | None = None,
) -> dict[TopicPartition, tuple[int, str]]:
    """Return a group's committed offsets and metadata; a partition without any is absent.

    Args:
        client: of the cluster.
        group: which.
        partitions: of them; None: of all whose topics may be described.
        stable: wait for the end of a transaction that has staged others (KIP-447); without it the
            answer hides them.
        deadline: as in `Client.call`.

    Raises:
        AuthorizationError: the group or a named topic may not be described.
        BrokerUnavailableError: the deadline passed.
    """
    group_class = protocol.OffsetFetchRequest.OffsetFetchRequestGroup
    topics = None if partitions is None else by_topic(partitions)
    if topics is not None and not topics:
        return {}

    def make() -> Any:
        wanted_topics = None
        if topics is not None:
            topic_class = group_class.OffsetFetchRequestTopics
            wanted_topics = [
                topic_class(name=topic, partition_indexes=indexes)
                for topic, indexes in topics.items()
            ]
        return protocol.OffsetFetchRequest(
            groups=[group_class(group_id=group, topics=wanted_topics)],
            require_stable=stable,
            version=8,
        )

    def codes(response: Any) -> list[tuple[int, str]]:
        about = f"group {group!r}"
        return [(answer.error_code, about) for answer in response.groups] + [
            (part.error_code, f"{about}, {topic.name}-{part.partition_index}")
            for answer in response.groups
            for topic in answer.topics
            for part in topic.partitions
        ]

    response = client.call(make, Coordinator("group", group), codes, deadline=deadline)
    return {
        TopicPartition(topic.name, part.partition_index): (
            int(part.committed_offset),
            part.metadata or "",
        )
        for answer in response.groups
        for topic in answer.topics
        for part in topic.partitions
        if part.committed_offset != NO_OFFSET
    }


def committing(request_class: Any, offsets: Offsets) -> list[Any]:
    """Return the topics of a request that commits offsets, whether in a transaction or not."""
    name = request_class.__name__
    topic_class = getattr(request_class, f"{name}Topic")
    part_class = getattr(topic_class, f"{name}Partition")
    parts: dict[str, list[Any]] = {}
    for partition, (offset, metadata) in sorted(offsets.items()):
        part = part_class(
            partition_index=partition.partition,
            committed_offset=offset,
            committed_leader_epoch=-1,
            committed_metadata=metadata,
        )
        parts.setdefault(partition.topic, []).append(part)
    return [topic_class(name=topic, partitions=partitions) for topic, partitions in parts.items()]


def codes_of(response: Any) -> list[tuple[int, str]]:
    """Return the error codes of the answer to a request that commits offsets."""
    return [
        (part.error_code, f"{topic.name}-{part.partition_index}{kafka_message(part)}")
        for topic in response.topics
        for part in topic.partitions
    ]
