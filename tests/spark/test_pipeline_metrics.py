"""Every number that Prometheus is told of a pipeline, beside the truth counted by others."""

import time
from pathlib import Path

import pyarrow as pa
import pytest
from prometheus_client import CollectorRegistry
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.ops import metrics
from tallystick.spark.streaming import offset_reporter
from tallystick.testing import EmbeddedKafka
from tests.spark.flow import Flow
from tests.spark.topics import read_committed, wait_until_nothing_is_pending

pytestmark = [pytest.mark.broker, pytest.mark.spark]
ERROR = "a function's own error"


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

    offset_reporter.OBSERVERS.append(look)
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
        assert value("tallystick_epochs_total") is None, "none was committed"
        assert value("tallystick_last_commit_seconds") == 0
        before_s = time.time()
        query = run(lambda table: table.select(["key", "value"]))
    finally:
        offset_reporter.OBSERVERS.remove(look)
        offset_reporter.OBSERVERS.remove(collector.observe)

    wait_until_nothing_is_pending(flow.confluent, flow.topic_out)
    written = read_committed(flow.confluent, flow.topic_out)
    assert value("tallystick_rows_written_total") == len(written) > 0
    assert value("tallystick_epochs_total") == len(query.recentProgress) >= 3
    assert value("tallystick_starts_total") == 2
    assert before_s <= (value("tallystick_last_commit_seconds") or 0) <= time.time()
    assert value("tallystick_epoch_open_seconds") == 0
    assert value("tallystick_transaction_timeout_seconds") == 900
    assert sum(last_seen.values()) == len(flow.input)
    assert value("tallystick_read_offsets_total") == len(flow.input)
    whole = [each["durationMs"]["triggerExecution"] / 1000 for each in query.recentProgress]
    part = {"part": "triggerExecution"}
    assert value("tallystick_epoch_seconds_count", **part) == len(whole)
    assert value("tallystick_epoch_seconds_sum", **part) == pytest.approx(sum(whole))
    files = [path for path in flow.checkpoint.glob("keyed-state/counts/*") if path.is_file()]
    assert value("tallystick_state_files", step="counts") == len(files) > 0
    sizes = sum(path.stat().st_size for path in files)
    assert value("tallystick_state_bytes", step="counts") == sizes


def test_every_metric_of_the_table_is_offered_and_no_other() -> None:
    registry = CollectorRegistry()
    collector = metrics.register(registry)
    offset_reporter.OBSERVERS.remove(collector.observe)

    offered = {family.name for family in collector.collect()}
    assert offered == {each.name.removesuffix("_total") for each in metrics.TABLE}
