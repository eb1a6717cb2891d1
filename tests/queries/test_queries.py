"""Queries without Spark: uids, refusals and INSERT INTO; `tests/differential` compares answers."""

import datetime
from typing import Any

import pytest

import tallystick as ts
from tallystick.errors import OptionError
from tallystick.testing import Driver, run

SINK = ts.KafkaSink("localhost:9092", topic="out", value=ts.Json())


def source(topic: str, columns: str) -> ts.KafkaSource:
    return ts.KafkaSource("localhost:9092", topics=[topic], value=ts.Json(columns))


ORDERS = source("orders", "id bigint, country string, amount double, at timestamp")
PAYMENTS = source("payments", "order_id bigint, paid double, on timestamp")
TABLES = {"orders": ORDERS, "payments": PAYMENTS}
FIRST = """SELECT id FROM (SELECT id, window_start, window_end, ROW_NUMBER() OVER (PARTITION BY
    window_start, window_end, id ORDER BY {}) AS rn FROM TABLE(TUMBLE(TABLE orders, DESCRIPTOR(at),
    INTERVAL '1' MINUTE))) WHERE rn = 1"""
WATERMARK = {"orders": "at - 10 seconds", "payments": "on - INTERVAL '10' SECOND"}
JOINED = (
    "FROM orders o JOIN payments p ON o.id = p.order_id "
    "AND p.on BETWEEN o.at AND o.at + INTERVAL 1 HOUR"
)


def order(number: int, second: int) -> dict[str, Any]:
    at = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(seconds=second)
    return {"id": number, "country": "de" if number % 2 else "fr", "amount": number / 2, "at": at}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the text has no statement"),
        ("SELECT id FRM orders", "line 1, column"),
        (
            "SELECT id FROM order",
            "line 1, column 16: there is no table 'order'; tables: orders, payments.",
        ),
        ("SELECT idd FROM orders", "Did you mean 'id'?"),
        (
            "SELECT count(*) AS n FROM orders GROUP BY window(at, '1 hour'), contry",
            "line 1, column 65: there is no column 'contry'",
        ),
        (
            "SELECT window_start FROM TABLE(TUMBLE(TABLE orders, DESCRIPTOR(att), INTERVAL '1' HOUR"
            ")) GROUP BY window_start, window_end",
            "line 1, column 64: there is no column 'att'",
        ),
        (
            "SELECT id FROM (\n  SELECT *, ROW_NUMBER() OVER (PARTITION BY id ORDER BY att) AS rn\n"
            "  FROM orders) WHERE rn = 1",
            "line 2, column 57: there is no column 'att'",
        ),
        (
            "SELECT id, count(*) AS n FROM orders GROUP BY country",
            "line 1, column 8: column 'id' is neither in GROUP BY",
        ),
        (
            "SELECT country,\n  summ(amount) AS s FROM orders GROUP BY country",
            "line 2, column 3: there is no function 'summ' here. Did you mean 'sum'?",
        ),
        (
            "SELECT country, sum(amount) AS s FROM orders GROUP BY country\nHAVING cont(*) > 1",
            "line 2, column 8: there is no function 'cont' here. Did you mean 'count'?",
        ),
        (
            "SELECT country, sum(abbs(amount)) AS s FROM orders\nWHERE lenght(country) > 1 "
            "GROUP BY country",
            "line 1, column 21: there is no function 'abbs' here. Did you mean 'abs'?",
        ),
        (
            "SELECT id\nFROM orders\nWHERE amont > 3",
            "line 3, column 7: there is no column 'amont', only id, country, amount, at, key,",
        ),
        (
            "SELECT country, sum(amont) AS s FROM orders GROUP BY country",
            "line 1, column 21: there is no column 'amont'",
        ),
        (
            f"SELECT o.idd {JOINED}",
            "there is no column 'idd', only id, country, amount, at, key,",
        ),
        (
            "SELECT orders.id FROM orders o",
            "line 1, column 8: orders.id: there is no table 'orders' here, only o",
        ),
        (f"SELECT x.id {JOINED}", "no table of the join is called 'x'; they are o and p"),
        (f"SELECT topic {JOINED}", "column 'topic' is in both tables of the join"),
        (
            "SELECT * FROM orders o JOIN orders p ON o.id = p.id "
            "AND p.at BETWEEN o.at AND o.at + INTERVAL 1 HOUR",
            "column 'at' is there twice, in p and before it",
        ),
        ("SELECT id, amount AS id FROM orders", "column 'id' is there twice"),
        ("SELECT *, amount * 2 AS amount FROM orders", "column 'amount' is there twice"),
        (
            "SELECT country AS c, count(*) AS c FROM orders GROUP BY country",
            "column 'c' is there twice",
        ),
        ("SELECT id FROM orders WHERE count(*) > 1", "COUNT(*) in WHERE"),
        ("SELECT DISTINCT ON (country) id FROM orders", "DISTINCT ON: write ROW_NUMBER()"),
        ("SELECT paid FROM payments WHERE", "something is missing there"),
        ("SELECT paid FROM", "expected the name of a table"),
        (
            "SELECT count(*) AS n FROM payments GROUP BY window(on, '1 hour')",
            "write it as `on`: it is a word of SQL",
        ),
        (
            "SELECT window.begin AS b, count(*) AS n FROM orders GROUP BY window(at, '1 hour')",
            "window.begin: a window has start and end",
        ),
        (
            "SET spark.sql.session.timeZone = 'Europe/Berlin'; SELECT id FROM orders",
            "from_utc_timestamp(at, 'Europe/Berlin')",
        ),
        (
            f"SELECT o.id {JOINED.replace('JOIN', 'LEFT JOIN')} AND o.amount > p.paid",
            "a condition of both tables is for an inner JOIN",
        ),
        (
            f"SELECT o.id {JOINED.replace('JOIN', 'LEFT JOIN')} AND o.amount > 3",
            "filter the tables before",
        ),
        ("SELECT id", "SELECT without FROM"),
        ("SELECT 'it''s' AS word FROM orders", r"sql: write a quote in a text as \'"),
        ("SELECT id * 2L AS n FROM orders", "2L: write CAST(… AS bigint)"),
        ("UPDATE orders SET id = 1", "UPDATE: expected SELECT"),
        ("SELECT id FROM orders; SELECT id FROM orders", "2 statements, and one is a pipeline"),
        ("SELECT id FROM orders ORDER BY id", "ORDER BY: a stream has no end"),
        ("SELECT id FROM orders LIMIT 3", "LIMIT: rows of a stream"),
        ("SELECT id + 1 FROM orders", "id + 1 has no name in the output"),
        ("SELECT id, count(*) AS n FROM orders GROUP BY country", "'id' is neither in GROUP BY"),
        ("SELECT count(DISTINCT id) AS n FROM orders", "approx_count_distinct"),
        ("SELECT median(amount) AS m FROM orders", "no such aggregate here"),
        ("SELECT country, count(*) AS n FROM orders GROUP BY ROLLUP(country)", "ROLLUP and CUBE"),
        (
            "SELECT country, count(*) AS n FROM orders GROUP BY country HAVING n > 1",
            "HAVING without",
        ),
        (
            "SELECT n, count(*) AS c FROM (SELECT country, count(*) AS n FROM orders GROUP BY "
            "country) GROUP BY n",
            "GROUP BY over a GROUP BY without a window",
        ),
        (
            "SELECT n FROM (SELECT country, count(*) AS n FROM orders GROUP BY 1) WHERE n > 1",
            "WHERE around a GROUP BY without a window",
        ),
        (
            "SELECT DISTINCT n FROM (SELECT country, count(*) AS n FROM orders GROUP BY country)",
            "DISTINCT over a GROUP BY without a window",
        ),
        (
            "SELECT o.id FROM orders o JOIN payments p ON o.id = p.order_id",
            "nothing bounds how far",
        ),
        ("SELECT o.id FROM orders o JOIN payments p ON o.at = o.at", "ON has no equality"),
        ("SELECT o.id FROM orders o LEFT SEMI JOIN payments p ON o.id = p.order_id", "SEMI JOIN"),
        ("SELECT sum(amount) OVER (PARTITION BY id) AS s FROM orders", "OVER windows"),
        ("SELECT id FROM orders UNION SELECT order_id FROM payments", "UNION ALL alone"),
        ("SELECT id FROM orders WHERE id IN (SELECT order_id FROM payments)", "write a JOIN"),
        ("SELECT count(*) AS n FROM orders GROUP BY window(id, '1 minute')", "id has no watermark"),
        ("SELECT count(*) AS n FROM orders GROUP BY window(at, '1 month')", "a fixed unit"),
        (
            "SELECT id FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY country ORDER BY at) AS rn "
            "FROM orders) WHERE rn <= 3",
            "expected WHERE rn = 1",
        ),
        (
            "SELECT id FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY country ORDER BY at DESC) "
            "AS rn FROM orders) WHERE rn = 1",
            "the newest row of a key changes",
        ),
        ("INSERT INTO late SELECT id FROM orders", "INSERT INTO late: there is no such sink"),
        (FIRST.format("amount, id"), "ORDER BY amount, id): expected one column"),
        (FIRST.format("amount NULLS LAST"), "NULLS LAST): expected one column"),
        (FIRST.format("amount DESC NULLS FIRST"), "NULLS FIRST): expected one column"),
    ],
)
def test_what_a_stream_cannot_do_is_refused_with_the_clause(text: str, words: str) -> None:
    with pytest.raises(OptionError) as caught:
        ts.sql(text, watermark=WATERMARK, **TABLES).write(SINK).explain()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "uids"),
    [
        ("SELECT country, count(*) AS n FROM orders GROUP BY country", ["group"]),
        (
            "WITH per_minute AS (SELECT window.start AS s, country, count(*) AS n FROM orders "
            "GROUP BY window(at, '1 minute'), country) SELECT window.start AS h, max(n) AS n FROM "
            "per_minute GROUP BY window(s, '1 hour')",
            ["per_minute", "group"],
        ),
        ("SELECT DISTINCT country FROM orders", ["distinct"]),
        (
            "SELECT o.country, count(*) AS n FROM orders o JOIN payments p ON o.id = p.order_id "
            "AND p.on BETWEEN o.at AND o.at + INTERVAL 1 DAY GROUP BY o.country",
            ["join", "group"],
        ),
    ],
)
def test_steps_have_uids_that_outlive_an_edit(text: str, uids: list[str]) -> None:
    tables = {name: table for name, table in TABLES.items() if name in text}
    watermark = {name: WATERMARK[name] for name in tables}
    steps = ts.sql(text, watermark=watermark, **tables).steps
    assert [step.uid for step in steps if hasattr(step, "uid")] == uids


def test_the_outermost_step_has_the_uid_that_is_given() -> None:
    text = "SELECT country, count(*) AS n FROM orders GROUP BY country"
    (step,) = (one for one in ts.sql(text, uid="mine", orders=ORDERS).steps if hasattr(one, "uid"))
    assert step.uid == "mine"


def test_insert_into_names_the_sink() -> None:
    text = "INSERT INTO late SELECT id FROM orders WHERE amount > 1"
    pipeline = ts.sql(text, sinks={"late": SINK}, orders=ORDERS)
    rows = [order(n, n) for n in range(5)]
    assert run(pipeline, {"orders": rows}).output()["id"].to_pylist() == [3, 4]


def test_counts_go_on_over_epochs_and_a_restart_with_an_edited_text() -> None:
    text = "SELECT country, count(*) AS n FROM orders {} GROUP BY country"
    driver = Driver(ts.sql(text.format(""), orders=ORDERS).write(SINK))
    driver.feed("orders", [order(n, n) for n in range(4)])
    driver.epoch()
    edited = ts.sql(text.format("WHERE amount >= 0"), orders=ORDERS).write(SINK)
    driver.restart(pipeline=edited)
    driver.feed("orders", [order(n, n) for n in range(4, 7)])
    driver.epoch()
    newest = {row["country"]: row["n"] for row in driver.output().to_pylist()}
    assert newest == {"fr": 4, "de": 3}


def test_flinks_windows_are_those_of_spark() -> None:
    rows = [order(n, 40 * n) for n in range(20)]
    spark = "SELECT window.start AS s, count(*) AS n FROM orders GROUP BY window(at, '2 minutes')"
    flink = (
        "SELECT window_start AS s, count(*) AS n FROM TABLE(TUMBLE(TABLE orders, DESCRIPTOR(at), "
        "INTERVAL '2' MINUTE)) GROUP BY window_start, window_end"
    )
    older = (
        "SELECT TUMBLE_START(at, INTERVAL '2' MINUTE) AS s, count(*) AS n FROM orders GROUP BY "
        "TUMBLE(at, INTERVAL '2' MINUTE)"
    )
    answers = []
    for text in (spark, flink, older):
        pipeline = ts.sql(text, watermark={"orders": WATERMARK["orders"]}, orders=ORDERS)
        answers.append(run(pipeline.write(SINK), {"orders": rows}).output().to_pylist())
    assert answers[0] == answers[1] == answers[2]
    assert len(answers[0]) > 3


@pytest.mark.parametrize(
    "text",
    [
        "SELECT id, amount FROM orders -- the first\n/* and the last */ WHERE amount > 1;",
        "select ID as id, Amount as amount from orders where AMOUNT > 1;;",
        "SELECT `id`, o.`amount` FROM orders AS o WHERE `amount` > 1",
        "SELECT id, amount FROM orders WHERE key IS NULL AND amount > 1",
    ],
)
def test_a_text_may_have_comments_quotes_and_other_capitals(text: str) -> None:
    pipeline = ts.sql(text, orders=ORDERS).write(SINK)
    rows = run(pipeline, [order(number, 0) for number in range(5)]).output()
    assert rows.to_pylist() == [{"id": 3, "amount": 1.5}, {"id": 4, "amount": 2.0}]


@pytest.mark.parametrize("where", ["AND", "WHERE"])
@pytest.mark.parametrize("kind", ["interval", "temporal"])
def test_further_conditions_of_an_inner_join_filter_its_pairs(kind: str, where: str) -> None:
    text = f"SELECT o.id, p.paid {JOINED} {where} o.amount > p.paid"
    if kind == "temporal":
        text = (
            "SELECT o.id, p.paid FROM orders o JOIN payments FOR SYSTEM_TIME AS OF o.at AS p "
            f"ON o.id = p.order_id {where} o.amount > p.paid"
        )
    driver = Driver(ts.sql(text, watermark=WATERMARK, **TABLES).write(SINK))
    paid = [1.0, 0.25, None, 1.5, 2.0]
    at = order(0, 5)["at"]
    driver.feed("orders", [order(number, 5) for number in range(5)])
    driver.feed(
        "payments",
        [{"order_id": number, "paid": one, "on": at} for number, one in enumerate(paid)],
    )
    driver.epoch()
    driver.feed("orders", [order(9, 4000)])
    driver.feed("payments", [{"order_id": 8, "paid": 0.0, "on": order(9, 4000)["at"]}])
    rows = driver.drain().output().to_pylist()
    assert rows == [{"id": 1, "paid": 0.25}]


def test_select_star_of_a_join_has_the_columns_of_both_values() -> None:
    driver = Driver(ts.sql(f"SELECT * {JOINED}", watermark=WATERMARK, **TABLES).write(SINK))
    at = order(0, 5)["at"]
    driver.feed("orders", [order(1, 5)])
    driver.feed("payments", [{"order_id": 1, "paid": 3.0, "on": at}])
    (row,) = driver.drain().output().to_pylist()
    assert row == {**order(1, 5), "order_id": 1, "paid": 3.0, "on": at}
