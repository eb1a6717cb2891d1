"""Decode damaged batches, their checksums made right, and expect CorruptRecordError or their rows.

What rows a batch has is read by hand, of batches that are as long as they say.

python mutate_batches.py <count> <seed>
"""

import random
import struct
import sys
from typing import Any

from handmade_batches import (
    CONTROL,
    LOG_APPEND_TIME,
    TRANSACTIONAL,
    Record,
    batch,
    marker,
    read_records,
    with_checksum,
)

from tallystick.codec.records.batch_header import batch_headers
from tallystick.codec.records.compression import CODEC_IDS, compress, decompress
from tallystick.codec.records.decoder import decode
from tallystick.errors import CorruptRecordError
from tallystick.values import TopicPartition

BODY_AT = 61
ROW = ("key", "value", "offset", "timestamp", "headers")
RECORDS_AT = (8, 12, 22, 23, 26, 57, 60)  # length, attributes, last offset delta, record count


def samples() -> list[bytes]:
    """Batches with all that the format knows, in all compressions."""
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
    body = b"".join(record.encoded() for record in records)
    packed = [
        batch(
            100,
            [],
            body=compress(name, body),
            count=len(records),
            last_offset_delta=len(records) - 1,
            attributes=codec,
        )
        for name, codec in CODEC_IDS.items()
    ]
    return [*packed, packed[0], packed[0], marker(100, 7, 1)]


def mutated(data: bytes, chance: random.Random) -> bytes:
    """A few bytes changed, cut out, doubled or put in, in the header or behind it."""
    damaged = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        at = chance.randrange(BODY_AT, len(damaged))
        if chance.random() < 0.15:
            at = chance.choice(RECORDS_AT)
        match chance.randrange(6):
            case 0:
                damaged[at] ^= 1 << chance.randrange(8)
            case 1:
                damaged[at] = chance.choice((0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF))
            case 2:
                damaged[at:at] = bytes([0xFF]) * chance.randrange(1, 12)
            case 3:
                del damaged[max(at, BODY_AT) : at + chance.randrange(1, 20)]
            case 4:
                damaged[at] = chance.randrange(256)
            case 5:
                damaged[at:at] = damaged[at : at + chance.randrange(1, 30)]
        if len(damaged) <= BODY_AT:
            break
    if chance.random() < 0.8:  # else the old length stays, and the batch is cut off or followed
        damaged[8:12] = (len(damaged) - 12).to_bytes(4, "big")
    return with_checksum(bytes(damaged))


def rows_by_hand(data: bytes, start: int, aborted: list[tuple[int, int]] | None) -> list[Any]:
    """What a reader from `start` gets of one whole batch."""
    base_offset, *_ = struct.unpack_from(">q", data)
    attributes, last_delta, first_ms, last_ms, producer_id = struct.unpack_from(">hiqqq", data, 21)
    (count,) = struct.unpack_from(">i", data, BODY_AT - 4)
    is_hidden = attributes & TRANSACTIONAL and producer_id in {each for each, _ in aborted or ()}
    is_before = base_offset + last_delta < start
    if attributes & CONTROL or is_hidden or is_before or not count:
        return []
    records = read_records(bytes(decompress(attributes & 7, data[BODY_AT:])), count)
    rows = [record.row(base_offset, first_ms) for record in records]
    if attributes & LOG_APPEND_TIME:
        rows = [{**row, "timestamp": last_ms} for row in rows]
    return [row for row in rows if row["offset"] >= start]


def main(count: int, seed: int) -> None:
    chance = random.Random(seed)
    originals = samples()
    outcomes = {"corrupt": 0, "sound": 0, "as by hand": 0}
    for _ in range(count):
        data = mutated(chance.choice(originals), chance)
        start, aborted = chance.choice((0, 100, 130)), chance.choice((None, [(7, 0)]))
        headers = chance.random() < 0.7
        try:
            list(batch_headers(data))
            result = decode(
                data,
                topic_partition=TopicPartition("mutated", 0),
                start_offset=start,
                stop_offset=2**62,
                aborted=aborted,
                headers=headers,
            )
        except CorruptRecordError:
            outcomes["corrupt"] += 1
            continue
        result.batch.validate(full=True)
        outcomes["sound"] += 1
        if int.from_bytes(data[8:12], "big") == len(data) - 12:
            wanted = rows_by_hand(data, start, aborted)
            names = [name for name in ROW if headers or name != "headers"]
            found = result.batch.select(names).to_pylist()
            assert found == [{name: row[name] for name in names} for row in wanted], data.hex()
            outcomes["as by hand"] += 1
    assert min(outcomes.values()) > count // 50, outcomes
    print(f"{count} mutations: {outcomes}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
