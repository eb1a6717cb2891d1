"""Each aggregate of windows against plain Python, made of parts in any way."""

import itertools
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_keyed_task import OneTask

import tallystick as ts
from tallystick.errors import OptionError, RecordError
from tallystick.state.functions.aggregates import Aggregate
from tallystick.state.functions.sketches import _buckets, _entries, _hashes, _middles
from tests.examples import drawn

KEY = pa.schema([("key", pa.string())])
END_MS = 10**9


def one_window(
    aggregates: dict[str, Aggregate], x: pa.Array, cuts: list[int], times: list[int] | None = None
) -> dict[str, Any]:
    """The values of one window whose rows come in several epochs, and in panes of 10 ms."""
    times = [at % 100 for at in range(len(x))] if times is None else times
    rows = pa.record_batch({"key": ["k"] * len(x), "ts": pa.array(times, pa.int64()), "x": x})
    function = ts.windowed(ts.hopping(100, every=10), aggregates)
    task = OneTask(function, KEY, rows.schema, event_time="ts")
    edges = [0, *sorted(min(cut, len(x)) for cut in cuts), len(x)]
    for first, stop in itertools.pairwise(edges):
        task.epoch(rows[first:stop])
    rows_out = task.epoch(rows[:0], watermark_ms=END_MS)
    (window,) = [row for row in rows_out if row["window_start"].timestamp() == 0]
    return window


NUMBERS = st.lists(st.none() | st.integers(-50, 50), min_size=1, max_size=30)
CUTS = st.lists(st.integers(0, 30), max_size=3)


@drawn(60)
@given(xs=NUMBERS, cuts=CUTS, data=st.data())
def test_first_last_and_collected_values_are_in_time(
    xs: list[int | None], cuts: list[int], data: Any
) -> None:
    times = data.draw(st.lists(st.integers(0, 99), min_size=len(xs), max_size=len(xs)))
    aggregates = {
        "first": ts.first_value("x"),
        "last": ts.last_value("x"),
        "all": ts.collect("x"),
    }

    window = one_window(aggregates, pa.array(xs, pa.int64()), cuts, times)

    order = sorted(range(len(xs)), key=lambda at: (times[at], at))
    assert window["first"] == xs[order[0]]
    assert window["last"] == xs[order[-1]]
    assert window["all"] == [xs[at] for at in order if xs[at] is not None]


@drawn(30)
@given(xs=st.lists(st.none() | st.text(max_size=3), min_size=1, max_size=20), cuts=CUTS)
def test_texts_too(xs: list[str | None], cuts: list[int]) -> None:
    aggregates = {
        "last": ts.last_value("x"),
        "all": ts.collect("x"),
        "distinct": ts.approximate_distinct_count("x"),
    }

    window = one_window(aggregates, pa.array(xs, pa.string()), cuts)

    assert window["last"] == xs[-1]
    assert window["all"] == [x for x in xs if x is not None]
    assert abs(window["distinct"] - len({*xs} - {None})) <= 1  # two may share a register


@drawn(60)
@given(
    xs=st.lists(
        st.none() | st.floats(-1e9, 1e9, allow_subnormal=False) | st.integers(-9, 9).map(float),
        min_size=1,
        max_size=40,
    ),
    cuts=CUTS,
)
def test_quantiles_are_within_their_error(xs: list[float | None], cuts: list[int]) -> None:
    shares = [0.0, 0.25, 0.5, 0.9, 1.0]

    quantiles = one_window({"q": ts.quantiles("x", at=shares)}, pa.array(xs, pa.float64()), cuts)[
        "q"
    ]

    there = sorted(x for x in xs if x is not None)
    if not there:
        assert quantiles is None
        return
    for share, value in zip(shares, quantiles, strict=True):
        exact = there[max(math.ceil(share * len(there)), 1) - 1]
        assert abs(value - exact) <= 0.004 * abs(exact)


def test_quantiles_of_what_is_no_common_number() -> None:
    x = pa.array([math.nan, math.inf, -math.inf, 0.0, -0.0], pa.float64())

    quantiles = one_window({"q": ts.quantiles("x", at=[0.2, 0.4, 0.6, 0.8, 1])}, x, [])["q"]

    assert quantiles[:4] == [-math.inf, 0.0, 0.0, math.inf]
    assert math.isnan(quantiles[4])


def test_buckets_are_in_order_and_stand_for_their_values() -> None:
    values = np.sort(np.concatenate([np.random.default_rng(1).lognormal(0, 20, 10_000), [0.0]]))
    values = np.concatenate([-values[::-1], values])
    buckets = _buckets(values)

    assert (np.diff(buckets) >= 0).all()
    assert (np.abs(_middles(buckets) - values) <= np.abs(values) / 256 + 1e-300).all()


@pytest.mark.parametrize("count", [0, 1, 10, 1000, 10_000, 300_000])
@pytest.mark.parametrize("kind", ["number", "text"])
def test_distinct_counts_are_within_their_error(count: int, kind: str) -> None:
    numbers = np.random.default_rng(count).permutation(np.arange(3 * count + 1) % max(count, 1))
    numbers = pa.array(numbers[: 3 * count], pa.int64())
    x = numbers.cast(pa.string()) if kind == "text" else numbers
    x = pa.concat_arrays([x, pa.nulls(1, x.type)])

    estimate = one_window({"n": ts.approximate_distinct_count("x")}, x, [count])["n"]

    assert abs(estimate - count) <= 4 * 0.01625 * count  # four times the standard error
    assert count > 100 or estimate == count


def test_equal_numbers_of_all_types_are_one_value_and_the_hash_is_frozen() -> None:
    """What a checkpoint holds is made of these hashes."""
    counts = {"n": ts.approximate_distinct_count("x")}
    kinds = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
    states = set()
    for kind in kinds:
        rows = pa.record_batch(
            {"key": ["k"] * 3, "ts": pa.array([1] * 3), "x": pa.array([1, -1, 1], kind)}
        )
        task = OneTask(ts.windowed(ts.tumbling(10), counts), KEY, rows.schema, event_time="ts")
        task.epoch(rows)
        states.add(tuple(sorted(task.entries.items())))

    assert len(states) == 1
    (value,) = [value for value in dict(*states).values() if value]
    assert value.hex() == FROZEN
    zeros = pa.array([0.0, -0.0, math.nan, -math.nan], pa.float64())
    assert one_window(counts, zeros, [])["n"] == 2
    decimals = pa.array([Decimal("1.00"), Decimal("-1.00"), Decimal("1.00")], pa.decimal128(20, 2))
    assert one_window(counts, decimals, [])["n"] == 2


FROZEN = "00010a00000001014402000141930300"


def mixed(bits: int) -> int:
    """The next number of splitmix64, as its author has it."""
    bits = (bits + 0x9E3779B97F4A7C15) % 2**64
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    return bits ^ bits >> 31


def fnv_1a(data: bytes) -> int:
    code = 0xCBF29CE484222325
    for byte in data:
        code = (code ^ byte) * 0x100000001B3 % 2**64
    return code


@given(x=st.integers(-(2**63), 2**63 - 1) | st.text(max_size=9))
def test_registers_are_those_of_the_documented_hash(x: int | str) -> None:
    values = pa.array([x])
    code = mixed(fnv_1a(x.encode()) if isinstance(x, str) else x % 2**64)

    bits = f"{code:064b}"
    zeros = len(bits[12:]) - len(bits[12:].lstrip("0"))

    assert _entries(_hashes(values)).tolist() == [int(bits[:12], 2) << 6 | zeros + 1]


def test_averages() -> None:
    average = {"mean": ts.average("x")}

    assert one_window(average, pa.array([1, 2, None], pa.int64()), [1])["mean"] == 1.5
    decimals = pa.array([Decimal("0.10"), Decimal("0.30")], pa.decimal128(10, 2))
    assert one_window(average, decimals, [1])["mean"] == 0.2
    assert one_window(average, pa.nulls(2, pa.int32()), [1])["mean"] is None


def test_a_sum_that_its_type_does_not_hold_stops_with_the_key() -> None:
    with pytest.raises(RecordError, match=r"for key {'key': 'k'} is beyond what bigint holds"):
        one_window({"s": ts.sum("x")}, pa.array([2**62, 2**62], pa.int64()), [1])


def spread() -> Aggregate:
    """Greatest less least value, as a user would write it."""

    def add(batch: ts.KeyedBatch) -> dict[str, Any]:
        return {"low": batch.min("x"), "high": batch.max("x")}

    def merge(batch: ts.KeyedBatch) -> dict[str, Any]:
        return {"low": batch.min("low"), "high": batch.max("high")}

    def result(lines: pa.RecordBatch) -> pa.Array:
        return pc.subtract(lines["high"], lines["low"])

    return ts.vectorised_aggregate(
        add=add,
        merge=merge,
        result=result,
        accumulators="low bigint, high bigint",
        type="bigint",
        reads=["x"],
    )


@drawn(30)
@given(xs=NUMBERS, cuts=CUTS)
def test_an_aggregate_of_ones_own(xs: list[int | None], cuts: list[int]) -> None:
    window = one_window({"n": ts.count(), "spread": spread()}, pa.array(xs, pa.int64()), cuts)

    there = [x for x in xs if x is not None]
    assert window["spread"] == (max(there) - min(there) if there else None)
    assert window["n"] == len(xs)


def wrong(accumulators: dict[str, Any]) -> Aggregate:
    return ts.vectorised_aggregate(
        add=lambda _: accumulators,
        merge=lambda _: accumulators,
        result=lambda lines: lines.column(0),
        accumulators="n bigint",
        type="bigint",
        reads=[],
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: one_window({"s": ts.average("x")}, x, []), "'s' of column 'x'.*be summed"),
        (lambda x: one_window({"s": ts.sum("x")}, x, []), "'s' of column 'x'.*be summed"),
        (lambda x: one_window({"s": ts.quantiles("x", at=[1])}, x, []), "be summed: expected num"),
        (lambda _: ts.quantiles("x", at=[]), "at=.*from 0 to 1"),
        (lambda _: ts.quantiles("x", at=[1.5]), "at=.*from 0 to 1"),
        (lambda _: ts.aggregate({"m": ts.average("x")}), "'m' is an aggregate of windows only"),
        (lambda x: one_window({"w": wrong({"m": x})}, x, []), "returned the columns .*'m'"),
        (lambda x: one_window({"w": wrong({"n": x[:0]})}, x, []), "has 0 values"),
    ],
)
def test_mistakes_are_told(make: Callable[[Any], object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make(pa.array(["a"]))


def test_the_sum_of_decimals_in_a_greater_scale_is_their_sum_or_an_error() -> None:
    """Arrow casts in 128 bits: this number came out as another one of 23 digits."""
    rows = pa.schema([("u", pa.string()), ("d", pa.decimal128(38, 7))])
    total = ts.aggregate({"x": ts.sum("d", type="decimal(38, 15)")})
    task = OneTask(total, pa.schema([("u", pa.string())]), rows)

    (row,) = task.epoch(pa.record_batch([["a"], pa.array([Decimal(5)], rows.types[1])], rows))
    assert row["x"] == 5
    wide = pa.array([Decimal("8916254131233420082051788.8029506")], rows.types[1])
    with pytest.raises(OptionError, match="does not fit in precision 38"):
        task.epoch(pa.record_batch([["a"], wide], rows))
