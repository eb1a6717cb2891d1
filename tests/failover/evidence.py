"""What stands in the logs at the end: as a consumer sees it, and batch by batch without one."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as Assigned

from tallystick.codec.records.batch_header import ControlType, batch_headers
from tallystick.codec.records.decoder import decode
from tallystick.kafka import protocol
from tallystick.kafka.client import Client
from tallystick.values import TopicPartition
from tests.failover.known_rows import ZOMBIE, Shape

FETCH_BYTES_MAX = 4 << 20


def read_committed(
    options: Mapping[str, str], topic: str, partition_count: int
) -> dict[int, list[str]]:
    """All rows that a consumer which is not ours sees, per partition."""
    consumer = Consumer(
        {
            **options,
            "group.id": "evidence",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
        }
    )
    consumer.assign([Assigned(topic, partition, 0) for partition in range(partition_count)])
    rows: dict[int, list[str]] = {partition: [] for partition in range(partition_count)}
    unread = set(rows)
    while unread:
        for message in consumer.consume(1_000, 0.05):
            if message.error():
                unread.discard(message.partition())
            else:
                rows[message.partition()].append(message.value().decode())
    consumer.close()
    return rows


@dataclass(frozen=True, slots=True)
class Part:
    """The part of one transaction that one partition holds, in the order of the log."""

    partition: int
    producer_id: int
    producer_epoch: int
    values: tuple[str, ...]
    committed: bool

    @property
    def transaction(self) -> tuple[int, int]:
        return self.producer_id, self.producer_epoch


def replay(client: Client, topic: str, partition_count: int) -> list[Part]:
    """Read the logs raw, and apply their transaction markers by hand.

    Raises:
        AssertionError: something is still open at the end of a log.
    """
    return [
        part
        for partition in range(partition_count)
        for part in _replay(client, TopicPartition(topic, partition))
    ]


def committed_rows(parts: list[Part]) -> dict[int, list[str]]:
    """The rows that count, in the order in which their transactions were decided."""
    rows: dict[int, list[str]] = defaultdict(list)
    for part in parts:
        if part.committed:
            rows[part.partition] += part.values
    return rows


def visible_zombies(parts: list[Part]) -> dict[tuple[int, int], int]:
    """The zombies' rows that count: how many, by epoch and partition."""
    visible: dict[tuple[int, int], int] = {}
    for part in parts:
        count = part.values.count(ZOMBIE)
        if part.committed and count:
            epochs = {int(value.split(":")[1]) for value in part.values if value != ZOMBIE}
            epoch = epochs.pop() if epochs else -1
            visible[epoch, part.partition] = count
    return visible


def _replay(client: Client, partition: TopicPartition) -> Iterator[Part]:
    unresolved: dict[int, tuple[int, list[str]]] = {}
    for data in _raw(client, partition):
        for header in batch_headers(data):
            if header.control_type is not None:
                epoch, values = unresolved.pop(header.producer_id, (-1, []))
                if values:
                    committed = header.control_type is ControlType.COMMIT
                    yield Part(
                        partition.partition, header.producer_id, epoch, tuple(values), committed
                    )
            elif not header.is_control:
                assert header.is_transactional, header
                epoch, values = unresolved.setdefault(
                    header.producer_id, (header.producer_epoch, [])
                )
                assert epoch == header.producer_epoch, (header, epoch)
                values += _values(data[header.start : header.end], partition)
    assert not unresolved, f"{partition} ends with open transactions of {sorted(unresolved)}"


def _values(batch: memoryview, partition: TopicPartition) -> list[str]:
    decoded = decode(
        batch,
        topic_partition=partition,
        start_offset=0,
        stop_offset=1 << 62,
        aborted=None,
        headers=False,
    )
    return [value.decode() for value in decoded.batch.column("value").to_pylist()]


def _raw(client: Client, partition: TopicPartition) -> Iterator[memoryview]:
    """Whole batches up to the high watermark, markers and aborted ones included."""
    position = 0
    while True:
        answer = _fetch(client, partition, position)
        data = memoryview(answer.records or b"")
        headers = [header for header in batch_headers(data) if header.last_offset >= position]
        if headers:
            yield data[headers[0].start : headers[-1].end]
            position = headers[-1].last_offset + 1
        if position >= answer.high_watermark:
            return


def _fetch(client: Client, partition: TopicPartition, position: int) -> Any:
    topic_class = protocol.FetchRequest.FetchTopic
    part = topic_class.FetchPartition(
        partition=partition.partition,
        fetch_offset=position,
        partition_max_bytes=FETCH_BYTES_MAX,
    )

    def make(_: list[TopicPartition]) -> Any:
        return protocol.FetchRequest(
            max_version=12,
            max_wait_ms=100,
            min_bytes=1,
            max_bytes=FETCH_BYTES_MAX,
            topics=[topic_class(topic=partition.topic, partitions=[part])],
        )

    def answers(response: Any) -> Iterator[tuple[TopicPartition, Any]]:
        for topic in response.responses:
            for partition_metadata in topic.partitions:
                yield partition, partition_metadata

    return client.ask_leaders([partition], make, answers)[partition]


def problems_of(
    shape: Shape, epochs: int, seen: Mapping[int, list[str]], parts: list[Part]
) -> list[str]:
    """What is wrong with a pipeline's output; nothing, if it is exact.

    Args:
        shape: what the pipeline writes.
        epochs: how many it has reported as done.
        seen: what a read_committed consumer got, of all pipelines that share the topic.
        parts: what the logs hold, of all pipelines too.
    """
    problems = []
    mine = f"{shape.pipeline}:"
    replayed = committed_rows(parts)
    for partition, wanted in shape.expected(epochs).items():
        for witness, by_partition in (("a consumer", seen), ("the log", replayed)):
            rows = [row for row in by_partition.get(partition, []) if row.startswith(mine)]
            if rows != wanted:
                problems.append(f"partition {partition}, {witness}: {difference(wanted, rows)}")
    by_transaction: dict[tuple[int, int], list[Part]] = defaultdict(list)
    for part in parts:
        if any(value.startswith(mine) for value in part.values):
            by_transaction[part.transaction].append(part)
    for transaction, found_parts in by_transaction.items():
        outcomes = {part.committed for part in found_parts}
        values = [value for part in found_parts for value in part.values]
        epochs_of = {value.split(":")[1] for value in values if value.startswith(mine)}
        if len(outcomes) > 1:
            problems.append(f"transaction {transaction} is committed in some partitions only")
        if len(epochs_of) > 1:
            problems.append(f"transaction {transaction} holds rows of epochs {epochs_of}")
    return problems


def difference(wanted: list[str], rows: list[str]) -> str:
    """How two lists of rows differ, in few words."""
    lost, extra = Counter(wanted) - Counter(rows), Counter(rows) - Counter(wanted)
    if lost or extra:
        examples = [*list(lost)[:2], *list(extra)[:2]]
        return f"{lost.total()} rows lost, {extra.total()} too many, such as {examples}"
    first = next(i for i, (a, b) in enumerate(zip(wanted, rows, strict=True)) if a != b)
    return f"all rows, but in another order from row {first} on"
