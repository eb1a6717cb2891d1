"""Where reading starts or ends, as a user says it; what it means is asked of Kafka, once."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tallystick.topic_partition import TopicPartition

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
        default: for all partitions that are not named; None: those are at `fallback`.
        partitions: times of single partitions.
        fallback: where a partition without such a record, or without a time, is; None: that is an
            error.
    """

    default: int | None
    partitions: Mapping[TopicPartition, int] = field(default_factory=dict)
    fallback: int | None = None


@dataclass(frozen=True, slots=True)
class AtCommitted:
    """Where a consumer group stands.

    Args:
        group: the group.
        fallback: where a partition is in which it has committed nothing; None: that is an error.
    """

    group: str
    fallback: int | None = None


Bound = AtOffsets | AtTime | AtCommitted
