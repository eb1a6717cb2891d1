"""The Broker port on a real Kafka, with transaction.version 0, 1 and 2; read back by librdkafka."""

import itertools
import time
from collections.abc import Iterator

import pytest
from real_kafka import GROUP, Write, commit, end_of, read, read_back

from tallystick.errors import (
    EpochAbortedError,
    FencedError,
)
from tallystick.kafka import cluster
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.writer import PartitionWriter
from tallystick.source.subscription import LATEST
from tallystick.testing.kafka import EmbeddedKafka
from tallystick.values import TopicPartition

pytestmark = pytest.mark.broker
QUICK_TIMEOUTS = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "200"}


@pytest.fixture(scope="module", params=[2, 1, 0], ids=lambda version: f"version-{version}")
def kafka(request: pytest.FixtureRequest) -> Iterator[EmbeddedKafka]:
    with EmbeddedKafka(transaction_version=request.param, properties=QUICK_TIMEOUTS) as running:
        yield running


def test_the_transaction_version_is_the_clusters(kafka: EmbeddedKafka, broker: KafkaBroker) -> None:
    assert broker.transaction_version == kafka.transaction_version


def test_epochs_become_visible_with_their_token(
    broker: KafkaBroker, client: Client, config: KafkaConfig, topic: str,
    transactional_id: str, write: Write,
) -> None:  # fmt: skip
    """Fence, write, stage, commit, ask: three times over, with a fresh producer epoch each time."""
    token = TopicPartition(topic, 0)
    group = f"{GROUP}-{transactional_id}"
    producer = broker.fence(transactional_id, None)
    assert broker.group_offsets(group) == {}
    seen = {(producer.producer_id, producer.producer_epoch)}
    expected: list[str] = []
    for epoch in range(3):
        texts = {part: [f"{epoch}-{part}-{index}" for index in range(20)] for part in (0, 2)}
        produced = write(producer, texts)
        sequences = broker.last_sequences(producer, [])

        broker.stage_offsets(producer, group, {token: (epoch + 1, f"path-{epoch}")})
        following = commit(broker, producer)

        assert sequences == {written.topic_partition: 19 for written in produced}
        assert broker.group_offsets(group)[token] == (epoch + 1, f"path-{epoch}")
        assert broker.foreign_rows(producer, produced) == {}
        expected += itertools.chain(*texts.values())
        producer = following
        assert (producer.producer_id, producer.producer_epoch) not in seen
        seen.add((producer.producer_id, producer.producer_epoch))
    assert read_back(config, topic) == sorted(expected)


def test_what_is_aborted_is_never_read(
    broker: KafkaBroker, client: Client, config: KafkaConfig, topic: str,
    transactional_id: str, write: Write,
) -> None:  # fmt: skip
    first = broker.fence(transactional_id, None)
    write(first, {0: ["aborted-1", "aborted-2"]})
    broker.abort_transaction(first)
    second = broker.fence(transactional_id, first)
    write(second, {0: ["kept"]})
    commit(broker, second)
    write(broker.fence(transactional_id, second), {0: ["still open"]})
    partition = TopicPartition(topic, 0)
    stop = cluster.list_offsets(broker.client, [partition], LATEST)[partition]

    assert read(client, topic, stop) == ["kept"] == read_back(config, topic)
    everything = read(client, topic, end_of(client, partition), "read_uncommitted")
    assert everything == ["aborted-1", "aborted-2", "kept", "still open"]


def test_aborting_nothing_and_aborting_again_changes_nothing(
    broker: KafkaBroker, config: KafkaConfig, topic: str, transactional_id: str, write: Write
) -> None:
    first = broker.fence(transactional_id, None)
    broker.abort_transaction(first)
    second = broker.fence(transactional_id, first)
    write(second, {0: ["aborted"]})
    broker.abort_transaction(second)
    third = broker.fence(transactional_id, second)

    broker.abort_transaction(third)

    following = broker.fence(transactional_id, third)
    write(following, {0: ["kept"]})
    commit(broker, following)
    assert read_back(config, topic) == ["kept"]


def test_a_zombie_task_cannot_write_once_the_driver_has_fenced(
    broker: KafkaBroker, config: KafkaConfig, topic: str, transactional_id: str, write: Write
) -> None:
    zombie = broker.fence(transactional_id, None)
    write(zombie, {0: ["before"]})
    fresh = broker.fence(transactional_id, zombie)

    with pytest.raises(EpochAbortedError):
        write(zombie, {1: ["too late"]})
    with pytest.raises(EpochAbortedError):
        broker.stage_offsets(zombie, GROUP, {TopicPartition(topic, 0): (1, "")})
    with pytest.raises(EpochAbortedError):
        broker.commit_transaction(zombie)

    write(fresh, {0: ["kept"]})
    commit(broker, fresh)
    assert read_back(config, topic) == ["kept"]


def test_a_zombie_of_a_committed_epoch_cannot_write(
    broker: KafkaBroker, config: KafkaConfig, topic: str, transactional_id: str, write: Write
) -> None:
    """With transaction.version 0 or 1 this holds only because each epoch is fenced anew."""
    zombie = broker.fence(transactional_id, None)
    write(zombie, {0: ["first"]})
    following = commit(broker, zombie)
    write(following, {0: ["second"]})

    with pytest.raises(EpochAbortedError):
        write(zombie, {0: ["too late"]}, first_sequence=1)

    commit(broker, following)
    assert read_back(config, topic) == ["first", "second"]


def test_after_a_take_over_the_old_driver_is_told_to_stop(
    broker: KafkaBroker, config: KafkaConfig, topic: str, transactional_id: str, write: Write
) -> None:
    old = broker.fence(transactional_id, None)
    write(old, {0: ["old"]})
    other = KafkaBroker(config)
    new = other.fence(transactional_id, None)
    write(new, {0: ["new"]})

    with pytest.raises(EpochAbortedError):
        broker.commit_transaction(old)
    with pytest.raises(FencedError, match=transactional_id):
        broker.fence(transactional_id, old)

    commit(other, new)
    other.close()
    assert read_back(config, topic) == ["new"]


def test_after_its_own_time_out_the_driver_goes_on(
    config: KafkaConfig, topic: str, transactional_id: str, write: Write
) -> None:
    """Nobody took over: Kafka itself aborted, and fencing as the current owner succeeds."""
    broker = KafkaBroker(config, transaction_timeout_ms=300)
    producer = broker.fence(transactional_id, None)
    write(producer, {0: ["timed out"]})
    deadline = time.monotonic() + 20
    while broker.last_sequences(producer, []) and time.monotonic() < deadline:
        time.sleep(0.1)

    with pytest.raises(EpochAbortedError):
        broker.commit_transaction(producer)
    fresh = broker.fence(transactional_id, producer)

    write(fresh, {0: ["kept"]})
    commit(broker, fresh)
    broker.close()
    assert read_back(config, topic) == ["kept"]


def test_a_stray_row_shows_in_the_last_sequences_to_another_writer_too(
    broker: KafkaBroker, client: Client, topic: str, transactional_id: str, write: Write
) -> None:
    """Where the driver did not expect any, too: the transaction names its partitions."""
    producer = broker.fence(transactional_id, None)
    (produced,) = write(producer, {0: ["a", "b", "c"]})
    write(producer, {1: ["stray"]})
    writer = PartitionWriter(client, producer, transaction_version=broker.transaction_version)

    assert broker.last_sequences(producer, [produced.topic_partition]) == {
        TopicPartition(topic, 0): 2,
        TopicPartition(topic, 1): 0,
    }
    assert writer.last_sequences([TopicPartition(topic, index) for index in (1, 2)]) == {
        TopicPartition(topic, 1): 0
    }
    broker.abort_transaction(producer)


def test_an_empty_transaction_has_no_sequences(broker: KafkaBroker, transactional_id: str) -> None:
    assert broker.last_sequences(broker.fence(transactional_id, None), []) == {}


def test_foreign_rows_are_those_behind_the_reported_ones(
    broker: KafkaBroker, topic: str, transactional_id: str, write: Write
) -> None:
    """Rows of other producers in between are not; nor are those of the next epoch."""
    producer = broker.fence(transactional_id, None)
    produced = write(producer, {0: ["a", "b"], 1: ["c"]})
    other = broker.fence(f"{transactional_id}-other", None)
    write(other, {0: ["neighbour"], 1: ["neighbour"]})
    write(producer, {0: ["foreign-1", "foreign-2"]}, first_sequence=2)
    commit(broker, other)
    following = commit(broker, producer)
    write(following, {0: ["next"], 1: ["next"]})
    commit(broker, following)

    assert broker.foreign_rows(producer, produced) == {TopicPartition(topic, 0): 2}
