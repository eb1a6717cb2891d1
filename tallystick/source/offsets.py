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
    """The next offset to read of each partition, and where that position is to be shown."""

    cluster_id: str
    group: str
    positions: Mapping[TopicPartition, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The value that Spark stores for us, JSON types only."""
        topics: dict[str, list[int | None]] = {}
        for partition, offset in sorted(self.positions.items()):
            column = topics.setdefault(partition.topic, [])
            column.extend([None] * (partition.partition - len(column)))
            column.append(offset)
        return {
            "tallystick": VERSION,
            "cluster": self.cluster_id,
            "group": self.group,
            "topics": topics,
        }


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
    positions = {
        TopicPartition(topic, partition): offset
        for topic, column in value["topics"].items()
        for partition, offset in enumerate(column)
        if offset is not None
    }
    return SourceOffsets(value["cluster"], value["group"], positions)


def parse_source(text: str) -> SourceOffsets | None:
    """One source's line of Spark's offset log; None where the source is not ours."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if not isinstance(value, dict) or "tallystick" not in value:
        return None
    return from_json(value)
