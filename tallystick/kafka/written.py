"""What Kafka itself says was written: by a producer epoch, and behind it.

Three witnesses: the transaction coordinator (which partitions are part of the open transaction),
each partition's leader (the last sequence number of each producer), and the log.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tallystick.errors import AuthorizationError, BrokerUnavailableError
from tallystick.kafka import protocol
from tallystick.kafka.client import Client, Coordinator
from tallystick.kafka.offsets import earliest_offset
from tallystick.kafka.partitions import by_topic, partitions_of
from tallystick.kafka.records import BatchHeader, batch_headers
from tallystick.sink.transaction import ProducedRange, Producer
from tallystick.topic_partition import TopicPartition

INTERNAL_TOPICS = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})
"""Part of a transaction through its offsets, and none of the sink's rows."""
PEEK_BYTES_MAX = 64 << 10
"""How much is read at once where hardly more than a marker is expected."""
PEEK_WAIT_MS = 100
"""How long a broker may hold back an empty answer while the marker is not there yet."""
OUT_OF_RANGE = frozenset({"OffsetOutOfRange"})


def transaction_state(client: Client, transactional_id: str) -> Any:
    """What the coordinator keeps of a transactional id; None when it knows of none."""
    response = client.call(
        lambda: protocol.DescribeTransactionsRequest(transactional_ids=[transactional_id]),
        Coordinator("transaction", transactional_id),
        lambda response: [
            (state.error_code, f"transactional id {transactional_id!r}")
            for state in response.transaction_states
        ],
        accept=frozenset({"TransactionalIdNotFound"}),
    )
    (state,) = response.transaction_states
    return None if state.error_code else state


def open_transaction(client: Client, transactional_id: str) -> set[TopicPartition]:
    """The partitions that the open transaction has written to; none when none is open."""
    state = transaction_state(client, transactional_id)
    return {
        TopicPartition(topic.topic, partition)
        for topic in (state.topics or [] if state else [])
        for partition in topic.partitions
    }


def producer_states(
    client: Client, producer: Producer, partitions: Iterable[TopicPartition]
) -> dict[TopicPartition, Any] | None:
    """The leaders' records of this producer epoch, where they have one with rows.

    None when READ on a topic is missing: then nobody may look.
    """
    try:
        answers = client.ask_leaders(partitions, describe_producers, partitions_of)
    except AuthorizationError:
        return None
    return {
        partition: state
        for partition, answer in answers.items()
        for state in answer.active_producers
        if state.producer_id == producer.producer_id
        and state.producer_epoch == producer.producer_epoch
        and state.last_sequence >= 0
    }


def last_sequences(
    client: Client, producer: Producer, partitions: Iterable[TopicPartition]
) -> Mapping[TopicPartition, int] | None:
    """See `ports.Broker.last_sequences`; partitions of the open transaction are looked at too."""
    touched = open_transaction(client, producer.transactional_id)
    asked = {partition for partition in touched if partition.topic not in INTERNAL_TOPICS}
    states = producer_states(client, producer, asked | set(partitions))
    if states is None:
        return None
    return {partition: int(state.last_sequence) for partition, state in states.items()}


def foreign_rows(
    client: Client, producer: Producer, produced: Iterable[ProducedRange]
) -> Mapping[TopicPartition, int]:
    """See `ports.Broker.foreign_rows`. Reads the log behind each range, up to the marker.

    Where retention has already deleted that part of the log there is nothing left to be found, and
    nothing for a consumer to read either: such a partition counts as without foreign rows.

    Raises:
        BrokerUnavailableError: a marker did not appear within delivery.timeout.ms. One is late when
            its partition's leader hangs: the coordinator writes it only to the next leader.
    """
    positions = {written.topic_partition: written.last_offset + 1 for written in produced}
    counts: dict[TopicPartition, int] = {}
    deadline = client.deadline()
    while positions:
        for partition, answer in _peek(client, positions).items():
            if protocol.error_name(answer.error_code) in OUT_OF_RANGE:
                if earliest_offset(client, partition) > positions[partition]:
                    del positions[partition]
                continue
            for header in _behind(answer.records, positions[partition]):
                positions[partition] = header.last_offset + 1
                if header.producer_id != producer.producer_id:
                    continue
                if header.is_control:
                    del positions[partition]
                    break
                if header.producer_epoch == producer.producer_epoch:
                    counts[partition] = counts.get(partition, 0) + header.record_count
        if positions and time.monotonic() >= deadline:
            raise BrokerUnavailableError(
                f"the marker of the committed transaction of {producer.transactional_id!r} is not "
                f"in {len(positions)} partitions after {client.config.delivery_timeout_ms} ms, "
                f"{min(positions)} among them: whether rows of another task stand before it cannot "
                f"be told yet."
            )
    return counts


def batch_at_sequence(
    client: Client, producer: Producer, partition: TopicPartition, sequence: int
) -> BatchHeader:
    """Find a batch of this producer epoch in the log by the sequence of its first record.

    For the rare batch that Kafka acknowledged as a duplicate without telling its offset.

    Raises:
        BrokerUnavailableError: it is not to be found; whether it was written is unknown.
    """
    states = producer_states(client, producer, [partition]) or {}
    position = int(states[partition].current_txn_start_offset) if partition in states else -1
    while position >= 0:
        answer = _peek(client, {partition: position})[partition]
        headers = list(_behind(answer.records, position))
        for header in headers:
            position = header.last_offset + 1
            mine = header.producer_id == producer.producer_id and not header.is_control
            if (
                mine
                and header.producer_epoch == producer.producer_epoch
                and header.base_sequence == sequence
            ):
                return header
        if not headers:
            break
    raise BrokerUnavailableError(
        f"{partition}: Kafka took the batch with sequence {sequence} for one that it had already, "
        f"and it is not in the open transaction's part of the log. The epoch must run again."
    )


def describe_producers(partitions: list[TopicPartition]) -> Any:
    """The request for what leaders keep of the producers of partitions."""
    topic_class = protocol.DescribeProducersRequest.TopicRequest
    return protocol.DescribeProducersRequest(
        topics=[
            topic_class(name=topic, partition_indexes=indexes)
            for topic, indexes in by_topic(partitions).items()
        ]
    )


def _peek(client: Client, positions: Mapping[TopicPartition, int]) -> dict[TopicPartition, Any]:
    """Fetch a little from each position, committed or not."""
    topic_class = protocol.FetchRequest.FetchTopic
    part_class = topic_class.FetchPartition

    def make(partitions: list[TopicPartition]) -> Any:
        return protocol.FetchRequest(
            max_version=12,  # by name: later versions want topic ids, which matter nothing here
            max_wait_ms=PEEK_WAIT_MS,
            min_bytes=1,
            max_bytes=max(1, len(partitions)) * PEEK_BYTES_MAX,
            topics=[
                topic_class(
                    topic=topic,
                    partitions=[
                        part_class(
                            partition=index,
                            fetch_offset=positions[TopicPartition(topic, index)],
                            partition_max_bytes=PEEK_BYTES_MAX,
                        )
                        for index in indexes
                    ],
                )
                for topic, indexes in by_topic(partitions).items()
            ],
        )

    def answers(response: Any) -> Iterator[tuple[TopicPartition, Any]]:
        for topic in response.responses:
            for part in topic.partitions:
                yield TopicPartition(topic.topic, part.partition_index), part

    return client.ask_leaders(positions, make, answers, accept=OUT_OF_RANGE)


def _behind(records: bytes | None, position: int) -> Iterator[BatchHeader]:
    """The batches from a position on; a fetch may begin with the whole batch around it."""
    for header in batch_headers(records or b""):
        if header.last_offset >= position:
            yield header
