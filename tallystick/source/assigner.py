"""Which reader reads which partition: Flink's rule, so that a migrated job keeps its balance.

Source: Flink's KafkaSourceEnumerator.getSplitOwner. The partitions of one topic go round robin,
from a start that depends on the topic's name, so many small topics do not all start at reader 0.
"""

from collections.abc import Iterable

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
