"""The codec against two other implementations: librdkafka's and, in the broker, Java's."""

import itertools
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Any

import confluent_kafka
import pyarrow as pa
import pytest

from tallystick.codec.records.compression import CODEC_IDS
from tallystick.codec.records.encoder import encode
from tallystick.codec.rows import partition_of
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.fetcher import fetch
from tallystick.kafka.writer import PartitionWriter
from tallystick.testing.kafka import EmbeddedKafka
from tallystick.values import SplitRange, TopicPartition

pytestmark = pytest.mark.broker

NAMES = sorted(CODEC_IDS)
TIMEOUT_S = 30.0
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
NOW_MS = 1_700_000_000_000

Row = tuple[int, bytes | None, bytes | None, int, int, list[tuple[str, bytes | None]] | None]
"""Offset, key, value, timestamp type as in Arrow, timestamp, headers."""

_numbers = itertools.count()


@pytest.fixture
def options(tallystick_kafka: EmbeddedKafka) -> dict[str, str]:
    """What each librdkafka client of a test begins with."""
    return tallystick_kafka.confluent_options()


@pytest.fixture
def config(tallystick_kafka: EmbeddedKafka) -> KafkaConfig:
    return KafkaConfig.from_options(
        {
            name.removeprefix("kafka."): value
            for name, value in tallystick_kafka.kafka_options.items()
        }
    )


@pytest.fixture
def client(config: KafkaConfig) -> Iterator[Client]:
    client = Client(config)
    yield client
    client.close()


def new_topic(kafka: EmbeddedKafka, partitions: int = 1, **settings: str) -> str:
    name = f"codec-{next(_numbers)}"
    named = {key.replace("_", "."): value for key, value in settings.items()}
    # The records are old: retention would delete them under the test.
    return kafka.create_topic(name, partitions=partitions, config={"retention.ms": "-1", **named})


def sample(count: int) -> pa.RecordBatch:
    """Records with all that the format knows."""
    rows = range(count)
    return pa.record_batch(
        {
            "key": pa.array([None if row % 7 == 0 else b"key-%d" % row for row in rows]),
            "value": pa.array(
                [None if row % 11 == 0 else sha256(b"%d" % row).digest() * 3 for row in rows]
            ),
            "timestamp": pa.array([NOW_MS + row * (-1) ** row for row in rows]),
            "headers": pa.array(
                [None if row % 5 else [("h", b"%d" % row), ("none", None)] for row in rows],
                HEADERS,
            ),
        }
    )


def rows_of(batches: Iterable[pa.RecordBatch]) -> list[Row]:
    """The decoded records in the form of `Row`."""
    return [
        (
            row["offset"],
            row["key"],
            row["value"],
            row["timestampType"],
            row["timestamp"],
            row["headers"] and [(header["key"], header["value"]) for header in row["headers"]],
        )
        for batch in batches
        for row in batch.to_pylist()
    ]


def expected(records: pa.RecordBatch) -> list[Row]:
    """The rows that a reader must see, if these are the first records of a topic."""
    return [
        (
            offset,
            row["key"],
            row["value"],
            0,
            row["timestamp"],
            row["headers"] and [(header["key"], header["value"]) for header in row["headers"]],
        )
        for offset, row in enumerate(records.to_pylist())
    ]


def read_with_librdkafka(
    options: dict[str, str], topic: str, isolation: str = "read_committed"
) -> list[Row]:
    consumer = confluent_kafka.Consumer(
        {
            **options,
            "group.id": "codec",
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
            "check.crcs": True,
            "isolation.level": isolation,
        }
    )
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    rows: list[Row] = []
    try:
        while True:
            message = consumer.poll(TIMEOUT_S)
            assert message is not None, f"nothing came within {TIMEOUT_S} s"
            error = message.error()
            if error is not None:
                assert error.code() == confluent_kafka.KafkaError._PARTITION_EOF, error
                return rows
            kind, timestamp = message.timestamp()
            rows.append(
                (
                    message.offset(),
                    message.key(),
                    message.value(),
                    kind - confluent_kafka.TIMESTAMP_CREATE_TIME,
                    timestamp,
                    message.headers(),
                )
            )
    finally:
        consumer.close()


def read_with_ours(
    client: Client, topic: str, stop_offset: int, isolation: Any = "read_committed"
) -> list[Row]:
    split = SplitRange(topic, 0, 0, stop_offset)
    return rows_of(fetch(client, split, headers=True, isolation=isolation))


def write_with_librdkafka(
    options: dict[str, str], topic: str, records: pa.RecordBatch, **settings: Any
) -> None:
    producer = confluent_kafka.Producer({**options, "linger.ms": 50, **settings})
    for row in records.to_pylist():
        producer.produce(
            topic,
            key=row["key"],
            value=row["value"],
            partition=0,
            timestamp=row["timestamp"],
            headers=row["headers"]
            and [(header["key"], header["value"]) for header in row["headers"]],
        )
    assert producer.flush(TIMEOUT_S) == 0


def write_with_ours(
    config: KafkaConfig,
    client: Client,
    topic: str,
    records: pa.RecordBatch,
    compression: str,
    batch_bytes: int = 900_000,
) -> None:
    """Write in a transaction, as the sink does."""
    broker = KafkaBroker(config)
    producer = broker.fence(f"writes-{topic}", None)
    writer = PartitionWriter(client, producer, transaction_version=broker.transaction_version)
    frames = [
        (TopicPartition(topic, 0), encoded)
        for encoded in encode(
            records, compression=compression, batch_bytes=batch_bytes, now_ms=NOW_MS
        )
    ]
    writer.write(frames)
    writer.close()
    broker.commit_transaction(producer)
    broker.close()


@pytest.mark.parametrize("count", [1, 200, 30_000], ids=["one", "small", "large batches"])
@pytest.mark.parametrize("compression", NAMES)
def test_librdkafka_reads_what_we_write(
    tallystick_kafka: EmbeddedKafka,
    options: dict[str, str],
    config: KafkaConfig,
    client: Client,
    compression: str,
    count: int,
) -> None:
    topic = new_topic(tallystick_kafka)
    records = sample(count)

    write_with_ours(config, client, topic, records, compression)

    assert read_with_librdkafka(options, topic) == expected(records)


def test_a_batch_of_several_lz4_blocks_is_accepted_and_read(
    tallystick_kafka: EmbeddedKafka, options: dict[str, str], config: KafkaConfig, client: Client
) -> None:
    """The broker decompresses what it accepts; blocks end after 4 MiB."""
    topic = new_topic(tallystick_kafka, max_message_bytes=str(16 << 20))
    records = sample(80_000)

    write_with_ours(config, client, topic, records, "lz4", batch_bytes=12_000_000)

    whole = expected(records)
    assert read_with_librdkafka(options, topic) == whole
    assert read_with_ours(client, topic, len(whole)) == whole


@pytest.mark.parametrize("compression", NAMES)
def test_we_read_what_librdkafka_writes(
    tallystick_kafka: EmbeddedKafka, options: dict[str, str], client: Client, compression: str
) -> None:
    topic = new_topic(tallystick_kafka)
    records = sample(10_000)

    write_with_librdkafka(options, topic, records, **{"compression.type": compression})

    assert read_with_ours(client, topic, records.num_rows) == expected(records)


@pytest.mark.parametrize("compression", ["uncompressed", *sorted(set(NAMES) - {"none"})])
def test_we_read_what_the_broker_compresses_anew(
    tallystick_kafka: EmbeddedKafka,
    options: dict[str, str],
    config: KafkaConfig,
    client: Client,
    compression: str,
) -> None:
    """A topic's own compression makes the broker write the batches itself, in Java."""
    topic = new_topic(tallystick_kafka, compression_type=compression)
    of_librdkafka, of_ours = sample(5_000), sample(3_000)
    other = "lz4" if compression == "uncompressed" else "none"

    write_with_librdkafka(options, topic, of_librdkafka, **{"compression.type": other})
    write_with_ours(config, client, topic, of_ours, other)

    seen = read_with_ours(client, topic, 8_000)
    assert seen[:5_000] == expected(of_librdkafka)
    assert seen == read_with_librdkafka(options, topic)


def test_the_brokers_timestamps_are_read(
    tallystick_kafka: EmbeddedKafka, options: dict[str, str], client: Client
) -> None:
    topic = new_topic(tallystick_kafka, message_timestamp_type="LogAppendTime")

    write_with_librdkafka(options, topic, sample(100))

    rows = read_with_ours(client, topic, 100)
    assert rows == read_with_librdkafka(options, topic)
    assert {kind for _, _, _, kind, _, _ in rows} == {1}


def transactional_producer(options: dict[str, str], name: str) -> confluent_kafka.Producer:
    producer = confluent_kafka.Producer(
        {**options, "transactional.id": name, "compression.type": "lz4"}
    )
    producer.init_transactions(TIMEOUT_S)
    return producer


def test_both_isolation_levels_agree_with_librdkafka_on_interleaved_transactions(
    tallystick_kafka: EmbeddedKafka, options: dict[str, str], client: Client
) -> None:
    """Aborted, committed and open transactions, of which one producer's second commits."""
    topic = new_topic(tallystick_kafka)
    names = [f"{topic}-{kind}" for kind in ("aborts", "commits", "open")]
    aborts, commits, stays_open = (transactional_producer(options, name) for name in names)
    plain = confluent_kafka.Producer(options)
    aborts.begin_transaction()
    commits.begin_transaction()
    for turn in range(6):
        for name, producer in (("aborted", aborts), ("committed", commits), ("plain", plain)):
            producer.produce(topic, f"{name} {turn}", partition=0)
            assert producer.flush(TIMEOUT_S) == 0
    aborts.abort_transaction(TIMEOUT_S)
    aborts.begin_transaction()
    aborts.produce(topic, "second of who aborted", partition=0)
    commits.commit_transaction(TIMEOUT_S)
    aborts.commit_transaction(TIMEOUT_S)
    stays_open.begin_transaction()
    stays_open.produce(topic, "open", partition=0)
    stays_open.flush(TIMEOUT_S)
    plain.produce(topic, "after what is open", partition=0)
    plain.flush(TIMEOUT_S)

    committed = read_with_librdkafka(options, topic, "read_committed")
    uncommitted = read_with_librdkafka(options, topic, "read_uncommitted")
    open_offset = next(offset for offset, _, value, *_ in uncommitted if value == b"open")
    end = uncommitted[-1][0] + 1

    assert (len(committed), len(uncommitted)) == (13, 21)
    assert read_with_ours(client, topic, open_offset) == committed
    assert read_with_ours(client, topic, end, "read_uncommitted") == uncommitted
    stays_open.abort_transaction(TIMEOUT_S)
    assert [value for _, _, value, *_ in read_with_ours(client, topic, end)] == [
        *(value for _, _, value, *_ in committed),
        b"after what is open",
    ]


def test_any_range_of_a_log_is_read_exactly(
    tallystick_kafka: EmbeddedKafka, options: dict[str, str], client: Client
) -> None:
    topic = new_topic(tallystick_kafka)
    records = sample(3_000)
    write_with_librdkafka(options, topic, records, **{"batch.num.messages": 700})
    whole = expected(records)

    for start, stop in ((0, 1), (1, 700), (699, 701), (1_500, 1_501), (2_999, 3_000), (250, 2_750)):
        split = SplitRange(topic, 0, start, stop)
        assert rows_of(fetch(client, split, headers=True)) == whole[start:stop]


def test_keys_go_where_murmur2_of_librdkafka_sends_them(
    tallystick_kafka: EmbeddedKafka, options: dict[str, str]
) -> None:
    topic = new_topic(tallystick_kafka, partitions=7)
    keys = [b"%d" % number * (number % 9) for number in range(500)]
    placed: dict[bytes, int] = {}

    def on_delivery(error: object, message: confluent_kafka.Message) -> None:
        assert error is None
        placed[message.key() or b""] = message.partition()

    producer = confluent_kafka.Producer({**options, "partitioner": "murmur2_random"})
    for key in keys:
        producer.produce(topic, b"v", key=key, on_delivery=on_delivery)
    assert producer.flush(TIMEOUT_S) == 0

    ours = partition_of(pa.array(keys), 7, 0).tolist()

    assert dict(zip(keys, ours, strict=True)) == {key: placed[key] for key in keys}
