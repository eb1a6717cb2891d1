"""What became of a transaction whose commit was not answered, or refused."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fake_broker import CLOSE, CODES, FakeBroker, answer, part
from real_kafka import numbers, read_back
from task_sinks import (
    opened,
    place_of,
    settled,
    written_in_another_process,
)

from tallystick.epoch.two_phase import Committable, Outcome
from tallystick.errors import BrokerUnavailableError, DataLossError, FencedError
from tallystick.kafka import outcome
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.outcome import Fate, TaskToken, TaskTransaction, fate_of, judge
from tallystick.testing.kafka import EmbeddedKafka
from tallystick.values import ProducedRange
from tests.failover.wire import Wire, coordinator_of
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(150)

EXHAUSTED = 32_766
"""The last producer epoch that a transaction can have; EndTxn answers with another producer id."""
OURS = TaskTransaction(
    transactional_id="tallystick-x/out/0/0",
    producer_id=42,
    producer_epoch=EXHAUSTED,
    transaction_version=2,
    cluster_id="fake",
    lineage="L",
    nonce="ours",
    token_group="tallystick-x/out/0/0-token",
    token_topic="orders",
    token_topic_id="",
    produced=(ProducedRange("orders", 1, 3, 10, 12),),
)
EPOCH = 5


def state(producer_id: int, epoch: int, name: str) -> Any:
    return SimpleNamespace(
        producer_id=producer_id, producer_epoch=epoch, transaction_state=name, error_code=0
    )


# --- what is to be made of the answers ------------------------------------------------------------


@pytest.mark.parametrize(
    ("description", "fate"),
    [
        (None, Fate.UNKNOWN),
        (state(42, EXHAUSTED, "Ongoing"), Fate.OPEN),
        (state(42, EXHAUSTED + 1, "Ongoing"), Fate.CONTESTED),
        (state(43, 0, "Ongoing"), Fate.CONTESTED),
        (state(42, EXHAUSTED + 1, "PrepareCommit"), Fate.ENDING),
        (state(42, EXHAUSTED + 1, "PrepareEpochFence"), Fate.ENDING),
        (state(42, EXHAUSTED + 1, "CompleteAbort"), Fate.OVER),
        (state(43, 0, "CompleteCommit"), Fate.OVER),
        (state(43, 1, "Empty"), Fate.OVER),
        (state(42, EXHAUSTED - 1, "CompleteCommit"), Fate.UNKNOWN),
    ],
)
def test_what_a_coordinator_says_of_a_transaction(description: Any, fate: Fate) -> None:
    assert fate_of(OURS, description) is fate


TOKENS = {
    "ours": (TaskToken(EPOCH + 1, "L", "ours", 42, EXHAUSTED), Outcome.COMMITTED),
    "none": (None, Outcome.LOST),
    "of the epoch before": (TaskToken(EPOCH, "L", "other", 42, 7), Outcome.LOST),
    "of the epoch before, by another producer": (
        TaskToken(EPOCH, "L", "other", 9, 3),
        Outcome.LOST,
    ),
    "of another checkpoint, before": (TaskToken(99, "M", "other", 42, 7), Outcome.LOST),
    "of this epoch, by another attempt": (TaskToken(EPOCH + 1, "L", "other", 43, 0), FencedError),
    "of a later epoch": (TaskToken(EPOCH + 2, "L", "other", 43, 0), FencedError),
    "of another checkpoint, since": (TaskToken(1, "M", "other", 42, 32_767), DataLossError),
    "of another checkpoint, who knows when": (TaskToken(1, "M", "other", 43, 0), DataLossError),
    "of a stranger": (TaskToken.read(7, "committed by a tool"), DataLossError),
}


@pytest.mark.parametrize(("token", "expected"), TOKENS.values(), ids=TOKENS)
def test_what_a_token_tells(token: TaskToken | None, expected: Any) -> None:
    if isinstance(expected, Outcome):
        assert judge(OURS, EPOCH, token, "") is expected
    else:
        with pytest.raises(expected, match=r"tallystick-x/out/0/0"):
            judge(OURS, EPOCH, token, "")


def test_without_a_token_a_doubt_is_an_error_that_says_what_to_compare() -> None:
    with pytest.raises(DataLossError, match=r"too old.*3 records in orders-1 offsets 10\.\.12"):
        judge(OURS, EPOCH, None, "too old")


def test_a_transaction_travels_as_text_and_so_does_its_token() -> None:
    assert TaskTransaction.from_json(OURS.to_json()) == OURS
    assert TaskToken.read(6, OURS.token_metadata(0)) == TOKENS["ours"][0]


# --- a coordinator that loses answers -------------------------------------------------------------


class Coordinator:
    """Keeps one transaction; as Kafka's does with transaction.version 2."""

    def __init__(self) -> None:
        self.state = state(OURS.producer_id, OURS.producer_epoch, "Ongoing")
        self.token: tuple[int, str] | None = None
        self.faults: list[Any] = []
        self.ended: list[bool] = []

    def end(self, request: Any) -> Any:
        fault = self.faults.pop(0) if self.faults else None
        if fault == "lost request":
            return CLOSE
        self.ended.append(request.committed)
        now = self.state
        error_name = None
        if now.producer_id == request.producer_id and now.transaction_state == "Ongoing":
            self.state = state(43, 0, "CompleteCommit")
            self.token = (EPOCH + 1, OURS.token_metadata(0))
        elif (now.producer_epoch, now.transaction_state) != (0, "CompleteCommit"):
            error_name = "InvalidProducerIdMapping"
        if fault == "lost answer":
            return CLOSE
        return answer(
            request,
            error_code=CODES[fault or error_name],
            producer_id=self.state.producer_id,
            producer_epoch=self.state.producer_epoch,
        )

    def describe(self, request: Any) -> Any:
        transaction_state = part(request, "TransactionState")(
            error_code=0,
            transactional_id=request.transactional_ids[0],
            transaction_state=self.state.transaction_state,
            transaction_timeout_ms=1,
            transaction_start_time_ms=1,
            producer_id=self.state.producer_id,
            producer_epoch=self.state.producer_epoch,
            topics=[],
        )
        return answer(request, transaction_states=[transaction_state])

    def offsets(self, request: Any) -> Any:
        group_class = part(request, "OffsetFetchResponseGroup")
        topic_class = group_class.OffsetFetchResponseTopics
        offset, metadata = self.token or (-1, "")
        offset_partition = topic_class.OffsetFetchResponsePartitions(
            partition_index=0,
            committed_offset=offset,
            committed_leader_epoch=-1,
            metadata=metadata,
            error_code=0,
        )
        topics = [topic_class(name="orders", partitions=[offset_partition])]
        group = group_class(group_id=request.groups[0].group_id, topics=topics, error_code=0)
        return answer(request, groups=[group])

    @property
    def handlers(self) -> dict[str, Any]:
        return {
            "EndTxn": self.end,
            "DescribeTransactions": self.describe,
            "OffsetFetch": self.offsets,
        }


def commit_at(coordinator: Coordinator, **options: str) -> Outcome:
    with FakeBroker(coordinator.handlers) as broker:
        client = Client(broker.config(**options))
        try:
            return outcome.commit(client, OURS, EPOCH, age_ms=0)
        finally:
            client.close()


@pytest.mark.parametrize("fault", ["lost request", "lost answer", "ConcurrentTransactions"])
def test_a_commit_is_repeated_until_it_is_answered_also_by_another_producer_id(fault: str) -> None:
    coordinator = Coordinator()
    coordinator.faults = [fault, fault]

    assert commit_at(coordinator) is Outcome.COMMITTED
    assert set(coordinator.ended) == {True}, "no abort follows a commit"


def test_a_repeated_commit_is_known_by_its_token_once_the_new_id_is_in_use() -> None:
    """The epochs were used up, the answer was lost, and the next task has begun (FLINK-40689)."""
    coordinator = Coordinator()
    assert commit_at(coordinator) is Outcome.COMMITTED
    for following in (
        state(43, 1, "Empty"),
        state(43, 1, "Ongoing"),
        state(43, 2, "CompleteAbort"),
    ):
        coordinator.state = following

        assert commit_at(coordinator) is Outcome.COMMITTED
    assert set(coordinator.ended) == {True}


def test_a_commit_without_any_answer_stays_open() -> None:
    coordinator = Coordinator()
    coordinator.faults = ["lost answer"] * 1000

    with pytest.raises(BrokerUnavailableError, match="unknown"):
        commit_at(coordinator, delivery_timeout_ms="700")
    assert set(coordinator.ended) == {True}


def test_while_somebody_ends_it_nobody_guesses() -> None:
    """PrepareAbort will become CompleteAbort; until then there is no token and no outcome."""
    coordinator = Coordinator()
    coordinator.state = state(42, EXHAUSTED + 1, "PrepareAbort")
    with pytest.raises(BrokerUnavailableError, match="PrepareAbort"):
        commit_at(coordinator, delivery_timeout_ms="700")


# --- a broker that goes away ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def kafka() -> Iterator[EmbeddedKafka]:
    """Three brokers: one without a replica may lose the markers when it is killed (KAFKA-20734)."""
    with EmbeddedKafka(brokers=3) as running:
        yield running


@pytest.fixture
def topic(kafka: EmbeddedKafka) -> str:
    return kafka.create_topic(f"kafka-output-{next(numbers)}", 3)


@pytest.fixture
def pipeline() -> str:
    return f"flights-{next(numbers)}"


def bounce_coordinator(kafka: EmbeddedKafka, client: Client, committable: Committable) -> None:
    name = json.loads(committable.details)["transactional_id"]
    node = coordinator_of(client, "transaction", name)
    kafka.kill(node)
    kafka.restart(node)


@pytest.mark.broker
def test_the_coordinator_is_killed_between_prepare_and_commit_and_in_the_middle_of_one(
    kafka: EmbeddedKafka, config: KafkaConfig, client: Client, topic: str, pipeline: str
) -> None:
    patient = replace(config, delivery_timeout_ms=90_000)
    with opened(patient, topic, pipeline) as sink:
        plan = sink.plan()
        first, second = (
            written_in_another_process(plan, place_of(pipeline, task=task), f"task {task}")
            for task in range(2)
        )
        kafka.wait_until_in_sync()
        bounce_coordinator(kafka, client, first)
        assert sink.commit(first) is Outcome.COMMITTED
        kafka.wait_until_in_sync()
        wire, bounced = Wire(sink._client), []

        def bounce() -> None:
            time.sleep(0.003)
            bounce_coordinator(kafka, client, second)
            bounced.append(second)

        wire.after("EndTxn", bounce)
        assert sink.commit(second) is Outcome.COMMITTED

        assert [sink.commit(committable) for committable in (first, second)] == [
            Outcome.COMMITTED
        ] * 2
        assert bounced == [second]
        settled(sink._client, second)
    kafka.wait_until_ready()
    # Committed is not visible yet: the next coordinator writes the markers of both.
    wait_until(
        lambda: len(read_back(config, topic)) >= 2,
        lambda: f"two rows are expected, visible are {read_back(config, topic)}",
    )
    assert read_back(config, topic) == ["task 0", "task 1"]
