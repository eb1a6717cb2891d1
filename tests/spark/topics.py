"""Topics as an outsider sees them: librdkafka writes the input and reads the output.

Nothing here shares code with the library, so it can bear witness.
"""

import json
import struct
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec

WAIT_S = 60.0
"""Longer than anything a healthy broker takes on a busy machine; then the test fails."""
TRY_S = 10.0
"""For the answer to one request; then it is asked again."""


@dataclass(frozen=True, slots=True)
class Record:
    """A record as a consumer gets it."""

    partition: int
    offset: int
    key: str | None
    value: str | None
    headers: tuple[tuple[str, bytes], ...] = ()
    timestamp: int = -1


def numbered(count: int, *, first: int = 0, keys: int = 7) -> list[tuple[str, str]]:
    """Keys and values: the values number the records, the keys take turns."""
    return [(f"k{i % keys}", str(i)) for i in range(first, first + count)]


def flights(count: int) -> list[tuple[str, str]]:
    """The same with JSON values."""
    return [(key, json.dumps({"k": key, "n": int(n)})) for key, n in numbered(count)]


def produce(
    options: Mapping[str, str],
    topic: str,
    records: Iterable[tuple[str | bytes | None, str | bytes | None]],
    *,
    partition: int = -1,
) -> None:
    """Write records, partitioned as the Java client would do it."""
    producer = Producer({**options, "partitioner": "murmur2_random", "linger.ms": 0})
    for key, value in records:
        producer.produce(topic, key=key, value=value, partition=partition)
    assert producer.flush(WAIT_S) == 0


def read_committed(options: Mapping[str, str], topic: str) -> list[Record]:
    """All committed records of a topic, by partition and offset, up to the last stable offset."""
    records = [_record(message) for message in _committed(options, topic)]
    return sorted(records, key=lambda record: (record.partition, record.offset))


def committed_bytes(options: Mapping[str, str], topic: str) -> list[tuple[int, bytes, bytes]]:
    """Partition, key and value of all committed records, by partition and offset."""
    messages = sorted(
        _committed(options, topic), key=lambda message: (message.partition(), message.offset())
    )
    return [(message.partition(), message.key(), message.value()) for message in messages]


def group_positions(options: Mapping[str, str], group: str) -> dict[int, int]:
    """Return the offsets by partition that the coordinator of a consumer group has.

    `read_group_offsets` sees nothing behind an open transaction, of whatever group, whose offsets
    are in the same partition of the broker's own topic: a driver that another test killed leaves
    one.
    """
    admin = AdminClient(dict(options))  # its answers come while it lives
    futures = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])
    answer = futures[group].result(WAIT_S)
    return {partition.partition: partition.offset for partition in answer.topic_partitions}


def read_group_offsets(
    options: Mapping[str, str], group: str
) -> dict[tuple[str, int], tuple[int, str]]:
    """What a consumer group holds: offset and metadata by topic and partition.

    Read from the broker's own topic: librdkafka copies metadata without its end, so whatever stands
    next in memory comes with it (seen with 2.16.1: a letter more, or a UnicodeDecodeError).

    Source: Kafka's OffsetCommitKey.json and OffsetCommitValue.json, version 4.
    """
    offsets: dict[tuple[str, int], tuple[int, str]] = {}
    for message in sorted(_committed(options, "__consumer_offsets"), key=Message.offset):
        key, value = message.key(), message.value()
        (kind,) = struct.unpack_from(">h", key)
        if kind > 1:  # members of a group
            continue
        name, at = _string(key, 2)
        topic, at = _string(key, at)
        (partition,) = struct.unpack_from(">i", key, at)
        if name != group:
            continue
        offsets.pop((topic, partition), None)
        if value is not None:
            version, offset, _leader_epoch = struct.unpack_from(">hqi", value)
            assert version == 4, f"an offset's format {version} is new here"
            size, at = _varint(value, 14)
            offsets[topic, partition] = offset, value[at : at + size - 1].decode()
    return offsets


def _string(data: bytes, at: int) -> tuple[str, int]:
    """A string as Kafka's formats have it, and where it ends."""
    (size,) = struct.unpack_from(">h", data, at)
    return data[at + 2 : at + 2 + size].decode(), at + 2 + size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """An unsigned number of seven bits a byte, and where it ends."""
    value = shift = 0
    while data[at] & 0x80:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | data[at] << shift, at + 1


def _committed(options: Mapping[str, str], topic: str) -> list[Message]:
    consumer = Consumer(
        {
            **options,
            "group.id": "witness",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    try:
        partitions = consumer.list_topics(topic, timeout=WAIT_S).topics[topic].partitions
        consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
        return list(_until_ends(consumer, set(partitions)))
    finally:
        consumer.close()


def _until_ends(consumer: Consumer, unread: set[int]) -> Iterable[Message]:
    while unread:
        message = consumer.poll(WAIT_S)
        assert message is not None, f"partitions {unread} could not be read to their ends"
        if message.error() is None:
            yield message
        else:
            assert message.error().name() == "_PARTITION_EOF", message.error()
            unread.discard(message.partition())


def _record(message: Message) -> Record:
    def text(data: bytes | None) -> str | None:
        return None if data is None else data.decode()

    return Record(
        message.partition(),
        message.offset(),
        text(message.key()),
        text(message.value()),
        tuple(message.headers() or ()),
        message.timestamp()[1],
    )


def ends(options: Mapping[str, str], topic: str, isolation: IsolationLevel) -> dict[int, int]:
    """The end of each partition as a consumer of this isolation level sees it.

    A leader may be new, and a request may find nobody: librdkafka gives such an answer on.
    """
    admin, deadline = AdminClient(dict(options)), time.monotonic() + WAIT_S
    partitions = admin.list_topics(topic, timeout=WAIT_S).topics[topic].partitions
    request = {TopicPartition(topic, partition): OffsetSpec.latest() for partition in partitions}
    while True:
        futures = admin.list_offsets(request, isolation_level=isolation, request_timeout=TRY_S)
        try:
            return {where.partition: future.result().offset for where, future in futures.items()}
        except KafkaException:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def pending(options: Mapping[str, str], topic: str) -> dict[int, int]:
    """How many offsets of each partition committed readers cannot pass yet; absent where none."""
    stable = ends(options, topic, IsolationLevel.READ_COMMITTED)
    last = ends(options, topic, IsolationLevel.READ_UNCOMMITTED)
    return {p: last[p] - stable[p] for p in last if last[p] > stable[p]}


def wait_until_nothing_is_pending(options: Mapping[str, str], topic: str) -> None:
    """Wait for markers that are on their way, or for a transaction to time out."""
    deadline = time.monotonic() + WAIT_S
    while open_partitions := pending(options, topic):
        assert time.monotonic() < deadline, f"{topic}: readers are stuck behind {open_partitions}"
        time.sleep(0.1)


def by_key(records: Iterable[tuple[str | None, str | None]]) -> dict[str | None, list[str | None]]:
    """The values of each key, in order: equal means nothing lost, repeated or overtaken."""
    ordered = sorted(records, key=lambda record: record[0] or "")  # stable
    return {key: [v for _, v in group] for key, group in groupby(ordered, lambda r: r[0])}


def assert_exact(
    options: Mapping[str, str], topic: str, expected: Iterable[tuple[str | None, str | None]]
) -> None:
    """The topic holds these records once each, in this order per key, and no reader is stuck.

    Kafka answers a commit before it writes the markers that show the rows to readers.
    """
    wait_until_nothing_is_pending(options, topic)
    records = read_committed(options, topic)
    assert by_key((r.key, r.value) for r in records) == by_key(expected)
    assert len({(r.key, r.partition) for r in records}) == len({r.key for r in records})
