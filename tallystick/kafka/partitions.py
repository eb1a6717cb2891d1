"""Partitions as Kafka's messages have them: by topic."""

from collections.abc import Iterable, Iterator
from typing import Any

from tallystick.values import TopicPartition


def by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    """Partition numbers by topic, as Kafka's requests want them."""
    found: dict[str, list[int]] = {}
    for partition in partitions:
        found.setdefault(partition.topic, []).append(partition.partition)
    return found


def partitions_of(response: Any) -> Iterator[tuple[TopicPartition, Any]]:
    """The parts of a response that has them by topic name, as most of Kafka's do."""
    for topic in response.topics:
        for part in topic.partitions:
            yield TopicPartition(topic.name, part.partition_index), part


def shortened(partitions: Iterable[TopicPartition], count_max: int = 5) -> str:
    """Partitions in words, of many only the first."""
    names = [str(partition) for partition in sorted(partitions)]
    more = f" and {len(names) - count_max} more" if len(names) > count_max else ""
    return ", ".join(names[:count_max]) + more
