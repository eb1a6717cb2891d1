"""A driver with keyed state, to be killed and paused as `crash_job.py`, on which it is built.

Its pipeline numbers flights: each gets its number among those to the same destination. A spec may
say `parallelism`, `other_topic`, which is a second input, and `dies`: what dies within a keyed
task, once: "worker", "daemon" or "executor", where the `marker` file is not there yet. With
`windowed` flights are collected by windows of 100 of them instead: their numbers are their event
times; with `counted` by how many they are. With `joined` those of both inputs are paired, if their
numbers are close.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import crash_job
import pyarrow as pa
from crash_job import kill
from pyspark import cloudpickle

import tallystick as ts
from tallystick.state.functions.processing import Processor, StateDeclaration, Work
from tallystick.state.keys import KeyCodec

FLIGHT = "id bigint, carrier string, dest string"
NUMBERED = "id bigint, carrier string, dest string, n bigint"
UID = "flights-by-destination"
REACH = 300
"""The greatest difference between the numbers of two flights that are joined."""
DIES_FROM = 1_000
"""A keyed task that met a flight with such an id is in the middle of things."""


def flights() -> Any:
    """Only the columns of the value; made here, so that workers need no tests."""

    def only_flights(rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows.select(["id", "carrier", "dest"])

    return only_flights


@dataclass(frozen=True)
class Mortal:
    """A keyed function whose process dies once, when it has put out rows and not kept its state."""

    inner: Processor
    dies: str
    marker: str

    @property
    def reads(self) -> None:
        """All columns."""
        return

    @property
    def time_mode(self) -> str:
        """As it is."""
        return self.inner.time_mode

    @property
    def has_timers(self) -> bool:
        """As it is."""
        return self.inner.has_timers

    def declared(self, key: KeyCodec) -> tuple[StateDeclaration, ...]:
        """As it is."""
        return self.inner.declared(key)

    def output(self, key: pa.Schema, rows: pa.Schema) -> pa.Schema | None:
        """As it is."""
        return self.inner.output(key, rows)

    def run(self, work: Work) -> Iterator[pa.RecordBatch]:
        """Process the rows, and die if it is time."""
        yield from self.inner.run(work)
        ids = work.rows["id"].to_pylist()
        if self.dies and max(ids, default=0) >= DIES_FROM and not os.path.exists(self.marker):
            Path(self.marker).touch()
            kill(self.dies)


def numbering(spec: dict[str, Any]) -> Mortal:
    """Numbers flights, and dies as the spec says."""
    counted = ts.aggregate({"n": ts.count()}, each="record", keep=["id", "carrier"])
    return Mortal(counted, spec.get("dies", ""), spec.get("marker", ""))


def inputs(spec: dict[str, Any]) -> list[Any]:
    """One topic, or two of which each is an input."""
    read = crash_job.source(spec, value=ts.Json(FLIGHT))
    if "other_topic" not in spec:
        return [read]
    other = crash_job.source({**spec, "topic_in": spec["other_topic"]}, value=ts.Json(FLIGHT))
    return [ts.stream(read, uid="flights"), ts.stream(other, uid="others")]


def joined(spec: dict[str, Any]) -> ts.Pipeline:
    """Pairs of flights to one destination, one of each input, and those that have no partner."""
    sides = zip(("flights", "others"), inputs(spec), strict=True)
    return (
        ts.Pipeline(spec["name"])
        .read(**{name: side.map_batches(flights(), schema=FLIGHT) for name, side in sides})
        .key_by(flights="dest", others="dest", max_parallelism=32)
        .process(
            ts.interval_join("flights", "others", lower=-REACH, upper=REACH, how="full"),
            event_time={"flights": "id", "others": "id"},
            parallelism=spec["parallelism"],
            uid=UID,
        )
        .write(*crash_job.sinks(spec, key="dest", value=ts.Json()))
    )


def pipeline(spec: dict[str, Any]) -> ts.Pipeline:
    """Flights in, numbered flights out, or windows or pairs of them."""
    if spec.get("joined"):
        return joined(spec)
    keyed = (
        ts.Pipeline(spec["name"])
        .read(*inputs(spec))
        .map_batches(flights(), schema=FLIGHT)
        .key_by("dest", max_parallelism=32)
    )
    collected = {"n": ts.count(), "ids": ts.collect("id")}
    if spec.get("counted"):
        processed = keyed.process(
            ts.windowed(ts.count_window(6, every=4), collected),
            parallelism=spec["parallelism"],
            uid=UID,
        )
    elif spec.get("windowed"):
        processed = keyed.process(
            ts.windowed(ts.hopping(100, every=50), collected),
            event_time="id",
            parallelism=spec["parallelism"],
            uid=UID,
        )
    else:
        processed = keyed.process(
            numbering(spec), output=NUMBERED, parallelism=spec["parallelism"], uid=UID
        )
    return processed.write(*crash_job.sinks(spec, key="dest", value=ts.Json()))


if __name__ == "__main__":
    cloudpickle.register_pickle_by_value(crash_job)
    crash_job.pipeline = pipeline
    crash_job.main()
