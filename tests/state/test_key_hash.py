"""Hash codes of keys never change: state would be looked for in other key groups than it is in."""

import datetime as dt
import struct
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tallystick.state.keys import HASH_VERSION, KeyCodec

UTC = dt.UTC
FROZEN: list[tuple[pa.DataType, Any, int]] = [
    (pa.string(), "", 0),
    (pa.string(), "hello", 99162322),
    (pa.string(), "Aa", 2112),
    (pa.string(), "BB", 2112),
    (pa.string(), "polygenelubricants", -(1 << 31)),
    (pa.string(), "zürich", -565983330),
    (pa.string(), "😀", 1772899),
    (pa.large_string(), "hello", 99162322),
    (pa.binary(), b"", 1),
    (pa.binary(), b"\x01\xff", 991),
    (pa.large_binary(), b"\x01\xff", 991),
    (pa.int8(), -1, -1),
    (pa.int16(), -300, -300),
    (pa.int32(), -(1 << 31), -(1 << 31)),
    (pa.int64(), 7, 7),
    (pa.int64(), -1, 0),
    (pa.int64(), 1 << 32, 1),
    (pa.bool_(), True, 1231),
    (pa.bool_(), False, 1237),
    (pa.float64(), 0.0, 0),
    (pa.float64(), -0.0, 0),
    (pa.float64(), 1.0, 1072693248),
    (pa.float64(), float("nan"), 2146959360),
    (pa.float32(), 1.0, 1065353216),
    (pa.float32(), -0.0, 0),
    (pa.float32(), float("nan"), 2143289344),
    (pa.date32(), dt.date(1970, 1, 2), 1),
    (pa.date32(), dt.date(1969, 12, 31), -1),
    (pa.timestamp("us"), dt.datetime(1970, 1, 1, 0, 0, 1), 1_000_000),  # noqa: DTZ001
    (pa.timestamp("us", tz="UTC"), dt.datetime(2026, 1, 1, tzinfo=UTC), 1176897352),
    (pa.decimal128(10, 2), Decimal("1.23"), 3815),
    (pa.decimal128(10, 2), Decimal("-1.23"), -3811),
    (pa.decimal128(10, 0), Decimal(0), 0),
    (pa.decimal128(38, 4), Decimal("123456789012345678901234.5678"), 894439164),
    (pa.decimal128(38, 4), Decimal("-123456789012345678901234.5678"), -894439156),
]


def hash_codes(kind: pa.DataType, values: list[Any]) -> list[int]:
    rows = pa.record_batch({"key": pa.array(values, kind)})
    codes = KeyCodec(rows.schema).hash_codes(rows)
    assert codes.dtype == np.int32
    return codes.tolist()


def java_int(number: int) -> int:
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def java_long(number: int) -> int:
    bits = number % (1 << 64)
    return java_int(bits ^ (bits >> 32))


def java_big_integer(number: int) -> int:
    code, magnitude = 0, abs(number)
    for shift in range(128, -1, -32):
        code = 31 * code + (magnitude >> shift) % (1 << 32)
    return java_int(code if number >= 0 else -code)


def test_the_version_is_the_one_that_these_numbers_are_of() -> None:
    assert HASH_VERSION == 1


@pytest.mark.parametrize(("kind", "value", "code"), FROZEN)
def test_hash_codes_are_frozen(kind: pa.DataType, value: Any, code: int) -> None:
    """A null before it, and a slice: what stands in the buffers around a value is no part of it."""
    assert hash_codes(kind, [None, value]) == [0, code]
    column = pa.array([None, value, value, None], kind).slice(1, 2)
    rows = pa.record_batch({"key": column})
    assert KeyCodec(rows.schema).hash_codes(rows).tolist() == [code, code]


def test_several_columns_are_hashed_as_flinks_tuples() -> None:
    rows = pa.record_batch(
        {
            "ignored": ["x", "y", "z"],
            "user": ["hello", None, "Aa"],
            "number": pa.array([7, 7, None], pa.int64()),
            "flag": pa.array([True, False, None]),
        }
    )
    codec = KeyCodec(pa.schema([rows.schema.field(n) for n in ("user", "number", "flag")]))

    codes = codec.hash_codes(rows)

    expected = [(99162322 * 31 + 7) * 31 + 1231, 7 * 31 + 1237, 2112 * 31 * 31]
    assert codes.tolist() == [java_int(code) for code in expected]


@settings(deadline=None)
@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1)))
def test_longs(numbers: list[int]) -> None:
    assert hash_codes(pa.int64(), numbers) == [java_long(number) for number in numbers]


@settings(deadline=None)
@given(st.lists(st.floats(allow_nan=False)))
def test_doubles(numbers: list[float]) -> None:
    bits = [struct.unpack(">q", struct.pack(">d", number + 0.0))[0] for number in numbers]
    assert hash_codes(pa.float64(), numbers) == [java_long(bit_pattern) for bit_pattern in bits]


@settings(deadline=None)
@given(st.lists(st.binary()))
def test_bytes(values: list[bytes]) -> None:
    expected = []
    for value in values:
        code = 1
        for byte in value:
            code = 31 * code + (byte - 256 if byte > 127 else byte)
        expected.append(java_int(code))
    assert hash_codes(pa.binary(), values) == expected


@settings(deadline=None)
@given(st.lists(st.integers(-(10**38) + 1, 10**38 - 1)), st.integers(0, 38))
def test_decimals(unscaled: list[int], scale: int) -> None:
    values = [Decimal((n < 0, tuple(map(int, str(abs(n)))), -scale)) for n in unscaled]
    expected = [java_int(31 * java_big_integer(number) + scale) for number in unscaled]
    assert hash_codes(pa.decimal128(38, scale), values) == expected


@settings(deadline=None)
@given(st.lists(st.datetimes(timezones=st.just(UTC))))
def test_timestamps(moments: list[dt.datetime]) -> None:
    start = dt.datetime(1970, 1, 1, tzinfo=UTC)
    micros = [(moment - start) // dt.timedelta(microseconds=1) for moment in moments]
    assert hash_codes(pa.timestamp("us", tz="UTC"), moments) == [
        java_long(microseconds) for microseconds in micros
    ]
