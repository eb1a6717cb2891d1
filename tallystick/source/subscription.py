"""What a source reads: topics by name, by pattern, or single partitions."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tallystick.topic_partition import TopicPartition


@dataclass(frozen=True, slots=True)
class TopicList:
    """Read these topics, all partitions."""

    topics: tuple[str, ...]

    @property
    def named(self) -> tuple[str, ...]:
        """The topics to ask the cluster for, by name."""
        return self.topics

    def partitions(self, topic: str, count: int) -> Sequence[int]:
        """Those of a topic's `count` partitions that are read; none where it is not subscribed."""
        return range(count) if topic in self.topics else ()

    def covers(self, partition: TopicPartition) -> bool:
        """Whether a partition is read."""
        return partition.topic in self.topics


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


@dataclass(frozen=True, slots=True)
class Assignment:
    """Read exactly these partitions."""

    assigned: tuple[TopicPartition, ...]

    @property
    def named(self) -> tuple[str, ...]:
        """The topics to ask the cluster for, by name."""
        return tuple(dict.fromkeys(partition.topic for partition in self.assigned))

    def partitions(self, topic: str, count: int) -> Sequence[int]:
        """Those of a topic's `count` partitions that are read."""
        return [p.partition for p in self.assigned if p.topic == topic and p.partition < count]

    def covers(self, partition: TopicPartition) -> bool:
        """Whether a partition is read."""
        return partition in self.assigned


Subscription = TopicList | TopicPattern | Assignment


@lru_cache(maxsize=100_000)
def _matches(pattern: str, topic: str) -> bool:
    return re.fullmatch(pattern, topic) is not None
