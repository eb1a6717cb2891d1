"""Spark's part: the logs of a checkpoint, and the loop that offers epochs to a driver.

Facts (spark-facts.md): `offsets/N` is written before the driver is asked for epoch N, `commits/N`
after it returned; a query that starts goes on from the last entries; an entry that exists already
means that another query writes the same checkpoint, and ends this one.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from tallystick.source.offsets import SourceOffsets
from tallystick.topic_partition import TopicPartition

Positions = Mapping[TopicPartition, int]


class ConcurrentRunError(Exception):
    """Spark found an entry in a log that only this query should write."""


@dataclass(slots=True)
class Checkpoint:
    """A checkpoint location: Spark's two logs, and the folder with the manifests.

    `base` is where its first epoch begins to read.
    """

    lineage: str
    location: str
    base: Positions
    offsets: dict[int, Positions] = field(default_factory=dict)
    commits: set[int] = field(default_factory=set)
    files: dict[str, bytes] = field(default_factory=dict)

    def first_epoch(self) -> int:
        """The epoch that a query offers first when it starts."""
        newest = max(self.offsets, default=-1)
        return newest + 1 if newest in self.commits else max(newest, 0)

    def start_of(self, epoch: int) -> Positions:
        """Where an epoch begins to read."""
        return self.offsets[epoch - 1] if epoch else self.base

    def log_offsets(self, epoch: int, ends: Positions) -> None:
        """Write `offsets/N`."""
        if epoch in self.offsets:
            raise ConcurrentRunError(f"offsets/{epoch} exists")
        self.offsets[epoch] = ends

    def log_commit(self, epoch: int) -> None:
        """Write `commits/N`."""
        if epoch in self.commits:
            raise ConcurrentRunError(f"commits/{epoch} exists")
        self.commits.add(epoch)

    def forget_from(self, epoch: int) -> None:
        """Lose all entries from an epoch on."""
        self.offsets = {number: ends for number, ends in self.offsets.items() if number < epoch}
        self.commits = {number for number in self.commits if number < epoch}


@dataclass(frozen=True, slots=True)
class Source:
    """One source of the query: which cluster and group its positions are shown in."""

    cluster_id: str
    group: str
    partitions: tuple[TopicPartition, ...]

    def text(self, ends: Positions) -> str:
        """Its line of Spark's offset log."""
        positions = {partition: ends[partition] for partition in self.partitions}
        return json.dumps(SourceOffsets(self.cluster_id, self.group, positions).to_json())
