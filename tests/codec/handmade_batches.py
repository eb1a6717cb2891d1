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

    def row(self, base_offset: int, base_timestamp: int) -> dict[str, object]:
        """The row that a decoder makes of it."""
        timestamp = (base_timestamp + self.timestamp_delta + 2**63) % 2**64 - 2**63
        headers = [
            {"key": key.decode(errors="replace"), "value": value} for key, value in self.headers
        ]
        return {
            "key": self.key,
            "value": self.value,
            "offset": base_offset + self.offset_delta,
            "timestamp": timestamp,
            "headers": headers or None,
        }

    def encoded(self) -> bytes:
        body = b"\0" + varint(self.timestamp_delta) + varint(self.offset_delta)
        body += blob(self.key) + blob(self.value) + varint(len(self.headers))
        body += b"".join(blob(key) + blob(value) for key, value in self.headers)
        return varint(len(body)) + body


class Reader:
    """Reads byte by byte; ValueError or IndexError where a field does not fit."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                value &= 2**64 - 1
                return (value >> 1) ^ -(value & 1)
        raise ValueError("a varint of more than 10 bytes")

    def int32(self) -> int:
        """A varint whose bits beyond 32 mean nothing, as Java reads it."""
        value = self.varint()
        bits = ((value << 1) ^ (value >> 63)) & (2**32 - 1)
        return (bits >> 1) ^ -(bits & 1)

    def blob(self, *, may_be_null: bool = True) -> bytes | None:
        size = self.int32()
        if (size < 0 and not may_be_null) or size > len(self.data) - self.at:
            raise ValueError(f"{size} bytes")
        if size < 0:
            return None
        self.at += size
        return self.data[self.at - size : self.at]

    def check_end(self) -> None:
        if self.at != len(self.data):
            raise ValueError(f"{len(self.data) - self.at} bytes too many")


def read_records(body: bytes, count: int) -> list[Record]:
    """The records of a batch's body; ValueError or IndexError if they are not so many."""
    whole, records = Reader(body), []
    for _ in range(count):
        one = Reader(whole.blob(may_be_null=False) or b"")
        one.at = 1  # attributes, unused
        timestamp_delta, offset_delta = one.varint(), one.int32()
        key, value = one.blob(), one.blob()
        header_count = one.int32()
        if header_count < 0:
            raise ValueError(f"{header_count} headers")
        headers = tuple(
            (one.blob(may_be_null=False) or b"", one.blob()) for _ in range(header_count)
        )
        one.check_end()
        records.append(Record(offset_delta, key, value, timestamp_delta, headers))
    whole.check_end()
    return records


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
