"""Record batches of one partition in the sequence of their producer: written, and to be written.

A batch that Kafka refuses as too large becomes smaller ones, which take the numbers of the whole.
"""

from collections import deque
from dataclasses import dataclass, field

from tallystick.codec.output_records import divided
from tallystick.codec.records.encoder import EncodedBatch, stamp
from tallystick.values import Producer, TopicPartition

SEQUENCE_MASK = 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class NumberedBatch:
    """A batch with a place in the producer's sequence; the bytes never change again."""

    sequence: int
    record_count: int
    data: bytes = field(repr=False)


@dataclass(slots=True)
class PartitionLog:
    """The batches of one partition: written, and still to be written."""

    pending: deque[NumberedBatch] = field(default_factory=deque)
    next_sequence: int = 0
    record_count: int = 0
    first_offset: int | None = None
    last_batch: NumberedBatch | None = None
    last_base_offset: int = -1

    def add(self, producer: Producer, encoded: EncodedBatch) -> None:
        """Assign its sequence number to a batch."""
        data = stamp(encoded.data, producer, self.next_sequence)
        self.pending.append(NumberedBatch(self.next_sequence, encoded.record_count, data))
        self.next_sequence = (self.next_sequence + encoded.record_count) & SEQUENCE_MASK

    def divide(self, producer: Producer, partition: TopicPartition, limit: int | None) -> None:
        """Put smaller batches in the place of those that are beyond a limit, the first in any case.

        Raises:
            RecordBeyondLimitError: a single record is.
        """
        for index, batch in enumerate([*self.pending]):
            self.pending.popleft()
            is_beyond = limit is not None and len(batch.data) > limit
            if batch.record_count == 1 or not (index == 0 or is_beyond):
                self.pending.append(batch)
                continue
            sequence = batch.sequence
            for piece in divided(batch.data, partition, limit):
                data = stamp(piece.data, producer, sequence)
                self.pending.append(NumberedBatch(sequence, piece.record_count, data))
                sequence = (sequence + piece.record_count) & SEQUENCE_MASK

    def acknowledge(self, base_offset: int) -> None:
        """Note that the first pending batch is in the log; at -1 it is not known where."""
        batch = self.pending.popleft()
        if self.last_batch is None:
            self.first_offset = base_offset if base_offset >= 0 else None
        self.record_count += batch.record_count
        self.last_batch, self.last_base_offset = batch, base_offset
