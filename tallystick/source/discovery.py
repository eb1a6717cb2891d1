"""What a look at the cluster shows of its topics."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FoundTopic:
    """A topic as it is now.

    Args:
        topic_id: Kafka's own name for this very topic (KIP-516), 22 characters of base64url; it
            changes when a topic is deleted and created again. "" where a broker tells none.
        partition_count: how many partitions it has.
    """

    topic_id: str
    partition_count: int
