"""Pipelines whose rows are the same however their input is cut, and the rows for them."""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import tallystick as ts

Row = dict[str, Any]
COLUMNS = "k string, n bigint, at bigint"
END = "end"
"""The key of rows that only move the watermark beyond all others."""
END_MS = 10_000_000
DISORDER_MS = 4000


def all_of(rows: Iterable[Row]) -> list[Row]:
    """Return all rows, in an order of their own."""
    return sorted(rows, key=lambda row: sorted((name, str(value)) for name, value in row.items()))


def newest(rows: Iterable[Row]) -> list[Row]:
    """Return the last row of each key: how many there are before goes by the epochs."""
    return all_of({row["k"]: row for row in rows}.values())


@dataclass(frozen=True)
class Case:
    """A pipeline to compare.

    Args:
        make: returns it, given how a source and a sink are made of the name of a topic.
        inputs: the topics that it reads.
        outputs: the names of its outputs.
        counts: of the rows, these.
    """

    make: Callable[[Callable[[str], ts.KafkaSource], Callable[[str], ts.KafkaSink]], ts.Pipeline]
    inputs: tuple[str, ...] = ("rows",)
    outputs: tuple[str, ...] = ("main",)
    counts: Callable[[Iterable[Row]], list[Row]] = all_of


Source = Callable[[str], ts.KafkaSource]
Sink = Callable[[str], ts.KafkaSink]


def keyed(function: Any, **settings: Any) -> Callable[[Source, Sink], ts.Pipeline]:
    """Return a pipeline with one keyed step."""

    def make(source: Source, sink: Sink) -> ts.Pipeline:
        pipeline = ts.Pipeline("compared").read(source("rows")).key_by("k")
        return pipeline.process(function, uid="step", **settings).write(sink("out"))

    return make


def windowed(windows: Any, **aggregates: Any) -> Callable[[Source, Sink], ts.Pipeline]:
    """Return a pipeline with windows that no row is late for."""
    function = ts.windowed(windows, aggregates or {"n": ts.sum("n"), "rows": ts.count()})
    return keyed(function, event_time="at", watermark_delay=DISORDER_MS)


def joined(function: Any, *, is_timed: bool = True) -> Callable[[Source, Sink], ts.Pipeline]:
    """Return a pipeline with a join of two topics."""
    times: Any = {"event_time": dict.fromkeys(("left", "right"), "at")}
    times["watermark_delay"] = DISORDER_MS

    def make(source: Source, sink: Sink) -> ts.Pipeline:
        pipeline = ts.Pipeline("compared").read(left=source("rows"), right=source("others"))
        step = pipeline.key_by(left="k", right="k").process(
            function, uid="join", **(times if is_timed else {})
        )
        return step.write(sink("out"))

    return make


def _odd_and_even(rows: pa.RecordBatch) -> ts.Rows:
    is_odd = pc.equal(pc.bit_wise_and(rows["n"], 1), 1)
    rows = rows.select(["k", "n", "at"])
    return ts.Rows(rows.filter(is_odd), {"even": rows.filter(pc.invert(is_odd))})


def stateless(source: Source, sink: Sink) -> ts.Pipeline:
    """Return a pipeline with a filter and a side output."""
    pipeline = ts.Pipeline("compared").read(source("rows"))
    pipeline = pipeline.filter(lambda rows: pc.greater(rows["n"], 3))
    pipeline = pipeline.map_batches(_odd_and_even, schema=COLUMNS, outputs={"even": COLUMNS})
    return pipeline.write(sink("odd"), even=sink("even"))


def windows_of_windows(source: Source, sink: Sink) -> ts.Pipeline:
    """Return a pipeline whose second step is handed its watermark by the first."""
    first = ts.windowed(ts.tumbling(5000), {"n": ts.sum("n")})
    second = ts.windowed(ts.tumbling(20_000), {"n": ts.max("n"), "windows": ts.count()})
    pipeline = ts.Pipeline("compared").read(source("rows")).key_by("k")
    pipeline = pipeline.process(
        first, uid="first", event_time="at", watermark_delay=DISORDER_MS
    ).map_batches(
        lambda rows: rows.append_column("one", pa.array(["all"] * rows.num_rows)),
        schema="k string, window_start timestamp, window_end timestamp, n bigint, one string",
    )
    pipeline = pipeline.filter(lambda rows: pc.not_equal(rows["k"], END)).key_by("one")
    return pipeline.process(
        second, uid="second", event_time="window_start", watermark_delay=5000
    ).write(sink("out"))


_SUMS = {"n": ts.sum("n"), "least": ts.min("n"), "most": ts.max("n"), "rows": ts.count()}
CASES: Mapping[str, Case] = {
    "stateless": Case(stateless, outputs=("main", "even")),
    "aggregate by record": Case(keyed(ts.aggregate(_SUMS, each="record"))),
    "aggregate by epoch": Case(keyed(ts.aggregate(_SUMS)), counts=newest),
    "first of each key": Case(keyed(ts.deduplicate())),
    "top 3": Case(keyed(ts.top_n(3, "n")), counts=newest),
    "sessions": Case(keyed(ts.sessions(3000, "at"), event_time="at", watermark_delay=DISORDER_MS)),
    "count windows": Case(keyed(ts.windowed(ts.count_window(3), {"n": ts.sum("n")}))),
    "tumbling": Case(windowed(ts.tumbling(10_000))),
    "hopping": Case(windowed(ts.hopping(10_000, every=5000))),
    "session windows": Case(windowed(ts.session(3000))),
    "windows of windows": Case(windows_of_windows),
    "interval join": Case(
        joined(ts.interval_join("left", "right", lower=-2000, upper=2000, how="full")),
        inputs=("rows", "others"),
    ),
    "window join": Case(
        joined(ts.window_join("left", "right", size=5000, how="left")), inputs=("rows", "others")
    ),
    "temporal join": Case(
        joined(ts.temporal_join("left", "right", how="left")), inputs=("rows", "others")
    ),
}


def rows_of(dice: random.Random, count: int) -> list[Row]:
    """Return rows whose times are out of order by less than `DISORDER_MS`."""
    return [
        {
            "k": dice.choice("abcde"),
            "n": dice.randrange(10),
            "at": 1000 * number + dice.randrange(DISORDER_MS),
        }
        for number in range(count)
    ]


@dataclass
class Kafka:
    """How sources and sinks are made, without a broker unless one is named."""

    servers: str = "localhost:1"
    prefix: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def source(self, topic: str) -> ts.KafkaSource:
        """Return the source of a topic."""
        value = ts.Json(COLUMNS)
        return ts.KafkaSource(
            self.servers,
            topics=[self.prefix + topic],
            starting_offsets="earliest",
            value=value,
            **self.settings,
        )

    def sink(self, topic: str) -> ts.KafkaSink:
        """Return the sink of a topic."""
        return ts.KafkaSink(
            self.servers, topic=self.prefix + topic, value=ts.Json(), **self.settings
        )


OF_KAFKA = ("offset", "partition", "timestamp", "key", "topic", "timestampType")


def plain(rows: Iterable[Row]) -> list[Row]:
    """Return rows without Kafka's columns, and without those that only ended the input."""
    kept = (row for row in rows if row.get("k") != END)
    return [
        {name: value for name, value in row.items() if not name.endswith(OF_KAFKA)} for row in kept
    ]
