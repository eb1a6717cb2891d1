"""The visible records of a fetch response as Python values, one by one, without compiled kernels.

`tallystick topic read` uses them: a process that shows a few records has them on the screen before
the kernels of `decoder` were loaded. What both have to know, visible batches and their bytes, is
here too.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from tallystick.codec.records.batch_header import (
    HEADER,
    BatchHeader,
    ControlType,
    DamagedBatchError,
    UnreadableBatchError,
    batch_headers,
    check,
    varint,
)
from tallystick.codec.records.compression import Buffer, decompress
from tallystick.errors import CorruptRecordError
from tallystick.values import TopicPartition

GiveUp: TypeAlias = Callable[[UnreadableBatchError], None]
"""Decides about a batch that its producer wrote wrongly: returns to leave it out, or raises."""

_RECORD_BYTES_MIN = 7  # seven fields of at least one byte


class AbortedTransactions:
    """The aborted transactions, whose batches are hidden. Source: Java's CompletedFetch."""

    def __init__(self, aborted: Iterable[tuple[int, int]] | None) -> None:
        self._later = sorted(aborted or (), key=lambda transaction: -transaction[1])
        self._open: set[int] = set()

    def hide(self, header: BatchHeader) -> bool:
        """Take note of the next batch; True if its records are to be left out."""
        while self._later and self._later[-1][1] <= header.last_offset:
            self._open.add(self._later.pop()[0])
        if header.is_control:
            if header.control_type is ControlType.ABORT:
                self._open.discard(header.producer_id)
            return True
        return header.is_transactional and header.producer_id in self._open


def decompressed(header: BatchHeader, view: memoryview, give_up: GiveUp | None) -> Buffer | None:
    """Return the decompressed records of a batch; None: the batch has none, or is given up."""
    problem = ""
    records: Buffer = b""
    if not 0 <= header.record_count <= header.last_offset - header.base_offset + 1:
        problem = (
            f"{header.record_count} records in a batch that ends at offset {header.last_offset}"
        )
    elif header.record_count:
        try:
            records = decompress(header.compression, view[header.start + HEADER.size : header.end])
        except CorruptRecordError as error:
            problem = str(error)
        # Before room for so many records is allocated.
        if not problem and header.record_count * _RECORD_BYTES_MIN > len(records):
            problem = f"{header.record_count} records in {len(records)} bytes"
    if problem:
        give_up_or_raise(UnreadableBatchError(header, problem), give_up)
        return None
    return records if header.record_count else None


def give_up_or_raise(wrong: UnreadableBatchError, give_up: GiveUp | None) -> None:
    """Let the caller decide about an unreadable batch, or raise the error."""
    if give_up is None:
        raise wrong
    give_up(wrong)


class PlainRecord(NamedTuple):
    """A record as Kafka stores it; `timestamp` in ms, header names as text."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


def plain_records(
    data: Buffer,
    *,
    topic_partition: TopicPartition,
    start_offset: int,
    stop_offset: int,
    aborted: Sequence[tuple[int, int]],
) -> Iterator[PlainRecord]:
    """Yield the records that `decoder.decode` makes columns of, with the same arguments.

    Raises:
        CorruptRecordError: a batch is damaged, or of a format before Kafka 0.11.
    """
    view = memoryview(data).cast("B")
    transactions = AbortedTransactions(aborted)
    try:
        for header in batch_headers(view):
            if header.base_offset >= stop_offset:
                return
            check(header, view)
            if transactions.hide(header) or header.last_offset < start_offset:
                continue
            records = decompressed(header, view, None)
            for record in () if records is None else _records(header, records):
                if start_offset <= record.offset < stop_offset:
                    yield record
    except DamagedBatchError as damage:
        raise CorruptRecordError(f"{topic_partition}, {damage}") from None


def _records(header: BatchHeader, data: Buffer) -> Iterator[PlainRecord]:
    records = memoryview(data).cast("B")
    at = number = 0
    try:
        while number < header.record_count:
            size, at = varint(records, at)
            if not 0 <= size <= len(records) - at:
                raise IndexError(size)
            yield _record(header, records[at : at + size])
            at += size
            number += 1
        if at != len(records):
            raise IndexError(at)
    except IndexError:
        raise UnreadableBatchError(
            header, f"record {number} of {header.record_count} does not fit the batch that holds it"
        ) from None


def _record(header: BatchHeader, record: memoryview) -> PlainRecord:
    timestamp_delta, at = varint(record, 1, 64)  # after the attributes
    offset_delta, at = varint(record, at)
    key, at = _blob(record, at)
    value, at = _blob(record, at)
    header_count, at = varint(record, at)
    headers = []
    for _ in range(header_count):
        name, at = _blob(record, at)
        content, at = _blob(record, at)
        if name is None:
            raise IndexError(at)
        headers.append((name.decode(errors="replace"), content))
    offset = header.base_offset + offset_delta
    if at != len(record) or not header.base_offset <= offset <= header.last_offset:
        raise IndexError(at)
    timestamp = header.base_timestamp + timestamp_delta
    if header.is_log_append_time:
        timestamp = header.max_timestamp
    return PlainRecord(offset, timestamp, key, value, tuple(headers))


def _blob(record: memoryview, at: int) -> tuple[bytes | None, int]:
    """Return bytes and the place after them; any length below 0 is null, as in Java."""
    size, at = varint(record, at)
    if size < 0:
        return None, at
    if size > len(record) - at:
        raise IndexError(size)
    return record[at : at + size].tobytes(), at + size
