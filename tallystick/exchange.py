"""Batches, not rows, travel between tasks: finished Kafka record batches, routed to their writers.

A frame is one encoded record batch for one output partition. Every output partition has one writing
task per epoch. A writer gets its frames sorted by (source, sequence): the task that encoded them,
and the order in which it did. Rows of one input partition are read by one source task, so the order
per input partition, and with it per key, survives whatever Spark does to the order of blobs.
"""

from collections.abc import Iterator
from typing import NamedTuple

from tallystick.source.assigner import assign
from tallystick.topic_partition import TopicPartition


class Frame(NamedTuple):
    """One encoded record batch on its way to the task that writes its partition."""

    target: int
    source: int
    sequence: int
    topic: str
    partition: int
    record_count: int
    data: bytes

    @property
    def topic_partition(self) -> TopicPartition:
        """Where the batch is written to."""
        return TopicPartition(self.topic, self.partition)


FRAME_DDL = (
    "target int, source int, sequence int, topic string, partition int, record_count int, "
    "data binary"
)
"""The columns of a frame where it travels as a row."""

GROUP_BYTES = 8 << 20
GROUP_FRAMES = 64


def target_of(topic_partition: TopicPartition, task_count: int) -> int:
    """The writing task of an output partition."""
    return assign(topic_partition.topic, topic_partition.partition, task_count)


def grouped(frames: Iterator[Frame]) -> Iterator[list[Frame]]:
    """Frames in groups that are worth a round trip, and small enough to hold."""
    group: list[Frame] = []
    size = 0
    for frame in frames:
        group.append(frame)
        size += len(frame.data)
        if size >= GROUP_BYTES or len(group) >= GROUP_FRAMES:
            yield group
            group, size = [], 0
    if group:
        yield group
