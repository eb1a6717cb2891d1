"""What a consumer group is to show of a source's positions, in requests that Kafka accepts.

Kafka appends the offsets of one request to its own topic as one batch, whose size is limited as
that of any other (1 MB by default); so thousands of partitions need several requests.
"""

from collections.abc import Iterator, Mapping
from itertools import islice

from tallystick.source.offsets import SourceOffsets
from tallystick.topic_partition import TopicPartition

POSITIONS_PER_REQUEST = 1_000
"""At most about 600 bytes each, where group and topic have the longest names that Kafka allows."""


def shown(source: SourceOffsets) -> dict[TopicPartition, int]:
    """The positions that can be shown: Kafka takes none for a topic that is gone."""
    return {p: offset for p, offset in source.positions.items() if p.topic not in source.gone}


def requests(
    positions: Mapping[TopicPartition, int],
) -> Iterator[dict[TopicPartition, tuple[int, str]]]:
    """The positions as (offset, metadata), a request's worth at a time."""
    left = iter(positions.items())
    while part := {p: (offset, "") for p, offset in islice(left, POSITIONS_PER_REQUEST)}:
        yield part
