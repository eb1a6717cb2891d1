"""The benchmark's topics: made, watched and removed through librdkafka, which is cheap to poll."""

from dataclasses import dataclass

from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

PARTITION_COUNT = 8
"""The loader and the verifier of `peers` know no other number."""
REQUEST_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class Ends:
    """Where a topic ends, summed over its partitions."""

    written: int
    committed: int

    def __post_init__(self) -> None:
        assert self.committed >= 0, self


class Topics:
    """Makes, watches and removes topics of `PARTITION_COUNT` partitions.

    Args:
        bootstrap: `host:port` of the broker.
    """

    def __init__(self, bootstrap: str) -> None:
        # Quiet: it outlives the broker at the end, and would say so.
        self._admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})

    def create(self, topic: str) -> None:
        """Create a topic; it must not exist."""
        new = NewTopic(topic, num_partitions=PARTITION_COUNT, replication_factor=1)
        self._admin.create_topics([new])[topic].result(REQUEST_TIMEOUT_S)

    def delete(self, topic: str) -> None:
        """Remove a topic."""
        self._admin.delete_topics([topic])[topic].result(REQUEST_TIMEOUT_S)

    def ends(self, topic: str) -> Ends | None:
        """The topic's ends now; None when the broker gave no answer this time."""
        wanted = {
            TopicPartition(topic, each): OffsetSpec.latest() for each in range(PARTITION_COUNT)
        }
        asked = [
            self._admin.list_offsets(
                wanted, isolation_level=level, request_timeout=REQUEST_TIMEOUT_S
            )
            # The committed end first: asked second, it may be ahead of the written one.
            for level in (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED)
        ]
        try:
            committed, written = (
                sum(future.result(REQUEST_TIMEOUT_S).offset for future in futures.values())
                for futures in asked
            )
        except KafkaException:
            return None
        return Ends(written, committed)
