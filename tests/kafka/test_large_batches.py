"""Batches that a topic refuses as too large, on a real Kafka, and answers lost meanwhile."""

import random
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from real_kafka import commit, read_in_order

from tallystick.codec.output_records import OutputRecords
from tallystick.codec.records.encoder import encode
from tallystick.codec.rows import RowLayout
from tallystick.errors import EpochAbortedError, RecordError, TallystickError
from tallystick.kafka import writer as writer_module
from tallystick.kafka.audit import last_sequences
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.client import Client
from tallystick.kafka.cluster import batch_limits
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.writer import PartitionWriter
from tallystick.testing.kafka import EmbeddedKafka, create_topic
from tallystick.values import Producer, TopicLimit, TopicPartition
from tests.failover.wire import Wire

pytestmark = pytest.mark.broker
LIMIT = 3_000
COMPRESSED = ("gzip", "snappy", "lz4", "zstd")


@pytest.fixture
def topic(client: Client) -> str:
    name = f"large-{time.monotonic_ns()}"
    create_topic(client, name, 1)
    return name


@pytest.fixture
def limit(kafka: EmbeddedKafka) -> Callable[..., None]:
    """Sets the limit of a topic, and its own compression."""
    from confluent_kafka.admin import (
        AdminClient,
        AlterConfigOpType,
        ConfigEntry,
        ConfigResource,
        ResourceType,
    )

    def set_limit(name: str, size: int, compression: str = "producer") -> None:
        settings = {"max.message.bytes": str(size), "compression.type": compression}
        entries = [
            ConfigEntry(setting, value, incremental_operation=AlterConfigOpType.SET)
            for setting, value in settings.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=entries)
        admin = AdminClient(kafka.confluent_options())
        admin.incremental_alter_configs([resource])[resource].result(30)

    return set_limit


def frames(topic: str, texts: list[str], batch_records: int = 20) -> list[tuple[Any, Any]]:
    values = pa.array([text.encode() for text in texts], pa.binary())
    now_ms = time.time_ns() // 1_000_000
    encoded = encode(pa.record_batch({"value": values}), now_ms=now_ms, batch_records=batch_records)
    return [(TopicPartition(topic, 0), batch) for batch in encoded]


def texts(count: int) -> list[str]:
    chosen = random.Random(count)
    return [f"{number:05}{chosen.randbytes(150).hex()}" for number in range(count)]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("loss", [None, "request", "answer"])
@pytest.mark.parametrize("after", [0, 3, 8])
def test_what_is_cut_is_written_once_and_in_order_whatever_is_lost(
    topic: str,
    config: KafkaConfig,
    broker: KafkaBroker,
    transactional_id: str,
    limit: Callable[[str, int], None],
    monkeypatch: pytest.MonkeyPatch,
    known: bool,
    loss: Any,
    after: int,
) -> None:
    limit(topic, LIMIT)
    if not known:
        monkeypatch.setattr(writer_module, "batch_limits", lambda *_: {})
    client = Client(config)
    wire = Wire(client)
    produced = 0

    def arm() -> None:
        nonlocal produced
        if produced == after and loss is not None:
            wire.lose("Produce", loss, times=2)
        produced += 1
        wire.before("Produce", arm)

    wire.before("Produce", arm)
    producer = broker.fence(transactional_id, None)
    writer = PartitionWriter(client, producer, transaction_version=broker.transaction_version)
    wanted = texts(100)

    writer.write(frames(topic, wanted[:60]))
    writer.write(frames(topic, wanted[60:]))

    (written,) = writer.close()
    assert (written.record_count, written.first_offset, written.last_offset) == (100, 0, 99)
    assert last_sequences(client, producer, [TopicPartition(topic, 0)]) == {
        TopicPartition(topic, 0): 99
    }
    assert sum(wire.lost.values()) == (2 if loss else 0), "the fault has hit"
    commit(broker, producer)
    assert read_in_order(config, topic) == wanted
    client.close()


def test_a_batch_that_was_written_before_the_limit_was_lowered_is_not_written_twice(
    topic: str,
    config: KafkaConfig,
    broker: KafkaBroker,
    transactional_id: str,
    limit: Callable[[str, int], None],
) -> None:
    """Its answer is lost, and what comes again is refused for its size: the epoch runs again."""
    client = Client(config)
    wire = Wire(client)
    producer = broker.fence(transactional_id, None)
    writer = PartitionWriter(client, producer, transaction_version=broker.transaction_version)

    def lower() -> None:
        deadline = time.monotonic() + 20
        while last_sequences(broker.client, producer, [TopicPartition(topic, 0)]) == {}:
            assert time.monotonic() < deadline, "the batch is written"
        limit(topic, LIMIT)
        wire.lose("Produce", "answer")

    wire.after("Produce", lower)
    with pytest.raises(EpochAbortedError, match="OutOfOrderSequence"):
        writer.write(frames(topic, texts(20)))

    assert wire.lost == {("Produce", "answer"): 1}
    broker.abort_transaction(producer)
    assert read_in_order(config, topic) == []
    client.close()


@pytest.mark.parametrize("own", ["producer", "uncompressed", *COMPRESSED])
@pytest.mark.parametrize("sinks", ["none", "lz4", "zstd"])
def test_each_record_is_written_or_a_dead_letter_whatever_the_topic_compresses(
    topic: str,
    config: KafkaConfig,
    client: Client,
    broker: KafkaBroker,
    transactional_id: str,
    limit: Callable[..., None],
    own: str,
    sinks: str,
) -> None:
    """Records about as large as the limit, as they come and as the topic has them."""
    chosen = random.Random(f"{own} {sinks}")
    limit(topic, LIMIT, own)
    fill = [lambda size: b"v" * size, chosen.randbytes]
    sizes = [chosen.choice((50, LIMIT - 90, LIMIT - 71, 2 * LIMIT)) for _ in range(60)]
    values = [
        b"%05d" % number + chosen.choice(fill)(size + chosen.randrange(5))
        for number, size in enumerate(sizes)
    ]
    letters: list[pa.RecordBatch] = []
    layout = RowLayout({topic: 1}, topic, batch_limits=batch_limits(client, [topic]))
    rows = pa.record_batch({"value": pa.array(values, pa.binary())})
    encoded = OutputRecords(layout, sinks, 20_000, letters).encode(
        rows, spread=0, now_ms=time.time_ns() // 1_000_000
    )
    producer = broker.fence(transactional_id, None)
    writer = PartitionWriter(client, producer, transaction_version=broker.transaction_version)

    writer.write(list(encoded))

    (written,) = writer.close()
    commit(broker, producer)
    assert 0 < len(letters) < len(values) == len(letters) + written.record_count


def test_what_an_idempotent_writer_cuts_is_written_once(
    topic: str, config: KafkaConfig, limit: Callable[[str, int], None]
) -> None:
    from tallystick.kafka.task_transaction import _plain, take_producer

    limit(topic, LIMIT)
    client = Client(config)
    wire = Wire(client)
    wire.lose("Produce", "answer", times=3)
    producer = take_producer(client, config, "")
    writer = PartitionWriter(client, producer, transaction_version=0)
    wanted = texts(100)

    writer.write(_plain(frames(topic, wanted)))

    assert wire.lost == {("Produce", "answer"): 3}
    assert read_in_order(config, topic) == wanted
    client.close()


def test_one_record_too_large_names_its_size_and_the_limit(
    topic: str,
    config: KafkaConfig,
    client: Client,
    broker: KafkaBroker,
    transactional_id: str,
    limit: Callable[[str, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit(topic, LIMIT)
    assert batch_limits(client, [topic, "no-such-topic"]) == {topic: TopicLimit(LIMIT)}
    for is_known, kind, says in (
        (True, EpochAbortedError, f"the topic takes {LIMIT}"),
        (False, RecordError, "DESCRIBE_CONFIGS"),
    ):
        if not is_known:
            monkeypatch.setattr(writer_module, "batch_limits", lambda *_: {})
        producer = broker.fence(transactional_id, None)
        writer = PartitionWriter(client, producer, transaction_version=broker.transaction_version)
        with pytest.raises(kind, match=rf"{topic}-0: .*a single record takes 60\d\d bytes.*{says}"):
            writer.write(frames(topic, ["small", "v" * 6000]))


def test_a_transaction_over_more_partitions_than_its_record_may_name_says_so(
    config: KafkaConfig, broker: KafkaBroker, client: Client, transactional_id: str
) -> None:
    """Kafka only says that the error is unknown."""
    from tallystick.kafka.audit import unexplained

    name = f"many-{time.monotonic_ns()}"
    create_topic(client, name, 2)
    producer: Producer = broker.fence(transactional_id, None)
    writer = PartitionWriter(client, producer, transaction_version=broker.transaction_version)
    writer.write(frames(name, ["a"]))

    error: TallystickError = unexplained(client, producer, "Produce", f"{name}-1")

    assert f"Produce for {name}-1: Unknown" in str(error)
    assert "has 1 partitions by now" in str(error)
    assert "__transaction_state takes 1048588 bytes" in str(error)
    assert "Raise max.message.bytes of __transaction_state" in str(error)


@pytest.mark.parametrize("what_is_too_much", ["rows", "offsets"])
def test_a_transaction_whose_record_is_over_its_limit_says_so_whatever_was_to_be_added(
    config: KafkaConfig,
    broker: KafkaBroker,
    client: Client,
    transactional_id: str,
    limit: Callable[..., None],
    what_is_too_much: str,
) -> None:
    """The partition of the group's offsets is one of the transaction too."""
    name = f"many-{time.monotonic_ns()}"
    create_topic(client, name, 60)
    producer: Producer = broker.fence(transactional_id, None)
    writer = PartitionWriter(client, producer, transaction_version=broker.transaction_version)
    ((_, encoded),) = frames(name, ["a"])

    def write_to_more_and_more() -> None:
        for number in range(60):
            writer.write([(TopicPartition(name, number), encoded)])

    limit("__transaction_state", 300, "uncompressed")
    try:
        with pytest.raises(TallystickError, match=f"Produce for {name}-.*: Unknown") as refused:
            write_to_more_and_more()
        if what_is_too_much == "offsets":
            with pytest.raises(TallystickError, match=f"TxnOffsetCommit for {name}-0") as refused:
                broker.stage_offsets(producer, "group", {TopicPartition(name, 0): (1, "")})
    finally:
        limit("__transaction_state", 1_048_588, "uncompressed")
    for words in (": Unknown: the broker names no reason", "__transaction_state takes 300 bytes"):
        assert words in str(refused.value)
    broker.abort_transaction(producer)
