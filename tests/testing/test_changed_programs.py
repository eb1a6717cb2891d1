"""A program changes, and its state with it: what follows is what the new program alone would give.

Each case has the program before, the program now, and what of its state is defined: rows from
before the change are fed without the columns that only the new program knows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import tallystick as ts
from tallystick.testing import Driver
from tallystick.testing.memory import MemoryStorage

NOBODY = "localhost:1"
COLUMNS = "k string, n int, at bigint"
KEYS = "abcde"
END_MS = 10_000_000


def pipeline(function: Any, *, columns: str = COLUMNS, **step: Any) -> ts.Pipeline:
    """A pipeline with one keyed step."""
    if getattr(function, "_output", ...) is None:
        step["output"] = "k string"
    return (
        ts.Pipeline("changes")
        .read(ts.KafkaSource(NOBODY, topics=["in"], value=ts.Json(columns)))
        .key_by("k")
        .process(function, uid="s", **step)
        .write(ts.KafkaSink(NOBODY, topic="out", value=ts.Json()))
    )


@dataclass(frozen=True)
class Change:
    """A program before and after a change.

    Args:
        before, now: the programs.
        compared: a comparable part of the state, from a row of `Driver.state`.
        accept: what the start says.
        expected: changes what a run of the new program alone holds, where rows of before the change
            cannot have what they lack.
    """

    before: ts.Pipeline
    now: ts.Pipeline
    accept: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    """Columns that hold what rows after the change gave; compared where a key has no others."""


def summing(**kinds: str) -> Any:
    """A function that keeps sums of `n` in columns of given types."""

    def step(batch: Any) -> ts.Update:
        state = {}
        for name, kind in kinds.items():
            whole = pa.array(batch.sum("n")).cast(pa.int64())
            held = batch.state.column(name)
            state[name] = _plus(held, whole, kind)
        return ts.Update(None, state)

    return ts.vectorised(
        step, state=", ".join(f"{name} {kind}" for name, kind in kinds.items()), reads=["n"],
    )


def _plus(held: pa.Array, more: pa.Array, kind: str) -> Any:
    numbers = [
        (0 if one is None else int(one)) + (two or 0)
        for one, two in zip(held.to_pylist(), more.to_pylist(), strict=True)
    ]
    if kind.startswith("array"):
        return [[number] for number in numbers]
    return pa.array(numbers).cast(held.type)


AGGREGATES = {
    "n": ts.count(),
    "total": ts.sum("n"),
    "least": ts.min("n"),
    "latest": ts.last("n"),
}
SUMS = {
    "added": (summing(a="int"), summing(a="int", b="bigint"), {}, ()),
    "reordered": (summing(a="int", b="bigint"), summing(b="bigint", a="int"), {}, ()),
    "int to bigint": (summing(a="int"), summing(a="bigint"), {}, ()),
    "int to double": (summing(a="int"), summing(a="double"), {}, ()),
    "float to double": (summing(a="float"), summing(a="double"), {}, ()),
    "decimal wider": (summing(a="decimal(19,0)"), summing(a="decimal(22,2)"), {}, ()),
    "renamed": (summing(a="int"), summing(b="int"), {"b": "a"}, ()),
    "renamed and wider": (summing(a="int", c="int"), summing(c="int", b="bigint"), {"b": "a"}, ()),
    "dropped": (summing(a="int", b="int"), summing(a="int"), {}, ("dropped-column-s-b",)),
    "aggregates added": (
        ts.aggregate({"n": ts.count()}),
        ts.aggregate({"total": ts.sum("n"), "n": ts.count(), "least": ts.min("n")}),
        {},
        (),
    ),
    "aggregate renamed": (
        ts.aggregate({"n": ts.count()}), ts.aggregate({"rows": ts.count()}), {"rows": "n"}, ()
    ),
}
ADDED = {"added": {"b"}, "aggregates added": {"total", "least"}}

Rows = list[dict[str, Any]]
ROWS = st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 99)), min_size=1, max_size=20)


def as_rows(drawn: list[tuple[str, int]], start: int = 0) -> Rows:
    return [{"k": k, "n": n, "at": start + at} for at, (k, n) in enumerate(drawn)]


def fed(test: Driver, rows: Rows, cuts: list[int]) -> None:
    """Feed rows in pieces, and run epochs."""
    at = 0
    for cut in [*cuts, len(rows)]:
        if rows[at : at + cut]:
            test.feed("in", rows[at : at + cut])
            test.drain()
        at += cut


def held(test: Driver) -> dict[str, dict[str, Any]]:
    return {row["k"]: row for row in test.state().drop_columns(["key_group"]).to_pylist()}


@pytest.mark.parametrize("name", SUMS)
@settings(max_examples=8, deadline=None)
@given(before=ROWS, after=ROWS, cuts=st.lists(st.integers(1, 6), max_size=4), tasks=st.integers(1, 4), data=st.data())
def test_columns_are_those_of_a_run_of_the_new_program(
    name: str, before: Any, after: Any, cuts: list[int], tasks: int, data: Any
) -> None:
    old, new, renamed, accept = SUMS[name]
    rows, more = as_rows(before), as_rows(after, 100)
    test = Driver(pipeline(old))
    fed(test, rows, cuts)

    test.restart(tasks, pipeline=pipeline(new, renamed=renamed), accept=accept)
    if data.draw(st.booleans()):
        test.feed("in", more[:1])
        test.crash()
        test.drain()
        more = more[1:]
        rows = [*rows, *as_rows(after, 100)[:1]]
    fed(test, more, cuts)

    alone = Driver(pipeline(new, renamed=renamed))
    fed(alone, [*as_rows(before), *as_rows(after, 100)], [])
    now, expected = held(test), held(alone)
    if name in ADDED:
        late = Driver(pipeline(new))
        fed(late, as_rows(after, 100), [])
        from_then_on = held(late)
        for key, row in expected.items():
            for column in ADDED[name]:
                row[column] = from_then_on.get(key, {}).get(column)
    assert now == expected
