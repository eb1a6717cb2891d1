"""A driver whose pipeline has operator state, to be killed as `crash_job.py`.

Flights get the version of their destination's rule in the readers, are counted by destination, and
get it once more in the keyed tasks: as all tasks of an epoch have one table, both are the same. A
spec says `rules_topic`, and may say `dies` with a `marker`: the process of a reader that has seen
rows and rules, once. Without rules flights are held in list state until a task has some of them.
"""

import os
from pathlib import Path
from typing import Any

import crash_job
import pyarrow as pa
import pyarrow.compute as pc
from crash_job import kill
from pyspark import cloudpickle

import tallystick as ts

FLIGHT = "id bigint, carrier string, dest string"
DIES_FROM = 1_000
"""A reader that met a flight with such an id is in the middle of things."""


BLOCK = 7
"""Flights come out of list state by so many."""


def versioned(dies: str, marker: str) -> Any:
    """Made here, so that workers need no tests."""

    def with_version(rows: pa.RecordBatch, table: pa.Table) -> pa.RecordBatch:
        if dies and pc.max(rows["id"]).as_py() >= DIES_FROM and not os.path.exists(marker):
            Path(marker).touch()
            kill(dies)
        places = pc.index_in(rows["dest"], value_set=table["dest"])
        version = table["version"].combine_chunks().take(places)
        names = ["id", "carrier", "dest", "version"]
        return pa.RecordBatch.from_arrays(
            [rows["id"], rows["carrier"], rows["dest"], version], names=names
        )

    return with_version


def in_blocks(dies: str, marker: str) -> Any:
    """Made here, so that workers need no tests."""

    def blocks(rows: pa.RecordBatch, kept: pa.RecordBatch) -> Any:
        rows = pa.Table.from_batches([kept, rows.select(["id", "carrier", "dest"])])
        if dies and pc.max(rows["id"]).as_py() >= DIES_FROM and not os.path.exists(marker):
            Path(marker).touch()
            kill(dies)
        whole = rows.num_rows - rows.num_rows % BLOCK
        return rows.slice(0, whole), rows.slice(whole)

    return blocks


def buffered(spec: dict[str, Any]) -> ts.Pipeline:
    """Flights in, the same in blocks out."""
    function = in_blocks(spec.get("dies", ""), spec.get("marker", ""))
    return (
        ts.Pipeline(spec["name"])
        .read(crash_job.source(spec, value=ts.Json(FLIGHT)))
        .map_batches(function, state=ts.list_state(FLIGHT, uid="held"))
        .write(*crash_job.sinks(spec, key="dest", value=ts.Json()))
    )


def pipeline(spec: dict[str, Any]) -> ts.Pipeline:
    """Flights in, numbered flights with rules out."""
    if "rules_topic" not in spec:
        return buffered(spec)
    of_rules = {**spec, "topic_in": spec["rules_topic"], "epoch_records": None}
    rules = crash_job.source(of_rules, value=ts.Json("dest string, version bigint"))
    table = ts.broadcast(rules, key="dest", uid="rules")
    flights = crash_job.source(spec, value=ts.Json(FLIGHT))
    counted = ts.aggregate({"n": ts.count()}, each="record", keep=["id", "carrier", "version"])
    function = versioned(spec.get("dies", ""), spec.get("marker", ""))
    again = ts.enrich(table, on="dest", how="left", columns={"version": "again"})
    return (
        ts.Pipeline(spec["name"])
        .read(flights)
        .map_batches(function, state=table, schema=f"{FLIGHT}, version bigint")
        .key_by("dest", max_parallelism=32)
        .process(counted, parallelism=spec["parallelism"], uid="counts")
        .map_batches(again)
        .write(*crash_job.sinks(spec, key="dest", value=ts.Json()))
    )


if __name__ == "__main__":
    cloudpickle.register_pickle_by_value(crash_job)
    crash_job.pipeline = pipeline
    crash_job.main()
