"""Offsets that are sent into a transaction before anybody waits for the answer."""

from collections.abc import Iterator
from typing import Any

import pytest
from fake_broker import CLOSE, CODES, SILENCE, FakeBroker, answer, part

from tallystick.errors import AuthorizationError
from tallystick.kafka import protocol
from tallystick.kafka.broker import KafkaBroker
from tallystick.sink.transaction import Producer
from tallystick.topic_partition import TopicPartition

pytestmark = pytest.mark.timeout(60)
PRODUCER = Producer("tallystick-test", 7, 3)
FOLLOWING = Producer("tallystick-test", 7, 4)
GROUP = "tallystick-test-token"
PLACE = TopicPartition("orders", 0)


class Transactions:
    """Takes offsets, or answers what a test wants first."""

    def __init__(self) -> None:
        self.faults: list[str | None] = []

    def stage(self, request: Any) -> Any:
        fault = self.faults.pop(0) if self.faults else None
        if fault in (CLOSE, SILENCE):
            return fault
        topic_class = part(request, "TxnOffsetCommitResponseTopic")
        part_class = topic_class.TxnOffsetCommitResponsePartition
        topics = [
            topic_class(
                name=topic.name,
                partitions=[
                    part_class(partition_index=each.partition_index, error_code=CODES[fault])
                    for each in topic.partitions
                ],
            )
            for topic in request.topics
        ]
        return answer(request, topics=topics)

    def end(self, request: Any) -> Any:
        return answer(
            request,
            error_code=0,
            producer_id=FOLLOWING.producer_id,
            producer_epoch=FOLLOWING.producer_epoch,
        )


@pytest.fixture
def transactions() -> Transactions:
    return Transactions()


@pytest.fixture
def fake(transactions: Transactions) -> Iterator[FakeBroker]:
    handlers = {"TxnOffsetCommit": transactions.stage, "EndTxn": transactions.end}
    with FakeBroker(handlers) as fake:
        yield fake


@pytest.fixture
def broker(fake: FakeBroker) -> Iterator[KafkaBroker]:
    """One that knows who keeps the group, as after the first epoch."""
    broker = KafkaBroker(fake.config())
    broker._transaction_version = 2
    broker.stage_offsets(PRODUCER, GROUP, {PLACE: (1, "of the epoch before")})
    fake.received.clear()
    yield broker
    broker.close()


def staged(fake: FakeBroker) -> list[str]:
    """What came, by the metadata."""
    return [
        each.topics[0].partitions[0].committed_metadata for each in fake.asked("TxnOffsetCommit")
    ]


def test_what_kafka_took_ahead_is_not_sent_again(fake: FakeBroker, broker: KafkaBroker) -> None:
    broker.stage_ahead(PRODUCER, GROUP, {PLACE: (2, "path")})
    broker.stage_offsets(PRODUCER, GROUP, {PLACE: (2, "path")})

    assert staged(fake) == ["path"]

    broker.stage_offsets(PRODUCER, GROUP, {PLACE: (2, "path")})
    assert staged(fake) == ["path", "path"], "an answer counts once"


@pytest.mark.parametrize("fault", ["ConcurrentTransactions", "NotCoordinator", CLOSE, SILENCE])
def test_whatever_else_becomes_of_it_it_is_sent_again(
    fake: FakeBroker, broker: KafkaBroker, transactions: Transactions, fault: str
) -> None:
    transactions.faults = [fault]
    broker.stage_ahead(PRODUCER, GROUP, {PLACE: (2, "path")})

    broker.stage_offsets(PRODUCER, GROUP, {PLACE: (2, "path")})

    assert staged(fake) == ["path", "path"]


def test_a_missing_right_is_named_as_ever(
    fake: FakeBroker, broker: KafkaBroker, transactions: Transactions
) -> None:
    transactions.faults = ["GroupAuthorizationFailed"] * 2
    broker.stage_ahead(PRODUCER, GROUP, {PLACE: (2, "path")})

    with pytest.raises(AuthorizationError, match="READ on the consumer group"):
        broker.stage_offsets(PRODUCER, GROUP, {PLACE: (2, "path")})


@pytest.mark.parametrize(
    ("producer", "group", "offsets"),
    [
        (FOLLOWING, GROUP, {PLACE: (2, "path")}),
        (PRODUCER, "another", {PLACE: (2, "path")}),
        (PRODUCER, GROUP, {PLACE: (2, "another path")}),
        (PRODUCER, GROUP, {PLACE: (3, "path")}),
    ],
)
def test_the_answer_counts_for_nothing_else(
    fake: FakeBroker, broker: KafkaBroker, producer: Producer, group: str, offsets: Any
) -> None:
    broker.stage_ahead(PRODUCER, GROUP, {PLACE: (2, "path")})

    broker.stage_offsets(producer, group, offsets)

    assert len(staged(fake)) == 2


def test_answers_that_nobody_asked_for_do_not_pile_up(
    fake: FakeBroker, broker: KafkaBroker
) -> None:
    for _ in range(3):
        broker.stage_ahead(PRODUCER, GROUP, {PLACE: (2, "path")})
        broker.commit_transaction(PRODUCER)

    client = broker.client
    client.network.ask(0, protocol.MetadataRequest(topics=[]), client.deadline())
    assert not broker._ahead
    assert not any(each._answers or each._unwanted for each in client.network._connections.values())


def test_before_transaction_version_2_nothing_is_sent_ahead(
    fake: FakeBroker, broker: KafkaBroker
) -> None:
    """There Kafka does not ask its coordinator whose transaction it is."""
    broker._transaction_version = 1

    broker.stage_ahead(PRODUCER, GROUP, {PLACE: (2, "path")})

    client = broker.client
    client.network.ask(0, protocol.MetadataRequest(topics=[]), client.deadline())
    assert staged(fake) == []
