"""The splits of one epoch: the end of reading, the pieces, and the reader of each.

Pure arithmetic over positions, the same for the same input: a replayed epoch is cut as it was.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tallystick.source.offsets import SourceOffsets
from tallystick.values import SplitRange, TopicPartition

Positions = Mapping[TopicPartition, int]


def limit_offsets(
    start: Positions, available: Positions, offset_count_max: int | None
) -> Positions:
    """Return how far an epoch reads when it may span at most `offset_count_max` offsets.

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


def fair_shares(waiting: Sequence[int], offset_count_max: int) -> list[int]:
    """Return each input's share of the offsets that an epoch may span.

    An input that wants less than an equal share gets all it wants, and the others divide the rest:
    a backlog of one does not hold up another. Each input that has any gets at least one.
    """
    shares = [0] * len(waiting)
    remaining = offset_count_max
    by_size = sorted(range(len(waiting)), key=lambda at: waiting[at])
    for done, at in enumerate(by_size):
        shares[at] = min(waiting[at], max(remaining // (len(by_size) - done), 1))
        remaining = max(0, remaining - shares[at])
    return shares


def is_worth_an_epoch(
    waiting: int, offset_count_min: int, waited_ms: int | None, delay_max_ms: int
) -> bool:
    """True if an epoch is to run now, not to wait for more (Spark's minOffsetsPerTrigger).

    Args:
        waiting: how many offsets there are to read.
        offset_count_min: the least number that is worth an epoch.
        waited_ms: since the last epoch was planned; None: this is the first of a run.
        delay_max_ms: after so long any number is worth an epoch.
    """
    return waiting >= offset_count_min or waited_ms is None or waited_ms >= delay_max_ms


def plan_splits(start: SourceOffsets, stop: SourceOffsets) -> tuple[SplitRange, ...]:
    """Return the ranges between two logged offsets, one per partition that has something to read.

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

    For Spark's `minPartitions`: only where the order within a partition does not matter or is
    restored later, since the pieces of one partition are read at the same time.
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


def java_string_hash(text: str) -> int:
    """Return Java's `String.hashCode`: signed 32 bits, over UTF-16 code units."""
    units = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for high, low in zip(units[::2], units[1::2], strict=True):
        value = (31 * value + (high << 8 | low)) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def assign(topic: str, partition: int, reader_count: int) -> int:
    """Return the index of the reader that owns a partition, out of `reader_count`."""
    assert reader_count > 0
    start = ((java_string_hash(topic) * 31) & 0x7FFFFFFF) % reader_count
    return (start + partition) % reader_count


def share_out(
    splits: Iterable[SplitRange], reader_count: int
) -> tuple[tuple[SplitRange, ...], ...]:
    """Return the splits of each reader, in order; a reader may have none."""
    shares: list[list[SplitRange]] = [[] for _ in range(reader_count)]
    for split in sorted(splits):
        shares[assign(split.topic, split.partition, reader_count)].append(split)
    return tuple(tuple(share) for share in shares)


def share_pieces(
    pieces: Iterable[SplitRange], reader_count: int
) -> tuple[tuple[SplitRange, ...], ...]:
    """Distribute the pieces of partitions that were cut to readers, in runs of about equal size.

    In the order of (topic, partition, offset), all of one reader come before all of the next. So
    records ordered by reader, then by reading order, keep the order of every partition. Pieces of
    one partition that meet in one reader are joined again: a reader reads its splits at the same
    time, and each partition from front to back.

    Args:
        pieces: no two overlap, and the pieces of a partition leave no gap.
        reader_count: how many readers there are; some may get nothing.
    """
    assert reader_count > 0
    ordered = sorted(pieces)
    total = sum(piece.offset_count for piece in ordered)
    shares: list[list[SplitRange]] = [[] for _ in range(reader_count)]
    done = 0
    for piece in ordered:
        # The middle of the piece, within all there is to read, decides which reader gets it.
        middle = 2 * done + piece.offset_count
        share = shares[min(middle * reader_count // max(2 * total, 1), reader_count - 1)]
        done += piece.offset_count
        last = share[-1] if share else None
        if last is not None and last.topic_partition == piece.topic_partition:
            assert last.stop_offset == piece.start_offset, f"a gap between {last} and {piece}"
            share[-1] = replace(last, stop_offset=piece.stop_offset)
        else:
            share.append(piece)
    return tuple(tuple(share) for share in shares)
