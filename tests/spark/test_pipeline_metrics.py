"""Every number that Prometheus is told of a pipeline, beside the truth counted by others."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from prometheus_client import CollectorRegistry
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.checkpoint.folder import CheckpointFolder, existing_lineage
from tallystick.ops import metrics
from tallystick.pipeline.listeners import OBSERVERS
from tallystick.storage.file_storage import FileStorage
from tallystick.testing import EmbeddedKafka
from tests.spark.flow import Flow
from tests.spark.topics import read_committed, wait_until_nothing_is_pending

pytestmark = [pytest.mark.broker, pytest.mark.spark]
ERROR = "a function's own error"
CONTROL_BATCH_BYTES = 78
"""A commit marker's: 61 bytes of head and one record."""


def counting(flow: Flow, function: object) -> ts.Pipeline:
    return (
        ts.Pipeline(flow.name)
        .read(flow.source(max_offsets_per_trigger=40))
        .map_batches(function, schema="key string, value string")
        .key_by("key")
        .process(ts.aggregate({"value": ts.count()}), uid="counts")
        .write(flow.sink(key="key", value=ts.Json()))
    )


def test_metrics_are_the_truth(
    tallystick_kafka: EmbeddedKafka, spark: SparkSession, tmp_path: Path
) -> None:
    flow = Flow(tallystick_kafka, spark, tmp_path)
    flow.feed(100)
    registry = CollectorRegistry()
    collector = metrics.register(registry)
    last_seen: dict[str, float] = {}

    def look(query: str, progress: object) -> None:
        """While the query runs: series of its source end with it."""
        for topic in (flow.topic_in,) if progress is not None else ():
            for partition in map(str, range(flow.partitions)):
                labels = {"query": query, "source": "0", "topic": topic, "partition": partition}
                name = "tallystick_source_position"
                last_seen[partition] = registry.get_sample_value(name, labels) or 0

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"query": flow.name, **labels})

    def fails(_: pa.Table) -> pa.Table:
        raise ValueError(ERROR)

    def run(function: object) -> object:
        query = counting(flow, function).start(
            flow.spark, checkpoint=str(flow.checkpoint), trigger={"availableNow": True}
        )
        query.awaitTermination(120)
        return query

    OBSERVERS.append(look)
    try:
        with pytest.raises(Exception, match=ERROR):
            run(fails)
        failures = [
            sample.value
            for family in collector.collect()
            for sample in family.samples
            if sample.name == "tallystick_epoch_failures_total"
            and sample.labels["query"] == flow.name
        ]
        assert sum(failures) >= 1
        aborted = value("tallystick_aborted_epochs_total", error="ValueError")
        assert aborted == 1, "the epoch that the function failed in"
        assert value("tallystick_epochs_total") == 0, "none was committed"
        assert value("tallystick_epochs_started_total") == 1
        assert value("tallystick_last_commit_timestamp_seconds") == 0
        before_s = int(time.time() * 1000) / 1000  # the metrics know milliseconds
        query = run(lambda table: table.select(["key", "value"]))
    finally:
        OBSERVERS.remove(look)
        OBSERVERS.remove(collector.observe)

    wait_until_nothing_is_pending(flow.confluent, flow.topic_out)
    written = read_committed(flow.confluent, flow.topic_out)
    assert value("tallystick_rows_written_total") == len(written) > 0
    assert value("tallystick_starts_total") == 2
    compare_moments(value, before_s)
    assert value("tallystick_epoch_open_seconds") == 0
    assert value("tallystick_transaction_timeout_seconds") == 900
    assert sum(last_seen.values()) == len(flow.input)
    assert value("tallystick_read_offsets_total") == len(flow.input)
    assert value("tallystick_read_records_total") == len(flow.input)
    assert sum(progress["numInputRows"] for progress in query.recentProgress) == len(flow.input)
    assert value("tallystick_dead_letters_total") == 0
    compare_times(value, query.recentProgress)
    compare_steps(value, len(flow.input), len(written), query.recentProgress)
    compare_state(flow, value, {row.key for row in written})
    compare_bytes(flow, value, len(query.recentProgress))


Value = Callable[..., float | None]


def compare_moments(value: Value, before_s: float) -> None:
    """With the clock; under both of their names."""
    for name in ("started", "last_commit"):
        at_s = value(f"tallystick_{name}_timestamp_seconds")
        assert before_s <= (at_s or 0) <= time.time()
        assert value(f"tallystick_{name}_seconds") == at_s, "the old name"
    assert value("tallystick_running") == 0


def compare_times(value: Value, epochs: list[dict[str, Any]]) -> None:
    """With the progress of the epochs; one was aborted before them."""
    assert value("tallystick_epochs_total") == len(epochs) >= 3
    assert value("tallystick_epochs_started_total") == 1 + len(epochs)
    whole = [epoch["durationMs"]["triggerExecution"] / 1000 for epoch in epochs]
    part = {"part": "triggerExecution"}
    for name, labels in (("epoch_duration_seconds", {}), ("epoch_seconds", part)):
        assert value(f"tallystick_{name}_count", **labels) == len(whole)
        assert value(f"tallystick_{name}_sum", **labels) == pytest.approx(sum(whole))
    for name, labels in (("epoch_part_seconds", part), ("epoch_duration_seconds", part)):
        assert value(f"tallystick_{name}_count", **labels) is None, "no sum counts the whole twice"


def compare_steps(value: Value, read: int, written: int, epochs: list[dict[str, Any]]) -> None:
    """With the records of the topics: the function hands each on, and the writer gets all rows."""
    by_step = {"read": (read, read), "counts": (read, written), "write": (written, 0)}
    for step, (rows_in, rows_out) in by_step.items():
        assert value("tallystick_step_rows_in_total", step=step) == rows_in, step
        assert value("tallystick_step_rows_out_total", step=step) == rows_out, step
        assert (value("tallystick_step_busy_seconds_total", step=step) or 0) > 0, step
    busy_ms = sum(step["busyMs"] for epoch in epochs for step in epoch["tasks"])
    steps = [value("tallystick_step_busy_seconds_total", step=step) or 0 for step in by_step]
    assert sum(steps) == pytest.approx(busy_ms / 1000)


def compare_state(flow: Flow, value: Value, keys: set[str | None]) -> None:
    """With the files of state."""
    files = [path for path in flow.checkpoint.glob("keyed-state/counts/*") if path.is_file()]
    assert value("tallystick_state_files", step="counts") == len(files) > 0
    sizes = sum(path.stat().st_size for path in files)
    assert value("tallystick_state_bytes", step="counts") == sizes
    assert value("tallystick_state_written_files_total") == len(files), "none was merged yet"
    assert value("tallystick_state_written_bytes_total") == sizes
    assert (value("tallystick_state_entries", step="counts") or 0) >= len(keys)


def compare_bytes(flow: Flow, value: Value, epochs: int) -> None:
    """With the logs on the broker's disk."""
    read = value("tallystick_read_bytes_total") or 0
    written = value("tallystick_written_bytes_total") or 0
    assert read >= log_bytes(flow, flow.topic_in)  # a batch that two epochs share is read twice
    markers = CONTROL_BATCH_BYTES * flow.partitions * epochs
    assert 0 <= log_bytes(flow, flow.topic_out) - written <= markers


def log_bytes(flow: Flow, topic: str) -> int:
    """The size of a topic's logs on the broker's disk."""
    (node,) = flow.kafka.nodes
    lags = [
        path.stat().st_size
        for partition in range(flow.partitions)
        for path in (node.data_path / f"{topic}-{partition}").glob("*.log")
    ]
    assert len(lags) == flow.partitions
    return sum(lags)


def test_copies_and_the_entries_in_them_are_the_truth(flow: Flow) -> None:
    """One epoch per run, in which each task has rows; copies are folders on this host."""
    registry = CollectorRegistry()
    collector = metrics.register(registry)
    live: list[float | None] = []

    def look(_: str, progress: object) -> None:
        """While the query runs: what is there of its state ends with it."""
        if progress is not None:
            labels = {"query": flow.name, "step": "counts"}
            live.append(registry.get_sample_value("tallystick_state_live_entries", labels))

    def run(record_count: int, keys: int) -> tuple[float, float]:
        """Run over more records; how many copies were reused and rebuilt until now."""
        flow.feed(record_count, keys=keys)
        pipeline = (
            ts.Pipeline(flow.name)
            .read(flow.source(max_offsets_per_trigger="all"))
            .key_by("key")
            .process(ts.aggregate({"value": ts.count()}), uid="counts")
            .write(flow.sink(key="key", value=ts.Json()))
        )
        flow.run(pipeline)
        labels = {"query": flow.name, "step": "counts"}
        names = (f"tallystick_state_copies_{what}_total" for what in ("reused", "rebuilt"))
        reused, rebuilt = (registry.get_sample_value(name, labels) or 0 for name in names)
        return reused, rebuilt

    OBSERVERS.append(look)
    try:
        assert run(200, keys=50) == (0, 0), "there was no state to go on from"
        assert run(200, keys=50) == (0, len(copies(flow)))
        tasks = len(copies(flow))
        assert tasks >= 2
        assert run(200, keys=60) == (tasks, tasks)
        shutil.rmtree(copies(flow)[0])
        assert run(200, keys=60) == (2 * tasks - 1, tasks + 1)
    finally:
        OBSERVERS.remove(look)
        OBSERVERS.remove(collector.observe)
    assert live == [None, 50, 50, 60], "of the epoch before"


def copies(flow: Flow) -> list[Path]:
    """The folders with a copy of the step's state, one per task."""
    assert flow.spark is not None
    root = Path(flow.spark.sparkContext.environment["TALLYSTICK_STATE_DIR"])
    lineage = existing_lineage(CheckpointFolder(FileStorage(str(flow.checkpoint))))
    return sorted(path.parent for path in root.glob(f"*/{lineage}/counts/*/data.mdb"))


def test_every_metric_of_the_table_is_offered_and_no_other() -> None:
    registry = CollectorRegistry()
    collector = metrics.register(registry)
    OBSERVERS.remove(collector.observe)

    offered = {family.name for family in collector.collect()}
    assert offered == {metric.name.removesuffix("_total") for metric in metrics.TABLE}
