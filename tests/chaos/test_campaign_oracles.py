"""Runs that are judged by their input: exact ones pass, and each planted fault is told."""

import json
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.transforms import IdentityTransform

import tallystick as ts
from tallystick.epoch.two_phase import RunFacts
from tallystick_tools.chaos.cluster import NO_OFFSET, OutputRecord
from tallystick_tools.chaos.program import FILES
from tallystick_tools.chaos.run import Run
from tests.campaign.__main__ import PARTITIONS, by_input, question, records
from tests.campaign.jobs import WORKLOADS, make_sorted_table
from tests.campaign.oracles import UNEVEN_TOPIC
from tests.campaign.stores import DELTA, LAKE, STORES
from tests.delta.delta_sinks import OWNER, place, prepared
from tests.iceberg.iceberg_sinks import NAME, catalog_in, sink_in


def moment(ms: int) -> str:
    """A time as the JSON writer has it."""
    text = datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def rows_of(name: str) -> list[dict]:
    """What a program without a fault would write."""
    _, posed = question(1, [name])
    rows = [dict(row) for row in WORKLOADS[name].oracle(posed.job.inputs)]
    own = WORKLOADS[name].own
    for number, row in enumerate(rows):
        if "window_start" in row:
            row |= {at: moment(row[at]) for at in ("window_start", "window_end")}
        elif own:
            row[own] = number
    return rows


def verdict_of(name: str, rows: list[dict]):
    _, posed = question(1, [name])
    workload = WORKLOADS[name]
    written = [
        OutputRecord(output, 0, offset, b"key", json.dumps(row).encode())
        for output in ("out", *workload.copies)
        for offset, row in enumerate(rows)
    ]
    return by_input(workload, posed, Run(records=written))


@pytest.mark.parametrize("name", ["answered", "twice-windowed"])
def test_what_the_input_says_is_exact_in_any_order(name):
    rows = rows_of(name)
    assert len(rows) > 10
    assert verdict_of(name, rows[::-1]).is_exact


@pytest.mark.parametrize("name", ["answered", "twice-windowed"])
def test_a_lost_row_and_one_too_many_are_told(name):
    rows = rows_of(name)
    assert [difference.kind for difference in verdict_of(name, rows[1:]).differences] == ["lost"]
    again = [*rows, {**rows[0], **({"draw": -1} if "draw" in rows[0] else {})}]
    assert [difference.kind for difference in verdict_of(name, again).differences] == ["added"]


@pytest.mark.parametrize("change", ["none", "lost", "added", "unsorted"])
def test_a_row_that_one_table_alone_has_not_or_twice_is_told(tmp_path, change):
    rows = rows_of("lake")
    columns = pa.RecordBatch.from_pylist(rows).schema
    settings = {"create": True, "schema": columns, "commit_every": "1 hour"}
    files = tmp_path / FILES
    catalog = catalog_in(files)
    make_sorted_table(catalog)
    if change == "unsorted":
        with load_catalog("default", **catalog).load_table(NAME).update_sort_order() as order:
            order.asc("amount", IdentityTransform())
    delta = ts.DeltaSink(str(files / DELTA), partition_by=["team"], **settings)
    of_iceberg = {"lost": rows[1:], "added": [*rows, rows[0]]}.get(change, rows)
    for sink, written in ((delta, rows), (sink_in(files, **settings), of_iceberg)):
        opened = sink.open(OWNER, RunFacts())
        batch = pa.RecordBatch.from_pylist(written, columns)
        opened.commit_together(prepared(opened, place(), batch))
        opened.close()
    topic = [OutputRecord("out", 0, NO_OFFSET, b"key", json.dumps(row).encode()) for row in rows]
    found = Run(records=[*topic, *STORES["lake"](tmp_path).rows()])
    _, posed = question(1, ["lake"])
    told = by_input(WORKLOADS["lake"], posed, found).differences
    kinds = {(difference.topic, difference.kind) for difference in told}
    iceberg, files_of_iceberg = LAKE[1::2]
    wanted = {
        "none": set(),
        "unsorted": {(files_of_iceberg, "added")},
        "lost": {(iceberg, "lost"), (files_of_iceberg, "lost")},
        "added": {(iceberg, "added"), (files_of_iceberg, "added")},
    }
    assert kinds == wanted[change]


def test_an_answer_that_is_another_rows_is_told():
    rows = rows_of("answered")
    rows[0]["answer"], rows[1]["answer"] = rows[1]["answer"], rows[0]["answer"]
    different = verdict_of("answered", rows).differences
    assert sorted(difference.kind for difference in different) == ["added", "added", "lost", "lost"]


def test_two_processes_that_draw_the_same_are_told():
    rows = rows_of("answered")
    rows[0]["draw"] = rows[1]["draw"]
    (problem,) = verdict_of("answered", rows).problems
    assert problem == f"1 of {len(rows) - 1} values of 'draw' are in more than one row"


def test_a_thread_that_does_not_live_on_is_told():
    rows = rows_of("answered")
    rows[5]["is_refreshed"] = False
    assert not verdict_of("answered", rows).is_exact


def test_the_partitions_of_the_uneven_input_are_in_order_and_seconds_apart():
    seen: dict[int, int] = {}
    apart = 0
    for record in records(UNEVEN_TOPIC):
        assert record.timestamp_ms > seen.get(record.partition, 0)
        seen[record.partition] = record.timestamp_ms
        if len(seen) == PARTITIONS:
            apart = max(apart, max(seen.values()) - min(seen.values()))
    assert apart > 10_000
