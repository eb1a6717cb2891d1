from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.testing import EmbeddedKafka
from tests.failover.job import PARTITIONS, Job, MakeJob
from tests.failover.known_rows import Shape
from tests.failover.wire import coordinator_of

_numbers = count()


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmbeddedKafka]:
    """Three brokers; who was killed leads again soon after it is back.

    They end with the file of tests that uses them: at rest they take a sixteenth of a core.
    """
    properties = {"leader.imbalance.check.interval.seconds": "1"}
    with EmbeddedKafka(brokers=3, properties=properties) as kafka:
        client = Client(KafkaConfig(kafka.bootstrap_servers))
        for kind in ("transaction", "group"):  # makes Kafka's own topics, while all brokers live
            coordinator_of(client, kind, "any")
        client.close()
        kafka.wait_until_in_sync()
        yield kafka


@pytest.fixture
def topic(cluster: EmbeddedKafka) -> str:
    """A topic of its own for each test, which reads all of it."""
    return cluster.create_topic(f"failover-{next(_numbers)}", PARTITIONS)


@pytest.fixture
def make_job(cluster: EmbeddedKafka, topic: str, tmp_path: Path) -> Iterator[MakeJob]:
    """Makes pipelines that write to the test's `topic`; their connections end with the test."""
    jobs: list[Job] = []

    def make(name: str, **how: object) -> Job:
        shape = Shape(name, topic, tuple(range(PARTITIONS)))
        if "midway" in how:
            shape = shape.spanning_groups()
        config = KafkaConfig(cluster.bootstrap_servers, client_id=name)
        job = Job(shape, config, tmp_path / name, **how)  # type: ignore[arg-type]
        jobs.append(job)
        return job

    yield make
    for job in jobs:
        job.close()
