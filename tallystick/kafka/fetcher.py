"""Read one split from Kafka as Arrow batches: from its first offset exactly to its last.

Invariants:
    * Every visible record of the split is yielded once, in order, or an error is raised.
    * A position moves past control batches and aborted records too: they are not waited for.
    * Records that retention deleted, and a topic that is gone or another one, are DataLossErrors.
"""

from collections.abc import Iterator
from typing import Any, Literal

import pyarrow as pa

from tallystick.errors import BrokerUnavailableError, DataLossError
from tallystick.kafka import protocol
from tallystick.kafka.attempts import Attempts
from tallystick.kafka.client import Client
from tallystick.kafka.offsets import earliest_offset
from tallystick.kafka.reactions import AGAIN, STALE, describe, refusal
from tallystick.kafka.records import decode
from tallystick.source.split import SplitRange

__all__ = ["Isolation", "earliest_offset", "fetch"]

Isolation = Literal["read_committed", "read_uncommitted"]
FETCH_BYTES_MAX = 8 << 20
"""How much one answer may hold; a larger record comes all the same (KIP-74)."""
FETCH_WAIT_MS = 500
"""How long a broker may hold back an empty answer."""


def fetch(
    client: Client,
    split: SplitRange,
    *,
    headers: bool = False,
    max_bytes: int = FETCH_BYTES_MAX,
    isolation: Isolation = "read_committed",
) -> Iterator[pa.RecordBatch]:
    """Read a split.

    Args:
        client: of the cluster.
        split: what to read; its end must be no later than the last stable offset.
        headers: whether the batches have a column of headers.
        max_bytes: how much to ask for at once.
        isolation: whether records of open and aborted transactions are left out.

    Yields:
        Batches with the columns of `records.decode`, none of them empty.

    Raises:
        DataLossError: records expired unread, or the topic is gone.
        CorruptRecordError: bytes in the log are damaged.
        AuthorizationError: READ on the topic is missing.
        BrokerUnavailableError: nothing new came within delivery.timeout.ms.
    """
    reader = _SplitReader(client, split, max_bytes, isolation)
    while reader.position < split.stop_offset:
        part = reader.next_part()
        decoded = decode(
            part.records or b"",
            topic_partition=split.topic_partition,
            start_offset=reader.position,
            stop_offset=split.stop_offset,
            aborted=_aborted(part) if isolation == "read_committed" else None,
            headers=headers,
        )
        reader.advance(decoded.next_offset, part)
        if decoded.batch.num_rows:
            yield decoded.batch


def _aborted(part: Any) -> list[tuple[int, int]]:
    return [(each.producer_id, each.first_offset) for each in part.aborted_transactions or []]


class _SplitReader:
    """The position in one split, and the tries to get past it."""

    def __init__(
        self, client: Client, split: SplitRange, max_bytes: int, isolation: Isolation
    ) -> None:
        self.position = split.start_offset
        self._client = client
        self._split = split
        self._partition = split.topic_partition
        self._max_bytes = max_bytes
        self._isolation = isolation
        self._topic_id: object = None
        self._missing = False
        self._attempts = self._new_attempts()

    def next_part(self) -> Any:
        """The partition's part of an answer without error."""
        try:
            return self._next_part()
        except BrokerUnavailableError:
            if self._missing:
                raise self._gone() from None
            raise

    def _next_part(self) -> Any:
        while True:
            until = self._attempts.deadline
            try:
                node = self._leader()
                if node is None:
                    obstacle = self._client.leader_obstacle(self._partition)
                else:
                    response = self._client.network.ask(
                        node, self._request(), self._client.try_until(until)
                    )
                    part = response.responses[0].partitions[0]
                    obstacle = protocol.error_name(part.error_code) or ""
            except OSError as error:
                obstacle = describe(error)
                self._client.forget_leaders([self._partition])
            if not obstacle:
                return part
            self._overcome(obstacle)

    def advance(self, next_offset: int, part: Any) -> None:
        """Take over how far a part of an answer went; wait a little if that is nowhere."""
        if next_offset > self.position:
            self.position = next_offset
            self._topic_id = self._client.topic_ids.get(self._split.topic)
            self._attempts = self._new_attempts()
            return
        self._attempts.pause(
            f"an empty answer at offset {self.position}, where the last stable offset is "
            f"{part.last_stable_offset} and the end of the log {part.high_watermark}"
        )

    def _overcome(self, obstacle: str) -> None:
        """Wait where that can help, and raise where it cannot."""
        error_name = obstacle if obstacle.isalnum() else None
        if error_name == "OffsetOutOfRange":
            raise self._out_of_range()
        if error_name is not None and error_name not in AGAIN:
            raise refusal(error_name, "Fetch", str(self._split))
        if error_name in STALE:
            self._client.forget_leaders([self._partition])
        self._missing = error_name == "UnknownTopicOrPartition"
        self._client.obstacles[f"Fetch: {obstacle}"] += 1
        self._attempts.pause(obstacle)

    def _leader(self) -> int | None:
        led = self._client.by_leader([self._partition], self._attempts.deadline)
        topic_id = self._client.topic_ids.get(self._split.topic)
        if self._topic_id is not None and topic_id != self._topic_id:
            raise DataLossError(
                f"split {self._split}: topic {self._split.topic!r} was deleted and created again "
                f"while it was read, at offset {self.position}. What was unread in the old one is "
                f"gone. Start from a new checkpoint to read the new one."
            )
        return next(iter(led), None)

    def _request(self) -> Any:
        topic_class = protocol.FetchRequest.FetchTopic
        part = topic_class.FetchPartition(
            partition=self._split.partition,
            fetch_offset=self.position,
            partition_max_bytes=self._max_bytes,
        )
        topic = topic_class(
            topic=self._split.topic,
            topic_id=self._client.topic_ids.get(self._split.topic),  # from version 13 on
            partitions=[part],
        )
        return protocol.FetchRequest(
            max_wait_ms=FETCH_WAIT_MS,
            min_bytes=1,
            max_bytes=self._max_bytes,
            isolation_level=int(self._isolation == "read_committed"),
            topics=[topic],
        )

    def _out_of_range(self) -> DataLossError:
        earliest = earliest_offset(self._client, self._partition)
        if earliest > self.position:
            lost = min(earliest, self._split.stop_offset) - self.position
            return DataLossError(
                f"split {self._split}: next to read is offset {self.position}, but the earliest "
                f"left is {earliest}: {lost} offsets of this split were deleted unread. Raise the "
                f"topic's retention.ms to avoid it; to accept the loss, set failOnDataLoss=false."
            )
        return DataLossError(
            f"split {self._split}: next to read is offset {self.position}, and the log ends before "
            f"it (it begins at {earliest}). The topic was truncated, or deleted and created again. "
            f"Start from a new checkpoint to read what it holds now."
        )

    def _gone(self) -> DataLossError:
        return DataLossError(
            f"split {self._split}: topic {self._split.topic!r} has no partition "
            f"{self._split.partition} at {self._client.config.bootstrap_servers}; next to read was "
            f"offset {self.position}. Was it deleted, or is this another cluster? What was unread "
            f"in it is gone; start from a new checkpoint to read on without it."
        )

    def _new_attempts(self) -> Attempts:
        return Attempts(self._client.deadline(), "Fetch", str(self._split))
