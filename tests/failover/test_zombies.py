"""A second attempt of a task writes as fast as it can into the transaction of the first.

Kafka cannot distinguish the two. What the second one writes before the last count has the epoch run
again; what it writes between that and the commit is committed too. All of it is found.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from tallystick.epoch import protocol as c
from tallystick.kafka import protocol
from tallystick.kafka.broker import EPOCH_BY_END_TXN, KafkaBroker
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.testing import EmbeddedKafka
from tests.failover.evidence import problems_of, read_committed, replay, visible_zombies
from tests.failover.job import PARTITIONS, Job, MakeJob
from tests.failover.known_rows import ZOMBIE
from tests.failover.zombies import HauntedEpoch, Zombie, run_haunted

pytestmark = pytest.mark.broker

EPOCHS = 5
_numbers = count()


@pytest.fixture(scope="module", params=[2, 1], ids=["version-2", "version-1"])
def cluster(request: pytest.FixtureRequest) -> Iterator[EmbeddedKafka]:
    """One broker, with KIP-890 (the session's) and without."""
    if request.param == 2:
        yield request.getfixturevalue("tallystick_kafka")
        return
    with EmbeddedKafka(transaction_version=request.param) as kafka:
        yield kafka


@pytest.fixture
def topic(cluster: EmbeddedKafka) -> str:
    """A topic of its own for each test: all zombies in it are the test's."""
    return cluster.create_topic(f"haunted-{next(_numbers)}", PARTITIONS)


@pytest.fixture
def zombie(cluster: EmbeddedKafka, topic: str) -> Iterator[Zombie]:
    process = Zombie(cluster.bootstrap_servers, topic, cluster.transaction_version)
    yield process
    process.close()


def check(job: Job, cluster: EmbeddedKafka, haunted: list[HauntedEpoch]) -> None:
    """Rows of the zombie that are visible were told, to the last one; all others are exact."""
    client = Client(KafkaConfig(cluster.bootstrap_servers))
    parts = replay(client, job.shape.topic, PARTITIONS)
    client.close()
    seen = read_committed(cluster.confluent_options(), job.shape.topic, PARTITIONS)
    visible = visible_zombies(parts)
    reported = {
        (haunt.epoch, partition): n for haunt in haunted for partition, n in haunt.reported.items()
    }
    by_partition: Counter[int] = Counter()
    for (_, partition), row_count in visible.items():
        by_partition[partition] += row_count

    assert reported == visible
    assert by_partition == {part: n for part, rows in seen.items() if (n := rows.count(ZOMBIE))}
    assert problems_of(job.shape, job.logged, seen, parts) == []


def test_rows_between_the_last_count_and_the_commit_are_committed_and_all_are_told(
    cluster: EmbeddedKafka, make_job: MakeJob, zombie: Zombie
) -> None:
    """It has begun when the driver goes on to commit, and writes on until Kafka refuses it."""
    job = make_job("after-the-count")

    haunted = list(run_haunted(job, zombie, EPOCHS, at=c.OutputCounted, is_waited_for=True))

    for haunt in haunted:
        assert haunt.accepted
        assert haunt.reported == haunt.accepted
        assert not haunt.is_repeated
    check(job, cluster, haunted)


def test_nothing_but_the_commit_comes_between_the_last_count_and_the_markers(
    cluster: EmbeddedKafka, make_job: MakeJob
) -> None:
    """So the zombie has no more time than it takes Kafka to commit."""
    sent: list[str] = []

    def tap(broker: KafkaBroker) -> None:
        network, post = broker.client.network, broker.client.network.post

        def post_told(node: int, request: Any, deadline: float) -> Any:
            sent.append(protocol.api_name(request))
            return post(node, request, deadline)

        network.post = post_told  # type: ignore[method-assign]

    job = make_job("in-order", on_start=tap)
    job.run_until(2)
    sent.clear()
    job.run_next()

    first = sent.index("TxnOffsetCommit")
    requests = [name for name in sent[first:] if name != "AddOffsetsToTxn"]
    initialises = [] if cluster.transaction_version == EPOCH_BY_END_TXN else ["InitProducerId"]
    counts = ["DescribeTransactions", "DescribeProducers"]
    assert requests[:5] == ["TxnOffsetCommit", "TxnOffsetCommit", *counts, "EndTxn"]
    assert requests[5:6] == (initialises or ["Fetch"])


def test_rows_before_the_last_count_have_the_epoch_run_again_without_them(
    cluster: EmbeddedKafka, make_job: MakeJob, zombie: Zombie
) -> None:
    job = make_job("before-the-count")

    haunted = list(run_haunted(job, zombie, EPOCHS, at=c.EpochRan, is_waited_for=True))

    for haunt in haunted:
        assert haunt.accepted
        assert haunt.is_repeated
        assert not haunt.reported
    check(job, cluster, haunted)
