"""Progress of pipelines and queries: numbers of their sources, and who observes each epoch.

Spark logs and reports our offsets as JSON text that only we can read well: here it becomes numbers.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark.sql.streaming.query import StreamingQuery

from tallystick.run.query import Query
from tallystick.source.offsets import ONLY_INPUT, SourceOffsets, parse_source
from tallystick.values import TopicPartition

logger = logging.getLogger(__name__)

Observer = Callable[[str, Mapping[str, Any] | None], None]
"""A callback for a query's name, or id, and each progress, Spark's or ours; None at the end."""
OBSERVERS: list[Observer] = []


def observe(query: str, progress: Mapping[str, Any] | None) -> None:
    """Call all observers with the progress of a query; see `Observer`."""
    for observer in OBSERVERS:
        try:
            observer(query, progress)
        except Exception:
            logger.exception("query %s: an observer of its progress failed", query)


@dataclass(frozen=True, slots=True)
class SourceProgress:
    """One source after an epoch.

    Args:
        index: of the source in the query, counted over all kinds of sources.
        cluster_id: the cluster that the source reads.
        group: the consumer group that shows the positions; "": no group.
        positions: the next offset to read of each partition.
        latest: the end of each partition, as far as Spark knows; may be empty.
        skipped: ranges (from, to) that were lost unread, and that this epoch passed over.
        input: the id of the pipeline's input.
    """

    index: int
    cluster_id: str
    group: str
    positions: Mapping[TopicPartition, int]
    latest: Mapping[TopicPartition, int] = field(default_factory=dict)
    skipped: Mapping[TopicPartition, tuple[int, int]] = field(default_factory=dict)
    input: str = ONLY_INPUT

    @property
    def lag(self) -> dict[TopicPartition, int]:
        """The number of offsets of each partition left to read; absent where the end is unknown."""
        return {
            partition: max(0, end - self.positions[partition])
            for partition, end in self.latest.items()
            if partition in self.positions
        }

    @property
    def lag_total(self) -> int | None:
        """The sum of `lag`; None where no end is known."""
        return sum(self.lag.values()) if self.latest else None

    @property
    def skipped_total(self) -> int:
        """The number of offsets this epoch passed over."""
        return sum(stop - start for start, stop in self.skipped.values())


def source_progress(query: StreamingQuery | Query | Mapping[str, Any]) -> list[SourceProgress]:
    """Return positions, lag and losses of each Tallystick source of a query.

    Args:
        query: a query, for its last epoch; or an entry of the `recentProgress` of a query.

    Returns:
        One value per Tallystick source; empty before the first epoch.
    """
    progress = query if isinstance(query, Mapping) else query.lastProgress
    if progress is None:
        return []
    entries = (_one(index, source) for index, source in enumerate(progress["sources"]))
    return [entry for entry in entries if entry is not None]


def sources_of(progress: Mapping[str, Any]) -> Iterator[SourceOffsets]:
    """Return the end offsets of the sources that are ours, as they were logged."""
    for source in progress["sources"]:
        if offsets := parse_source(source["endOffset"] or ""):
            yield offsets


def _one(index: int, source: Mapping[str, Any]) -> SourceProgress | None:
    end = parse_source(source["endOffset"] or "")
    if end is None:
        return None
    latest = parse_source(source["latestOffset"] or "")
    progress = SourceProgress(
        index=index,
        cluster_id=end.cluster_id,
        group=end.group,
        positions=end.positions,
        latest={} if latest is None else latest.positions,
        input=end.input,
    )
    # An epoch that read nothing from this source repeats the offsets of the one before, and its
    # losses with them.
    again = source["startOffset"] == source["endOffset"]
    return progress if again else replace(progress, skipped=end.skipped)
