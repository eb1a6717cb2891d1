"""A request or an answer is lost: each kind once, at each step of the protocol that sends it."""

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions
from confluent_kafka.admin import AdminClient

from tallystick.errors import BrokerUnavailableError
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.sink.transaction import Producer
from tallystick.task import client_for
from tallystick.testing import EmbeddedKafka
from tests.failover.evidence import problems_of, read_committed, replay
from tests.failover.job import PARTITIONS, Job, MakeJob, readers_group
from tests.failover.wire import Loss, Wire

pytestmark = pytest.mark.broker

EPOCHS = 3
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


def check(job: Job, cluster: EmbeddedKafka) -> None:
    """The output of a pipeline is exact, and so are the positions that it shows."""
    client = Client(KafkaConfig(cluster.bootstrap_servers))
    seen = read_committed(cluster.confluent_options(), job.shape.topic, PARTITIONS)
    parts = replay(client, job.shape.topic, PARTITIONS)
    client.close()
    assert problems_of(job.shape, job.logged, seen, parts) == []
    assert shown_positions(job, cluster) == {0: job.logged}


def shown_positions(job: Job, cluster: EmbeddedKafka) -> dict[int, int]:
    """The offsets of the readers' group, as another client sees them."""
    admin = AdminClient(cluster.confluent_options())
    group = readers_group(job.shape.pipeline)
    asked = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])
    found = asked[group].result().topic_partitions
    return {partition.partition: partition.offset for partition in found}


@pytest.mark.parametrize("loss", ["request", "answer"])
@pytest.mark.parametrize("api", DRIVER_APIS)
def test_the_driver_survives_the_loss_of_any_message(
    api: str, loss: Loss, make_job: MakeJob, cluster: EmbeddedKafka
) -> None:
    wires: list[Wire] = []

    def tap(broker: KafkaBroker) -> None:
        wires.append(Wire(broker.client))
        wires[-1].lose(api, loss)

    job = make_job(f"driver-{api}-{loss}", on_start=tap)
    job.run_until(EPOCHS - 1)
    wires[0].lose(api, loss)
    job.run_until(EPOCHS)

    assert api in wires[0].seen
    assert job.restarts == 0
    check(job, cluster)


@pytest.mark.parametrize("loss", ["request", "answer"])
@pytest.mark.parametrize("api", TASK_APIS)
def test_a_task_survives_the_loss_of_any_message(
    api: str, loss: Loss, make_job: MakeJob, cluster: EmbeddedKafka
) -> None:
    job = make_job(f"task-{api}-{loss}")
    wire = Wire(client_for(job.config))
    wire.lose(api, loss)
    job.run_until(EPOCHS - 1)
    wire.lose(api, loss, times=3)
    job.run_until(EPOCHS)

    assert api in wire.seen
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
