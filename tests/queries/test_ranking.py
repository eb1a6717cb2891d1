"""ROW_NUMBER over windows: the order of nulls, NaN and equal values is Spark's."""

import datetime
import math
import random
from collections import defaultdict
from typing import Any

import pytest

import tallystick as ts
from tallystick.testing import run

BEGIN = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
NAN = 99.0  # JSON has no NaN: the query makes it
VALUES = (None, NAN, -1.0, 0.0, 2.5, 2.5, 7.0)


def rows_of(seed: int) -> list[dict[str, Any]]:
    """Rows of four minutes, then one that ends all windows."""
    chance = random.Random(seed)
    rows = [
        {
            "user": chance.choice("abcdef"),
            "v": chance.choice(VALUES),
            "at": BEGIN + datetime.timedelta(seconds=chance.randrange(240)),
        }
        for _ in range(chance.randrange(5, 60))
    ]
    rows.sort(key=lambda row: row["at"])
    return [*rows, {"user": "end", "v": 1.0, "at": BEGIN + datetime.timedelta(hours=1)}]


def rank(value: float | None) -> tuple[int, float]:
    """Null is the least, NaN the greatest."""
    return (0, 0.0) if value is None else (1, value)


def shown(values: list[float | None]) -> list[str]:
    return [repr(math.nan if value == NAN else value) for value in values]


def output(text: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    source = ts.KafkaSource(
        "x:1", topics=["t"], value=ts.Json("user string, v double, at timestamp")
    )
    pipeline = ts.sql(text, watermark={"t": "at - 1 second"}, t=source).write(
        ts.KafkaSink("x:1", topic="out", value=ts.Json())
    )
    return [row for row in run(pipeline, rows).output().to_pylist() if row["user"] != "end"]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("way", "count"), [("DESC", 2), ("ASC", 3), ("DESC", 1), ("ASC", 1)])
def test_the_first_rows_of_a_window_of_aggregates(way: str, count: int, seed: int) -> None:
    rows = rows_of(seed)
    actual = output(
        f"""SELECT e, user, most FROM (
            SELECT *, ROW_NUMBER() OVER (PARTITION BY e ORDER BY most {way}) AS rn FROM (
                SELECT window.end AS e, user,
                    max(CASE WHEN v = {NAN} THEN sqrt(-v) ELSE v END) AS most FROM t
                GROUP BY window(at, '1 minute'), user
            )
        ) WHERE rn <= {count}""",
        rows,
    )

    greatest: dict[Any, dict[str, Any]] = defaultdict(dict)
    for row in rows[:-1]:
        minute = row["at"].replace(second=0) + datetime.timedelta(minutes=1)
        users = greatest[minute]
        users[row["user"]] = max(users.get(row["user"]), row["v"], key=rank)
    assert len({(row["e"], row["user"]) for row in actual}) == len(actual)
    for end, users in greatest.items():
        of_window = [row for row in actual if row["e"] == end]
        wanted = sorted(users.values(), key=rank, reverse=way == "DESC")[:count]
        assert shown([row["most"] for row in of_window]) == shown(wanted)
        assert shown([users[row["user"]] for row in of_window]) == shown(
            [row["most"] for row in of_window]
        )
    assert {row["e"] for row in actual} == {*greatest}
