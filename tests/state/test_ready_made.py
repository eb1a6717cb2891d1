"""The ready-made functions against plain Python, epoch after epoch."""

import datetime as dt
import math
from collections.abc import Iterable
from decimal import Context, Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_keyed_task import OneTask

from tallystick.errors import OptionError, RecordError
from tallystick.state.functions import aggregates as agg
from tallystick.state.functions import ready_made as ready
from tallystick.state.functions.ready_made import sessions
from tallystick.state.functions.vectorised import VectorisedFunction
from tests.examples import drawn

SCHEMA = pa.schema([("key", pa.string()), ("x", pa.int64()), ("name", pa.string())])
KEY = pa.schema([SCHEMA.field("key")])
RECORD = st.tuples(
    st.sampled_from([None, "a", "b", "cc"]),
    st.none() | st.integers(-9, 9),
    st.none() | st.sampled_from(["x", "y", ""]),
)
EPOCHS = st.lists(st.lists(RECORD, max_size=10), max_size=5)


def rows_of(records: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = [[record[at] for record in records] for at in range(len(SCHEMA))]
    arrays = [pa.array(c, field.type) for c, field in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def by_key(rows: Iterable[Any]) -> list[str]:
    return sorted(map(str, rows))


AGGREGATES = {
    "n": agg.count(),
    "total": agg.sum("x", "bigint"),
    "mean_of": agg.sum("x", "double"),
    "low": agg.minimum("x", "bigint"),
    "high": agg.maximum("x", "bigint"),
    "last": agg.last_value("name", "string"),
}


@pytest.mark.parametrize("emit", ["epoch", "record"])
@drawn(50)
@given(epochs=EPOCHS)
def test_aggregates_over_epochs(emit: str, epochs: list[list[tuple[Any, ...]]]) -> None:
    task = OneTask(ready.aggregate(AGGREGATES, each=emit, keep=["name"]), KEY)
    seen: dict[Any, list[tuple[Any, ...]]] = {}
    for records in epochs:
        rows_out = task.epoch(rows_of(records))

        after = []
        for key, x, name in records:
            seen.setdefault(key, []).append((x, name))
            xs = [x for x, _ in seen[key] if x is not None]
            values = {
                "n": len(seen[key]),
                "total": sum(xs) if xs else None,
                "mean_of": float(sum(xs)) if xs else None,
                "low": min(xs, default=None),
                "high": max(xs, default=None),
                "last": name,
            }
            after.append({"key": key, "name": name, **values})
        if emit == "record":
            assert rows_out == after
        else:
            assert by_key(rows_out) == by_key(list({row["key"]: row for row in after}.values()))


@pytest.mark.parametrize("emit", ["epoch", "record"])
@pytest.mark.parametrize("step", [1, -1])
def test_a_sum_beyond_bigint_is_refused(emit: str, step: int) -> None:
    task = OneTask(ready.aggregate({"total": agg.sum("x", "bigint")}, each=emit), KEY)
    most = 2**63 - 1 if step > 0 else -(2**63)

    rows_out = task.epoch(rows_of([("a", most - step, ""), ("a", step, ""), ("b", step, "")]))

    assert rows_out[-2 if emit == "epoch" else 1]["total"] == most
    with pytest.raises(RecordError, match=r"column 'x' for key \{'key': 'a'\} is beyond .* bigint"):
        task.epoch(rows_of([("b", step, ""), ("a", step, "")]))


FOLLOWING = {
    "total": agg.sum("x"),
    "low": agg.minimum("x"),
    "high": agg.maximum("x"),
    "last": agg.last_value("x"),
}
MOMENT = pa.timestamp("us", tz="UTC")


@pytest.mark.parametrize(
    ("kind", "total"),
    [
        (pa.int32(), pa.int64()),
        (pa.int64(), pa.int64()),
        (pa.float32(), pa.float64()),
        (pa.decimal128(10, 2), pa.decimal128(38, 2)),
    ],
)
@pytest.mark.parametrize("emit", ["epoch", "record"])
def test_types_that_are_not_said_are_those_of_the_column(
    emit: str, kind: pa.DataType, total: pa.DataType
) -> None:
    function = ready.aggregate(FOLLOWING, each=emit)
    rows = pa.record_batch({"key": ["a", "a"], "x": pa.array(["2", "1"]).cast(kind)})
    task = OneTask(function, KEY, rows.schema)
    expected = pa.schema([*KEY, ("total", total), *((n, kind) for n in ("low", "high", "last"))])

    assert function.output(KEY, rows.schema) == expected
    *_, last_row = task.epoch(rows)
    assert task.output[0].schema == expected
    assert last_row == {"key": "a", "total": 3, "low": 1, "high": 2, "last": 1}


def test_values_are_exact_beyond_what_a_double_holds() -> None:
    task = OneTask(ready.aggregate(FOLLOWING), KEY, SCHEMA)
    (row,) = task.epoch(rows_of([("a", 2**53, ""), ("a", 1, "")]))
    assert row["total"] == 2**53 + 1

    task = OneTask(ready.aggregate({"total": agg.sum("x", "double")}), KEY)
    (row,) = task.epoch(rows_of([("a", 2**53 + 1, "")]))
    assert row["total"] == 2.0**53, "a double that was asked for is as near as there is"


def test_extremes_are_moments_too_and_text_has_no_sum() -> None:
    extremes = {"low": agg.minimum("x"), "high": agg.maximum("x")}
    rows = pa.record_batch({"key": ["a", "a"], "x": pa.array([5000, 7000]).cast(MOMENT)})
    (row,) = OneTask(ready.aggregate(extremes), KEY, rows.schema).epoch(rows)
    assert row == {"key": "a", "low": moment(5), "high": moment(7)}

    with pytest.raises(OptionError, match=r"'s' of column 'name': .*string cannot be summed"):
        ready.aggregate({"s": agg.sum("name")}).output(KEY, SCHEMA)
    with pytest.raises(OptionError, match=r"type decimal.* cannot be summed or compared here"):
        ready.top_n(1, "x").output(KEY, pa.schema([("x", pa.decimal128(5, 2))]))


MOST = 10**38 - 1
DECIMALS = st.integers(-(10**37), 10**37) | st.integers(-9, 9) | st.sampled_from([2**64, -(2**64)])


@pytest.mark.parametrize("emit", ["epoch", "record"])
@drawn(50)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("ab"), st.none() | DECIMALS), max_size=4), max_size=3
    )
)
def test_decimals_are_added_and_compared_exactly(
    emit: str, epochs: list[list[tuple[str, int | None]]]
) -> None:
    columns = {name: one for name, one in FOLLOWING.items() if name != "last"}
    schema = pa.schema([KEY.field("key"), ("x", pa.decimal128(38, 2))])
    task = OneTask(ready.aggregate(columns, each=emit), KEY, schema)
    seen: dict[str, list[int]] = {}
    for records in epochs:
        cents = [None if x is None else Decimal(x).scaleb(-2, EXACT) for _, x in records]
        arrays = [pa.array([key for key, _ in records], pa.string())]
        arrays.append(pa.array(cents, schema.field("x").type))
        rows_out = task.epoch(pa.RecordBatch.from_arrays(arrays, schema=schema))

        after = []
        for key, x in records:
            xs = seen.setdefault(key, [])
            xs += [] if x is None else [x]
            values = (sum(xs), min(xs), max(xs)) if xs else (None,) * 3
            after.append((key, *values))
        if emit == "epoch":
            after = list({row[0]: row for row in after}.values())
        assert by_key(map(in_cents, rows_out)) == by_key(after)


EXACT = Context(prec=60)


def in_cents(row: dict[str, Any]) -> tuple[Any, ...]:
    key, *values = row.values()
    return (key, *(None if value is None else int(value.scaleb(2, EXACT)) for value in values))


@pytest.mark.parametrize("xs", [[MOST, 1], [-MOST, -1], [MOST, MOST], [-MOST, -MOST]])
def test_a_decimal_sum_of_too_many_digits_is_refused(xs: list[int]) -> None:
    kind = pa.decimal128(38, 0)
    rows = pa.record_batch({"key": ["a", "a"], "x": pa.array(map(Decimal, xs), kind)})
    task = OneTask(ready.aggregate({"total": agg.sum("x")}), KEY, rows.schema)
    (row,) = task.epoch(rows[:1])
    assert row["total"] == xs[0]
    with pytest.raises(RecordError, match=r"'x' for key \{'key': 'a'\} has more than 38 digits"):
        task.epoch(rows[1:])


@drawn(50)
@given(EPOCHS)
def test_only_the_first_row_of_a_key_passes(epochs: list[list[tuple[Any, ...]]]) -> None:
    task = OneTask(ready.deduplicate(), KEY)
    seen: set[Any] = set()
    for records in epochs:
        rows_out = task.epoch(rows_of(records))

        expected = []
        for key, x, name in records:
            if key not in seen:
                expected.append({"key": key, "x": x, "name": name})
            seen.add(key)
        assert rows_out == expected
        assert task.written == len(expected), "keys that are known cost nothing"


def test_a_key_that_was_forgotten_is_new_again() -> None:
    task = OneTask(ready.deduplicate(forget_after_ms=100), KEY)
    row = rows_of([("a", 1, "x")])

    assert len(task.epoch(row, timestamp_ms=1000)) == 1
    assert task.epoch(row, timestamp_ms=1099) == []
    assert task.epoch(rows_of([]), timestamp_ms=1100) == []
    assert task.entries == {}
    assert len(task.epoch(row, timestamp_ms=1101)) == 1


def test_a_key_that_is_due_to_be_forgotten_is_new_to_the_rows_of_that_epoch() -> None:
    task = OneTask(ready.deduplicate(forget_after_ms=100), KEY)
    row = rows_of([("a", 1, "x"), ("a", 2, "y")])

    outputs = [task.epoch(row, timestamp_ms=at) for at in (1000, 1100, 1199, 9000)]

    assert [[row_out["x"] for row_out in rows] for rows in outputs] == [[1], [1], [], [1]]
    assert task.epoch(rows_of([]), timestamp_ms=9099) == []
    assert task.entries, "it is remembered from the newest time on"


@drawn(50)
@given(EPOCHS, st.integers(1, 4))
def test_the_greatest_n(epochs: list[list[tuple[Any, ...]]], n: int) -> None:
    task = OneTask(ready.top_n(n, "x", "bigint"), KEY)
    seen: dict[Any, list[int]] = {}
    for records in epochs:
        rows_out = task.epoch(rows_of(records))

        for key, x, _ in records:
            seen.setdefault(key, []).extend([] if x is None else [x])
        expected = [
            {"key": key, "x": sorted(seen[key], reverse=True)[:n] or None}
            for key in {key for key, _, _ in records}
        ]
        assert by_key(rows_out) == by_key(expected)


def test_nan_is_above_all_numbers() -> None:
    schema = pa.schema([SCHEMA.field("key"), ("x", pa.float64())])
    task = OneTask(ready.top_n(2, "x"), KEY, schema)
    for xs, expected in (
        ([1.0, math.nan, 3.0, 2.0], [math.nan, 3.0]),
        ([math.nan, 9.0], [math.nan, math.nan]),
    ):
        columns = [pa.array(["a"] * len(xs)), pa.array(xs)]
        (row,) = task.epoch(pa.RecordBatch.from_arrays(columns, schema=schema))
        assert str(row["x"]) == str(expected)


@pytest.mark.parametrize(
    ("xs", "low", "high"),
    [
        ([1.0, math.nan], 1.0, math.nan),
        ([math.nan, 1.0], 1.0, math.nan),
        ([math.nan], math.nan, math.nan),
    ],
)
def test_extremes_beside_nan(xs: list[float], low: float, high: float) -> None:
    columns = {"low": agg.minimum("x"), "high": agg.maximum("x")}
    rows = pa.record_batch({"key": ["a"] * len(xs), "x": xs})
    (row,) = OneTask(ready.aggregate(columns), KEY, rows.schema).epoch(rows)
    assert str(row) == str({"key": "a", "low": low, "high": high})


def sessions_of(times: list[int], gap: int) -> list[list[int]]:
    merged: list[list[int]] = []
    for time in sorted(times):
        if merged and time - merged[-1][-1] <= gap:
            merged[-1].append(time)
        else:
            merged.append([time])
    return merged


def moment(time_ms: int) -> dt.datetime:
    return dt.datetime(1970, 1, 1, tzinfo=ZoneInfo("UTC")) + dt.timedelta(milliseconds=time_ms)


@drawn(80)
@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 30)), max_size=6),
            st.integers(0, 12),
        ),
        max_size=6,
    ),
    st.integers(1, 6),
)
def test_sessions_in_any_order_of_rows(
    epochs: list[tuple[list[tuple[str, int]], int]], gap: int
) -> None:
    """Rows after the watermark never come; what is emitted is what all rows together make."""
    task = OneTask(sessions(gap, "x"), KEY)
    watermark, seen, emitted = 0, {"a": [], "b": []}, []
    for records, step in [*epochs, ([], 100)]:
        in_time = [(key, time + watermark) for key, time in records]
        watermark += step
        for key, time in in_time:
            seen[key].append(time)

        emitted += task.epoch(
            rows_of([(key, time, "") for key, time in in_time]), watermark_ms=watermark
        )

        expected = [
            {"key": key, "start": moment(s[0]), "end": moment(s[-1]), "count": len(s)}
            for key, times in seen.items()
            for s in sessions_of(times, gap)
            if s[-1] + gap <= watermark
        ]
        assert by_key(emitted) == by_key(expected)
    assert task.entries == {}


def test_sessions_take_timestamps_and_refuse_rows_without() -> None:
    schema = pa.schema([("key", pa.string()), ("at", pa.timestamp("us", tz="UTC"))])
    times = pa.array([1_000_400, 1_001_400], schema.field("at").type)
    rows = pa.RecordBatch.from_arrays([pa.array(["a", "a"]), times], schema=schema)
    task = OneTask(sessions(1, "at"), KEY)

    assert task.epoch(rows, watermark_ms=1002) == []
    (window,) = task.epoch(rows[:0], watermark_ms=1003)

    assert window["count"] == 2
    assert window["end"] == moment(1001) + dt.timedelta(microseconds=400)
    for nanos in (1_700_000_000_000_000_000, -(1 << 63)):
        with pytest.raises(RecordError, match=f"sessions: column 'x': {nanos} ms since 1970"):
            OneTask(sessions(1, "x"), KEY).epoch(rows_of([("a", nanos, "")]))
    with pytest.raises(RecordError, match="sessions: column 'x': 1 rows have no time"):
        OneTask(sessions(1, "x"), KEY).epoch(rows_of([("a", None, "")]))
    with pytest.raises(OptionError, match="column 'name' is string, expected timestamps"):
        OneTask(sessions(1, "name"), KEY).epoch(rows_of([("a", 1, "")]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: agg.sum("x", "int"), "type 'int', expected 'bigint', 'double' or"),
        (lambda: agg.minimum("x", "string"), "type string cannot be summed or compared"),
        (lambda: ready.aggregate({}), "no columns"),
        (lambda: ready.aggregate({"n": agg.count()}, each="row"), "each='row'.*expected"),
        (lambda: ready.top_n(0, "x"), "n=0, expected at least 1"),
        (lambda: ready.deduplicate(0), "forget_after_ms=0, expected more than 0"),
        (lambda: sessions(0, "x"), "gap_ms=0, expected more than 0"),
        (lambda: sessions(2**62, "x"), "and at most 140,000 years"),
        (lambda: ready.deduplicate(2**63), "and at most 140,000 years"),
    ],
)
def test_what_cannot_work_is_refused(make: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


def test_a_column_of_another_type_is_named() -> None:
    task = OneTask(ready.aggregate({"n": agg.sum("name", "bigint")}), KEY)
    with pytest.raises(OptionError, match="column 'name' is string, but the function was made for"):
        task.epoch(rows_of([("a", 1, "z")]))


@pytest.mark.parametrize(
    "function",
    [
        ready.aggregate(AGGREGATES, keep=["name"]),
        ready.aggregate(
            {"n": agg.count(), "sum": agg.sum("x", "double")},
            each="record",
            keep=["x"],
        ),
        ready.deduplicate(),
        ready.top_n(2, "x", "bigint"),
        sessions(5, "x"),
    ],
)
def test_what_is_put_out_has_the_columns_that_were_told(function: VectorisedFunction) -> None:
    task = OneTask(function, KEY)
    rows = rows_of([("a", 1, "x"), ("a", 2, "y")])

    task.epoch(rows, watermark_ms=0)
    if not task.output:
        task.epoch(rows[:0], watermark_ms=100)

    assert [batch.schema for batch in task.output] == [function.output(KEY, SCHEMA)]


@pytest.mark.parametrize(
    ("function", "key", "message"),
    [
        (ready.aggregate({"x": agg.count()}), "x", "'x', and the key has one"),
        (
            ready.aggregate({"x": agg.count()}, keep=["x"]),
            "key",
            "'x', and the rows' columns to",
        ),
        (ready.top_n(2, "x", "bigint"), "x", "'x', and the key has one"),
        (sessions(5, "x"), "count", "'count', and the key has one"),
    ],
)
def test_a_column_does_not_take_the_place_of_another(
    function: VectorisedFunction, key: str, message: str
) -> None:
    with pytest.raises(OptionError, match=f"puts out a column {message}"):
        function.output(pa.schema([(key, pa.int64())]), SCHEMA)


def test_a_column_of_the_key_may_be_kept_as_well() -> None:
    function = ready.aggregate({"n": agg.count()}, keep=["key"])
    assert function.output(KEY, SCHEMA).names == ["key", "n"]
