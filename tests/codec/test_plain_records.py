"""Records read one by one, without kernels, are those that the kernels read."""

import pytest
from handmade_batches import ABORT, COMMIT, LOG_APPEND_TIME, Record, batch, marker, transactional
from hypothesis import given
from hypothesis import strategies as st

from tallystick.codec.records.compression import CODEC_IDS, compress
from tallystick.codec.records.decoder import decode
from tallystick.codec.records.plain import PlainRecord, plain_records
from tallystick.errors import CorruptRecordError
from tallystick.values import TopicPartition
from tests.examples import drawn

PARTITION = TopicPartition("flights", 0)
BLOBS = st.none() | st.binary(max_size=70)
HEADERS = st.lists(st.tuples(st.binary(max_size=9), BLOBS), max_size=3).map(tuple)


def by_kernels(data: bytes, start: int, stop: int, aborted: list[tuple[int, int]]) -> list[object]:
    rows = decode(
        data,
        topic_partition=PARTITION,
        start_offset=start,
        stop_offset=stop,
        aborted=aborted,
        headers=True,
    ).batch.to_pylist()
    return [
        PlainRecord(
            row["offset"],
            row["timestamp"],
            row["key"],
            row["value"],
            tuple((header["key"], header["value"]) for header in row["headers"] or ()),
        )
        for row in rows
    ]


def one_by_one(data: bytes, start: int, stop: int, aborted: list[tuple[int, int]]) -> list[object]:
    return [
        *plain_records(
            data,
            topic_partition=PARTITION,
            start_offset=start,
            stop_offset=stop,
            aborted=aborted,
        )
    ]


@given(
    st.lists(
        st.lists(st.tuples(BLOBS, BLOBS, HEADERS, st.integers(-(2**40), 2**40)), min_size=1),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([0, LOG_APPEND_TIME]),
    st.data(),
)
@drawn(60)
def test_any_records_are_the_same_as_by_kernels(contents, attributes, data):
    log, offset = b"", 100
    for rows in contents:
        records = [
            Record(delta, key, value, timestamp, headers)
            for delta, (key, value, headers, timestamp) in enumerate(rows)
        ]
        log += batch(offset, records, attributes=attributes)
        offset += len(records)
    start = data.draw(st.integers(100, offset))
    stop = data.draw(st.integers(start, offset))

    assert one_by_one(log, start, stop, []) == by_kernels(log, start, stop, [])


@pytest.mark.parametrize("codec", sorted(CODEC_IDS))
def test_batches_of_any_compression_are_read(codec):
    body = b"".join(record.encoded() for record in (Record(0, value=b"a" * 300), Record(1)))
    log = batch(
        5,
        [],
        body=body if codec == "none" else compress(codec, body),
        count=2,
        last_offset_delta=1,
        attributes=CODEC_IDS[codec],
    )

    assert [record.value for record in one_by_one(log, 0, 9, [])] == [b"a" * 300, b"value"]


def test_records_of_aborted_transactions_and_markers_are_left_out():
    log = transactional(0, 1, b"no") + transactional(1, 2, b"yes") + marker(2, 1, ABORT)
    log += marker(3, 2, COMMIT) + transactional(4, 1, b"again")

    assert [one.value for one in one_by_one(log, 0, 9, [(1, 0)])] == [b"yes", b"again"]
    assert one_by_one(log, 0, 9, [(1, 0)]) == by_kernels(log, 0, 9, [(1, 0)])


def test_damage_is_told_with_the_partition_and_the_offset():
    log = bytearray(batch(7, [Record(0, value=b"seven")]))
    log[-1] ^= 1

    with pytest.raises(CorruptRecordError, match=r"flights-0.*offset 7: the checksum is"):
        one_by_one(bytes(log), 0, 9, [])


def test_a_record_that_leaves_its_batch_is_an_error():
    log = batch(0, [], body=b"\x7e" + bytes(6), count=1, last_offset_delta=0)

    with pytest.raises(CorruptRecordError, match="record 0 of 1 does not fit the batch"):
        one_by_one(log, 0, 9, [])
