"""A request or an answer is lost: each kind once, at each step of the protocol that sends it."""

import pytest

from tallystick.errors import BrokerUnavailableError
from tallystick.sink.transaction import Producer
from tallystick.testing import EmbeddedKafka
from tests.failover.job import MakeJob
from tests.failover.losses import EPOCHS, check, lose_in_a_task, lose_in_the_driver
from tests.failover.wire import Loss

pytestmark = pytest.mark.broker

DRIVER_APIS = (
    "ApiVersions",
    "Metadata",
    "FindCoordinator",
    "InitProducerId",
    "OffsetFetch",
    "DescribeTransactions",
    "DescribeProducers",
    "TxnOffsetCommit",
    "EndTxn",
    "Fetch",
)
TASK_APIS = ("Metadata", "DescribeProducers", "Produce")


@pytest.mark.parametrize("loss", ["request", "answer"])
@pytest.mark.parametrize("api", DRIVER_APIS)
def test_the_driver_survives_the_loss_of_any_message(
    api: str, loss: Loss, make_job: MakeJob, cluster: EmbeddedKafka
) -> None:
    job = lose_in_the_driver(api, loss, make_job)

    assert job.restarts == 0
    check(job, cluster)


@pytest.mark.parametrize("loss", ["request", "answer"])
@pytest.mark.parametrize("api", TASK_APIS)
def test_a_task_survives_the_loss_of_any_message(
    api: str, loss: Loss, make_job: MakeJob, cluster: EmbeddedKafka
) -> None:
    job = lose_in_a_task(api, loss, make_job)

    assert job.restarts == 0
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

    assert len(ran) == EPOCHS
    assert job.restarts == 0
    check(job, cluster)
