"""Positions in groups where clusters are down and drivers overlap; no Kafka, no Spark."""

from dataclasses import dataclass
from typing import Any

from tallystick.errors import BrokerUnavailableError
from tallystick.kafka.config import KafkaConfig
from tallystick.source.offsets import SourceOffsets
from tallystick.spark.group_offsets import GroupOffsets, SourceClient
from tallystick.topic_partition import TopicPartition

HERE = TopicPartition("t", 0)


@dataclass
class FakeCluster:
    """What one cluster holds for a group, and whether it answers."""

    cluster_id: str
    is_down: bool = False
    offset: int | None = None
    asked: int = 0


class FakeBroker:
    """A connection to it."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster

    def cluster_id(self) -> str:
        """See `KafkaBroker`."""
        self._cluster.asked += 1
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
        self._cluster.offset = offsets[HERE][0]


def groups_on(*clusters: FakeCluster) -> GroupOffsets:
    """Of a query with a source on each, all with one group."""
    configs = {
        KafkaConfig.from_options({"bootstrap.servers": f"{each.cluster_id}:9092"}): each
        for each in clusters
    }
    return GroupOffsets(
        "query",
        [SourceClient("group", config) for config in configs],
        lambda config: FakeBroker(configs[config]),  # type: ignore[arg-type, return-value]
    )


def at(offset: int, *clusters: FakeCluster) -> list[SourceOffsets]:
    return [SourceOffsets(each.cluster_id, "group", {HERE: offset}) for each in clusters]


def test_a_cluster_that_is_down_keeps_no_position_of_another_from_being_shown() -> None:
    down, up = FakeCluster("x", is_down=True), FakeCluster("y")
    groups = groups_on(down, up)

    assert not groups.show(at(5, down, up))
    assert (down.offset, up.offset) == (None, 5)

    asked = down.asked
    assert groups.show(at(6, up))
    assert (up.offset, down.asked) == (6, asked), "who is found is not searched for again"

    down.is_down = False
    assert groups.show(at(6, down, up))
    assert down.offset == 6
