"""One Kafka cluster as the brokers see it: logs, sequences, one transactional id, group offsets.

The facts are those measured on Kafka 4.3 (KIP-98, KIP-360, KIP-447, KIP-890):
    * A write or an EndTxn of another than the current producer epoch is refused. A write of the
      current one is accepted, whoever sends it: attempts of one task cannot be told apart.
    * Sequences start at 0 per partition and producer epoch. A repetition of one of the last five
      batches succeeds and changes nothing, anything else out of order is refused.
    * From transaction.version 2 on EndTxn bumps the producer epoch, and may be repeated.
    * InitProducerId without an epoch takes over; with one, it must be the current one, or the one
      before a bump that the owner may not have heard of.
    * InitProducerId of a replaced owner is refused, and may abort what its successor has open.
    * The timeout of a transaction aborts it and bumps the producer epoch.
"""

import copy
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tallystick.codec.records.batch_header import batch_headers
from tallystick.errors import BrokerUnavailableError, EpochAbortedError, FencedError
from tallystick.values import ProducedRange, Producer, TopicPartition
from tests.simulation.rows import Row, rows_of

BATCHES_REMEMBERED = 5
EPOCH_BY_END_TXN = 2
Offsets = Mapping[TopicPartition, tuple[int, str]]
_NOT_HELD = ("on_commit", "_refuses", "_clock", "_dice")


class BatchTooLargeError(Exception):
    """A record batch is larger than its topic takes; nothing of it was written."""


@dataclass(slots=True)
class LoggedBatch:
    """A record batch in a partition's log."""

    offset: int
    producer: Producer
    sequence: int
    rows: tuple[Row, ...]
    step: int
    committed: bool | None = None  # None as long as the transaction is open


@dataclass(slots=True)
class Committed:
    """What one transaction made visible, all at once."""

    producer: Producer
    batches: list[tuple[TopicPartition, LoggedBatch]]
    offsets: dict[tuple[str, TopicPartition], tuple[int, str]]
    counted_at: int | None


@dataclass(slots=True)
class _Sequences:
    producer_epoch: int
    next: int = 0
    recent: list[LoggedBatch] = field(default_factory=list)


class KafkaCluster:
    """The state that outlives every driver.

    Args:
        cluster_id: its name.
        dice: for what Kafka may do either way.
        clock: the world's current step.
        transaction_version: 0, 1 or 2.
        tells: whether DescribeProducers is allowed.
        refuses: whether a batch of several records is larger than its topic takes now.
    """

    def __init__(
        self,
        cluster_id: str,
        dice: random.Random,
        clock: Callable[[], int],
        *,
        transaction_version: int = EPOCH_BY_END_TXN,
        tells: bool = True,
        refuses: Callable[[], bool] = lambda: False,
    ) -> None:
        self.cluster_id = cluster_id
        self.transaction_version = transaction_version
        self.tells = tells
        self.logs: dict[TopicPartition, list[LoggedBatch]] = {}
        self.offsets: dict[tuple[str, TopicPartition], tuple[int, str]] = {}
        self.on_commit: Callable[[Committed], None] = lambda _: None
        self._refuses = refuses
        self._dice = dice
        self._clock = clock
        self._ends: dict[TopicPartition, int] = {}
        self._sequences: dict[TopicPartition, _Sequences] = {}
        self._transactional_id = ""
        self._producer_epoch = -1
        self._epoch_before: int | None = None  # what an owner may hold that missed the last bump
        self._committed_last = False
        self._open: list[tuple[TopicPartition, LoggedBatch]] = []
        self._staged: dict[tuple[str, TopicPartition], tuple[int, str]] = {}
        self._counted_at: dict[int, int] = {}

    # Transactions
    def fence(self, transactional_id: str, current: Producer | None) -> Producer:
        """InitProducerId."""
        self._transactional_id = transactional_id
        if current is None:
            self._abort_open()
            self._bump(None)
        elif current.producer_epoch == self._producer_epoch:
            self._abort_open()
            self._bump(current.producer_epoch)
        elif current.producer_epoch == self._epoch_before:
            if self._is_open:
                self._abort_open()
                self._bump(self._producer_epoch)
        else:
            if self._is_open and self._dice.random() < 0.5:
                self._abort_open()
                self._bump(self._dice.choice((None, self._producer_epoch)))
            raise FencedError(f"{transactional_id}: producer epoch {current.producer_epoch}")
        return self.current

    @property
    def current(self) -> Producer:
        """The producer that may write now."""
        return Producer(self._transactional_id, 7, self._producer_epoch)

    def produce(self, transactional_id: str, partition: TopicPartition, data: bytes) -> int:
        """Write one record batch; the offset of its first record."""
        (header,) = batch_headers(memoryview(data))
        if header.record_count > 1 and self._refuses():  # looked at before anything else
            raise BatchTooLargeError(f"{partition}: {header.record_count} records are too many")
        producer = Producer(transactional_id, header.producer_id, header.producer_epoch)
        sequence, rows = header.base_sequence, rows_of(data, partition, header.record_count)
        self._check_current(producer)
        state = self._sequences.get(partition)
        if state is None or state.producer_epoch != producer.producer_epoch:
            state = self._sequences[partition] = _Sequences(producer.producer_epoch)
        for batch in state.recent:
            if (batch.sequence, len(batch.rows)) == (sequence, len(rows)):
                return batch.offset
        if sequence != state.next:
            raise EpochAbortedError(f"{partition}: out of order, {sequence} for {state.next}")
        offset = self._ends.get(partition, 0)
        batch = LoggedBatch(offset, producer, sequence, rows, self._clock())
        self.logs.setdefault(partition, []).append(batch)
        self._open.append((partition, batch))
        self._ends[partition] = offset + len(rows)
        state.next += len(rows)
        state.recent = [*state.recent, batch][-BATCHES_REMEMBERED:]
        return offset

    def stage(self, producer: Producer, group: str, offsets: Offsets) -> None:
        """TxnOffsetCommit."""
        self._check_current(producer)
        self._staged.update({(group, partition): what for partition, what in offsets.items()})

    def commit(self, producer: Producer) -> None:
        """EndTxn(commit)."""
        bumped = self.transaction_version >= EPOCH_BY_END_TXN
        ended = self._epoch_before if bumped else self._producer_epoch
        if self._committed_last and not self._is_open and producer.producer_epoch == ended:
            return  # repeated
        self._check_current(producer)
        if not self._is_open:
            raise EpochAbortedError("no transaction is open")
        counted_at = self._counted_at.get(producer.producer_epoch)
        done = Committed(producer, self._open, self._staged, counted_at)
        self.offsets.update(self._staged)
        self._end(committed=True)
        if bumped:
            self._bump(producer.producer_epoch)
        self._committed_last = True
        self.on_commit(done)

    def abort(self, producer: Producer) -> None:
        """EndTxn(abort)."""
        self._check_current(producer)
        self._abort_open()
        if self.transaction_version >= EPOCH_BY_END_TXN:
            self._bump(producer.producer_epoch)

    def time_out(self) -> bool:
        """Abort what has been open for too long; whether anything was."""
        if not self._is_open:
            return False
        self._abort_open()
        self._bump(self._producer_epoch)
        return True

    # Questions
    def last_sequences(
        self, producer: Producer, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, int] | None:
        """The driver's count: of the partitions asked for and of all in the open transaction."""
        if not self.tells:
            return None
        self._counted_at[producer.producer_epoch] = self._clock()
        touched = {partition for partition, _ in self._open}
        return self.describe_producers(producer, {*partitions, *touched})

    def describe_producers(
        self, producer: Producer, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, int] | None:
        """DescribeProducers: the last sequence number that each holds of this producer epoch."""
        if not self.tells:
            return None
        return {
            partition: state.next - 1
            for partition in sorted(partitions)
            if (state := self._sequences.get(partition)) is not None
            and state.producer_epoch == producer.producer_epoch
            and state.next > 0
        }

    def foreign_rows(
        self, producer: Producer, produced: Iterable[ProducedRange]
    ) -> dict[TopicPartition, int]:
        """Committed rows of the producer epoch after each reported range."""
        counts: dict[TopicPartition, int] = {}
        for written in produced:
            partition = written.topic_partition
            rows = sum(
                len(batch.rows)
                for batch in self.logs.get(partition, [])
                if batch.producer == producer
                and batch.offset > written.last_offset
                and batch.committed
            )
            if rows:
                counts[partition] = rows
        return counts

    def group_offsets(self, group: str) -> dict[TopicPartition, tuple[int, str]]:
        """OffsetFetch with require_stable: no answer while a transaction is pending on it."""
        if any(staged == group for staged, _ in self._staged):
            raise BrokerUnavailableError(f"{group}: its offsets are unstable")
        return {at: entry for (of, at), entry in self.offsets.items() if of == group}

    def visible(self, partition: TopicPartition) -> list[Row]:
        """What a read_committed consumer gets."""
        return [
            row for batch in self.logs.get(partition, []) if batch.committed for row in batch.rows
        ]

    # Disasters
    def image(self) -> dict[str, Any]:
        """A copy of all that it holds."""
        attributes = {name: value for name, value in vars(self).items() if name not in _NOT_HELD}
        return copy.deepcopy(attributes)

    def put_back(self, image: Mapping[str, Any]) -> None:
        """Be as it was when the image was taken."""
        vars(self).update(copy.deepcopy(dict(image)))

    # Inside
    @property
    def _is_open(self) -> bool:
        return bool(self._open or self._staged)

    def _check_current(self, producer: Producer) -> None:
        if producer.producer_epoch != self._producer_epoch:
            raise EpochAbortedError(
                f"producer epoch {producer.producer_epoch}, current is {self._producer_epoch}"
            )

    def _bump(self, before: int | None) -> None:
        self._producer_epoch += 1
        self._epoch_before = before
        self._committed_last = False

    def _abort_open(self) -> None:
        if self._is_open:
            self._end(committed=False)
            self._committed_last = False

    def _end(self, committed: bool) -> None:
        for partition, batch in self._open:
            batch.committed = committed
            self._ends[partition] = batch.offset + len(batch.rows) + 1  # the marker
        self._open, self._staged = [], {}
