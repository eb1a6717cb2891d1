"""What earlier runs left open is found, and given up, and nobody else's is."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from fake_broker import CLOSE, CODES, FakeBroker, answer, part
from real_kafka import numbers, read_back
from task_sinks import committed, opened, place_of, rows_of, state_of, written_by

from tallystick.epoch.two_phase import Outcome, Owner, Place, to_abort
from tallystick.errors import BrokerUnavailableError, EpochAbortedError
from tallystick.kafka import cluster, outcome
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.transactions import Finder, list_open_ids
from tallystick.source.subscription import LATEST
from tallystick.testing.kafka import EmbeddedKafka
from tallystick.values import TopicPartition
from tests.waiting import wait_for, wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", params=[2, 1], ids=lambda version: f"version-{version}")
def kafka(request: pytest.FixtureRequest) -> Iterator[EmbeddedKafka]:
    """With version 2 the session's, where other pipelines' transactions are nobody's concern."""
    if request.param == 2:
        yield request.getfixturevalue("tallystick_kafka")
        return
    with EmbeddedKafka(transaction_version=request.param) as running:
        yield running


@pytest.fixture
def pipeline() -> str:
    return f"flights-{next(numbers)}"


def last_stable(client: Client, topic: str) -> int:
    """Where a read_committed reader has to stop."""
    partition = TopicPartition(topic, 0)
    return cluster.list_offsets(client, [partition], LATEST)[partition]


@pytest.mark.broker
def test_all_that_a_pipeline_left_is_found_and_aborted_and_readers_get_on(
    config: KafkaConfig, client: Client, topic: str, pipeline: str
) -> None:
    """Of tasks that are no more, of another prefix, of an attempt that never prepared.

    Not: what the checkpoint names, another pipeline's, another sink's.
    """
    owner = place_of(pipeline).owner
    with opened(config, topic, pipeline, id_prefix=f"old-{pipeline}") as before:
        old = written_by(before.plan(), place_of(pipeline, 3), "of another prefix")
    with opened(config, topic, f"{pipeline}-b") as other:
        foreign = written_by(other.plan(), place_of(f"{pipeline}-b"), "of another pipeline")
    with opened(config, topic, pipeline, earlier_prefixes=frozenset({f"old-{pipeline}"})) as sink:
        plan = sink.plan()
        scaled_down = written_by(plan, place_of(pipeline, 4, task=63), "of task 63")
        never = plan.begin(place_of(pipeline, 0, task=1, attempt=2))
        for _ in range(64):  # more than is kept back
            never.write(rows_of("never prepared"))
        decided = written_by(plan, place_of(pipeline, 4, task=0), "decided")
        other_sink = Place(Owner(pipeline, "second", "L"), 4, 0, 0, "0")
        second = written_by(plan, other_sink, "of another sink")
        assert last_stable(client, topic) == 0

        lingering = list(sink.lingering(owner))

        tasks = {committable.name.split(":")[0].split("/", 1)[1] for committable in lingering}
        assert tasks == {"out/0/0", "out/63/0", "out/1/2"}
        assert {old.name, scaled_down.name, decided.name} < {
            committable.name for committable in lingering
        }
        assert all(
            transaction.begun_ms > 0 and transaction.sink == "out" for transaction in lingering
        )
        for transaction in to_abort(lingering, [decided]):
            sink.abort(transaction)
            sink.abort(transaction)
        wait_for(
            lambda: [transaction.name for transaction in sink.lingering(owner)],
            [decided.name],
            "transactions that linger",
        )
        assert committed(client, sink, decided) is Outcome.COMMITTED
        assert [sink.commit(committable) for committable in (old, scaled_down)] == [
            Outcome.LOST
        ] * 2
        assert list(sink.lingering(owner)) == []
        assert [state_of(client, committable) for committable in (foreign, second)] == [
            "Ongoing"
        ] * 2
        never.write(rows_of("zombie", partition=1))  # of which the coordinator has not heard yet
        with pytest.raises(EpochAbortedError):
            never.prepare()
        never.abort()
        assert list(sink.lingering(owner)) == []

        for committable in (foreign, second):
            sink.abort(committable)
    wait_until(lambda: last_stable(client, topic) > 0, f"nothing in {topic} is stable")
    wait_for(lambda: read_back(config, topic), ["decided"], "the rows")


@pytest.mark.broker
def test_an_abort_of_what_was_prepared_leaves_its_ids_next_user_alone(
    config: KafkaConfig,
    client: Client,
    topic: str,
    pipeline: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replaced run aborts what is its own while a task of its successor takes the same id.

    Before transaction.version 2 an InitProducerId after the abort would end that one too.
    """
    end, begun = outcome.end_transaction, []

    def end_and_be_overtaken(*args: Any, **options: Any) -> Any:
        ended = end(*args, **options)
        begun.append(written_by(sink.plan(), place_of(pipeline, 1), "of the successor"))
        return ended

    with opened(config, topic, pipeline) as sink:
        ours = written_by(sink.plan(), place_of(pipeline, 0), "of the replaced run")
        with monkeypatch.context() as patched:
            patched.setattr(outcome, "end_transaction", end_and_be_overtaken)
            sink.abort(ours)

        (theirs,) = begun
        assert theirs.name.rsplit(":", 1)[0] == ours.name.rsplit(":", 1)[0], "the same producer id"
        assert committed(client, sink, theirs) is Outcome.COMMITTED
    assert read_back(config, topic) == ["of the successor"]


@pytest.mark.broker
def test_what_is_found_can_be_aborted_but_not_by_somebody_elses_epoch(
    config: KafkaConfig, client: Client, topic: str, pipeline: str
) -> None:
    """An abort names one producer epoch: what the id was used for since is left alone."""
    with opened(config, topic, pipeline) as sink:
        first = written_by(sink.plan(), place_of(pipeline, 0), "first")
        second = written_by(sink.plan(), place_of(pipeline, 1), "second")

        sink.abort(first)

        assert state_of(client, second) == "Ongoing"
        assert committed(client, sink, second) is Outcome.COMMITTED
        sink.abort(second)
        (range_,) = [sink.describe(second)]
        assert range_.startswith(f"transaction 'tallystick-{pipeline}/out/0/0'")
    assert read_back(config, topic) == ["second"]


# --- who may list, and whom -----------------------------------------------------------------------


class Coordinator:
    """Tells of each transaction, and of all of them."""

    def __init__(self, open_ids: set[str], denied: str = "") -> None:
        self.open_ids = open_ids
        self.denied = denied

    def describe(self, request: Any) -> Any:
        (name,) = request.transactional_ids
        error_name = None if name in self.open_ids else "TransactionalIdNotFound"
        if self.denied and name.startswith(self.denied):
            error_name = "TransactionalIdAuthorizationFailed"
        state = part(request, "TransactionState")(
            error_code=CODES[error_name],
            transactional_id=name,
            transaction_state="Ongoing",
            transaction_timeout_ms=60_000,
            transaction_start_time_ms=17,
            producer_id=1,
            producer_epoch=2,
            topics=[],
        )
        return answer(request, transaction_states=[state])

    def list(self, request: Any) -> Any:
        state_class = part(request, "TransactionState")
        return answer(
            request,
            error_code=0,
            unknown_state_filters=[],
            transaction_states=[
                state_class(transactional_id=name, producer_id=1, transaction_state="Ongoing")
                for name in sorted(self.open_ids)
                if not (self.denied and name.startswith(self.denied))
            ],
        )


OPEN = {"new/out/0/0", "new/out/17/3", "old/out/5/0", "new/out-2/0/0", "new-2/out/0/0"}


def found_at(broker: FakeBroker, times: int = 1) -> set[str]:
    client = Client(broker.config())
    finder = Finder(client, {"new", "old"}, "out")
    for _ in range(times):
        names = {str(transaction) for transaction in finder.open_transactions()}
    client.close()
    return names


def test_ids_that_may_not_be_described_are_not_overlooked_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Kafka leaves them out of its list without a word."""
    coordinator = Coordinator(OPEN, denied="old")
    handlers = {"DescribeTransactions": coordinator.describe, "ListTransactions": coordinator.list}
    with FakeBroker(handlers) as broker, caplog.at_level(logging.WARNING):
        names = found_at(broker, times=2)

    assert names == {"new/out/0/0", "new/out/17/3"}
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "prefix 'old'" in warning
    assert "DESCRIBE (or WRITE) on the transactional id" in warning


def test_a_list_without_one_of_the_brokers_is_none() -> None:
    """What it coordinates would be missing."""
    coordinator = Coordinator(OPEN)
    handlers = {"ListTransactions": coordinator.list}
    gone = FakeBroker({"ListTransactions": lambda _: CLOSE})
    with FakeBroker(handlers) as broker, gone:
        broker.nodes = [broker, gone]
        client = Client(broker.config(delivery_timeout_ms="900"))
        with pytest.raises(BrokerUnavailableError, match="ListTransactions"):
            list_open_ids(client)
        broker.nodes = [broker]
        assert list_open_ids(client) == OPEN
        client.close()
