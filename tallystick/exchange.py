"""Batches, not rows, travel between tasks: finished Kafka record batches, routed to their writers.

A frame is one encoded record batch for one output partition. Every output partition has one writing
task per epoch. A writer gets its frames sorted by (source, sequence): the task that encoded them,
and the order in which it did. Rows of one input partition are read by one source task, so the order
per input partition, and with it per key, survives whatever Spark does to the order of blobs.

All writers must see the same attempt of a source. When Spark runs a source again after some writers
are done (shuffle files were lost), the new attempt may route rows elsewhere: a function of the user
that is not deterministic, or rows without a key. So an attempt draws a number, says it to every
writer, also to those that get no rows, and `check_same_attempts` compares.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tallystick.errors import EpochAbortedError
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
    attempt: int

    @property
    def topic_partition(self) -> TopicPartition:
        """Where the batch is written to."""
        return TopicPartition(self.topic, self.partition)


FRAME_DDL = (
    "target int, source int, sequence int, topic string, partition int, record_count int, "
    "data binary, attempt bigint"
)
"""The columns of a frame where it travels as a row."""

GROUP_BYTES = 8 << 20
GROUP_FRAMES = 64


def target_of(topic_partition: TopicPartition, task_count: int) -> int:
    """The writing task of an output partition."""
    return assign(topic_partition.topic, topic_partition.partition, task_count)


NO_TOPIC = ""


def last_frames(source: int, sequence: int, attempt: int, task_count: int) -> Iterator[Frame]:
    """What a source says to every writer at its end: that it was this attempt, with no rows."""
    for target in range(task_count):
        yield Frame(target, source, sequence, NO_TOPIC, 0, 0, b"", attempt)


def check_same_attempts(heard: Iterable[Iterable[tuple[int, int]]]) -> None:
    """Check that all writers got their rows from the same attempt of each source.

    Args:
        heard: per writer, the (source, attempt) pairs that it heard of.

    Raises:
        EpochAbortedError: a source was run again in between.
    """
    attempts: dict[int, int] = {}
    for pairs in heard:
        for source, attempt in pairs:
            if attempts.setdefault(source, attempt) != attempt:
                raise EpochAbortedError(
                    f"source task {source} ran a second time after some of its rows were written, "
                    f"and may have routed rows elsewhere: the epoch is aborted and runs again"
                )


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
