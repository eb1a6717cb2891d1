"""Expressions and queries give what Spark gives in ANSI mode, or refuse."""

import datetime
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import tallystick as ts
from tallystick.expressions.binding import Condition, bind
from tallystick.expressions.nodes import ExpressionError
from tallystick.expressions.operators import column_of
from tallystick.expressions.parsing import parsed
from tallystick.expressions.zones import check_zone
from tallystick.testing import run
from tests.differential.expressions import COLUMNS, EXPRESSIONS, FAILING, rows
from tests.spark import jvm

pytestmark = [pytest.mark.spark]
SEEDS = range(3)
BATCHES = [rows(seed) for seed in SEEDS]
SETTINGS = {
    "spark.sql.ansi.enabled": "true",
    # With it Spark computes `10 / i` of `i <> 0 AND 10 / i > 1` for all rows.
    "spark.sql.subexpressionElimination.enabled": "false",
}


@pytest.fixture(scope="module")
def spark(shared_spark: SparkSession) -> Iterator[SparkSession]:
    with pytest.MonkeyPatch.context() as patched:
        # Its logger of errors gives every handler that it meets its own format, pytest's too.
        patched.setattr(PySparkException, "_log_exception", lambda _: None)
        yield jvm.interpreting_session(shared_spark, SETTINGS)


@pytest.fixture(scope="module")
def frame(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame(pa.Table.from_batches(BATCHES)).cache()


def ours(text: str, batch: pa.RecordBatch) -> pa.Array:
    _, node = parsed(text, "select()")
    return column_of(bind(node, batch.schema).run(batch), batch)


def bits(value: Any) -> Any:
    """Tell 0.0 from -0.0; all NaN are one."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else struct.pack(">d", value)
    return value


def plain(kind: pa.DataType) -> pa.DataType:
    """Return a type without the name of elements of arrays, and whether they may be null."""
    return pa.list_(kind.value_type) if pa.types.is_list(kind) else kind


def test_every_function_gives_what_spark_gives(frame: DataFrame) -> None:
    texts = [text for group in EXPRESSIONS.values() for text in group]
    expected = frame.selectExpr(
        *(f"{text} AS c{number}" for number, text in enumerate(texts))
    ).toArrow()
    differing = []
    for number, text in enumerate(texts):
        column = expected.column(number)
        actual = pa.chunked_array([ours(text, batch) for batch in BATCHES])
        if plain(actual.type) != plain(column.type):
            differing.append(f"{text}: {actual.type}, and {column.type} in Spark")
        pairs = zip(actual.to_pylist(), column.to_pylist(), strict=True)
        differing += [
            f"{text}, row {at}: {one!r}, and {other!r} in Spark"
            for at, (one, other) in enumerate(pairs)
            if bits(one) != bits(other)
        ][:1]
    assert differing == []


@pytest.mark.parametrize("text", FAILING)
def test_what_fails_in_spark_fails_here(frame: DataFrame, text: str) -> None:
    with pytest.raises(Exception, match=r"\[[A-Z_]+(\.[A-Z_]+)?\]"):
        frame.selectExpr(text).toArrow()
    with pytest.raises(ValueError, match=r"beyond|division by zero|is no "):
        ours(text, pa.Table.from_batches(BATCHES).combine_chunks().to_batches()[0])


OF_ZONES = [
    "at + INTERVAL 1 DAY",
    "at - INTERVAL 30 HOUR",
    "at + INTERVAL 23 HOUR",
    "day + INTERVAL 1 HOUR",
    "day + INTERVAL 2 DAYS",
    "at > '2026-03-29 02:30:00'",
    "at > '2026-03-29 02:30:00+02:00'",
    "at > DATE '2026-03-29'",
    "greatest(at, day)",
    "coalesce(at, '2026-03-29 02:30:00')",
    "CASE WHEN ok THEN at ELSE day END",
    "at IN ('2026-03-29 00:30:00')",
    "CAST(day AS timestamp)",
    "CAST(at AS date)",
    "unix_seconds(CAST('2026-10-25 02:30:00' AS timestamp))",
]
CHANGES = [
    datetime.datetime(2026, *day, tzinfo=datetime.UTC) for day in ((3, 28, 12), (10, 24, 12))
]
"""Moments at which a day on in Berlin is not 24 hours."""


def test_what_is_other_in_the_time_zone_of_the_session_is_refused(
    spark: SparkSession,
) -> None:
    names = {
        "at": CHANGES,
        "wall": CHANGES,
        "later": CHANGES,
        "day": [one.date() for one in CHANGES],
    }
    changes = BATCHES[0].slice(0, 2)
    for name, values in names.items():
        at = changes.schema.get_field_index(name)
        column = pa.array(values, changes.schema.field(at).type)
        changes = changes.set_column(at, changes.schema.field(at), column)
    batches = [*BATCHES, changes]
    texts = [*OF_ZONES, *(text for group in EXPRESSIONS.values() for text in group)]
    frame = spark.createDataFrame(pa.Table.from_batches(batches))
    silent, refused = [], set()
    try:
        for zone in ("Europe/Berlin", "America/St_Johns"):
            spark.conf.set("spark.sql.session.timeZone", zone)
            taken = []
            for text in texts:
                try:
                    check_zone(Condition(text, parsed(text, "select()")[1]), COLUMNS, zone)
                    taken.append(text)
                except ExpressionError:
                    refused.add(text)
            table = frame.selectExpr(
                *(f"{text} AS c{at}" for at, text in enumerate(taken))
            ).toArrow()
            for at, text in enumerate(taken):
                mine = pa.chunked_array([ours(text, batch) for batch in batches])
                theirs = table.column(at)
                if pa.types.is_timestamp(theirs.type):
                    theirs = theirs.cast(mine.type)
                if [*map(bits, mine.to_pylist())] != [*map(bits, theirs.to_pylist())]:
                    silent.append(f"{text} in {zone}")
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert silent == []
    assert {"at + INTERVAL 1 DAY", "hour(at)", "day + INTERVAL 1 HOUR"} <= refused
    assert not {"at + INTERVAL 23 HOUR", "year(day)", "i + 1"} & refused


def test_a_start_with_a_session_of_another_zone_is_refused(spark: SparkSession) -> None:
    source = ts.KafkaSource("localhost:1", topics=["t"], value=ts.Json("at timestamp, n int"))
    sink = ts.KafkaSink("localhost:1", topic="o", value=ts.Json())
    query = "SELECT n, {} AS moment FROM t"
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    try:
        for text in ("hour(at)", "date_trunc('day', at)"):
            pipeline = ts.sql(query.format(text), name="zones", t=source).write(sink)
            with pytest.raises(ts.OptionError, match="the time zone of the session is Europe/Berl"):
                pipeline.explain(spark)
            assert "zones" in pipeline.explain()
        kept = ts.Pipeline("zones").read(source).write(ts.when(sink, "hour(at) = 3"))
        with pytest.raises(ts.OptionError, match=r"hour.* is computed in UTC"):
            kept.explain(spark)
        ts.sql(query.format("unix_micros(at)"), name="zones", t=source).write(sink).explain(spark)
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


def test_the_page_has_a_row_for_each_function() -> None:
    page = (Path(__file__).parents[2] / "docs" / "expressions.md").read_text()
    table = page.partition("| function | for example |")[2].partition("\n\n")[0]
    listed = [line.split("|")[1].strip().strip("`") for line in table.splitlines()[2:]]
    assert listed == list(EXPRESSIONS)


START = datetime.datetime(2026, 11, 27, tzinfo=datetime.UTC)


def moment(seconds: float) -> datetime.datetime:
    return START + datetime.timedelta(seconds=seconds)


ORDERS = [
    {"id": n, "user": f"u{n % 7}", "amount": n % 5 + 0.25, "at": moment(n * 7 % 900)}
    for n in range(300)
]
PAYMENTS = [
    {"order_id": n * 3 % 320, "paid": n / 4, "on": moment(n * 7 % 900 + 20)} for n in range(200)
]
CLOSING = moment(10**6)
"""The time of rows behind all windows, so that the watermark passes them; they are left out."""
QUERIES = [
    "SELECT id, amount * 2 AS twice FROM orders WHERE amount > 2 AND user <> 'u3'",
    "SELECT user, count(*) AS n, sum(amount) AS total, avg(amount) AS mean, max(amount) AS most "
    "FROM orders GROUP BY user",
    "SELECT upper(user) AS name, count(*) FILTER (WHERE amount > 3) AS n FROM orders GROUP BY 1",
    "SELECT window.start, window.end, user, count(*) AS n, avg(amount) AS mean FROM orders "
    "GROUP BY window(at, '1 minute'), user",
    "SELECT window.start AS s, sum(amount) AS total FROM orders GROUP BY window(at, '5 minutes', "
    "'1 minute') HAVING count(*) > 20",
    "SELECT session_window.start AS s, session_window.end AS e, user, count(*) AS n FROM orders "
    "GROUP BY session_window(at, '30 seconds'), user",
    "SELECT o.id, p.paid FROM orders o JOIN payments p ON o.id = p.order_id AND p.on BETWEEN o.at "
    "- INTERVAL 5 MINUTE AND o.at + INTERVAL 5 MINUTE WHERE p.paid > 3",
    "SELECT o.id, p.paid FROM orders o LEFT JOIN payments p ON o.id = p.order_id AND p.on >= o.at "
    "AND p.on <= o.at + INTERVAL 1 HOUR",
    "SELECT DISTINCT user FROM orders",
    "SELECT id FROM orders UNION ALL SELECT order_id AS id FROM payments",
    "WITH big AS (SELECT user, at FROM orders WHERE amount > 2) SELECT window.end AS e, "
    "count(*) AS n FROM big GROUP BY window(at, '2 minutes')",
    "SELECT e, user, total, rn FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY e ORDER BY total "
    "DESC) AS rn FROM (SELECT window.end AS e, user, sum(id) AS total FROM orders GROUP BY "
    "window(at, '2 minutes'), user)) WHERE rn <= 3",
    "SELECT e, user, total FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY e ORDER BY total) AS rn "
    "FROM (SELECT window.end AS e, user, sum(id) AS total FROM orders GROUP BY "
    "window(at, '2 minutes'), user)) WHERE rn = 1",
]


def source(topic: str, columns: str) -> ts.KafkaSource:
    return ts.KafkaSource("localhost:9092", topics=[topic], value=ts.Json(columns))


@pytest.mark.parametrize("text", QUERIES)
def test_a_query_gives_what_it_gives_in_batch(spark: SparkSession, text: str) -> None:
    spark.createDataFrame(pa.Table.from_pylist(ORDERS)).createOrReplaceTempView("orders")
    spark.createDataFrame(pa.Table.from_pylist(PAYMENTS)).createOrReplaceTempView("payments")
    expected = spark.sql(text).toArrow().to_pylist()

    tables = {
        "orders": source("orders", "id bigint, user string, amount double, at timestamp"),
        "payments": source("payments", "order_id bigint, paid double, on timestamp"),
    }
    used = {name: table for name, table in tables.items() if name in text}
    times = {"orders": "at", "payments": "on"}
    watermark = {name: f"{times[name]} - 1 hour" for name in used}
    given = {
        "orders": [*ORDERS, {"id": -1, "user": "closing", "amount": 9.0, "at": CLOSING}],
        "payments": [*PAYMENTS, {"order_id": -2, "paid": 0.0, "on": CLOSING}],
    }
    pipeline = ts.sql(text, watermark=watermark, **used).write(
        ts.KafkaSink("localhost:9092", topic="out", value=ts.Json())
    )
    actual = run(pipeline, {name: given[name] for name in used}).output().to_pylist()

    is_closing = {"closing", "CLOSING", -1, -2, CLOSING}
    actual = [row for row in actual if not is_closing & set(row.values())]
    assert sorted(map(repr, actual)) == sorted(map(repr, expected))
    assert actual, "the query tells nothing"
