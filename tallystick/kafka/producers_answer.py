"""The answer to DescribeProducers, of which only a few of very many entries are wanted.

A leader answers with every producer that wrote to a partition within a day
(producer.id.expiration.ms), and the request has no way to name some. So the entries stay bytes, and
one look through an array finds those of a producer.

Source of the format: DescribeProducersResponse.json of Kafka, version 0.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_ENTRY = np.dtype(
    [
        ("producer_id", ">i8"),
        ("producer_epoch", ">i4"),
        ("last_sequence", ">i4"),
        ("last_timestamp", ">i8"),
        ("coordinator_epoch", ">i4"),
        ("current_txn_start_offset", ">i8"),
        ("tags", "u1"),
    ]
)
"""An entry without tagged fields, of which Kafka defines none."""


class ProducerState(NamedTuple):
    """One entry: what a leader keeps of a producer."""

    producer_id: int
    producer_epoch: int
    last_sequence: int
    last_timestamp: int
    coordinator_epoch: int
    current_txn_start_offset: int


@dataclass(frozen=True)
class ProducerStates(Sequence[ProducerState]):
    """The entries of one partition."""

    entries: NDArray[np.void] = field(repr=False)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: Any) -> Any:
        return ProducerState(*self.entries[index].item()[:-1])

    def of(self, producer_id: int) -> Iterator[ProducerState]:
        """Yield the entries of one producer."""
        for index in np.flatnonzero(self.entries["producer_id"] == producer_id).tolist():
            yield self[index]


class PartitionAnswer(NamedTuple):
    """The answer about one partition."""

    partition_index: int
    error_code: int
    error_message: str | None
    active_producers: ProducerStates


class TopicAnswer(NamedTuple):
    """The answer about one topic."""

    name: str
    partitions: tuple[PartitionAnswer, ...]


class ProducersAnswer(NamedTuple):
    """The whole answer."""

    throttle_time_ms: int
    topics: tuple[TopicAnswer, ...]


def decode_producers(body: memoryview) -> ProducersAnswer:
    """Read the body of an answer, behind its header.

    Raises:
        ValueError: it is no such answer, or has tagged fields.
    """
    reader = _Reader(body)
    throttle_ms = reader.number(">i")
    topics = tuple(_topic(reader) for _ in range(reader.length()))
    reader.no_tags()
    return ProducersAnswer(throttle_ms, topics)


def _topic(reader: "_Reader") -> TopicAnswer:
    name = reader.text()
    if name is None:
        raise ValueError("a topic without a name")
    partitions = tuple(_partition(reader) for _ in range(reader.length()))
    reader.no_tags()
    return TopicAnswer(name, partitions)


def _partition(reader: "_Reader") -> PartitionAnswer:
    index, code = reader.number(">i"), reader.number(">h")
    message = reader.text()
    entries = np.frombuffer(reader.take(reader.length() * _ENTRY.itemsize), _ENTRY)
    if entries["tags"].any():
        raise ValueError("an entry with tagged fields")
    reader.no_tags()
    return PartitionAnswer(index, code, message, ProducerStates(entries))


class _Reader:
    """Reads the fields of Kafka's compact format."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def take(self, size: int) -> memoryview:
        """Return so many bytes."""
        if not 0 <= size <= len(self._data) - self._at:
            raise ValueError(f"{size} bytes, and {len(self._data) - self._at} are left")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, form: str) -> int:
        """Return a number of fixed size."""
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return int(value)

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 35, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError("a varint of more than 5 bytes")

    def length(self) -> int:
        """Return the length of an array; null is none of ours."""
        length = self._varint() - 1
        if length < 0:
            raise ValueError("an array is null")
        return length

    def text(self) -> str | None:
        """Return a text; None for null."""
        length = self._varint() - 1
        return None if length < 0 else bytes(self.take(length)).decode()

    def no_tags(self) -> None:
        """Pass over an empty section of tagged fields."""
        if self._varint():
            raise ValueError("tagged fields")
