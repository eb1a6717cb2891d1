"""Positions in groups where clusters are down and drivers overlap; no Kafka, no Spark."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from tallystick.errors import BrokerUnavailableError
from tallystick.kafka.config import KafkaConfig
from tallystick.pipeline.group_offsets import (
    GroupOffsets,
    SourceClient,
    shown_in_transaction,
)
from tallystick.source.offsets import SourceOffsets
from tallystick.spark.streaming import offset_reporter
from tallystick.spark.streaming.offset_reporter import Run
from tallystick.values import TopicPartition

HERE = TopicPartition("t", 0)
WAIT_S = 20.0
run_ids = (f"run-{number}" for number in count())


@dataclass
class FakeCluster:
    """What one cluster holds for a group, and whether it answers."""

    cluster_id: str
    is_down: bool = False
    offset: int | None = None
    request_count: int = 0
    commits: list[int] = field(default_factory=list)
    is_committing: Event = field(default_factory=Event)
    has_committed: Event = field(default_factory=Event)
    may_commit: Event = field(default_factory=Event)

    def __post_init__(self) -> None:
        self.may_commit.set()


class FakeBroker:
    """A connection to it."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster

    def cluster_id(self) -> str:
        """See `KafkaBroker`."""
        self._cluster.request_count += 1
        if self._cluster.is_down:
            raise BrokerUnavailableError("down")
        return self._cluster.cluster_id

    def committed_offsets(self, *_: Any) -> dict[TopicPartition, int]:
        """See `KafkaBroker`."""
        return {} if self._cluster.offset is None else {HERE: self._cluster.offset}

    def commit_offsets(self, _: str, offsets: Any) -> None:
        """See `KafkaBroker`."""
        if self._cluster.is_down:
            raise BrokerUnavailableError("down")
        self._cluster.is_committing.set()
        assert self._cluster.may_commit.wait(WAIT_S)
        self._cluster.offset = offsets[HERE][0]
        self._cluster.commits.append(self._cluster.offset)
        self._cluster.has_committed.set()

    def close(self) -> None:
        """See `KafkaBroker`."""


def groups_on(*clusters: FakeCluster) -> GroupOffsets:
    """Of a query with a source on each, all with one group."""
    configs = {
        KafkaConfig.from_options({"bootstrap.servers": f"{cluster.cluster_id}:9092"}): cluster
        for cluster in clusters
    }
    return GroupOffsets(
        "query",
        [SourceClient("group", config) for config in configs],
        lambda config: FakeBroker(configs[config]),  # type: ignore[arg-type, return-value]
    )


def at(offset: int, *clusters: FakeCluster) -> list[SourceOffsets]:
    return [SourceOffsets(cluster.cluster_id, "group", {HERE: offset}) for cluster in clusters]


def test_a_cluster_that_is_down_keeps_no_position_of_another_from_being_shown() -> None:
    down, up = FakeCluster("x", is_down=True), FakeCluster("y")
    groups = groups_on(down, up)

    assert not groups.show(at(5, down, up))
    assert (down.offset, up.offset) == (None, 5)

    requests = down.request_count
    assert groups.show(at(6, up))
    assert (up.offset, down.request_count) == (6, requests), (
        "who is found is not searched for again"
    )

    down.is_down = False
    assert groups.show(at(6, down, up))
    assert down.offset == 6


@dataclass
class Log:
    """Spark's, of one query: batch N ends at offset 10 N."""

    newest: int = 0
    runs: list[Run] = field(default_factory=list)

    def start(self, cluster: FakeCluster, *previous: Run) -> Run:
        """A run of the query."""
        groups = groups_on(cluster)
        run = Run("query", "id", next(run_ids), cluster, groups, previous)
        self.runs.append(run)
        return run

    def tell(self, run: Run, batch_id: int) -> None:
        """The run has committed a batch, and is told of it."""
        self.newest = batch_id
        run.tell(SimpleNamespace(batchId=batch_id, cluster=run._execution))  # type: ignore[arg-type]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    log = Log()
    monkeypatch.setattr(offset_reporter, "committed_batch", lambda _: log.newest)
    monkeypatch.setattr(
        offset_reporter,
        "committed_sources",
        lambda cluster, batch_id: (batch_id, at(10 * batch_id, cluster)),
    )
    monkeypatch.setattr(
        offset_reporter, "sources_of", lambda batch: at(10 * batch.batchId, batch.cluster)
    )
    yield log
    for run in log.runs:
        end(run)


def end(run: Run) -> None:
    run.end()
    assert not run.groups._thread.is_alive()


@pytest.mark.parametrize(("in_kafka", "expected"), [(10, 20), (30, 30)], ids=["own", "anothers"])
def test_a_batch_that_a_run_was_not_told_of_never_puts_its_group_back(
    log: Log, in_kafka: int, expected: int
) -> None:
    """It may be of the driver that replaced this one, and has committed the next one already."""
    cluster = FakeCluster("x", offset=0)
    run = log.start(cluster)
    log.tell(run, 1)
    assert cluster.has_committed.wait(WAIT_S)

    log.newest, cluster.offset = 2, in_kafka
    end(run)

    assert cluster.offset == expected


def test_after_a_transaction_of_its_own_a_run_shows_nothing_on_that_cluster(log: Log) -> None:
    cluster = FakeCluster("x", offset=0)
    run = log.start(cluster)
    shown_in_transaction(run._run_id, "x")

    cluster.offset = 5  # by another's transaction
    log.tell(run, 1)
    log.newest = 2
    end(run)

    assert cluster.commits == []


def test_a_run_waits_until_the_last_one_of_its_query_has_ended(log: Log) -> None:
    cluster = FakeCluster("x", offset=0)
    cluster.may_commit.clear()
    old = log.start(cluster)
    log.tell(old, 1)
    assert cluster.is_committing.wait(WAIT_S)
    requests = cluster.request_count

    new = log.start(cluster, old)
    log.tell(new, 2)
    new.groups.end()
    new.groups._thread.join(0.3)
    assert cluster.request_count == requests, (
        "the new run went to Kafka while the old one was there"
    )

    cluster.may_commit.set()
    end(old)
    end(new)
    assert cluster.commits == [10, 20]


def test_a_run_that_does_not_end_is_replaced(log: Log) -> None:
    """Its end is not told of when its session was stopped."""
    cluster = FakeCluster("x", offset=0)
    old = log.start(cluster)
    new = log.start(cluster, old)
    log.tell(new, 2)
    end(new)

    log.tell(old, 1)
    end(old)

    assert cluster.commits == [20]


def test_after_a_failure_kafka_is_asked_again_what_a_group_shows() -> None:
    """A commit without an answer may have arrived."""
    cluster = FakeCluster("x", offset=5)
    groups = groups_on(cluster)
    assert groups.show(at(5, cluster))

    cluster.is_down = True
    assert not groups.show(at(6, cluster))
    cluster.is_down, cluster.offset = False, 4
    assert groups.show(at(5, cluster))

    assert cluster.offset == 5
