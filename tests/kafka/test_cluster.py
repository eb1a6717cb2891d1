"""What a real cluster tells, and what it tells of logs that are not as they should be."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import Producer, TopicCollection
from confluent_kafka.admin import AdminClient
from real_kafka import GROUP, Write, commit, delete_before, delete_topic, numbers

from tallystick.errors import BrokerUnavailableError, DataLossError, OptionError
from tallystick.kafka import cluster
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.fetcher import fetch
from tallystick.kafka.preflight import Replication
from tallystick.source.subscription import LATEST, FoundTopic
from tallystick.testing.kafka import EmbeddedKafka, create_topic
from tallystick.values import ProducedRange, SplitRange, TopicPartition
from tests.waiting import wait_for, wait_until

pytestmark = pytest.mark.broker


def test_rows_that_cannot_be_judged_yet_are_an_unavailable_broker(
    config: KafkaConfig, transactional_id: str, write: Write
) -> None:
    broker = KafkaBroker(config)
    producer = broker.fence(transactional_id, None)
    produced = write(producer, {0: ["a"]})
    quick = KafkaBroker(
        KafkaConfig(config.bootstrap_servers, request_timeout_ms=500, delivery_timeout_ms=2_000)
    )

    with pytest.raises(BrokerUnavailableError, match="the marker of the committed transaction"):
        quick.foreign_rows(producer, produced)

    broker.abort_transaction(producer)
    broker.close()
    quick.close()


def wait_for_end(client: Client, partition: TopicPartition, end: int | None) -> None:
    """Deleting and creating take effect on brokers a little later."""

    def listed() -> int | None:
        ends = cluster.list_offsets(
            client,
            [partition],
            LATEST,
            isolation=cluster.READ_UNCOMMITTED,
            absent_after_s=0,
        )
        if ends.get(partition) != end:
            client.forget_leaders([partition])
        return ends.get(partition)

    wait_for(listed, end, f"the end of {partition}")


def gone_topic(client: Client, written: ProducedRange) -> str:
    delete_topic(client, written.topic)
    wait_for_end(client, written.topic_partition, None)
    return "there is no such partition"


def recreated_topic(client: Client, written: ProducedRange) -> str:
    delete_topic(client, written.topic)
    create_topic(client, written.topic, 3)
    wait_for_end(client, written.topic_partition, 0)
    return "the log begins at 0 and ends at 0"


def recreated_topic_with_more_rows(client: Client, written: ProducedRange) -> str:
    """Its log reaches beyond the rows that are gone, and will never have their marker."""
    recreated_topic(client, written)
    producer = Producer({"bootstrap.servers": client.config.bootstrap_servers})
    for index in range(30):
        producer.produce(written.topic, f"other {index}", partition=written.partition)
    producer.flush()
    return "the log begins at 0 and ends at 30"


def deleted_records(client: Client, written: ProducedRange) -> str:
    delete_before(client, written.topic_partition, -1)
    return "the log begins at 3 and ends at 3"


@pytest.mark.parametrize(
    "lose", [gone_topic, recreated_topic, recreated_topic_with_more_rows, deleted_records]
)
def test_output_that_is_gone_behind_its_commit_is_told_and_passed_over(
    config: KafkaConfig, client: Client, topic: str, transactional_id: str, write: Write,
    caplog: pytest.LogCaptureFixture, lose: Callable[[Client, ProducedRange], str],
) -> None:  # fmt: skip
    """Nobody could ever say more of it: with an error here no start would succeed again."""
    broker = KafkaBroker(replace(config, delivery_timeout_ms=8_000, request_timeout_ms=2_000))
    producer = broker.fence(transactional_id, None)
    produced = write(producer, {0: ["a", "b"]})
    commit(broker, producer)
    assert broker.foreign_rows(producer, produced) == {}
    assert caplog.messages == []

    cause = lose(client, produced[0])

    assert broker.foreign_rows(producer, produced) == {}
    (message,) = caplog.messages
    assert message.startswith(f"{topic}-0: the end of committed transaction {transactional_id}:")
    assert f"rows stood at offsets 0 to 1, is gone: {cause}. " in message
    broker.close()


def test_a_leader_that_shows_less_for_a_moment_is_asked_again(
    config: KafkaConfig, topic: str, transactional_id: str, write: Write,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One that was deposed ends before the rows; one that was elected may hide the marker."""
    broker = KafkaBroker(replace(config, delivery_timeout_ms=8_000, request_timeout_ms=2_000))
    producer = broker.fence(transactional_id, None)
    (produced,) = write(producer, {0: ["a", "b"]})
    write(producer, {0: ["foreign"]}, first_sequence=2)
    commit(broker, producer)
    ask, lags = broker.client.ask_leaders, iter(["OffsetOutOfRange", None, "OffsetOutOfRange"])

    def lagging(*args: Any, **how: Any) -> dict[TopicPartition, Any]:
        answers = ask(*args, **how)
        if (lag := next(lags, "over")) != "over":
            ((partition, answer),) = answers.items()
            end, code = (-1, 1) if lag else (2, 0)
            lagged = answer._replace(records=None, high_watermark=end, error_code=code)
            answers = {partition: lagged}
        return answers

    monkeypatch.setattr(broker.client, "ask_leaders", lagging)

    assert broker.foreign_rows(producer, [produced]) == {TopicPartition(topic, 0): 1}
    assert next(lags, "over") == "over", "it has lagged three times"
    assert caplog.messages == []
    broker.close()


def test_expired_records_are_a_loss_with_figures(
    broker: KafkaBroker, client: Client, topic: str, transactional_id: str, write: Write
) -> None:
    producer = broker.fence(transactional_id, None)
    write(producer, {0: [f"row-{index}" for index in range(30)]})
    commit(broker, producer)
    delete_before(client, TopicPartition(topic, 0), 12)

    assert cluster.list_offsets(broker.client, [TopicPartition(topic, 0)], -2) == {
        TopicPartition(topic, 0): 12
    }
    with pytest.raises(DataLossError, match="the earliest left is 12: 7 offsets"):
        list(fetch(client, SplitRange(topic, 0, 5, 30)))


def test_a_missing_topic_is_refused_by_name(broker: KafkaBroker, topic: str) -> None:
    assert cluster.partition_counts(broker.client, [topic]) == {topic: 3}
    with pytest.raises(OptionError, match="'nowhere'"):
        cluster.partition_counts(broker.client, [topic, "nowhere"])


def test_topics_are_told_with_their_ids(
    broker: KafkaBroker, client: Client, config: KafkaConfig
) -> None:
    name = f"described-{next(numbers)}"
    create_topic(client, name, 3)

    (first,) = cluster.describe_topics(broker.client, [name]).values()

    assert first == FoundTopic(told_by_librdkafka(config, name), 3)
    everything = cluster.describe_topics(broker.client, None)
    assert everything[name] == first
    assert "__transaction_state" not in everything
    assert "__transaction_state" in cluster.describe_topics(broker.client, ["__transaction_state"])

    delete_topic(client, name)
    wait_for_end(client, TopicPartition(name, 0), None)
    assert cluster.describe_topics(broker.client, [name]) == {}
    create_topic(client, name, 2)
    (second,) = cluster.describe_topics(broker.client, [name]).values()
    assert second.partition_count == 2
    assert second.topic_id not in ("", first.topic_id)


def told_by_librdkafka(config: KafkaConfig, topic: str) -> str:
    librdkafka = AdminClient({"bootstrap.servers": config.bootstrap_servers})
    topic_id = librdkafka.describe_topics(TopicCollection([topic]))[topic].result(20).topic_id
    return str(topic_id).rstrip("=").replace("+", "-").replace("/", "_")


def test_a_topic_is_there_as_soon_as_it_was_created(broker: KafkaBroker, client: Client) -> None:
    for _ in range(10):
        name = f"just-created-{next(numbers)}"
        create_topic(client, name)
        partition = TopicPartition(name, 0)

        assert list(cluster.describe_topics(broker.client, [name])) == [name]
        assert cluster.list_offsets(broker.client, [partition], -1, absent_after_s=2.0) == {
            partition: 0
        }


def test_partitions_that_are_not_there_are_left_out_of_offsets_when_asked(
    broker: KafkaBroker, topic: str
) -> None:
    partitions = [TopicPartition(topic, 2), TopicPartition(topic, 3), TopicPartition("nowhere", 0)]
    began = time.monotonic()

    offsets = cluster.list_offsets(broker.client, partitions, -2, absent_after_s=0.5)

    assert offsets == {TopicPartition(topic, 2): 0}
    assert 0.5 <= time.monotonic() - began < 5.0


def test_a_topic_that_vanishes_is_a_loss_for_who_reads_it(
    config: KafkaConfig, client: Client
) -> None:
    name = f"vanishing-{next(numbers)}"
    create_topic(client, name)
    delete_topic(client, name)
    quick = Client(KafkaConfig(config.bootstrap_servers, "t", delivery_timeout_ms=1_500,
                               request_timeout_ms=1_000))  # fmt: skip

    with pytest.raises(DataLossError, match=name):
        list(fetch(quick, SplitRange(name, 0, 0, 5)))
    quick.close()


def test_a_group_without_members_takes_offsets(broker: KafkaBroker, topic: str) -> None:
    group = f"shown-{next(numbers)}"
    offsets = {TopicPartition(topic, 0): (7, ""), TopicPartition(topic, 2): (9, "note")}

    broker.commit_offsets(group, offsets)

    partitions = [TopicPartition(topic, index) for index in range(3)]
    offsets_committed = broker.committed_offsets(group, partitions)
    assert offsets_committed == {TopicPartition(topic, 0): 7, TopicPartition(topic, 2): 9}
    assert broker.group_offsets(group)[TopicPartition(topic, 2)] == (9, "note")


def test_an_epoch_that_read_the_last_of_a_deleted_topic_can_commit_all_the_same(
    topic: str, transactional_id: str, broker: KafkaBroker
) -> None:
    """Its position is best effort; a token under a topic that is gone is an error."""
    producer, group = broker.fence(transactional_id, None), f"{GROUP}-{transactional_id}"
    here, gone = TopicPartition(topic, 0), TopicPartition("deleted-meanwhile", 0)
    broker.stage_offsets(producer, group, {here: (1, ""), gone: (5, "")}, best_effort=True)
    commit(broker, producer)

    assert broker.committed_offsets(group, [here, gone]) == {here: 1}
    broker.commit_offsets(group, {here: (2, ""), gone: (6, "")})
    assert broker.committed_offsets(group, [here, gone]) == {here: 2}


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
        impatient.group_offsets(group, token)
    impatient.close()

    commit(broker, producer)
    assert broker.group_offsets(group)[token] == (1, "pending")


def test_offsets_by_time(
    broker: KafkaBroker, topic: str, transactional_id: str, write: Write
) -> None:
    partition = TopicPartition(topic, 0)
    producer = broker.fence(transactional_id, None)
    write(producer, {0: ["early"]})
    producer = commit(broker, producer)
    time.sleep(0.01)
    between = time.time_ns() // 1_000_000
    time.sleep(0.01)
    write(producer, {0: ["late"]})

    open_too, empty = TopicPartition(topic, 0), TopicPartition(topic, 1)
    later = {open_too: between, empty: 0}
    assert cluster.offsets_for_times(broker.client, {partition: 0}) == {partition: 0}
    assert cluster.offsets_for_times(broker.client, later) == {open_too: None, empty: None}
    assert cluster.list_offsets(broker.client, [partition], -1) == {partition: 2}

    commit(broker, producer)
    assert cluster.offsets_for_times(broker.client, later) == {open_too: 2, empty: None}


def test_the_facts_are_told(kafka: EmbeddedKafka, broker: KafkaBroker, topic: str) -> None:
    facts = cluster.cluster_facts(broker.client, [topic])

    assert facts.replication == {topic: Replication(len(kafka.nodes), 1, 1, 1)}
    assert facts.metadata_version is not None
    assert facts.metadata_version >= 15, "that of 3.7, the oldest that tests start"
    assert facts.transaction_version == kafka.transaction_version
    assert facts.api_versions["EndTxn"] >= 5
    assert facts.transaction_timeout_max_ms == 900_000
    assert facts.partition_verification is True
    assert facts.offsets_retention_minutes == 10_080
    assert facts.session_timeout_ms == 3_000
    assert facts.message_bytes_max is not None
    assert facts.message_bytes_max > 1_000_000
    assert broker.cluster_id()
    assert topic in cluster.topics(broker.client)
    assert not any(name.startswith("__") for name in cluster.topics(broker.client))


def test_topics_that_kafka_refuses_are_refused_with_its_words(client: Client) -> None:
    with pytest.raises(OptionError, match="InvalidReplicationFactor"):
        create_topic(client, "too-safe", 1, 17)
    with pytest.raises(OptionError, match=r"InvalidConfiguration.*no-such-setting"):
        create_topic(client, "odd", 1, -1, {"no-such-setting": "1"})


def test_creating_and_deleting_again_changes_nothing(
    broker: KafkaBroker, client: Client, topic: str
) -> None:
    before = cluster.describe_topics(broker.client, [topic])

    create_topic(client, topic, 5)

    assert cluster.describe_topics(broker.client, [topic]) == before
    assert before[topic].partition_count == 3
    for _ in range(2):
        delete_topic(client, topic)
    wait_until(
        lambda: topic not in cluster.topics(broker.client),
        f"the deleted topic {topic} is still listed",
    )
