"""What each guarantee does; what a changed one finds; what a run refuses, and what it leaves."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import confluent_kafka
import pyarrow as pa
import pytest
from fake_broker import SILENCE, FakeBroker
from real_kafka import numbers, read_back, read_in_order
from task_sinks import (
    committed,
    opened,
    output_of,
    place_of,
    rows_of,
    state_of,
    taken_over,
    written_by,
)

from tallystick.codec.records.encoder import encode
from tallystick.epoch.two_phase import (
    Guarantee,
    Outcome,
    RunFacts,
    Transaction,
    TransactionPlan,
    TwoPhaseCommitSink,
)
from tallystick.errors import OptionError, RecordError, WorkerOrphanedError
from tallystick.host.worker_cache import WorkerCache
from tallystick.kafka import cluster, protocol, task_transaction
from tallystick.kafka.audit import describe_producers
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.protocol import partitions_of
from tallystick.kafka.task_sink import KafkaTaskSink
from tallystick.kafka.task_transaction import Acks0Writer
from tallystick.testing.kafka import create_topic
from tallystick.values import TopicPartition
from tests.failover.wire import Wire
from tests.waiting import wait_for, wait_until

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]


@pytest.fixture
def pipeline() -> str:
    return f"flights-{next(numbers)}"


@pytest.fixture
def narrow(client: Client) -> str:
    """A topic that takes small batches only."""
    name = f"narrow-{next(numbers)}"
    create_topic(client, name, 1, config={"max.message.bytes": "2000"})
    return name


@pytest.mark.parametrize("guarantee", [Guarantee.AT_LEAST_ONCE, Guarantee.NONE])
def test_without_transactions_rows_are_visible_at_once_and_again_when_the_epoch_runs_again(
    config: KafkaConfig, topic: str, pipeline: str, guarantee: Guarantee
) -> None:
    assert read_back(config, topic) == []  # its leaders answer: acks=0 loses what they refuse
    with opened(config, topic, pipeline, guarantee=guarantee) as sink:
        assert sink.timeout is None
        failed = sink.plan().begin(place_of(pipeline))
        for index in range(64):  # as many as are sent together
            failed.write(rows_of(f"{index:02}"))
        wait_for(lambda: len(read_back(config, topic)), 64, "the number of rows")
        failed.abort()

        again = sink.plan().begin(place_of(pipeline, attempt=1))
        for index in range(130):
            again.write(rows_of(f"{index:02}"))
        assert list(again.prepare()) == []
        if guarantee is Guarantee.NONE:
            wait_for(lambda: len(read_back(config, topic)), 64 + 130, "the number of rows")
        assert list(sink.lingering(place_of(pipeline).owner)) == []
    assert read_back(config, topic) == sorted(
        [f"{index:02}" for index in range(64)] + [f"{index:02}" for index in range(130)]
    )


@pytest.mark.parametrize("guarantee", [Guarantee.AT_LEAST_ONCE, Guarantee.NONE])
def test_batches_are_cut_to_the_topics_limit_and_a_record_beyond_it_is_named(
    config: KafkaConfig, narrow: str, pipeline: str, guarantee: Guarantee
) -> None:
    many = [f"{index:0100}" for index in range(100)]
    with opened(config, narrow, pipeline, guarantee=guarantee, compression="none") as sink:
        written = sink.plan().begin(place_of(pipeline))
        written.write(rows_of(*many))
        assert list(written.prepare()) == []
        wait_for(lambda: len(read_back(config, narrow)), 100, "the number of rows")
        too_large = sink.plan().begin(place_of(pipeline))
        with pytest.raises(RecordError, match=r"max\.message\.bytes"):  # noqa: PT012
            too_large.write(rows_of("x" * 5000))
            too_large.prepare()
        too_large.abort()
    assert read_back(config, narrow) == many


def test_none_does_not_tell_of_what_kafka_refuses(
    config: KafkaConfig, narrow: str, pipeline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not knowing is what it means where the limit is not known; what comes after it arrives."""
    monkeypatch.setattr(cluster, "batch_limits", lambda client, topics: {})
    none, how = Guarantee.NONE, {"compression": "none"}
    with opened(config, narrow, pipeline, guarantee=none, **how) as sink:
        silent = sink.plan().begin(place_of(pipeline))
        silent.write(rows_of(*(f"{index:0100}" for index in range(100))))
        assert list(silent.prepare()) == []
        for index in range(5):  # Kafka has hung up; what is sent into that is lost as well

            def write_one(text: str = f"after {index}") -> bool:
                following = sink.plan().begin(place_of(pipeline))
                following.write(rows_of(text))
                following.prepare()
                return read_back(config, narrow) != []

            if write_one():
                break
        wait_until(lambda: read_back(config, narrow), "none of the rows behind the lost ones came")
    assert all(text.startswith("after") for text in read_back(config, narrow))


def test_what_gets_no_answer_does_not_confuse_those_that_do() -> None:
    """The connection is still good: nothing is waited for that never comes."""
    with FakeBroker({"Produce": lambda _: SILENCE}) as broker:
        client = Client(broker.config())
        (encoded,) = encode(rows_of("a"), now_ms=0)
        writer = Acks0Writer(client)
        for _ in range(2):
            writer.write([(TopicPartition("orders", 0), encoded)])
            client.network.ask(0, protocol.MetadataRequest(topics=[]), client.deadline())
        client.close()
        assert [request.acks for request in broker.requests_of("Produce")] == [0, 0]
        assert broker.connection_count == 2, "one to ask for the brokers, one to the leader"


@pytest.mark.parametrize("guarantee", [Guarantee.AT_LEAST_ONCE, Guarantee.NONE])
def test_a_changed_guarantee_still_settles_what_is_pending(
    config: KafkaConfig, client: Client, topic: str, pipeline: str, guarantee: Guarantee
) -> None:
    """The topic may be another one too."""
    elsewhere = f"elsewhere-{next(numbers)}"
    create_topic(client, elsewhere, 1)
    with opened(config, topic, pipeline) as sink:
        pending = written_by(sink.plan(), place_of(pipeline), "pending")
        undecided = written_by(sink.plan(), place_of(pipeline, task=1), "left")
    with opened(config, elsewhere, pipeline, guarantee=guarantee) as sink:
        lingering = {
            committable.name: committable
            for committable in sink.lingering(place_of(pipeline).owner)
        }
        assert set(lingering) == {pending.name, undecided.name}
        sink.abort(lingering[undecided.name])
        assert committed(client, sink, pending) is Outcome.COMMITTED
        assert sink.commit(undecided) is Outcome.LOST
    assert read_back(config, topic) == ["pending"]


def test_rows_name_their_topics_and_dead_letters_are_part_of_the_transaction(
    config: KafkaConfig, client: Client, topic: str, pipeline: str
) -> None:
    """Keys, headers, order and partitions are those of the other ways to write."""
    dead = f"dead-{next(numbers)}"
    create_topic(client, dead, 1)
    rows = pa.record_batch(
        {
            "key": pa.array([f"k{index % 7}" for index in range(1000)]),
            "value": pa.array([f"{index:04}" for index in range(1000)]),
            "topic": pa.array([topic] * 1000),
        }
    )
    how: dict[str, Any] = {"token_topic": topic, "dead_letter_topic": dead, "batch_bytes": 1024}
    with opened(config, None, pipeline, **how) as sink:  # type: ignore[arg-type]
        task = sink.plan().begin(place_of(pipeline))
        task.write(rows)
        task.write_dead_letters(pa.record_batch({"value": pa.array([b"malformed"])}))
        (prepared,) = task.prepare()
        assert prepared.record_count == 1001
        assert read_back(config, dead) == []
        assert committed(client, sink, prepared) is Outcome.COMMITTED
    assert read_back(config, dead) == ["malformed"]
    by_key: dict[bytes, list[str]] = {}
    partitions: dict[bytes, set[int]] = {}
    for message in messages(config, topic, 1000):
        by_key.setdefault(message.key(), []).append(message.value().decode())
        partitions.setdefault(message.key(), set()).add(message.partition())
    assert sorted(text for texts in by_key.values() for text in texts) == [
        f"{index:04}" for index in range(1000)
    ]
    assert all(texts == sorted(texts) for texts in by_key.values())
    assert all(len(partition_rows) == 1 for partition_rows in partitions.values())


def messages(config: KafkaConfig, topic: str, count: int) -> list[Any]:
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": config.bootstrap_servers, "group.id": "order"}
    )
    consumer.assign([confluent_kafka.TopicPartition(topic, part, 0) for part in range(3)])
    records: list[Any] = []
    while len(records) < count:
        got = consumer.consume(count - len(records), 10)
        assert got, f"only {len(records)}"
        records += got
    consumer.close()
    return records


def test_what_cannot_work_is_refused_with_all_numbers(
    config: KafkaConfig, topic: str, pipeline: str
) -> None:
    output, prefix = output_of(config, topic), f"tallystick-{pipeline}"
    owner = place_of(pipeline).owner

    def refusal_of(facts: RunFacts = RunFacts(), **changes: Any) -> str:  # noqa: B008  a frozen value
        with pytest.raises(OptionError) as error:
            KafkaTaskSink(replace(output, **changes), owner, facts, id_prefix=prefix)
        return str(error.value)

    assert "brokers allow 900000" in refusal_of(transaction_timeout_ms=1_000_000)
    assert "'no-such-token'" in refusal_of(token_topic="no-such-token")
    both = refusal_of(
        RunFacts(trigger_interval_ms=60_000), max_recovery_ms=600_000, transaction_timeout_ms=19_000
    )
    assert "660000" in both
    assert "delivery.timeout.ms is 20000" in both
    with (
        opened(config, topic, pipeline) as sink,
        pytest.raises(OptionError, match="had theirs"),
    ):
        sink.plan().begin(place_of(pipeline, attempt=16))


def open_sockets() -> int:
    links = [Path("/proc/self/fd", name.name) for name in Path("/proc/self/fd").iterdir()]
    return sum(link.is_socket() for link in links)


@pytest.mark.parametrize("guarantee", list(Guarantee))
def test_nothing_is_left_of_a_run(
    config: KafkaConfig, client: Client, topic: str, pipeline: str, guarantee: Guarantee
) -> None:
    """No thread and no connection, however tasks end; not after an error either."""
    before = open_sockets(), threading.active_count()
    for _ in range(3):
        with opened(config, topic, pipeline, guarantee=guarantee) as sink:
            plan = sink.plan()
            done, failed = (plan.begin(place_of(pipeline, task=task)) for task in range(2))
            done.write(rows_of("done"))
            failed.write(rows_of("failed"))
            failed.abort()
            for committable in done.prepare():
                assert committed(client, sink, committable) is Outcome.COMMITTED
            assert open_sockets() > before[0]
    too_long = output_of(config, topic, transaction_timeout_ms=1_000_000)
    if guarantee is Guarantee.EXACTLY_ONCE:
        with pytest.raises(OptionError):
            KafkaTaskSink(too_long, place_of(pipeline).owner, RunFacts(), id_prefix=pipeline)
    assert (open_sockets(), threading.active_count()) == before


def test_it_is_what_the_protocol_asks_for(config: KafkaConfig, topic: str, pipeline: str) -> None:
    """Checked by the type checker; run, so that it is looked at."""
    with opened(config, topic, pipeline) as sink:
        driver: TwoPhaseCommitSink = sink
        plan: TransactionPlan = sink.plan()
        task: Transaction = plan.begin(place_of(pipeline))
        task.abort()
        assert driver.timeout == (120_000, 0.8)


def test_a_task_stops_when_its_executor_is_gone(
    config: KafkaConfig, topic: str, pipeline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the id from the task of the run that came after, and abort what that wrote."""
    monkeypatch.setenv("SPARK_PYTHON_RUNTIME", "PYTHON_WORKER")
    with opened(config, topic, pipeline) as sink:
        plan = sink.plan()
        task = plan.begin(place_of(pipeline))
        task.write(rows_of("too late"))
        monkeypatch.setattr("os.getppid", lambda: 1)
        with pytest.raises(WorkerOrphanedError, match="executor"):
            task.prepare()
        with pytest.raises(WorkerOrphanedError, match="executor"):
            plan.begin(place_of(pipeline, task=1))
        task.abort()


def test_a_process_keeps_one_producer_id_and_raises_its_epoch(
    config: KafkaConfig, client: Client, topic: str, pipeline: str
) -> None:
    """Brokers remember each id for a day: an id per task and epoch would fill their memory."""
    expected = []
    partition = TopicPartition(topic, 0)
    with opened(config, topic, pipeline, guarantee=Guarantee.AT_LEAST_ONCE) as sink:
        for epoch in range(3):
            failed = sink.plan().begin(place_of(pipeline, epoch))
            for _ in range(70):  # more than is kept back
                failed.write(rows_of("failed"))
            failed.abort()
            task = sink.plan().begin(place_of(pipeline, epoch, attempt=1))
            rows = [f"{epoch} {index:04}" for index in range(500)]
            for row in rows:
                task.write(rows_of(row))
            assert list(task.prepare()) == []
            expected += rows
        ids = producers_of(client, partition)

        one, other = (sink.plan().begin(place_of(pipeline, 3, task=task)) for task in range(2))
        for task in (one, other, one, other):  # beside each other, as threads may be
            task.write(rows_of(*(["beside"] * 70)))
        for task in (one, other):
            assert list(task.prepare()) == []
        assert len(producers_of(client, partition)) == 2

    assert len(ids) == 1
    ((_, epoch),) = ids.items()
    assert epoch >= 2, "each epoch's tasks have one of their own"
    texts_read = [text for text in read_in_order(config, topic) if text != "failed"]
    assert texts_read == [*expected, *["beside"] * 280]


def test_a_producer_id_that_has_used_up_its_epochs_is_replaced(
    config: KafkaConfig,
    client: Client,
    topic: str,
    pipeline: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(task_transaction, "_idle_producers", WorkerCache())
    with opened(config, topic, pipeline, guarantee=Guarantee.AT_LEAST_ONCE) as sink:
        plan = sink.plan()
        last = task_transaction.take_producer(client, config, plan.cluster_id)
        last = replace(last, producer_epoch=task_transaction.EPOCH_MAX - 1)
        task_transaction.give_producer_back(last, config, plan.cluster_id)
        for text in "abc":
            task = plan.begin(place_of(pipeline))
            task.write(rows_of(text))
            assert list(task.prepare()) == []
    assert read_in_order(config, topic) == ["a", "b", "c"]
    ids = producers_of(client, TopicPartition(topic, 0))
    assert ids.pop(last.producer_id) == task_transaction.EPOCH_MAX
    assert list(ids.values()) == [1]


def test_of_a_commit_and_a_take_over_at_once_one_wins_and_both_know_which(
    config: KafkaConfig, client: Client, topic: str, pipeline: str
) -> None:
    """EndTxn is delayed until the next user has fenced; and is answered, and the answer lost."""
    with opened(config, topic, pipeline) as sink:
        plan = sink.plan()
        kept = written_by(plan, place_of(pipeline, 0, task=0), "kept")
        lost = written_by(plan, place_of(pipeline, 0, task=1), "lost")
        wire = Wire(sink._client)
        wire.before("EndTxn", lambda: taken_over(config, lost))
        assert sink.commit(lost) is Outcome.LOST

        wire.lose("EndTxn", "answer")
        wire.after("EndTxn", lambda: time.sleep(0.2))
        taker = threading.Timer(0.1, taken_over, [config, kept])
        taker.start()
        assert sink.commit(kept) is Outcome.COMMITTED
        assert wire.lost["EndTxn", "answer"] == 1
        taker.join()
        wait_until(lambda: state_of(client, kept) != "PrepareCommit", "no marker is written")
    assert read_back(config, topic) == ["kept"]


def producers_of(client: Client, partition: TopicPartition) -> dict[int, int]:
    """The producer ids that a partition's leader remembers, with their epochs."""
    answers = client.ask_leaders([partition], describe_producers, partitions_of)
    producers = answers[partition].active_producers
    return {int(producer.producer_id): int(producer.producer_epoch) for producer in producers}
