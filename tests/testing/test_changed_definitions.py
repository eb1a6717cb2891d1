"""A column is more than its name: state goes by the expressions that make it, in SQL too."""

import datetime
from typing import Any

import pytest

import tallystick as ts
from tallystick.errors import OptionError
from tallystick.expressions.parsing import parsed
from tallystick.testing import Driver

BEGIN = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
ROW = {"user": "Ann", "other": "Bob", "a": 1.0, "b": 2.0, "at": BEGIN}
COLUMNS = "user string, other string, a double, b double, at timestamp"
SINK = ts.KafkaSink("x:1", topic="out", value=ts.Json())
TABLES = ("t", "s")


def source(topic: str = "t") -> ts.KafkaSource:
    return ts.KafkaSource("x:1", topics=[topic], value=ts.Json(COLUMNS))


def query(text: str) -> ts.Pipeline:
    tables = {name: source(name) for name in TABLES if f" {name} " in f"{text} "}
    watermark = dict.fromkeys(tables, "at - 0 seconds")
    return ts.sql(text, watermark=watermark, **tables).write(SINK)


def rows() -> ts.Pipeline:
    return ts.Pipeline("p").read(source())


def counted(pipeline: Any) -> ts.Pipeline:
    return pipeline.process(ts.aggregate({"n": ts.count()})).write(SINK)


def summed(pipeline: Any) -> ts.Pipeline:
    return pipeline.key_by("user").process(ts.aggregate({"x": ts.sum("y")})).write(SINK)


def group(text: str) -> ts.Pipeline:
    return query(f"SELECT user, {text} AS x FROM t GROUP BY user")


def windows(text: str) -> ts.Pipeline:
    return query(f"SELECT user, {text} AS x FROM t GROUP BY user, window(at, '1 hour')")


def by(key: str) -> ts.Pipeline:
    return query(f"SELECT {key} AS k, count(*) AS n FROM t GROUP BY {key}")


def best(key: str, order: str) -> ts.Pipeline:
    return query(
        f"SELECT user, a FROM (SELECT user, a, window_start, window_end, ROW_NUMBER() OVER "
        f"(PARTITION BY {key}, window_start, window_end ORDER BY {order}) AS r "
        f"FROM TABLE(TUMBLE(TABLE t , DESCRIPTOR(at), INTERVAL '1' HOUR))) WHERE r = 1"
    )


def join(condition: str) -> ts.Pipeline:
    near = "s.at BETWEEN t.at - INTERVAL '1' HOUR AND t.at + INTERVAL '1' HOUR"
    return query(f"SELECT t.user, s.a AS x FROM t JOIN s ON {condition} AND {near}")


def sides(column: str, function: Any) -> ts.Pipeline:
    times = {"event_time": {"t": "at", "s": "at"}} if function.time_mode == "EventTime" else {}
    t = ts.stream(source("t")).select("user", "at", f"{column} AS x")
    read = ts.Pipeline("p").read(t=t, s=source("s")).key_by(t="user", s="user")
    return read.process(function, **times).write(SINK)


def joined(column: str, *topics: str) -> ts.Pipeline:
    streams = (ts.stream(source(topic), uid=topic) for topic in topics)
    return summed(ts.Pipeline("p").read(*streams).with_columns(y=column))


def table(*columns: str) -> ts.Pipeline:
    prices = ts.broadcast(ts.stream(source("s")).select(*columns), key="k", uid="s")
    rows = ts.Pipeline("p").read(ts.stream(source("t"), uid="t"))
    return rows.map_batches(lambda batch, _: batch, state=prices).write(SINK)


def inner(text: str) -> ts.Pipeline:
    return query(f"SELECT user, sum(y) AS x FROM (SELECT user, {text} AS y FROM t ) GROUP BY user")


def passed(batch: Any) -> Any:
    return batch.select([name for name in ("user", "a", "y") if name in batch.schema.names])


CHANGES: dict[str, tuple[ts.Pipeline, ts.Pipeline, str]] = {
    "a sum in SQL": (group("sum(a * 2)"), group("sum(a * 3)"), '("a" * 3), .* ("a" * 2)'),
    "a condition in SQL": (
        group("count(*) FILTER (WHERE a > 1)"),
        group("count(*) FILTER (WHERE a > 2)"),
        '("a" > 2)',
    ),
    "a count in SQL": (group("count(a)"), group("count(b)"), 'isnull("b")'),
    "an average in SQL": (group("avg(a)"), group("avg(b)"), 'cast("b", double)'),
    "a window in SQL": (windows("sum(a * 2)"), windows("sum(a * 3)"), '("a" * 3)'),
    "a key in SQL": (by("lower(user)"), by("upper(user)"), 'column["k"] is now upper("user")'),
    "a query in a query": (inner("a * 2"), inner("a * 3"), 'column["y"] is now ("a" * 3)'),
    "DISTINCT": (
        query("SELECT DISTINCT lower(user) AS k FROM t"),
        query("SELECT DISTINCT upper(user) AS k FROM t"),
        'upper("user")',
    ),
    "a join": (join("t.user = s.user"), join("t.user = s.other"), 'column["s"]["_key_0"]'),
    "the rows of an upsert join": (
        sides("a * 2", ts.upsert_join("t", "s")),
        sides("a * 3", ts.upsert_join("t", "s")),
        'column["t"]["x"] is now ("a" * 3)',
    ),
    "the rows of an interval join": (
        sides("a", ts.interval_join("t", "s", lower=0, upper=1)),
        sides("b", ts.interval_join("t", "s", lower=0, upper=1)),
        'column["t"]["x"] is now "b"',
    ),
    "the rows of a temporal join": (
        sides("a", ts.temporal_join("t", "s")),
        sides("b", ts.temporal_join("t", "s")),
        'column["t"]["x"] is now "b"',
    ),
    "the key of a broadcast table": (
        table("lower(user) AS k", "a"),
        table("upper(user) AS k", "a"),
        'column["k"] is now upper("user")',
    ),
    "the rows of a broadcast table": (
        table("user AS k", "a AS x"),
        table("user AS k", "b AS x"),
        'column["x"] is now "b"',
    ),
    "an input that joins": (joined("a", "t"), joined("b", "t", "s"), 'column["y"] is now "b"'),
    "an order": (best("user", "a"), best("user", "b"), 'column["_order"] is now "b"'),
    "a partition": (best("user", "a"), best("other", "a"), 'column["_key_0"] is now "other"'),
    "key_by": (
        counted(rows().key_by("lower(user) AS who")),
        counted(rows().key_by("upper(user) AS who")),
        'column["who"] is now upper("user"), .* lower("user")',
    ),
    "with_columns": (
        summed(rows().with_columns(y="a * 2")),
        summed(rows().with_columns(y="a * 3")),
        '("a" * 3)',
    ),
    "two expressions, one over the other": (
        summed(rows().with_columns(a="a + b").with_columns(y="A * 2")),
        summed(rows().with_columns(a="a - b").with_columns(y="A * 2")),
        '(("a" - "b") * 2)',
    ),
    "an expression behind a function": (
        summed(rows().map_batches(passed, schema="user string, a double").with_columns(y="a * 2")),
        summed(rows().map_batches(passed, schema="user string, a double").with_columns(y="a * 3")),
        '("a" * 3)',
    ),
    "another column": (
        summed(rows().select("user", "a AS y")),
        summed(rows().select("user", "b AS y")),
        'column["y"] is now "b"',
    ),
}
FREE: dict[str, tuple[ts.Pipeline, ts.Pipeline]] = {
    "spaces, brackets": (group("sum(a * 2)"), group("sum((a*2))")),
    "an input with other definitions": (
        joined("a", "t"),
        summed(
            ts.Pipeline("p").read(
                ts.stream(source("t"), uid="t").select("user", "a AS y"),
                ts.stream(source("s"), uid="s").select("user", "b AS y"),
            )
        ),
    ),
    "a filter": (counted(rows().key_by("user")), counted(rows().filter("a > 0").key_by("user"))),
    "other columns": (
        summed(rows().with_columns(y="a * 2")),
        summed(rows().with_columns(y="a * 2", z="b")),
    ),
    "a column by a function": (
        summed(rows().select("user", "a AS y")),
        summed(rows().select("user", "b AS y").map_batches(passed, schema="user string, y double")),
    ),
    "kept columns": (
        rows()
        .with_columns(z="a")
        .key_by("user")
        .process(ts.aggregate({"n": ts.count()}, keep=["z"]))
        .write(SINK),
        rows()
        .with_columns(z="b")
        .key_by("user")
        .process(ts.aggregate({"n": ts.count()}, keep=["z"]))
        .write(SINK),
    ),
}


def restarted(old: ts.Pipeline, new: ts.Pipeline) -> Driver:
    driver = Driver(old)
    topics = [name for name in TABLES if any(name in one.topics for one in _sources(old))]
    for topic in topics:
        driver.feed(topic, [ROW])
    assert driver.epoch()
    driver.restart(pipeline=new)
    for topic in topics:
        driver.feed(topic, [ROW])
    driver.epoch()
    return driver


def _sources(pipeline: ts.Pipeline) -> list[ts.KafkaSource]:
    return [one.source for _, one in pipeline.inputs.streams]


@pytest.mark.parametrize(("old", "new", "words"), CHANGES.values(), ids=CHANGES)
def test_another_definition_of_a_column_is_refused(
    old: ts.Pipeline, new: ts.Pipeline, words: str
) -> None:
    with pytest.raises(OptionError) as refused:
        restarted(old, new)
    for part in words.split(".*"):
        assert part in str(refused.value)
    assert restarted(old, old)


@pytest.mark.parametrize(("old", "new"), FREE.values(), ids=FREE)
def test_what_a_state_does_not_go_by_may_change(old: ts.Pipeline, new: ts.Pipeline) -> None:
    assert restarted(old, new)


def test_the_texts_of_expressions_are_frozen() -> None:
    """They lie in checkpoints: another text for the same expression would refuse every start."""
    texts = {
        "price*(n + 1)": '("price" * ("n" + 1))',
        "LOWER(user.name) || 'it\\'s'": 'concat(lower("user"."name"), \'it\\\'s\')',
        "CASE WHEN a > 1.5 THEN 'x' ELSE null END": "case((\"a\" > 1.5), 'x', None)",
        "CAST(a AS bigint) BETWEEN 1 AND 2": (
            'and((cast("a", bigint) >= 1), (cast("a", bigint) <= 2))'
        ),
        "at + INTERVAL '1' MINUTE": '("at" + 60000000)',
        "a IN (1, -2) OR NOT true": 'or(in("a", 1, -2), not(True))',
    }
    assert {text: parsed(text, "test")[1].canonical() for text in texts} == texts
