"""Temporal joins against plain Python: any order of arrival, any epochs, any parallelism."""

from typing import Any

import pyarrow as pa
import pytest
from co_keyed_tasks import CoKeyedTasks
from hypothesis import given
from hypothesis import strategies as st

from tallystick.errors import OptionError
from tallystick.state.functions import joins, row_state
from tallystick.state.functions.inputs import KeyedInput, KeyedInputs
from tallystick.state.functions.joins import temporal_join
from tests.examples import drawn

ORDERS = pa.schema([("coin", pa.string()), ("amount", pa.int64()), ("at", pa.int64())])
RATES = pa.schema([("coin", pa.string()), ("rate", pa.int64()), ("at", pa.int64())])
INPUTS = KeyedInputs(
    [
        KeyedInput("orders", ORDERS, ("coin",), "at"),
        KeyedInput("rates", RATES, ("coin",), "at"),
    ]
)
ROW = st.tuples(
    st.integers(0, 1),
    st.sampled_from([None, "a", "b"]),
    st.integers(-20, 20),
    st.none() | st.integers(0, 99),
)
EPOCHS = st.lists(
    st.tuples(st.lists(ROW, max_size=14), st.integers(0, 12), st.sampled_from([1, 3, 16])),
    max_size=6,
)
Record = tuple[int, str | None, int, int | None]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_state, "OPEN_ROWS", 2)
    monkeypatch.setattr(row_state, "CHUNK_BYTES", 100)
    monkeypatch.setattr(row_state, "CHUNK_ROWS", 3)
    monkeypatch.setattr(row_state, "LOAD_BYTES", 150)
    monkeypatch.setattr(joins, "KEYS_MAX", 2)
    monkeypatch.setattr(joins, "OUTPUT_ROWS", 3)


def arrival(record: Record) -> tuple[int, dict[str, Any]]:
    side, coin, at, x = record
    return side, {"coin": coin, "at": at, ("amount", "rate")[side]: x}


@pytest.mark.parametrize("how", ["inner", "left"])
@drawn(40)
@given(epochs=EPOCHS)
def test_each_left_row_gets_the_version_of_its_time(how: str, epochs: list[Any]) -> None:
    """Of equal times the later arrived; late orders do not count; one version a key stays.

    A late version counts for what comes out after its epoch, as far as it is the newest.
    """
    tasks = CoKeyedTasks(temporal_join("orders", "rates", how=how), INPUTS)
    watermark: int | None = None
    waiting: list[Record] = []
    rates: list[Record] = []
    for records, advance, parallelism in [*epochs, ([], 200, 2), ([], 0, 3)]:
        rows_out = tasks.epoch(
            [arrival(record) for record in records], watermark_ms=watermark, parallelism=parallelism
        )

        until = -(10**9) if watermark is None else watermark
        waiting += [record for record in records if record[0] == 0 and record[2] > until]
        expected = []
        for _, coin, at, amount in (payment for payment in waiting if payment[2] <= until):
            fitting = [rate for rate in rates if rate[1] == coin and rate[2] <= at]
            newest = max(fitting, key=lambda rate: rate[2], default=None)
            newest = newest and [rate for rate in fitting if rate[2] == newest[2]][-1]
            if newest or how == "left":
                row = {"coin": coin, "amount": amount, "at": at}
                row |= {"rate": newest and newest[3], "rates_at": newest and newest[2]}
                expected.append(row)
        waiting = [record for record in waiting if record[2] > until]
        rates += [record for record in records if record[0] == 1]
        assert tasks.late == sum(record[0] == 0 and record[2] <= until for record in records)
        assert sorted(map(str, rows_out)) == sorted(map(str, expected))
        watermark = (-30 if watermark is None else watermark) + advance
    assert held_rows(tasks, tasks.fields["left"].state_id) == []
    # A row of the same time that arrived in an earlier epoch may stay until there is a newer one.
    newest = {rate_row[1]: rate_row[2] for rate_row in sorted(rates, key=lambda rate: rate[2])}
    assert set(held_rows(tasks, tasks.fields["right"].state_id)) == set(newest.items())


def held_rows(tasks: CoKeyedTasks, state_id: int) -> list[tuple[str | None, int]]:
    """The coin and the time of each row that is left, from heads and chunks."""
    timers_by_key: list[tuple[str | None, int]] = []
    for key, value in tasks.entries.items():
        if key[2] == state_id:
            rows, sizes = tasks.key.decode_start(pa.array([key[3:]], pa.binary()))
            codec = row_state._CHUNK if sizes[0] < len(key) - 3 else row_state._HEAD
            times = codec.decode(pa.array([value], pa.binary())).column(0)[0].as_py()
            timers_by_key += [(rows.column(0)[0].as_py(), time) for time in times or []]
    return timers_by_key


def test_a_rate_that_nobody_asks_for_is_forgotten_when_there_is_a_newer_one() -> None:
    tasks = CoKeyedTasks(temporal_join("orders", "rates"), INPUTS)
    tasks.epoch([arrival((1, "a", at, at)) for at in range(10)])
    for watermark in range(12):
        tasks.epoch([], watermark_ms=watermark)
        row_count = len(held_rows(tasks, tasks.fields["right"].state_id))
        needed = max(1, 10 - watermark)
        assert needed <= row_count < needed + 3, "a chunk of three is cleaned at its last row"
    assert row_count == 1
    timers = [key for key in tasks.entries if key[2] == 0xFC]
    assert timers == [], "nothing to wait for"


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_late_version_counts_for_rows_to_come_if_it_is_newer_than_the_kept_one(
    is_apart: bool,
) -> None:
    """As in Flink's TemporalRowTimeJoinOperator, where versions are never late."""
    tasks = CoKeyedTasks(temporal_join("orders", "rates", how="left"), INPUTS)
    tasks.epoch([arrival((1, "a", 10, 1)), arrival((0, "a", 20, 0))])
    assert [row["rate"] for row in tasks.epoch([], watermark_ms=99)] == [1]
    late = [arrival((1, "a", at, rate)) for at, rate in ((95, 4), (5, 2), (95, 3), (50, 9))]
    for part in [[late_row] for late_row in late] if is_apart else [late]:
        assert tasks.epoch(part, watermark_ms=99) == []
    assert tasks.late == 0
    tasks.epoch([arrival((0, "a", 94, 0)), arrival((0, "a", 100, 0))], watermark_ms=99)
    assert tasks.late == 1, "orders are late as ever"
    assert [row["rate"] for row in tasks.epoch([], watermark_ms=100)] == [3]
    assert held_rows(tasks, tasks.fields["right"].state_id) == [("a", 95)]
    assert [key for key in tasks.entries if key[2] == 0xFC] == [], "no timer is left"


def test_only_two_kinds_are_there() -> None:
    with pytest.raises(OptionError, match=r"temporal_join.how='full'.: expected 'inner' or 'left'"):
        temporal_join("orders", "rates", how="full")
