"""Read splits from Kafka as Arrow batches: each from its first offset exactly to its last.

Invariants:
    * Every visible record of a split is yielded once, in order, or an error is raised.
    * A position moves past control batches and aborted records too: they are not waited for.
    * What Kafka no longer has is a DataLossError, or is given up with a warning where the policy
      says so; the other splits do not notice.
    * Splits take turns. While one answer is decoded, each leader has at most one request under
      way; only one answer at a time is in memory.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.fetch_request import Isolation, Part
from tallystick.kafka.fetch_scheduler import Turns
from tallystick.kafka.records import decode_pieces
from tallystick.kafka.thread_client import client_for
from tallystick.source.losses import LossPolicy
from tallystick.values import SplitRange

__all__ = ["Isolation", "KafkaFetch", "fetch", "fetch_all"]

FETCH_BYTES_MAX = 8 << 20
"""How much one answer may hold; a larger record comes all the same (KIP-74)."""
STRICT = LossPolicy()
NOTICEABLE_S = 0.01
"""A shorter absence of the reader is not worth a correction of deadlines."""


@dataclass(frozen=True)
class KafkaFetch:
    """How a reading task reaches a cluster; see `ports.Fetch`.

    Args:
        config: how the cluster is reached; a process keeps its connections from task to task.
    """

    config: KafkaConfig

    def read(
        self, splits: Iterable[SplitRange], *, headers: bool, policy: LossPolicy
    ) -> Iterator[tuple[SplitRange, pa.RecordBatch]]:
        """See `ports.Fetch.read`, and `fetch_all`."""
        return fetch_all(client_for(self.config), splits, headers=headers, policy=policy)


def fetch(
    client: Client,
    split: SplitRange,
    *,
    headers: bool = False,
    max_bytes: int = FETCH_BYTES_MAX,
    isolation: Isolation = "read_committed",
) -> Iterator[pa.RecordBatch]:
    """Read one split; see `fetch_all`."""
    found = fetch_all(client, [split], headers=headers, max_bytes=max_bytes, isolation=isolation)
    for _, batch in found:
        yield batch


def fetch_all(
    client: Client,
    splits: Iterable[SplitRange],
    *,
    headers: bool = False,
    policy: LossPolicy = STRICT,
    max_bytes: int = FETCH_BYTES_MAX,
    isolation: Isolation = "read_committed",
) -> Iterator[tuple[SplitRange, pa.RecordBatch]]:
    """Read many splits, in turns, keeping the order within each.

    Args:
        client: of the cluster.
        splits: what to read; their ends must be no later than the last stable offsets.
        headers: whether the batches have a column of headers.
        policy: what to do about records that Kafka no longer has.
        max_bytes: how much to ask a leader for at once.
        isolation: whether records of open and aborted transactions are left out.

    Yields:
        Batches with the columns of `records.decode_pieces`, none of them empty, and whose they are.

    Raises:
        RecordsExpiredError: records were deleted unread.
        PartitionRemovedError: a topic, or a partition, is not there.
        TopicRecreatedError: a topic is not the one that the split means.
        LogTruncatedError: a log ends before the split.
        CorruptRecordError: bytes in the log are damaged.
        AuthorizationError: READ on a topic is missing.
        BrokerUnavailableError: nothing new came for a split within delivery.timeout.ms; time in
            which the caller does other things does not count.
    """
    turns = Turns(client, splits, policy, max_bytes, isolation)
    waiting: deque[Part] = deque()
    try:
        while waiting or turns.receive(waiting):
            while waiting:
                part = waiting.popleft()
                for batch in _decoded(part, headers, isolation):
                    left = time.monotonic()
                    yield part.cursor.split, batch
                    away_s = time.monotonic() - left
                    if away_s > NOTICEABLE_S:
                        turns.forgive(away_s)
    finally:
        turns.close()


def _decoded(part: Part, headers: bool, isolation: Isolation) -> Iterator[pa.RecordBatch]:
    """The records of a part, piece by piece."""
    split = part.cursor.split
    pieces = decode_pieces(
        part.records,
        topic_partition=split.topic_partition,
        start_offset=part.start,
        stop_offset=split.stop_offset,
        aborted=part.aborted if isolation == "read_committed" else None,
        headers=headers,
    )
    for piece in pieces:
        if piece.batch.num_rows:
            yield piece.batch
    assert piece.next_offset == part.stop, (split, part.start, part.stop, piece.next_offset)
