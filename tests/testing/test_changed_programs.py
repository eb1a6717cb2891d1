"""A program changes, and its state with it: what follows is what the new program alone would give.

What only the new program knows has no values from before the change: it is compared with a run that
saw the later rows alone, or left out.
"""

import datetime
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import tallystick as ts
from tallystick.checkpoint import state_files
from tallystick.state.catalog import StepState
from tallystick.tasks import epoch_plan
from tallystick.testing import Driver

NOBODY = "localhost:1"
COLUMNS = "k string, n int, at bigint"
KEYS = "abcde"
END_MS = 10_000_000
NEW_YEAR = datetime.datetime(2026, 1, 1)  # noqa: DTZ001  a timestamp_ntz


def pipeline(function: Any, *, columns: str = COLUMNS, **step: Any) -> ts.Pipeline:
    """A pipeline with one keyed step."""
    if getattr(function, "_output", ...) is None:
        step["output"] = "k string"
    step = {"uid": "s", **step}
    return (
        ts.Pipeline("changes")
        .read(ts.KafkaSource(NOBODY, topics=["in"], value=ts.Json(columns)))
        .key_by("k")
        .process(function, **step)
        .write(ts.KafkaSink(NOBODY, topic="out", value=ts.Json()))
    )


def summing(**kinds: str) -> Any:
    """A function that keeps sums of `n` in columns of given types."""

    def step(batch: Any) -> ts.Update:
        state = {}
        for name, kind in kinds.items():
            whole = pa.array(batch.sum("n")).cast(pa.int64())
            start = batch.state.column(name)
            state[name] = _plus(start, whole, kind)
        return ts.Update(None, state)

    return ts.vectorised(
        step,
        state=", ".join(f"{name} {kind}" for name, kind in kinds.items()),
        reads=["n"],
    )


def _plus(start: pa.Array, more: pa.Array, kind: str) -> Any:
    numbers = [
        (0 if one is None else int(one)) + (two or 0)
        for one, two in zip(start.to_pylist(), more.to_pylist(), strict=True)
    ]
    if kind.startswith("array"):
        return [[number] for number in numbers]
    return pa.array(numbers).cast(start.type)


SUMS: dict[str, tuple[Any, Any, dict[str, str], tuple[str, ...]]] = {
    "added": (summing(a="int"), summing(a="int", b="bigint"), {}, ()),
    "reordered": (summing(a="int", b="bigint"), summing(b="bigint", a="int"), {}, ()),
    "int to bigint": (summing(a="int"), summing(a="bigint"), {}, ()),
    "int to double": (summing(a="int"), summing(a="double"), {}, ()),
    "int to float": (summing(a="int"), summing(a="float"), {}, ("rounded-column-s-a",)),
    "bigint to double": (summing(a="bigint"), summing(a="double"), {}, ("rounded-column-s-a",)),
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
        ts.aggregate({"n": ts.count()}),
        ts.aggregate({"rows": ts.count()}),
        {"rows": "n"},
        (),
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


def state_by_key(test: Driver) -> dict[str, dict[str, Any]]:
    return {row["k"]: row for row in test.state().drop_columns(["key_group"]).to_pylist()}


@pytest.mark.parametrize("name", SUMS)
@settings(max_examples=4, deadline=None, phases=[Phase.generate])
@given(
    before=ROWS,
    after=ROWS,
    cuts=st.lists(st.integers(1, 6), max_size=4),
    tasks=st.integers(1, 4),
    data=st.data(),
)
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
    now, expected = state_by_key(test), state_by_key(alone)
    if name in ADDED:
        late = Driver(pipeline(new))
        fed(late, as_rows(after, 100), [])
        from_then_on = state_by_key(late)
        for key, row in expected.items():
            for column in ADDED[name]:
                row[column] = from_then_on.get(key, {}).get(column)
    assert now == expected


# --- windows, joins and states of a StatefulProcessor ------------------------------------------


WIDE = "k string, n bigint, at bigint, note string"
TIMED = {"event_time": "at", "watermark_delay": 1000}


def windows(kind: Any, columns: str = COLUMNS, **aggregates: Any) -> ts.Pipeline:
    """A pipeline with windows."""
    return pipeline(ts.windowed(kind, aggregates), columns=columns, **TIMED)


def joined(function: Any, columns: str = COLUMNS, *, is_timed: bool = True) -> ts.Pipeline:
    """A pipeline with a join of a topic with a topic."""
    sources = (
        ts.KafkaSource(NOBODY, topics=[topic], value=ts.Json(columns)) for topic in ("in", "more")
    )
    times: dict[str, Any] = {"event_time": {"left": "at", "right": "at"}, "watermark_delay": 1000}
    return (
        ts.Pipeline("changes")
        .read(left=next(sources), right=next(sources))
        .key_by(left="k", right="k")
        .process(function, uid="s", **(times if is_timed else {}))
        .write(ts.KafkaSink(NOBODY, topic="out", value=ts.Json()))
    )


class Habits(StatefulProcessor):
    """Keeps a value, a list and a map, in columns of given types."""

    def __init__(self, value: str, element: str, entry: str) -> None:
        self.schemas = (value, element, entry)

    def init(self, handle: Any) -> None:
        value, element, entry = self.schemas
        self.value = handle.getValueState("value", value)
        self.list = handle.getListState("list", element)
        self.map = handle.getMapState("map", "n int", entry)
        self.kept = handle.getValueState("kept", value, 10**12)
        self.wide = value != VALUE[0]

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for row in rows:
            n, day = row.n, NEW_YEAR + datetime.timedelta(days=row.n % 9)
            more = ("new", [n]) if self.wide else ()
            named = ((n, "x"),) if self.wide else ((n,),)
            text = f"{n}".encode() if self.wide else f"{n}"
            for state in (self.value, self.kept):
                state.update((n, text, *named, *more))
            self.list.appendValue((float(n), {"a": n}) if not self.wide else ({"a": n}, float(n)))
            self.map.updateValue((n,), (day if self.wide else day.date(), Decimal(n)))
        yield from ()

    def close(self) -> None:
        pass


VALUE = (
    "n int, text string, s struct<n:int>",
    "n bigint, text binary, s struct<n:bigint,note:string>, note string, ns array<int>",
)
ELEMENT = (
    "f float, m map<string,int>",
    "m map<string,bigint>, f double",
)
ENTRY = ("d date, m decimal(5,0)", "d timestamp_ntz, m decimal(9,2)")


def test_values_lists_and_maps_of_a_processor_are_read_in_the_new_schema() -> None:
    old, new = (Habits(VALUE[at], ELEMENT[at], ENTRY[at]) for at in (0, 1))
    test = Driver(pipeline(old, output="k string", time_mode="ProcessingTime"))
    fed(test, as_rows([("a", 3), ("a", 5), ("b", 7)]), [1])

    test.restart(2, pipeline=pipeline(new, output="k string", time_mode="ProcessingTime"))
    fed(test, as_rows([("b", 8)]), [])

    rows = state_by_key(test)
    lines = [(line["f"], line["m"]) for line in rows["a"]["list"]]
    assert lines == [(3.0, [("a", 3)]), (5.0, [("a", 5)])]
    day = NEW_YEAR + datetime.timedelta(days=3)
    assert rows["a"]["map"][0] == ({"n": 3}, {"d": day, "m": Decimal("3.00")})
    assert rows["a"]["kept"].pop("$expiry") > 0
    for name in ("value", "kept"):
        assert rows["a"][name] == {
            "n": 5,
            "text": b"5",
            "s": {"n": 5, "note": None},
            "note": None,
            "ns": None,
        }
        assert rows["b"][name]["ns"] == [8]


SOME = {"rows": ts.count(), "n": ts.sum("n"), "least": ts.min("n")}
MORE = {
    "mean": ts.avg("n"),
    "opened": ts.first("n"),
    "latest": ts.last("n"),
    "kinds": ts.approximate_distinct_count("n"),
    "all": ts.collect("n"),
    "half": ts.quantiles("n", at=[0.5]),
}
OPEN: dict[str, Callable[[bool], ts.Pipeline]] = {
    "tumbling": lambda new: windows(
        ts.tumbling(10), WIDE if new else COLUMNS, **({**MORE, **SOME} if new else SOME)
    ),
    "hopping": lambda new: windows(
        ts.hopping(20, every=10), **({**SOME, **MORE} if new else {**SOME})
    ),
    "session": lambda new: windows(ts.session(3), **({**MORE, **SOME} if new else SOME)),
    "count": lambda new: pipeline(
        ts.windowed(ts.count_window(4), {**MORE, **SOME} if new else SOME)
    ),
    "interval join": lambda new: joined(
        ts.interval_join("left", "right", lower=-5, upper=5, how="full"), WIDE if new else COLUMNS
    ),
    "window join": lambda new: joined(
        ts.window_join("left", "right", size=20, how="left"), WIDE if new else COLUMNS
    ),
    "temporal join": lambda new: joined(
        ts.temporal_join("left", "right", how="left"), WIDE if new else COLUMNS
    ),
    "upsert join": lambda new: joined(
        ts.upsert_join("left", "right", how="full"), WIDE if new else COLUMNS, is_timed=False
    ),
}
KAFKAS = ("offset", "partition", "timestamp", "key", "topic", "timestampType")


def results(test: Driver) -> list[str]:
    """Return the rows of an output, sorted: the order of keys is not compared."""
    rows = test.output().to_pylist()
    kept = [{k: v for k, v in row.items() if not k.endswith(KAFKAS)} for row in rows]
    return sorted(repr(sorted(row.items())) for row in kept)


def fed_with_both(test: Driver, rows: Rows, cuts: list[int], topics: list[str]) -> None:
    """Feed rows, every other one to the second topic, if there is one."""
    at = 0
    for cut in [*cuts, len(rows)]:
        for number, row in enumerate(rows[at : at + cut]):
            test.feed(topics[number % len(topics)], [row])
        test.drain()
        at += cut


@pytest.mark.parametrize("name", OPEN)
@settings(max_examples=2, deadline=None, phases=[Phase.generate])
@given(
    before=ROWS,
    after=ROWS,
    cuts=st.lists(st.integers(1, 6), max_size=3),
    tasks=st.integers(1, 3),
    kills=st.booleans(),
)
def test_what_is_open_goes_on(
    name: str, before: Any, after: Any, cuts: list[int], tasks: int, kills: bool
) -> None:
    """Windows and rows of joins from before the change come out as if it had been made before.

    What an aggregate that is added cannot know is left out of the comparison.
    """
    topics = ["in", "more"] if "join" in name else ["in"]
    rows, more = as_rows(before), as_rows(after, 5)
    end = [{"k": "end", "n": 0, "at": END_MS}] * 2
    test = Driver(OPEN[name](False))
    fed_with_both(test, rows, cuts, topics)
    test.restart(tasks, pipeline=OPEN[name](True))
    if kills:
        test.feed("in", [{"k": "z", "n": 1, "at": 1}])
        test.crash()
    fed_with_both(test, more, cuts, topics)
    fed_with_both(test, end, [], topics)

    alone = Driver(OPEN[name](True))
    fed_with_both(alone, rows, cuts, topics)
    if kills:
        alone.feed("in", [{"k": "z", "n": 1, "at": 1}])
    fed_with_both(alone, more, cuts, topics)
    fed_with_both(alone, end, [], topics)

    if "join" in name:
        known = len(rows) and name != "upsert join"  # what it put out before lacks the new column
        assert set(results(alone)) >= set(results(test)) if not known else True
        assert len(results(test)) == len(results(alone))
        assert state_by_key(test) == state_by_key(alone)
    else:
        by_window = [
            {
                (row["k"], row.get("window_start"), row["rows"], row["n"], row["least"])
                for row in one.output().to_pylist()
            }
            for one in (test, alone)
        ]
        assert by_window[0] == by_window[1]


def test_an_aggregate_that_is_added_has_the_rows_from_then_on() -> None:
    """In windows that were open at the change; in a window without such rows it is null or zero."""
    test = Driver(windows(ts.tumbling(10), **SOME))
    test.feed("in", [{"k": "a", "n": 9, "at": 1}, {"k": "b", "n": 8, "at": 1}])
    test.drain()
    test.restart(pipeline=windows(ts.tumbling(10), **MORE, **SOME))
    test.feed("in", [{"k": "a", "n": 1, "at": 2}, {"k": "a", "n": 3, "at": 3}])
    test.drain()
    test.feed("in", [{"k": "end", "n": 0, "at": END_MS}])
    rows = {row["k"]: row for row in test.drain().output().to_pylist()}

    assert rows["a"]["rows"] == 3
    assert {name: rows["a"][name] for name in MORE} == {
        "mean": 2.0,
        "opened": 1,
        "latest": 3,
        "kinds": 2,
        "all": [1, 3],
        "half": rows["a"]["half"],
    }
    assert {name: rows["b"][name] for name in MORE} == {
        "mean": None,
        "opened": None,
        "latest": None,
        "kinds": 0,
        "all": [],
        "half": None,
    }


def enriched(columns: str, element: str) -> ts.Pipeline:
    """A pipeline with a broadcast table and a list state."""
    prices = ts.KafkaSource(NOBODY, topics=["prices"], value=ts.Json(columns))
    table = ts.broadcast(ts.stream(prices).map_batches(_only, schema=columns), key="k", uid="table")
    names = [part.split()[0] for part in element.split(", ")]

    def keep(rows: pa.RecordBatch, stored: pa.RecordBatch) -> Any:
        held_now = stored.to_pylist()
        new = [{name: row.get(name) for name in names} for row in rows.to_pylist()]
        kept = pa.RecordBatch.from_pylist([*held_now, *new], schema=stored.schema)
        return rows.select(["k", "n", "at"]), kept

    elements = ts.list_state(element, uid="list")
    return (
        ts.Pipeline("changes")
        .read(ts.KafkaSource(NOBODY, topics=["in"], value=ts.Json(COLUMNS)))
        .map_batches(keep, state=elements, schema=COLUMNS)
        .map_batches(ts.enrich(table, on="k", how="left"))
        .write(ts.KafkaSink(NOBODY, topic="out", value=ts.Json()))
    )


def _only(rows: pa.RecordBatch) -> pa.RecordBatch:
    names = [name for name in rows.schema.names if name in ("k", "price", "note")]
    return rows.select(names)


def test_broadcast_tables_and_lists_are_read_in_the_new_schema() -> None:
    test = Driver(enriched("k string, price int", "n int"))
    test.feed("prices", [{"k": "a", "price": 3}, {"k": "b", "price": 4}])
    test.feed("in", [{"k": "a", "n": 1, "at": 0}])
    test.drain()
    now = enriched("k string, note string, price bigint", "word string, n bigint")
    test.restart(2, pipeline=now)
    test.feed("prices", [{"k": "b", "price": 5, "note": "new"}])
    test.feed("in", [{"k": "a", "n": 2, "at": 1}, {"k": "b", "n": 3, "at": 1}])
    test.drain()

    table = {row["k"]: (row["price"], row["note"]) for row in test.state("table").to_pylist()}
    assert table == {"a": (3, None), "b": (5, "new")}
    elements = test.state("list").to_pylist()
    assert sorted((row["n"], row["word"]) for row in elements) == [(1, None), (2, None), (3, None)]


# --- guards -------------------------------------------------------------------------------------

COUNT, BOTH = ts.aggregate({"n": ts.count()}), ts.aggregate({"sum": ts.sum("n"), "n": ts.count()})


def sums_after_a_change_back_and_forth() -> dict[str, dict[str, Any]]:
    """Two programs, each killed in its first epoch, then the new one; with a rewrite of all files.

    The old program goes on after a first epoch of the new one that never was committed.
    """
    test = Driver(pipeline(COUNT), parallelism=1)
    for at in range(3):
        fed(test, as_rows([("a", 1), ("b", 1)], at), [])
    other = pipeline(ts.aggregate({"least": ts.min("n"), "n": ts.count()}))
    for killed in (pipeline(BOTH), other):
        test.restart(pipeline=killed)
        test.feed("in", as_rows([("a", 5)]))
        test.crash()
        test.restart(pipeline=pipeline(COUNT))
        test.drain()
    assert state_by_key(test)["a"]["n"] == 5
    last = epoch_of(test)
    test.restart(pipeline=pipeline(BOTH))
    for at in range(40):  # changelogs are merged
        fed(test, as_rows([("a", 7)], at), [])
    with pytest.raises(ts.OptionError, match="'sum' .* is dropped.*changed after epoch " + last):
        restarted(test, pipeline(COUNT))
    test.restart(2, pipeline=pipeline(BOTH))
    return state_by_key(test.drain())


def epoch_of(test: Driver) -> str:
    """The newest committed epoch."""
    manifest = test._driver.coordinator.committed_manifest
    assert manifest is not None
    assert manifest.state[0].version is not None
    return f"{manifest.state[0].version.epoch}:"


def restarted(test: Driver, changed: ts.Pipeline) -> None:
    """Start another program, and let it plan an epoch."""
    test.restart(pipeline=changed)
    fed(test, as_rows([("a", 1)]), [])


HELD = {"a": {"k": "a", "sum": 281, "n": 46, "timers": None}}
HELD["b"] = {"k": "b", "sum": None, "n": 3, "timers": None}


def test_copies_and_files_of_two_programs_are_never_exchanged() -> None:
    assert sums_after_a_change_back_and_forth() == HELD


@pytest.mark.parametrize(
    "guard", ["copies have the schema's name", "files have it", "files are converted"]
)
def test_each_guard_is_needed(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with a guard taken away: it ends with an error, or with other sums."""
    match guard:
        case "copies have the schema's name":
            monkeypatch.setattr(StepState, "copy_name", property(lambda step: step.uid))
        case "files have it":
            monkeypatch.setattr(epoch_plan, "extend", _without_schema(epoch_plan.extend))
        case _:
            monkeypatch.setattr(state_files, "converted", lambda entries, step, schema: entries)
    with pytest.raises((ts.TallystickError, AssertionError, ValueError)):
        assert sums_after_a_change_back_and_forth() == HELD


def _without_schema(extend: Callable[..., StepState]) -> Callable[..., StepState]:
    def unnamed(base: StepState, *rest: Any) -> StepState:
        after = extend(replace(base, schema="", former=()), *rest)
        return replace(after, schema=base.schema, former=base.former)

    return unnamed


@pytest.mark.parametrize(
    ("before", "now", "renamed", "words"),
    [
        ("a bigint", "a int", {}, "column 'a' goes from bigint to int, which does not hold all"),
        ("a bigint", "a double", {}, "from bigint to double"),
        ("a double", "a bigint", {}, "from double to bigint"),
        ("a decimal(22,2)", "a decimal(22,3)", {}, r"from decimal\(22, 2\) to decimal\(22, 3\)"),
        ("a int, b int", "b int", {}, r"accept=\['dropped-column-s-a'\]"),
        ("a int, b int", "b int, a int", {"a": "b", "b": "a"}, "neither becomes the other"),
    ],
)
def test_what_would_lose_something_is_refused_by_name(
    before: str, now: str, renamed: dict[str, str], words: str
) -> None:
    kinds = [dict(part.split() for part in text.split(", ")) for text in (before, now)]
    test = Driver(pipeline(summing(**kinds[0])))
    fed(test, as_rows([("a", 1)]), [])

    with pytest.raises(ts.OptionError, match=words):
        restarted(test, pipeline(summing(**kinds[1]), renamed=renamed))
