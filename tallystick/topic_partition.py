"""Which log: the one value that source, sink and Kafka all speak of."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class TopicPartition:
    """One partition of one Kafka topic."""

    topic: str
    partition: int

    def __post_init__(self) -> None:
        assert self.topic, self
        assert self.partition >= 0, self

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"
