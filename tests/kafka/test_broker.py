"""The Broker port on a real Kafka, with transaction.version 0, 1 and 2; read back by librdkafka."""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import confluent_kafka
import pyarrow as pa
import pytest

from tallystick.errors import (
    BrokerUnavailableError,
    DataLossError,
    EpochAbortedError,
    FencedError,
    OptionError,
)
from tallystick.kafka import admin, offsets, protocol
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.fetcher import fetch
from tallystick.kafka.records import encode
from tallystick.kafka.writer import PartitionWriter
from tallystick.sink.transaction import ProducedRange, Producer
from tallystick.source.split import SplitRange
from tallystick.testing.kafka import EmbeddedKafka
from tallystick.topic_partition import TopicPartition

pytestmark = pytest.mark.broker
GROUP = "tallystick-test-token"
numbers = itertools.count()
QUICK_TIMEOUTS = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "200"}


@pytest.fixture(scope="module", params=[2, 1, 0], ids=lambda version: f"version-{version}")
def kafka(request: pytest.FixtureRequest) -> Iterator[EmbeddedKafka]:
    with EmbeddedKafka(transaction_version=request.param, properties=QUICK_TIMEOUTS) as running:
        yield running


@pytest.fixture(scope="module")
def config(kafka: EmbeddedKafka) -> KafkaConfig:
    options = {name.removeprefix("kafka."): text for name, text in kafka.kafka_options.items()}
    return KafkaConfig.from_options({**options, "delivery.timeout.ms": "20000"})


@pytest.fixture
def broker(config: KafkaConfig) -> Iterator[KafkaBroker]:
    made = KafkaBroker(config)
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(config: KafkaConfig) -> Iterator[Client]:
    made = Client(config)
    yield made
    made.close()


@pytest.fixture
def topic(client: Client) -> str:
    name = f"output-{next(numbers)}"
    admin.create_topic(client, name, 3)
    return name


@pytest.fixture
def transactional_id() -> str:
    return f"tallystick-test-{next(numbers)}"


Write = Callable[..., tuple[ProducedRange, ...]]


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
            frames += [(TopicPartition(topic, partition), each) for each in encoded]
        if first_sequence:
            continue_at(writer, frames[0][0], first_sequence)
        writer.write(frames)
        return writer.close()

    return write


def continue_at(writer: PartitionWriter, partition: TopicPartition, sequence: int) -> None:
    """Make a writer what no writer of ours is: one that goes on where another one stopped."""
    from tallystick.kafka.writer import _Log

    if writer._adds_partitions:
        writer._add_partitions([partition])
    writer._logs[partition] = _Log(next_sequence=sequence)


def read_back(config: KafkaConfig, topic: str, isolation: str = "read_committed") -> list[str]:
    """What an independent client finds, each partition to its end."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": config.bootstrap_servers,
            "group.id": "audit",
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "check.crcs": True,
        }
    )
    parts = list(consumer.list_topics(topic).topics[topic].partitions)
    consumer.assign([confluent_kafka.TopicPartition(topic, part, 0) for part in parts])
    texts, ended = [], 0
    while ended < len(parts):
        message = consumer.poll(20)
        assert message is not None, f"only {texts} within 20 s"
        if message.error() is None:
            texts.append(message.value().decode())
        else:
            ended += message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF
    consumer.close()
    return sorted(texts)


def read(client: Client, topic: str, stop: int, isolation: Any = "read_committed") -> list[str]:
    batches = fetch(client, SplitRange(topic, 0, 0, stop), isolation=isolation)
    return [value.decode() for batch in batches for value in batch.column("value").to_pylist()]


def end_of(client: Client, partition: TopicPartition) -> int:
    found = offsets.list_offsets(
        client, [partition], offsets.LATEST, isolation=offsets.READ_UNCOMMITTED
    )
    return found[partition]


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
    assert broker.committed_offset(group, token) is None
    seen = {(producer.producer_id, producer.producer_epoch)}
    expected: list[str] = []
    for epoch in range(3):
        texts = {part: [f"{epoch}-{part}-{index}" for index in range(20)] for part in (0, 2)}
        produced = write(producer, texts)
        sequences = broker.last_sequences(producer, [])

        broker.stage_offsets(producer, group, {token: (epoch + 1, f"path-{epoch}")})
        following = broker.commit_transaction(producer)

        assert sequences == {written.topic_partition: 19 for written in produced}
        assert broker.committed_offset(group, token) == (epoch + 1, f"path-{epoch}")
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
    broker.commit_transaction(second)
    write(broker.fence(transactional_id, second), {0: ["still open"]})
    partition = TopicPartition(topic, 0)
    stop = broker.list_offsets([partition], offsets.LATEST)[partition]

    assert read(client, topic, stop) == ["kept"] == read_back(config, topic)
    everything = read(client, topic, end_of(client, partition), "read_uncommitted")
    assert everything == ["aborted-1", "aborted-2", "kept", "still open"]


def test_aborting_nothing_and_aborting_again_is_fine(
    broker: KafkaBroker, transactional_id: str
) -> None:
    producer = broker.fence(transactional_id, None)

    broker.abort_transaction(producer)
    broker.abort_transaction(broker.fence(transactional_id, producer))


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
    broker.commit_transaction(fresh)
    assert read_back(config, topic) == ["kept"]


def test_a_zombie_of_a_committed_epoch_cannot_write(
    broker: KafkaBroker, config: KafkaConfig, topic: str, transactional_id: str, write: Write
) -> None:
    """With transaction.version 0 or 1 this holds only because each epoch is fenced anew."""
    zombie = broker.fence(transactional_id, None)
    write(zombie, {0: ["first"]})
    following = broker.commit_transaction(zombie)
    write(following, {0: ["second"]})

    with pytest.raises(EpochAbortedError):
        write(zombie, {0: ["too late"]}, first_sequence=1)

    broker.commit_transaction(following)
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

    other.commit_transaction(new)
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
    broker.commit_transaction(fresh)
    broker.close()
    assert read_back(config, topic) == ["kept"]


def test_a_stray_row_shows_in_the_last_sequences_and_stops_another_writer(
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
    writer.check_untouched([TopicPartition(topic, 2)])
    with pytest.raises(EpochAbortedError, match=f"{topic}-1 already holds rows"):
        writer.check_untouched([TopicPartition(topic, 1)])
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
    broker.commit_transaction(other)
    following = broker.commit_transaction(producer)
    write(following, {0: ["next"], 1: ["next"]})
    broker.commit_transaction(following)

    assert broker.foreign_rows(producer, produced) == {TopicPartition(topic, 0): 2}


def test_rows_that_cannot_be_judged_yet_are_an_unavailable_broker(
    config: KafkaConfig, transactional_id: str, write: Write
) -> None:
    quick = KafkaConfig(config.bootstrap_servers, request_timeout_ms=500)
    broker = KafkaBroker(quick)
    producer = broker.fence(transactional_id, None)
    produced = write(producer, {0: ["a"]})

    with pytest.raises(BrokerUnavailableError, match="the marker of the committed transaction"):
        broker.foreign_rows(producer, produced)

    broker.abort_transaction(producer)
    broker.close()


def test_rows_that_are_deleted_already_count_as_none(
    broker: KafkaBroker, client: Client, topic: str, transactional_id: str, write: Write
) -> None:
    producer = broker.fence(transactional_id, None)
    produced = write(producer, {0: ["a"]})
    write(broker.commit_transaction(producer), {0: ["b"]})
    delete_before(client, TopicPartition(topic, 0), 2)

    assert broker.foreign_rows(producer, produced) == {}


def delete_before(client: Client, partition: TopicPartition, offset: int) -> None:
    """DeleteRecords; at -1 up to the end."""
    topic_class = protocol.DeleteRecordsRequest.DeleteRecordsTopic
    part_class = topic_class.DeleteRecordsPartition

    def make(asked: list[TopicPartition]) -> Any:
        parts = [part_class(partition_index=each.partition, offset=offset) for each in asked]
        topics = [topic_class(name=partition.topic, partitions=parts)]
        return protocol.DeleteRecordsRequest(topics=topics, timeout_ms=5_000)

    from tallystick.kafka.partitions import partitions_of

    client.ask_leaders([partition], make, partitions_of)


def test_expired_records_are_a_loss_with_figures(
    broker: KafkaBroker, client: Client, topic: str, transactional_id: str, write: Write
) -> None:
    producer = broker.fence(transactional_id, None)
    write(producer, {0: [f"row-{index}" for index in range(30)]})
    broker.commit_transaction(producer)
    delete_before(client, TopicPartition(topic, 0), 12)

    assert broker.list_offsets([TopicPartition(topic, 0)], -2) == {TopicPartition(topic, 0): 12}
    with pytest.raises(DataLossError, match="the earliest left is 12: 7 offsets"):
        list(fetch(client, SplitRange(topic, 0, 5, 30)))


def test_a_missing_topic_is_refused_by_name(broker: KafkaBroker, topic: str) -> None:
    assert broker.partition_counts([topic]) == {topic: 3}
    with pytest.raises(OptionError, match="'nowhere'"):
        broker.partition_counts([topic, "nowhere"])


def test_a_topic_that_vanishes_is_a_loss_for_who_reads_it(
    config: KafkaConfig, client: Client
) -> None:
    name = f"vanishing-{next(numbers)}"
    admin.create_topic(client, name)
    admin.delete_topic(client, name)
    quick = Client(KafkaConfig(config.bootstrap_servers, "t", delivery_timeout_ms=1_500,
                               request_timeout_ms=1_000))  # fmt: skip

    with pytest.raises(DataLossError, match=name):
        list(fetch(quick, SplitRange(name, 0, 0, 5)))
    quick.close()


def test_a_group_without_members_takes_offsets(broker: KafkaBroker, topic: str) -> None:
    group = f"shown-{next(numbers)}"
    offsets = {TopicPartition(topic, 0): (7, ""), TopicPartition(topic, 2): (9, "note")}

    broker.commit_offsets(group, offsets)

    asked = [TopicPartition(topic, index) for index in range(3)]
    found = broker.committed_offsets(group, asked)
    assert found == {TopicPartition(topic, 0): 7, TopicPartition(topic, 2): 9}
    assert broker.committed_offset(group, TopicPartition(topic, 2)) == (9, "note")


def test_a_pending_token_is_waited_for(
    config: KafkaConfig, topic: str, transactional_id: str, broker: KafkaBroker
) -> None:
    """The plain answer would be the old one, silently."""
    token, group = TopicPartition(topic, 0), f"{GROUP}-{transactional_id}"
    producer = broker.fence(transactional_id, None)
    broker.stage_offsets(producer, group, {token: (1, "pending")})
    impatient = KafkaBroker(
        KafkaConfig(config.bootstrap_servers, request_timeout_ms=500, delivery_timeout_ms=800)
    )

    with pytest.raises(BrokerUnavailableError, match="UnstableOffsetCommit"):
        impatient.committed_offset(group, token)
    impatient.close()

    broker.commit_transaction(producer)
    assert broker.committed_offset(group, token) == (1, "pending")


def test_offsets_by_time(
    broker: KafkaBroker, topic: str, transactional_id: str, write: Write
) -> None:
    partition = TopicPartition(topic, 0)
    producer = broker.fence(transactional_id, None)
    write(producer, {0: ["early"]})
    time.sleep(0.01)
    between = time.time_ns() // 1_000_000
    time.sleep(0.01)
    write(broker.commit_transaction(producer), {0: ["late"]})

    assert broker.list_offsets([partition], 0) == {partition: 0}
    assert broker.list_offsets([partition], -1) == {partition: 2}
    assert broker.list_offsets([partition], between + 3_600_000) == {partition: 2}


def test_the_facts_are_told(kafka: EmbeddedKafka, broker: KafkaBroker, topic: str) -> None:
    facts = broker.cluster_facts()

    assert facts.transaction_version == kafka.transaction_version
    assert facts.api_versions["EndTxn"] >= 5
    assert facts.transaction_timeout_max_ms == 900_000
    assert facts.partition_verification is True
    assert facts.offsets_retention_minutes == 10_080
    assert facts.message_bytes_max is not None
    assert facts.message_bytes_max > 1_000_000
    assert broker.cluster_id()
    assert topic in broker.topics()
    assert not any(name.startswith("__") for name in broker.topics())


def test_topics_that_kafka_refuses_are_refused_with_its_words(client: Client) -> None:
    with pytest.raises(OptionError, match="InvalidReplicationFactor"):
        admin.create_topic(client, "too-safe", 1, 17)
    with pytest.raises(OptionError, match=r"InvalidConfiguration.*no-such-setting"):
        admin.create_topic(client, "odd", 1, -1, {"no-such-setting": "1"})


def test_creating_and_deleting_again_is_fine(client: Client, topic: str) -> None:
    admin.create_topic(client, topic, 3)
    admin.delete_topic(client, topic)
    admin.delete_topic(client, topic)
