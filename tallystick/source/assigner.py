"""Which reader reads which partition: Flink's rule, so that a migrated job keeps its balance.

Source: Flink's KafkaSourceEnumerator.getSplitOwner. The partitions of one topic go round robin,
from a start that depends on the topic's name, so many small topics do not all start at reader 0.
"""

from collections.abc import Iterable
from dataclasses import replace

from tallystick.source.split import SplitRange


def java_string_hash(text: str) -> int:
    """Java's `String.hashCode`: signed 32 bits, over UTF-16 code units."""
    units = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for high, low in zip(units[::2], units[1::2], strict=True):
        value = (31 * value + (high << 8 | low)) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def assign(topic: str, partition: int, reader_count: int) -> int:
    """The index of the reader that owns a partition, out of `reader_count`."""
    assert reader_count > 0
    start = ((java_string_hash(topic) * 31) & 0x7FFFFFFF) % reader_count
    return (start + partition) % reader_count


def share_out(
    splits: Iterable[SplitRange], reader_count: int
) -> tuple[tuple[SplitRange, ...], ...]:
    """The splits of each reader, in order; a reader may have none."""
    shares: list[list[SplitRange]] = [[] for _ in range(reader_count)]
    for split in sorted(splits):
        shares[assign(split.topic, split.partition, reader_count)].append(split)
    return tuple(tuple(share) for share in shares)


def share_pieces(
    pieces: Iterable[SplitRange], reader_count: int
) -> tuple[tuple[SplitRange, ...], ...]:
    """The pieces of partitions that were cut, dealt to readers in runs of about the same size.

    In the order of (topic, partition, offset), all of one reader come before all of the next. So
    what is ordered by reader, then by what each read first, keeps the order of every partition.
    Pieces of one partition that meet in one reader are made one again: it reads its splits at the
    same time, and a partition from front to back.

    Args:
        pieces: no two of them overlap, and those of one partition leave no gap.
        reader_count: how many readers there are; some may get nothing.
    """
    assert reader_count > 0
    ordered = sorted(pieces)
    total = sum(piece.offset_count for piece in ordered)
    shares: list[list[SplitRange]] = [[] for _ in range(reader_count)]
    done = 0
    for piece in ordered:
        # Where the middle of the piece lies in all there is to read says whose it is.
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
