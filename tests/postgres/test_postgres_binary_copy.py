"""Every type through a real server, read by psycopg alone; and what must be refused."""

import json
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from itertools import count
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from postgres_writing import attempted, begun, opened

from tallystick.epoch.two_phase import Outcome
from tallystick.errors import OptionError, RecordError
from tallystick.postgres.binary_copy import CHUNK_ROWS
from tests.postgres.real_postgres import PostgresServer

Create = Callable[..., str]
_numbers = count(1)


def written(postgres: PostgresServer, table: str, rows: pa.RecordBatch, select: str = "*") -> list:
    driver = opened(postgres.dsn, table)
    (committable,) = begun(driver, rows).prepare()
    assert driver.commit(committable) is Outcome.COMMITTED
    driver.close()
    return postgres.query(f"SELECT {select} FROM {table}")


def through(postgres: PostgresServer, table: Create, kind: str, values: pa.Array) -> list:
    """A column of values, as the server has it afterwards."""
    name = table(f"n serial, v {kind}")
    return [v for (v,) in written(postgres, name, pa.record_batch({"v": values}), "v")]


NOON = datetime(2024, 2, 29, 12, 30, 15, 123456, UTC).replace(tzinfo=None)
FIRST, LAST = (datetime(year, 1, 1, tzinfo=UTC).replace(tzinfo=None) for year in (1, 9999))
UUIDS = [UUID(int=0), UUID("f81d4fae-7dec-11d0-a765-00a0c91e6bf6"), UUID(int=2**128 - 1)]
BYTES = [b"", b"\0\xff", b"x" * 1000]
ROUND_TRIPS = [
    ("boolean", pa.bool_(), [True, False]),
    ("smallint", pa.int8(), [-128, 127]),
    ("smallint", pa.int64(), [-(2**15), 2**15 - 1]),
    ("integer", pa.int32(), [-(2**31), 0, 2**31 - 1]),
    ("integer", pa.uint16(), [0, 65535]),
    ("bigint", pa.int64(), [-(2**63), -1, 0, 2**63 - 1]),
    ("bigint", pa.uint64(), [0, 2**63 - 1]),
    ("real", pa.float32(), [0.5, -0.0, float("inf"), 1.5e-40]),
    ("real", pa.float16(), [0.5, 65504.0]),
    ("double precision", pa.float64(), [0.1, -1e308, float("-inf"), 5e-324]),
    ("double precision", pa.int64(), [2**53]),
    ("text", pa.string(), ["", "a", "schön ☃ 🐢", "x" * 70_000]),
    ("varchar(5)", pa.large_string(), ["", "äöü  "]),
    ("char(3)", pa.string(), ["abc"]),
    ("text", pa.string_view(), ["short", "longer than twelve bytes"]),
    ("text", pa.dictionary(pa.int32(), pa.string()), ["a", "b", "a"]),
    ("bytea", pa.binary(), BYTES),
    ("bytea", pa.large_binary(), BYTES),
    ("bytea", pa.binary(3), [b"abc", b"\0\0\0"]),
    ("uuid", pa.string(), [str(uuid) for uuid in UUIDS]),
    ("uuid", pa.binary(16), [uuid.bytes for uuid in UUIDS]),
    ("json", pa.string(), ['{"a": [1, 2, null]}', "3"]),
    ("jsonb", pa.string(), ['{"a": [1, 2, null]}', '"schön"']),
    ("date", pa.date32(), [date(1, 1, 1), date(1970, 1, 1), date(2000, 1, 1), date(9999, 12, 31)]),
    ("date", pa.date64(), [date(1999, 12, 31)]),
    ("timestamp", pa.timestamp("us"), [NOON, FIRST, LAST]),
    ("timestamp", pa.timestamp("ns"), [NOON]),
    ("timestamp", pa.timestamp("s"), [NOON.replace(microsecond=0)]),
    ("timestamp(3)", pa.timestamp("ms"), [NOON.replace(microsecond=123000)]),
    ("timestamptz", pa.timestamp("us", "UTC"), [NOON.replace(tzinfo=UTC)]),
    ("timestamptz", pa.timestamp("us", "Europe/Paris"), [NOON.replace(tzinfo=UTC)]),
    ("time", pa.time64("us"), [time(0), time(23, 59, 59, 999999)]),
    ("time", pa.time32("s"), [time(12, 30, 15)]),
    ("interval", pa.duration("us"), [timedelta(0), timedelta(days=2, microseconds=-5)]),
    ("numeric", pa.decimal128(38, 10), [Decimal("0"), Decimal("-1.5"), Decimal("1e-10")]),
    ("numeric", pa.decimal128(38, 0), [Decimal(10**38 - 1), Decimal(1 - 10**38)]),
    ("numeric(10,2)", pa.decimal128(10, 4), [Decimal("123456.7"), Decimal("-0.01")]),
    ("numeric(5,-2)", pa.decimal128(10, 1), [Decimal(-1200), None, Decimal(100)]),
    ("numeric", pa.decimal256(50, 5), [Decimal("123456789012345678901234567.00001")]),
    ("numeric", pa.int64(), [-(2**63), 10000, 2**63 - 1]),
    ("numeric", pa.uint64(), [2**64 - 1]),
]


def read_back(kind: str, values: list) -> list:
    """As psycopg gives them."""
    if kind == "uuid":
        return [UUID(value) if isinstance(value, str) else UUID(bytes=value) for value in values]
    if kind.startswith("json"):
        return [json.loads(value) for value in values]
    return values


@pytest.mark.parametrize(
    ("kind", "arrow", "values"), ROUND_TRIPS, ids=lambda parameter: str(parameter)[:30]
)
def test_values_come_back_as_they_were(
    postgres: PostgresServer, table: Create, kind: str, arrow: pa.DataType, values: list
) -> None:
    """Nulls between them, and in a slice that begins in the middle of its buffers."""
    with_nulls = [values[0], None, *values, None]
    plain = arrow.value_type if pa.types.is_dictionary(arrow) else arrow
    array = pa.array(with_nulls, plain).cast(arrow).slice(1)

    actual = through(postgres, table, kind, array)

    expected = [None, *read_back(kind, values), None]
    if kind == "real":
        expected, actual = (
            [number if number is None else float(np.float32(number)) for number in side]
            for side in (expected, actual)
        )
    if kind == "timestamptz":
        actual = [moment and moment.astimezone(UTC) for moment in actual]
    assert actual == expected
    if pa.types.is_floating(arrow):
        assert list(map(str, actual)) == list(map(str, expected))  # -0.0 is not 0.0


def test_domains_enums_and_odd_names(postgres: PostgresServer, table: Create) -> None:
    name = table('"Größe ""x""" text, n integer')
    schema = name.split(".")[0]
    postgres.query(f"CREATE TYPE {schema}.mood AS ENUM ('glad', 'sad')")
    postgres.query(f"CREATE DOMAIN {schema}.small AS numeric(6,2) CHECK (VALUE > 0)")
    odd = table(f'm {schema}.mood, s {schema}.small, "Größe ""x""" text', name='"O d%d"')
    rows = pa.record_batch(
        {"m": ["sad", None], "s": pa.array([Decimal("1.25"), None]), 'Größe "x"': ["a", "b"]}
    )

    assert written(postgres, odd, rows) == [("sad", Decimal("1.25"), "a"), (None, None, "b")]


def test_columns_that_are_left_out_get_their_defaults(
    postgres: PostgresServer, table: Create
) -> None:
    name = table(
        "id bigint GENERATED ALWAYS AS IDENTITY, a integer NOT NULL, "
        "b text NOT NULL DEFAULT 'none', twice integer GENERATED ALWAYS AS (a * 2) STORED"
    )

    rows = written(postgres, name, pa.record_batch({"a": pa.array([5, 6], pa.int32())}))

    assert rows == [(1, 5, "none", 10), (2, 6, "none", 12)]


def test_a_column_without_a_type_is_null(postgres: PostgresServer, table: Create) -> None:
    assert through(postgres, table, "jsonb", pa.nulls(3)) == [None] * 3


@pytest.mark.parametrize("size", [1, CHUNK_ROWS, CHUNK_ROWS + 1, 3 * CHUNK_ROWS + 7])
def test_many_rows_in_their_order(postgres: PostgresServer, table: Create, size: int) -> None:
    name = table("a bigint, b text, c numeric, n serial")
    numbers = np.arange(size)
    rows = pa.record_batch(
        {
            "a": pa.array(numbers, mask=numbers % 7 == 3),
            "b": [str(n) * (n % 5) for n in numbers],
            "c": pa.array(numbers),
        }
    )

    written(postgres, name, rows)

    rows_read = postgres.query(f"SELECT a, b, c::bigint FROM {name} ORDER BY n")

    assert rows_read == [(None if n % 7 == 3 else n, str(n) * (n % 5), n) for n in range(size)]


@given(
    values=st.lists(
        st.none() | st.decimals(min_value=-(10**29), max_value=10**29, places=8), min_size=1
    )
)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_decimal(postgres: PostgresServer, table: Create, values: list) -> None:
    name = table("v numeric", name=f"t{next(_numbers)}")

    rows = written(postgres, name, pa.record_batch({"v": pa.array(values, pa.decimal128(38, 8))}))

    assert [v for (v,) in rows] == values


WRONG_VALUES = [
    ("integer", pa.array([1, 2**31]), "column v (integer), from values of type int64"),
    ("bigint", pa.array([2**63], pa.uint64()), "uint64"),
    ("numeric(10,2)", pa.array([Decimal("1.234")]), "numeric(10,2)"),
    ("numeric(3,1)", pa.array([Decimal("1234.5")]), "overflow"),
    ("numeric(5,-2)", pa.array([Decimal(100), None, Decimal(150)]), "numeric(5,-2)"),
    ("numeric(5,-2)", pa.array([150]), "numeric(5,-2)"),
    ("timestamp(0)", pa.array([NOON]), "more than the column's 0 digits"),
    ("timestamp", pa.array([1], pa.timestamp("ns")), "timestamp[ns]"),
    ("timestamp", pa.array([-(2**63)], pa.timestamp("us")), "out of range"),
    ("date", pa.array([-(2**31)], pa.date32()), "out of range"),
    ("date", pa.array([-(2**31) + 10957], pa.date32()), "out of range"),
    ("uuid", pa.array(["f81d4fae"]), "UUID"),
    ("uuid", pa.array(["g" * 32]), "UUID"),
    ("text", pa.array(["a\0b"]), "column v"),
    ("varchar(2)", pa.array(["abc"]), "too long"),
    ("varchar(2)", pa.array([None, "ab "]), "too long"),
    ("varchar(2)", pa.array(["ab "]).cast(pa.string_view()), "too long"),
    ("json", pa.array(["{"]), "json"),
    ("integer NOT NULL", pa.array([None, 1], pa.int32()), "NOT NULL"),
    ("text NOT NULL", pa.DictionaryArray.from_arrays([0, 1], ["a", None]), "column is NOT NULL"),
    ("integer CHECK (v > 0)", pa.array([0], pa.int32()), "constraint t_v_check"),
]


@pytest.mark.parametrize(
    ("kind", "values", "message"), WRONG_VALUES, ids=lambda parameter: str(parameter)[:24]
)
def test_a_value_that_does_not_fit_is_an_error(
    postgres: PostgresServer, table: Create, kind: str, values: pa.Array, message: str
) -> None:
    """It names table, column and type; nothing is rounded, and nothing is written."""
    name = table(f"v {kind}")
    driver = opened(postgres.dsn, name)

    with pytest.raises(RecordError) as caught:
        attempted(driver, pa.record_batch({"v": values}))

    assert message in str(caught.value)
    assert "table t" in str(caught.value)
    assert len(str(caught.value)) < 600
    assert postgres.query("SELECT count(*) FROM pg_prepared_xacts") == [(0,)]
    driver.close()


WRONG_TYPES = [
    ("integer", pa.string()),
    ("text", pa.int64()),
    ("xml", pa.string()),
    ("text", pa.binary()),
    ("real", pa.float64()),
    ("integer", pa.float64()),
    ("numeric", pa.float64()),
    ("timestamp", pa.timestamp("us", "UTC")),
    ("timestamptz", pa.timestamp("us")),
    ("integer[]", pa.list_(pa.int32())),
    ("jsonb", pa.struct([("a", pa.int32())])),
    ("inet", pa.string()),
    ("bytea", pa.string()),
    ("boolean", pa.int8()),
]


@pytest.mark.parametrize(("kind", "arrow"), WRONG_TYPES, ids=str)
def test_a_type_that_cannot_be_written_is_an_option_error(
    postgres: PostgresServer, table: Create, kind: str, arrow: pa.DataType
) -> None:
    driver = opened(postgres.dsn, table(f"v {kind}"))
    transaction = begun(driver)

    with pytest.raises(OptionError, match="column v: values of type") as caught:
        transaction.write(pa.record_batch({"v": pa.nulls(1, arrow)}))

    assert kind.split()[0] in str(caught.value)
    transaction.abort()
    driver.close()


def test_columns_that_do_not_fit_are_all_named(postgres: PostgresServer, table: Create) -> None:
    driver = opened(postgres.dsn, table("a integer NOT NULL, b text"))
    transaction = begun(driver)

    with pytest.raises(OptionError, match=r"no column 'c'.*column 'a' is NOT NULL"):
        transaction.write(pa.record_batch({"b": ["x"], "c": ["y"]}))

    transaction.abort()
    driver.close()
