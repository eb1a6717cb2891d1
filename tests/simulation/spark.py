"""Spark's part: the logs of a checkpoint, which lie among its files.

Facts (spark-facts.md): `offsets/N` is written before the driver is asked for epoch N, `commits/N`
after it returned, neither is synced; a query that starts goes on from the last entries, and fails
if one that it needs is missing or torn; an entry that exists already means that another query
writes the same checkpoint, and ends this one.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

from tallystick.checkpoint.spark_log import COMMITS, OFFSETS, parse_entry
from tallystick.source.offsets import ONLY_INPUT, SourceOffsets, of_input, parse_source
from tallystick.values import TopicPartition
from tests.simulation.faults import Fault, FaultPlan

Positions = Mapping[TopicPartition, int]


EPOCH_ROWS_MAX = 5


class ConcurrentRunError(Exception):
    """Spark found an entry in a log that only this query should write."""


class UnreadableLogError(Exception):
    """Spark cannot start: an entry of its log is missing or torn."""


@dataclass(slots=True)
class Checkpoint:
    """A checkpoint location: Spark's two logs, and the folder with the manifests.

    Args:
        lineage: the id of its query.
        location: where it is.
        base: where its first epoch begins to read.
        files: all of it.
        unsynced: what a power cut may take.
        left_out: start and end of epochs for which the user's function does not call the sink.
        called_twice: those for which it does so twice.
        refused_twice: those of which its author knows by now.
        recorded: for a loop of our own, which has no log of Spark's: the end of each epoch that was
            decided, as the oracle was told; of epoch 0, where the lineage begins. None: Spark's.
        caught: start and end of epochs whose error the function caught, so that they may be lost.
        is_over: of what is planned now: all inputs end there.
    """

    lineage: str
    location: str
    base: Positions
    files: dict[str, bytes] = field(default_factory=dict)
    unsynced: set[str] = field(default_factory=set)
    left_out: dict[int, tuple[Positions, Positions]] = field(default_factory=dict)
    called_twice: set[int] = field(default_factory=set)
    refused_twice: set[int] = field(default_factory=set)
    recorded: dict[int, Positions] | None = None
    caught: dict[int, tuple[Positions, Positions]] = field(default_factory=dict)
    is_over: bool = False

    @property
    def beginning(self) -> Positions:
        """Where its first epoch begins to read."""
        return self.base if self.recorded is None else self.recorded[0]

    @property
    def offsets(self) -> dict[int, Positions]:
        """The end of each epoch that is in the log, and whole."""
        if self.recorded is not None:
            return self.recorded
        ends_by_epoch = {epoch: self._ends(epoch) for epoch in self._entries(OFFSETS)}
        return {epoch: ends for epoch, ends in ends_by_epoch.items() if ends is not None}

    @property
    def commits(self) -> set[int]:
        """The epochs that are logged as done."""
        return {epoch for epoch in self._entries(COMMITS) if self.files[f"{COMMITS}/{epoch}"]}

    def first_epoch(self) -> int:
        """The epoch that a query offers first when it starts."""
        if self.recorded is not None:
            return max(self.recorded) + 1
        newest = max(self._entries(OFFSETS), default=-1)
        return newest + 1 if newest in self.commits else max(newest, 0)

    def read_log(self) -> int:
        """Start a query: the epoch that it offers first.

        Raises:
            UnreadableLogError: it cannot start.
        """
        offsets, commits = self._entries(OFFSETS), self._entries(COMMITS)
        newest = max(offsets, default=-1)
        needed = [epoch for epoch in (newest - 1, newest) if epoch >= 0]
        if gone := [epoch for epoch in needed if self._ends(epoch) is None]:
            raise UnreadableLogError(f"offsets/{gone} are missing or torn")
        if commits and (max(commits) > newest or max(commits) not in self.commits):
            raise UnreadableLogError(f"commits/{max(commits)} is torn, or newer than offsets/")
        return self.first_epoch()

    def start_of(self, epoch: int) -> Positions:
        """Where an epoch begins to read."""
        if self.recorded is not None:
            return self.recorded[epoch - 1]
        ends = self._ends(epoch - 1) if epoch else self.base
        assert ends is not None, f"offsets/{epoch - 1} is not there"
        return ends

    def record(self, epoch: int, sources: Sequence[str]) -> None:
        """A loop of our own has decided an epoch, or where the lineage begins."""
        if self.recorded is not None:
            self.recorded[epoch] = positions_in(sources)

    def log_offsets(self, epoch: int, ends: Positions, sources: Sequence["Source"]) -> None:
        """Write `offsets/N`."""
        lines = "".join(f"\n{source.text(ends)}" for source in sources)
        self._log(f"{OFFSETS}/{epoch}", f"v1\n{{}}{lines}")

    def log_commit(self, epoch: int) -> None:
        """Write `commits/N`."""
        self._log(f"{COMMITS}/{epoch}", "v1\n{}")

    def forget_from(self, epoch: int) -> None:
        """Lose all entries from an epoch on."""
        for folder in (OFFSETS, COMMITS):
            for number in self._entries(folder):
                if number >= epoch:
                    del self.files[f"{folder}/{number}"]

    def lose_power(self, dice: random.Random) -> None:
        """What was not synced is there, or gone, or empty."""
        for path in sorted(self.unsynced & self.files.keys()):
            match dice.randrange(3):
                case 0:
                    del self.files[path]
                case 1:
                    self.files[path] = b""
        self.unsynced.clear()

    def _log(self, path: str, text: str) -> None:
        if path in self.files:
            raise ConcurrentRunError(f"{path} exists")
        self.files[path] = text.encode()
        self.unsynced.add(path)

    def _entries(self, folder: str) -> list[int]:
        parts = (path.partition("/") for path in self.files)
        return [int(name) for where, _, name in parts if where == folder]

    def _ends(self, epoch: int) -> Positions | None:
        return ends_in(self.files.get(f"{OFFSETS}/{epoch}"))


@lru_cache(maxsize=256)
def ends_in(entry: bytes | None) -> Positions | None:
    """The ends of an epoch by its log entry, which a world reads again at every call."""
    batch = parse_entry(entry)
    return None if batch is None else MappingProxyType(positions_in(batch.sources))


def plan_ends(
    dice: random.Random, plan: FaultPlan, available: Positions, starts: Positions
) -> Positions | None:
    """The end of the next epoch; None when there is nothing to read."""
    if all(starts[partition] >= end for partition, end in available.items()):
        return None
    if plan.strikes(Fault.EMPTY_EPOCH):
        return dict(starts)
    ends = {
        partition: min(end, starts[partition] + dice.randint(0, EPOCH_ROWS_MAX))
        for partition, end in available.items()
    }
    return dict(available) if ends == starts else ends


def positions_in(sources: Sequence[str]) -> dict[TopicPartition, int]:
    """The positions of all sources of an epoch, by the names that partitions have among them."""
    parsed = [parse_source(text) for text in sources]
    return {
        of_input(position.input, place): at
        for position in parsed
        if position
        for place, at in position.positions.items()
    }


@dataclass(frozen=True, slots=True)
class Source:
    """One source of the query: which cluster and group its positions are shown in; its input."""

    cluster_id: str
    group: str
    partitions: tuple[TopicPartition, ...]
    input: str = ONLY_INPUT

    @property
    def names(self) -> tuple[TopicPartition, ...]:
        """Its partitions, as they are named among those of all inputs."""
        return tuple(of_input(self.input, partition) for partition in self.partitions)

    def offsets(self, ends: Positions) -> SourceOffsets:
        """Its part of the positions."""
        positions = {
            partition: ends[of_input(self.input, partition)] for partition in self.partitions
        }
        return SourceOffsets(self.cluster_id, self.group, positions, input=self.input)

    def text(self, ends: Positions) -> str:
        """Its line of Spark's offset log."""
        return json.dumps(self.offsets(ends).to_json())
