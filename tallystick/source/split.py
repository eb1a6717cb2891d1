"""The unit of reading."""

from dataclasses import dataclass

from tallystick.topic_partition import TopicPartition


@dataclass(frozen=True, slots=True, order=True)
class SplitRange:
    """The records `start_offset <= offset < stop_offset` of one topic partition.

    `topic_id` is Kafka's name for the very topic that is meant (KIP-516): another topic that was
    created under the same name later has other records at these offsets. "" means any.
    """

    topic: str
    partition: int
    start_offset: int
    stop_offset: int
    topic_id: str = ""

    def __post_init__(self) -> None:
        assert self.partition >= 0, self
        assert 0 <= self.start_offset <= self.stop_offset, self

    @property
    def topic_partition(self) -> TopicPartition:
        """The log that the range belongs to."""
        return TopicPartition(self.topic, self.partition)

    @property
    def offset_count(self) -> int:
        """How many offsets the range spans; there may be fewer records (markers, compaction)."""
        return self.stop_offset - self.start_offset

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}[{self.start_offset},{self.stop_offset})"
