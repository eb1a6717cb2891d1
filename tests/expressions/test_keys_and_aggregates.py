"""Expressions as keys and in aggregates, and names that look like expressions and are none."""

import datetime
import re
from typing import Any

import pytest

import tallystick as ts
from tallystick.errors import OptionError
from tallystick.expressions import parsing
from tallystick.pipeline.graph import graph_of
from tallystick.spark.cluster import Cluster
from tallystick.testing import Driver, run

BEGIN = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
SINK = ts.KafkaSink("x:1", topic="out", value=ts.Json())


def orders(columns: str = "user string, price double, n int, at timestamp") -> ts.Pipeline:
    source = ts.KafkaSource("x:1", topics=["t"], value=ts.Json(columns))
    return ts.Pipeline("orders").read(source)


ROWS = [
    {"user": "Ann", "price": 2.5, "n": 2, "at": BEGIN},
    {"user": "ANN", "price": 1.0, "n": 3, "at": BEGIN + datetime.timedelta(seconds=1)},
    {"user": "bo", "price": 4.0, "n": 1, "at": BEGIN + datetime.timedelta(seconds=2)},
    {"user": "bo", "price": None, "n": 1, "at": BEGIN + datetime.timedelta(hours=1)},
]
TOTAL = {"total": ts.sum("price * n"), "most": ts.maximum("price * n"), "count": ts.count()}


@pytest.mark.parametrize(
    ("key", "name"), [("lower(user)", "lower(user)"), ("lower(user) AS who", "who")]
)
def test_a_key_is_an_expression(key: str, name: str) -> None:
    pipeline = orders().key_by(key).process(ts.aggregate(TOTAL)).write(SINK)

    rows = run(pipeline, ROWS).output().to_pylist()
    assert sorted(rows, key=lambda row: str(row[name])) == [
        {name: "ann", "total": 8.0, "most": 5.0, "count": 2},
        {name: "bo", "total": 4.0, "most": 4.0, "count": 2},
    ]
    assert f"key_by({key!r})\n" in pipeline.explain()
    assert "price * n" in pipeline.explain()
    assert pipeline.preview(ROWS).table.column_names[0] == name


@pytest.mark.parametrize("late", ["drop", "late"])
def test_windows_aggregate_expressions(late: str) -> None:
    windows = ts.windowed(ts.tumbling("1 minute"), TOTAL, late=late)
    pipeline = orders().key_by("upper(user) AS who").process(windows, event_time="at")
    others = {} if late == "drop" else {late: SINK}
    rows = run(pipeline.write(SINK, **others), ROWS).output().to_pylist()

    totals = {row["who"]: row["total"] for row in rows if row["window_start"] == BEGIN}
    assert totals == {"ANN": 8.0, "BO": 4.0}


def test_each_input_has_a_key_of_its_own() -> None:
    def source(topic: str) -> ts.KafkaSource:
        return ts.KafkaSource("x:1", topics=[topic], value=ts.Json("user string, at timestamp"))

    pipeline = (
        ts.Pipeline("both")
        .read(a=source("a"), b=source("b"))
        .key_by(a="lower(user)", b="substring(user, 2)")
        .process(
            ts.interval_join("a", "b", lower=0, upper="1 minute"),
            event_time={"a": "at", "b": "at"},
        )
        .write(SINK)
    )
    rows = {"a": [{"user": "Ann", "at": BEGIN}], "b": [{"user": "_ann", "at": BEGIN}]}

    assert [row["lower(user)"] for row in run(pipeline, rows).output().to_pylist()] == ["ann"]


@pytest.mark.parametrize("name", ["user-id", "lower(user)", "a b", "rate (%)", "a.b"])
def test_a_column_of_that_name_stays_the_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without the parser, which rows with such names never needed."""

    def absent() -> Any:
        raise parsing.ExpressionError("expressions need sqlglot")

    pipelines = [orders(f"`{name}` string, user string, id int")]
    monkeypatch.setattr(parsing, "parser", absent)
    pipelines.append(orders(f"`{name}` string, user string, id int"))
    for pipeline in pipelines:
        counted = pipeline.key_by(name).process(ts.aggregate({"n": ts.count()})).write(SINK)
        rows = run(counted, [{name: "X", "user": "u", "id": 1}]).output().to_pylist()
        assert rows == [{name: "X", "n": 1}]


@pytest.mark.parametrize(
    ("key", "column", "words"),
    [
        ("lowr(user)", "n", "there is no function 'lowr' here"),
        ("lower(usr)", "n", "there is no column 'usr', only"),
        ("user", "n *", "process('n *')"),
        ("user", "pric * n", "Did you mean 'price'?"),
        ("user", "user || 'x'", "of column \"user || 'x'\""),
    ],
)
def test_mistakes_are_told_before_the_start(key: str, column: str, words: str) -> None:
    pipeline = orders().key_by(key).process(ts.aggregate({"x": ts.sum(column)})).write(SINK)

    with pytest.raises(OptionError, match=re.escape(words)):
        pipeline.explain()


def test_a_column_of_a_dataframe_may_have_any_name() -> None:
    pipeline = orders().transform(lambda frame: frame.withColumnRenamed("user", "user-id"))
    keyed = pipeline.key_by("user-id")

    assert (keyed.columns, keyed.pipeline) == (("user-id",), pipeline)


def test_another_expression_is_another_state() -> None:
    """The text of an aggregate's expression is part of the state's meaning."""

    def counting(text: str) -> ts.Pipeline:
        return orders().key_by("user").process(ts.aggregate({"x": ts.sum(text)})).write(SINK)

    driver = Driver(counting("price * n"))
    driver.feed("t", ROWS)
    driver.epoch()
    driver.restart(pipeline=counting("price + n"))
    with pytest.raises(OptionError, match=re.escape('is now sum("price + n")')):
        driver.epoch()


def test_explain_and_the_page_show_expressions_as_they_are_written() -> None:
    pipeline = orders().filter("n > 1").select("user", "price AS p").key_by("lower(user)")
    counted = pipeline.process(ts.aggregate({"n": ts.count()})).filter("n > 2").write(SINK)
    run_of = counted._compiled(Cluster.at_hand(None))
    _, (reading,), (keyed,), *_ = graph_of(run_of.all_inputs, run_of.keyed.steps, counted.topology)

    steps = ("filter('n > 1')", "select('user', 'price AS p')", "key_by('lower(user)')")
    assert reading.texts == steps
    computed = 'aggregate; columns.n = count(); column["lower(user)"] = lower("user")'
    assert keyed.texts == ("by lower(user)", computed, "filter('n > 2')")
    assert f"computes: {computed}" in counted.explain()
    lines = [line.partition("  ")[2].strip() for line in counted.explain().splitlines()]
    assert [line for line in lines if line in (*steps, "filter('n > 2')")] == [
        *steps,
        "filter('n > 2')",
    ]
