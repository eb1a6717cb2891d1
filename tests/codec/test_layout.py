"""The layout of a source's rows: which columns there are, and what becomes of every record."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tallystick.codec.formats import MODES
from tallystick.codec.json.read import JsonReader
from tallystick.codec.layout import OWN_HEADERS, REASON_LENGTH_MAX, Layout, LayoutRows
from tallystick.codec.records.decoder import RECORD_SCHEMA_WITH_HEADERS
from tallystick.codec.values import TextReader, ValueReader
from tallystick.errors import OptionError, RecordError
from tallystick.values import TopicPartition

FROM = TopicPartition("flights", 3)
NUMBERS = JsonReader(pa.schema([("n", pa.int64())]))
KAFKA = ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"]

Headers = list[tuple[str, bytes | None]] | None

GOOD = st.none() | st.integers(0, 9).map(lambda n: b'{"n":%d}' % n)
HEADERS = st.none() | st.lists(
    st.tuples(st.text(max_size=3), st.none() | st.binary(max_size=3)), min_size=1, max_size=3
)
RECORDS = st.lists(
    st.tuples(st.none() | st.binary(max_size=3), GOOD | st.binary(max_size=3), HEADERS), max_size=12
)


def decoded(records: list[tuple[bytes | None, bytes | None, Headers]]) -> pa.RecordBatch:
    """Records as the codec yields them; the offsets have gaps."""
    keys, values, headers = zip(*records, strict=True) if records else ((), (), ())
    rows = np.arange(len(records))
    columns = [
        pa.array(keys, pa.binary()),
        pa.array(values, pa.binary()),
        pa.array(100 + 2 * rows),
        pa.array(rows - 1),
        pa.array(rows % 2, pa.int32()),
        pa.array(headers, RECORD_SCHEMA_WITH_HEADERS.field("headers").type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA_WITH_HEADERS)


def build(records: pa.RecordBatch, value: ValueReader | None, mode: str, **settings) -> LayoutRows:
    return Layout(value, mode, **settings).build(records, FROM)


def is_number(value: bytes | None) -> bool:
    return value is None or value.startswith(b'{"n"') or value.strip(b" \t\r\n") == b"{}"


@settings(deadline=None)  # the first run compiles
@given(RECORDS, st.booleans(), st.integers(0, 2))
def test_rows_and_dead_letters_together_are_the_input(records, headers, start):
    """None is lost or doubled, both are in order, and a dead letter is what the record was."""
    batch, records = decoded(records)[start:], records[start:]
    at = batch.column("offset").to_pylist()
    good = [at[row] for row, (_, value, _) in enumerate(records) if is_number(value)]
    bad = [row for row, (_, value, _) in enumerate(records) if not is_number(value)]

    built = build(batch, NUMBERS, "deadletter", headers=headers)

    assert built.rows.column("offset").to_pylist() == good
    assert list(built.reasons) == [at[row] for row in bad]
    if not bad:
        assert built.dead_letters is None
        return
    built.dead_letters.validate(full=True)
    for row, letter in zip(bad, built.dead_letters.to_pylist(), strict=True):
        key, value, given_headers = records[row]
        assert (letter["key"], letter["value"]) == (key, value)
        assert letter["timestamp"] == batch.column("timestamp")[row].as_py()
        written = [(header["key"], header["value"]) for header in letter["headers"]]
        assert written[: -len(OWN_HEADERS)] == (given_headers or [])
        reason = built.reasons[at[row]].encode()
        place = (b"flights", b"3", str(at[row]).encode())
        assert written[-len(OWN_HEADERS) :] == list(zip(OWN_HEADERS, (reason, *place), strict=True))


def test_records_of_one_offset_are_dead_letters_each():
    """A faulty producer's: none of them may be taken for the other."""
    batch = decoded([(b"1", b"{}", None), (b"2", b"x", None), (b"3", b"y", None)])
    same = pa.array([100, 100, 100])
    at = batch.schema.get_field_index("offset")
    batch = batch.set_column(at, batch.schema.field(at), same)
    late = pa.array([2**62, 1, 1])  # beyond a timestamp: the first is malformed too
    when = batch.schema.get_field_index("timestamp")
    batch = batch.set_column(when, batch.schema.field(when), late)

    built = build(batch, NUMBERS, "deadletter")

    assert built.rows.num_rows == 0
    assert [letter["key"] for letter in built.dead_letters.to_pylist()] == [b"1", b"2", b"3"]


def test_a_tombstone_is_a_row_of_nulls_and_never_a_dead_letter():
    for value in (NUMBERS, TextReader()):
        for mode in MODES:
            built = build(decoded([(b"k", None, None)]), value, mode)

            assert built.rows.num_rows == 1
            assert not built.reasons
            assert built.dead_letters is None


def test_a_long_reason_is_cut_so_that_the_dead_letter_stays_near_its_size():
    kind = pa.schema([("d" * 5000, pa.date32())])
    record = (b"k", b'{"' + b"d" * 5000 + b'":"x"}', None)

    built = build(decoded([record]), JsonReader(kind), "deadletter")

    (letter,) = built.dead_letters.to_pylist()
    assert len(built.reasons[100]) > 5000, "it names the field"
    assert len(letter["headers"][0]["value"]) == REASON_LENGTH_MAX


def test_what_is_dropped_is_told_with_its_offset():
    records = decoded([(None, b"{}", None), (None, b"\xff", None), (None, b"", None)])

    built = build(records, NUMBERS, "dropmalformed")

    assert built.rows.column("offset").to_pylist() == [100]
    assert list(built.reasons) == [102, 104]
    assert built.dead_letters is None
    with pytest.raises(RecordError, match="topic flights, partition 3, offset 102"):
        build(records, NUMBERS, "failfast")


def test_text_stands_where_the_bytes_stood():
    records = decoded([(b"k", b"x", None), (b"k", b"\xff", None), (b"k", None, None)])

    permissive = build(records, TextReader(), "permissive").rows

    assert permissive.schema.names == [*KAFKA, "_corrupt_record"]
    assert permissive.column("value").to_pylist() == ["x", None, None]
    assert permissive.column("_corrupt_record").to_pylist() == [None, b"\xff", None]
    assert build(records, None, "failfast").rows.schema.names == KAFKA


def test_headers_are_fetched_for_dead_letters_and_shown_only_when_asked_for():
    layout = Layout(NUMBERS, "deadletter")

    assert layout.fetches_headers
    assert "headers" not in layout.schema.names
    assert not Layout(NUMBERS, "dropmalformed").fetches_headers


def test_a_field_named_like_a_kafka_column_needs_a_prefix():
    value = JsonReader(pa.schema([("offset", pa.int64())]))

    with pytest.raises(OptionError, match=r"'offset'.*metadata.prefix"):
        Layout(value)
    assert "kafka_offset" in Layout(value, prefix="kafka_").schema.names


def test_columns_of_kafka_that_nobody_asked_for_are_not_there():
    records = decoded([(b"k", b'{"n":1}', None)])

    few = Layout(NUMBERS, metadata=("offset", "key")).build(records, FROM).rows
    none = Layout(metadata=()).build(records, FROM).rows

    assert few.schema.names == ["n", "key", "offset"]
    assert none.to_pydict() == {"value": [b'{"n":1}']}


NANOS = 1_700_000_000_000_000_000
LARGEST = (2**63 - 1) // 1000


def at_times(*times: int) -> pa.RecordBatch:
    """Records 0, 1, 2, …; the last one is malformed too."""
    values = [b'{"n":%d}' % n for n in range(len(times) - 1)]
    records = decoded([(b"k", value, None) for value in [*values, b"poison"]])
    place = records.schema.get_field_index("timestamp")
    columns = [pa.array(times) if i == place else c for i, c in enumerate(records.columns)]
    return pa.RecordBatch.from_arrays(columns, schema=records.schema)


def test_timestamps_up_to_the_last_that_fits_are_themselves():
    rows = build(at_times(LARGEST, -LARGEST, -1, 0), None, "failfast").rows

    times = rows.column("timestamp").cast(pa.int64()).to_pylist()
    assert times == [LARGEST * 1000, -LARGEST * 1000, -1000, 0]


@pytest.mark.parametrize("wrong", [NANOS, LARGEST + 1, -LARGEST - 1, -(2**63)])
def test_a_timestamp_that_does_not_fit_is_malformed_and_never_another_one(wrong):
    records = at_times(1, wrong, 3, 4)
    for value in (None, NUMBERS):
        with pytest.raises(
            RecordError, match=f"partition 3, offset 102: its timestamp, {wrong} ms"
        ):
            build(records, value, "failfast")

    kept = build(records, NUMBERS, "permissive")
    assert kept.rows.column("timestamp").cast(pa.int64()).to_pylist() == [1000, None, 3000, 4000]
    assert kept.rows.column("n").to_pylist() == [0, 1, 2, None]

    dropped = build(records, NUMBERS, "dropmalformed")
    assert dropped.rows.column("n").to_pylist() == [0, 2]
    assert list(dropped.reasons) == [102, 106]

    built = build(records, NUMBERS, "deadletter")
    assert built.rows.equals(dropped.rows)
    assert built.dead_letters.column("value").to_pylist() == [b'{"n":1}', b"poison"]
    # Brokers take no such timestamp, so the reason has it; null is the time of writing.
    assert built.dead_letters.column("timestamp").to_pylist() == [None, 4]
    header = built.dead_letters.column("headers")[0].as_py()[0]
    assert str(wrong) in header["value"].decode()


def test_a_timestamp_that_nobody_reads_is_no_error():
    rows = build(at_times(NANOS, 2), None, "failfast", metadata=("offset",)).rows

    assert rows.column("offset").to_pylist() == [100, 102]
