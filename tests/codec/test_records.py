import struct
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from crc32c import crc32c
from handmade_batches import (
    ABORT,
    COMMIT,
    CONTROL,
    LOG_APPEND_TIME,
    TRANSACTIONAL,
    Record,
    at_offset,
    batch,
    marker,
    read_records,
    transactional,
    values,
    varint,
)
from hypothesis import given
from hypothesis import strategies as st

from tallystick.codec.records import decoder, kernels
from tallystick.codec.records.batch_header import (
    ControlType,
    UnreadableBatchError,
    batch_headers,
)
from tallystick.codec.records.compression import CODEC_IDS, compress
from tallystick.codec.records.decoder import (
    RECORD_SCHEMA,
    RECORD_SCHEMA_WITH_HEADERS,
    DecodedBatch,
    decode,
    warm_up,
)
from tallystick.codec.records.encoder import EncodedBatch, encode, stamp
from tallystick.codec.spans import spans_of
from tallystick.errors import CorruptRecordError, RecordError
from tallystick.values import Producer, TopicPartition
from tests.examples import drawn

PARTITION = TopicPartition("orders", 3)
PRODUCER = Producer("tallystick-test", 4711, 7)
END = 2**63 - 1
NOW_MS = 1_700_000_000_000

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
INT64 = st.integers(-(2**63), 2**63 - 1)


def decoded(data: bytes, start: int = 0, stop: int = END, **keywords: object) -> DecodedBatch:
    options: dict[str, object] = {"aborted": [], "headers": False, **keywords}
    return decode(
        data,
        topic_partition=PARTITION,
        start_offset=start,
        stop_offset=stop,
        **options,  # type: ignore[arg-type]
    )


def contents(result: DecodedBatch) -> list[bytes | None]:
    return result.batch.column("value").to_pylist()


def offsets(result: DecodedBatch) -> list[int]:
    return result.batch.column("offset").to_pylist()


def as_log(encoded: list[EncodedBatch]) -> bytes:
    """What a broker would send back for these batches, written to an empty partition."""
    log, offset = [], 0
    for part in encoded:
        log.append(at_offset(stamp(part.data, PRODUCER, offset), offset))
        offset += part.record_count
    return b"".join(log)


# ---- there and back ------------------------------------------------------------------------------


@st.composite
def arrow_batches(draw: st.DrawFn) -> pa.RecordBatch:
    """Any mix of nulls, types, headers and timestamps, and any slice of it."""
    count = draw(st.integers(0, 12))
    blobs = st.lists(st.none() | st.binary(max_size=40), min_size=count, max_size=count)
    binary = st.sampled_from([pa.binary(), pa.large_binary(), pa.binary_view()])
    columns = {"value": pa.array(draw(blobs), draw(binary))}
    key = draw(st.sampled_from(["binary", "text", "null", "absent"]))
    if key == "binary":
        columns["key"] = pa.array(draw(blobs), draw(binary))
    elif key == "text":
        texts = st.lists(st.none() | st.text(max_size=9), min_size=count, max_size=count)
        text = st.sampled_from([pa.string(), pa.string_view()])
        columns["key"] = pa.array(draw(texts), draw(text))
    elif key == "null":
        columns["key"] = pa.nulls(count)
    if draw(st.booleans()):
        header = st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=9))
        lists = st.lists(st.none() | st.lists(header, max_size=3), min_size=count, max_size=count)
        columns["headers"] = pa.array(draw(lists), HEADERS)
    if draw(st.booleans()):
        times = st.lists(st.none() | INT64, min_size=count, max_size=count)
        columns["timestamp"] = pa.array(draw(times), pa.int64())
    start = draw(st.integers(0, count))
    return pa.record_batch(columns).slice(start, draw(st.integers(0, count - start)))


def as_written(records: pa.RecordBatch) -> list[dict[str, object]]:
    """What a reader must see of records."""
    rows = []
    for offset, row in enumerate(records.to_pylist()):
        key = row.get("key")
        timestamp = row.get("timestamp")
        rows.append(
            {
                "key": key.encode() if isinstance(key, str) else key,
                "value": row["value"],
                "offset": offset,
                "timestamp": NOW_MS if timestamp is None else timestamp,
                "timestampType": 0,
                "headers": row.get("headers") or None,  # Kafka knows no empty list
            }
        )
    return rows


@drawn(300)
@given(
    records=arrow_batches(),
    compression=st.sampled_from(sorted(CODEC_IDS)),
    batch_bytes=st.sampled_from([1, 100, 900_000]),
    batch_records=st.sampled_from([1, 3, 1000]),
)
def test_what_is_encoded_is_decoded(
    records: pa.RecordBatch, compression: str, batch_bytes: int, batch_records: int
) -> None:
    log = as_log(
        list(
            encode(
                records,
                compression=compression,
                batch_bytes=batch_bytes,
                batch_records=batch_records,
                now_ms=NOW_MS,
            )
        )
    )
    result = decoded(log, headers=True)

    result.batch.validate(full=True)
    assert result.batch.schema == RECORD_SCHEMA_WITH_HEADERS
    assert result.batch.to_pylist() == as_written(records)
    assert result.next_offset == records.num_rows
    without = decoded(log)
    assert without.batch.equals(result.batch.drop_columns("headers"))


def test_records_are_encoded_as_the_format_is_defined() -> None:
    records = pa.record_batch(
        {
            "key": pa.array([b"k", None]),
            "value": pa.array([None, b"v" * 70]),
            "timestamp": pa.array([5000, 4000]),
            "headers": pa.array([[("a", None), ("b", b"x")], None], HEADERS),
        }
    )
    by_hand = batch(
        0,
        [
            Record(0, b"k", None, 0, ((b"a", None), (b"b", b"x"))),
            Record(1, None, b"v" * 70, -1000),
        ],
        attributes=TRANSACTIONAL,
        base_timestamp=5000,
        max_timestamp=5000,
    )
    (encoded,) = encode(records, now_ms=0)

    assert encoded.record_count == 2
    assert encoded.data[61:] == by_hand[61:]
    assert encoded.data[8:12] == by_hand[8:12]
    assert encoded.data[12:16] == b"\xff\xff\xff\xff"  # no partition leader epoch
    (header,) = batch_headers(encoded.data)
    assert (header.base_offset, header.last_offset, header.record_count) == (0, 1, 2)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (-1, -1, 0)
    assert (header.base_timestamp, header.max_timestamp) == (5000, 5000)
    assert header.is_transactional
    assert not header.is_control


def test_a_stamp_names_the_producer_and_makes_the_checksum_right() -> None:
    (encoded,) = encode(pa.record_batch({"value": pa.array([b"v"])}), now_ms=NOW_MS)

    stamped = stamp(encoded.data, PRODUCER, 2**31 - 1)

    (header,) = batch_headers(stamped)
    assert (header.producer_id, header.producer_epoch) == (4711, 7)
    assert header.base_sequence == 2**31 - 1
    assert header.crc == crc32c(stamped[21:])
    assert stamped[61:] == encoded.data[61:]
    assert len(stamped) == len(encoded.data)


def test_batches_are_cut_by_size_and_a_larger_record_stands_alone() -> None:
    records = pa.record_batch(
        {"value": pa.array([b"a" * size for size in (400, 400, 400, 5000, 1)])}
    )

    encoded = list(encode(records, batch_bytes=1000, now_ms=NOW_MS))

    assert [part.record_count for part in encoded] == [2, 1, 1, 1]
    assert [len(part.data) > 1000 for part in encoded] == [False, False, True, False]
    assert decoded(as_log(encoded)).batch.num_rows == 5


def test_a_batch_uses_the_last_byte_that_it_may() -> None:
    records = pa.record_batch({"value": pa.array([b"a" * 100] * 8)})
    (whole,) = encode(records, now_ms=NOW_MS)

    exact = list(encode(records, batch_bytes=len(whole.data), now_ms=NOW_MS))
    one_less = list(encode(records, batch_bytes=len(whole.data) - 1, now_ms=NOW_MS))

    assert [part.record_count for part in exact] == [8]
    assert [part.record_count for part in one_less] == [7, 1]


def test_chunked_tables_are_encoded_as_if_they_were_one_batch() -> None:
    table = pa.table({"value": pa.chunked_array([[b"a"], [b"b", None], [], [b"c"]])})

    (encoded,) = encode(table, now_ms=NOW_MS)

    assert contents(decoded(encode_log := as_log([encoded]))) == [b"a", b"b", None, b"c"]
    assert len(list(batch_headers(encode_log))) == 1


def test_headers_may_be_a_map_and_slices_of_anything() -> None:
    kind = pa.map_(pa.string(), pa.binary())
    maps = pa.array([[("x", b"0")], [("a", b"1"), ("b", None)], None, [("c", b"2")]], kind)
    records = pa.record_batch({"value": pa.array([b"0", b"1", b"2", b"3"]), "headers": maps}).slice(
        1
    )

    result = decoded(as_log(list(encode(records, now_ms=NOW_MS))), headers=True)

    assert result.batch.column("headers").to_pylist() == [
        [{"key": "a", "value": b"1"}, {"key": "b", "value": None}],
        None,
        [{"key": "c", "value": b"2"}],
    ]


def test_a_null_list_of_headers_is_null_whatever_arrow_keeps_behind_it() -> None:
    structs = pa.array([("hidden", b"x"), (None, None)], HEADERS.value_type)
    offsets_of_null = pa.py_buffer(np.array([0, 2, 2], np.int32))
    validity = pa.py_buffer(b"\x02")
    lists = pa.Array.from_buffers(HEADERS, 2, [validity, offsets_of_null], children=[structs])
    records = pa.record_batch({"value": pa.array([b"a", b"b"]), "headers": lists})

    result = decoded(as_log(list(encode(records, now_ms=NOW_MS))), headers=True)

    assert result.batch.column("headers").to_pylist() == [None, None]


def test_columns_that_kafka_cannot_take_are_named() -> None:
    value = pa.array([b"v"])
    wrong = {
        "records need a column value": {"key": value},
        "column value is int64": {"value": pa.array([1])},
        "column key is double": {"value": value, "key": pa.array([0.5])},
        "column timestamp is timestamp": {
            "value": value,
            "timestamp": pa.array([0], pa.timestamp("us")),
        },
        "column headers is list<.*string": {"value": value, "headers": pa.array([["a"]])},
        "record 0 .* header without a key": {
            "value": value,
            "headers": pa.array([[(None, b"x")]], HEADERS),
        },
        "record 0 of the batch has": {"value": value, "headers": pa.array([[None]], HEADERS)},
    }
    for message, columns in wrong.items():
        with pytest.raises(RecordError, match=message):
            list(encode(pa.record_batch(columns), now_ms=NOW_MS))


def test_a_damaged_arrow_array_is_refused() -> None:
    beyond = pa.py_buffer(np.array([0, 100, 3], np.int32))
    damaged = pa.Array.from_buffers(pa.binary(), 2, [None, beyond, pa.py_buffer(b"short")])

    with pytest.raises(RecordError, match="column value: the Arrow array is damaged"):
        list(encode(pa.record_batch({"value": damaged}), now_ms=NOW_MS))


def test_positions_beyond_two_gibibytes_are_computed_in_64_bits() -> None:
    """As in a large_binary column of 5 GiB, of which only the end is really there."""
    data = np.frombuffer(b"the last value", np.uint8)
    before = 5 << 30
    out = np.zeros(100, np.uint8)
    none = (0, np.zeros(1, np.int64), np.full(1, -1, np.int64))
    no_headers = (np.zeros(0, np.int64), np.zeros(0, np.int64))

    row, size, *_ = kernels.encode_records(
        none,
        (data.ctypes.data - before, np.array([before + 4]), np.array([4])),
        no_headers,
        none,
        none,
        np.zeros(1, np.int64),
        0,
        1,
        out.ctypes.data,
        len(out),
    )

    assert row == 1
    assert out[:size].tobytes() == Record(0, value=b"last").encoded()


def test_a_record_that_the_format_cannot_hold_is_an_error_not_a_wrong_length() -> None:
    none = (0, np.zeros(1, np.int64), np.full(1, -1, np.int64))
    no_headers = (np.zeros(0, np.int64), np.zeros(0, np.int64))
    huge = (0, np.zeros(1, np.int64), np.array([2**31]))

    row, _, _, problem, needed = kernels.encode_records(
        none, huge, no_headers, none, none, np.zeros(1, np.int64), 0, 1, 0, 2**40
    )

    assert (row, problem) == (0, kernels.RECORD_TOO_LARGE)
    assert needed > 2**31


def test_spans_keep_64_bit_offsets() -> None:
    large = pa.array([b"ab", None, b"c"], pa.large_binary()).slice(1)

    spans = spans_of(large, "value")

    assert spans.starts.tolist() == [2, 2]
    assert spans.lengths.tolist() == [-1, 1]


def test_every_kernel_is_compiled_once_for_all_kinds_of_input() -> None:
    """A second version would be compiled in the middle of a job, for seconds."""
    warm_up()
    for kind in (pa.binary(), pa.large_binary(), pa.string(), pa.binary_view()):
        records = pa.record_batch(
            {
                "key": pa.array([b"k"]),
                "value": pa.array(["v"]).cast(kind) if kind != pa.binary() else pa.array([b"v"]),
                "timestamp": pa.array([1]),
            }
        )
        data = as_log(list(encode(records, now_ms=NOW_MS)))
        for buffer in (data, bytearray(data), memoryview(data), pa.py_buffer(data)):
            assert decoded(buffer, headers=True).batch.num_rows == 1

    for kernel in (
        kernels.encode_records,
        kernels.scan_records,
        kernels.scan_headers,
        kernels.gather,
    ):
        assert len(kernel.signatures) == 1, kernel


# ---- ranges --------------------------------------------------------------------------------------


def test_records_outside_the_range_are_cut_off() -> None:
    data = values(10, b"a", b"b", b"c") + values(13, b"d", b"e", b"f") + values(16, b"g")

    result = decoded(data, 11, 15)

    assert contents(result) == [b"b", b"c", b"d", b"e"]
    assert offsets(result) == [11, 12, 13, 14]
    assert result.next_offset == 15


def test_the_next_offset_never_passes_the_end_of_the_range() -> None:
    data = values(10, b"a") + values(20, b"b")

    assert decoded(data, 10, 15).next_offset == 15
    assert decoded(data, 10, 20).next_offset == 20
    assert decoded(data, 10, 21).next_offset == 21
    assert decoded(data, 10, END).next_offset == 21


@pytest.mark.parametrize("data", [b"", b"\0" * 5, values(7, b"a", b"b")[:-1], values(7, b"a")[:40]])
def test_without_a_whole_batch_nothing_is_read(data: bytes) -> None:
    result = decoded(data, 7)

    assert result.batch.num_rows == 0
    assert result.batch.schema == RECORD_SCHEMA
    assert result.next_offset == 7


def test_a_partial_last_batch_is_left_for_the_next_fetch() -> None:
    second = values(1, b"b", b"c")
    for cut in range(len(second)):
        result = decoded(values(0, b"a") + second[:cut])
        assert (contents(result), result.next_offset) == ([b"a"], 1)


def test_compaction_leaves_gaps_and_empty_batches_that_still_count() -> None:
    holes = batch(100, [Record(2, value=b"c"), Record(7, value=b"h")], last_offset_delta=9)
    empty = batch(110, [], last_offset_delta=4)

    result = decoded(holes + empty, 100)

    assert offsets(result) == [102, 107]
    assert result.next_offset == 115
    assert decoded(empty, 112).next_offset == 115
    assert decoded(empty, 112, 113).next_offset == 113


def test_a_column_never_exceeds_what_arrow_can_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call goes on where decoding stopped, with the same data and aborted transactions."""
    data = b"".join(
        [
            transactional(0, 1, b"x" * 60),
            transactional(1, 2, b"a" * 60),
            marker(2, 1, ABORT),
            transactional(3, 1, b"b" * 60),  # a later transaction of the same producer
            transactional(4, 2, b"c" * 200),
            marker(5, 1, COMMIT),
            marker(6, 2, COMMIT),
        ]
    )
    monkeypatch.setattr(decoder, "COLUMN_BYTES_MAX", 140)
    seen, position, calls = [], 0, 0
    while position < 7:
        result = decoded(data, position, aborted=[(1, 0)])
        seen += contents(result)
        assert result.next_offset > position
        position = result.next_offset
        calls += 1

    assert seen == [b"a" * 60, b"b" * 60, b"c" * 200]
    assert calls == 2


# ---- timestamps, headers, compressions -----------------------------------------------------------


def test_both_kinds_of_timestamps_are_decoded() -> None:
    records = [Record(0, timestamp_delta=5), Record(1, timestamp_delta=-7)]
    data = batch(0, records) + batch(2, records, attributes=LOG_APPEND_TIME)

    decoded_batch = decoded(data).batch

    assert decoded_batch.column("timestamp").to_pylist() == [1005, 993, 2000, 2000]
    assert decoded_batch.column("timestampType").to_pylist() == [0, 0, 1, 1]


def test_header_keys_that_are_no_text_are_readable_as_in_java() -> None:
    records = [Record(0, headers=((b"ok", b"1"), (b"\xff!", None))), Record(1)]

    headers = decoded(batch(0, records), headers=True).batch.column("headers")

    headers.validate(full=True)
    assert headers.to_pylist() == [
        [{"key": "ok", "value": b"1"}, {"key": "\ufffd!", "value": None}],
        None,
    ]


@pytest.mark.parametrize("name", sorted(CODEC_IDS))
def test_batches_of_different_compressions_stand_in_one_response(name: str) -> None:
    body = b"".join(Record(index, value=b"v%d" % index).encoded() for index in range(3))
    packed = batch(
        5,
        [],
        body=compress(name, body),
        count=3,
        last_offset_delta=2,
        attributes=CODEC_IDS[name],
    )

    result = decoded(values(4, b"first") + packed + values(8, b"last"))

    assert contents(result) == [b"first", b"v0", b"v1", b"v2", b"last"]


# ---- transactions --------------------------------------------------------------------------------


def interleaved() -> bytes:
    """Producer 1 aborts, then commits; 2 commits; 3 is open; 9 writes without a transaction."""
    return b"".join(
        [
            transactional(0, 1, b"aborted"),
            transactional(1, 2, b"two"),
            values(2, b"plain", producer_id=9),
            transactional(3, 1, b"aborted too"),
            marker(4, 1, ABORT),
            transactional(5, 1, b"one"),
            marker(6, 2, COMMIT),
            transactional(7, 3, b"open"),
            marker(8, 1, COMMIT),
        ]
    )


def test_read_committed_leaves_out_what_was_aborted() -> None:
    result = decoded(interleaved(), aborted=[(1, 0)])

    assert contents(result) == [b"two", b"plain", b"one", b"open"]
    assert result.next_offset == 9  # after the marker


def test_read_uncommitted_leaves_out_the_markers_only() -> None:
    result = decoded(interleaved(), aborted=None)

    assert contents(result) == [b"aborted", b"two", b"plain", b"aborted too", b"one", b"open"]
    assert result.next_offset == 9


def test_a_producer_that_aborts_twice_commits_in_between() -> None:
    data = b"".join(
        [
            transactional(0, 1, b"no"),
            marker(1, 1, ABORT),
            transactional(2, 1, b"yes"),
            marker(3, 1, COMMIT),
            transactional(4, 1, b"no"),
            marker(5, 1, ABORT),
        ]
    )

    assert contents(decoded(data, aborted=[(1, 4), (1, 0)])) == [b"yes"]


def test_a_transaction_that_began_before_the_response_is_aborted_too() -> None:
    data = transactional(50, 1, b"no") + marker(51, 1, ABORT) + transactional(52, 1, b"yes")

    assert contents(decoded(data, 50, aborted=[(1, 3)])) == [b"yes"]


def test_batch_headers_tell_control_batches() -> None:
    empty_marker = batch(
        2, [], last_offset_delta=0, attributes=TRANSACTIONAL | CONTROL, producer_id=1
    )
    unknown = batch(3, [Record(0, key=struct.pack(">hh", 0, 5))], attributes=CONTROL)
    data = marker(0, 1, ABORT) + marker(1, 1, COMMIT) + empty_marker + unknown + values(4, b"v")

    headers = list(batch_headers(data))

    assert [header.is_control for header in headers] == [True] * 4 + [False]
    assert [header.control_type for header in headers] == [
        ControlType.ABORT,
        ControlType.COMMIT,
        None,
        None,
        None,
    ]
    assert contents(decoded(data)) == [b"v"]


# ---- damage --------------------------------------------------------------------------------------


def test_any_flipped_bit_behind_the_checksum_is_found() -> None:
    good = values(5, b"value one", b"value two")
    for at in range(17, len(good)):
        bad = good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :]
        with pytest.raises(CorruptRecordError, match=r"offset 5: the checksum is"):
            decoded(bad)


def length_of(data: bytes, length: int) -> bytes:
    return data[:8] + struct.pack(">i", length) + data[12:]


RECORD = Record(0, b"key", b"value", headers=((b"h", b"x"),)).encoded()

DAMAGED = {
    "old format": (values(5, b"v")[:16] + b"\1" + values(5, b"v")[17:], "magic 1, expected 2"),
    "short length": (length_of(values(5, b"v"), 48), "length of 48, expected at least 49"),
    "negative length": (length_of(values(5, b"v"), -1), "length of -1"),
    "offsets go back": (values(5, b"a", b"b") + values(6, b"c"), "6 to 6 after offset 6"),
    "negative offset": (values(-5, b"a"), "offsets -5"),
    "negative last offset": (batch(5, [], last_offset_delta=-1), "5 to 4"),
    "negative count": (batch(5, [], last_offset_delta=0, count=-1), "-1 records"),
    "too many records for the offsets": (
        batch(5, [Record(0), Record(1)], last_offset_delta=0),
        "2 rec",
    ),
    "too many records for the bytes": (
        batch(5, [], last_offset_delta=2**31 - 1, count=2**31 - 1),
        "2147483647 records in 0 bytes",
    ),
    "fewer records than told": (
        batch(5, [Record(0, value=b"v" * 9)], count=2, last_offset_delta=9),
        "does not fit",
    ),
    "more records than told": (batch(5, [Record(0), Record(1)], count=1), "does not fit"),
    "offset beyond the batch": (batch(5, [Record(3)], last_offset_delta=2), "outside of the batch"),
    "offset before the batch": (
        batch(5, [Record(-1), Record(1)]),
        "record 0 of 2 names an offset outside",
    ),
    "unknown codec": (values(5, b"v", attributes=6), "codec 6 is unknown"),
    "no gzip": (values(5, b"v", attributes=1), "gzip data are damaged"),
    "negative record length": (
        batch(5, [], body=b"\1" + RECORD[1:], count=1, last_offset_delta=0),
        "fit",
    ),
    "endless varint": (
        batch(5, [], body=b"\xff" * 30, count=1, last_offset_delta=0),
        "does not fit",
    ),
    "more bytes than the key takes": (
        batch(5, [], body=b"\x10\0\0\0\3\1\0\0\0", count=1, last_offset_delta=0),
        "does not fit",
    ),
}


@pytest.mark.parametrize(("data", "message"), DAMAGED.values(), ids=DAMAGED.keys())
def test_damage_is_named_with_its_place(data: bytes, message: str) -> None:
    with pytest.raises(CorruptRecordError, match=f"orders-3, record batch at offset .*{message}"):
        decoded(data, 0)


FAULTY = {
    "an offset twice": batch(
        5, [Record(0, value=b"a"), Record(0, value=b"b")], last_offset_delta=1
    ),
    "out of order": batch(5, [Record(1, value=b"a"), Record(0, value=b"b")], last_offset_delta=1),
}
"""Batches as a broker takes them uncompressed, whatever their records say of offsets."""


@pytest.mark.parametrize("data", FAULTY.values(), ids=FAULTY.keys())
def test_records_that_a_producer_numbered_wrongly_are_each_read_once_on_any_cut(
    data: bytes,
) -> None:
    whole = decoded(data, 5, 7).batch
    rows = list(zip(*(whole.column(name).to_pylist() for name in ("offset", "value")), strict=True))
    pieces = [decoded(data, start, start + 1).batch for start in (5, 6)]

    assert len(rows) == 2
    assert {value for _, value in rows} == {b"a", b"b"}
    by_cut = [
        (offset, value)
        for piece in pieces
        for offset, value in zip(
            piece.column("offset").to_pylist(), piece.column("value").to_pylist(), strict=True
        )
    ]
    assert sorted(by_cut) == sorted(rows)
    assert all(
        set(piece.column("offset").to_pylist()) <= {start}
        for start, piece in zip((5, 6), pieces, strict=True)
    )


def test_lengths_that_only_a_faulty_producer_writes_are_read_as_java_reads_them() -> None:
    below = b"\0\0\0" + varint(-2) + varint(-3) + varint(0)
    beyond = b"\0\0\0" + b"\x82\x80\x80\x80\x10" + b"k" + varint(1) + b"v" + varint(0)
    for body, key, value in ((below, None, None), (beyond, b"k", b"v")):
        data = batch(5, [], body=varint(len(body)) + body, count=1, last_offset_delta=0)
        decoded_batch = decoded(data, 5).batch
        decoded_batch.validate(full=True)
        assert decoded_batch.select(["key", "value"]).to_pylist() == [{"key": key, "value": value}]


def test_a_batch_that_its_producer_wrote_wrongly_is_left_out_where_that_is_accepted() -> None:
    wrong = batch(6, [Record(7, value=b"x")], last_offset_delta=1, count=1, producer_id=77)
    data = values(5, b"a") + wrong + values(8, b"b") + at_offset(wrong, 9) + values(11, b"c")
    given_up: list[tuple[int, int]] = []

    def give_up(error: UnreadableBatchError) -> None:
        assert "producer 77" in str(error)
        given_up.append((error.first_offset, error.last_offset))

    piece = decoded(data, 5, 12, give_up=give_up)
    assert piece.batch.column("value").to_pylist() == [b"a", b"b", b"c"]
    assert piece.next_offset == 12
    assert given_up == [(6, 7), (9, 10)]
    damaged = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(CorruptRecordError, match=r"the checksum is .* Compare the replicas"):
        decoded(damaged, 5, 12, give_up=give_up)


def test_every_byte_of_a_record_may_be_wrong_and_it_is_read_as_it_stands_or_refused() -> None:
    outcomes: Counter[bool] = Counter()
    for at in range(len(RECORD)):
        for byte in range(256):
            body = RECORD[:at] + bytes([byte]) + RECORD[at + 1 :]
            data = batch(0, [], body=body, count=1, last_offset_delta=0)
            try:
                wanted = [record.row(0, 1000) for record in read_records(body, 1)]
            except (ValueError, IndexError):
                wanted = []
            outcomes[bool(wanted) and wanted[0]["offset"] == 0] += 1
            if not wanted or wanted[0]["offset"] != 0:
                with pytest.raises(CorruptRecordError, match="orders-3, record batch at offset 0"):
                    decoded(data, headers=True)
                continue
            decoded_batch = decoded(data, headers=True).batch
            decoded_batch.validate(full=True)
            assert decoded_batch.select(list(wanted[0])).to_pylist() == wanted, (at, byte)
    assert min(outcomes.values()) > 1000
