"""A message is lost at the beginning of a run, and again later on; then the output is judged.

What is sent in every epoch is lost again in a later one. What is sent only when a run or a worker
begins is lost again at the next start, which finds what the run before has left.
"""

from typing import Literal

from tallystick.kafka import client as kafka_client
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.client import Client, client_for
from tallystick.kafka.config import KafkaConfig
from tallystick.testing import EmbeddedKafka
from tests.failover.evidence import problems_of, read_committed, replay
from tests.failover.job import PARTITIONS, Job, MakeJob, readers_group
from tests.failover.wire import Loss, Wire
from tests.spark.topics import group_positions

EPOCHS = 3
Again = Literal["in a later epoch", "at the next start"]
IN_A_LATER_EPOCH: Again = "in a later epoch"
AT_THE_NEXT_START: Again = "at the next start"


def lose_in_the_driver(api: str, loss: Loss, again: Again, make_job: MakeJob) -> Job:
    """Lose the driver's first message of a kind, and one more."""
    wires: list[Wire] = []

    def tap(broker: KafkaBroker) -> None:
        wires.append(Wire(broker.client))
        wires[-1].lose(api, loss)

    job = make_job(f"driver-{api}-{loss}", on_start=tap)
    job.run_until(EPOCHS - 1)
    if again == IN_A_LATER_EPOCH:
        wires[-1].lose(api, loss)
    else:
        job.restart()
    job.run_until(EPOCHS)
    assert sum(wire.lost[api, loss] for wire in wires) == 2
    return job


def lose_in_a_task(api: str, loss: Loss, again: Again, make_job: MakeJob) -> Job:
    """Lose a task's first message of a kind, and then three in a row."""
    job = make_job(f"task-{api}-{loss}")
    first = later = Wire(client_for(job.config))
    first.lose(api, loss)
    job.run_until(EPOCHS - 1)
    assert first.lost[api, loss] == 1
    if again == AT_THE_NEXT_START:
        job.restart()
        kafka_client._clients.close()  # what a worker keeps ends with it
        later = Wire(client_for(job.config))
    later.lose(api, loss, times=3)
    job.run_until(EPOCHS)
    assert later.lost[api, loss] == (3 if later is not first else 4)
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
    return group_positions(cluster.confluent_options(), readers_group(job.shape.pipeline))
