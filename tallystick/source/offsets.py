"""Positions of a source as Spark's offset log holds them: the snapshot of the enumerator.

Written with every micro-batch, so compact: one array of next offsets per topic, null where a
partition is not read, and rare fields only where they are set. The cluster's id and the consumer
group travel along, so that the committer of the epoch can store its positions in Kafka.

    {"tallystick": 1, "cluster": …, "group": …, "ids": {topic: id}, "topics": {topic: [next, …]},
     "starts": {topic: [first, …]}, "initial": true, "stops": {topic: [stop, …]},
     "gone": {topic: since, in ms}, "skipped": {topic: {partition: [from, to]}}, "tick": …,
     "input": its id}
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from tallystick.errors import UNREADABLE, ManifestError
from tallystick.values import TopicPartition

VERSION = 1
ONLY_INPUT = "input-1"
"""The id of a pipeline's only input where the user names none; JSON leaves it out."""


@dataclass(frozen=True, slots=True)
class SourceOffsets:
    """The next offset to read of each partition, and the consumer group that shows it.

    Args:
        cluster_id: the cluster that all offsets belong to.
        group: the consumer group under which Kafka's tools see them; "": nowhere.
        positions: the next offset to read.
        starts: where this epoch begins in partitions in which that is not the position before:
            read for the first time, or moved on by a `LossPolicy`. With them an epoch's ranges
            follow from Spark's log alone, also after a crash in the very first epoch (Flink lost
            that case for a long time, FLINK-38453).
        initial: the positions were resolved, and no epoch has read from them yet.
        topic_ids: Kafka's id of each topic, so that one created again under the name is noticed.
        stops: where reading ends for good; None: never (unbounded).
        gone: when a topic whose position is kept was first missed, in ms since 1970.
        skipped: ranges (from, to) that were lost before they were read, and that this epoch
            passed over, as its policy says.
        tick: how many epochs were planned without records since the last one with some, so that
            timers get their epochs. It only makes offsets distinct.
        input: the id of the pipeline's input that reads them, by which a restart finds them.
    """

    cluster_id: str
    group: str
    positions: Mapping[TopicPartition, int] = field(default_factory=dict)
    starts: Mapping[TopicPartition, int] = field(default_factory=dict)
    initial: bool = False
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    stops: Mapping[TopicPartition, int] | None = None
    gone: Mapping[str, int] = field(default_factory=dict)
    skipped: Mapping[TopicPartition, tuple[int, int]] = field(default_factory=dict)
    tick: int = 0
    input: str = ONLY_INPUT

    def to_json(self) -> dict[str, Any]:
        """Return JSON types for Spark to store; the same for the same value."""
        value: dict[str, Any] = {
            "tallystick": VERSION,
            "cluster": self.cluster_id,
            "group": self.group,
            "ids": dict(sorted(self.topic_ids.items())),
            "topics": _columns(self.positions),
        }
        if self.starts:
            value["starts"] = _columns(self.starts)
        if self.initial:
            value["initial"] = True
        if self.stops is not None:
            value["stops"] = _columns(self.stops)
        if self.gone:
            value["gone"] = dict(sorted(self.gone.items()))
        if self.skipped:
            value["skipped"] = _ranges(self.skipped)
        if self.tick:
            value["tick"] = self.tick
        if self.input != ONLY_INPUT:
            value["input"] = self.input
        return value


def from_json(value: Mapping[str, Any]) -> SourceOffsets:
    """Return the offsets that `SourceOffsets.to_json` wrote.

    Raises:
        ManifestError: the value is of another source, or of another release; or it was edited.
    """
    try:
        return _from_json(value)
    except UNREADABLE as error:
        raise ManifestError(
            f"offsets {str(value)[:200]}: expected those of a Tallystick source; they were edited, "
            f"or made by somebody else."
        ) from error


def _from_json(value: Mapping[str, Any]) -> SourceOffsets:
    if value.get("tallystick") != VERSION:
        raise ManifestError(
            f"offsets {json.dumps(dict(value))[:200]}: expected those of a Tallystick source, "
            f"version {VERSION}, found version {value.get('tallystick')!r}. The checkpoint belongs "
            f"to another source, or to another release: start with that one."
        )
    stops = value.get("stops")
    source = SourceOffsets(
        cluster_id=value["cluster"],
        group=value["group"],
        positions=_positions(value["topics"]),
        starts=_positions(value.get("starts", {})),
        initial=value.get("initial", False),
        topic_ids=value["ids"],
        stops=None if stops is None else _positions(stops),
        gone=value.get("gone", {}),
        skipped={
            TopicPartition(topic, int(partition)): (start, stop)
            for topic, ranges in value.get("skipped", {}).items()
            for partition, (start, stop) in ranges.items()
        },
        tick=value.get("tick", 0),
        input=value.get("input", ONLY_INPUT),
    )
    texts = (source.cluster_id, source.group, source.input, *source.topic_ids.values())
    skipped = (offset for ends in source.skipped.values() for offset in ends)
    offsets = (*source.positions.values(), *source.starts.values(), *(source.stops or {}).values())
    numbers = (*offsets, *source.gone.values(), *skipped, source.tick)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("expected texts for cluster, group, input and topic ids")
    if not all(type(number) is int for number in numbers) or type(source.initial) is not bool:
        raise TypeError("expected whole numbers for offsets, times and tick")
    return source


def from_text(text: str) -> SourceOffsets:
    """Return the positions of one of our sources from a manifest's text; see `from_json`."""
    source = parse_source(text)
    if source is None:
        raise ManifestError(
            f"offsets {text[:200]!r}: expected those of a Tallystick source; they were edited, or "
            f"made by somebody else."
        )
    return source


def next_tick(start: SourceOffsets) -> SourceOffsets:
    """Return the offsets of an epoch that reads nothing: those of `start`, with another tick."""
    return replace(unmoved(start), tick=start.tick + 1)


class Ticks:
    """The rule for epochs without records, in which steps look for timers.

    Event time moves with records only: such timers are looked for once after records, as Spark
    does, and also under the trigger availableNow. The clock always moves, so timers of the clock
    never let a query end; under availableNow the query ends with its records.

    Args:
        interval_ms: the time between two looks for timers of the clock; 0: there are none.
        count_max: the epochs without records that follow one with some.
        began_ms: the time from which on intervals count.
    """

    def __init__(self, interval_ms: int, count_max: int, began_ms: float) -> None:
        self._interval_ms, self._count_max = interval_ms, count_max
        self._ticked_at_ms = began_ms

    def note_records(self, now_ms: float) -> None:
        """Note that an epoch with records is planned, in which steps look for timers too."""
        self._ticked_at_ms = now_ms

    def is_due(self, start: SourceOffsets, now_ms: float, *, is_last: bool = False) -> bool:
        """True if an epoch without records is due.

        Args:
            start: where the epoch before has ended.
            now_ms: the time, by the clock of `began_ms`.
            is_last: the query ends with its records.
        """
        if start.initial:
            return False
        if start.tick < self._count_max:
            return True
        if is_last or not 0 < self._interval_ms <= now_ms - self._ticked_at_ms:
            return False
        self._ticked_at_ms = now_ms
        return True


def unmoved(start: SourceOffsets) -> SourceOffsets:
    """Return the offsets of an epoch that reads nothing from this input, but from others."""
    return replace(start, starts={}, skipped={}, initial=False)


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


def _ranges(skipped: Mapping[TopicPartition, tuple[int, int]]) -> dict[str, dict[str, list[int]]]:
    topics: dict[str, dict[str, list[int]]] = {}
    for partition, (start, stop) in sorted(skipped.items()):
        topics.setdefault(partition.topic, {})[str(partition.partition)] = [start, stop]
    return topics


def parse_source(text: str) -> SourceOffsets | None:
    """Return one source's line of Spark's offset log; None where the source is not ours.

    Raises:
        ManifestError: as `from_json` does.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_ours = isinstance(value, dict) and "tallystick" in value
    return from_json(value) if is_ours else None


def with_groups(texts: Iterable[str]) -> list[SourceOffsets]:
    """Return an epoch's sources that are ours and show their positions in a consumer group."""
    parsed = (parse_source(text) for text in texts)
    return [source for source in parsed if source is not None and source.group]


def of_input(uid: str, partition: TopicPartition) -> TopicPartition:
    """Return a partition's name, qualified by its input: two inputs may read topics of one name.

    No topic's name has a slash.
    """
    if uid == ONLY_INPUT:
        return partition
    return TopicPartition(f"{uid}/{partition.topic}", partition.partition)


POSITIONS_PER_REQUEST = 1_000
"""At most about 600 bytes a position, if group and topic have the longest names in Kafka."""


def shown(source: SourceOffsets) -> dict[TopicPartition, int]:
    """Return the positions that a consumer group can show: Kafka takes none of a deleted topic."""
    return {p: offset for p, offset in source.positions.items() if p.topic not in source.gone}


def requests(
    positions: Mapping[TopicPartition, int],
) -> Iterator[dict[TopicPartition, tuple[int, str]]]:
    """Yield the positions as (offset, metadata), a request's worth at a time."""
    remaining = iter(positions.items())
    while part := {p: (offset, "") for p, offset in islice(remaining, POSITIONS_PER_REQUEST)}:
        yield part
