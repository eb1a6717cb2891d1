"""The topics of a source, by name, by pattern or as single partitions, and where reading starts.

Bounds are kept as the user gave them; Kafka is asked once for their offsets.

And the policies for records that were lost before they were read, and for unreadable records. Each
policy other than `fail` gives something up, so a person chooses it; the log says what is given up,
with the partition and from which offset to which.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from tallystick.arguments import checked, not_one_of
from tallystick.errors import OptionError
from tallystick.values import TopicPartition

FAIL = "fail"
SKIP = "skip"
KEEP = "keep"
DROP = "drop"
RESTART = "restart"
RESUME = "resume"

ON_EXPIRED = (FAIL, SKIP)
ON_REMOVED = (FAIL, KEEP, DROP)
ON_RECREATED = (FAIL, RESTART)
ON_TRUNCATED = (FAIL, RESUME)
ON_UNREADABLE = (FAIL, SKIP)
LOSS_WORDS = {
    "expired": ON_EXPIRED,
    "removed": ON_REMOVED,
    "recreated": ON_RECREATED,
    "truncated": ON_TRUNCATED,
    "unreadable": ON_UNREADABLE,
}
"""The words that each field of `LossPolicy` takes."""

KEEP_MS = 3_600_000
"""The time for which `keep` holds the position of a partition that is gone."""


@dataclass(frozen=True)
class TopicList:
    """All partitions of the listed topics."""

    topics: tuple[str, ...]

    @property
    def named(self) -> tuple[str, ...]:
        """The topics to ask the cluster for, by name."""
        return self.topics

    def partitions(self, topic: str, count: int) -> Sequence[int]:
        """Return the partitions to read of a topic's `count`; none where it is not subscribed."""
        return range(count) if topic in self._topics else ()

    def covers(self, partition: TopicPartition) -> bool:
        """True if a partition is read."""
        return partition.topic in self._topics

    @cached_property
    def _topics(self) -> frozenset[str]:
        return frozenset(self.topics)


@dataclass(frozen=True, slots=True)
class TopicPattern:
    """All topics whose full name matches, later topics included, internal topics never."""

    pattern: str

    @property
    def named(self) -> None:
        """None, to ask the cluster for all topics: they are matched here, in one syntax."""
        return

    def partitions(self, topic: str, count: int) -> Sequence[int]:
        """Return the partitions to read of a topic's `count`; none where it does not match."""
        return range(count) if _matches(self.pattern, topic) else ()

    def covers(self, partition: TopicPartition) -> bool:
        """True if a partition is read."""
        return _matches(self.pattern, partition.topic)


@dataclass(frozen=True)
class Assignment:
    """Exactly the listed partitions."""

    assigned: tuple[TopicPartition, ...]

    @property
    def named(self) -> tuple[str, ...]:
        """The topics to ask the cluster for, by name."""
        return tuple(self._by_topic)

    def partitions(self, topic: str, count: int) -> Sequence[int]:
        """Return the partitions to read of a topic's `count`."""
        return [index for index in self._by_topic.get(topic, ()) if index < count]

    def covers(self, partition: TopicPartition) -> bool:
        """True if a partition is read."""
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


_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")


INTERNAL_TOPICS = (
    "__consumer_offsets",
    "__transaction_state",
    "__share_group_state",
    "__cluster_metadata",
)
"""Topics of Kafka's own records."""


def topic_problem(name: object) -> str:
    """Return the reason why Kafka can have no topic of a name; "" if it can.

    Source: Kafka's `Topic.validate`.
    """
    if isinstance(name, str) and _TOPIC.fullmatch(name) and name not in (".", ".."):
        return ""
    return "expected a topic's name: up to 249 letters, digits, '.', '_' and '-', not '.' or '..'"


Subscription = TopicList | TopicPattern | Assignment


@lru_cache(maxsize=100_000)
def _matches(pattern: str, topic: str) -> bool:
    return re.fullmatch(pattern, topic) is not None


EARLIEST = -2
"""Kafka's own marker for the first offset that is left, in options and in ListOffsets."""
LATEST = -1
"""Kafka's own marker for the end of the log."""


@dataclass(frozen=True, slots=True)
class AtOffsets:
    """A marker for all partitions, and single ones that differ (a marker, or an offset)."""

    default: int
    partitions: Mapping[TopicPartition, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AtTime:
    """The first record at or after a time, in ms since 1970.

    Args:
        default: the time of all partitions that are not named; None: they have no time, which a
            start refuses, and an end takes for the end of the log.
        partitions: times of single partitions.
        fallback: the marker of a partition without such a record; None: that is an error.
    """

    default: int | None
    partitions: Mapping[TopicPartition, int] = field(default_factory=dict)
    fallback: int | None = None


@dataclass(frozen=True, slots=True)
class AtCommitted:
    """The committed positions of a consumer group.

    Args:
        group: the group.
        fallback: the marker of a partition in which the group has committed nothing; None: that is
            an error.
    """

    group: str
    fallback: int | None = None


Bound = AtOffsets | AtTime | AtCommitted


@dataclass(frozen=True, slots=True)
class FoundTopic:
    """A topic as Kafka lists it now.

    Args:
        topic_id: Kafka's own id of the topic (KIP-516), 22 characters of base64url; it
            changes when a topic is deleted and created again. "" where a broker gives none.
        partition_count: how many partitions it has.
    """

    topic_id: str
    partition_count: int


@checked
@dataclass(frozen=True, slots=True)
class LossPolicy:
    """One choice per way in which records can be lost; the default is to stop.

    Args:
        expired: `fail`, or `skip`: go on at the first record that is left.
        removed: `fail`; `keep`: hold the position between epochs for `keep_ms`, then drop it (an
            epoch that was planned before fails); `drop`: at once.
        recreated: `fail`, or `restart`: give up what was unread in the old topic, and read the new
            one from its beginning.
        truncated: `fail`, or `resume`: go on at the new end of the log.
        keep_ms: see `removed`.
        unreadable: `fail`, or `skip`: go on after a record batch whose checksum is right and that
            cannot be read, since a faulty producer wrote it so.

    Raises:
        OptionError: a word is unknown, or `keep_ms` is no number from 0.
    """

    expired: str = FAIL
    removed: str = FAIL
    recreated: str = FAIL
    truncated: str = FAIL
    keep_ms: int = KEEP_MS
    unreadable: str = FAIL

    def __post_init__(self) -> None:
        for name, words in LOSS_WORDS.items():
            if getattr(self, name) not in words:
                raise not_one_of(name, getattr(self, name), words, of="LossPolicy")
        if self.keep_ms < 0:
            raise OptionError(
                f"LossPolicy(keep_ms={self.keep_ms}): expected ms from 0, for how long "
                f"removed='keep' holds a position"
            )


LENIENT = LossPolicy(expired=SKIP, removed=DROP, recreated=RESTART, truncated=RESUME)
"""The meaning of Spark's `failOnDataLoss=false`."""
