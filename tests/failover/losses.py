"""A message is lost at the beginning of a run, and again later on; then the output is judged."""

from confluent_kafka import ConsumerGroupTopicPartitions
from confluent_kafka.admin import AdminClient

from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.task import client_for
from tallystick.testing import EmbeddedKafka
from tests.failover.evidence import problems_of, read_committed, replay
from tests.failover.job import PARTITIONS, Job, MakeJob, readers_group
from tests.failover.wire import Loss, Wire

EPOCHS = 3


def lose_in_the_driver(api: str, loss: Loss, make_job: MakeJob) -> Job:
    """The driver's first message of a kind, and the first after some epochs."""
    wires: list[Wire] = []

    def tap(broker: KafkaBroker) -> None:
        wires.append(Wire(broker.client))
        wires[-1].lose(api, loss)

    job = make_job(f"driver-{api}-{loss}", on_start=tap)
    job.run_until(EPOCHS - 1)
    wires[0].lose(api, loss)
    job.run_until(EPOCHS)
    assert api in wires[0].seen
    return job


def lose_in_a_task(api: str, loss: Loss, make_job: MakeJob) -> Job:
    """A task's first message of a kind, and three in a row after some epochs."""
    job = make_job(f"task-{api}-{loss}")
    wire = Wire(client_for(job.config))
    wire.lose(api, loss)
    job.run_until(EPOCHS - 1)
    wire.lose(api, loss, times=3)
    job.run_until(EPOCHS)
    assert api in wire.seen
    return job


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
