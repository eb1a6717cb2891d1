"""The record that Kafka keeps of an open transaction, and how large it becomes.

The coordinator writes all partitions of a transaction as one record of `__transaction_state`. If
that is larger than the topic's limit, partitions cannot be added, and the producer is told of an
unknown error.

Source: TransactionLogValue.json and TransactionStateManager of Kafka.
"""

from collections.abc import Mapping

STATE_TOPIC = "__transaction_state"
BYTES_FIXED = 200
"""The size of the batch, the record, the transactional id and the producer's numbers, about."""
BYTES_OF_TOPIC, BYTES_OF_PARTITION = 8, 4


def size_of(partition_counts: Mapping[str, int]) -> int:
    """Return the size of the record of a transaction, about, by its partitions of each topic."""
    return BYTES_FIXED + sum(
        BYTES_OF_TOPIC + len(topic) + BYTES_OF_PARTITION * count
        for topic, count in partition_counts.items()
    )


def beyond_limit(partition_counts: Mapping[str, int], limit: int | None) -> str | None:
    """Return a warning if a transaction over all these partitions would have no place.

    Args:
        partition_counts: of the topics that may be written to.
        limit: the largest record batch that `__transaction_state` takes; None: not known.
    """
    size = size_of(partition_counts)
    if limit is None or size <= limit:
        return None
    return (
        f"the output has {sum(partition_counts.values())} partitions, and one transaction over all "
        f"of them is a record of about {size} bytes, of which {STATE_TOPIC} takes {limit}: an "
        f"epoch that writes to too many of them cannot be written. {remedy(size)}"
    )


def remedy(size: int) -> str:
    """Return the remedy for a transaction record that is too large."""
    return (
        f"Raise max.message.bytes of {STATE_TOPIC}, or the brokers' message.max.bytes, to at least "
        f"{2 * size}; or write to fewer partitions in an epoch; or use "
        f"KafkaSink(transactions='task'), where each task has a transaction of its own."
    )
