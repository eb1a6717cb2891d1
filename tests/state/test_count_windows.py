"""Count windows against plain Python: rows cut into any epochs, on any number of tasks."""

import itertools
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_keyed_task import OneTask

import tallystick as ts
from tallystick.errors import OptionError
from tallystick.state.compatibility import settle
from tallystick.state.functions import count_windows
from tallystick.state.functions.vectorised import ByColumns
from tallystick.state.keys import KeyCodec
from tests.examples import drawn

SCHEMA = pa.schema([("key", pa.string()), ("x", pa.int64())])
KEY = pa.schema([SCHEMA.field("key")])
AGGREGATES = {
    "n": ts.count(),
    "total": ts.sum("x"),
    "mean": ts.average("x"),
    "first": ts.first_value("x"),
    "last": ts.last_value("x"),
    "all": ts.collect("x"),
}
Record = tuple[Any, int | None]


def task_of(size: int, every: int | None = None, aggregates: Any = None) -> OneTask:
    windows = ts.count_window(size, every=every)
    return OneTask(ts.windowed(windows, aggregates or AGGREGATES), KEY, SCHEMA)


def rows_of(records: list[Record]) -> pa.RecordBatch:
    columns = list(zip(*records, strict=True)) or [[], []]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def naive(records: list[Record], size: int, every: int) -> dict[Any, list[dict[str, Any]]]:
    """The windows of each key, one row at a time."""
    windows_by_key: dict[Any, list[dict[str, Any]]] = {}
    seen: dict[Any, list[int | None]] = {}
    for key, x in records:
        rows = seen.setdefault(key, [])
        rows.append(x)
        if len(rows) % every == 0:
            xs = rows[-size:]
            there = [number for number in xs if number is not None]
            window = {
                "n": len(xs),
                "total": sum(there) if there else None,
                "mean": sum(there) / len(there) if there else None,
                "first": xs[0],
                "last": xs[-1],
                "all": there,
            }
            windows_by_key.setdefault(key, []).append(window)
    return windows_by_key


RECORDS = st.lists(
    st.tuples(st.sampled_from([None, "a", "b", "cc"]), st.none() | st.integers(-9, 9)), max_size=60
)
SIZES = st.integers(1, 9).map(lambda size: (size, size)) | st.tuples(
    st.integers(1, 9), st.integers(1, 9)
).map(lambda two: (max(two), min(two)))


@drawn(200)
@given(
    sizes=SIZES,
    records=RECORDS,
    cuts=st.lists(st.integers(0, 60), max_size=6),
    tasks=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    lines_max=st.sampled_from([1, 7, count_windows._LINES_MAX]),
)
def test_windows_are_those_of_all_rows_wherever_epochs_are_cut(
    sizes: tuple[int, int], records: list[Record], cuts: list[int], tasks: list[int], lines_max: int
) -> None:
    size, every = sizes
    task = task_of(size, every)
    rows_by_key: dict[Any, list[dict[str, Any]]] = {}
    edges = [0, *sorted(min(cut, len(records)) for cut in cuts), len(records)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(count_windows, "_LINES_MAX", lines_max)
        for number, (begin, end) in enumerate(itertools.pairwise(edges)):
            rows = rows_of(records[begin:end])
            for row in task.epoch(rows, parallelism=tasks[number % len(tasks)]):
                rows_by_key.setdefault(row.pop("key"), []).append(row)

    assert rows_by_key == naive(records, size, every)
    keys = [key for key, _ in records]
    counts = [keys.count(key) for key in set(keys)]
    assert len(task.entries) == sum(entries_needed(count, size, every) for count in counts)


def entries_needed(count: int, size: int, every: int) -> int:
    """A head, and each whole pane that a window to come has rows of."""
    pane = count_windows.CountWindows(size, every).pane_rows
    if pane == size:
        return int(count % size > 0)
    next_end = (count // every + 1) * every
    return 1 + len(range(max(0, next_end - size), count - pane + 1, pane))


def test_a_key_between_two_windows_has_no_state() -> None:
    task = task_of(3)

    assert task.epoch(rows_of([("a", 1), ("a", 2)])) == []
    (row,) = task.epoch(rows_of([("a", 3)]))
    assert (row["all"], task.entries) == ([1, 2, 3], {})
    assert task.epoch(rows_of([("a", 4), ("a", 5)])) == []
    (row,) = task.epoch(rows_of([("a", 6), ("b", 7)]))
    assert (row["all"], len(task.entries)) == ([4, 5, 6], 1)


def test_other_windows_do_not_go_on_with_the_state_of_these() -> None:
    def declared(windows: Any) -> Any:
        function = ts.windowed(windows, AGGREGATES)
        assert isinstance(function, ByColumns)
        return function.make(SCHEMA).declared(KeyCodec(KEY))

    fields, next_id = settle("step", declared(ts.count_window(10, every=5)), None)
    assert next_id
    assert fields[0].key_schema == "count windows of 10 rows every 5"
    assert declared(ts.count_window(10, every=10)) == declared(ts.count_window(10))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "size=0, expected a number of rows above 0"),
        ({"size": "1 minute"}, "size='1 minute'.*expected a whole number"),
        ({"size": 5, "every": True}, "every=True.*expected a whole number"),
        ({"size": 5, "every": 6}, "at most the size, 5: rows between windows would be lost"),
        ({"size": 30_000, "every": 29_999}, "Let every divide the size"),
    ],
)
def test_windows_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ts.count_window(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [{"time": "processing"}, {"emit": "update"}, {"allowed_lateness": 5}, {"late": "late"}],
)
def test_what_is_about_time_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="a count window is put out once, when it is full"):
        ts.windowed(ts.count_window(5), AGGREGATES, **arguments)
