"""The facts of one Kafka transaction: who writes, what was written, what was decided."""

from dataclasses import dataclass

from tallystick.topic_partition import TopicPartition


@dataclass(frozen=True, slots=True)
class Producer:
    """A producer that Kafka admitted; a higher `producer_epoch` for the same id fences this one.

    Every transaction has a `Producer` of its own: the broker port hands out a fresh producer epoch
    after each commit and each fence (Kafka does so itself from transaction.version 2 on, KIP-890).
    """

    transactional_id: str
    producer_id: int
    producer_epoch: int

    @property
    def transaction_name(self) -> str:
        """Of its transaction: no other one of the cluster has it."""
        return f"{self.transactional_id}:{self.producer_id}:{self.producer_epoch}"


@dataclass(frozen=True, slots=True, order=True)
class ProducedRange:
    """What one task wrote to one output partition in one transaction.

    The sequence numbers of a partition start at 0 with each producer epoch, so the last one is
    `record_count - 1`. `last_offset` is where the last record stands in the log; records of other
    producers may lie between first and last.
    """

    topic: str
    partition: int
    record_count: int
    first_offset: int
    last_offset: int

    def __post_init__(self) -> None:
        assert self.record_count > 0, self
        assert 0 <= self.first_offset <= self.last_offset, self

    @property
    def topic_partition(self) -> TopicPartition:
        """The log that was written to."""
        return TopicPartition(self.topic, self.partition)

    @property
    def last_sequence(self) -> int:
        """The sequence number that Kafka must report for the last record (it wraps at 2^31)."""
        return (self.record_count - 1) & 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class Token:
    """What travels inside a transaction and so tells which one Kafka committed last.

    Stored as a consumer-group offset: the offset is `checkpoint_id + 1`, the next epoch, as Kafka's
    offsets always name the next record; the rest is its metadata.
    """

    checkpoint_id: int
    lineage: str
    checkpoint: str
    manifest_path: str
    takeover_count: int = 0
    """How often another lineage had taken the pipeline over; a token without a count has 0."""

    def __post_init__(self) -> None:
        assert self.checkpoint_id >= -1, self
        assert self.takeover_count >= 0, self
