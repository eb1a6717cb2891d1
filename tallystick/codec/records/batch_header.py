"""The headers of Kafka's record batches (magic 2): their places in the data and their fields.

Source of the format: https://kafka.apache.org/documentation/#recordbatch
"""

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from crc32c import crc32c

from tallystick.codec.records.compression import Buffer
from tallystick.errors import CorruptRecordError

HEADER = struct.Struct(">qiibIhiqqqhii")
"""Base offset, length, leader epoch, magic, checksum, attributes, last offset delta, base
timestamp, max timestamp, producer id, producer epoch, base sequence, record count."""

MAGIC = 2
LENGTH_FROM = 12
"""The batch's length counts the bytes from here on."""
CHECKED_FROM = 21
"""The checksum covers the bytes from here on: from the attributes on."""

COMPRESSION_MASK = 0x07
LOG_APPEND_TIME = 0x08
TRANSACTIONAL = 0x10
CONTROL = 0x20

_MAGIC_AT = 16
_MESSAGE_MIN = 14
"""The shortest message of the formats before magic 2; no valid length is below that."""
_LENGTH_MIN = HEADER.size - LENGTH_FROM


class ControlType(IntEnum):
    """The outcome that a control batch states for the transaction of its producer."""

    ABORT = 0
    COMMIT = 1


class BatchHeader(NamedTuple):
    """The header of a batch, and the place of the batch in the data."""

    start: int
    end: int
    base_offset: int
    last_offset: int
    crc: int
    attributes: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int
    control_type: ControlType | None

    @property
    def is_control(self) -> bool:
        """True if the batch holds a transaction marker instead of records."""
        return bool(self.attributes & CONTROL)

    @property
    def is_transactional(self) -> bool:
        """True if a transaction decides if its records count."""
        return bool(self.attributes & TRANSACTIONAL)

    @property
    def compression(self) -> int:
        """The codec's number, see `CODEC_IDS`."""
        return self.attributes & COMPRESSION_MASK

    @property
    def is_log_append_time(self) -> bool:
        """True if the broker's clock set the timestamps."""
        return bool(self.attributes & LOG_APPEND_TIME)


class DamagedBatchError(CorruptRecordError):
    """A batch is damaged, in a partition that the caller knows."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(f"record batch at offset {offset}: {reason}")


class UnreadableBatchError(DamagedBatchError):
    """A batch with a right checksum is unreadable: its producer encoded the records wrongly.

    Every replica holds the same bytes.

    Args:
        header: of the batch.
        reason: why its records are unreadable.
    """

    def __init__(self, header: "BatchHeader", reason: str) -> None:
        super().__init__(
            header.base_offset,
            f"{reason}. Its checksum is right, so it is no damage: producer "
            f"{header.producer_id} (epoch {header.producer_epoch}; -1: without idempotence) wrote "
            f"it so, at {header.max_timestamp} ms since 1970, and every replica holds the same",
        )
        self.first_offset, self.last_offset = header.base_offset, header.last_offset


def batch_headers(data: Buffer) -> Iterator[BatchHeader]:
    """Yield the headers of all whole batches, unchecked: `decode` checks the checksum.

    Args:
        data: record batches, one after another; the last may be cut off.

    Raises:
        CorruptRecordError: a length or count is impossible, or the format is before Kafka 0.11.
    """
    view = memoryview(data).cast("B")
    start = 0
    last_offset = -1
    while start + LENGTH_FROM <= len(view):
        base_offset, length = struct.unpack_from(">qi", view, start)
        if length >= _MESSAGE_MIN:
            if start + _MAGIC_AT >= len(view):
                return
            if (magic := view[start + _MAGIC_AT]) != MAGIC:
                raise DamagedBatchError(
                    base_offset,
                    f"its format is magic {magic}, expected {MAGIC} (Kafka 0.11 and later)",
                )
        if length < _LENGTH_MIN:
            raise DamagedBatchError(
                base_offset, f"a batch length of {length}, expected at least {_LENGTH_MIN}"
            )
        end = start + LENGTH_FROM + length
        if end > len(view):
            return
        header = _header(view, start, end)
        if header.base_offset <= last_offset or header.last_offset < header.base_offset:
            raise DamagedBatchError(
                base_offset,
                f"a batch of offsets {header.base_offset} to {header.last_offset} "
                f"after offset {last_offset}",
            )
        yield header
        last_offset = header.last_offset
        start = end


def check(header: BatchHeader, view: memoryview) -> None:
    """Raise `DamagedBatchError` unless the batch's checksum is right."""
    crc = crc32c(view[header.start + CHECKED_FROM : header.end])
    if crc != header.crc:
        raise DamagedBatchError(
            header.base_offset, f"the checksum is {crc:08x}, the batch says {header.crc:08x}"
        )


def _header(view: memoryview, start: int, end: int) -> BatchHeader:
    (
        base_offset,
        _,  # length
        _,  # leader epoch
        _,  # magic
        crc,
        attributes,
        last_offset_delta,
        base_timestamp,
        max_timestamp,
        producer_id,
        producer_epoch,
        base_sequence,
        record_count,
    ) = HEADER.unpack_from(view, start)
    control_type = None
    if attributes & CONTROL and record_count > 0:
        control_type = _control_type(view[start + HEADER.size : end])
    return BatchHeader(
        start,
        end,
        base_offset,
        base_offset + last_offset_delta,
        crc,
        attributes,
        base_timestamp,
        max_timestamp,
        producer_id,
        producer_epoch,
        base_sequence,
        record_count,
        control_type,
    )


def varint(data: memoryview, at: int, bits: int = 32) -> tuple[int, int]:
    """Return the signed number at a place in a record, and the place after the number.

    Args:
        data: of the record; an IndexError is raised where the number leaves it.
        at: the place.
        bits: higher ones mean nothing, as in Java.
    """
    value = 0
    for shift in range(0, 64, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            value &= (1 << bits) - 1
            return (value >> 1) ^ -(value & 1), at
    raise IndexError("a number of more than 64 bits")


def _control_type(records: memoryview) -> ControlType | None:
    """Return the kind of transaction marker; None for Kafka's other control records."""
    try:
        size, at = varint(records, 0)
        record = records[at : at + max(size, 0)]
        _, key_at = varint(record, 1)  # after the attributes: the time
        _, key_at = varint(record, key_at)  # the offset
        key_size, key_at = varint(record, key_at)
    except IndexError:
        return None
    if size > len(records) - at or not 4 <= key_size <= len(record) - key_at:
        return None
    number = int.from_bytes(record[key_at + 2 : key_at + 4])  # after the version
    return ControlType(number) if number in (ControlType.ABORT, ControlType.COMMIT) else None
