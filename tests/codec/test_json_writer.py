"""What the writer writes, read back by `json.loads` and by our own reader."""

import base64
import json
import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.codec.json import read as json_reader
from tallystick.codec.json import write as json_writer
from tallystick.codec.json.kernels import add_sizes, encode_base64, escape_strings, write_column
from tallystick.codec.json.read import parse_json
from tallystick.codec.json.write import check_schema, write_json
from tallystick.errors import OptionError, RecordError
from tests.examples import drawn

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
KEYS = TEXT | st.sampled_from(['"', "\\", "a", "\n", "é", "\x00"])


def integers(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


READABLE: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.bool_(), st.booleans()),
    (pa.int8(), integers(8)),
    (pa.int16(), integers(16)),
    (pa.int32(), integers(32)),
    (pa.int64(), integers(64)),
    (pa.float32(), st.floats(width=32, allow_nan=False, allow_infinity=False)),
    (pa.float64(), st.floats(allow_nan=False, allow_infinity=False)),
    (pa.string(), TEXT),
    (pa.date32(), st.dates()),
    (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(UTC))),
    (pa.timestamp("us"), st.datetimes()),
    (pa.decimal128(20, 10), st.decimals(-(10**9), 10**9, places=10)),
]
WRITABLE = [
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.large_string(), TEXT),
    (pa.binary(), st.binary(max_size=10)),
    (pa.large_binary(), st.binary(max_size=10)),
    (pa.dictionary(pa.int8(), pa.string()), TEXT),
    (pa.null(), st.none()),
]


def nested(
    inner: st.SearchStrategy[tuple[pa.DataType, st.SearchStrategy[Any]]],
) -> st.SearchStrategy[tuple[pa.DataType, st.SearchStrategy[Any]]]:
    return st.one_of(
        inner.map(lambda kind: (pa.list_(kind[0]), st.lists(st.none() | kind[1], max_size=3))),
        st.dictionaries(KEYS, inner, min_size=1, max_size=3).map(
            lambda fields: (
                pa.struct([(name, kind) for name, (kind, _) in fields.items()]),
                st.fixed_dictionaries({n: st.none() | v for n, (_, v) in fields.items()}),
            )
        ),
    )


def mapped(
    inner: st.SearchStrategy[tuple[pa.DataType, st.SearchStrategy[Any]]],
) -> st.SearchStrategy[tuple[pa.DataType, st.SearchStrategy[Any]]]:
    return nested(inner) | inner.map(
        lambda kind: (
            pa.map_(pa.string(), kind[0]),
            st.dictionaries(KEYS, st.none() | kind[1], max_size=3).map(lambda d: list(d.items())),
        )
    )


READABLE_KINDS = st.recursive(st.sampled_from(READABLE), nested, max_leaves=4)
WRITABLE_KINDS = st.recursive(st.sampled_from([*READABLE, *WRITABLE]), mapped, max_leaves=4)


@st.composite
def batches(
    draw: st.DrawFn, kinds: st.SearchStrategy[tuple[pa.DataType, st.SearchStrategy[Any]]]
) -> pa.RecordBatch:
    """Some rows of any schema; half of the time a slice of more."""
    fields = draw(st.dictionaries(KEYS, kinds, min_size=1, max_size=4))
    row_count = draw(st.integers(0, 5))
    arrays = [
        pa.array(
            draw(st.lists(st.none() | values, min_size=row_count, max_size=row_count)), type=kind
        )
        for kind, values in fields.values()
    ]
    batch = pa.RecordBatch.from_arrays(arrays, names=list(fields))
    start = draw(st.integers(0, row_count))
    return batch.slice(start, draw(st.integers(0, row_count - start)))


def plain(value: Any, kind: pa.DataType) -> Any:
    """What `json.loads` must give for an Arrow value."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: plain(value[field.name], field.type) for field in kind}
    if pa.types.is_list(kind):
        return [plain(item, kind.value_type) for item in value]
    if pa.types.is_map(kind):
        return {key: plain(item, kind.item_type) for key, item in value}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, float):
        return (
            (value if kind == pa.float64() else float(np.float32(value)))
            if math.isfinite(value)
            else None
        )
    if isinstance(value, datetime):
        return value.replace(tzinfo=None).isoformat("T", "microseconds") + (
            "Z" if value.tzinfo else ""
        )
    return value.isoformat() if isinstance(value, date) else value


def loaded(record: bytes, schema: pa.Schema) -> Any:
    """The record by `json.loads`, its numbers as the column's types have them."""
    return {
        field.name: retyped(value, field.type)
        for field, value in zip(schema, json.loads(record, parse_float=str).values(), strict=True)
    }


def retyped(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: retyped(value[field.name], field.type) for field in kind}
    if pa.types.is_list(kind):
        return [retyped(item, kind.value_type) for item in value]
    if pa.types.is_map(kind):
        return {key: retyped(item, kind.item_type) for key, item in value.items()}
    if kind == pa.float32():
        return float(np.float32(value))
    if kind == pa.float64():
        return float(value)
    return Decimal(value) if pa.types.is_decimal(kind) else value


@drawn(120)
@given(batches(WRITABLE_KINDS))
def test_json_loads_reads_what_was_written(batch):
    records = write_json(batch)

    assert records.type == pa.binary()
    assert records.null_count == 0
    records.validate(full=True)
    rows = [plain(row, pa.struct(list(batch.schema))) for row in batch.to_pylist()]
    assert [loaded(record, batch.schema) for record in records.to_pylist()] == rows


@drawn(120)
@given(batches(READABLE_KINDS))
def test_our_reader_reads_what_was_written(batch):
    parsed = parse_json(write_json(batch), batch.schema, "failfast", str)

    assert parsed.columns.equals(batch)


SHORT = st.builds(lambda whole, digits: whole / 10**digits, integers(58), st.integers(0, 9))
NEXT_TO_SHORT = st.builds(math.nextafter, SHORT, st.sampled_from([-math.inf, math.inf]))
DOUBLES = st.lists(st.none() | SHORT | NEXT_TO_SHORT | st.floats(), min_size=1, max_size=20)


@drawn(300)
@given(DOUBLES, st.integers(0, 3))
def test_a_double_has_the_text_that_arrow_gives_it(values, skipped):
    """The kernel writes only what it is sure of; whatever it does, nobody can tell."""
    column = pa.array(values, pa.float64())[skipped:]
    texts = [
        b"null" if value is None or not math.isfinite(value) else text.encode()
        for value, text in zip(column.to_pylist(), arrow_texts(column), strict=True)
    ]

    records = write_json(pa.record_batch([column], names=["v"])).to_pylist()

    assert records == [b'{"v":%b}' % text for text in texts]


def arrow_texts(column: pa.Array) -> list[str]:
    return [text or "" for text in column.cast(pa.string()).to_pylist()]


def test_the_kernel_itself_writes_amounts_of_money(monkeypatch):
    """Else the test above would pass without it."""
    cents = pa.array(np.arange(-100_000, 1_000_000, 37) / 100)
    expected = arrow_texts(cents.filter(pc.not_equal(cents, 0.0)))
    monkeypatch.setattr(json_writer, "spans_of", None)

    spans = json_writer.double_texts(cents.filter(pc.not_equal(cents, 0.0)), "cents")

    written_rows = [
        spans.data[start : start + length].tobytes().decode()
        for start, length in zip(spans.starts, spans.lengths, strict=True)
    ]
    assert written_rows == expected


@given(st.text(), st.text())
def test_any_text_and_any_name_survive(text, name):
    record = write_json(pa.record_batch([pa.array([text])], names=[name]))[0].as_py()

    assert json.loads(record) == {name: text}


def test_rows_are_written_compactly_in_column_order_with_their_nulls():
    batch = pa.record_batch(
        {
            "user": pa.array(["ann", None]),
            "n": pa.array([None, -7]),
            "f": pa.array([1.5, math.nan]),
            "g": pa.array([math.inf, 1e20]),
            "d": pa.array([Decimal("1.50"), None]),
            "t": pa.array([1_700_000_000_000, None], pa.timestamp("ms", "Europe/Paris")),
            "s": pa.array([{"l": [{"x": 1}, None]}, None]),
            "e": pa.array([[], None], pa.list_(pa.string())),
            "m": pa.array([[("k", 1), ("q", None)], []], pa.map_(pa.string(), pa.int32())),
        }
    )

    assert write_json(batch).to_pylist() == [
        b'{"user":"ann","n":null,"f":1.5,"g":null,"d":1.50,"t":"2023-11-14T22:13:20.000Z",'
        b'"s":{"l":[{"x":1},null]},"e":[],"m":{"k":1,"q":null}}',
        b'{"user":null,"n":-7,"f":null,"g":1e+20,"d":null,"t":null,"s":null,"e":null,"m":{}}',
    ]


@pytest.mark.parametrize(
    ("unit", "fraction"), [("s", ""), ("ms", ".123"), ("us", ".123456"), ("ns", ".123456789")]
)
@pytest.mark.parametrize(("zone", "suffix"), [(None, ""), ("UTC", "Z"), ("Asia/Tokyo", "Z")])
def test_timestamps_are_written_in_utc_with_all_digits_of_their_unit(unit, fraction, zone, suffix):
    nanos = pa.array([None, 1_700_000_000_123_456_789, None, -1_000_000_000])
    column = nanos.view(pa.timestamp("ns")).cast(pa.timestamp(unit), safe=False)
    column = column.view(pa.int64()).view(pa.timestamp(unit, zone))[1:]

    values = [
        json.loads(record)["v"] for record in write_json(pa.record_batch({"v": column})).to_pylist()
    ]

    zeros = "." + "0" * (len(fraction) - 1) if fraction else ""
    assert values[0] == f"2023-11-14T22:13:20{fraction}{suffix}"
    assert values[1] is None
    assert values[2] == f"1969-12-31T23:59:59{zeros}{suffix}"


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Tokyo"])
def test_our_reader_reads_what_was_written_of_a_pandas_column_in_nanoseconds(
    monkeypatch, has_kernel, zone
):
    monkeypatch.setattr(json_reader, "is_kernel_ready", lambda: has_kernel)
    nanos = [1_700_000_000_123_456_789, -1_000_000_001, 0]
    series = pd.Series(pd.to_datetime([*nanos, None], utc=True)).dt.tz_convert(zone)
    column = pa.Array.from_pandas(series)
    assert column.type == pa.timestamp("ns", zone)

    written = write_json(pa.record_batch({"v": column}))
    parsed = parse_json(
        written, pa.schema([("v", pa.timestamp("us", zone and "UTC"))]), "failfast", str
    )

    micros = parsed.columns["v"].cast(pa.int64()).to_pylist()
    assert micros == [*(at // 1000 for at in nanos), None]


def test_every_control_character_is_escaped():
    text = "".join(map(chr, range(0x20))) + '"\\/\x7f\u2028'
    record = write_json(pa.record_batch({"v": pa.array([text])}))[0].as_py()

    assert record.startswith(b'{"v":"\\u0000\\u0001')
    assert b"\\u0007\\b\\t\\n\\u000b\\f\\r\\u000e" in record
    assert record.endswith('\\u001f\\"\\\\/\x7f\u2028"}'.encode())
    assert json.loads(record) == {"v": text}


def test_what_a_null_covers_is_not_looked_at():
    """Arrow lets anything stand under a null; it must not be seen, nor shift what follows."""
    days = pa.array([0, 1, 10**8, 10**8, 2], pa.int32()).view(pa.date32())
    mask = pa.array([False, True, False])
    lists = pa.ListArray.from_arrays([0, 2, 4, 5], days, mask=mask)
    structs = pa.StructArray.from_arrays(
        [days[1:4]], names=["d"], mask=pa.array([False, True, True])
    )

    records = write_json(pa.record_batch({"l": lists, "s": structs})).to_pylist()

    assert records == [
        b'{"l":["1970-01-01","1970-01-02"],"s":{"d":"1970-01-02"}}',
        b'{"l":null,"s":null}',
        b'{"l":["1970-01-03"],"s":null}',
    ]


def test_no_rows_give_an_empty_array():
    for kind, _ in [*READABLE, *WRITABLE]:
        batch = pa.RecordBatch.from_arrays(
            [pa.array([], kind), pa.array([], pa.list_(kind))], names=["v", "l"]
        )
        assert write_json(batch).equals(pa.array([], pa.binary()))


def test_a_result_beyond_two_gib_is_large_binary(monkeypatch):
    monkeypatch.setattr("tallystick.codec.spans.BINARY_BYTES_MAX", 10)

    records = write_json(pa.record_batch({"v": pa.array([1, 2])}))

    assert records.equals(pa.array([b'{"v":1}', b'{"v":2}'], pa.large_binary()))


def test_a_million_rows_are_written():
    numbers = pa.array(np.arange(1_000_000))

    records = write_json(pa.record_batch({"n": numbers, "t": numbers.cast(pa.string())}))

    assert len(records) == 1_000_000
    assert records[999_999].as_py() == b'{"n":999999,"t":"999999"}'
    assert records[0].as_py() == b'{"n":0,"t":"0"}'


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (datetime(1, 1, 1, tzinfo=UTC), pa.timestamp("us", "UTC")),
        (datetime(9999, 12, 31, 23, 59, 59, 999999, UTC), pa.timestamp("us", "UTC")),
        (date.min, pa.date32()),
        (date.max, pa.date32()),
    ],
)
def test_the_first_and_the_last_year_are_written_one_step_beyond_is_refused(value, kind):
    column = pa.array([value, None], kind)
    [record, _] = write_json(pa.record_batch({"v": column})).to_pylist()
    assert json.loads(record)["v"].startswith(f"{value.year:04}-")

    storage = pa.int32() if kind == pa.date32() else pa.int64()
    step = 1 if value.year == 9999 else -1
    beyond = pa.array([column.view(storage)[0].as_py() + step], storage).view(kind)
    with pytest.raises(RecordError, match=r"column 'v'.*years 1 to 9999"):
        write_json(pa.record_batch({"v": beyond}))


@pytest.mark.parametrize(
    "schema",
    [
        pa.schema([]),
        pa.schema([("v", pa.int32()), ("v", pa.int32())]),
        pa.schema([("v", pa.time64("us"))]),
        pa.schema([("v", pa.duration("us"))]),
        pa.schema([("v", pa.float16())]),
        pa.schema([("v", pa.struct([]))]),
        pa.schema([("v", pa.list_(pa.time32("s")))]),
        pa.schema([("v", pa.map_(pa.int32(), pa.int32()))]),
    ],
)
def test_a_schema_that_cannot_be_written_is_refused(schema):
    with pytest.raises(OptionError, match="rows to write"):
        check_schema(schema)
    with pytest.raises(OptionError, match="rows to write"):
        write_json(pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in schema], schema=schema))


def test_the_kernels_refuse_what_leaves_their_arrays():
    data = np.frombuffer(b"abc", np.uint8)
    for start, length, room in ((0, 4, 99), (-1, 2, 99), (3, 1, 99), (0, 3, 2)):
        starts, lengths = np.array([start], np.int64), np.array([length], np.int64)
        out, places, sizes = np.zeros(room, np.uint8), np.zeros(1, np.int64), np.zeros(1, np.int64)
        assert escape_strings(data, starts, lengths, out, places, sizes) == -1
        assert encode_base64(data, starts, lengths, out, places) == -1
        assert write_column(data[:0], data, starts, lengths, False, out, places) == -1


def test_a_null_takes_four_bytes_without_quotes():
    sizes = np.zeros(2, np.int64)
    add_sizes(np.array([-1, 3], np.int64), 7, 5, sizes)
    assert sizes.tolist() == [9, 10]
