"""Rows to batches that a topic takes, and the fate of a record that it does not."""

import random
from typing import Any

import pyarrow as pa
import pytest

from tallystick.codec.output_records import CUT_BYTES, OutputRecords, letters_of, told_of
from tallystick.codec.records.compression import CODEC_IDS
from tallystick.codec.records.decoder import decode
from tallystick.codec.records.encoder import stamp
from tallystick.codec.rows import RowLayout
from tallystick.errors import RecordError
from tallystick.host.origin import Place, place_to_be_set
from tallystick.values import Producer, TopicLimit, TopicPartition

LIMIT = 2000
CHOSEN = random.Random(5)
SIZES = [100, 1800, 5000, 3, 90, 40_000, 700, 1000, 2]
VALUES = [CHOSEN.randbytes(size) for size in SIZES]
ROWS = pa.record_batch(
    {
        "key": pa.array([b"k%d" % row for row in range(len(SIZES))], pa.binary()),
        "value": pa.array(VALUES, pa.binary()),
    }
)


def encoded(rows: pa.RecordBatch, limit: int | None, letters: Any, **how: Any) -> dict[str, bytes]:
    """The values by key of what was encoded, each batch no larger than the limit."""
    limits = {} if limit is None else {"t": TopicLimit(limit, how.get("of_topic"))}
    layout = RowLayout({"t": 3}, "t", batch_limits=limits)
    records = OutputRecords(layout, how.get("compression", "none"), 900_000, letters)
    values_by_key: dict[str, bytes] = {}
    for partition, batch in records.encode(rows, spread=0, now_ms=1):
        assert limit is None or len(batch.data) <= limit
        record_batch = decode(
            stamp(batch.data, Producer("t", 1, 0), 0),
            topic_partition=partition,
            start_offset=0,
            stop_offset=batch.record_count,
            aborted=None,
            headers=True,
        ).batch.to_pylist()
        for record in record_batch:
            assert record["key"].decode() not in values_by_key
            values_by_key[record["key"].decode()] = record["value"]
    return values_by_key


@pytest.mark.parametrize("compression", CODEC_IDS)
def test_batches_are_no_larger_than_the_topic_takes_compressed(compression: str) -> None:
    small = ROWS.filter(pa.array([size < LIMIT - 100 for size in SIZES]))
    assert len(encoded(small, LIMIT, None, compression=compression)) == small.num_rows
    packed = pa.record_batch({"key": pa.array([b"k0"]), "value": pa.array([b"v" * 20_000])})
    if compression == "none":
        with pytest.raises(RecordError, match="takes 200"):
            encoded(packed, LIMIT, None)
    else:  # the limit is one of what is sent
        assert encoded(packed, LIMIT, None, compression=compression) == {"k0": b"v" * 20_000}


@pytest.mark.parametrize("of_topic", CODEC_IDS)
def test_a_topic_with_a_compression_of_its_own_gets_batches_of_that(of_topic: str) -> None:
    """The broker would compress them again, and refuse a record that does not fit then."""
    packed = pa.record_batch({"key": pa.array([b"k0"]), "value": pa.array([b"v" * 20_000])})
    how = {"compression": "lz4", "of_topic": of_topic}
    letters: list[pa.RecordBatch] = []
    written = encoded(packed, LIMIT, letters, **how)
    assert (list(written), len(letters)) == (([], 1) if of_topic == "none" else (["k0"], 0))
    if of_topic == "none":
        with pytest.raises(RecordError, match=r"takes 200\d\d bytes .*\(compression none;"):
            encoded(packed, LIMIT, None, **how)


def test_where_the_limit_is_not_known_nothing_is_cut() -> None:
    assert len(encoded(ROWS, None, None)) == ROWS.num_rows


def test_a_record_too_large_names_all_that_is_known_of_it() -> None:
    with place_to_be_set() as rows_come_from:
        rows_come_from(
            lambda _, row: Place(f"topic in, partition 1, offset {100 + row}", values=" for n='no'")
        )
        with pytest.raises(RecordError) as refused:
            encoded(ROWS, LIMIT, None)
    text = str(refused.value)
    row = next(row for row in (2, 5) if f"offset {100 + row} for n='no'," in text)
    for part in (
        f"with key 'k{row}'",
        f"takes {SIZES[row] // 100}",
        f"takes {LIMIT}",
        "t-",
    ):
        assert part in text, text
    assert f"offset {100 + row}," in refused.value.without_values
    for value in (f"k{row}", "for n="):
        assert value not in refused.value.without_values


def test_records_too_large_become_dead_letters_and_the_others_pass() -> None:
    letters: list[pa.RecordBatch] = []
    with place_to_be_set() as rows_come_from:
        rows_come_from(lambda _, row: Place("words", "in", 1, 100 + row))
        sent = encoded(ROWS, LIMIT, letters)

    small = [row for row, size in enumerate(SIZES) if size < LIMIT]
    assert sent == {f"k{row}": VALUES[row] for row in small}
    whole = letters_of(letters)
    assert {letter["key"] for letter in whole.to_pylist()} == {b"k2", b"k5"}
    for letter in whole.to_pylist():
        row = int(letter["key"][1:])
        own = {header["key"]: header["value"] for header in letter["headers"]}
        assert letter["value"] == VALUES[row][:CUT_BYTES]
        assert own["tallystick.offset"] == b"%d" % (100 + row)
        assert own["tallystick.cut"].startswith(b"value 200 of %d, key 2 of 2" % SIZES[row])
        assert b"max.message.bytes" in own["tallystick.error"]
    assert told_of(whole).startswith("2 records larger than their topic takes")
    place = TopicPartition("t", 0)
    assert place.topic in told_of(whole)
