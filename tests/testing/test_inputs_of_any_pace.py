"""Inputs of any pace: no row is late, and at their ends all is out, however they are read.

Partitions lie far apart in time, some are empty or silent, and functions drop some of the rows. All
is there before the first epoch; each source reads a few records at a time.
"""

import random
from collections import Counter
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import tallystick as ts
from tallystick.state.overlay import FINAL_WATERMARK_MS
from tallystick.testing import Driver

COLUMNS = "k string, n bigint, at bigint"
SIZE = 50
DROPPED = -1
SHAPES = {"union": 3, "join": 2}
Row = dict[str, Any]
Logs = dict[tuple[str, int], list[Row]]


def rows_of(dice: random.Random, partition: int, delay: int) -> list[Row]:
    """Draw the rows of a partition, which are in order but for the delay."""
    now, pace, is_silent = dice.randrange(400), dice.choice((1, 5, 30)), dice.random() < 0.2
    rows = []
    for number in range(dice.choice((0, 1, 5, 30))):
        now += dice.randrange(pace + 1) + (dice.randrange(300) if dice.random() < 0.1 else 0)
        is_dropped = is_silent or dice.random() < 0.1
        rows.append(
            {
                "k": dice.choice("abc"),
                "n": DROPPED if is_dropped else 1000 * partition + number,
                "at": now - dice.randrange(delay + 1),
            }
        )
    return rows


def kept(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows.filter(pc.not_equal(rows["n"], DROPPED)).select(["k", "n", "at"])


def pipeline(shape: str, topics: list[str], dice: random.Random, **settings: Any) -> ts.Pipeline:
    def stream(topic: str, **name: Any) -> ts.Stream:
        source = ts.KafkaSource(
            "localhost:1",
            topics=[topic],
            starting_offsets="earliest",
            ending_offsets="latest",
            max_offsets_per_trigger=dice.choice((1, 3, 20)),
            value=ts.Json(COLUMNS),
        )
        return ts.stream(source, **name).map_batches(kept, schema=COLUMNS)

    read, sink = ts.Pipeline("paces"), ts.KafkaSink("localhost:1", topic="out", value=ts.Json())
    if shape == "union":
        by_key = read.read(*(stream(topic, uid=topic) for topic in topics)).key_by("k")
        windows = ts.windowed(ts.tumbling(SIZE), {"n": ts.sum("n"), "rows": ts.count()})
        return by_key.process(windows, event_time="at", **settings).write(sink)
    by_key = read.read(**{topic: stream(topic) for topic in topics}).key_by(
        **dict.fromkeys(topics, "k")
    )
    join = ts.window_join(*topics, size=SIZE, how="full")
    return by_key.process(join, event_time=dict.fromkeys(topics, "at"), **settings).write(sink)


def expected(shape: str, topics: list[str], logs: Logs) -> Counter[tuple[Any, ...]]:
    """Return what the rows alone say: of each window its sum, or its pairs."""
    windows: dict[tuple[str, int], dict[str, list[int]]] = {}
    for (topic, _), rows in logs.items():
        for row in rows:
            if row["n"] != DROPPED:
                window = windows.setdefault((row["k"], row["at"] // SIZE), {})
                window.setdefault(topic, []).append(row["n"])
    if shape == "union":
        numbers = {at: list(chain(*window.values())) for at, window in windows.items()}
        return Counter((at[0], sum(ns), len(ns)) for at, ns in numbers.items())
    return Counter(
        (at[0], one, two)
        for at, window in windows.items()
        for one in window.get(topics[0], [None])
        for two in window.get(topics[1], [None])
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_no_row_is_late_and_at_the_end_all_is_out(shape: str, seed: int) -> None:
    dice = random.Random(f"{shape} {seed}")
    topics = [f"in{number}" for number in range(SHAPES[shape])]
    delay, partitions = dice.choice((0, 10, 40)), {topic: dice.randint(1, 3) for topic in topics}
    places = [(topic, at) for topic in topics for at in range(partitions[topic])]
    logs = {place: rows_of(dice, number, delay) for number, place in enumerate(places)}
    settings = {"idle_after": dice.choice((0, 10_000)), "max_drift": dice.choice((0, 30, 200))}
    test = Driver(
        pipeline(shape, topics, dice, watermark_delay=delay, **settings),
        parallelism=2,
        partitions=partitions,
    )
    for (topic, partition), rows in logs.items():
        test.feed(topic, rows, partition=partition)
    test.crash()
    while test.epoch():
        if dice.random() < 0.1:
            test.restart(parallelism=dice.randint(1, 4))

    assert test.late_count() == 0
    names = ("k", "n", "rows") if shape == "union" else ("k", "n", f"{topics[1]}_n")
    rows = test.output().select(list(names)).to_pylist()
    assert Counter(tuple(row.values()) for row in rows) == expected(shape, topics, logs)
    newest = test._driver.coordinator.committed_manifest
    assert newest is not None
    assert newest.state[0].watermark_ms == FINAL_WATERMARK_MS
