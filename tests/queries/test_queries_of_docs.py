"""Queries as Flink's and Spark's pages have them: each works or is refused, as docs/sql.md lists.

Source: Flink's pages on SQL queries (window aggregation, window top-n, deduplication, joins, set
operations); Spark's guide to structured streaming, its examples in SQL.
"""

from pathlib import Path

import pytest

import tallystick as ts
from tallystick.errors import OptionError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sql.md"
SINK = ts.KafkaSink("localhost:9092", topic="out", value=ts.Json())
COLUMNS = {
    "Bid": "bidtime timestamp, price double, item string, supplier_id string",
    "Orders": "id bigint, user string, product string, amount double, ts timestamp, "
    "currency string",
    "Shipments": "id bigint, order_id bigint, ship_time timestamp",
    "rates": "currency string, rate double, update_time timestamp",
    "events": "word string, deviceId string, signal double, deviceType string, eventTime timestamp",
    "clicks": "clickAdId string, clickTime timestamp",
    "impressions": "impressionAdId string, impressionTime timestamp",
}
WATERMARK = {
    "Bid": "bidtime - 5 seconds",
    "Orders": "ts - 5 seconds",
    "Shipments": "ship_time - 5 seconds",
    "rates": "update_time - 5 seconds",
    "events": "eventTime - 10 minutes",
    "clicks": "clickTime - 3 hours",
    "impressions": "impressionTime - 2 hours",
}
TUMBLE = "TABLE(TUMBLE(TABLE Bid, DESCRIPTOR(bidtime), INTERVAL '10' MINUTES))"
SUMS = f"""SELECT window_start, window_end, supplier_id, SUM(price) AS price, COUNT(*) AS cnt
    FROM {TUMBLE} GROUP BY window_start, window_end, supplier_id"""
NUMBER = "ROW_NUMBER() OVER (PARTITION BY {} ORDER BY {}) AS rownum"
SHIPPED = "ON o.id = s.order_id AND o.ts BETWEEN s.ship_time - INTERVAL '4' HOUR AND s.ship_time"

QUERIES: dict[str, tuple[str, str]] = {
    # Flink: the text, and a part of the refusal; "" works
    "Flink: WHERE": ("SELECT price + 1 AS p FROM Bid WHERE item LIKE 'a%' AND price > 10", ""),
    "Flink: WITH": (
        "WITH big AS (SELECT id, amount FROM Orders WHERE amount > 9) SELECT id FROM big",
        "",
    ),
    "Flink: SELECT DISTINCT": ("SELECT DISTINCT user FROM Orders", ""),
    "Flink: TUMBLE": (
        f"SELECT window_start, window_end, SUM(price) AS total FROM {TUMBLE} "
        "GROUP BY window_start, window_end",
        "",
    ),
    "Flink: HOP": (
        "SELECT window_start, window_end, SUM(price) AS total FROM TABLE(HOP(TABLE Bid, "
        "DESCRIPTOR(bidtime), INTERVAL '5' MINUTES, INTERVAL '10' MINUTES)) "
        "GROUP BY window_start, window_end",
        "",
    ),
    "Flink: CUMULATE": (
        "SELECT window_start, window_end, SUM(price) AS total FROM TABLE(CUMULATE(TABLE Bid, "
        "DESCRIPTOR(bidtime), INTERVAL '2' MINUTES, INTERVAL '10' MINUTES)) "
        "GROUP BY window_start, window_end",
        "",
    ),
    "Flink: SESSION with PARTITION BY": (
        "SELECT window_start, window_end, item, SUM(price) AS total FROM TABLE(SESSION(TABLE Bid "
        "PARTITION BY item, DESCRIPTOR(bidtime), INTERVAL '2' MINUTES)) "
        "GROUP BY item, window_start, window_end",
        "",
    ),
    "Flink: SESSION without PARTITION BY, of keys": (
        "SELECT window_start, item, SUM(price) AS total FROM TABLE(SESSION(TABLE Bid, "
        "DESCRIPTOR(bidtime), INTERVAL '2' MINUTES)) GROUP BY item, window_start, window_end",
        "sessions here are of the keys of GROUP BY",
    ),
    "Flink: rows of windows": (f"SELECT * FROM {TUMBLE}", "without GROUP BY window_start"),
    "Flink: GROUPING SETS of windows": (
        f"SELECT window_start, supplier_id, SUM(price) AS total FROM {TUMBLE} GROUP BY "
        "window_start, window_end, GROUPING SETS ((supplier_id), ())",
        "GROUPING SETS",
    ),
    "Flink: ROLLUP": ("SELECT item, SUM(price) AS p FROM Bid GROUP BY ROLLUP (item)", "ROLLUP"),
    "Flink: cascading windows": (
        f"WITH five AS ({SUMS}) SELECT TUMBLE_START(window_start, INTERVAL '1' HOUR) AS h, "
        "SUM(price) AS total FROM five GROUP BY TUMBLE(window_start, INTERVAL '1' HOUR)",
        "",
    ),
    "Flink: group windows": (
        "SELECT user, TUMBLE_START(ts, INTERVAL '1' DAY) AS s, SUM(amount) AS a FROM Orders "
        "GROUP BY TUMBLE(ts, INTERVAL '1' DAY), user",
        "",
    ),
    "Flink: GROUP BY": ("SELECT user, COUNT(*) AS n FROM Orders GROUP BY user", ""),
    "Flink: FILTER": (
        "SELECT user, COUNT(*) FILTER (WHERE amount > 9) AS n FROM Orders GROUP BY user",
        "",
    ),
    "Flink: COUNT(DISTINCT)": ("SELECT COUNT(DISTINCT user) AS n FROM Orders", "exact distinct"),
    "Flink: HAVING": (
        "SELECT SUM(amount) AS a FROM Orders GROUP BY user HAVING SUM(amount) > 50",
        "HAVING without a window",
    ),
    "Flink: OVER": (
        "SELECT id, SUM(amount) OVER (PARTITION BY product ORDER BY ts RANGE BETWEEN INTERVAL "
        "'1' HOUR PRECEDING AND CURRENT ROW) AS s FROM Orders",
        "OVER windows",
    ),
    "Flink: top-n": (
        f"SELECT id FROM (SELECT *, {NUMBER.format('product', 'amount DESC')} FROM Orders) "
        "WHERE rownum <= 5",
        "ts.top_n",
    ),
    "Flink: window top-n after an aggregation": (
        f"SELECT * FROM (SELECT *, {NUMBER.format('window_start, window_end', 'price DESC')} "
        f"FROM ({SUMS})) WHERE rownum <= 3",
        "",
    ),
    "Flink: window top-1 of a table function": (
        "SELECT bidtime, price FROM (SELECT bidtime, price, "
        f"{NUMBER.format('window_start, window_end', 'price DESC')} FROM {TUMBLE}) "
        "WHERE rownum = 1",
        "",
    ),
    "Flink: window top-3 of a table function": (
        "SELECT bidtime, price FROM (SELECT bidtime, price, "
        f"{NUMBER.format('window_start, window_end', 'price DESC')} FROM {TUMBLE}) "
        "WHERE rownum <= 3",
        "without GROUP BY window_start",
    ),
    "Flink: deduplication, first row": (
        f"SELECT id FROM (SELECT *, {NUMBER.format('product', 'ts ASC')} FROM Orders) "
        "WHERE rownum = 1",
        "",
    ),
    "Flink: deduplication, last row": (
        f"SELECT id FROM (SELECT *, {NUMBER.format('product', 'ts DESC')} FROM Orders) "
        "WHERE rownum = 1",
        "the newest row of a key changes",
    ),
    "Flink: regular join": (
        "SELECT o.id FROM Orders o JOIN Shipments s ON o.id = s.order_id",
        "nothing bounds how far",
    ),
    "Flink: interval join": (
        "SELECT o.id, s.ship_time FROM Orders o, Shipments s WHERE o.id = s.order_id AND o.ts "
        "BETWEEN s.ship_time - INTERVAL '4' HOUR AND s.ship_time",
        "",
    ),
    "Flink: temporal join": (
        "SELECT o.id, o.amount * r.rate AS euro FROM Orders o LEFT JOIN rates FOR SYSTEM_TIME AS "
        "OF o.ts AS r ON o.currency = r.currency",
        "",
    ),
    "Flink: CROSS JOIN UNNEST": (
        "SELECT id, tag FROM Orders CROSS JOIN UNNEST(tags) AS t (tag)",
        "expected the name of a table",
    ),
    "Flink: semi-join by IN": (
        "SELECT id FROM Orders WHERE product IN (SELECT item FROM Bid)",
        "a query in a condition",
    ),
    "Flink: UNION ALL": ("SELECT item AS x FROM Bid UNION ALL SELECT user AS x FROM Orders", ""),
    "Flink: UNION": ("SELECT item FROM Bid UNION SELECT user FROM Orders", "UNION ALL alone"),
    "Flink: INTERSECT": ("SELECT item FROM Bid INTERSECT SELECT user FROM Orders", "INTERSECT"),
    "Flink: ORDER BY": ("SELECT id FROM Orders ORDER BY ts, id", "ORDER BY"),
    "Flink: LIMIT": ("SELECT id FROM Orders LIMIT 3", "LIMIT"),
    "Flink: MATCH_RECOGNIZE": (
        "SELECT * FROM Orders MATCH_RECOGNIZE (PARTITION BY user ORDER BY ts MEASURES A.id AS x "
        "PATTERN (A B) DEFINE B AS amount > 1)",
        "MATCH_RECOGNIZE",
    ),
    "Flink: subquery in FROM": (
        "SELECT p FROM (SELECT price AS p, item FROM Bid) WHERE item = 'a'",
        "",
    ),
    "Flink: CASE": (
        "SELECT id, CASE WHEN amount > 100 THEN 'big' ELSE 'small' END AS kind FROM Orders",
        "",
    ),
    "Flink: EXISTS": (
        "SELECT id FROM Orders o WHERE EXISTS (SELECT 1 FROM Shipments s WHERE s.order_id = o.id)",
        "a query in a condition",
    ),
    "Flink: VALUES": ("SELECT id FROM (VALUES (1), (2)) AS t (id)", "expected the name of a table"),
    "Flink: HOP group window": (
        "SELECT product, HOP_START(ts, INTERVAL '1' HOUR, INTERVAL '1' DAY) AS s, SUM(amount) AS "
        "a FROM Orders GROUP BY HOP(ts, INTERVAL '1' HOUR, INTERVAL '1' DAY), product",
        "",
    ),
    "Flink: TUMBLE_ROWTIME": (
        "SELECT TUMBLE_ROWTIME(ts, INTERVAL '1' DAY) AS r, SUM(amount) AS a FROM Orders GROUP BY "
        "TUMBLE(ts, INTERVAL '1' DAY)",
        "the last moment of a window",
    ),
    "Flink: named arguments of TUMBLE": (
        "SELECT window_start, window_end, SUM(price) AS total FROM TABLE(TUMBLE(DATA => TABLE "
        "Bid, TIMECOL => DESCRIPTOR(bidtime), SIZE => INTERVAL '10' MINUTES)) GROUP BY "
        "window_start, window_end",
        "leave DATA => and",
    ),
    "Flink: TUMBLE with an offset": (
        "SELECT window_start, window_end, SUM(price) AS total FROM TABLE(TUMBLE(TABLE Bid, "
        "DESCRIPTOR(bidtime), INTERVAL '10' MINUTES, INTERVAL '1' MINUTES)) GROUP BY "
        "window_start, window_end",
        "",
    ),
    "Flink: window join": (
        "SELECT L.user, R.supplier_id, L.window_start FROM (SELECT * FROM TABLE(TUMBLE(TABLE "
        "Orders, DESCRIPTOR(ts), INTERVAL '5' MINUTES))) L JOIN (SELECT * FROM TABLE(TUMBLE(TABLE"
        " Bid, DESCRIPTOR(bidtime), INTERVAL '5' MINUTES))) R ON L.product = R.item AND "
        "L.window_start = R.window_start AND L.window_end = R.window_end",
        "SELECT *: name the columns",
    ),
    "Flink: FULL JOIN of windows": (
        "SELECT L.user, R.supplier_id, L.window_start FROM (SELECT user, product, window_start, "
        "window_end FROM TABLE(TUMBLE(TABLE Orders, DESCRIPTOR(ts), INTERVAL '5' MINUTES))) L "
        "FULL JOIN (SELECT item, supplier_id, window_start, window_end FROM TABLE(TUMBLE(TABLE "
        "Bid, DESCRIPTOR(bidtime), INTERVAL '5' MINUTES))) R ON L.product = R.item AND "
        "L.window_start = R.window_start AND L.window_end = R.window_end",
        "FULL JOIN of windows",
    ),
    "Flink: semi join of windows": (
        "SELECT * FROM (SELECT user, product, window_start, window_end FROM TABLE(TUMBLE(TABLE "
        "Orders, DESCRIPTOR(ts), INTERVAL '5' MINUTES))) L WHERE L.product IN (SELECT item FROM "
        "(SELECT item, window_start, window_end FROM TABLE(TUMBLE(TABLE Bid, DESCRIPTOR(bidtime),"
        " INTERVAL '5' MINUTES))) R WHERE L.window_start = R.window_start AND L.window_end = "
        "R.window_end)",
        "a query in a condition",
    ),
    "Flink: window deduplication": (
        "SELECT bidtime, price FROM (SELECT bidtime, price, ROW_NUMBER() OVER (PARTITION BY "
        "window_start, window_end ORDER BY bidtime DESC) AS rownum FROM TABLE(TUMBLE(TABLE Bid, "
        "DESCRIPTOR(bidtime), INTERVAL '10' MINUTES))) WHERE rownum <= 1",
        "",
    ),
    "Flink: LISTAGG": (
        "SELECT user, LISTAGG(product) AS all_of FROM Orders GROUP BY user",
        "no such aggregate here",
    ),
    "Flink: lookup join": (
        "SELECT o.id, r.rate FROM Orders AS o JOIN rates FOR SYSTEM_TIME AS OF o.proc_time AS r "
        "ON o.currency = r.currency",
        "FOR SYSTEM_TIME AS OF",
    ),
    "Flink: LEFT JOIN": (
        "SELECT o.id FROM Orders o LEFT JOIN Shipments s ON o.id = s.order_id",
        "nothing bounds how far",
    ),
    "Flink: FULL OUTER JOIN, interval": (
        "SELECT o.id, s.ship_time FROM Orders o FULL OUTER JOIN Shipments s ON o.id = s.order_id "
        "AND o.ts BETWEEN s.ship_time - INTERVAL '4' HOUR AND s.ship_time",
        "",
    ),
    "Flink: CROSS JOIN": ("SELECT o.id FROM Orders o CROSS JOIN Shipments s", "ON has no equality"),
    "Flink: EXCEPT": ("SELECT item FROM Bid EXCEPT SELECT user FROM Orders", "EXCEPT"),
    "Flink: CUBE": ("SELECT item, SUM(price) AS p FROM Bid GROUP BY CUBE (item)", "CUBE"),
    "Flink: OVER, ROWS": (
        "SELECT id, AVG(amount) OVER w AS a FROM Orders WINDOW w AS (PARTITION BY product ORDER "
        "BY ts ROWS BETWEEN 10 PRECEDING AND CURRENT ROW)",
        "OVER (PARTITION BY",
    ),
    "Flink: LAG": (
        "SELECT id, LAG(amount) OVER (PARTITION BY product ORDER BY ts) AS before FROM Orders",
        "OVER windows",
    ),
    "Flink: CURRENT_TIMESTAMP": (
        "SELECT id, CURRENT_TIMESTAMP AS now FROM Orders",
        "there is no function 'current_timestamp'",
    ),
    "Flink: processing time windows": (
        "SELECT product, SUM(amount) AS a, window_start FROM TABLE(TUMBLE(TABLE (SELECT product, "
        "amount, PROCTIME() AS p FROM Orders), DESCRIPTOR(p), INTERVAL '1' MINUTE)) GROUP BY "
        "product, window_start, window_end",
        "write the query into WITH",
    ),
    "Spark: selection": ("SELECT deviceId FROM events WHERE signal > 10", ""),
    "Spark: counts of a type": (
        "SELECT deviceType, count(*) AS n FROM events GROUP BY deviceType",
        "",
    ),
    "Spark: average of all": ("SELECT avg(signal) AS a FROM events", ""),
    "Spark: window": (
        "SELECT window.start, word, count(*) AS n FROM events GROUP BY "
        "window(eventTime, '10 minutes', '5 minutes'), word",
        "",
    ),
    "Spark: session_window": (
        "SELECT session_window.start, deviceId, count(*) AS n FROM events GROUP BY "
        "session_window(eventTime, '5 minutes'), deviceId",
        "",
    ),
    "Spark: inner join with a range of times": (
        "SELECT clickAdId, clickTime FROM impressions i JOIN clicks c ON c.clickAdId = "
        "i.impressionAdId AND c.clickTime >= i.impressionTime AND c.clickTime <= "
        "i.impressionTime + interval 1 hour",
        "",
    ),
    "Spark: outer join with a range of times": (
        "SELECT impressionAdId, clickTime FROM impressions i LEFT OUTER JOIN clicks c ON "
        "c.clickAdId = i.impressionAdId AND c.clickTime >= i.impressionTime AND c.clickTime <= "
        "i.impressionTime + interval 1 hour",
        "",
    ),
    "Spark: semi join": (
        "SELECT impressionAdId FROM impressions i LEFT SEMI JOIN clicks c ON c.clickAdId = "
        "i.impressionAdId",
        "SEMI JOIN",
    ),
    "Spark: a GROUP BY of a GROUP BY": (
        "SELECT n, count(*) AS c FROM (SELECT word, count(*) AS n FROM events GROUP BY word) "
        "GROUP BY n",
        "GROUP BY over a GROUP BY without a window",
    ),
    "Spark: dropDuplicates": ("SELECT DISTINCT deviceId, eventTime FROM events", ""),
    "Spark: full outer join with a range of times": (
        "SELECT impressionAdId, clickTime FROM impressions i FULL OUTER JOIN clicks c ON "
        "c.clickAdId = i.impressionAdId AND c.clickTime >= i.impressionTime AND c.clickTime <= "
        "i.impressionTime + interval 1 hour",
        "",
    ),
    "Spark: window of window_time": (
        "SELECT window(window_time, '1 hour').start AS s, count(*) AS n FROM (SELECT "
        "window_time(window) AS window_time, window, count(*) AS c FROM events GROUP BY "
        "window(eventTime, '10 minutes')) GROUP BY window(window_time, '1 hour')",
        "the last moment of a window",
    ),
    "Spark: window as a struct": (
        "SELECT window, deviceType, count(*) AS n FROM events GROUP BY window(eventTime, '10 "
        "minutes'), deviceType",
        "",
    ),
    "Spark: session_window of a dynamic gap": (
        "SELECT session_window.start AS s, count(*) AS n FROM events GROUP BY "
        "session_window(eventTime, CASE WHEN deviceType = 'a' THEN '5 seconds' ELSE '10 minutes' "
        "END)",
        "expected a length of time with a fixed unit",
    ),
    "Spark: collect_list": (
        "SELECT window.start AS s, collect_list(word) AS words FROM events GROUP BY "
        "window(eventTime, '1 minute')",
        "",
    ),
    "Spark: approx_count_distinct": (
        "SELECT window.start AS s, approx_count_distinct(deviceId) AS n FROM events GROUP BY "
        "window(eventTime, '1 minute')",
        "",
    ),
    "Spark: percentile": (
        "SELECT window.start AS s, percentile(signal, 0.5) AS p FROM events GROUP BY "
        "window(eventTime, '1 minute')",
        "no such aggregate here",
    ),
    "Spark: explode": (
        "SELECT explode(split(word, ' ')) AS w FROM events",
        "there is no function 'explode'",
    ),
    "Spark: max_by": (
        "SELECT deviceType, max_by(word, eventTime) AS w FROM events GROUP BY deviceType",
        "no such aggregate here",
    ),
}


def pipeline_of(text: str) -> ts.Pipeline:
    tables = {
        name: ts.KafkaSource("localhost:9092", topics=[name], value=ts.Json(columns))
        for name, columns in COLUMNS.items()
        if name in text
    }
    watermark = {name: WATERMARK[name] for name in tables}
    return ts.sql(text, watermark=watermark, **tables).write(SINK)


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_of_the_docs_works_or_is_refused_by_name(name: str) -> None:
    text, refusal = QUERIES[name]
    if not refusal:
        assert pipeline_of(text).explain()
        return
    with pytest.raises(OptionError) as caught:
        pipeline_of(text).explain()
    assert refusal in str(caught.value)


def test_the_page_lists_each_with_its_refusal() -> None:
    lines = [
        f"| {name} | {f'refused: {no} …' if no else 'works'} |" for name, (_, no) in QUERIES.items()
    ]
    table = "\n".join(["| query of the docs | here |", "| --- | --- |", *lines])
    assert table in PAGE.read_text(), table
