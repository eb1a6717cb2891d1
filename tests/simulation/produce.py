"""The Produce port over a simulated cluster: finished record batches, stamped, one at a time."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tallystick.codec.records.encoder import EncodedBatch, stamp
from tallystick.errors import BrokenInvariantError, EpochAbortedError
from tallystick.values import ProducedRange, Producer, TopicPartition
from tests.simulation.kafka_cluster import KafkaCluster


def _ignore(is_accepted: bool) -> None:
    return


@dataclass(frozen=True)
class SimulatedProduce:
    """How one attempt of a task reaches the cluster; see `ports.Produce`.

    Args:
        cluster: where it writes.
        before_batch: a moment in which others run, and which the attempt may not live to see end.
        later: what a task that is broken on purpose goes on with after its report.
        answered: told of each batch whether Kafka took it.
    """

    cluster: KafkaCluster
    before_batch: Callable[[], None]
    later: Callable[[Callable[[], object]], None]
    answered: Callable[[bool], None] = _ignore

    def writer(self, producer: Producer) -> "SimulatedWriter":
        """See `ports.Produce.writer`."""
        return SimulatedWriter(self, producer)


class SimulatedWriter:
    """See `ports.Writer`."""

    def __init__(self, produce: SimulatedProduce, producer: Producer) -> None:
        self._is_closed = False
        self._produce = produce
        self._producer = producer
        self._produced: dict[TopicPartition, ProducedRange] = {}

    def last_sequences(
        self, partitions: Iterable[TopicPartition]
    ) -> Mapping[TopicPartition, int] | None:
        """See `ports.Writer.last_sequences`."""
        return self._produce.cluster.describe_producers(self._producer, partitions)

    def write(self, batches: Sequence[tuple[TopicPartition, EncodedBatch]]) -> None:
        """See `ports.Writer.write`."""
        if self._is_closed:
            raise BrokenInvariantError("a writer wrote after it was closed")
        for partition, encoded in batches:
            self._produce.before_batch()
            try:
                self._send(partition, encoded)
            except EpochAbortedError:
                self._produce.answered(False)
                raise
            self._produce.answered(True)

    def write_on(self, batch: tuple[TopicPartition, EncodedBatch]) -> None:
        """Write although it was closed: no task does it, but broken ones of the tests do."""
        self._send(*batch)

    def _send(self, partition: TopicPartition, encoded: EncodedBatch) -> None:
        before = self._produced.get(partition)
        sequence = before.record_count if before else 0
        data = stamp(encoded.data, self._producer, sequence)
        offset = self._produce.cluster.produce(self._producer.transactional_id, partition, data)
        self._produced[partition] = ProducedRange(
            partition.topic,
            partition.partition,
            sequence + encoded.record_count,
            before.first_offset if before else offset,
            offset + encoded.record_count - 1,
        )

    def close(self) -> tuple[ProducedRange, ...]:
        """See `ports.Writer.close`."""
        self._is_closed = True
        return tuple(produced for _, produced in sorted(self._produced.items()))
