"""A request or an answer is lost: each kind of message, twice."""

from typing import Any

import pytest

from tallystick.errors import BrokerUnavailableError
from tallystick.testing import EmbeddedKafka
from tallystick.values import Producer
from tests.failover.job import Job, MakeJob
from tests.failover.losses import (
    AT_THE_NEXT_START,
    EPOCHS,
    IN_A_LATER_EPOCH,
    Again,
    check,
    lose_in_a_task,
    lose_in_the_driver,
)
from tests.failover.wire import Loss

pytestmark = pytest.mark.broker

DRIVER_APIS = [
    ("ApiVersions", AT_THE_NEXT_START),
    ("FindCoordinator", AT_THE_NEXT_START),
    ("InitProducerId", AT_THE_NEXT_START),
    ("OffsetFetch", AT_THE_NEXT_START),
    ("Metadata", IN_A_LATER_EPOCH),
    ("DescribeTransactions", IN_A_LATER_EPOCH),
    ("DescribeProducers", IN_A_LATER_EPOCH),
    ("TxnOffsetCommit", IN_A_LATER_EPOCH),
    ("EndTxn", IN_A_LATER_EPOCH),
    ("Fetch", IN_A_LATER_EPOCH),
]
TASK_APIS = [
    ("Metadata", AT_THE_NEXT_START),
    ("DescribeProducers", IN_A_LATER_EPOCH),
    ("Produce", IN_A_LATER_EPOCH),
]


@pytest.fixture(scope="module")
def cluster(tallystick_kafka: EmbeddedKafka) -> EmbeddedKafka:
    """One broker: whose message is lost, and when, is the same with three."""
    return tallystick_kafka


@pytest.fixture(params=["loop", "log"])
def make_job(request: pytest.FixtureRequest, make_job: MakeJob) -> MakeJob:
    """Pipelines, and queries of Structured Streaming, whose epochs Spark has logged."""

    def make(name: str, **how: Any) -> Job:
        return make_job(f"{request.param}-{name}", has_loop=request.param == "loop", **how)

    return make


@pytest.mark.parametrize("loss", ["request", "answer"])
@pytest.mark.parametrize(("api", "again"), DRIVER_APIS)
def test_the_driver_survives_the_loss_of_any_message(
    api: str, again: Again, loss: Loss, make_job: MakeJob, cluster: EmbeddedKafka
) -> None:
    job = lose_in_the_driver(api, loss, again, make_job)

    assert job.errors == []
    check(job, cluster)


@pytest.mark.parametrize("loss", ["request", "answer"])
@pytest.mark.parametrize(("api", "again"), TASK_APIS)
def test_a_task_survives_the_loss_of_any_message(
    api: str, again: Again, loss: Loss, make_job: MakeJob, cluster: EmbeddedKafka
) -> None:
    job = lose_in_a_task(api, loss, again, make_job)

    assert job.errors == []
    check(job, cluster)


def test_a_commit_without_an_answer_is_asked_for_and_not_run_again(
    make_job: MakeJob, cluster: EmbeddedKafka
) -> None:
    """The call fails at its deadline, and Kafka has committed all the same."""
    ran: list[str] = []
    job = make_job("commit-unanswered", midway=lambda: ran.append("epoch"))
    job.run_until(EPOCHS - 1)
    commit = job.broker.commit_transaction

    def commit_unanswered(producer: Producer) -> Producer:
        job.broker.commit_transaction = commit  # type: ignore[method-assign]
        commit(producer)
        raise BrokerUnavailableError("EndTxn: no usable answer, by a test")

    job.broker.commit_transaction = commit_unanswered  # type: ignore[method-assign]
    job.run_until(EPOCHS)

    assert job.logged == EPOCHS + job.has_loop, "a loop goes on to the next one at once"
    assert len(ran) == job.logged
    assert job.restarts == 0
    check(job, cluster)
