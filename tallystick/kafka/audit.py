"""An audit of the output by Kafka's own account: what a producer epoch wrote, and what came after.

Three witnesses: the transaction coordinator (which partitions are part of the open transaction),
each partition's leader (the last sequence number of each producer), and the log.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tallystick.codec.records.batch_header import BatchHeader, batch_headers
from tallystick.errors import AuthorizationError, BrokerUnavailableError, TallystickError
from tallystick.kafka import protocol
from tallystick.kafka.client import Client, Coordinator
from tallystick.kafka.cluster import READ_UNCOMMITTED, batch_limits, list_offsets
from tallystick.kafka.error_policy import OUT_OF_RANGE, UNEXPLAINED
from tallystick.kafka.messages import Rows
from tallystick.kafka.preflight import (
    STATE_TOPIC,
    transaction_record_bytes,
    transaction_record_remedy,
)
from tallystick.kafka.protocol import by_topic, partitions_of
from tallystick.source.subscription import EARLIEST, LATEST
from tallystick.values import ProducedRange, Producer, TopicPartition

logger = logging.getLogger(__name__)

INTERNAL_TOPICS = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})
"""Part of a transaction through its offsets, and none of the sink's rows."""
PEEK_BYTES_MAX = 64 << 10
"""The bytes that are read at once where little more than a marker is expected."""
PEEK_WAIT_MS = 100
"""The time for which a broker may hold back an empty answer while the marker is missing."""
GONE_AFTER_S = 5.0
"""The time for which a log must lack a marker, once all were written, before that is believed: a
leader that was deposed, or has just been elected, may show less of the log than there is."""
PATIENCE_SHARE = 4
"""At most a quarter of a whole call is spent on such waits."""


def transaction_state(
    client: Client, transactional_id: str, *, deadline: float | None = None
) -> Any:
    """Return the coordinator's state of a transactional id; None if the id is unknown there."""
    response = client.call(
        lambda: protocol.DescribeTransactionsRequest(transactional_ids=[transactional_id]),
        Coordinator("transaction", transactional_id),
        lambda response: [
            (state.error_code, f"transactional id {transactional_id!r}")
            for state in response.transaction_states
        ],
        deadline=deadline,
        accept=frozenset({"TransactionalIdNotFound"}),
    )
    (state,) = response.transaction_states
    return None if state.error_code else state


def open_transaction(client: Client, transactional_id: str) -> set[TopicPartition]:
    """Return the partitions that the open transaction has written to; none when none is open."""
    state = transaction_state(client, transactional_id)
    return {
        TopicPartition(topic.topic, partition)
        for topic in (state.topics or [] if state else [])
        for partition in topic.partitions
    }


def unexplained(
    client: Client,
    producer: Producer,
    doing: str,
    subject: str,
    adding: Iterable[TopicPartition] = (),
) -> TallystickError:
    """Return the error for a request about a transaction that Kafka refuses without a reason.

    Args:
        client: of the cluster.
        producer: whose transaction it is.
        doing: the API that was asked.
        subject: what it was asked about.
        adding: partitions that were to be added, and so are not in the transaction yet.
    """
    counts: dict[str, int] = {}
    for partition in open_transaction(client, producer.transactional_id) | {*adding}:
        counts[partition.topic] = counts.get(partition.topic, 0) + 1
    limit = batch_limits(client, [STATE_TOPIC]).get(STATE_TOPIC)
    size = transaction_record_bytes(counts)
    takes = "a limit that this user may not see" if limit is None else f"{limit.batch_bytes} bytes"
    return TallystickError(
        f"{doing} for {subject}: {UNEXPLAINED}: the broker names no reason. The transaction "
        f"{producer.transactional_id!r} has {sum(counts.values())} partitions by now, a record of "
        f"about {size} bytes, and {STATE_TOPIC} takes {takes}. If that is near, no more partitions "
        f"can be added to it: {transaction_record_remedy(size)} Else the broker's log has the "
        f"reason."
    )


def producer_states(
    client: Client, producer: Producer, partitions: Iterable[TopicPartition]
) -> dict[TopicPartition, Any] | None:
    """Return each leader's entry for a producer epoch, by partition, where the epoch wrote rows.

    None when READ on a topic is missing: then the log may not be read.
    """
    try:
        answers = client.ask_leaders(partitions, describe_producers, partitions_of)
    except AuthorizationError:
        return None
    return {
        partition: state
        for partition, answer in answers.items()
        for state in _states_of(answer.active_producers, producer.producer_id)
        if state.producer_epoch == producer.producer_epoch and state.last_sequence >= 0
    }


def _states_of(states: Any, producer_id: int) -> Iterable[Any]:
    """Return the entries of one producer among all of a day."""
    if isinstance(states, Rows):
        return states.where("producer_id", producer_id)
    return (state for state in states if state.producer_id == producer_id)


def last_sequences(
    client: Client, producer: Producer, partitions: Iterable[TopicPartition]
) -> Mapping[TopicPartition, int] | None:
    """See `ports.Broker.last_sequences`; partitions of the open transaction are included."""
    touched = open_transaction(client, producer.transactional_id)
    row_partitions = {partition for partition in touched if partition.topic not in INTERNAL_TOPICS}
    states = producer_states(client, producer, row_partitions | set(partitions))
    if states is None:
        return None
    return {partition: int(state.last_sequence) for partition, state in states.items()}


def foreign_rows(
    client: Client, producer: Producer, produced: Iterable[ProducedRange]
) -> Mapping[TopicPartition, int]:
    """See `ports.Broker.foreign_rows`. Reads the log after each range, up to the marker.

    Where that part of the log is gone (retention, a topic that was deleted or created again, a log
    that was truncated) there is nothing left to be found, and nothing for a consumer to read
    either: such a partition is warned of, and counts as without foreign rows. It is gone where the
    coordinator has finished the commit, so that each log had its marker, and its leader goes on
    showing a log without.

    Raises:
        BrokerUnavailableError: a marker did not appear within delivery.timeout.ms. One is late when
            its partition's leader hangs: the coordinator writes it only to the next leader.
    """
    ranges = {written.topic_partition: written for written in produced}
    positions = {partition: written.last_offset + 1 for partition, written in ranges.items()}
    counts: dict[TopicPartition, int] = {}
    deadline = client.deadline()
    patience_s = min(GONE_AFTER_S, client.config.delivery_timeout_ms / 1000 / PATIENCE_SHARE)
    finished_at: float | None = None
    while positions:
        is_believed = finished_at is not None and time.monotonic() - finished_at >= patience_s
        answers = _peek(client, positions, absent_after_s=patience_s)
        gone = positions.keys() - answers.keys()
        before = dict(positions)
        for partition, answer in answers.items():
            seen = _seen(answer.records, positions[partition], producer)
            if seen.row_count:
                counts[partition] = counts.get(partition, 0) + seen.row_count
            positions[partition] = seen.position
            if seen.is_over:
                del positions[partition]
            elif is_believed and seen.position >= answer.high_watermark:  # -1: out of range
                gone.add(partition)
        for partition in gone:
            _tell_of_gone(client, producer, ranges[partition])
            del positions[partition]
        if not positions:
            break
        if time.monotonic() >= deadline:
            raise BrokerUnavailableError(
                f"the marker of the committed transaction of {producer.transactional_id!r} is not "
                f"in {len(positions)} partitions after {client.config.delivery_timeout_ms} ms, "
                f"{min(positions)} among them: whether rows of another task stand before it cannot "
                f"be told yet."
            )
        if positions != before:
            continue
        if finished_at is None and _is_finished(client, producer, deadline):
            finished_at = time.monotonic()
        client.forget_leaders(positions)
        if any(answer.error_code for answer in answers.values()):
            time.sleep(PEEK_WAIT_MS / 1000)  # an error is answered at once
    return counts


class _LogScan(NamedTuple):
    """A piece of log: the number of rows of a producer epoch, and whether a marker ends them."""

    row_count: int
    position: int
    is_over: bool


def _seen(records: bytes | None, position: int, producer: Producer) -> _LogScan:
    row_count = 0
    for header in _behind(records, position):
        position = header.last_offset + 1
        if header.producer_id != producer.producer_id:
            continue
        if header.is_control:
            return _LogScan(row_count, position, is_over=True)
        if header.producer_epoch == producer.producer_epoch:
            row_count += header.record_count
    return _LogScan(row_count, position, is_over=False)


def _is_finished(client: Client, producer: Producer, deadline: float) -> bool:
    """True if the coordinator has had all markers of a committed transaction written."""
    try:
        state = transaction_state(client, producer.transactional_id, deadline=deadline)
    except BrokerUnavailableError:
        return False  # the log may show the marker all the same, until the deadline
    if state is None:
        return True  # ids expire, but not with markers that are still to be written
    if state.transaction_state.startswith("Prepare"):
        return False
    is_open = state.transaction_state == "Ongoing"
    owner = (int(state.producer_id), int(state.producer_epoch))
    return not (is_open and owner == (producer.producer_id, producer.producer_epoch))


def _tell_of_gone(client: Client, producer: Producer, written: ProducedRange) -> None:
    partition = written.topic_partition
    bounds = [
        list_offsets(client, [partition], at, isolation=READ_UNCOMMITTED, absent_after_s=0)
        for at in (EARLIEST, LATEST)
    ]
    begin, end = (offsets.get(partition) for offsets in bounds)
    exists = begin is not None and end is not None
    logger.warning(
        "%s: the end of committed transaction %s, whose rows stood at offsets %d to %d, is gone: "
        "%s. The topic was deleted, created again, truncated or cleaned up since. Who has not read "
        "those rows by then may miss them, and whether another attempt of a task wrote there too "
        "can no longer be checked; the pipeline goes on",
        partition,
        producer.transaction_name,
        written.first_offset,
        written.last_offset,
        f"the log begins at {begin} and ends at {end}" if exists else "there is no such partition",
    )


def batch_at_sequence(
    client: Client, producer: Producer, partition: TopicPartition, sequence: int
) -> BatchHeader:
    """Find a batch of this producer epoch in the log by the sequence of its first record.

    For the rare batch that Kafka acknowledged as a duplicate without its offset.

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
    """Return the request for the leaders' entries about the producers of partitions."""
    topic_class = protocol.DescribeProducersRequest.TopicRequest
    return protocol.DescribeProducersRequest(
        topics=[
            topic_class(name=topic, partition_indexes=indexes)
            for topic, indexes in by_topic(partitions).items()
        ]
    )


def _peek(
    client: Client,
    positions: Mapping[TopicPartition, int],
    *,
    absent_after_s: float | None = None,
) -> dict[TopicPartition, Any]:
    """Fetch a little from each position, committed or not; see `Client.ask_leaders`."""
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

    return client.ask_leaders(
        positions, make, answers, accept=OUT_OF_RANGE, absent_after_s=absent_after_s
    )


def _behind(records: bytes | None, position: int) -> Iterator[BatchHeader]:
    """Return the batches from a position on; a fetch may begin with the whole batch around it."""
    for header in batch_headers(records or b""):
        if header.last_offset >= position:
            yield header
