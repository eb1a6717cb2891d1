"""Random queries, and the rows that they read, from a seed."""

import datetime
import random
from typing import Any

START = datetime.datetime(2026, 11, 27, tzinfo=datetime.UTC)
CLOSING = START + datetime.timedelta(days=10)
"""The time of rows behind all windows, so that the watermark passes them; they are left out."""
COLUMNS = {
    "orders": "id bigint, user string, country string, amount double, n int, at timestamp",
    "payments": "order_id bigint, payer string, paid double, on timestamp",
}
TIMES = {"orders": "at", "payments": "on"}
DELAY = "1 hour"
"""As long as all rows of a table: none is late."""


def rows_of(chance: random.Random) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of both tables; sums of their doubles are exact in any order."""

    def moment() -> datetime.datetime:
        return START + datetime.timedelta(milliseconds=chance.randrange(1800) * 500)

    def or_null(value: Any) -> Any:
        return None if chance.random() < 0.1 else value

    orders = [
        {
            "id": number,
            "user": or_null(f"u{chance.randrange(5)}"),
            "country": or_null(chance.choice(["de", "fr", "Fr", ""])),
            "amount": or_null(chance.randrange(-8, 40) / 4),
            "n": or_null(chance.randrange(-3, 12)),
            "at": moment(),
        }
        for number in range(chance.choice([3, 60, 150]))
    ]
    payments = [
        {
            "order_id": or_null(chance.randrange(160)),
            "payer": or_null(f"u{chance.randrange(5)}"),
            "paid": or_null(chance.randrange(40) / 4),
            "on": moment(),
        }
        for _ in range(chance.choice([3, 60, 150]))
    ]
    return {"orders": orders, "payments": payments}


def closing(table: str) -> dict[str, Any]:
    """Return the row of a table that ends all windows."""
    if table == "orders":
        of_all = {"user": "~~~~", "country": "~~~~", "amount": 1e6, "n": 10**6}
        return {"id": -(10**6), **of_all, "at": CLOSING}
    return {"order_id": -(10**7), "payer": "~~~~", "paid": 1e6, "on": CLOSING}


class Writer:
    """A random query over `orders`, and over `payments` where it joins.

    Args:
        chance: of the seed.
    """

    def __init__(self, chance: random.Random) -> None:
        self._of = chance.choice
        self._chance = chance

    def query(self) -> tuple[str, tuple[str, ...]]:
        """Return a query, and the columns by which its rows replace each other; none: none does."""
        shapes = [
            self._projection,
            self._groups,
            self._windows,
            self._windows,
            self._best,
            self._join,
            self._join,
            self._joined_windows,
            self._distinct,
            self._union,
            self._nested,
        ]
        return self._of(shapes)()

    def _number(self) -> str:
        return self._of(
            [
                "amount",
                "n",
                "id",
                "amount * 2",
                "n + id",
                "coalesce(n, 0) * 3",
                "abs(n)",
                "length(user)",
                "CASE WHEN amount > 3 THEN n ELSE id END",
                "CASE country WHEN 'de' THEN 1 WHEN 'fr' THEN 2 END",
                "if(n > 4, n, -n)",
                "n % 3",
                "CAST(amount AS int)",
                "round(amount)",
                "greatest(n, id)",
                "minute(at)",
                "nullif(n, 2)",
                "unix_seconds(at) % 60",
            ]
        )

    def _text(self) -> str:
        return self._of(
            [
                "user",
                "country",
                "upper(country)",
                "concat(user, '-', country)",
                "coalesce(country, 'none')",
                "substring(user, 2, 1)",
                "CAST(n AS string)",
                "CASE WHEN n IS NULL THEN 'null' ELSE user END",
                "trim(country)",
                "regexp_replace(user, '[0-2]', '-')",
                "concat_ws('/', user, country)",
                "date_format(from_utc_timestamp(at, 'Asia/Kathmandu'), 'HH:mm')",
                "split(coalesce(user, 'a'), 'u')[0]",
                "lpad(country, 3, '_')",
            ]
        )

    def _condition(self, depth: int = 0) -> str:
        if depth < 2 and self._chance.random() < 0.4:
            one, other = self._condition(depth + 1), self._condition(depth + 1)
            return self._of([f"({one} AND {other})", f"({one} OR {other})", f"NOT ({one})"])
        return self._of(
            [
                f"amount > {self._chance.randrange(8)}",
                f"n <= {self._chance.randrange(10)}",
                "user IN ('u1', 'u2', NULL)",
                "country NOT IN ('de', 'nowhere')",
                "user LIKE 'u%'",
                "n IS NOT NULL",
                "country = 'fr'",
                "country <=> NULL",
                "n BETWEEN 2 AND 7",
                "amount <> n",
                "minute(at) % 2 = 0",
                "length(country) > 0",
                "id % 3 <> 1",
                "user RLIKE '^u[1-3]$'",
                "instr(country, 'r') = 2",
            ]
        )

    def _where(self) -> str:
        return self._of(["", f" WHERE {self._kept()}"])

    def _kept(self) -> str:
        """Return a condition that the closing row passes: others do not move the watermark."""
        return f"({self._condition()} OR id < -1000)"

    def _aggregates(self) -> list[str]:
        kinds = [
            "count(*)",
            f"count({self._text()})",
            f"sum({self._number()})",
            f"avg({self._number()})",
            f"min({self._number()})",
            f"max({self._number()})",
            f"count(*) FILTER (WHERE {self._condition()})",
            f"sum({self._number()}) FILTER (WHERE {self._condition()})",
            f"sum({self._number()}) + count(*)",
        ]
        count = self._chance.randrange(1, 4)
        return [f"{one} AS a{at}" for at, one in enumerate(self._chance.sample(kinds, count))]

    def _keys(self, least: int) -> list[str]:
        texts = [self._text(), self._number()]
        return [
            f"{one} AS k{at}"
            for at, one in enumerate(texts[: self._chance.randrange(least, len(texts) + 1)])
        ]

    def _projection(self) -> tuple[str, tuple[str, ...]]:
        columns = [f"{self._of([self._number, self._text])()} AS c{at}" for at in range(3)]
        return f"SELECT id, {', '.join(columns)} FROM orders{self._where()}", ()

    def _groups(self) -> tuple[str, tuple[str, ...]]:
        keys = self._keys(1)
        items = ", ".join([*keys, *self._aggregates()])
        places = ", ".join(str(at + 1) for at in range(len(keys)))
        text = f"SELECT {items} FROM orders{self._where()} GROUP BY {places}"
        return text, tuple(f"k{at}" for at in range(len(keys)))

    def _window(self, time: str) -> tuple[str, str]:
        """Return a window of GROUP BY, and the table of its bounds."""
        kind = self._of(["window", "window", "session_window"])
        if kind == "session_window":
            return f"session_window({time}, '{self._of([2, 10, 60])} seconds')", kind
        size = self._of(["'1 minute'", "'5 minutes', '1 minute'", "'90 seconds', '60 seconds'"])
        return f"window({time}, {size})", kind

    def _windows(self, source: str = "orders") -> tuple[str, tuple[str, ...]]:
        window, table = self._window("at")
        keys = self._keys(0)
        items = [f"{table}.start AS s", f"{table}.end AS e", *keys, *self._aggregates()]
        places = [str(at + 3) for at in range(len(keys))]
        having = self._of(["", "", " HAVING count(*) > 1", " HAVING max(n) > 3 OR max(n) IS NULL"])
        text = f"SELECT {', '.join(items)} FROM {source}{self._where()} "
        return f"{text}GROUP BY {', '.join([window, *places])}{having}", ()

    def _best(self) -> tuple[str, tuple[str, ...]]:
        """The places of a window; of equal values any row may come, so no key is put out."""
        way, count = self._of(["DESC", "ASC"]), self._chance.randrange(1, 4)
        aggregate = self._of(["sum", "min", "max", "avg"])
        inner = (
            f"SELECT window.end AS e, {self._text()} AS k, {aggregate}({self._number()}) AS most "
            f"FROM orders{self._where()} GROUP BY window(at, '1 minute'), 2"
        )
        nulls = "NULLS LAST" if way == "DESC" else "NULLS FIRST"
        numbered = f"SELECT *, ROW_NUMBER() OVER (PARTITION BY e ORDER BY most {way} {nulls}) AS rn"
        return f"SELECT e, most, rn FROM ({numbered} FROM ({inner})) WHERE rn <= {count}", ()

    def _join(self) -> tuple[str, tuple[str, ...]]:
        how = self._of(["JOIN", "JOIN", "LEFT JOIN", "RIGHT JOIN", "FULL JOIN"])
        before, after = self._chance.randrange(0, 300), self._chance.randrange(0, 300)
        on = self._of(
            [
                "o.id = p.order_id",
                "o.user = p.payer",
                "upper(o.user) = upper(p.payer) AND o.id = p.order_id",
            ]
        )
        bound = self._of(
            [
                f"p.on BETWEEN o.at - INTERVAL {before} SECOND AND o.at + INTERVAL {after} SECOND",
                f"p.on > o.at - INTERVAL {before} SECOND AND p.on < o.at + INTERVAL {after} SECOND",
                f"o.at >= p.on AND o.at <= p.on + INTERVAL {after} SECOND",
            ]
        )
        further = self._of(["", " AND o.amount > p.paid", " AND o.n + p.paid <> 4"])
        bound += further if how == "JOIN" else ""
        where = self._of(["", " WHERE paid > n", " WHERE o.n IS NULL OR p.paid < 5"])
        items = "o.id, p.order_id, o.user, p.paid * 2 AS twice, coalesce(o.n, -1) AS n"
        return f"SELECT {items} FROM orders o {how} payments p ON {on} AND {bound}{where}", ()

    def _joined_windows(self) -> tuple[str, tuple[str, ...]]:
        return (
            "SELECT window.end AS e, o.country, count(*) AS n, sum(p.paid) AS paid FROM orders o "
            "JOIN payments p ON o.user = p.payer AND p.on BETWEEN o.at AND o.at + INTERVAL 1 "
            "MINUTE GROUP BY window(o.at, '2 minutes'), o.country",
            (),
        )

    def _distinct(self) -> tuple[str, tuple[str, ...]]:
        return f"SELECT DISTINCT {', '.join(self._keys(1))} FROM orders{self._where()}", ()

    def _union(self) -> tuple[str, tuple[str, ...]]:
        return (
            f"SELECT id, user FROM orders{self._where()} UNION ALL "
            f"SELECT order_id AS id, upper(payer) AS user FROM payments WHERE paid > 2",
            (),
        )

    def _nested(self) -> tuple[str, tuple[str, ...]]:
        inner = f"SELECT id, user, country, amount, n, at FROM orders WHERE {self._kept()}"
        text, keys = self._windows(self._of([f"({inner}) AS part", "part"]))
        return (f"WITH part AS ({inner}) {text}" if "FROM part" in text else text), keys
