"""The transaction of a batch write on a real Kafka, transaction.version 0 to 2."""

import time
from collections.abc import Iterator
from pickle import dumps, loads  # as Spark sends it to tasks
from typing import Any

import pyarrow as pa
import pytest
from real_kafka import Write, numbers, read_back

from tallystick.errors import (
    BrokerUnavailableError,
    EpochAbortedError,
    FencedError,
    TallystickError,
)
from tallystick.kafka import batch_transaction
from tallystick.kafka.audit import transaction_state
from tallystick.kafka.batch_transaction import BatchTransaction
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.output import KafkaOutput
from tallystick.kafka.transactions import list_open_ids
from tallystick.testing.kafka import EmbeddedKafka
from tests.failover.wire import Loss, Wire

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]
COLUMNS = pa.schema({"key": pa.binary(), "value": pa.binary()})


@pytest.fixture(scope="module", params=[2, 1, 0], ids=lambda version: f"version-{version}")
def kafka(request: pytest.FixtureRequest) -> Iterator[EmbeddedKafka]:
    with EmbeddedKafka(transaction_version=request.param) as running:
        yield running


@pytest.fixture
def output(config: KafkaConfig, topic: str) -> KafkaOutput:
    return KafkaOutput(config, topic, token_topic="", transaction_timeout_ms=120_000)


@pytest.fixture
def name() -> str:
    return f"batch-{next(numbers)}"


def begin(output: KafkaOutput, name: str) -> BatchTransaction:
    """Begun by one process, ended by another."""
    begun = BatchTransaction.begin(output, name, COLUMNS)
    moved: BatchTransaction = loads(dumps(begun))  # noqa: S301
    return moved


def test_what_tasks_wrote_becomes_visible_at_once(
    config: KafkaConfig, client: Client, output: KafkaOutput, topic: str, name: str, write: Write
) -> None:
    for number in range(2):  # the second one follows under the same id
        batch = begin(output, name)
        produced = [
            *write(batch.producer, {0: [f"{number}-a"] * 20}),
            *write(batch.producer, {1: [f"{number}-b"]}),
        ]
        assert read_back(config, topic) == (["0-a"] * 20 + ["0-b"]) * number
        batch.commit(produced)

    assert list_open_ids(client) == set()
    assert read_back(config, topic) == ["0-a"] * 20 + ["0-b"] + ["1-a"] * 20 + ["1-b"]


def test_rows_that_no_task_reports_forbid_the_commit(
    config: KafkaConfig, client: Client, output: KafkaOutput, topic: str, name: str, write: Write
) -> None:
    """Of a task that Spark gave up, in a partition of its own or after the reported rows."""
    for strays, first in (({2: ["stray"]}, 0), ({0: ["stray"]}, 1)):
        batch = begin(output, name)
        produced = write(batch.producer, {0: ["row"]})
        write(batch.producer, strays, first)

        with pytest.raises(EpochAbortedError, match="another attempt of a task wrote too"):
            batch.commit(produced)
        batch.abort()

    batch = begin(output, name)
    write(batch.producer, {0: ["stray"]})
    with pytest.raises(EpochAbortedError, match="1 in Kafka, 0 reported"):
        batch.commit(())
    batch.abort()

    assert list_open_ids(client) == set()
    assert read_back(config, topic) == []


def test_after_an_abort_no_task_can_open_anything(
    client: Client, output: KafkaOutput, name: str, write: Write
) -> None:
    """Spark stops tasks some time after it asked for the abort."""
    batch = begin(output, name)
    batch.abort()

    with pytest.raises(TallystickError):
        write(batch.producer, {0: ["late"]})

    assert list_open_ids(client) == set()


def test_a_later_write_with_the_same_id_ends_the_earlier_one_and_not_the_reverse(
    config: KafkaConfig, output: KafkaOutput, topic: str, name: str, write: Write
) -> None:
    first = begin(output, name)
    of_first = write(first.producer, {0: ["first"]})
    second = begin(output, name)
    of_second = write(second.producer, {0: ["second"]})

    with pytest.raises(EpochAbortedError, match=r"another write with the same transactional\.id"):
        first.commit(of_first)
    first.abort()
    second.commit(of_second)
    first.abort()

    assert read_back(config, topic) == ["second"]


@pytest.mark.parametrize("loss", ["request", "answer"])
@pytest.mark.parametrize("api", ["DescribeTransactions", "DescribeProducers", "EndTxn", "Fetch"])
def test_a_commit_survives_the_loss_of_any_message(
    config: KafkaConfig,
    output: KafkaOutput,
    topic: str,
    name: str,
    write: Write,
    api: str,
    loss: Loss,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wires: list[Wire] = []

    def losing(*arguments: Any) -> KafkaBroker:
        broker = KafkaBroker(*arguments)
        wires.append(Wire(broker.client))
        wires[-1].lose(api, loss)
        return broker

    batch = begin(output, name)
    produced = write(batch.producer, {0: ["row"]})
    monkeypatch.setattr(batch_transaction, "KafkaBroker", losing)

    batch.commit(produced)

    assert [wire.lost[api, loss] for wire in wires] == [1]
    assert read_back(config, topic) == ["row"]


def test_no_abort_follows_a_commit_whose_answer_was_lost(
    config: KafkaConfig,
    client: Client,
    output: KafkaOutput,
    topic: str,
    name: str,
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spark asks to abort after any error of a commit; the error says where to look."""
    batch = begin(output, name)
    produced = write(batch.producer, {0: ["row", "other"]})
    end = batch_transaction.outcome.end_transaction

    def unanswered(*arguments: object, **how: object) -> None:
        end(*arguments, **how)  # type: ignore[arg-type]
        raise BrokerUnavailableError("no usable answer, by a test")

    monkeypatch.setattr(batch_transaction.outcome, "end_transaction", unanswered)
    with pytest.raises(BrokerUnavailableError, match=rf"{name}.*2 records in {topic}-0 offsets 0"):
        batch.commit(produced)
    batch.abort()

    while (state := transaction_state(client, name).transaction_state) == "PrepareCommit":
        time.sleep(0.01)
    assert state == "CompleteCommit"
    assert read_back(config, topic) == ["other", "row"]


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_a_refused_commit_is_told_apart_by_the_coordinator(
    config: KafkaConfig,
    output: KafkaOutput,
    topic: str,
    name: str,
    write: Write,
    is_taken_over: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first answer is lost, and the repeated request refused."""
    batch = begin(output, name)
    produced = write(batch.producer, {0: ["row"]})
    end = batch_transaction.outcome.end_transaction

    def refused(*arguments: object, **how: object) -> str:
        end(*arguments, **how)  # type: ignore[arg-type]
        if is_taken_over:
            broker = KafkaBroker(config)
            broker.fence(name, None)
            broker.close()
        return "InvalidProducerEpoch"

    monkeypatch.setattr(batch_transaction.outcome, "end_transaction", refused)
    if is_taken_over:
        with pytest.raises(FencedError, match="Read 1 records in"):
            batch.commit(produced)
    else:
        batch.commit(produced)

    assert read_back(config, topic) == ["row"]
