"""The same where EndTxn gives no new producer epoch, and partitions are added by request."""

from collections.abc import Iterator

import pytest

from tallystick.testing import EmbeddedKafka
from tests.failover.job import MakeJob
from tests.failover.losses import IN_A_LATER_EPOCH, check, lose_in_a_task, lose_in_the_driver
from tests.failover.wire import Loss

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmbeddedKafka]:
    """One broker with transaction.version=1."""
    with EmbeddedKafka(transaction_version=1) as kafka:
        yield kafka


@pytest.mark.parametrize("loss", ["request", "answer"])
@pytest.mark.parametrize("api", ["InitProducerId", "AddOffsetsToTxn", "TxnOffsetCommit", "EndTxn"])
def test_the_driver_survives_the_loss_of_any_message(
    api: str, loss: Loss, make_job: MakeJob, cluster: EmbeddedKafka
) -> None:
    job = lose_in_the_driver(api, loss, IN_A_LATER_EPOCH, make_job)

    assert job.errors == []
    check(job, cluster)


@pytest.mark.parametrize("loss", ["request", "answer"])
@pytest.mark.parametrize("api", ["AddPartitionsToTxn", "Produce"])
def test_a_task_survives_the_loss_of_any_message(
    api: str, loss: Loss, make_job: MakeJob, cluster: EmbeddedKafka
) -> None:
    job = lose_in_a_task(api, loss, IN_A_LATER_EPOCH, make_job)

    assert job.errors == []
    check(job, cluster)
