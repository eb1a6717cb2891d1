"""From positions to the splits of one epoch: how far to read, in how many pieces.

Pure arithmetic over positions, the same for the same input: a replayed epoch is cut as it was.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

from tallystick.source.offsets import SourceOffsets
from tallystick.source.split import SplitRange
from tallystick.topic_partition import TopicPartition

Positions = Mapping[TopicPartition, int]


def limit_offsets(
    start: Positions, available: Positions, offset_count_max: int | None
) -> Positions:
    """How far an epoch reads when it may span at most `offset_count_max` offsets.

    Each partition gets its share of the limit in proportion to what it has waiting, and at least
    one offset if it has any, so that none starves (as Spark's Kafka source does it; the limit may
    be passed by one offset per partition for that). A position never goes back.
    """
    waiting = {p: max(0, available[p] - start.get(p, 0)) for p in available}
    total = sum(waiting.values())
    if offset_count_max is None or total <= offset_count_max:
        return {p: max(available[p], start.get(p, 0)) for p in available}
    share = offset_count_max / total
    return {
        p: start.get(p, 0) + min(count, max(math.floor(count * share), 1 if count else 0))
        for p, count in waiting.items()
    }


def is_worth_an_epoch(
    waiting: int, offset_count_min: int, waited_ms: int | None, delay_max_ms: int
) -> bool:
    """Whether to run an epoch now or to wait for more (Spark's minOffsetsPerTrigger).

    Args:
        waiting: how many offsets there are to read.
        offset_count_min: as few are worth an epoch.
        waited_ms: since the last epoch was planned; None: this is the first of a run.
        delay_max_ms: after so long any number is.
    """
    return waiting >= offset_count_min or waited_ms is None or waited_ms >= delay_max_ms


def plan_splits(start: SourceOffsets, stop: SourceOffsets) -> tuple[SplitRange, ...]:
    """The ranges between two logged offsets, one per partition that has something to read.

    A partition starts where `stop` says, if this is its first epoch or it was moved on; else at its
    position in `start`. Both are in Spark's log, so a replay reads the same records.
    """
    splits = []
    for partition, stop_offset in sorted(stop.positions.items()):
        start_offset = stop.starts.get(partition, start.positions.get(partition))
        assert start_offset is not None, f"{partition} is read for the first time without a start"
        if start_offset < stop_offset:
            topic_id = stop.topic_ids.get(partition.topic, "")
            splits.append(
                SplitRange(
                    partition.topic, partition.partition, start_offset, stop_offset, topic_id
                )
            )
    return tuple(splits)


def cut_splits(splits: tuple[SplitRange, ...], split_count_min: int | None) -> list[SplitRange]:
    """Cut the larger ranges until there are about `split_count_min`, in proportion to their size.

    For Spark's `minPartitions`: only where the order within a partition does not matter or is made
    again, since the pieces of one partition are read at the same time.
    """
    total = sum(split.offset_count for split in splits)
    if split_count_min is None or len(splits) >= split_count_min or total == 0:
        return list(splits)
    pieces = []
    for split in splits:
        count = max(1, round(split_count_min * split.offset_count / total))
        bounds = [split.start_offset + split.offset_count * i // count for i in range(count + 1)]
        pieces += [
            replace(split, start_offset=low, stop_offset=high)
            for low, high in itertools.pairwise(bounds)
            if low < high
        ]
    return pieces
