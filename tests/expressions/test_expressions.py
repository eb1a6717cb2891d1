"""Expressions without Spark: mistakes are told, branches run for their rows, steps know columns."""

import datetime
import re
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle

import tallystick as ts
from tallystick.errors import OptionError
from tallystick.expressions.binding import bind, condition_of, selected
from tallystick.expressions.nodes import ExpressionError
from tallystick.expressions.operators import column_of
from tallystick.expressions.parsing import parsed
from tallystick.testing import run

ROWS = pa.RecordBatch.from_pylist(
    [
        {"n": 2, "s": "a", "d": 1.5},
        {"n": 0, "s": "B", "d": None},
        {"n": None, "s": None, "d": -1.0},
    ],
    pa.schema([("n", pa.int64()), ("s", pa.string()), ("d", pa.float64())]),
)


def values(text: str) -> list[Any]:
    return column_of(bind(parsed(text, "select()")[1], ROWS.schema).run(ROWS), ROWS).to_pylist()


def test_a_side_that_may_fail_runs_for_the_rows_that_need_it() -> None:
    assert values("n <> 0 AND 10 / n > 1") == [True, False, None]
    assert values("CASE WHEN n = 0 THEN -1.0 ELSE 10 / n END") == [5.0, -1.0, None]
    assert values("coalesce(if(n = 0, 0e0, NULL), 10 / n)") == [5.0, 0.0, None]
    with pytest.raises(ValueError, match=r"10 / n: division by zero: write nullif"):
        values("10 / n > 1 AND n <> 0")


def test_whole_numbers_become_decimals_of_as_many_digits_as_their_values_need() -> None:
    assert values("CAST(n AS decimal(3, 2)) = 2") == [True, False, None]
    with pytest.raises(ValueError, match="beyond decimal"):
        values("CAST(n + 8 AS decimal(3, 2))")


def test_rows_that_are_none_have_columns_too() -> None:
    empty = ROWS.slice(0, 0)
    for text in (
        "n + 1",
        "CASE WHEN n > 1 THEN s END",
        "coalesce(d, 1)",
        "upper(s)",
        "round(d, 2)",
    ):
        bound = bind(parsed(text, "select()")[1], ROWS.schema)
        assert column_of(bound.run(empty), empty).type == bound.kind


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("n + m + 1", "at character 5, m: there is no column 'm', only n, s, d"),
        ("n > 1 AND s + 1 > 2", "at character 11, s + 1: there is no string + int"),
        ("lenght(s)", "at character 1: there is no function 'lenght' here. Did you mean 'length'?"),
        ("s + 1", "there is no string + int"),
        ("s > 1", "string and int have no common type: CAST one of them"),
        ("n AND d", "expected a boolean, not bigint"),
        ("n +", "at character 3, '+'"),
        ("", "expected an expression"),
        ("n, s", "expected one expression"),
        ("DATE '2026-01-01' + INTERVAL 1 DAY", "whole days from a date: write date_add(…, n)"),
        ("trunc(DATE '2026-01-01', 'week')", "there is no function 'date_trunc' here"),
        ("s = 'a'' b'", r"write a quote in a text as \'"),
        ("s || n + 1", "write brackets: a || (b + c)"),
        ("n + 1L", "1L: write CAST(… AS bigint)"),
        (r"s LIKE 'a\\nb'", "a backslash in a pattern stands before"),
        ("CAST('20200101' AS date)", "expected a date or time such as"),
        ("CAST(s AS double)", "no cast from string to double here"),
        ("NULL = NULL", "values of NULL are not compared here"),
        ("length(NULL)", "it does not take"),
        ("n FROM x", "expected one expression"),
        ("s.name", "'s' (string) has no field 'name'"),
        ("current_timestamp()", "there is no function 'current_timestamp' here"),
        ("soundex(s)", "there is no function"),
        ("n BETWEEN SYMMETRIC 3 AND 1", "there is no function 'between' here"),
        ("substring(s, n)", "this argument has to be a literal here"),
        ("try_cast(s AS int)", "there is no function 'try_cast' here"),
        ("CAST(d AS string)", "no cast from double to string here that is certain to be Spark's"),
        ("'it''s'", r"write a quote in a text as \'"),
        (
            "get_json_object(s, '$.user.name')",
            "there is no function 'get_json_object' here (GET_JSON_OBJECT(s, '$.user.name')): "
            "declare the fields in the source, value=ts.Json('user struct<name string>')",
        ),
        ("from_json(s, 'a int')", "there is no function 'from_json' here"),
        ("s[0].name", "a field of s[0]: give that a name in a step before"),
        ("s:name", "expected a dot before a field, or AS before a name, not a colon"),
        ("s = '2026-13-01' OR DATE '2026-13-01' IS NULL", "expected a date or time such as"),
    ],
)
def test_a_mistake_is_told_in_words_of_the_expression(text: str, words: str) -> None:
    with pytest.raises(OptionError) as caught:
        values(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("-2147483648", pa.int32()),
        ("-9223372036854775808", pa.int64()),
        ("CAST(d AS float) + CAST(1 AS tinyint)", pa.float64()),
        ("round(1.25, 2)", pa.decimal128(4, 2)),
        ("round(CAST(n AS decimal(20,2)), 5)", pa.decimal128(21, 2)),
    ],
)
def test_types_are_those_of_spark(text: str, kind: pa.DataType) -> None:
    assert bind(parsed(text, "select()")[1], ROWS.schema).kind == kind


@pytest.mark.parametrize(
    ("number", "digits", "rounded"),
    [
        (-47710851021109.945, 2, -47710851021109.95),
        (54008351.125275314, 8, 54008351.12527531),
        (4.8306808626079185, 15, 4.830680862607919),
        (-0.4, 0, 0.0),
    ],
)
def test_doubles_are_rounded_as_their_text(number: float, digits: int, rounded: float) -> None:
    rows = pa.RecordBatch.from_pydict({"w": [number]})
    bound = bind(parsed(f"round(w, {digits})", "select()")[1], rows.schema)
    assert repr(column_of(bound.run(rows), rows)[0].as_py()) == repr(rounded)


def source(columns: str = "dest string, delay double, at timestamp") -> ts.KafkaSource:
    return ts.KafkaSource("localhost:9092", topics=["flights"], value=ts.Json(columns))


SINK = ts.KafkaSink("localhost:9092", topic="out", value=ts.Json())
FLIGHTS = [
    {"dest": "ord", "delay": 20.0, "at": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)},
    {"dest": "jfk", "delay": 3.0, "at": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)},
    {"dest": "ord", "delay": 40.0, "at": datetime.datetime(2026, 1, 3, tzinfo=datetime.UTC)},
]


def test_columns_are_known_behind_expressions_and_keyed_steps() -> None:
    pipeline = (
        ts.Pipeline("p")
        .read(source())
        .filter("delay > 15")
        .with_columns(hours="delay / 10", dest="upper(dest)")
        .drop("at")
        .rename({"hours": "tens"})
        .key_by("dest")
        .process(ts.aggregate({"n": ts.count(), "tens": ts.sum("tens")}))
        .select("dest", "tens / n AS mean", "n")
        .write(SINK)
    )
    assert run(pipeline, {"flights": FLIGHTS}).output().to_pylist() == [
        {"dest": "ORD", "mean": 3.0, "n": 2}
    ]
    assert "select('dest', 'tens / n AS mean', 'n')" in pipeline.explain()


def test_named_inputs_and_unions_need_no_schema_behind_expressions() -> None:
    one = ts.stream(source(), uid="one").select("dest AS name", "delay")
    other = ts.stream(
        ts.KafkaSource("localhost:9092", topics=["trains"], value=ts.Json("name string, late int")),
        uid="other",
    ).select("name", "CAST(late AS double) AS delay")
    pipeline = ts.Pipeline("p").read(one, other).filter("delay > 15").write(SINK)
    given = {"flights": FLIGHTS, "trains": [{"name": "ICE", "late": 60}]}
    assert sorted(run(pipeline, given).output()["name"].to_pylist()) == ["ICE", "ord", "ord"]


def test_one_sink_may_have_a_condition() -> None:
    pipeline = (
        ts.Pipeline("p").read(source()).select("dest", "delay").write(ts.when(SINK, "delay > 30"))
    )
    assert run(pipeline, {"flights": FLIGHTS}).output().to_pylist() == [
        {"dest": "ord", "delay": 40.0}
    ]


def test_the_condition_of_a_sink_names_columns_that_are_there() -> None:
    pipeline = ts.Pipeline("p").read(source()).write(ts.when(SINK, "dely > 30"))
    with pytest.raises(ts.OptionError, match=r"at character 1, dely: .*Did you mean 'delay'\?"):
        pipeline.explain()


@pytest.mark.parametrize(
    ("pipeline", "words"),
    [
        (ts.Pipeline("p").read(source()).filter("late > 3"), "there is no column 'late'"),
        (ts.Pipeline("p").read(source()).filter("delay"), "it is double: expected a condition"),
        (ts.Pipeline("p").read(source()).drop("dely"), "Did you mean 'delay'?"),
        (ts.Pipeline("p").read(source()).select("NULL AS x"), "would be NULL: CAST it to a type"),
        (
            ts.Pipeline("p").read(source()).rename({"dest": "delay"}),
            "column 'delay' would be there twice",
        ),
    ],
)
def test_what_does_not_fit_the_columns_is_told_before_anything_runs(
    pipeline: ts.Pipeline, words: str
) -> None:
    with pytest.raises(OptionError) as caught:
        pipeline.write(SINK).explain()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "words"),
    [((), "expected columns"), (("n + 1",), "has no name"), (("n", "n"), "is there twice")],
)
def test_a_selection_names_its_columns(columns: tuple[str, ...], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        selected(columns)


def test_a_condition_goes_to_other_processes_without_the_parser() -> None:
    condition = condition_of("n > 1")
    assert condition(ROWS).to_pylist() == [True, False, None]
    copy = cloudpickle.loads(cloudpickle.dumps(condition))
    assert copy.plans.newest is None
    assert copy(ROWS).to_pylist() == [True, False, None]


def test_a_division_by_zero_is_told_as_an_error_of_a_function(capsys: Any) -> None:
    pipeline = ts.Pipeline("p").read(source("n int")).select("10 / n AS x").write(SINK)
    with pytest.raises(ts.TallystickError) as caught:
        run(pipeline, {"flights": [{"n": 1}, {"n": 0}]})
    assert "division by zero" in str(caught.value)
    assert "10 / n" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("s RLIKE '(?i)a'", "not read alike by Java and RE2"),
        ("s RLIKE 'a++'", "not read alike"),
        ("s RLIKE 'a$b'", "not read alike"),
        ("s RLIKE '[a&&b]'", "not read alike"),
        ("s RLIKE '\\\\bword'", r"\b in the pattern"),
        ("regexp_replace(s, 'a*', 'x')", "can match nothing"),
        ("regexp_extract(s, '(a)', 2)", "the pattern has 1 groups"),
        ("split(s, '[,;]')", "expected a plain text"),
        ("date_format(at, 'E')", "a pattern of yyyy MM dd"),
        ("from_utc_timestamp(at, 'Europe/Nowhere')", "there is no time zone"),
        ("lpad(s, 5, 'xy')", "one sign to fill up with"),
        ("left(s, '2')", "expected a whole number"),
        ("array_contains(s, 'a')", "expected an array"),
    ],
)
def test_what_java_and_arrow_read_otherwise_is_refused(text: str, words: str) -> None:
    schema = pa.schema([("s", pa.string()), ("at", pa.timestamp("us", "UTC"))])
    with pytest.raises(ExpressionError, match=re.escape(words)):
        bind(parsed(text, "select()")[1], schema)


def test_a_zone_is_not_guessed_behind_the_years_that_arrow_knows() -> None:
    moment = datetime.datetime(2050, 7, 1, tzinfo=datetime.UTC)
    rows = pa.record_batch({"at": pa.array([moment], pa.timestamp("us", "UTC"))})
    bound = bind(parsed("from_utc_timestamp(at, 'UTC')", "select()")[1], rows.schema)

    with pytest.raises(ValueError, match="beyond 2036"):
        bound.run(rows)
