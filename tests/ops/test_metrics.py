"""What Prometheus and `source_progress` tell of a query, from progress as Spark reports it."""

import json
import urllib.request
import uuid
from typing import Any

from prometheus_client import CollectorRegistry
from pyspark.sql.streaming.listener import StreamingQueryProgress

from tallystick.ops import metrics
from tallystick.pipeline.listeners import OBSERVERS, source_progress
from tallystick.source.offsets import SourceOffsets
from tallystick.testing.process import free_ports
from tallystick.values import TopicPartition

QUERY_ID = str(uuid.uuid4())
ONE, TWO = TopicPartition("t", 0), TopicPartition("t", 1)


def offsets(*positions: int, **further: Any) -> str:
    """The JSON text of a source's offsets, topic `t`."""
    offset_by_partition = {
        TopicPartition("t", number): offset for number, offset in enumerate(positions)
    }
    return json.dumps(SourceOffsets("cluster", "group", offset_by_partition, **further).to_json())


def progress(batch_id: int, *sources: tuple[str | None, str, str | None]) -> StreamingQueryProgress:
    """Spark's progress with these (start, end, latest) offsets."""
    source_texts = [
        {
            "description": "d", "startOffset": start, "endOffset": end, "latestOffset": latest,
            "numInputRows": 0, "inputRowsPerSecond": 0.0, "processedRowsPerSecond": 0.0,
            "metrics": {},
        }
        for start, end, latest in sources
    ]  # fmt: skip
    return StreamingQueryProgress.fromJson(
        {
            "id": QUERY_ID, "runId": QUERY_ID, "name": "q", "timestamp": "", "batchId": batch_id,
            "batchDuration": 0, "durationMs": {}, "eventTime": {}, "stateOperators": [],
            "sources": source_texts, "numInputRows": 0, "inputRowsPerSecond": 0.0,
            "processedRowsPerSecond": 0.0, "observedMetrics": {},
            "sink": {"description": "s", "numOutputRows": 0, "metrics": {}},
        }
    )  # fmt: skip


def test_lag_is_known_where_the_end_is_and_sources_of_others_are_left_out():
    known, unknown = source_progress(
        progress(
            3,
            (offsets(1, 1), offsets(5, 9), offsets(8, 9)),
            ('{"theirs": 1}', '{"theirs": 2}', None),
            (None, offsets(2), None),
        )
    )

    assert (known.index, known.cluster_id, known.group) == (0, "cluster", "group")
    assert known.positions == {ONE: 5, TWO: 9}
    assert known.lag == {ONE: 3, TWO: 0}
    assert known.lag_total == 3
    assert (unknown.index, unknown.lag, unknown.lag_total) == (2, {}, None)


def test_a_partition_that_is_not_read_yet_has_no_lag():
    (source,) = source_progress(progress(0, (None, offsets(5), offsets(8, 100))))

    assert source.lag == {ONE: 3}


def test_queries_that_do_not_read_with_us_are_left_out():
    registry = CollectorRegistry()
    metrics.register(registry).observe("theirs", progress(0, (None, '{"theirs": 1}', None)))

    assert registry.get_sample_value("tallystick_epochs_total", {"query": "theirs"}) is None


def test_losses_count_once_per_epoch():
    """Spark repeats a source's last offsets while only another source of the query reads."""
    registry = CollectorRegistry()
    collector = metrics.register(registry)
    lost = offsets(50, skipped={ONE: (10, 40)})

    def skipped() -> float | None:
        labels = {"query": "q", "topic": "t"}
        return registry.get_sample_value("tallystick_source_skipped_offsets_total", labels)

    for _ in range(2):  # told twice
        collector.observe("q", progress(0, (offsets(10), lost, None)))
    assert skipped() == 30
    collector.observe("q", progress(1, (lost, lost, None)))
    assert skipped() == 30
    collector.observe("q", progress(2, (lost, offsets(60, skipped={ONE: (50, 55)}), None)))
    assert skipped() == 35
    assert registry.get_sample_value("tallystick_epochs_total", {"query": "q"}) == 3


def test_the_page_has_a_series_per_partition_until_the_query_ends():
    (port,) = free_ports(1, "127.0.0.1")
    metrics.serve(port)
    observe = OBSERVERS[-1]

    def page() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    observe("q", progress(0, (None, offsets(5, 9), offsets(8, 9))))
    labels = 'partition="0",query="q",source="0",topic="t"'
    assert f"tallystick_source_position{{{labels}}} 5.0" in page()
    assert f"tallystick_source_latest_offset{{{labels}}} 8.0" in page()
    assert f"tallystick_source_lag_offsets{{{labels}}} 3.0" in page()
    observe("q", None)
    assert "tallystick_source_position{" not in page()
    assert 'tallystick_epochs_total{query="q"} 1.0' in page()


def test_many_partitions_are_one_series_per_topic():
    registry = CollectorRegistry()
    collector = metrics.register(registry)
    count = metrics.PARTITION_SERIES_MAX + 1
    collector.observe("q", progress(0, (None, offsets(*[5] * count), offsets(*[7] * count))))

    lag = next(m for m in registry.collect() if m.name == "tallystick_source_lag_offsets")
    assert [(s.labels["topic"], s.labels["partition"], s.value) for s in lag.samples] == [
        ("t", "", 2 * count)
    ]


def pipelines_progress(batch_id: int, **counted: Any) -> dict[str, Any]:
    """A pipeline's progress, as `PipelinePlanner.describe` and `Query` make it."""
    return {
        "id": QUERY_ID, "batchId": batch_id, "durationMs": {}, "epochSize": {"offsets": 40},
        "numInputRows": 39, "bytes": {"read": 500, "written": 70},
        "files": {"written": 3, "bytes": 1000},
        "tasks": [
            {"step": "read", "tasks": 2, "busiestMs": {}, "busyMs": 5.0},
            {"step": "counts", "tasks": 2, "busiestMs": {}, "busyMs": 5.0, **counted},
        ],
        "sources": [
            {"startOffset": None, "endOffset": offsets(40 * (batch_id + 1)), "latestOffset": None}
        ],
    }  # fmt: skip


def test_what_a_pipeline_counts_is_counted_once_per_epoch_and_what_it_has_is_the_newest():
    registry = CollectorRegistry()
    collector = metrics.register(registry)
    OBSERVERS.remove(collector.observe)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"tallystick_{name}", {"query": "p", **labels})

    def of_step() -> list[float | None]:
        names = "copies_reused_total", "copies_rebuilt_total", "live_entries"
        return [value(f"state_{name}", step="counts") for name in names]

    collector.observe("p", pipelines_progress(0, reusedCopies=0, rebuiltCopies=2, liveEntries=7))
    assert of_step() == [0, 2, 7]
    later = pipelines_progress(1, reusedCopies=2, rebuiltCopies=1, liveEntries=9)
    for _ in range(2):  # told twice
        collector.observe("p", later)
    assert of_step() == [2, 3, 9]
    collector.observe("p", pipelines_progress(2, reusedCopies=1, rebuiltCopies=0))
    assert of_step() == [3, 3, 9], "a task had no rows: what all of them have is not known anew"

    assert value("epochs_total") == 3
    assert value("read_offsets_total") == 120
    assert value("read_records_total") == 117
    assert (value("read_bytes_total"), value("written_bytes_total")) == (1500, 210)
    assert (value("written_files_total"), value("written_file_bytes_total")) == (9, 3000)
    assert value("state_copies_reused_total", step="read") is None, "it has no state"
    collector.observe("p", None)
    assert of_step() == [3, 3, None]
