"""Write finished record batches into an open transaction, from one task.

Invariants:
    * Per partition, batches go out in the order in which they were given, at most five at once
      (Kafka remembers five of a producer), and the same bytes again from the first unacknowledged.
    * After a batch failed, OutOfOrderSequenceNumber for the ones after it says nothing new; for
      the first unacknowledged one it says that another producer writes, and ends the epoch.
    * Sequence numbers start at 0 in each partition: one writer per partition and transaction.
    * A batch that a broker refuses as too large was not written: it goes out again as smaller ones
      with the same sequence numbers (KIP-126). If it was written after all, by a request whose
      answer is lost, before the topic's limit was lowered, the first smaller one is out of order.
    * Nothing is written after `close`: the task may report then.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tallystick.codec.output_records import NumberedBatch, PartitionLog
from tallystick.codec.records.encoder import EncodedBatch, RecordBeyondLimitError
from tallystick.errors import BrokenInvariantError, EpochAbortedError
from tallystick.kafka import protocol
from tallystick.kafka.audit import batch_at_sequence, producer_states, unexplained
from tallystick.kafka.client import Client, Coordinator, client_for
from tallystick.kafka.cluster import batch_limits
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.connection import PendingRequest
from tallystick.kafka.error_policy import (
    AGAIN,
    BACKOFF_MIN_S,
    STALE,
    TOO_LARGE,
    UNEXPLAINED,
    Attempts,
    describe,
    kafka_message,
    refusal,
    too_large,
)
from tallystick.kafka.protocol import by_topic
from tallystick.text import shortened
from tallystick.values import ProducedRange, Producer, TopicPartition

IN_FLIGHT_MAX = 5
"""The batches of one producer and partition that a broker can recognise when they come again."""
REQUEST_BYTES_MAX = 8 << 20
"""The size limit of a request of several batches; brokers accept 100 MB by default."""
SERVER_SHARE = 0.75
"""The share of request.timeout.ms that a broker may wait for its followers and still answer us."""
VERSION_WITHOUT_ADD = 12
"""The version of Produce that adds partitions to the transaction by itself (KIP-890)."""
ADDING_PAUSE_S = 0.001
"""The first pause where a partition may not be part of the transaction yet: of two tasks that add
theirs through one broker at once, it refuses the first with NotEnoughReplicas, and would take it a
millisecond later (Kafka's AddPartitionsToTxnManager)."""


_Piece = tuple[TopicPartition, NumberedBatch]
_Flight = deque[tuple[list[TopicPartition], PendingRequest]]


@dataclass(frozen=True)
class KafkaProduce:
    """A writing task's access to a cluster; see `ports.Produce`.

    Args:
        config: how the cluster is reached; a process keeps its connections from task to task.
        transaction_version: see `PartitionWriter`.
    """

    config: KafkaConfig
    transaction_version: int

    def writer(self, producer: Producer) -> "PartitionWriter":
        """See `ports.Produce.writer`."""
        return PartitionWriter(
            client_for(self.config), producer, transaction_version=self.transaction_version
        )


class PartitionWriter:
    """Writes to the partitions of one task in one transaction; see `ports.Writer`.

    Args:
        client: of the cluster; not to be shared meanwhile.
        producer: whose transaction it is; without a transactional id it is idempotent only, and
            what it writes is visible at once.
        transaction_version: the driver's, `KafkaBroker.transaction_version`.
    """

    def __init__(self, client: Client, producer: Producer, *, transaction_version: int) -> None:
        self._client = client
        self._producer = producer
        self._is_transactional = bool(producer.transactional_id)
        self._adds_partitions = self._is_transactional and transaction_version < 2
        self._logs: dict[TopicPartition, PartitionLog] = {}
        self._topic_ids: dict[str, Any] = {}
        self._too_large: dict[TopicPartition, str] = {}  # what Kafka said, in this flight
        self._closed = False

    def last_sequences(
        self, partitions: Iterable[TopicPartition]
    ) -> Mapping[TopicPartition, int] | None:
        """See `ports.Writer.last_sequences`."""
        states = producer_states(self._client, self._producer, partitions)
        if states is None:
            return None
        return {partition: int(state.last_sequence) for partition, state in states.items()}

    def write(self, frames: Sequence[tuple[TopicPartition, EncodedBatch]]) -> None:
        """Write batches, and return when Kafka has all of them on disk or in its replicas.

        Args:
            frames: in order per partition.

        Raises:
            EpochAbortedError: the transaction is lost: timed out, fenced, or written to by another.
            AuthorizationError: WRITE on the topic or the transactional id is missing.
            BrokerUnavailableError: no progress within delivery.timeout.ms.
            RecordError: a single record is larger than the topic allows.
        """
        if self._closed:
            raise BrokenInvariantError(f"a writer of {self._producer} wrote after it was closed")
        added = {partition for partition, _ in frames} - self._logs.keys()
        if added and self._adds_partitions:
            self._add_partitions(sorted(added))
        for partition, encoded in frames:
            self._logs.setdefault(partition, PartitionLog()).add(self._producer, encoded)
        self._write_pending()

    def close(self) -> tuple[ProducedRange, ...]:
        """Write no more, and report what was acknowledged."""
        self._closed = True
        return tuple(
            self._produced(partition, log)
            for partition, log in sorted(self._logs.items())
            if log.record_count
        )

    def _produced(self, partition: TopicPartition, log: PartitionLog) -> ProducedRange:
        """Return the range; offsets withheld for a repeated batch are read from the log."""
        assert log.last_batch is not None, partition
        if log.first_offset is None:
            first = batch_at_sequence(self._client, self._producer, partition, 0)
            log.first_offset = first.base_offset
        if log.last_base_offset < 0:
            sequence = log.last_batch.sequence
            last = batch_at_sequence(self._client, self._producer, partition, sequence)
            log.last_base_offset = last.base_offset
        last_offset = log.last_base_offset + log.last_batch.record_count - 1
        return ProducedRange(
            partition.topic, partition.partition, log.record_count, log.first_offset, last_offset
        )

    def _write_pending(self) -> None:
        """Send and collect, again and again, until nothing is pending."""
        attempts: Attempts | None = None
        while pending := [partition for partition, log in self._logs.items() if log.pending]:
            attempts = attempts or self._new_attempts(pending)
            failed: dict[TopicPartition, str] = {}
            before = sum(len(self._logs[partition].pending) for partition in pending)
            flight: _Flight = deque()
            try:
                self._fly(pending, attempts.deadline, failed, flight)
                while flight:
                    self._land(*flight.popleft(), attempts.deadline, failed)
            finally:  # after an error that ends the epoch
                for _, posted in flight:
                    self._client.network.discard(posted)
            if sum(len(self._logs[partition].pending) for partition in pending) < before:
                attempts = self._new_attempts(pending)
            if self._too_large:
                self._divide(failed)
                attempts = self._new_attempts(pending)
            if failed:
                for obstacle in failed.values():
                    self._client.obstacles[f"Produce: {obstacle}"] += 1
                attempts.pause("; ".join(sorted(set(failed.values()))))

    def _fly(
        self,
        pending: list[TopicPartition],
        deadline: float,
        failed: dict[TopicPartition, str],
        flight: _Flight,
    ) -> None:
        """Post up to five batches of each partition to its leader; collect nothing yet."""
        by_leader = self._client.by_leader(pending, deadline)
        led = {partition for partitions in by_leader.values() for partition in partitions}
        for partition in pending:
            if partition not in led:
                failed[partition] = self._client.leader_obstacle(partition)
        for node, partitions in by_leader.items():
            for pieces in self._pieces(partitions):
                sent = [partition for partition, _ in pieces]
                try:
                    until = self._client.try_until(deadline)
                    posted = self._client.network.post(node, self._request(pieces), until)
                except OSError as error:
                    # The connection is gone, and with it what was posted before. A new one must
                    # not overtake that: the rest of this leader's batches wait for the next round.
                    self._lose(sent, describe(error), failed)
                    break
                flight.append((sent, posted))

    def _land(
        self,
        partitions: list[TopicPartition],
        posted: PendingRequest,
        deadline: float,
        failed: dict[TopicPartition, str],
    ) -> None:
        """Wait for one response, and collect."""
        try:
            response = self._client.network.wait(posted, self._client.try_until(deadline))
        except OSError as error:
            self._lose(partitions, describe(error), failed)
        else:
            self._collect(response, failed)

    def _pieces(self, partitions: Iterable[TopicPartition]) -> Iterator[list[_Piece]]:
        """Yield the content of each request: one batch of a partition at most, and not too much."""
        for index in range(IN_FLIGHT_MAX):
            pieces: list[_Piece] = []
            size = 0
            for partition in partitions:
                pending = self._logs[partition].pending
                if index >= len(pending) or (index and self._must_be_first(partition)):
                    continue
                batch = pending[index]
                if pieces and size + len(batch.data) > REQUEST_BYTES_MAX:
                    yield pieces
                    pieces, size = [], 0
                pieces.append((partition, batch))
                size += len(batch.data)
            if pieces:
                yield pieces

    def _must_be_first(self, partition: TopicPartition) -> bool:
        """True if no batch may follow in the same flight.

        Before transaction.version 2, or without a transaction, a log that knows nothing of a
        producer takes any sequence number for its first: were the first batch refused for now, the
        second one would be taken in its place, and the first be out of order for good.
        """
        takes_any = self._adds_partitions or not self._is_transactional
        return takes_any and self._logs[partition].record_count == 0

    def _request(self, pieces: list[_Piece]) -> Any:
        topic_class = protocol.ProduceRequest.TopicProduceData
        topics: dict[str, list[Any]] = {}
        for partition, batch in pieces:
            part = topic_class.PartitionProduceData(index=partition.partition, records=batch.data)
            topics.setdefault(partition.topic, []).append(part)
        generation = {}
        if self._is_transactional:
            generation = {"min_version": VERSION_WITHOUT_ADD}
        if self._adds_partitions:
            generation = {"max_version": VERSION_WITHOUT_ADD - 1}
        return protocol.ProduceRequest(
            transactional_id=self._producer.transactional_id or None,
            acks=-1,
            timeout_ms=int(self._client.config.request_timeout_ms * SERVER_SHARE),
            topic_data=[
                topic_class(name=topic, topic_id=self._topic_id(topic), partition_data=parts)
                for topic, parts in topics.items()
            ],
            **generation,
        )

    def _topic_id(self, topic: str) -> Any:
        """Return the topic's id; raise if the id has changed since the first acknowledged batch."""
        topic_id = self._client.topic_ids.get(topic)
        written = any(
            log.record_count for partition, log in self._logs.items() if partition.topic == topic
        )
        if written and topic_id != self._topic_ids.get(topic, topic_id):
            raise EpochAbortedError(
                f"topic {topic!r} was deleted and created again while the epoch wrote to it: what "
                f"was written is gone. The epoch must run again."
            )
        self._topic_ids[topic] = topic_id
        return topic_id

    def _collect(self, response: Any, failed: dict[TopicPartition, str]) -> None:
        """Note each partition's result in a response: acknowledged, or to be sent again."""
        names = {topic_id: name for name, topic_id in self._topic_ids.items()}
        for topic in response.responses:
            for part in topic.partition_responses:
                partition = TopicPartition(topic.name or names[topic.topic_id], part.index)
                self._take(partition, part, failed)

    def _take(
        self, partition: TopicPartition, part: Any, failed: dict[TopicPartition, str]
    ) -> None:
        error_name = protocol.error_name(part.error_code)
        passing = {None, "OutOfOrderSequenceNumber", *AGAIN, *TOO_LARGE}
        if partition in failed and error_name in passing:
            return  # a batch before this one failed: this one goes out again after it
        if error_name is None or error_name == "DuplicateSequenceNumber":
            self._logs[partition].acknowledge(int(part.base_offset))
        elif error_name in AGAIN:
            failed[partition] = error_name
            if error_name in STALE:
                self._client.forget_leaders([partition])
        elif error_name in TOO_LARGE:
            failed[partition] = error_name
            self._too_large[partition] = f"{error_name}{kafka_message(part)}"
        elif error_name == UNEXPLAINED and self._is_transactional:
            subject = f"{partition}{kafka_message(part)}"
            raise unexplained(self._client, self._producer, "Produce", subject)
        else:
            raise refusal(error_name, "Produce", f"{partition}{kafka_message(part)}")

    def _divide(self, failed: dict[TopicPartition, str]) -> None:
        """Make smaller batches of what was refused as too large; the next flight takes them.

        Raises:
            EpochAbortedError: a single record is beyond the limit that the topic has now, and was
                not when the epoch began: it runs again, and who encodes it knows the limit then.
            RecordError: a single record is too large.
        """
        refused, self._too_large = self._too_large, {}
        limits = batch_limits(self._client, {partition.topic for partition in refused})
        for partition, words in refused.items():
            del failed[partition]
            of_topic = limits.get(partition.topic)
            log, limit = self._logs[partition], of_topic and of_topic.batch_bytes
            size = len(log.pending[0].data)
            try:
                if log.pending[0].record_count > 1:
                    log.divide(self._producer, partition, limit)
                    continue
            except RecordBeyondLimitError as error:
                size = error.size
            raise too_large(partition, words, size, limit)

    def _lose(
        self, partitions: list[TopicPartition], obstacle: str, failed: dict[TopicPartition, str]
    ) -> None:
        for partition in partitions:
            failed.setdefault(partition, obstacle)
        self._client.forget_leaders(partitions)

    def _add_partitions(self, partitions: list[TopicPartition]) -> None:
        """Make partitions part of the transaction; transaction.version 2 does it by itself."""
        request_class = protocol.AddPartitionsToTxnRequest

        def make() -> Any:
            return request_class(
                v3_and_below_transactional_id=self._producer.transactional_id,
                v3_and_below_producer_id=self._producer.producer_id,
                v3_and_below_producer_epoch=self._producer.producer_epoch,
                v3_and_below_topics=[
                    request_class.AddPartitionsToTxnTopic(name=topic, partitions=indexes)
                    for topic, indexes in by_topic(partitions).items()
                ],
                max_version=3,
            )

        def codes(response: Any) -> list[tuple[int, str]]:
            return [
                (result.partition_error_code, f"{topic.name}-{result.partition_index}")
                for topic in response.results_by_topic_v3_and_below
                for result in topic.results_by_partition
            ]

        # Kafka refuses all for the sake of one, and then says of the others just that.
        accept = frozenset({"OperationNotAttempted", UNEXPLAINED})
        target = Coordinator("transaction", self._producer.transactional_id)
        response = self._client.call(make, target, codes, accept=accept)
        for code, subject in codes(response):
            if protocol.error_name(code) == UNEXPLAINED:
                doing = "AddPartitionsToTxn"
                raise unexplained(self._client, self._producer, doing, subject, partitions)

    def _new_attempts(self, pending: list[TopicPartition]) -> Attempts:
        is_adding = (
            self._is_transactional
            and not self._adds_partitions
            and any(self._logs[partition].record_count == 0 for partition in pending)
        )
        first_s = ADDING_PAUSE_S if is_adding else BACKOFF_MIN_S
        return Attempts(self._client.deadline(), "Produce", shortened(sorted(pending)), first_s)
