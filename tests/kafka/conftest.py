"""Fixtures on a real Kafka; a module that wants another one overrides `kafka`."""

import time
from collections.abc import Iterator

import pyarrow as pa
import pytest
from real_kafka import Write, continue_at, numbers

from tallystick.codec.records.encoder import encode
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.writer import PartitionWriter
from tallystick.testing.kafka import EmbeddedKafka, create_topic
from tallystick.values import ProducedRange, Producer, TopicPartition


@pytest.fixture(scope="module")
def kafka(tallystick_kafka: EmbeddedKafka) -> EmbeddedKafka:
    """The cluster that a module's tests run on."""
    return tallystick_kafka


@pytest.fixture(scope="module")
def config(kafka: EmbeddedKafka) -> KafkaConfig:
    options = {name.removeprefix("kafka."): text for name, text in kafka.kafka_options.items()}
    return KafkaConfig.from_options({**options, "delivery.timeout.ms": "20000"})


@pytest.fixture
def broker(config: KafkaConfig) -> Iterator[KafkaBroker]:
    opened_broker = KafkaBroker(config)
    yield opened_broker
    opened_broker.close()


@pytest.fixture(scope="module")
def client(config: KafkaConfig) -> Iterator[Client]:
    opened_client = Client(config)
    yield opened_client
    opened_client.close()


@pytest.fixture
def topic(client: Client) -> str:
    name = f"kafka-output-{next(numbers)}"
    create_topic(client, name, 3)
    return name


@pytest.fixture
def transactional_id() -> str:
    return f"tallystick-test-{next(numbers)}"


@pytest.fixture
def write(client: Client, broker: KafkaBroker, topic: str) -> Write:
    """Write texts to partitions of the topic, as one task would."""

    def write(
        producer: Producer, texts: dict[int, list[str]], first_sequence: int = 0
    ) -> tuple[ProducedRange, ...]:
        writer = PartitionWriter(client, producer, transaction_version=broker.transaction_version)
        frames = []
        for partition, values in texts.items():
            column = pa.array([text.encode() for text in values], pa.binary())
            batch = pa.record_batch({"key": column, "value": column})
            encoded = list(encode(batch, now_ms=time.time_ns() // 1_000_000, batch_bytes=100))
            frames += [
                (TopicPartition(topic, partition), encoded_batch) for encoded_batch in encoded
            ]
        if first_sequence:
            continue_at(writer, frames[0][0], first_sequence)
        writer.write(frames)
        return writer.close()

    return write
