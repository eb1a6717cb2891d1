"""Which partitions a subscription means right now, and where they begin and end."""

import re
from collections.abc import Collection

from tallystick.errors import OptionError
from tallystick.kafka.broker import KafkaBroker
from tallystick.options import (
    LATEST,
    Assignment,
    OffsetSpec,
    Subscription,
    TopicList,
    TopicPattern,
)
from tallystick.topic_partition import TopicPartition


def subscribed(broker: KafkaBroker, subscription: Subscription) -> list[TopicPartition]:
    """The partitions that a subscription covers at this moment, sorted.

    Raises:
        OptionError: a named topic or partition does not exist.
    """
    match subscription:
        case TopicList(topics):
            counts = broker.partition_counts(topics)
        case TopicPattern(pattern):
            wanted = re.compile(pattern)
            counts = broker.partition_counts(t for t in broker.topics() if wanted.fullmatch(t))
        case Assignment(partitions):
            _check_assigned(broker, partitions)
            return list(partitions)
    return sorted(TopicPartition(t, i) for t, count in counts.items() for i in range(count))


def resolve(
    broker: KafkaBroker, spec: OffsetSpec, partitions: Collection[TopicPartition]
) -> dict[TopicPartition, int]:
    """Offsets for markers: what "earliest" and "latest" mean now, per partition.

    Raises:
        OptionError: the spec names a partition that is not read.
    """
    strangers = sorted(set(spec.partitions) - set(partitions))
    if strangers:
        raise OptionError(
            f"offsets are given for {', '.join(map(str, strangers))}, which the query does not "
            f"read: remove them, or subscribe to them"
        )
    asked = {p: spec.partitions.get(p, spec.default) for p in partitions}
    resolved = {p: offset for p, offset in asked.items() if offset >= 0}
    for marker in {offset for offset in asked.values() if offset < 0}:
        resolved |= broker.list_offsets([p for p, o in asked.items() if o == marker], marker)
    return resolved


def ending_positions(
    broker: KafkaBroker, spec: OffsetSpec, partitions: Collection[TopicPartition]
) -> dict[TopicPartition, int]:
    """Where reading ends; never beyond what is committed now.

    Raises:
        OptionError: an ending offset lies behind the end of the log.
    """
    stop = resolve(broker, spec, partitions)
    if not spec.partitions:
        return stop
    latest = broker.list_offsets(partitions, LATEST)
    for partition, offset in stop.items():
        if offset > latest[partition]:
            raise OptionError(
                f"endingOffsets: {partition} is to end at {offset}, but its log ends at "
                f"{latest[partition]}: name an offset up to that, or -1 for the end"
            )
    return stop


def _check_assigned(broker: KafkaBroker, partitions: Collection[TopicPartition]) -> None:
    counts = broker.partition_counts({p.topic for p in partitions})
    for partition in partitions:
        if partition.partition >= counts[partition.topic]:
            raise OptionError(
                f"assign names {partition}, but the topic has {counts[partition.topic]} "
                f"partitions, 0 to {counts[partition.topic] - 1}"
            )
