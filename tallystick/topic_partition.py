"""Which log: the one value that source, sink and Kafka all speak of."""

from typing import NamedTuple


class TopicPartition(NamedTuple):
    """One partition of one Kafka topic.

    A named tuple, because plans sort and look up tens of thousands of them per epoch.
    """

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"
