"""What a program says of its state's changes: defaults of new columns, new names, new uids.

For each kind of state; columns of keyed steps without it are in `test_changed_programs`.
"""

import datetime
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import tallystick as ts
from tallystick.pipeline.input_planning import by_input
from tallystick.state import evolution
from tallystick.state.catalog import FormerState
from tallystick.testing import Driver

NOBODY = "localhost:1"
COLUMNS = "k string, n int, at bigint"


def source(topic: str, columns: str = COLUMNS) -> ts.KafkaSource:
    return ts.KafkaSource(NOBODY, topics=[topic], value=ts.Json(columns))


def pipeline(function: Any, **step: Any) -> ts.Pipeline:
    return (
        ts.Pipeline("declared")
        .read(source("in"))
        .key_by("k")
        .process(function, uid="s", **step)
        .write(ts.KafkaSink(NOBODY, topic="out", value=ts.Json()))
    )


def counting(columns: str) -> Any:
    """A function that counts rows in the column `n`, and leaves all others as they are."""

    def step(batch: Any) -> ts.Update:
        state = {name: batch.state.column(name) for name in batch.state.schema.names}
        return ts.Update(None, {**state, "n": batch.count() + batch.held("n")})

    return ts.vectorised(step, state=columns, reads=["n"])


def ask(test: Driver, *keys: str) -> dict[str, Any]:
    """Feed a row per key, run epochs, and return the state by key."""
    test.feed("in", [{"k": key, "n": 1, "at": at} for at, key in enumerate(keys)])
    rows = test.drain().state().drop_columns(["key_group"]).to_pylist()
    return {row.pop("k"): row for row in rows}


# --- defaults -----------------------------------------------------------------------------------

MORE = {
    "word": ("string", "x"),
    "big": ("bigint", 2**40),
    "half": ("double", 0.5),
    "price": ("decimal(9,2)", Decimal("1.50")),
    "day": ("date", datetime.date(2026, 1, 1)),
    "moment": ("timestamp_ntz", datetime.datetime(2026, 1, 1, 5)),  # noqa: DTZ001
    "data": ("binary", b"\0x"),
    "flag": ("boolean", True),
    "parts": ("array<string>", ["a", "b"]),
}


@pytest.mark.parametrize("tasks", [1, 3])
def test_keys_of_before_have_the_defaults_and_new_keys_have_not(tasks: int) -> None:
    test = Driver(pipeline(counting("n bigint"), output="k string"))
    ask(test, "a", "b")
    columns = ", ".join(["n bigint", *(f"{name} {kind}" for name, (kind, _) in MORE.items())])
    defaults = {name: value for name, (_, value) in MORE.items()}
    now = pipeline(counting(columns), output="k string", defaults=defaults)
    test.restart(tasks, pipeline=now)
    test.feed("in", [{"k": "a", "n": 1, "at": 1}])
    test.crash()
    rows = ask(test, "c")
    assert rows["a"] == {"n": 2, **defaults, "timers": None}
    assert rows["b"] == {"n": 1, **defaults, "timers": None}
    assert rows["c"] == {"n": 1, **dict.fromkeys(MORE), "timers": None}

    test.restart(2, pipeline=pipeline(counting(columns), output="k string", defaults={"big": 1}))
    assert ask(test, "a")["a"]["big"] == 2**40, "a default is for a column that comes"


def test_an_aggregate_goes_on_from_its_default() -> None:
    test = Driver(pipeline(ts.aggregate({"rows": ts.count()})))
    ask(test, "a")
    both = ts.aggregate({"rows": ts.count(), "total": ts.sum("n")})
    test.restart(pipeline=pipeline(both, defaults={"total": 100}))
    rows = ask(test, "a", "b")
    assert {key: row["total"] for key, row in rows.items()} == {"a": 101, "b": 1}


def joined(columns: str, **step: Any) -> ts.Pipeline:
    return (
        ts.Pipeline("declared")
        .read(left=ts.stream(source("in", columns)), right=ts.stream(source("more")))
        .key_by(left="k", right="k")
        .process(ts.upsert_join("left", "right"), uid="s", **step)
        .write(ts.KafkaSink(NOBODY, topic="out", value=ts.Json()))
    )


def test_rows_of_a_join_have_the_default() -> None:
    test = Driver(joined(COLUMNS))
    test.feed("in", [{"k": "a", "n": 1, "at": 1}])
    test.drain()
    test.restart(2, pipeline=joined(f"{COLUMNS}, note string", defaults={"left_note": "none"}))
    test.feed("in", [{"k": "b", "n": 1, "at": 1, "note": None}])
    test.feed("more", [{"k": key, "n": 2, "at": 2} for key in "ab"])
    rows = test.drain().output().to_pylist()
    names = [name for name in rows[0] if name.endswith("note")]
    assert {row["k"]: row[names[0]] for row in rows} == {"a": "none", "b": None}


class Forms(StatefulProcessor):
    """Keeps what it is given in a value, a list and a map of one schema."""

    def __init__(self, schema: str, value: Any) -> None:
        self.schema, self.value = schema, value

    def init(self, handle: Any) -> None:
        self.states = (
            handle.getValueState("one", self.schema),
            handle.getListState("many", self.schema),
            handle.getMapState("named", "n int", self.schema),
        )

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        one, many, named = self.states
        for row in rows:
            one.update(self.value)
            many.appendValue(self.value)
            named.updateValue((row.n,), self.value)
        yield from ()

    def close(self) -> None:
        pass


OLD = "n int, s struct<a:int,b:int>, list array<struct<a:int>>, by map<string,struct<a:int>>"
OLD_VALUE = (1, (2, 3), [(4,), None], {"x": (5,)})
NEW = (
    "m int, word string, t struct<b:bigint,c:int,d:struct<e:int>>, list array<struct<z:int>>, "
    "by map<string,struct<y:int,w:int>>"
)
RENAMED = {
    "m": "n",
    "t": "s",
    "t.c": "s.a",
    "list.element.z": "list.element.a",
    "by.value.y": "by.value.a",
}
DEFAULTS = {"word": "new", "t.d": Row(e=7)}
NEW_VALUE = {
    "m": 1,
    "word": "new",
    "t": {"b": 3, "c": 2, "d": {"e": 7}},
    "list": [{"z": 4}, None],
    "by": [("x", {"y": 5, "w": None})],
}


def forms(schema: str, value: Any, **step: Any) -> ts.Pipeline:
    return pipeline(Forms(schema, value), output="k string", **step)


def test_names_and_defaults_reach_into_structs_of_values_lists_and_maps() -> None:
    test = Driver(forms(OLD, OLD_VALUE))
    ask(test, "a")
    now = forms(NEW, (9, None, None, None, None), renamed=RENAMED, defaults=DEFAULTS)
    (first, *_) = Driver(now)._run.keyed.state_changes(committed(test).state)
    assert "column 's.a' is now called 't.c'" in first
    assert "column 's' is now called 't'" in first
    assert "column 't.d' (struct<e:int>) is added, its default for what is held" in first
    test.restart(2, pipeline=now)
    row = ask(test, "b")["a"]
    assert (row["one"], row["many"]) == (NEW_VALUE, [NEW_VALUE])
    assert row["named"] == [({"n": 1}, NEW_VALUE)]
    assert ask(test, "b")["b"]["one"]["word"] is None


def test_a_field_does_not_leave_its_struct_by_a_new_name() -> None:
    test = Driver(forms("n int, s struct<a:int>", (1, (2,))))
    ask(test, "a")
    test.restart(
        pipeline=forms("n int, a int, s struct<b:int>", (1, 2, (2,)), renamed={"a": "s.a"})
    )
    with pytest.raises(ts.OptionError, match=r"dropped-column-s-one\.s\.a"):
        ask(test, "a")


@pytest.mark.parametrize(
    ("defaults", "words"),
    [
        ({"worth": 5}, "its state has the columns n, word. Did you mean 'word'"),
        ({"word": 5}, "'word': 5.*expected a value of string"),
        ({"word": None}, "leave it out"),
        ({"n": "x"}, "'n': 'x'.*expected a value of int64"),
        ({"n": 2**70}, "expected a value of int64"),
    ],
)
def test_a_default_that_does_not_fit_is_refused(defaults: Mapping[str, Any], words: str) -> None:
    test = Driver(pipeline(counting("n bigint, word string"), output="k string", defaults=defaults))
    with pytest.raises(ts.OptionError, match=words):
        ask(test, "a")


def test_a_field_default_that_does_not_fit_is_refused() -> None:
    test = Driver(forms("n int, s struct<a:int>", (1, (2,)), defaults={"s.a": "x"}))
    with pytest.raises(ts.OptionError, match=r"'s\.a': 'x'.*expected a value of int"):
        ask(test, "a")


def test_defaults_are_in_the_manifest() -> None:
    value = [1, "{}", [["b", "a"]], {"ttl": [True, 5], "defaults": [["c", "00ff"]]}]
    assert FormerState.from_json(value).to_json() == value
    for strange in ({"defaults": [["c", "xy"]]}, {"defaults": [["c", 5]]}, {"default": []}):
        with pytest.raises((TypeError, ValueError)):
            FormerState.from_json([1, "{}", [], strange])


# --- tables and lists -----------------------------------------------------------------------------


def enriched(
    table_columns: str,
    element: str,
    table: Mapping[str, Any],
    elements: Mapping[str, Any],
    names: tuple[str, str] = ("table", "list"),
) -> ts.Pipeline:
    """A pipeline with a broadcast table and a list state."""
    rows_of_table = ts.stream(source("prices", "k string, price int, note string")).map_batches(
        lambda rows: with_columns(rows, table_columns), schema=table_columns
    )
    prices = ts.broadcast(rows_of_table, key="k", uid=names[0], **table)
    stored_names = [part.split()[0] for part in element.split(", ")]

    def keep(rows: pa.RecordBatch, stored: pa.RecordBatch) -> Any:
        values = [*stored.to_pylist(), *({stored_names[0]: row["n"]} for row in rows.to_pylist())]
        return rows.select(["k", "n", "at"]), pa.RecordBatch.from_pylist(values, stored.schema)

    state = ts.list_state(element, uid=names[1], **elements)
    return (
        ts.Pipeline("declared")
        .read(source("in"))
        .map_batches(keep, state=state, schema=COLUMNS)
        .map_batches(ts.enrich(prices, on="k", how="left"))
        .write(ts.KafkaSink(NOBODY, topic="out", value=ts.Json()))
    )


def with_columns(rows: pa.RecordBatch, columns: str) -> pa.RecordBatch:
    """Give rows the columns of a table: the price under any name, and a note."""
    by_name = {"k": rows["k"], "note": rows["note"]}
    names = [part.split()[0] for part in columns.split(", ")]
    return pa.record_batch([by_name.get(name, rows["price"]) for name in names], names)


def committed(test: Driver) -> Any:
    manifest = test._driver.coordinator.committed_manifest
    assert manifest is not None
    return manifest


OF_TABLE = {"renamed": {"cost": "price"}, "defaults": {"note": "old"}, "previous_uid": "table"}
OF_LIST = {"renamed": {"m": "n"}, "defaults": {"word": "w"}, "previous_uid": "list"}


@pytest.mark.parametrize("tasks", [1, 2])
def test_tables_and_lists_take_new_names_defaults_and_uids(tasks: int) -> None:
    test = Driver(enriched("k string, price int", "n int", {}, {}))
    test.feed("prices", [{"k": "a", "price": 3}, {"k": "b", "price": 4}])
    test.feed("in", [{"k": "a", "n": 1, "at": 0}])
    test.drain()
    positions = by_input(committed(test).sources)["table"]
    now = enriched(
        "k string, cost bigint, note string", "m bigint, word string", OF_TABLE, OF_LIST, ("t", "l")
    )
    changes = Driver(now)._run.keyed.state_changes(committed(test).state)
    assert "step t takes up the state of 'table' with the next epoch" in changes
    test.restart(tasks, pipeline=now)
    test.feed("in", [{"k": "a", "n": 2, "at": 1}])
    test.crash()
    test.drain()
    table = {row["k"]: (row["cost"], row["note"]) for row in test.state("t").to_pylist()}
    assert table == {"a": (3, "old"), "b": (4, "old")}
    assert by_input(committed(test).sources)["t"].positions == positions.positions
    assert {step.uid for step in committed(test).state} == {"t", "l"}
    elements = [(row["m"], row["word"]) for row in test.state("l").to_pylist()]
    assert sorted(elements) == [(1, "w"), (2, None)]
    test.feed("prices", [{"k": "b", "price": 5, "note": "new"}])
    test.feed("in", [{"k": "b", "n": 3, "at": 2}])
    assert test.drain().output().to_pylist()[-1]["cost"] == 5
    test.restart(2, pipeline=now)
    assert test.drain().state("t").num_rows == 2, "the arguments may stay"


def test_a_table_without_its_previous_uid_is_refused() -> None:
    test = Driver(enriched("k string, price int", "n int", {}, {}))
    test.feed("prices", [{"k": "a", "price": 3}])
    test.feed("in", [{"k": "a", "n": 1, "at": 0}])
    test.drain()
    other = enriched("k string, price int", "n int", {}, {}, ("t", "list"))
    test.restart(pipeline=other)
    test.feed("in", [{"k": "a", "n": 1, "at": 0}])
    with pytest.raises(ts.OptionError, match="'table'"):
        test.drain()


def test_what_was_deleted_gets_no_default() -> None:
    test = Driver(deleting("k string, price int"))
    test.feed("prices", [{"k": "a", "price": 3}, {"k": "b", "price": 4}])
    test.drain()
    test.feed("prices", [{"k": "a", "price": -1}])
    test.feed("in", [{"k": "b", "n": 1, "at": 0}])
    test.drain()
    changed = deleting("k string, price int, note string", defaults={"note": "old"})
    test.restart(pipeline=changed)
    test.feed("in", [{"k": "b", "n": 1, "at": 0}])
    test.drain()
    assert test.state("table").select(["k", "note"]).to_pylist() == [{"k": "b", "note": "old"}]


def deleting(columns: str, **table: Any) -> ts.Pipeline:
    rows = ts.stream(source("prices", "k string, price int, note string")).map_batches(
        lambda rows: with_columns(rows, columns), schema=columns
    )
    prices = ts.broadcast(
        rows, key="k", uid="table", delete=lambda rows: pc.less(rows["price"], 0), **table
    )
    return (
        ts.Pipeline("declared")
        .read(source("in"))
        .map_batches(ts.enrich(prices, on="k", how="left"))
        .write(ts.KafkaSink(NOBODY, topic="out", value=ts.Json()))
    )


def test_a_guard_taken_away_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evolution, "_former_name", lambda path, name, renamed: name)
    with pytest.raises((AssertionError, ts.TallystickError)):
        test_names_and_defaults_reach_into_structs_of_values_lists_and_maps()
