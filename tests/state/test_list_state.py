"""Lists of tasks, divided among other tasks as Flink divides them, and what changes them."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tallystick.errors import OptionError
from tallystick.state.operator_state import (
    ListCodec,
    Share,
    deletions_beyond,
    in_union,
    list_changes,
    repartitioned,
    shared_values,
)
from tallystick.state.overlay import ENTRIES

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "flink_operator_state.json").read_text()
)
CODEC = ListCodec(pa.schema([("a", pa.int64()), ("b", pa.string())]))


def elements_of(shares: list[list[Share]]) -> list[list[list[int]]]:
    return [[[s.task, at] for s in share for at in range(s.start, s.stop)] for share in shares]


def test_one_list_is_divided_as_by_flink() -> None:
    for case in GOLDEN["repartition_split_distribute"]:
        sizes, parallelism = case["in"]["list_sizes"], case["in"]["new_parallelism"]
        lists = repartitioned({"a": sizes}, parallelism)["a"]
        assert elements_of(lists) == case["result"], case["in"]


def test_each_task_gets_a_union_as_by_flink() -> None:
    for case in GOLDEN["repartition_union"]:
        lists = in_union(case["in"]["list_sizes"], case["in"]["new_parallelism"])
        assert elements_of(lists) == case["result"], case["in"]


def test_several_lists_of_an_operator_are_divided_as_by_flink() -> None:
    """One begins where the last one gave the last of its elements that were too many."""
    for case in GOLDEN["repartition_multi_state"]:
        states, parallelism = case["in"]["states"], case["in"]["new_parallelism"]
        split, union = (
            {name: state["list_sizes"] for name, state in states.items() if state["mode"] == mode}
            for mode in ("SPLIT_DISTRIBUTE", "UNION")
        )
        lists_by_name = repartitioned(split, parallelism)
        lists_by_name |= {name: in_union(sizes, parallelism) for name, sizes in union.items()}
        assert {name: elements_of(lists) for name, lists in lists_by_name.items()} == case["result"]


Element = tuple[int | None, str | None]
ELEMENTS = st.lists(st.tuples(st.none() | st.integers(0, 3), st.none() | st.text(max_size=1)))


def encoded(elements: list[Element]) -> pa.BinaryArray:
    rows = [dict(zip("ab", element, strict=True)) for element in elements]
    return CODEC.encode(pa.RecordBatch.from_pylist(rows, schema=CODEC.columns))


def decoded(values: pa.BinaryArray) -> list[Element]:
    return [(row["a"], row["b"]) for row in CODEC.decode(values).to_pylist()]


def applied(stored: dict[bytes, bytes], changes: pa.RecordBatch) -> None:
    keys = changes.column(0).to_pylist()
    assert keys == sorted(set(keys))
    for key, value in zip(keys, changes.column(1).to_pylist(), strict=True):
        stored.pop(key, None)
        if value is not None:
            stored[key] = value


def batch_of(stored: dict[bytes, bytes]) -> pa.RecordBatch:
    entries = sorted(stored.items())
    return pa.record_batch([[k for k, _ in entries], [v for _, v in entries]], schema=ENTRIES)


@settings(deadline=None)
@given(st.lists(ELEMENTS, min_size=1, max_size=4), st.integers(1, 5), st.data())
def test_what_changes_makes_of_the_old_lists_the_new_ones(
    lists: list[list[Element]], parallelism: int, data: st.DataObject
) -> None:
    stored: dict[bytes, bytes] = {}
    for task, elements in enumerate(lists):
        applied(stored, list_changes(task, encoded([]), encoded(elements)))
    entries = batch_of(stored)
    before = len(lists)
    everything: list[Any] = []
    for task in range(parallelism):
        share = (
            lists[task]
            if before == parallelism
            else decoded(shared_values(entries, task, before, parallelism))
        )
        union = shared_values(entries, task, before, parallelism, is_union=True)
        assert decoded(union) == [e for task_list in lists for e in task_list]
        committed = encoded(lists[task]) if task < before else encoded([])
        applied(stored, list_changes(task, committed, encoded(share)))
        everything.append(share)
    applied(stored, deletions_beyond(entries, parallelism))
    assert sorted(map(repr, (e for task_list in lists for e in task_list))) == sorted(
        map(repr, (e for task_list in everything for e in task_list))
    )
    again = batch_of(stored)
    whole = decoded(again.column(1))
    assert whole == [e for task_list in everything for e in task_list], (
        "what is stored is what tasks have"
    )

    task = data.draw(st.integers(0, parallelism - 1))
    newer = data.draw(ELEMENTS)
    applied(stored, list_changes(task, encoded(everything[task]), encoded(newer)))
    everything[task] = newer
    assert decoded(batch_of(stored).column(1)) == [e for task_list in everything for e in task_list]


def test_only_what_differs_is_written() -> None:
    old = [(n, "x") for n in range(100)]
    new = [*old[:50], (0, "y"), *old[51:], (7, "z")]
    assert list_changes(3, encoded(old), encoded(new)).num_rows == 2
    assert list_changes(3, encoded(old), encoded(old)).num_rows == 0


def test_columns_that_cannot_be_stored_are_refused() -> None:
    with pytest.raises(OptionError, match="list state, column 's' is struct"):
        ListCodec(pa.schema([("s", pa.struct([("x", pa.int8())]))]))
