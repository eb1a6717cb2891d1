"""Interval and window joins against nested loops: any order, any epochs, any parallelism.

`JOIN_EXAMPLES` says how many of each kind of join are drawn; `make stress` draws 100.
"""

import os
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from co_keyed_tasks import CoKeyedTasks, one_table
from hypothesis import given, settings
from hypothesis import strategies as st

from tallystick.errors import OptionError, RecordError
from tallystick.ops.state_table import schema_of, table_of
from tallystick.state.catalog import StepState
from tallystick.state.compatibility import settle
from tallystick.state.functions import joins, row_state
from tallystick.state.functions.inputs import KeyedInput, KeyedInputs
from tallystick.state.functions.joins import interval_join, window_join
from tallystick.state.overlay import ENTRIES

ORDERS = pa.schema(
    [("id", pa.string()), ("part", pa.int32()), ("amount", pa.int64()), ("at", pa.int64())]
)
PAYMENTS = pa.schema(
    [
        ("order", pa.string()),
        ("part", pa.int32()),
        ("amount", pa.float64()),
        ("tags", pa.list_(pa.string())),
        ("paid", pa.timestamp("us", tz="UTC")),
    ]
)
INPUTS = KeyedInputs(
    [
        KeyedInput("orders", ORDERS, ("id", "part"), "at"),
        KeyedInput("payments", PAYMENTS, ("order", "part"), "paid"),
    ]
)
EXAMPLES = int(os.environ.get("JOIN_EXAMPLES", "6"))
HOWS = ["inner", "left", "right", "full"]
ROW = st.tuples(
    st.integers(0, 1),
    st.sampled_from([None, "a", "b", "ü", "a\0"]),
    st.integers(-20, 20),
    st.none() | st.integers(0, 3),
)
EPOCHS = st.lists(
    st.tuples(
        st.lists(ROW, max_size=14),
        st.integers(0, 12),  # the watermark's advance
        st.sampled_from([1, 2, 3, 16]),
        st.sampled_from([None, None, 5, 16, 40]),
    ),
    max_size=6,
)
Record = tuple[int, str | None, int, int | None]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads, chunks, batches and visits as small as they get, so that there are several of each."""
    monkeypatch.setattr(row_state, "OPEN_ROWS", 2)
    monkeypatch.setattr(row_state, "CHUNK_BYTES", 100)
    monkeypatch.setattr(row_state, "CHUNK_ROWS", 3)
    monkeypatch.setattr(row_state, "LOAD_BYTES", 150)
    monkeypatch.setattr(joins, "OUTPUT_ROWS", 3)
    monkeypatch.setattr(joins, "KEYS_MAX", 2)


def arrival(record: Record) -> tuple[int, dict[str, Any]]:
    side, key, time, x = record
    if side == 0:
        return 0, {"id": key, "part": 1, "amount": x, "at": time}
    tags = None if x is None else [str(x)] * x
    amount = None if x is None else float(x)
    return 1, {"order": key, "part": 1, "amount": amount, "tags": tags, "paid": time * 1000}


def joined(left_row: Record | None, right: Record | None) -> dict[str, Any]:
    """A row of output; moments as numbers."""
    one = left_row or right
    assert one is not None
    row: dict[str, Any] = {"id": one[1], "part": 1}
    row |= {"amount": left_row and left_row[3], "at": left_row and left_row[2]}
    paid = arrival(right)[1] if right else dict.fromkeys(PAYMENTS.names)
    return row | {
        "order": paid["order"],
        "payments_amount": paid["amount"],
        "tags": paid["tags"],
        "paid": paid["paid"],
    }


@pytest.mark.parametrize("how", HOWS)
@settings(deadline=None, max_examples=EXAMPLES)
@given(epochs=EPOCHS)
def test_a_join_that_carries_some_columns_joins_the_same_rows(how: str, epochs: Any) -> None:
    """Times and keys need not be among them; a side may carry none at all."""
    whole = CoKeyedTasks(interval_join("orders", "payments", lower=-3, upper=2, how=how), INPUTS)
    orders, payments = INPUTS.inputs
    some = KeyedInputs([replace(orders, carried=("amount",)), replace(payments, carried=())])
    lean = CoKeyedTasks(interval_join("orders", "payments", lower=-3, upper=2, how=how), some)
    watermark: int | None = None
    for records, advance, parallelism, _ in epochs:
        rows = [arrival(record) for record in records]
        settings = {"watermark_ms": watermark, "parallelism": parallelism}
        expected = [
            {name: row[name] for name in ("id", "part", "amount")}
            for row in whole.epoch(rows, **settings)
        ]
        assert plain(lean.epoch(rows, **settings)) == plain(expected)
        watermark = (-20 if watermark is None else watermark) + advance


def plain(rows: list[dict[str, Any]]) -> Counter[str]:
    def number(value: Any) -> Any:
        return round(value.timestamp() * 1_000_000) if hasattr(value, "timestamp") else value

    return Counter(str({name: number(value) for name, value in row.items()}) for row in rows)


class Oracle:
    """A join by nested loops over all rows that were not late.

    Args:
        ends: whether two rows match, and when no partner of one can come any more.
        how: of the join.
    """

    def __init__(self, matches: Any, end: Any, how: str) -> None:
        self._matches, self._end, self._how = matches, end, how
        self._rows: list[Record] = []
        self._alone: set[int] = set()

    def epoch(self, records: list[Record], watermark: int | None) -> list[dict[str, Any]]:
        until = -(10**9) if watermark is None else watermark
        first = len(self._rows)
        self._rows += [record for record in records if record[2] > until]
        joined_rows, has_partner = [], set[int]()
        for i, left_row in enumerate(self._rows):
            for j, right in enumerate(self._rows):
                is_pair = (left_row[0], right[0]) == (0, 1) and left_row[1] == right[1]
                if is_pair and self._matches(left_row[2], right[2]):
                    has_partner |= {i, j}
                    if max(i, j) >= first:
                        joined_rows.append(joined(left_row, right))
        for i, row in enumerate(self._rows):
            is_outer = self._how == "full" or self._how == ["left", "right"][row[0]]
            if is_outer and i not in has_partner | self._alone and self._end(row) <= until:
                self._alone.add(i)
                joined_rows.append(joined(*((row, None) if row[0] == 0 else (None, row))))
        return joined_rows


def run(function: Any, oracle: Oracle, epochs: list[Any], own: tuple[str, ...] = ()) -> None:
    tasks = CoKeyedTasks(function, INPUTS)
    watermark: int | None = None
    last = [([], 200, 2, None), ([], 0, 3, None)]
    for records, advance, parallelism, max_parallelism in [*epochs, *last]:
        if max_parallelism is not None:
            tasks.migrate(max_parallelism)
        rows_out = tasks.epoch(
            [arrival(record) for record in records],
            watermark_ms=watermark,
            parallelism=min(parallelism, tasks.max_parallelism),
        )
        assert all(count <= joins.OUTPUT_ROWS for count in tasks.batch_rows)
        expected = oracle.epoch(records, watermark)
        kept = [{k: v for k, v in row.items() if k not in own} for row in rows_out]
        assert plain(kept) == plain(expected)
        watermark = (-30 if watermark is None else watermark) + advance
    assert tasks.entries == {}, "the watermark has passed everything"


@pytest.mark.parametrize("how", HOWS)
@settings(deadline=None, max_examples=EXAMPLES)
@given(epochs=EPOCHS, bounds=st.tuples(st.integers(-15, 15), st.integers(0, 12)))
def test_an_interval_join_is_that_of_nested_loops(
    how: str, epochs: list[Any], bounds: tuple[int, int]
) -> None:
    """Late rows, equal times, null keys, keys of other groups, bounds that exclude zero too."""
    lower, upper = bounds[0], bounds[0] + bounds[1]
    function = interval_join("orders", "payments", lower=lower, upper=upper, how=how)

    def matches(left_time: int, right: int) -> bool:
        return lower <= right - left_time <= upper

    oracle = Oracle(matches, lambda row: row[2] + (upper if row[0] == 0 else -lower), how)
    run(function, oracle, epochs)


@pytest.mark.parametrize("how", HOWS)
@settings(deadline=None, max_examples=EXAMPLES)
@given(epochs=EPOCHS, size=st.integers(1, 15), offset=st.integers(-3, 20))
def test_a_window_join_is_that_of_nested_loops(
    how: str, epochs: list[Any], size: int, offset: int
) -> None:
    function = window_join("orders", "payments", size=size, offset=offset, how=how)

    def window(time: int) -> int:
        return (time - offset) // size

    def end(row: Record) -> int:
        return (window(row[2]) + 1) * size + offset - 1

    oracle = Oracle(lambda one, two: window(one) == window(two), end, how)
    run(function, oracle, epochs, own=("window_start", "window_end"))


def test_a_window_says_where_it_begins_and_ends() -> None:
    function = window_join("orders", "payments", size="1 second", offset=100, how="full")
    tasks = CoKeyedTasks(function, INPUTS)
    rows = [(0, "a", 1_099, 1), (0, "a", 1_100, 2), (1, "a", 2_099, 3), (1, "a", 2_100, 3)]
    rows_out = tasks.epoch([arrival(row) for row in rows])
    rows_out += tasks.epoch([], watermark_ms=5_000)

    starts = [
        (row["window_start"].timestamp(), row["window_end"].timestamp(), row["at"])
        for row in rows_out
    ]
    assert starts == [(1.1, 2.1, 1_100), (0.1, 1.1, 1_099), (2.1, 3.1, None)]


def test_rows_of_a_key_are_in_its_head_or_in_chunks_by_time() -> None:
    """The tests above would see nothing of chunks if there were none."""
    tasks = CoKeyedTasks(interval_join("orders", "payments", lower=0, upper=5), INPUTS)
    tasks.epoch([arrival((0, "a", at, at)) for at in range(7, 0, -1)])
    tasks.epoch([arrival((0, "a", 8, 8))])
    kinds = sorted(len(key) for key in tasks.entries if key[2] == tasks.fields["left"].state_id)
    assert kinds == [kinds[0], *[kinds[0] + 8] * 2], "a head, and two chunks"

    (pair,) = tasks.epoch([arrival((1, "a", 6, 1))], watermark_ms=5)[:1]
    assert pair["at"] in range(1, 7)
    written = {row["at"] for row in tasks.epoch([arrival((1, "a", 9, 1))], watermark_ms=5)}
    assert written == {4, 5, 6, 7, 8}


def test_what_a_join_cannot_go_by() -> None:
    def make(function: Any, rows: pa.Schema = INPUTS.columns) -> Any:
        return function.make(rows)

    with pytest.raises(OptionError, match="lower='1 hour' is after upper=5"):
        interval_join("orders", "payments", lower="1 hour", upper=5)
    with pytest.raises(OptionError, match="upper='soon': expected whole ms from 0, or a text"):
        interval_join("orders", "payments", lower="-1 hour", upper="soon")
    with pytest.raises(OptionError, match=r"lower=.* more than 140,000 years"):
        interval_join("orders", "payments", lower=-(1 << 60), upper=0)
    with pytest.raises(OptionError, match="window_join: size=0: expected more than 0"):
        window_join("orders", "payments", size=0)
    with pytest.raises(OptionError, match=r"window_join.how='outer'.: expected 'inner'"):
        window_join("orders", "payments", size=1, how="outer")
    with pytest.raises(OptionError, match="interval_join: there is no input 'bids'"):
        make(interval_join("orders", "bids", lower=0, upper=1))
    with pytest.raises(OptionError, match="interval_join: the step has a single input"):
        make(interval_join("orders", "payments", lower=0, upper=1), ORDERS)
    with pytest.raises(OptionError, match="both sides are 'orders'"):
        make(interval_join("orders", "orders", lower=0, upper=1))
    taken = KeyedInputs(
        [
            KeyedInput("orders", ORDERS.append(pa.field("b_at", pa.int8())), ("id",), "at"),
            KeyedInput("b", ORDERS, ("id",), "at"),
        ]
    )
    with pytest.raises(OptionError, match="the output would have 'b_at' twice: rename the column"):
        make(interval_join("orders", "b", lower=0, upper=1), taken.columns)
    nested = pa.schema([("id", pa.string()), ("s", pa.struct([("x", pa.int8())]))])
    stored = KeyedInputs([KeyedInput("orders", nested, ("id",)), KeyedInput("b", nested, ("id",))])
    with pytest.raises(OptionError, match="interval_join, input 'orders', column 's' is struct"):
        make(interval_join("orders", "b", lower=0, upper=1), stored.columns)


def test_bounds_are_texts_too_and_both_are_included() -> None:
    function = interval_join("orders", "payments", lower="-1 second", upper="2 milliseconds")
    tasks = CoKeyedTasks(function, INPUTS)
    times = [-1001, -1000, 0, 2, 3]
    rows_out = tasks.epoch(
        [arrival((0, "a", 0, 1)), *(arrival((1, "a", time, None)) for time in times)]
    )
    assert sorted(row["paid"].timestamp() for row in rows_out) == [-1.0, 0.0, 0.002]


def test_a_row_without_a_time_is_refused() -> None:
    tasks = CoKeyedTasks(interval_join("orders", "payments", lower=0, upper=1), INPUTS)
    with pytest.raises(RecordError, match="input 'orders': 1 rows have no event time"):
        tasks.epoch([(0, {"id": "a", "at": None})])


def test_a_column_of_another_type_is_refused_by_name_of_its_side() -> None:
    """Rows of other columns would be read from the state as something else."""
    function = interval_join("orders", "payments", lower=0, upper=1)
    tasks = CoKeyedTasks(function, INPUTS)
    base = StepState("step", 16, 1, tasks.key.schema_text, 1, tuple(tasks.fields.values()), 3)
    other = ORDERS.set(2, pa.field("amount", pa.float64()))
    changed = KeyedInputs([KeyedInput("orders", other, ("id", "part"), "at"), INPUTS.inputs[1]])
    message = (
        r"holds rows of a join \(interval_join, inner side\) with the columns 'amount bigint, at"
    )
    with pytest.raises(OptionError, match=message):
        settle("step", function.make(changed.columns).declared(tasks.key), base)
    outer = interval_join("orders", "payments", lower=0, upper=1, how="left").make(INPUTS.columns)
    with pytest.raises(OptionError, match=message):  # who had a partner is not noted
        settle("step", outer.declared(tasks.key), base)
    wider = interval_join("orders", "payments", lower=-9, upper=9).make(INPUTS.columns)
    assert settle("step", wider.declared(tasks.key), base)[0] == base.fields


def test_read_state_shows_the_rows_of_each_side() -> None:
    tasks = CoKeyedTasks(interval_join("orders", "payments", lower=0, upper=5), INPUTS)
    rows = [(0, "a", at, None) for at in range(7)] + [(1, "b", 3, 2), (1, "a", 99, None)]
    tasks.epoch([arrival(row) for row in rows])
    tasks.epoch([arrival((0, "a", 7, None))])
    keys = sorted(tasks.entries)
    entries = [pa.array(keys, pa.binary()), pa.array([tasks.entries[key] for key in keys])]
    step = StepState("step", 16, 1, tasks.key.schema_text, 1, tuple(tasks.fields.values()), 3)

    table = table_of(step, pa.RecordBatch.from_arrays(entries, schema=ENTRIES))

    assert table.schema == schema_of(step)
    shown = {row["id"]: row for row in table.to_pylist()}
    assert sorted(row["at"] for row in shown["a"]["left"]) == list(range(8))
    assert all(row["$time"] == row["at"] for row in shown["a"]["left"])
    assert [row["$time"] for row in shown["a"]["right"]] == [99]
    assert shown["b"]["left"] is None
    assert [row["tags"] for row in shown["b"]["right"]] == [["2", "2"]]


@pytest.mark.parametrize("how", ["inner", "full"])
def test_a_skewed_key_is_joined_in_pieces(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """400,000 rows of one key: a column for all pairs would take far more than is held here."""
    monkeypatch.undo()
    count, reach = 200_000, 20
    tasks = CoKeyedTasks(
        interval_join("orders", "payments", lower=-reach, upper=reach, how=how), INPUTS
    )
    join, heads = tasks.processor, Counter[int]()
    pair_count = 0
    for part in range(4):
        times = np.arange(part * count // 4, (part + 1) * count // 4)
        rows = [skewed(ORDERS, times), skewed(PAYMENTS, times)]
        table = one_table(INPUTS, [INPUTS.numbered(at, batch) for at, batch in enumerate(rows)])
        before = pa.total_allocated_bytes()
        work = tasks.work(table, watermark_ms=int(times[0]) - 1 - reach if part else None)
        for batch in join.run(work):
            assert batch.num_rows <= joins.OUTPUT_ROWS
            pair_count += batch.num_rows
            assert pa.total_allocated_bytes() - before < 64 << 20
        changes = work.overlay.changes()
        heads[part] = max(map(len, filter(None, changes["value"].to_pylist())))
        tasks.commit(changes)
    assert pair_count == count * (2 * reach + 1) - reach * (reach + 1), "none twice, all once"
    assert max(heads.values()) < 1 << 20, "no value holds all rows of the key"


def skewed(schema: pa.Schema, times: Any) -> pa.RecordBatch:
    """A row for each time, all of one key."""
    at = pa.array(times)
    columns = {
        "id": pa.array(["hot"] * len(times)),
        "order": pa.array(["hot"] * len(times)),
        "part": pa.array(np.ones(len(times), np.int32)),
        "at": at,
        "paid": pc.multiply(at, 1000).cast(pa.timestamp("us", tz="UTC")),
    }
    return pa.RecordBatch.from_arrays(
        [columns.get(field.name, pa.nulls(len(times), field.type)) for field in schema],
        schema=schema,
    )


def test_a_chunk_that_goes_gives_its_number_to_none_of_the_same_epoch() -> None:
    """Each entry is written once in an epoch: its changelog has no order within a key."""
    tasks = CoKeyedTasks(interval_join("orders", "payments", lower=0, upper=5), INPUTS)
    tasks.epoch([arrival((0, "a", at, at)) for at in range(7)])
    tasks.epoch([arrival((0, "a", at, at)) for at in range(101, 108)], watermark_ms=100)
    own = [key for key in tasks.entries if key[2] == tasks.fields["left"].state_id]
    numbers = sorted(int.from_bytes(key[-8:], "big") for key in own if len(key) > len(min(own)))
    assert numbers == [2, 3]

    rows_out = tasks.epoch([arrival((1, "a", 104, 1))], watermark_ms=100)
    assert sorted(row["at"] for row in rows_out) == [101, 102, 103, 104]
