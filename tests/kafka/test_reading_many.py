"""Many splits at once from a real Kafka."""

import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import confluent_kafka
import pytest
from real_kafka import Write, commit, delete_before, delete_topic, numbers

from tallystick.errors import (
    LogTruncatedError,
    PartitionRemovedError,
    RecordsExpiredError,
    TopicRecreatedError,
)
from tallystick.kafka import cluster, fetcher
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.fetcher import fetch_all
from tallystick.source.subscription import LENIENT
from tallystick.testing.kafka import create_topic
from tallystick.values import SplitRange, TopicPartition

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]
Fill = Callable[[str, int, int], None]


@pytest.fixture
def fill(config: KafkaConfig) -> Fill:
    """Write numbered records to the partitions of a topic, with a client that is not ours."""
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": config.bootstrap_servers, "linger.ms": 5}
    )

    def fill(topic: str, partition_count: int, count: int) -> None:
        for partition in range(partition_count):
            for number in range(count):
                producer.produce(topic, f"{partition}/{number}", partition=partition)
        assert producer.flush(30) == 0

    return fill


@pytest.fixture
def fetches(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The Fetch requests that go out."""
    sent: list[Any] = []
    post = client.network.post

    def noting(node: int, request: Any, deadline: float) -> Any:
        if "Fetch" in type(request).__name__:
            sent.append(request)
        return post(node, request, deadline)

    monkeypatch.setattr(client.network, "post", noting)
    return sent


def splits_of(broker: KafkaBroker, topic: str) -> list[SplitRange]:
    (topic_found,) = cluster.describe_topics(broker.client, [topic]).values()
    partitions = [TopicPartition(topic, index) for index in range(topic_found.partition_count)]
    return [
        SplitRange(topic, partition.partition, 0, end, topic_found.topic_id)
        for partition, end in cluster.list_offsets(broker.client, partitions, -1).items()
    ]


def texts(client: Client, splits: list[SplitRange], **how: Any) -> dict[int, list[str]]:
    texts_by_partition = defaultdict(list)
    for split, batch in fetch_all(client, splits, **how):
        texts_by_partition[split.partition] += [
            text.decode() for text in batch.column("value").to_pylist()
        ]
    return dict(texts_by_partition)


def expected(partition_count: int, count: int) -> dict[int, list[str]]:
    return {p: [f"{p}/{number}" for number in range(count)] for p in range(partition_count)}


def test_300_partitions_of_few_records_need_few_requests(
    client: Client, broker: KafkaBroker, fill: Fill, fetches: list[Any]
) -> None:
    name = f"many-{next(numbers)}"
    create_topic(client, name, 300)
    fill(name, 300, 10)

    assert texts(client, splits_of(broker, name)) == expected(300, 10)
    assert len(fetches) < 10


@pytest.mark.parametrize("max_bytes", [1, 5_000, 1 << 20])
def test_nothing_is_missed_however_little_is_asked_for_at_once(
    client: Client, broker: KafkaBroker, topic: str, fill: Fill, max_bytes: int
) -> None:
    for _ in range(5):
        fill(topic, 3, 100)

    rows_read = texts(client, splits_of(broker, topic), max_bytes=max_bytes)

    assert rows_read == {p: rows * 5 for p, rows in expected(3, 100).items()}


def test_aborted_rows_of_interleaved_partitions_are_left_out(
    client: Client, broker: KafkaBroker, topic: str, transactional_id: str, write: Write
) -> None:
    producer = broker.fence(transactional_id, None)
    for round_number in range(6):
        is_kept = round_number % 2
        kind = "kept" if is_kept else "lost"
        write(producer, {p: [f"{kind}-{round_number}-{n}" for n in range(30)] for p in range(3)})
        if is_kept:
            producer = commit(broker, producer)
        else:
            broker.abort_transaction(producer)
            producer = broker.fence(transactional_id, producer)

    rows_read = texts(client, splits_of(broker, topic), max_bytes=2_000)
    all_rows = texts(client, splits_of(broker, topic), isolation="read_uncommitted")

    kept = [f"kept-{round_number}-{n}" for round_number in (1, 3, 5) for n in range(30)]
    assert rows_read == dict.fromkeys(range(3), kept)
    assert {p: len(rows) for p, rows in all_rows.items()} == dict.fromkeys(range(3), 180)


def recreate(client: Client, broker: KafkaBroker, topic: str) -> None:
    (before,) = cluster.describe_topics(broker.client, [topic]).values()
    delete_topic(client, topic)
    assert cluster.describe_topics(broker.client, [topic]) == {}
    create_topic(client, topic, before.partition_count)


def test_a_topic_that_was_created_again_is_told_from_the_one_that_is_meant(
    client: Client, broker: KafkaBroker, topic: str, fill: Fill,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(fetcher, "CERTAIN_AFTER_S", 0.5)
    fill(topic, 3, 10)
    old = splits_of(broker, topic)
    texts(client, old)  # the client remembers the old one
    recreate(client, broker, topic)
    fill(topic, 3, 20)

    with pytest.raises(TopicRecreatedError, match="deleted and created again"):
        texts(client, old)
    assert texts(client, splits_of(broker, topic)) == expected(3, 20)
    assert texts(client, [*old, *splits_of(broker, topic)], policy=LENIENT) == expected(3, 20)


def test_a_topic_that_is_created_again_midway_is_not_read_on(
    client: Client, broker: KafkaBroker, topic: str, fill: Fill,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(fetcher, "CERTAIN_AFTER_S", 0.5)
    for _ in range(20):
        fill(topic, 1, 5)
    split = SplitRange(topic, 0, 0, 100)
    fetched = fetch_all(client, [split], max_bytes=1)
    rows = len(next(fetched)[1])
    recreate(client, broker, topic)
    for _ in range(20):
        fill(topic, 1, 5)

    with pytest.raises(TopicRecreatedError, match="next to read is offset"):
        rows += sum(len(batch) for _, batch in fetched)
    assert rows < 100


def test_a_missing_partition_is_told_in_seconds(
    client: Client, topic: str, fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "CERTAIN_AFTER_S", 0.5)
    fill(topic, 3, 10)
    splits = [SplitRange(topic, partition, 0, 10) for partition in range(5)]

    with pytest.raises(PartitionRemovedError, match=r"has no partition [34]"):
        texts(client, splits)
    assert texts(client, splits, policy=LENIENT) == expected(3, 10)


def test_expired_records_are_told_or_skipped(
    client: Client, broker: KafkaBroker, topic: str, fill: Fill, caplog: pytest.LogCaptureFixture
) -> None:
    fill(topic, 3, 30)
    splits = splits_of(broker, topic)
    delete_before(client, TopicPartition(topic, 1), 12)

    with pytest.raises(RecordsExpiredError, match="the earliest left is 12: 12 offsets"):
        texts(client, splits)
    with caplog.at_level(logging.WARNING):
        rows_read = texts(client, splits, policy=LENIENT)

    assert rows_read == expected(3, 30) | {1: [f"1/{number}" for number in range(12, 30)]}
    assert "offsets 0 to 12, 12 of them, had expired and are skipped" in caplog.text


def test_a_log_that_ends_before_the_position_is_a_loss(
    client: Client, topic: str, fill: Fill
) -> None:
    fill(topic, 1, 10)

    with pytest.raises(LogTruncatedError, match=r"offset 12, and the log ends .* its end is 10"):
        texts(client, [SplitRange(topic, 0, 12, 20)])
