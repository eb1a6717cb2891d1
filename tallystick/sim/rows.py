"""The records of the simulated world: each says where it came from, so that all can be checked."""

from collections.abc import Mapping
from typing import NamedTuple

from tallystick.topic_partition import TopicPartition

SPREAD = (0, 1, 0, 1, 0, 1, 2)
NO_KEY = -1
OUTPUT = tuple(TopicPartition("out", partition) for partition in range(3))


class Row(NamedTuple):
    """One output record; which input record it stands for, and which epoch wrote it.

    Behind a keyed step, also which key it was counted under, and the how manyth it was.
    """

    lineage: str
    epoch: int
    source: TopicPartition
    offset: int
    foreign: bool = False  # written by an attempt that must not count
    key: int = NO_KEY
    nth: int = 0


def output_partition(source: TopicPartition, offset: int) -> int:
    """Where the record of an input offset goes: mostly to two of three partitions."""
    return SPREAD[(3 * offset + source.partition + len(source.topic)) % len(SPREAD)]


def key_of(source: TopicPartition, offset: int) -> int:
    """The key of an input record, unless the user's function draws another one."""
    return (5 * offset + 2 * source.partition + offset // 3 + len(source.topic)) % len(SPREAD)


def key_partition(key: int) -> int:
    """Where all rows of a key go, so that their order can be seen."""
    return SPREAD[key]


def rows_between(
    starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
) -> list[Row]:
    """What input records become, of no epoch in particular."""
    return [
        Row("", 0, source, offset)
        for source, end in ends.items()
        for offset in range(starts[source], end)
    ]
