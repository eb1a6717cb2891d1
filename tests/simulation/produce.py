"""The Produce port over a simulated cluster: finished record batches, one at a time.

Their numbers, and how a batch that is refused as too large is cut, are the real writer's.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tallystick.codec.output_records import PartitionLog
from tallystick.codec.records.encoder import EncodedBatch
from tallystick.errors import BrokenInvariantError, EpochAbortedError
from tallystick.values import ProducedRange, Producer, TopicPartition
from tests.simulation.kafka_cluster import BatchTooLargeError, KafkaCluster


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
        self._logs: dict[TopicPartition, PartitionLog] = {}

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
            log = self._log_with(partition, encoded)
            while log.pending:
                self._produce.before_batch()
                try:
                    self._send(partition, log)
                except BatchTooLargeError:
                    log.divide(self._producer, partition, None)
                except EpochAbortedError:
                    self._produce.answered(False)
                    raise
                else:
                    self._produce.answered(True)

    def write_on(self, batch: tuple[TopicPartition, EncodedBatch]) -> None:
        """Write although it was closed: no task does it, but broken ones of the tests do."""
        partition, encoded = batch
        self._send(partition, self._log_with(partition, encoded))

    def _log_with(self, partition: TopicPartition, encoded: EncodedBatch) -> PartitionLog:
        log = self._logs.setdefault(partition, PartitionLog())
        log.add(self._producer, encoded)
        return log

    def _send(self, partition: TopicPartition, log: PartitionLog) -> None:
        cluster, data = self._produce.cluster, log.pending[0].data
        log.acknowledge(cluster.produce(self._producer.transactional_id, partition, data))

    def close(self) -> tuple[ProducedRange, ...]:
        """See `ports.Writer.close`."""
        self._is_closed = True
        return tuple(
            _range_of(partition, log)
            for partition, log in sorted(self._logs.items())
            if log.last_batch is not None
        )


def _range_of(partition: TopicPartition, log: PartitionLog) -> ProducedRange:
    assert log.last_batch is not None, "something was written"
    assert log.first_offset is not None, "the simulated cluster always tells"
    last_offset = log.last_base_offset + log.last_batch.record_count - 1
    return ProducedRange(*partition, log.record_count, log.first_offset, last_offset)
