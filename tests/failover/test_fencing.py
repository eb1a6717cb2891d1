"""A live driver whose calls went unanswered finds out that it is still the owner, or that not."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import count

import pytest

from tallystick.errors import BrokerUnavailableError, EpochAbortedError, FencedError
from tallystick.kafka.broker import EPOCH_BY_END_TXN, KafkaBroker
from tallystick.kafka.client import client_for
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.writer import KafkaProduce
from tallystick.tasks.read import WritePlan
from tallystick.testing import EmbeddedKafka
from tallystick.values import Producer, TopicPartition
from tests.failover.known_rows import Shape
from tests.failover.sink_job import read_topic
from tests.failover.wire import Loss, Wire
from tests.waiting import wait_until

pytestmark = pytest.mark.broker

LOST_MAX = 3
SAFE = nullcontext()
_numbers = count()
Write = Callable[[KafkaBroker, Producer], None]


@pytest.fixture(scope="module", params=[2, 1], ids=["version-2", "version-1"])
def kafka(request: pytest.FixtureRequest) -> Iterator[EmbeddedKafka]:
    """One of few topics, since it is killed: the session's takes seconds to be warm again."""
    with EmbeddedKafka(transaction_version=request.param) as running:
        yield running


@pytest.fixture
def shape(kafka: EmbeddedKafka) -> Shape:
    """A topic of its own for each test, so that all that is visible in it is the test's."""
    return Shape("fencing", kafka.create_topic(f"fencing-{next(_numbers)}", 2), (0, 1))


@pytest.fixture
def broker(kafka: EmbeddedKafka) -> Iterator[KafkaBroker]:
    opened_broker = KafkaBroker(KafkaConfig(kafka.bootstrap_servers))
    yield opened_broker
    opened_broker.close()


@pytest.fixture
def transactional_id() -> str:
    return f"tallystick-fencing-{next(_numbers)}"


@pytest.fixture
def write(shape: Shape) -> Write:
    """Open a transaction, and write the rows of one epoch into it."""

    def write(broker: KafkaBroker, producer: Producer) -> None:
        config = broker.client.config
        produce = KafkaProduce(config, broker.transaction_version)
        report = WritePlan(produce, producer).write(shape.frames(0), 0)
        assert report.failure is None, report.failure
        client_for(config).close()

    return write


def assert_seen(kafka: EmbeddedKafka, shape: Shape, epochs: int) -> None:
    """All that is visible are the same rows so many times; a new leader shows them a bit later."""
    wanted = {partition: rows * epochs for partition, rows in shape.expected(1).items()}

    def is_all_there() -> bool:
        rows_by_partition = read_topic(kafka, shape.topic, len(wanted))
        return all(
            len(rows) >= len(wanted[partition]) for partition, rows in rows_by_partition.items()
        )

    wait_until(
        is_all_there,
        lambda: f"expected {wanted}, found {read_topic(kafka, shape.topic, len(wanted))}",
    )
    assert read_topic(kafka, shape.topic, len(wanted)) == wanted


def assert_only_the_owner_commits(
    kafka: EmbeddedKafka, broker: KafkaBroker, shape: Shape, owner: Producer, former: Producer
) -> None:
    """The former producer can commit nothing, and of all that was written the owner's is seen."""
    with pytest.raises(EpochAbortedError):
        broker.commit_transaction(former)
    broker.commit_transaction(owner)
    assert_seen(kafka, shape, epochs=1)


@contextmanager
def unanswered(broker: KafkaBroker, loss: Loss) -> Iterator[Wire]:
    """InitProducerId runs into its deadline; with the answers lost, Kafka has done it."""
    wire = Wire(broker.client)
    patient = broker.client.config
    broker.client.config = replace(patient, request_timeout_ms=400, delivery_timeout_ms=800)
    wire.lose("InitProducerId", loss, times=10_000)
    yield wire
    wire.lose("InitProducerId", loss, times=0)
    broker.client.config = patient


def fence_without_an_answer(broker: KafkaBroker, current: Producer, times: int) -> None:
    with unanswered(broker, "answer") as wire:
        for _ in range(times):
            with pytest.raises(BrokerUnavailableError):
                broker.fence(current.transactional_id, current)
    assert wire.lost["InitProducerId", "answer"] >= times


@pytest.mark.parametrize("times", [1, LOST_MAX])
@pytest.mark.parametrize("writing", [True, False], ids=["open", "idle"])
def test_unanswered_fences_are_our_own_doing(
    writing: bool,
    times: int,
    kafka: EmbeddedKafka,
    broker: KafkaBroker,
    shape: Shape,
    write: Write,
    transactional_id: str,
) -> None:
    current = broker.fence(transactional_id, None)
    if writing:
        write(broker, current)
    fence_without_an_answer(broker, current, times)

    following = broker.fence(transactional_id, current)

    write(broker, following)
    assert_only_the_owner_commits(kafka, broker, shape, following, current)


@pytest.mark.parametrize("times", [1, LOST_MAX])
def test_a_successor_is_noticed_behind_unanswered_fences(
    times: int,
    kafka: EmbeddedKafka,
    broker: KafkaBroker,
    shape: Shape,
    write: Write,
    transactional_id: str,
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
    assert successor.last_sequences(successors, [TopicPartition(shape.topic, 0)]), "still open"
    assert_only_the_owner_commits(kafka, successor, shape, successors, current)
    successor.close()


def test_an_unanswered_commit_is_our_own_doing_after_a_coordinator_failed_too(
    kafka: EmbeddedKafka, broker: KafkaBroker, shape: Shape, write: Write, transactional_id: str
) -> None:
    """Kafka keeps the epoch before last, by which it knows a repeated call, in memory only."""
    current = broker.fence(transactional_id, None)
    write(broker, current)
    asks = broker.transaction_version < EPOCH_BY_END_TXN  # for the next producer, and gets none
    with unanswered(broker, "request"), pytest.raises(BrokerUnavailableError) if asks else SAFE:
        broker.commit_transaction(current)
    assert_seen(kafka, shape, epochs=1)  # a broker that dies before its markers: KAFKA-20734
    kafka.kill(1)
    kafka.restart(1)
    kafka.wait_until_ready()
    assert_seen(kafka, shape, epochs=1)

    following = broker.fence(transactional_id, current)

    write(broker, following)
    with pytest.raises(EpochAbortedError):
        broker.commit_transaction(current)
    broker.commit_transaction(following)
    assert_seen(kafka, shape, epochs=2)
