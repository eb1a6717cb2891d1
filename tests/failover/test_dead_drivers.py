"""A driver dies at each step, and its last task goes on writing: only whole epochs are visible."""

import re

import pytest

from tallystick.errors import FencedError, ForeignRowsError
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.testing import EmbeddedKafka
from tallystick.values import TopicPartition
from tests.failover.evidence import problems_of, read_committed, replay
from tests.failover.job import PARTITIONS, Death, Job, MakeJob
from tests.failover.known_rows import ZOMBIE
from tests.failover.steps import Step, Trap
from tests.failover.wire import write_as_zombie

pytestmark = pytest.mark.broker

EPOCHS = 4


@pytest.fixture(scope="module")
def cluster(tallystick_kafka: EmbeddedKafka) -> EmbeddedKafka:
    """One broker, since none dies here."""
    return tallystick_kafka


TAKES_STRAYS = {Step.RAN, Step.COMPLETED, Step.STAGED, Step.COUNTED}
"""Steps at which the transaction is open, and has all rows of the epoch."""


class Stray:
    """A task that nobody can stop, with the producer of a job."""

    def __init__(self, cluster: EmbeddedKafka, job: Job) -> None:
        self.client = Client(KafkaConfig(cluster.bootstrap_servers, client_id="stray"))
        self._job = job

    def write(self, partition: int, sequence: int | None = None) -> str:
        """One row: after the last one of the epoch, unless told; what Kafka said to it."""
        assert self._job.producer is not None
        shape = self._job.shape
        return write_as_zombie(
            self.client,
            self._job.producer,
            TopicPartition(shape.topic, partition),
            shape.row_count if sequence is None else sequence,
            timeout_ms=3_000,
        )


def visible_strays(cluster: EmbeddedKafka, topic: str) -> int:
    seen = read_committed(cluster.confluent_options(), topic, PARTITIONS)
    return sum(rows.count(ZOMBIE) for rows in seen.values())


def problems(job: Job, cluster: EmbeddedKafka, client: Client) -> list[str]:
    seen = read_committed(cluster.confluent_options(), job.shape.topic, PARTITIONS)
    return problems_of(job.shape, job.logged, seen, replay(client, job.shape.topic, PARTITIONS))


@pytest.mark.parametrize("step", Step, ids=lambda step: step.name)
def test_a_driver_that_dies_is_replaced_and_its_stray_task_shut_out(
    step: Step, make_job: MakeJob, cluster: EmbeddedKafka, topic: str
) -> None:
    def die() -> None:
        raise Death(step.value)

    trap = Trap(step, die)
    job = make_job(
        f"dies-{step.name}", on_start=trap.on_start, on_event=trap.on_event, midway=trap.midway
    )
    job.run_until(2)
    stray = Stray(cluster, job)
    before = visible_strays(cluster, topic)
    trap.arm()
    if step is Step.FENCED:  # comes with the start of a run only
        job.restart()
    with pytest.raises(Death):
        job.run_next()
    if step is not Step.ENDING:  # the commit is on its way: see the stray row between, below
        assert (stray.write(0) == "accepted") == (step in TAKES_STRAYS)
    job.restart()
    job.run_next()
    after = [stray.write(partition, sequence) for partition in (0, 1) for sequence in (None, 0)]
    job.run_until(EPOCHS)

    assert trap.sprung
    assert "accepted" not in after
    assert problems(job, cluster, stray.client) == []
    assert visible_strays(cluster, topic) == before


def test_a_stray_row_before_the_count_makes_the_epoch_run_again(
    make_job: MakeJob, cluster: EmbeddedKafka, topic: str
) -> None:
    answers: list[str] = []
    trap = Trap(Step.RAN, lambda: answers.append(stray.write(1)))
    job = make_job("stray-early", on_start=trap.on_start, on_event=trap.on_event)
    stray = Stray(cluster, job)
    job.run_until(2)
    before = visible_strays(cluster, topic)
    trap.arm()
    job.run_until(EPOCHS)

    assert answers == ["accepted"]
    assert job.restarts == 0
    assert problems(job, cluster, stray.client) == []
    assert visible_strays(cluster, topic) == before


def test_a_stray_row_between_count_and_commit_is_told_and_goes_on_only_when_accepted(
    make_job: MakeJob, cluster: EmbeddedKafka, topic: str
) -> None:
    """The hole that Kafka leaves: such a row is visible, so it has to be known."""
    answers: list[str] = []
    trap = Trap(Step.COUNTED, lambda: answers.append(stray.write(1)))
    job = make_job("stray-late", on_start=trap.on_start, on_event=trap.on_event)
    stray = Stray(cluster, job)
    job.run_until(2)
    before = visible_strays(cluster, topic)
    trap.arm()

    with pytest.raises(ForeignRowsError, match=rf"{topic}-1: 1\b") as raised:
        job.run_next()
    job.restart()
    with pytest.raises(ForeignRowsError):  # a restart does not make it good
        job.run_next()
    (accept,) = re.findall(r"accept='([^']+)'", str(raised.value))
    job.restart()
    job.accepted = frozenset({accept})
    job.run_until(EPOCHS)

    assert answers == ["accepted"]
    assert problems(job, cluster, stray.client) == []
    assert visible_strays(cluster, topic) == before + 1


def test_of_two_drivers_the_older_one_is_fenced_at_its_next_step(
    make_job: MakeJob, cluster: EmbeddedKafka
) -> None:
    older = make_job("two-drivers")
    older.run_until(2)
    newer = Job(older.shape, older.config, older.checkpoint, logged=2)
    newer.run_until(3)

    with pytest.raises(FencedError, match="tallystick-two-drivers"):
        older.run_next()
    newer.run_until(EPOCHS)

    assert newer.restarts == 0
    assert problems(newer, cluster, newer.broker.client) == []
    newer.close()


@pytest.mark.parametrize("step", [Step.RAN, Step.COUNTED, Step.STAGED], ids=lambda s: s.name)
def test_a_driver_that_was_overtaken_within_an_epoch_cannot_commit_it(
    step: Step, make_job: MakeJob, cluster: EmbeddedKafka
) -> None:
    """Both ran the same epoch; the newer one committed it."""
    newer: list[Job] = []

    def overtake() -> None:
        newer.append(Job(older.shape, older.config, older.checkpoint, logged=older.logged))
        newer[0].run_until(EPOCHS)

    trap = Trap(step, overtake)
    older = make_job(f"overtaken-{step.name}", on_start=trap.on_start, on_event=trap.on_event)
    older.run_until(2)
    trap.arm()

    with pytest.raises(FencedError):
        older.run_next()

    assert trap.sprung
    assert problems(newer[0], cluster, newer[0].broker.client) == []
    newer[0].close()
