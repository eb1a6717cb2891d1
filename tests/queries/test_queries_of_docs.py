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
