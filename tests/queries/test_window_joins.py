"""Joins of windowing table functions, beside what Python makes of the same rows."""

import datetime
import random
import re
from typing import Any

import pytest

import tallystick as ts
from tallystick.errors import OptionError
from tallystick.testing import Driver

BEGIN = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
END = {"user": "end", "v": 1, "at": BEGIN + datetime.timedelta(hours=1)}
SHAPES = {
    "rows": ("", lambda rows: rows),
    "different rows": (
        " GROUP BY user, v, window_start, window_end",
        lambda rows: [*{(row["user"], row["v"], minute(row)): row for row in rows}.values()],
    ),
}


def minute(row: dict[str, Any]) -> int:
    return int((row["at"] - BEGIN).total_seconds()) // 60


def rows_of(chance: random.Random) -> list[dict[str, Any]]:
    rows = [
        {
            "user": chance.choice(["a", "b", None]),
            "v": chance.choice([1, 2, None]),
            "at": BEGIN + datetime.timedelta(seconds=chance.randrange(180)),
        }
        for _ in range(25)
    ]
    return sorted(rows, key=lambda row: row["at"])


def side(table: str, where: str = "", group: str = "", size: str = "'1' MINUTE") -> str:
    return (
        f"(SELECT user, v, window_start, window_end FROM TABLE(TUMBLE(TABLE {table}, "
        f"DESCRIPTOR(at), INTERVAL {size})) {where} {group})"
    )


def translated(first: str, second: str, on: str, how: str = "JOIN") -> ts.Pipeline:
    text = (
        f"SELECT x.user, x.v, y.v AS w, x.window_end AS e FROM {first} x {how} {second} y ON {on} "
        f"AND x.window_start = y.window_start AND x.window_end = y.window_end"
    )
    sources = {
        topic: ts.KafkaSource(
            "x:1", topics=[topic], value=ts.Json("user string, v int, at timestamp")
        )
        for topic in ("a", "b")
    }
    watermark = dict.fromkeys(sources, "at - 1 second")
    sink = ts.KafkaSink("x:1", topic="out", value=ts.Json())
    return ts.sql(text, watermark=watermark, **sources).write(sink)


CONDITIONS = {
    "": lambda one, other: True,
    " AND x.v > y.v": lambda one, other: None not in (one, other) and one > other,
    " AND x.v + y.v > 2": lambda one, other: None not in (one, other) and one + other > 2,
    " AND x.v IS NULL": lambda one, other: one is None,
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("keys", "further"),
    [
        (("user",), ""),
        (("user", "v"), ""),
        (("v",), ""),
        *((("user",), further) for further in CONDITIONS if further),
    ],
)
def test_pairs_are_those_of_a_window_and_key(
    keys: tuple[str, ...], further: str, shape: str, seed: int
) -> None:
    """A null meets no null, WHERE is of one side, and further conditions are of the pairs."""
    chance = random.Random(seed)
    rows = {"a": rows_of(chance), "b": rows_of(chance)}
    group, distinct = SHAPES[shape]
    on = " AND ".join(f"x.{key} = y.{key}" for key in keys) + further
    driver = Driver(
        translated(side("a", "WHERE v > 1 OR v IS NULL", group), side("b", group=group), on)
    )
    for part in (slice(0, 10), slice(10, None)):
        for table in rows:
            driver.feed(table, rows[table][part])
        driver.epoch()
    for table in rows:
        driver.feed(table, [END])
    actual = [row for row in driver.drain().output().to_pylist() if row["user"] != "end"]

    expected = [
        (one["user"], one["v"], other["v"], minute(one) + 1)
        for one in distinct([row for row in rows["a"] if row["v"] != 1])
        for other in distinct(rows["b"])
        if minute(one) == minute(other)
        and all(one[key] is not None and one[key] == other[key] for key in keys)
        and CONDITIONS[further](one["v"], other["v"])
    ]
    minutes = [int((row["e"] - BEGIN).total_seconds()) // 60 for row in actual]
    pairs = [(row["user"], row["v"], row["w"], at) for row, at in zip(actual, minutes, strict=True)]
    assert sorted(map(repr, pairs)) == sorted(map(repr, expected))
    assert expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((side("a"), side("b", size="'2' MINUTE"), "x.user = y.user"), "TUMBLE of one size"),
        ((side("a"), side("b"), "x.user = y.user", "LEFT JOIN"), "LEFT JOIN of windows"),
        (
            (side("a", group=SHAPES["different rows"][0]), side("b"), "x.user = y.user"),
            "one of them has GROUP BY",
        ),
        ((side("a"), side("b"), "x.window_end = y.window_end"), "ON has no equality"),
        ((side("a"), side("b"), "x.name = y.user"), "x has no column 'name'"),
    ],
)
def test_other_joins_of_windows_are_refused(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(OptionError, match=re.escape(words)):
        translated(*arguments)
