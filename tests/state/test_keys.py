"""Keys as bytes: in order, told apart, and read back."""

import datetime as dt
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tallystick.errors import ManifestError, OptionError
from tallystick.state.keys import KeyCodec, bodies, check_size, entry_keys, tails
from tests.examples import drawn
from tests.state.damage import damaged

NEAR_ZERO = st.sampled_from([b"", b"\x00", b"\x00\x00", b"\x00\xff", b"\x01", b"a\x00", b"a\x00b"])
LONG = st.integers(-(1 << 63), (1 << 63) - 1)
VALUES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "string": (pa.string(), st.text(max_size=6) | NEAR_ZERO.map(lambda b: b.decode("latin-1"))),
    "large_string": (pa.large_string(), st.text(max_size=6)),
    "binary": (pa.binary(), st.binary(max_size=6) | NEAR_ZERO),
    "large_binary": (pa.large_binary(), st.binary(max_size=6)),
    "bool": (pa.bool_(), st.booleans()),
    "int8": (pa.int8(), st.integers(-128, 127)),
    "int16": (pa.int16(), st.integers(-(1 << 15), (1 << 15) - 1)),
    "int32": (pa.int32(), st.integers(-(1 << 31), (1 << 31) - 1)),
    "int64": (pa.int64(), LONG),
    "float": (pa.float32(), st.floats(width=32)),
    "double": (pa.float64(), st.floats()),
    "date": (pa.date32(), st.dates()),
    "timestamp": (pa.timestamp("us"), st.datetimes()),
    "decimal": (pa.decimal128(18, 3), st.decimals(-(10**14), 10**14, places=3)),
    "long decimal": (
        pa.decimal128(38, 0),
        st.integers(-(10**38) + 1, 10**38 - 1).map(Decimal),
    ),
}


def in_order(value: Any) -> tuple[Any, ...]:
    """Spark's order: null, then the values, NaN after all; texts by their UTF-8."""
    if value is None:
        return (0,)
    if isinstance(value, float):
        return (1, math.isnan(value), 0.0 if math.isnan(value) else value)
    return (1, value.encode() if isinstance(value, str) else value)


def same(value: Any) -> Any:
    """-0.0 and 0.0 are one key, and so is each NaN."""
    return "nan" if isinstance(value, float) and math.isnan(value) else value


@settings(deadline=None)  # the first call may compile
@given(st.data())
def test_bytes_are_in_the_order_of_the_values_and_read_back(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(list(VALUES)), min_size=1, max_size=3))
    columns = [VALUES[name][1] | st.none() for name in names]
    keys = data.draw(st.lists(st.tuples(*columns), max_size=8))
    schema = pa.schema([(f"{i}", VALUES[name][0]) for i, name in enumerate(names)])
    by_column = [[key[i] for key in keys] for i in range(len(names))]
    arrays = [pa.array(v, f.type) for v, f in zip(by_column, schema, strict=True)]
    rows = pa.RecordBatch.from_arrays(arrays, schema=schema)
    codec = KeyCodec(schema)

    encoded = codec.encode(rows)

    decoded = codec.decode(encoded)
    assert decoded.schema == schema
    assert [tuple(map(same, row.values())) for row in decoded.to_pylist()] == [
        tuple(map(same, row.values())) for row in rows.to_pylist()
    ]
    as_bytes, as_values = encoded.to_pylist(), [tuple(map(in_order, key)) for key in keys]
    for one, one_key in zip(as_bytes, as_values, strict=True):
        for other, other_key in zip(as_bytes, as_values, strict=True):
            assert (one < other, one == other) == (one_key < other_key, one_key == other_key)
            assert one == other or not other.startswith(one), "a key would be another's prefix"
    assert codec.encode(rows.slice(1)).to_pylist() == as_bytes[1:]
    assert codec.decode(encoded.slice(1)).num_rows == max(0, len(keys) - 1)
    same_bytes = dict(zip(as_bytes, codec.hash_codes(rows).tolist(), strict=True))
    assert [same_bytes[one] for one in as_bytes] == codec.hash_codes(rows).tolist()


def test_the_layout_is_frozen() -> None:
    """Checkpoints hold these bytes."""
    rows = pa.record_batch(
        {
            "text": ["a\0b", None],
            "number": pa.array([-2, 5], pa.int32()),
            "real": [1.0, -1.0],
            "flag": [True, None],
            "money": pa.array([Decimal("0.01"), Decimal("-0.01")], pa.decimal128(20, 2)),
        }
    )

    first, second = KeyCodec(rows.schema).encode(rows).to_pylist()

    assert first.hex(" ") == (
        "01 61 00 ff 62 00 00 01 7f ff ff ff ff ff ff fe 01 bf f0 00 00 00 00 00 00 01 01 "
        "01 80 00 00 00 00 00 00 00 00 00 00 00 00 00 00 01"
    )
    assert second.hex(" ") == (
        "00 01 80 00 00 00 00 00 00 05 01 40 0f ff ff ff ff ff ff 00 "
        "01 7f ff ff ff ff ff ff ff ff ff ff ff ff ff ff ff"
    )


def test_the_text_of_a_key_is_frozen_and_read_back() -> None:
    schema = pa.schema([(name, kind) for name, (kind, _) in VALUES.items()])
    schema = schema.append(pa.field("zoned", pa.timestamp("us", tz="Europe/Berlin")))

    text = KeyCodec(schema).schema_text

    assert KeyCodec.from_text(text).schema == schema
    assert KeyCodec.from_text(text).schema_text == text
    assert text == (
        '[["string","string"],["large_string","large_string"],["binary","binary"],'
        '["large_binary","large_binary"],["bool","bool"],["int8","int8"],["int16","int16"],'
        '["int32","int32"],["int64","int64"],["float","float"],["double","double"],'
        '["date","date32[day]"],["timestamp","timestamp[us]"],["decimal","decimal128(18, 3)"],'
        '["long decimal","decimal128(38, 0)"],["zoned","timestamp[us, tz=Europe/Berlin]"]]'
    )


def test_whether_a_column_may_be_null_is_no_part_of_a_key() -> None:
    strict = pa.schema([pa.field("key", pa.string(), nullable=False, metadata={"a": "b"})])
    assert KeyCodec(strict).schema_text == KeyCodec(pa.schema([("key", pa.string())])).schema_text


def test_a_type_of_a_newer_release_is_refused() -> None:
    with pytest.raises(ManifestError, match="'float16', which this release does not know"):
        KeyCodec.from_text('[["key","float16"]]')


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.int64()), pa.struct([("a", pa.int64())]), pa.timestamp("ns"), pa.uint64()],
    ids=str,
)
def test_what_cannot_be_a_key_is_refused(kind: pa.DataType) -> None:
    with pytest.raises(OptionError, match=r"key_by column 'key' is .*: a key may be"):
        KeyCodec(pa.schema([("key", kind)]))


def test_rows_without_the_key_are_refused() -> None:
    codec = KeyCodec(pa.schema([("key", pa.int64())]))
    with pytest.raises(OptionError, match=r"no column 'key'.*they have other"):
        codec.encode(pa.record_batch({"other": [1]}))
    with pytest.raises(OptionError, match="'key' is string, but was int64"):
        codec.hash_codes(pa.record_batch({"key": ["1"]}))
    with pytest.raises(OptionError, match="names no column"):
        KeyCodec(pa.schema([]))


@drawn(500)
@given(st.data(), st.sampled_from(list(VALUES)))
def test_bytes_that_are_no_keys_are_refused(data: st.DataObject, name: str) -> None:
    """A key that is read back is those bytes: no two of them are one key."""
    kind, values = VALUES[name]
    codec = KeyCodec(pa.schema([("a", pa.binary()), ("b", kind)]))
    text, value = data.draw(st.tuples(NEAR_ZERO, values | st.none()))
    row = pa.record_batch([pa.array([text], pa.binary()), pa.array([value], kind)], codec.schema)
    junk = data.draw(damaged(codec.encode(row)[0].as_py()) | st.binary(max_size=30))
    try:
        decoded = codec.decode(pa.array([junk], pa.binary()))
    except ManifestError:
        return
    decoded.validate(full=True)
    assert codec.encode(decoded).to_pylist() == [junk]


def test_a_key_cut_short_is_refused() -> None:
    codec = KeyCodec(pa.schema([("a", pa.string()), ("b", pa.int64())]))
    whole = codec.encode(pa.record_batch({"a": ["x\0"], "b": [1]}))[0].as_py()
    for size in range(len(whole)):
        with pytest.raises(ManifestError, match=r"not of the columns \[\[\"a\",\"string\"\]"):
            codec.decode(pa.array([whole[:size]], pa.binary()))
    with pytest.raises(ManifestError):
        codec.decode(pa.array([whole + b"\x00"], pa.binary()))


def test_entries_begin_with_the_key_group_and_the_states_id() -> None:
    keys = pa.array([b"x", b"cd", b""], pa.binary())

    keys_of_entries = entry_keys(np.array([258, 32767], np.int32), 9, keys.slice(1))

    assert keys_of_entries.to_pylist() == [b"\x01\x02\x09cd", b"\x7f\xff\x09"]
    assert bodies(keys_of_entries).to_pylist() == [b"cd", b""]
    assert entry_keys(np.zeros(0, np.int32), 1, pa.array([], pa.binary())).to_pylist() == []


@settings(deadline=None)
@given(st.lists(st.binary(min_size=2, max_size=4)), st.integers(0, 2))
def test_what_stands_behind_some_bytes(values: list[bytes], at: int) -> None:
    """Also where values are no longer than that, where Arrow's own function fails."""
    column = pa.array([b"xx", *values], pa.binary()).slice(1)
    assert tails(column, at).to_pylist() == [value[at:] for value in values]


def test_more_bytes_than_a_column_holds_are_refused() -> None:
    check_size(1, (1 << 31) - 1)
    with pytest.raises(OptionError, match=r"of 7 rows take 2147483648 bytes .* raise the step's"):
        check_size(7, 1 << 31)


def test_days_before_1970_come_before() -> None:
    rows = pa.record_batch({"day": [dt.date(1969, 12, 31), dt.date(1970, 1, 1)]})
    first, second = KeyCodec(rows.schema).encode(rows).to_pylist()
    assert first < second
