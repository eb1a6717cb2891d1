"""A live driver whose calls went unanswered finds out that it is still the owner, or that not."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count

import pytest

from tallystick.errors import BrokerUnavailableError, FencedError
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.config import KafkaConfig
from tallystick.sink.transaction import Producer
from tallystick.task import WritePlan, client_for
from tallystick.testing import EmbeddedKafka
from tallystick.topic_partition import TopicPartition
from tests.failover.known_rows import Shape
from tests.failover.wire import Loss, Wire

pytestmark = pytest.mark.broker

SHAPE = Shape("fencing", "rows", (0, 1))
LOST_MAX = 3
_numbers = count()


@pytest.fixture(scope="module", params=[2, 1], ids=["version-2", "version-1"])
def kafka(request: pytest.FixtureRequest) -> Iterator[EmbeddedKafka]:
    with EmbeddedKafka(transaction_version=request.param) as running:
        running.create_topic(SHAPE.topic, len(SHAPE.partitions))
        yield running


@pytest.fixture
def broker(kafka: EmbeddedKafka) -> Iterator[KafkaBroker]:
    made = KafkaBroker(KafkaConfig(kafka.bootstrap_servers))
    yield made
    made.close()


@pytest.fixture
def transactional_id() -> str:
    return f"tallystick-fencing-{next(_numbers)}"


def write(broker: KafkaBroker, producer: Producer) -> None:
    """Open a transaction."""
    config = broker.client.config
    report = WritePlan(config, producer, broker.transaction_version).write(SHAPE.frames(0), 0)
    assert not report.error, report.message
    client_for(config).close()


@contextmanager
def unanswered(broker: KafkaBroker, loss: Loss) -> Iterator[None]:
    """InitProducerId runs into its deadline; with the answers lost, Kafka has done it."""
    wire = Wire(broker.client)
    patient = broker.client.config
    broker.client.config = replace(patient, request_timeout_ms=400, delivery_timeout_ms=800)
    wire.lose("InitProducerId", loss, times=10_000)
    yield
    wire.lose("InitProducerId", loss, times=0)
    broker.client.config = patient


def fence_without_an_answer(broker: KafkaBroker, current: Producer, times: int) -> None:
    with unanswered(broker, "answer"):
        for _ in range(times):
            with pytest.raises(BrokerUnavailableError):
                broker.fence(current.transactional_id, current)


@pytest.mark.parametrize("times", [1, LOST_MAX])
@pytest.mark.parametrize("writing", [True, False], ids=["open", "idle"])
def test_unanswered_fences_are_our_own_doing(
    writing: bool, times: int, broker: KafkaBroker, transactional_id: str
) -> None:
    current = broker.fence(transactional_id, None)
    if writing:
        write(broker, current)
    fence_without_an_answer(broker, current, times)

    following = broker.fence(transactional_id, current)

    write(broker, following)
    broker.abort_transaction(following)


@pytest.mark.parametrize("times", [1, LOST_MAX])
def test_a_successor_is_noticed_behind_unanswered_fences(
    times: int, kafka: EmbeddedKafka, broker: KafkaBroker, transactional_id: str
) -> None:
    current = broker.fence(transactional_id, None)
    write(broker, current)
    fence_without_an_answer(broker, current, times)
    successor = KafkaBroker(broker.client.config)
    successors = successor.fence(transactional_id, None)

    with pytest.raises(FencedError):
        broker.fence(transactional_id, current)

    write(successor, successors)
    with pytest.raises(FencedError):
        broker.fence(transactional_id, current)
    assert successor.last_sequences(successors, [TopicPartition(SHAPE.topic, 0)]), "still open"
    successor.commit_transaction(successors)
    successor.close()


def test_an_unanswered_commit_is_our_own_doing_after_a_coordinator_failed_too(
    kafka: EmbeddedKafka, broker: KafkaBroker, transactional_id: str
) -> None:
    """Kafka keeps the epoch before last, by which it knows a repeated call, in memory only."""
    current = broker.fence(transactional_id, None)
    write(broker, current)
    with unanswered(broker, "request"), suppress(BrokerUnavailableError):
        broker.commit_transaction(current)  # but nobody gets the next producer
    kafka.kill(1)
    kafka.restart(1)
    kafka.wait_until_ready()

    following = broker.fence(transactional_id, current)

    write(broker, following)
    broker.abort_transaction(following)
