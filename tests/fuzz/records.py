"""Record batches and their compressions; and what Kafka's brokers answer, down to frames."""

import struct
import zlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from random import Random
from typing import Any

from tallystick.codec.records.batch_header import batch_headers
from tallystick.codec.records.compression import CODEC_IDS, compress, decompress
from tallystick.codec.records.decoder import decode
from tallystick.values import TopicPartition
from tests.codec.handmade_batches import (
    CONTROL,
    LOG_APPEND_TIME,
    TRANSACTIONAL,
    Record,
    batch,
    marker,
    read_records,
    with_checksum,
)
from tests.fuzz.decoder import Decoder
from tests.fuzz.guarded import GuardedMemory
from tests.fuzz.mutations import mutated

BODY_AT = 61
ROW = ("key", "value", "offset", "timestamp", "headers")
COMPRESSED_MAX = 32 << 20
"""How large compressed data may become here; a small number, so that more would be noticed."""
MEMORY = GuardedMemory()


@cache
def bodies() -> list[bytes]:
    """Records with all that the format knows."""
    records = [
        Record(
            index,
            None if index % 3 == 0 else b"key%d" % index,
            None if index % 5 == 0 else b"value" * (index % 40),
            timestamp_delta=index * (-1) ** index * 10**9,
            headers=((b"name", b"content"), (b"other", None)) if index % 2 else (),
        )
        for index in range(60)
    ]
    return [record.encoded() for record in records]


@cache
def batches() -> list[bytes]:
    """Batches of them in all compressions, and a marker."""
    parts, body = bodies(), b"".join(bodies())
    packed = [
        batch(
            100,
            [],
            body=compress(name, body),
            count=len(parts),
            last_offset_delta=len(parts) - 1,
            attributes=codec,
        )
        for name, codec in CODEC_IDS.items()
    ]
    return [*packed, packed[0], packed[0], marker(100, 7, 1)]


def damaged_batch(data: bytes, chance: Random, others: Sequence[bytes]) -> bytes:
    """Damage the body or the header, and mostly make length and checksum right again."""
    if chance.random() < 0.1:
        return mutated(data, chance, others)
    if chance.random() < 0.2:
        damaged = bytearray(mutated(data[:BODY_AT], chance, others)[:BODY_AT].ljust(BODY_AT, b"\0"))
        damaged[16] = 2
        damaged += data[BODY_AT:]
    else:
        damaged = bytearray(data[:BODY_AT] + mutated(data[BODY_AT:], chance, others))
    if chance.random() < 0.8:  # else the batch is cut off or followed
        damaged[8:12] = (len(damaged) - 12).to_bytes(4, "big")
    return with_checksum(bytes(damaged))


def read_batch(data: bytes, original: bytes) -> bool:
    """Decode as a reader does, from one of several positions; compare with rows read by hand."""
    chance = Random(zlib.crc32(data))
    start, aborted = chance.choice((0, 100, 130)), chance.choice((None, [(7, 0)]))
    headers, stop = chance.random() < 0.7, chance.choice((2**62, 2**63 - 1))
    held_bytes = MEMORY.holding(data, at_end=chance.random() < 0.9)
    list(batch_headers(held_bytes))
    result = decode(
        held_bytes,
        topic_partition=TopicPartition("mutated", 0),
        start_offset=start,
        stop_offset=stop,
        aborted=aborted,
        headers=headers,
    )
    result.batch.validate(full=True)
    if int.from_bytes(data[8:12], "big") == len(data) - 12:
        wanted = rows_by_hand(data, start, stop, aborted)
        names = [name for name in ROW if headers or name != "headers"]
        rows = result.batch.select(names).to_pylist()
        assert rows == [{name: row[name] for name in names} for row in wanted]
    return True


def rows_by_hand(
    data: bytes, start: int, stop: int, aborted: list[tuple[int, int]] | None
) -> list[Any]:
    """Return what a reader from `start` to `stop` gets of one whole batch."""
    base_offset, *_ = struct.unpack_from(">q", data)
    attributes, last_delta, first_ms, last_ms, producer_id = struct.unpack_from(">hiqqq", data, 21)
    (count,) = struct.unpack_from(">i", data, BODY_AT - 4)
    is_hidden = attributes & TRANSACTIONAL and producer_id in {
        producer for producer, _ in aborted or ()
    }
    is_before = base_offset + last_delta < start
    if attributes & CONTROL or is_hidden or is_before or not count or base_offset >= stop:
        return []
    records = read_records(bytes(decompress(attributes & 7, data[BODY_AT:])), count)
    rows = [record.row(base_offset, first_ms) for record in records]
    if attributes & LOG_APPEND_TIME:
        rows = [{**row, "timestamp": last_ms} for row in rows]
    return [row for row in rows if start <= row["offset"] < stop]


@cache
def compressed(name: str) -> list[bytes]:
    """Return small and large texts, packed."""
    body = b"".join(bodies())
    return [compress(name, body_part) for body_part in (body, b"a", b"\0" * 300_000, body * 10)]


def read_compressed(codec: int, data: bytes, original: bytes) -> bool:
    """Decompress, with a bound."""
    text = decompress(codec, MEMORY.holding(data), size_max=COMPRESSED_MAX)
    assert len(text) <= COMPRESSED_MAX
    return True


def _packed(name: str) -> Decoder:
    samples: Callable[[], Sequence[bytes]] = partial(compressed, name)
    return Decoder(samples, partial(read_compressed, CODEC_IDS[name]))


DECODERS = {
    "record batches": Decoder(batches, read_batch, damaged_batch),
    **{f"compression {name}": _packed(name) for name in CODEC_IDS if name != "none"},
}
