"""Decode damaged batches, their checksums made right, and expect CorruptRecordError or sense.

python mutate_batches.py <count> <seed>
"""

import random
import sys

from handmade_batches import Record, batch, marker, with_checksum

from tallystick.errors import CorruptRecordError
from tallystick.kafka.compression import CODEC_IDS, compress
from tallystick.kafka.records import batch_headers, decode
from tallystick.topic_partition import TopicPartition

BODY_AT = 61
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


def main(count: int, seed: int) -> None:
    chance = random.Random(seed)
    originals = samples()
    outcomes = {"corrupt": 0, "sound": 0}
    for _ in range(count):
        data = mutated(chance.choice(originals), chance)
        try:
            list(batch_headers(data))
            result = decode(
                data,
                topic_partition=TopicPartition("mutated", 0),
                start_offset=chance.choice((0, 100, 130)),
                stop_offset=2**62,
                aborted=chance.choice((None, [(7, 0)])),
                headers=chance.random() < 0.7,
            )
            result.batch.validate(full=True)
            outcomes["sound"] += 1
        except CorruptRecordError:
            outcomes["corrupt"] += 1
    assert min(outcomes.values()) > count // 50, outcomes
    print(f"{count} mutations: {outcomes}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
