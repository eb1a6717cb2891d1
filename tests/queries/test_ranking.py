"""ROW_NUMBER over windows: the order of nulls, NaN and equal values is Spark's."""

import datetime
import math
import random
from collections import defaultdict
from typing import Any

import pytest

import tallystick as ts
from tallystick.testing import Driver, run

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


WINDOWS = {
    "TUMBLE(TABLE t, DESCRIPTOR(at), INTERVAL '1' MINUTE)": lambda second: [second // 60 * 60 + 60],
    "HOP(TABLE t, DESCRIPTOR(at), INTERVAL '20' SECOND, INTERVAL '1' MINUTE)": lambda second: [
        second // 20 * 20 + more for more in (20, 40, 60)
    ],
    "CUMULATE(TABLE t, DESCRIPTOR(at), INTERVAL '20' SECOND, INTERVAL '1' MINUTE)": lambda second: [
        end for end in (second // 60 * 60 + more for more in (20, 40, 60)) if end > second
    ],
}
"""Windowing functions, and the ends of the windows of a row by its second."""


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("way", ["DESC", "ASC"])
@pytest.mark.parametrize("windows", WINDOWS)
def test_the_first_row_of_a_window_is_that_of_all_its_rows(
    windows: str, way: str, seed: int
) -> None:
    """Rows that cannot be first are left out before they are sent; epochs cut the rows anywhere."""
    rows = [{**row, "n": number} for number, row in enumerate(rows_of(seed))]
    source = ts.KafkaSource(
        "x:1", topics=["t"], value=ts.Json("user string, v double, at timestamp, n int")
    )
    text = f"""SELECT user, v, n, window_end FROM (
        SELECT user, CASE WHEN v = {NAN} THEN sqrt(-v) ELSE v END AS v, n, window_end,
            ROW_NUMBER() OVER (PARTITION BY window_start, window_end, user
                ORDER BY CASE WHEN v = {NAN} THEN sqrt(-v) ELSE v END {way}) AS rn
        FROM TABLE({windows})) WHERE rn = 1"""
    pipeline = ts.sql(text, watermark={"t": "at - 1 second"}, t=source)
    driver = Driver(pipeline.write(ts.KafkaSink("x:1", topic="out", value=ts.Json())))
    cut = random.Random(seed).randrange(len(rows))
    for part in (rows[:cut], rows[cut:]):
        driver.feed("t", part)
        driver.epoch()
    driver.epoch()

    best: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows[:-1]:
        for end in WINDOWS[windows](int((row["at"] - BEGIN).total_seconds())):
            known = best.setdefault((row["user"], end), row)
            is_better = rank(row["v"]) > rank(known["v"])
            if way == "ASC":
                is_better = rank(row["v"]) < rank(known["v"])
            if is_better:
                best[row["user"], end] = row
    assert {
        (row["user"], int((row["window_end"] - BEGIN).total_seconds())): row["n"]
        for row in driver.output().to_pylist()
    } == {at: row["n"] for at, row in best.items()}


def test_a_row_that_cannot_be_first_ends_a_window_all_the_same() -> None:
    """The latest row of a batch is sent, whatever is greater than it."""
    source = ts.KafkaSource("x:1", topics=["t"], value=ts.Json("v int, at timestamp"))
    text = """SELECT v, window_end FROM (SELECT v, window_end, ROW_NUMBER() OVER (
        PARTITION BY window_start, window_end ORDER BY v DESC) AS rn
        FROM TABLE(TUMBLE(TABLE t, DESCRIPTOR(at), INTERVAL '1' MINUTE))) WHERE rn = 1"""
    pipeline = ts.sql(text, watermark={"t": "at - 20 seconds"}, t=source)
    driver = Driver(pipeline.write(ts.KafkaSink("x:1", topic="out", value=ts.Json())))
    seconds = {5: 1, 62: 9, 85: 3}
    at = [BEGIN + datetime.timedelta(seconds=second) for second in seconds]
    driver.feed("t", [{"v": v, "at": t} for v, t in zip(seconds.values(), at, strict=True)])
    driver.epoch()
    driver.epoch()

    assert driver.output().column("v").to_pylist() == [1]
