"""The records of the simulated world: each says where it came from, so that all can be checked."""

from typing import NamedTuple

from tallystick.topic_partition import TopicPartition

SPREAD = (0, 1, 0, 1, 0, 1, 2)


class Row(NamedTuple):
    """One output record; which input record it stands for, and which epoch wrote it."""

    lineage: str
    epoch: int
    source: TopicPartition
    offset: int
    foreign: bool = False  # written by an attempt that must not count


def output_partition(source: TopicPartition, offset: int) -> int:
    """Where the record of an input offset goes: mostly to two of three partitions."""
    return SPREAD[(3 * offset + source.partition + len(source.topic)) % len(SPREAD)]
