"""Records that Kafka no longer has, and a split still needs: what to say, and what to do."""

import logging
from uuid import UUID

from tallystick.errors import (
    DataLossError,
    LogTruncatedError,
    PartitionRemovedError,
    RecordsExpiredError,
    TopicRecreatedError,
)
from tallystick.kafka.fetch_request import Cursor
from tallystick.kafka.protocol import topic_id_text
from tallystick.source.losses import FAIL, KEEP, LossPolicy

logger = logging.getLogger(__name__)


def expired(cursor: Cursor, earliest: int) -> RecordsExpiredError:
    """Retention, or somebody with DeleteRecords, was faster than the reader."""
    lost = min(earliest, cursor.split.stop_offset) - cursor.position
    return RecordsExpiredError(
        f"{_where(cursor)}, but the earliest left is {earliest}: {lost} offsets of this split were "
        f"deleted unread. Raise the topic's retention.ms to avoid it. {_accept('expired', 'skip')} "
        f"to go on with what is left."
    )


def truncated(cursor: Cursor, end: int) -> LogTruncatedError:
    """The log became shorter than it was when the split was planned."""
    found = "the log ends before it" if end < cursor.position else "the split is longer than that"
    return LogTruncatedError(
        f"{_where(cursor)}, and {found}: its end is {end}. Records that Kafka had confirmed are "
        f"gone, by an unclean leader election or a lost disk. {_accept('truncated', 'resume')} to "
        f"go on with what is written from now on."
    )


def removed(cursor: Cursor, servers: str, policy: LossPolicy) -> PartitionRemovedError:
    """The topic, or this partition of it, is not there."""
    split = cursor.split
    found = (
        f"{_where(cursor)}, and topic {split.topic!r} has no partition {split.partition} at "
        f"{servers}."
    )
    if policy.removed == KEEP:
        return PartitionRemovedError(
            f"{found} when.removed=keep holds positions between epochs, and this epoch was planned "
            f"while the topic was there. Wait for it to come back and start the query again. "
            f"{_accept('removed', 'drop')} to give up what was unread."
        )
    return PartitionRemovedError(
        f"{found} Was it deleted, or is this another cluster? What was unread in it is gone. "
        f"{_accept('removed', 'drop')} to go on without it."
    )


def recreated(cursor: Cursor, found: UUID | None) -> TopicRecreatedError:
    """There is a topic of this name, and it is another one."""
    return TopicRecreatedError(
        f"{_where(cursor)} of the topic with the id {topic_id_text(cursor.topic_id)}, but topic "
        f"{cursor.split.topic!r} has the id {topic_id_text(found)}: it was deleted and created "
        f"again. What was unread in the old one is gone. {_accept('recreated', 'restart')} to read "
        f"the new one from its beginning."
    )


def settle(cursor: Cursor, loss: DataLossError, policy: LossPolicy) -> None:
    """Raise the loss, unless the policy accepts what it means: then the log tells of it.

    An epoch that was planned, and is in the log, is not planned anew: so a task can hold no
    position, and what is to be kept is raised.
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


def skip(cursor: Cursor, earliest: int, loss: RecordsExpiredError, policy: LossPolicy) -> None:
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


def _where(cursor: Cursor) -> str:
    return f"split {cursor.split}: next to read is offset {cursor.position}"


def _accept(field: str, way: str) -> str:
    return f"Set when.{field}={way} (in a pipeline KafkaSource(losses=LossPolicy({field}={way!r})))"
