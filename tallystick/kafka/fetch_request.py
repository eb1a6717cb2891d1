"""The position of each split, one Fetch request about many, its answer, and lost records.

Invariant: a request names each partition once, in the order in which the splits are due. Brokers
fill an answer in that order, so the first partition always gets at least one whole batch (KIP-74).
"""

import logging
import struct
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from uuid import UUID

from tallystick.codec.records.batch_header import UnreadableBatchError
from tallystick.codec.records.compression import Buffer
from tallystick.errors import (
    CorruptRecordError,
    DataLossError,
    LogTruncatedError,
    PartitionRemovedError,
    RecordsExpiredError,
    TopicRecreatedError,
)
from tallystick.kafka import protocol
from tallystick.kafka.client import NO_EPOCH
from tallystick.kafka.connection import PendingRequest
from tallystick.kafka.error_policy import Attempts
from tallystick.kafka.messages import NO_ID
from tallystick.kafka.protocol import topic_id_from, topic_id_text
from tallystick.source.subscription import FAIL, KEEP, LossPolicy
from tallystick.values import SplitRange, TopicPartition

logger = logging.getLogger(__name__)

Isolation = Literal["read_committed", "read_uncommitted"]
PARTITIONS_MAX = 64
"""At most this many partitions are named by a request."""
SHARES_MAX = 8
"""At most this many partitions share an answer: the more, the smaller the batches of records."""
FETCH_WAIT_MS = 500
"""A broker may hold back an empty answer for this long."""
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
        """True if the topic that is shown now can be the split's own topic."""
        known = topic_id is not None and topic_id != NO_ID and self.topic_id != NO_ID
        return not known or topic_id == self.topic_id

    def advance(self, next_offset: int, topic_id: UUID | None) -> None:
        """Move the position on by an answer, and note the id of the answer's topic."""
        assert next_offset > self.position, (self.split, self.position, next_offset)
        self.position = next_offset
        if topic_id is not None and topic_id != NO_ID:
            self.topic_id = topic_id
        self.attempts = None
        self._doubt = ""

    def doubt(self, what: str) -> float:
        """Note the loss that an answer hints at; return for how many seconds all answers agree.

        Args:
            what: the kind of loss; empty when the answer speaks against any.
        """
        now = time.monotonic()
        if self._doubt != what or now - self._doubted_at > SILENCE_S:
            self._doubt, self._doubt_since = what, now
        self._doubted_at = now
        return now - self._doubt_since

    def take_back(self, *doubts: str) -> None:
        """Drop the doubt about the split if an answer disproved doubts of this kind."""
        if self._doubt in doubts:
            self._doubt = ""

    def forgive(self, seconds: float) -> None:
        """Leave out time in which no request was sent."""
        self._doubt_since += seconds
        self._doubted_at += seconds
        if self.attempts is not None:
            self.attempts.deadline += seconds


@dataclass(frozen=True, slots=True)
class SplitRequest:
    """A Fetch request under way: the deadline, the splits, and the ids of their topics."""

    posted: PendingRequest
    until: float
    version: int
    cursors: Sequence[Cursor]
    topic_ids: Mapping[str, UUID | None]


@dataclass(frozen=True, slots=True)
class Part:
    """A split's part of an answer: the offsets from `start` up to `stop`."""

    cursor: Cursor
    start: int
    stop: int
    records: Buffer
    aborted: list[tuple[int, int]]


def take_turn(queue: deque[Cursor]) -> list[Cursor]:
    """Take the next splits to ask for from the queue, no two of the same partition."""
    chosen: dict[TopicPartition, Cursor] = {}
    postponed: list[Cursor] = []
    while queue and len(chosen) < PARTITIONS_MAX:
        cursor = queue.popleft()
        if cursor.partition in chosen:
            postponed.append(cursor)
        else:
            chosen[cursor.partition] = cursor
    queue.extendleft(reversed(postponed))
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
    """Return a request for the splits; by name where a topic has no id."""
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


def parts_by_cursor(request: SplitRequest, response: Any) -> list[tuple[Cursor, str | None, Any]]:
    """Return each split asked for, with the name of an error and its part of the answer."""
    by_id = request.version >= BY_ID
    parts_by_key = {
        (topic.topic_id if by_id else topic.topic, part.partition_index): part
        for topic in response.responses or []
        for part in topic.partitions
    }
    whole_error = protocol.error_name(response.error_code or 0)
    parts = []
    for cursor in request.cursors:
        name = cursor.split.topic
        part = parts_by_key.get(
            (request.topic_ids.get(name) if by_id else name, cursor.split.partition)
        )
        error_name = whole_error or (
            "an answer without it" if part is None else protocol.error_name(part.error_code)
        )
        parts.append((cursor, error_name, part))
    return parts


def part_of(cursor: Cursor, part: Any) -> Part:
    """Return a split's records; `stop` is where to ask next, after the last whole batch."""
    stop_offset = cursor.split.stop_offset
    records = part.records or b""
    next_offset = cursor.position
    at = 0
    while at + _BATCH.size <= len(records):
        base, length, delta = _BATCH.unpack_from(records, at)
        end = at + _LENGTH_FROM + length
        if length < _LENGTH_MIN or end > len(records):
            break  # cut off; or damaged, which decoding will report
        if base >= stop_offset:
            next_offset = stop_offset
            break
        next_offset = max(next_offset, min(base + delta + 1, stop_offset))
        at = end
    aborted = [
        (transaction.producer_id, transaction.first_offset)
        for transaction in part.aborted_transactions or []
    ]
    return Part(cursor, cursor.position, next_offset, records, aborted)


def records_expired(cursor: Cursor, earliest: int) -> RecordsExpiredError:
    """Return the error for records that Kafka deleted before they were read."""
    lost = min(earliest, cursor.split.stop_offset) - cursor.position
    return RecordsExpiredError(
        f"{_where(cursor)}, but the earliest left is {earliest}: {lost} offsets of this split were "
        f"deleted unread. Raise the topic's retention.ms to avoid it. {_accept('expired', 'skip')} "
        f"to go on with what is left."
    )


def log_truncated(cursor: Cursor, end: int) -> LogTruncatedError:
    """Return the error for a log that became shorter than it was when the split was planned."""
    reason = "the log ends before it" if end < cursor.position else "the split is longer than that"
    return LogTruncatedError(
        f"{_where(cursor)}, and {reason}: its end is {end}. Records that Kafka had confirmed are "
        f"gone, by an unclean leader election or a lost disk. {_accept('truncated', 'resume')} to "
        f"go on with what is written from now on."
    )


def partition_removed(cursor: Cursor, servers: str, policy: LossPolicy) -> PartitionRemovedError:
    """Return the error for a topic, or a partition of it, that does not exist."""
    split = cursor.split
    problem = (
        f"{_where(cursor)}, and topic {split.topic!r} has no partition {split.partition} at "
        f"{servers}."
    )
    if policy.removed == KEEP:
        return PartitionRemovedError(
            f"{problem} when.removed=keep holds positions between epochs, and this epoch was "
            f"planned while the topic was there. Wait for it to come back and start the query "
            f"again. {_accept('removed', 'drop')} to give up what was unread."
        )
    return PartitionRemovedError(
        f"{problem} Was it deleted, or is this another cluster? What was unread in it is gone. "
        f"{_accept('removed', 'drop')} to go on without it."
    )


def topic_recreated(cursor: Cursor, new_id: UUID | None) -> TopicRecreatedError:
    """Return the error for a topic of the planned name, but with another id."""
    return TopicRecreatedError(
        f"{_where(cursor)} of the topic with the id {topic_id_text(cursor.topic_id)}, but topic "
        f"{cursor.split.topic!r} has the id {topic_id_text(new_id)}: it was deleted and created "
        f"again. What was unread in the old one is gone. {_accept('recreated', 'restart')} to read "
        f"the new one from its beginning."
    )


def accept_loss(cursor: Cursor, loss: DataLossError, policy: LossPolicy) -> None:
    """Raise the loss, or log a warning if the policy accepts it.

    An epoch that was planned, and is in the log, is not planned again: so a task can hold no
    position, and `keep` raises too.
    """
    way = {
        RecordsExpiredError: policy.expired,
        PartitionRemovedError: policy.removed,
        TopicRecreatedError: policy.recreated,
        LogTruncatedError: policy.truncated,
    }[type(loss)]
    if way in (FAIL, KEEP):
        raise loss from None
    stop = cursor.split.stop_offset
    logger.warning(
        "split %s: offsets %d to %d, %d of them, are given up, as asked (%s). %s",
        cursor.split,
        cursor.position,
        stop,
        stop - cursor.position,
        way,
        loss,
    )


def skip_expired(
    cursor: Cursor, earliest: int, loss: RecordsExpiredError, policy: LossPolicy
) -> None:
    """Raise the loss, or go on at the earliest offset that is left."""
    if policy.expired == FAIL:
        raise loss from None
    target = min(earliest, cursor.split.stop_offset)
    logger.warning(
        "split %s: offsets %d to %d, %d of them, had expired and are skipped, as asked",
        cursor.split,
        cursor.position,
        target,
        target - cursor.position,
    )
    cursor.position = target


def skip_unreadable(cursor: Cursor, policy: LossPolicy, wrong: UnreadableBatchError) -> None:
    """Raise what is wrong with a batch, or leave its records out with a warning."""
    if policy.unreadable == FAIL:
        raise CorruptRecordError(
            f"{cursor.partition}, {wrong}. Mend the producer. {_accept('unreadable', 'skip')} to "
            f"go on without the batch, offsets {wrong.first_offset} to {wrong.last_offset}."
        ) from None
    logger.warning(
        "split %s: the batch of offsets %d to %d is left out, as asked. %s",
        cursor.split,
        wrong.first_offset,
        wrong.last_offset,
        wrong,
    )


def _where(cursor: Cursor) -> str:
    return f"split {cursor.split}: next to read is offset {cursor.position}"


def _accept(field: str, way: str) -> str:
    return f"Set when.{field}={way} (in a pipeline KafkaSource(losses=LossPolicy({field}={way!r})))"
