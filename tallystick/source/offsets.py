"""Positions of a source as Spark's offset log holds them.

Written with every micro-batch, so compact: one array of next offsets per topic, null where a
partition is not read. The cluster's id and the consumer group travel along, so that whoever
commits the epoch can say in Kafka how far it read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tallystick.errors import ManifestError
from tallystick.topic_partition import TopicPartition

VERSION = 1


@dataclass(frozen=True, slots=True)
class SourceOffsets:
    """The next offset to read of each partition, and where that position is to be shown.

    `starts` are the first offsets of partitions that this epoch reads for the first time: with them
    an epoch's ranges follow from Spark's log alone, also after a crash in the very first epoch
    (Flink lost that case for a long time, FLINK-38453). `initial` marks positions that no epoch has
    read yet.
    """

    cluster_id: str
    group: str
    positions: Mapping[TopicPartition, int] = field(default_factory=dict)
    starts: Mapping[TopicPartition, int] = field(default_factory=dict)
    initial: bool = False

    def to_json(self) -> dict[str, Any]:
        """The value that Spark stores for us, JSON types only."""
        value: dict[str, Any] = {
            "tallystick": VERSION,
            "cluster": self.cluster_id,
            "group": self.group,
            "topics": _columns(self.positions),
        }
        if self.starts:
            value["starts"] = _columns(self.starts)
        if self.initial:
            value["initial"] = True
        return value


def from_json(value: Mapping[str, Any]) -> SourceOffsets:
    """Read back what `SourceOffsets.to_json` made.

    Raises:
        ManifestError: the value is of another source, or of a newer release.
    """
    if value.get("tallystick") != VERSION:
        raise ManifestError(
            f"offsets {json.dumps(dict(value))[:200]}: expected those of a Tallystick source, "
            f"version {VERSION}. The checkpoint belongs to another source, or to a newer release."
        )
    return SourceOffsets(
        cluster_id=value["cluster"],
        group=value["group"],
        positions=_positions(value["topics"]),
        starts=_positions(value.get("starts", {})),
        initial=value.get("initial", False),
    )


def _columns(positions: Mapping[TopicPartition, int]) -> dict[str, list[int | None]]:
    topics: dict[str, list[int | None]] = {}
    for partition, offset in sorted(positions.items()):
        column = topics.setdefault(partition.topic, [])
        column.extend([None] * (partition.partition - len(column)))
        column.append(offset)
    return topics


def _positions(topics: Mapping[str, list[int | None]]) -> dict[TopicPartition, int]:
    return {
        TopicPartition(topic, partition): offset
        for topic, column in topics.items()
        for partition, offset in enumerate(column)
        if offset is not None
    }


def parse_source(text: str) -> SourceOffsets | None:
    """One source's line of Spark's offset log; None where the source is not ours."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if not isinstance(value, dict) or "tallystick" not in value:
        return None
    return from_json(value)
