"""Batches that a broker takes from a faulty producer, on a real Kafka, beside librdkafka."""

import itertools
import logging
import struct
from typing import Any

import pytest
from crc32c import crc32c
from real_kafka import read_in_order

from tallystick.errors import CorruptRecordError
from tallystick.kafka import protocol
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.fetcher import fetch_all
from tallystick.source.subscription import LossPolicy
from tallystick.values import SplitRange, TopicPartition

pytestmark = pytest.mark.broker


def batch(*records: bytes) -> bytes:
    """A batch of records as they are, with a right checksum."""
    body = b"".join(records)
    last = len(records) - 1
    checked = struct.pack(">hiqqqhii", 0, last, 1000, 1000, -1, -1, -1, len(records)) + body
    head = struct.pack(">qiibI", 0, 9 + len(checked), -1, 2, crc32c(checked))
    return head + checked


def record(delta: int, value: bytes) -> bytes:
    """A record without key and headers; small numbers are one byte as a varint."""
    body = b"\0\0" + bytes([2 * delta]) + b"\1" + bytes([2 * len(value)]) + value + b"\0"
    return bytes([2 * len(body)]) + body


def produce(client: Client, topic: str, data: bytes) -> None:
    """Write a batch as it is, by the version of Produce that old clients speak."""
    topic_class = protocol.ProduceRequest.TopicProduceData
    part = topic_class.PartitionProduceData(index=0, records=data)

    def make(_: list[TopicPartition]) -> Any:
        return protocol.ProduceRequest(
            transactional_id=None,
            acks=-1,
            timeout_ms=10_000,
            topic_data=[topic_class(name=topic, partition_data=[part])],
            max_version=7,
        )

    def answers(response: Any) -> list[tuple[TopicPartition, Any]]:
        (topic_response,) = response.responses
        return [(TopicPartition(topic, 0), topic_response.partition_responses[0])]

    client.ask_leaders([TopicPartition(topic, 0)], make, answers)


def read(client: Client, topic: str, *bounds: int, **policy: Any) -> list[tuple[int, bytes]]:
    splits = [SplitRange(topic, 0, start, stop) for start, stop in itertools.pairwise(bounds)]
    return [
        (offset, value)
        for split in splits
        for _, records in fetch_all(client, [split], policy=LossPolicy(**policy))
        for offset, value in zip(
            records.column("offset").to_pylist(), records.column("value").to_pylist(), strict=True
        )
    ]


def test_records_numbered_twice_or_out_of_order_are_all_read_once(
    client: Client, config: KafkaConfig, topic: str
) -> None:
    produce(client, topic, batch(record(0, b"a"), record(0, b"b")))
    produce(client, topic, batch(record(1, b"c"), record(0, b"d")))
    produce(client, topic, batch(record(0, b"e")))

    whole = [(0, b"a"), (0, b"b"), (3, b"c"), (2, b"d"), (4, b"e")]
    assert read(client, topic, 0, 5) == whole
    assert sorted(read(client, topic, 0, 1, 2, 3, 4, 5)) == sorted(whole), "on any cut"
    theirs = [text.encode() for text in read_in_order(config, topic)]
    assert theirs == [value for _, value in whole], "librdkafka reads them all too"


def test_a_batch_that_nobody_can_place_ends_the_read_with_its_cause_or_is_left_out(
    client: Client, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    produce(client, topic, batch(record(0, b"a")))
    produce(client, topic, batch(record(0, b"b"), record(9, b"c")))
    produce(client, topic, batch(record(0, b"d")))

    with pytest.raises(CorruptRecordError) as refused:
        read(client, topic, 0, 4)
    for words in (
        f"{topic}-0, record batch at offset 1: record 1 of 2 names an offset outside",
        "Its checksum is right, so it is no damage",
        "Mend the producer. Set when.unreadable=skip",
        "LossPolicy(unreadable='skip')",
        "offsets 1 to 2",
    ):
        assert words in str(refused.value)
    assert "Compare the replicas" not in str(refused.value)
    with caplog.at_level(logging.WARNING):
        assert read(client, topic, 0, 2, 4, unreadable="skip") == [(0, b"a"), (3, b"d")]
    assert "the batch of offsets 1 to 2 is left out, as asked" in caplog.text
