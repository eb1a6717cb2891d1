"""The records of the simulated world: each says where it came from, so that all can be checked."""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa

from tallystick.codec.records.decoder import decode
from tallystick.codec.records.encoder import EncodedBatch, encode
from tallystick.values import TopicPartition

SPREAD = (0, 1, 0, 1, 0, 1, 2)
NO_KEY = -1
RULES = TopicPartition("rules/rules", 0)
"""The topic of a table, as it is named among the partitions of all inputs: it has no rows."""
OUTPUT = tuple(TopicPartition("out", partition) for partition in range(3))


class Row(NamedTuple):
    """One output record; which input record it stands for, and which epoch wrote it.

    After a keyed step, also which key it was counted under, and the how manyth it was.
    """

    lineage: str
    epoch: int
    source: TopicPartition
    offset: int
    foreign: bool = False  # written by an attempt that must not count
    key: int = NO_KEY
    nth: int = 0

    def to_value(self) -> bytes:
        """Return the value of its record."""
        return json.dumps(self).encode()

    @classmethod
    def from_value(cls, value: bytes) -> "Row":
        """Read back what `to_value` made."""
        lineage, epoch, source, *rest = json.loads(value)
        return cls(lineage, epoch, TopicPartition(*source), *rest)


def to_batch(rows: Sequence[Row]) -> EncodedBatch:
    """Encode rows as one record batch."""
    values = pa.record_batch({"value": pa.array([row.to_value() for row in rows], pa.binary())})
    (batch,) = encode(values, now_ms=0)
    return batch


def rows_of(data: bytes, partition: TopicPartition, record_count: int) -> tuple[Row, ...]:
    """Decode a record batch that has its producer."""
    batch = decode(
        data,
        topic_partition=partition,
        start_offset=0,
        stop_offset=record_count,
        aborted=None,
        headers=False,
    ).batch
    return tuple(map(Row.from_value, batch["value"].to_pylist()))


def output_partition(source: TopicPartition, offset: int) -> int:
    """Where the record of an input offset goes: mostly to two of three partitions."""
    return SPREAD[(3 * offset + source.partition + len(source.topic)) % len(SPREAD)]


def key_of(source: TopicPartition, offset: int) -> int:
    """The key of an input record, unless the user's function draws another one."""
    return (5 * offset + 2 * source.partition + offset // 3 + len(source.topic)) % len(SPREAD)


def time_of(source: TopicPartition, offset: int) -> int:
    """The event time of an input record: it grows, and one of five comes later than those after."""
    is_delayed = (offset + source.partition) % 5 == 3
    return 4 * offset + source.partition - 13 * is_delayed


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
        if source != RULES
        for offset in range(starts[source], end)
    ]
