"""The record that Kafka keeps of an open transaction, and how large it becomes.

The coordinator writes all partitions of a transaction as one record of `__transaction_state`. If
that is larger than the topic's limit, partitions cannot be added, and the producer is told of an
unknown error.

Source: TransactionLogValue.json and TransactionStateManager of Kafka.
"""

from collections.abc import Mapping

from tallystick.errors import TallystickError
from tallystick.kafka.audit import open_transaction
from tallystick.kafka.client import Client
from tallystick.kafka.cluster import batch_limits
from tallystick.values import Producer

UNEXPLAINED = "Unknown"
"""Kafka's error -1: the server has met what it has no error for."""
STATE_TOPIC = "__transaction_state"
BYTES_FIXED = 200
"""Of the batch, the record, the transactional id and the numbers of the producer, about."""
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
        f"epoch that writes to too many of them cannot be written. {_remedy(size)}"
    )


def unexplained(client: Client, producer: Producer, subject: str) -> TallystickError:
    """Return the error for a write into a transaction that Kafka refuses without a reason."""
    counts: dict[str, int] = {}
    for partition in open_transaction(client, producer.transactional_id):
        counts[partition.topic] = counts.get(partition.topic, 0) + 1
    limit = batch_limits(client, [STATE_TOPIC]).get(STATE_TOPIC)
    size = size_of(counts)
    takes = "a limit that this user may not see" if limit is None else f"{limit} bytes"
    return TallystickError(
        f"Produce for {subject}: {UNEXPLAINED}: the broker names no reason. The transaction "
        f"{producer.transactional_id!r} has {sum(counts.values())} partitions by now, a record of "
        f"about {size} bytes, and {STATE_TOPIC} takes {takes}. If that is near, no more partitions "
        f"can be added to it: {_remedy(size)} Else the broker's log has the reason."
    )


def _remedy(size: int) -> str:
    return (
        f"Raise max.message.bytes of {STATE_TOPIC}, or the brokers' message.max.bytes, to at least "
        f"{2 * size}; or write to fewer partitions in an epoch; or use "
        f"KafkaSink(transactions='task'), where each task has a transaction of its own."
    )
