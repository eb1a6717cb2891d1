"""Flink's side of Nexmark: the queries of nexmark/nexmark in Flink SQL, on Kafka and JSON."""

from .nexmark_events import AUCTIONS, BIDS, PERSONS

MINI_BATCHED = ("q4",)
"""The queries with aggregates without a window: mini-batches gain the others nothing."""

UNBOUNDED = ("q3", "q4")
"""The queries with a join that has no bound on its state, which `ts.sql` refuses."""

_TIME = """,
    moment AS TO_TIMESTAMP_LTZ(`dateTime`, 3),
    WATERMARK FOR moment AS moment - INTERVAL '4' SECOND"""
COLUMNS = {
    BIDS: """auction BIGINT, bidder BIGINT, price BIGINT, channel STRING, url STRING,
    `dateTime` BIGINT, extra STRING""",
    AUCTIONS: """id BIGINT, itemName STRING, description STRING, initialBid BIGINT,
    reserve BIGINT, `dateTime` BIGINT, expires BIGINT, seller BIGINT, category BIGINT,
    extra STRING""",
    PERSONS: """id BIGINT, name STRING, emailAddress STRING, creditCard STRING, city STRING,
    state STRING, `dateTime` BIGINT, extra STRING""",
}

_BID = "auction BIGINT, bidder BIGINT, price BIGINT, `dateTime` BIGINT, extra STRING"
_COUNTS = """SELECT auction, COUNT(*) AS num, window_start, window_end
    FROM TABLE(HOP(TABLE bids, DESCRIPTOR(moment), INTERVAL '2' SECOND, INTERVAL '10' SECOND))
    GROUP BY auction, window_start, window_end"""

QUERIES: dict[str, tuple[str, str]] = {
    "q0": (_BID, "SELECT auction, bidder, price, `dateTime`, extra FROM bids"),
    "q1": (
        "auction BIGINT, bidder BIGINT, price DOUBLE, `dateTime` BIGINT, extra STRING",
        "SELECT auction, bidder, price * 0.908E0, `dateTime`, extra FROM bids",
    ),
    "q2": (
        "auction BIGINT, price BIGINT",
        "SELECT auction, price FROM bids WHERE MOD(auction, 123) = 0",
    ),
    "q3": (
        "name STRING, city STRING, state STRING, id BIGINT",
        """SELECT P.name, P.city, P.state, A.id FROM auctions A JOIN persons P ON A.seller = P.id
    WHERE A.category = 10 AND P.state IN ('OR', 'ID', 'CA')""",
    ),
    "q4": (
        "category BIGINT, average DOUBLE, PRIMARY KEY (category) NOT ENFORCED",
        """SELECT category, AVG(CAST(final AS DOUBLE)) FROM (
      SELECT MAX(B.price) AS final, A.category FROM auctions A JOIN bids B ON A.id = B.auction
      WHERE B.`dateTime` BETWEEN A.`dateTime` AND A.expires GROUP BY A.id, A.category
    ) GROUP BY category""",
    ),
    "q5": (
        "auction BIGINT, num BIGINT, window_start TIMESTAMP(3), window_end TIMESTAMP(3)",
        f"""SELECT C.auction, C.num, C.window_start, C.window_end FROM ({_COUNTS}) C
    JOIN (
      SELECT MAX(num) AS most, window_start, window_end FROM ({_COUNTS})
      GROUP BY window_start, window_end
    ) M ON C.window_start = M.window_start AND C.window_end = M.window_end AND C.num >= M.most""",
    ),
    "q7": (
        _BID,
        # Flink's window top-1; as the join with the maximum that nexmark/nexmark writes, it is
        # several times slower.
        """SELECT auction, bidder, price, `dateTime`, extra FROM (
      SELECT auction, bidder, price, `dateTime`, extra, ROW_NUMBER() OVER (
        PARTITION BY window_start, window_end ORDER BY price DESC
      ) AS place FROM TABLE(TUMBLE(TABLE bids, DESCRIPTOR(moment), INTERVAL '10' SECOND))
    ) WHERE place = 1""",
    ),
    "q8": (
        "id BIGINT, name STRING, window_start TIMESTAMP(3)",
        """SELECT P.id, P.name, P.window_start FROM (
      SELECT id, name, window_start, window_end
      FROM TABLE(TUMBLE(TABLE persons, DESCRIPTOR(moment), INTERVAL '10' SECOND))
      GROUP BY id, name, window_start, window_end
    ) P JOIN (
      SELECT seller, window_start, window_end
      FROM TABLE(TUMBLE(TABLE auctions, DESCRIPTOR(moment), INTERVAL '10' SECOND))
      GROUP BY seller, window_start, window_end
    ) A ON P.id = A.seller AND P.window_start = A.window_start AND P.window_end = A.window_end""",
    ),
    "q11": (
        "bidder BIGINT, bid_count BIGINT, window_start TIMESTAMP(3), window_end TIMESTAMP(3)",
        """SELECT bidder, COUNT(*), window_start, window_end
    FROM TABLE(SESSION(TABLE bids PARTITION BY bidder, DESCRIPTOR(moment), INTERVAL '10' SECOND))
    GROUP BY bidder, window_start, window_end""",
    ),
    "q12": (
        "bidder BIGINT, bid_count BIGINT, window_start TIMESTAMP(3), window_end TIMESTAMP(3)",
        """SELECT bidder, COUNT(*), window_start, window_end
    FROM TABLE(TUMBLE(TABLE clocked, DESCRIPTOR(clock), INTERVAL '10' SECOND))
    GROUP BY bidder, window_start, window_end""",
    ),
}
CLOCKED = "CREATE VIEW clocked AS SELECT bidder, PROCTIME() AS clock FROM bids"


def script(query: str, bootstrap: str, prefix: str, output: str) -> str:
    """Return the statements of a query.

    Args:
        query: its name.
        bootstrap: `host:port` of the broker.
        prefix: of the names of the inputs' topics.
        output: its topic; the consumer groups and transactional ids begin with it too.
    """
    columns, select = QUERIES[query]
    statements = []
    for name, columns_read in COLUMNS.items():
        input_columns = columns_read + (_TIME if "moment" in select else "")
        options = {
            "connector": "kafka",
            "topic": f"{prefix}{name}",
            "properties.group.id": f"{output}-{name}",
            "scan.startup.mode": "earliest-offset",
            "scan.bounded.mode": "latest-offset",
            "format": "json",
        }
        statements.append(_table(name, input_columns, bootstrap, options))
    statements.append(CLOCKED)
    is_upsert = "PRIMARY KEY" in columns
    sink = {
        "connector": "upsert-kafka" if is_upsert else "kafka",
        "topic": output,
        "properties.transaction.timeout.ms": "600000",
        "properties.linger.ms": "20",
        "properties.batch.size": "131072",
        **({"key.format": "json", "value.format": "json"} if is_upsert else {"format": "json"}),
        "sink.delivery-guarantee": "exactly-once",
        "sink.transactional-id-prefix": output,
    }
    statements += [_table("results", columns, bootstrap, sink), f"INSERT INTO results {select}"]
    return ";\n".join(statements)


def _table(name: str, columns: str, bootstrap: str, options: dict[str, str]) -> str:
    options = {**options, "properties.bootstrap.servers": bootstrap}
    listed = ",\n  ".join(f"'{key}' = '{value}'" for key, value in options.items())
    return f"CREATE TABLE {name} (\n  {columns}\n) WITH (\n  {listed}\n)"
