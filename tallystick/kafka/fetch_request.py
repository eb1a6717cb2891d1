"""The position of each split, one Fetch request about many, and its answer split by split.

Invariant: a request names each partition once, in the order in which the splits are due. Brokers
fill an answer in that order, so the first partition always gets at least one whole batch (KIP-74).
"""

import struct
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from uuid import UUID

from tallystick.codec.records.compression import Buffer
from tallystick.kafka import protocol
from tallystick.kafka.client import NO_EPOCH
from tallystick.kafka.error_policy import Attempts
from tallystick.kafka.network import PendingRequest
from tallystick.kafka.protocol import NO_ID, topic_id_from
from tallystick.values import SplitRange, TopicPartition

Isolation = Literal["read_committed", "read_uncommitted"]
PARTITIONS_MAX = 64
"""How many partitions one request may name."""
SHARES_MAX = 8
"""Among how many partitions an answer is shared: the more, the smaller the batches of records."""
FETCH_WAIT_MS = 500
"""How long a broker may hold back an empty answer."""
BY_ID = 13
"""The version from which topics are named by their id (KIP-516)."""
SILENCE_S = 5.0
"""Signs of a loss that are further apart say nothing about the time between them."""

_BATCH = struct.Struct(">qi11xi")
"""Fields of a batch's header: base offset, length, last offset delta."""
_LENGTH_FROM = 12
_LENGTH_MIN = 49


class Cursor:
    """The position of one split: the next offset to ask for.

    Args:
        split: what to read.
    """

    def __init__(self, split: SplitRange) -> None:
        self.split = split
        self.partition = split.topic_partition
        self.position = split.start_offset
        self.topic_id = topic_id_from(split.topic_id)
        self.due = 0.0
        """`time.monotonic` before which it is not to be asked again."""
        self.attempts: Attempts | None = None
        """The failures since the last progress; None without any."""
        self._doubt = ""
        self._doubt_since = 0.0
        self._doubted_at = 0.0

    @property
    def is_done(self) -> bool:
        """True if all of it was read."""
        return self.position >= self.split.stop_offset

    def belongs_to(self, topic_id: UUID | None) -> bool:
        """True if the topic that is shown now can be the one that the split means."""
        known = topic_id is not None and topic_id != NO_ID and self.topic_id != NO_ID
        return not known or topic_id == self.topic_id

    def advance(self, next_offset: int, topic_id: UUID | None) -> None:
        """Take over how far an answer went, and from which topic it was."""
        assert next_offset > self.position, (self.split, self.position, next_offset)
        self.position = next_offset
        if topic_id is not None and topic_id != NO_ID:
            self.topic_id = topic_id
        self.attempts = None
        self._doubt = ""

    def doubt(self, what: str) -> float:
        """Note what an answer is a sign of; for how many seconds all of them have said the same.

        Args:
            what: the kind of loss; empty when the answer speaks against any.
        """
        now = time.monotonic()
        if self._doubt != what or now - self._doubted_at > SILENCE_S:
            self._doubt, self._doubt_since = what, now
        self._doubted_at = now
        return now - self._doubt_since

    def take_back(self, *doubts: str) -> None:
        """An answer speaks against these losses, and says nothing about others."""
        if self._doubt in doubts:
            self._doubt = ""

    def forgive(self, seconds: float) -> None:
        """Do not count time in which nobody was asking."""
        self._doubt_since += seconds
        self._doubted_at += seconds
        if self.attempts is not None:
            self.attempts.deadline += seconds


@dataclass(frozen=True, slots=True)
class SplitRequest:
    """A request under way: until when, for whom, and as what their topics were named."""

    posted: PendingRequest
    until: float
    version: int
    cursors: Sequence[Cursor]
    topic_ids: Mapping[str, UUID | None]


@dataclass(frozen=True, slots=True)
class Part:
    """The part of an answer that is one split's: the offsets from `start` up to `stop`."""

    cursor: Cursor
    start: int
    stop: int
    records: Buffer
    aborted: list[tuple[int, int]]


def take_turn(queue: deque[Cursor]) -> list[Cursor]:
    """The next splits to ask for, no two of the same partition; takes them from the queue."""
    chosen: dict[TopicPartition, Cursor] = {}
    left: list[Cursor] = []
    while queue and len(chosen) < PARTITIONS_MAX:
        cursor = queue.popleft()
        if cursor.partition in chosen:
            left.append(cursor)
        else:
            chosen[cursor.partition] = cursor
    queue.extendleft(reversed(left))
    by_topic: dict[str, list[Cursor]] = {}
    for cursor in chosen.values():
        by_topic.setdefault(cursor.split.topic, []).append(cursor)
    return [cursor for cursors in by_topic.values() for cursor in cursors]


def fetch_request(
    cursors: Sequence[Cursor],
    topic_ids: Mapping[str, UUID | None],
    leader_epochs: Mapping[TopicPartition, int],
    max_bytes: int,
    isolation: Isolation,
) -> Any:
    """The request; by name where a topic has no id."""
    topic_class = protocol.FetchRequest.FetchTopic
    share = max(1, max_bytes // min(len(cursors), SHARES_MAX))
    topics: dict[str, Any] = {}
    for cursor in cursors:
        name = cursor.split.topic
        if name not in topics:
            topic_id = topic_ids.get(name) or NO_ID
            topics[name] = topic_class(topic=name, topic_id=topic_id, partitions=[])
        topics[name].partitions.append(
            topic_class.FetchPartition(
                partition=cursor.split.partition,
                current_leader_epoch=leader_epochs.get(cursor.partition, NO_EPOCH),
                fetch_offset=cursor.position,
                partition_max_bytes=share,
            )
        )
    has_ids = all(topic.topic_id != NO_ID for topic in topics.values())
    return protocol.FetchRequest(
        max_wait_ms=FETCH_WAIT_MS,
        min_bytes=1,
        max_bytes=max_bytes,
        isolation_level=int(isolation == "read_committed"),
        topics=list(topics.values()),
        max_version=None if has_ids else BY_ID - 1,
    )


def parts_by_cursor(asked: SplitRequest, response: Any) -> list[tuple[Cursor, str | None, Any]]:
    """For each split asked for: the name of an error, and its part of the answer."""
    by_id = asked.version >= BY_ID
    found = {
        (topic.topic_id if by_id else topic.topic, part.partition_index): part
        for topic in response.responses or []
        for part in topic.partitions
    }
    whole_error = protocol.error_name(response.error_code or 0)
    parts = []
    for cursor in asked.cursors:
        name = cursor.split.topic
        part = found.get((asked.topic_ids.get(name) if by_id else name, cursor.split.partition))
        error_name = whole_error or (
            "an answer without it" if part is None else protocol.error_name(part.error_code)
        )
        parts.append((cursor, error_name, part))
    return parts


def part_of(cursor: Cursor, part: Any) -> Part:
    """The records for a split; its `stop` is where to ask next: after the last whole batch."""
    stop_offset = cursor.split.stop_offset
    records = part.records or b""
    next_offset = cursor.position
    at = 0
    while at + _BATCH.size <= len(records):
        base, length, delta = _BATCH.unpack_from(records, at)
        end = at + _LENGTH_FROM + length
        if length < _LENGTH_MIN or end > len(records):
            break  # cut off; or damaged, which decoding will tell
        if base >= stop_offset:
            next_offset = stop_offset
            break
        next_offset = max(next_offset, min(base + delta + 1, stop_offset))
        at = end
    aborted = [(each.producer_id, each.first_offset) for each in part.aborted_transactions or []]
    return Part(cursor, cursor.position, next_offset, records, aborted)
