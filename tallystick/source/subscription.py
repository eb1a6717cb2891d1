"""What a source reads: topics by name, by pattern, or single partitions."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from tallystick.topic_partition import TopicPartition


@dataclass(frozen=True)
class TopicList:
    """Read these topics, all partitions."""

    topics: tuple[str, ...]

    @property
    def named(self) -> tuple[str, ...]:
        """The topics to ask the cluster for, by name."""
        return self.topics

    def partitions(self, topic: str, count: int) -> Sequence[int]:
        """Those of a topic's `count` partitions that are read; none where it is not subscribed."""
        return range(count) if topic in self._topics else ()

    def covers(self, partition: TopicPartition) -> bool:
        """Whether a partition is read."""
        return partition.topic in self._topics

    @cached_property
    def _topics(self) -> frozenset[str]:
        return frozenset(self.topics)


@dataclass(frozen=True, slots=True)
class TopicPattern:
    """Read all topics whose whole name matches, those created later too; internal ones never."""

    pattern: str

    @property
    def named(self) -> None:
        """The cluster is asked for all topics: matching is done here, in one syntax."""
        return

    def partitions(self, topic: str, count: int) -> Sequence[int]:
        """Those of a topic's `count` partitions that are read; none where it does not match."""
        return range(count) if _matches(self.pattern, topic) else ()

    def covers(self, partition: TopicPartition) -> bool:
        """Whether a partition is read."""
        return _matches(self.pattern, partition.topic)


@dataclass(frozen=True)
class Assignment:
    """Read exactly these partitions."""

    assigned: tuple[TopicPartition, ...]

    @property
    def named(self) -> tuple[str, ...]:
        """The topics to ask the cluster for, by name."""
        return tuple(self._by_topic)

    def partitions(self, topic: str, count: int) -> Sequence[int]:
        """Those of a topic's `count` partitions that are read."""
        return [index for index in self._by_topic.get(topic, ()) if index < count]

    def covers(self, partition: TopicPartition) -> bool:
        """Whether a partition is read."""
        return partition in self._assigned

    @cached_property
    def _assigned(self) -> frozenset[TopicPartition]:
        return frozenset(self.assigned)

    @cached_property
    def _by_topic(self) -> Mapping[str, list[int]]:
        by_topic: dict[str, list[int]] = {}
        for topic, index in self.assigned:
            by_topic.setdefault(topic, []).append(index)
        return by_topic


Subscription = TopicList | TopicPattern | Assignment


@lru_cache(maxsize=100_000)
def _matches(pattern: str, topic: str) -> bool:
    return re.fullmatch(pattern, topic) is not None
