"""Records written to a topic in no transaction, for the command line: visible at once."""

from collections.abc import Sequence

import pyarrow as pa

from tallystick.codec.output_records import OutputRecords, plain
from tallystick.codec.rows import RowLayout
from tallystick.host.stopwatch import now_ms
from tallystick.kafka import cluster
from tallystick.kafka.client import Client
from tallystick.kafka.output import BATCH_BYTES, COMPRESSION
from tallystick.kafka.task_transaction import take_producer
from tallystick.kafka.topics import partitions_of
from tallystick.kafka.writer import PartitionWriter

TURN_RECORDS = 100
"""The number of records without a key for a partition, before the next partition has a turn."""


class TopicWriter:
    """An idempotent writer of one topic; keys go where Kafka's Java client sends them.

    Args:
        client: of the cluster, not to be shared meanwhile.
        topic: an existing one.

    Raises:
        OptionError: there is no such topic.
        AuthorizationError: a right on the topic is missing.
        BrokerUnavailableError: the deadline passed.
    """

    def __init__(self, client: Client, topic: str) -> None:
        counts = {topic: len(partitions_of(client, topic))}
        limits = cluster.batch_limits(client, [topic])
        layout = RowLayout(counts, topic, batch_limits=limits)
        self._records = OutputRecords(layout, COMPRESSION, BATCH_BYTES)
        producer = take_producer(client, client.config, cluster.cluster_id(client))
        self._writer = PartitionWriter(client, producer, transaction_version=0)
        self._spread = 0

    def write(self, keys: Sequence[bytes | None], values: Sequence[bytes]) -> None:
        """Write records, and return when Kafka has them.

        Raises:
            RecordError: a record is larger than the topic takes.
            BrokerUnavailableError: no progress within delivery.timeout.ms.
        """
        for at in range(0, len(values), TURN_RECORDS):
            rows = pa.RecordBatch.from_pydict(
                {
                    "key": pa.array(keys[at : at + TURN_RECORDS], pa.binary()),
                    "value": pa.array(values[at : at + TURN_RECORDS], pa.binary()),
                }
            )
            self._spread += 1
            encoded = self._records.encode(rows, spread=self._spread, now_ms=now_ms())
            self._writer.write([(partition, plain(batch)) for partition, batch in encoded])
