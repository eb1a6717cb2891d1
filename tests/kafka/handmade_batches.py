"""Record batches written byte by byte, slowly and independently of the codec under test."""

import struct
from dataclasses import dataclass

from crc32c import crc32c

ABORT, COMMIT = 0, 1
LOG_APPEND_TIME, TRANSACTIONAL, CONTROL = 0x08, 0x10, 0x20


def varint(value: int) -> bytes:
    rest = (value << 1) ^ (value >> 63)
    parts = bytearray()
    while rest >= 0x80:
        parts.append(rest & 0x7F | 0x80)
        rest >>= 7
    parts.append(rest)
    return bytes(parts)


def blob(data: bytes | None) -> bytes:
    return varint(-1) if data is None else varint(len(data)) + data


@dataclass(frozen=True)
class Record:
    offset_delta: int
    key: bytes | None = None
    value: bytes | None = b"value"
    timestamp_delta: int = 0
    headers: tuple[tuple[bytes, bytes | None], ...] = ()

    def encoded(self) -> bytes:
        body = b"\0" + varint(self.timestamp_delta) + varint(self.offset_delta)
        body += blob(self.key) + blob(self.value) + varint(len(self.headers))
        body += b"".join(blob(key) + blob(value) for key, value in self.headers)
        return varint(len(body)) + body


def batch(
    base_offset: int,
    records: list[Record],
    *,
    last_offset_delta: int | None = None,
    attributes: int = 0,
    base_timestamp: int = 1000,
    max_timestamp: int = 2000,
    producer_id: int = -1,
    body: bytes | None = None,
    count: int | None = None,
) -> bytes:
    """A batch with a right checksum; the keyword arguments can make it wrong in other ways."""
    if body is None:
        body = b"".join(record.encoded() for record in records)
    if last_offset_delta is None:
        last_offset_delta = records[-1].offset_delta
    count = len(records) if count is None else count
    checked = struct.pack(
        ">hiqqqhii",
        attributes,
        last_offset_delta,
        base_timestamp,
        max_timestamp,
        producer_id,
        0 if producer_id >= 0 else -1,
        -1,
        count,
    )
    checked += body
    return struct.pack(">qiibI", base_offset, 9 + len(checked), 5, 2, crc32c(checked)) + checked


def values(base_offset: int, *contents: bytes, **keywords: int) -> bytes:
    """A batch of records at consecutive offsets."""
    records = [Record(index, value=value) for index, value in enumerate(contents)]
    return batch(base_offset, records, **keywords)


def transactional(base_offset: int, producer_id: int, *contents: bytes) -> bytes:
    return values(base_offset, *contents, attributes=TRANSACTIONAL, producer_id=producer_id)


def marker(offset: int, producer_id: int, kind: int) -> bytes:
    """The control batch that ends a transaction."""
    record = Record(0, key=struct.pack(">hh", 0, kind), value=struct.pack(">hi", 0, 7))
    return batch(offset, [record], attributes=TRANSACTIONAL | CONTROL, producer_id=producer_id)


def with_checksum(data: bytes) -> bytes:
    """The same single batch, its checksum made right again."""
    return data[:17] + struct.pack(">I", crc32c(data[21:])) + data[21:]


def at_offset(data: bytes, base_offset: int) -> bytes:
    """The same single batch, where a broker would put it (the checksum does not cover that)."""
    return struct.pack(">q", base_offset) + data[8:]
