"""Interval and window joins against nested loops: any order, any epochs, any parallelism."""

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from co_keyed_tasks import CoKeyedTasks
from hypothesis import given, settings
from hypothesis import strategies as st

from tallystick.state.functions import range_join, row_state
from tallystick.state.functions.inputs import KeyedInput, KeyedInputs
from tallystick.state.functions.range_join import interval_join, window_join

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
        st.integers(1, 16),
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
    monkeypatch.setattr(range_join, "OUTPUT_ROWS", 3)
    monkeypatch.setattr(range_join, "KEYS_MAX", 2)


def arrival(record: Record) -> tuple[int, dict[str, Any]]:
    side, key, time, x = record
    if side == 0:
        return 0, {"id": key, "part": 1, "amount": x, "at": time}
    tags = None if x is None else [str(x)] * x
    amount = None if x is None else float(x)
    return 1, {"order": key, "part": 1, "amount": amount, "tags": tags, "paid": time * 1000}


def joined(left: Record | None, right: Record | None) -> dict[str, Any]:
    """A row of output; moments as numbers."""
    one = left or right
    assert one is not None
    row: dict[str, Any] = {"id": one[1], "part": 1}
    row |= {"amount": left and left[3], "at": left and left[2]}
    found = arrival(right)[1] if right else dict.fromkeys(PAYMENTS.names)
    return row | {
        "order": found["order"],
        "payments_amount": found["amount"],
        "tags": found["tags"],
        "paid": found["paid"],
    }


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
        found, has_partner = [], set[int]()
        for i, left in enumerate(self._rows):
            for j, right in enumerate(self._rows):
                is_pair = (left[0], right[0]) == (0, 1) and left[1] == right[1]
                if is_pair and self._matches(left[2], right[2]):
                    has_partner |= {i, j}
                    if max(i, j) >= first:
                        found.append(joined(left, right))
        for i, row in enumerate(self._rows):
            is_outer = self._how == "full" or self._how == ["left", "right"][row[0]]
            if is_outer and i not in has_partner | self._alone and self._end(row) <= until:
                self._alone.add(i)
                found.append(joined(*((row, None) if row[0] == 0 else (None, row))))
        return found


def run(function: Any, oracle: Oracle, epochs: list[Any], own: tuple[str, ...] = ()) -> None:
    tasks = CoKeyedTasks(function, INPUTS)
    watermark: int | None = None
    last = [([], 200, 2, None), ([], 0, 3, None)]
    for records, advance, parallelism, max_parallelism in [*epochs, *last]:
        if max_parallelism is not None:
            tasks.migrate(max_parallelism)
        found = tasks.epoch(
            [arrival(each) for each in records],
            watermark_ms=watermark,
            parallelism=min(parallelism, tasks.max_parallelism),
        )
        assert all(count <= range_join.OUTPUT_ROWS for count in tasks.batch_rows)
        expected = oracle.epoch(records, watermark)
        kept = [{k: v for k, v in row.items() if k not in own} for row in found]
        assert plain(kept) == plain(expected)
        watermark = (-30 if watermark is None else watermark) + advance
    assert tasks.entries == {}, "the watermark has passed everything"


@pytest.mark.parametrize("how", HOWS)
@settings(deadline=None, max_examples=50)
@given(epochs=EPOCHS, bounds=st.tuples(st.integers(-15, 15), st.integers(0, 12)))
def test_an_interval_join_is_that_of_nested_loops(
    how: str, epochs: list[Any], bounds: tuple[int, int]
) -> None:
    """Late rows, equal times, null keys, keys of other groups, bounds that exclude zero too."""
    lower, upper = bounds[0], bounds[0] + bounds[1]
    function = interval_join("orders", "payments", lower=lower, upper=upper, how=how)

    def matches(left: int, right: int) -> bool:
        return lower <= right - left <= upper

    oracle = Oracle(matches, lambda row: row[2] + (upper if row[0] == 0 else -lower), how)
    run(function, oracle, epochs)


@pytest.mark.parametrize("how", HOWS)
@settings(deadline=None, max_examples=50)
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
    found = tasks.epoch([arrival(each) for each in rows])
    found += tasks.epoch([], watermark_ms=5_000)

    starts = [
        (row["window_start"].timestamp(), row["window_end"].timestamp(), row["at"]) for row in found
    ]
    assert starts == [(1.1, 2.1, 1_100), (0.1, 1.1, 1_099), (2.1, 3.1, None)]
