"""Epochs, positions, lag and losses of running queries for Prometheus.

    import tallystick.ops.metrics
    tallystick.ops.metrics.serve(9400)              # a page of its own, or:
    tallystick.ops.metrics.register(my_registry)    # along with what you have

Nothing is kept unless asked for. A pipeline has series from its start on, so that one that never
committed an epoch is seen; those of its sources end with it, and counters stay. A query has one series per partition, or one per topic (`partition=""`, sums) where
it reads more than `PARTITION_SERIES_MAX` partitions: a pattern that matches too many topics cannot
overload the monitoring system.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from threading import Lock
from typing import Any, NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry, Histogram, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tallystick.host.stopwatch import (
    LIVE_ENTRIES,
    REBUILT_COPIES,
    REUSED_COPIES,
    ROWS_IN,
    ROWS_OUT,
    now_ms,
)
from tallystick.pipeline.group_offsets import COUNTS
from tallystick.pipeline.listeners import (
    OBSERVERS,
    PIPELINES,
    PipelineCounts,
    SourceProgress,
    source_progress,
)
from tallystick.run.part_times import WHOLE
from tallystick.values import TopicPartition

PARTITION_SERIES_MAX = 1_000
"""Sources with more partitions than this have one series per topic."""
BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
PIPELINE, STEP, TOPIC = ("query",), ("query", "step"), ("query", "topic")
SINK = ("query", "sink")
PARTITION = ("query", "source", "topic", "partition")


class MetricEntry(NamedTuple):
    """One metric.

    Args:
        name: as Prometheus shows it.
        kind: `COUNTER`, `GAUGE` or `HISTOGRAM`.
        labels: their names; `query` is the name of the pipeline or query.
        meaning: a sentence.
        pipelines_only: queries of Structured Streaming do not have it.
        new_name: of a metric under an old name, which goes with the next minor version.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str
    pipelines_only: bool = False
    new_name: str = ""


TABLE = (
    MetricEntry("tallystick_source_position", GAUGE, PARTITION, "Next offset to read."),
    MetricEntry("tallystick_source_latest_offset", GAUGE, PARTITION, "End of what can be read."),
    MetricEntry("tallystick_source_lag_offsets", GAUGE, PARTITION, "Offsets that are left to read."),
    MetricEntry("tallystick_source_skipped_offsets_total", COUNTER, TOPIC, "Offsets that were lost unread and passed over, as a policy of the source says."),
    MetricEntry("tallystick_group_offset_failures_total", COUNTER, PIPELINE, "How often positions could not be shown in a consumer group; they are sent again."),
    MetricEntry("tallystick_read_offsets_total", COUNTER, PIPELINE, "Offsets that committed epochs span, markers of transactions included.", True),
    MetricEntry("tallystick_read_records_total", COUNTER, PIPELINE, "Records that committed epochs read.", True),
    MetricEntry("tallystick_read_bytes_total", COUNTER, PIPELINE, "Bytes of the record batches that they were read from, compressed as they came.", True),
    MetricEntry("tallystick_written_bytes_total", COUNTER, PIPELINE, "Bytes of the record batches that committed epochs wrote to Kafka, compressed.", True),
    MetricEntry("tallystick_written_files_total", COUNTER, PIPELINE, "Files that committed epochs wrote to FileSinks; by `tallystick_epochs_total`, per epoch.", True),
    MetricEntry("tallystick_written_file_bytes_total", COUNTER, PIPELINE, "Bytes of these files.", True),
    MetricEntry("tallystick_epochs_started_total", COUNTER, PIPELINE, "Epochs planned, those that run again included: each is committed or aborted, or in flight.", True),
    MetricEntry("tallystick_epochs_total", COUNTER, PIPELINE, "Epochs committed."),
    MetricEntry("tallystick_epoch_duration_seconds", HISTOGRAM, PIPELINE, "How long epochs took."),
    MetricEntry("tallystick_epoch_part_seconds", HISTOGRAM, ("query", "part"), "How long the parts of epochs took (see Performance); together they are the epoch."),
    MetricEntry("tallystick_epoch_seconds", HISTOGRAM, ("query", "part"), "Both of them, the whole as `triggerExecution`.", False, "tallystick_epoch_part_seconds"),
    MetricEntry("tallystick_epoch_failures_total", COUNTER, ("query", "error"), "What failed in epochs, by the class of the error; what may pass is tried again.", True),
    MetricEntry("tallystick_aborted_epochs_total", COUNTER, ("query", "error"), "Epochs that were planned and did not come about, by the class of the error; they run again.", True),
    MetricEntry("tallystick_epoch_open_seconds", GAUGE, PIPELINE, "Age of the epoch in flight, since its plan: its transaction is no older; 0: none is in flight.", True),
    MetricEntry("tallystick_transaction_timeout_seconds", GAUGE, PIPELINE, "After how long Kafka aborts an epoch's transaction; absent where none decides.", True),
    MetricEntry("tallystick_open_transactions", GAUGE, SINK, "Transactions, or files, that wait for the decision or their commit, of this run or left over, as far as the driver knows without asking: from its tasks' reports, and from what a recovery finds.", True),
    MetricEntry("tallystick_oldest_transaction_seconds", GAUGE, SINK, "Age of the oldest of them; the deciding one is no older than its epoch, by which it counts; 0: none is open, or its age is not known.", True),
    MetricEntry("tallystick_due_epochs", GAUGE, SINK, "Epochs that are decided and wait to be published, by sinks with `commit_every`.", True),
    MetricEntry("tallystick_due_rows", GAUGE, SINK, "Their rows.", True),
    MetricEntry("tallystick_due_files", GAUGE, SINK, "The files that publish them.", True),
    MetricEntry("tallystick_due_bytes", GAUGE, SINK, "The bytes of these files.", True),
    MetricEntry("tallystick_oldest_due_seconds", GAUGE, SINK, "For how long the oldest of these epochs has waited; 0: none waits.", True),
    MetricEntry("tallystick_last_commit_timestamp_seconds", GAUGE, PIPELINE, "When this process committed an epoch last, as Unix time; 0: it has not.", True),
    MetricEntry("tallystick_last_commit_seconds", GAUGE, PIPELINE, "The same.", True, "tallystick_last_commit_timestamp_seconds"),
    MetricEntry("tallystick_running", GAUGE, PIPELINE, "1 while a run of the pipeline is in this process; 0: it has ended, or has not begun.", True),
    MetricEntry("tallystick_starts_total", COUNTER, PIPELINE, "How often this process has started the pipeline.", True),
    MetricEntry("tallystick_started_timestamp_seconds", GAUGE, PIPELINE, "When this process started the pipeline last, as Unix time.", True),
    MetricEntry("tallystick_started_seconds", GAUGE, PIPELINE, "The same.", True, "tallystick_started_timestamp_seconds"),
    MetricEntry("tallystick_rows_written_total", COUNTER, PIPELINE, "Rows of committed epochs, in all sinks, without dead letters.", True),
    MetricEntry("tallystick_dead_letters_total", COUNTER, PIPELINE, "Malformed records that committed epochs wrote to the dead-letter topic; with transactions of tasks they count as rows.", True),
    MetricEntry("tallystick_late_rows_total", COUNTER, STEP, "Rows that a keyed step dropped, since they came later than its watermark.", True),
    MetricEntry("tallystick_step_rows_in_total", COUNTER, STEP, "Rows that a step's tasks got in committed epochs, by the steps of a progress: `read` counts records, `write` rows that came to writing tasks, of which sinks with `transactions=\"task\"` have none; rows on their way to side outputs included.", True),
    MetricEntry("tallystick_step_rows_out_total", COUNTER, STEP, "Rows that they handed on.", True),
    MetricEntry("tallystick_step_busy_seconds_total", COUNTER, STEP, "Time that they worked, all together, without waiting for other tasks.", True),
    MetricEntry("tallystick_watermark_timestamp_seconds", GAUGE, STEP, "The step's watermark, as Unix time.", True),
    MetricEntry("tallystick_watermark_seconds", GAUGE, STEP, "The same.", True, "tallystick_watermark_timestamp_seconds"),
    MetricEntry("tallystick_state_bytes", GAUGE, STEP, "Bytes of the files that the committed state is read from.", True),
    MetricEntry("tallystick_state_files", GAUGE, STEP, "How many files these are.", True),
    MetricEntry("tallystick_state_entries", GAUGE, STEP, "Entries in these files; a key that changed is in several of them until they are merged.", True),
    MetricEntry("tallystick_state_live_entries", GAUGE, STEP, "Entries of the state that an epoch went on from, as its tasks' local copies have them: of the newest epoch in which all tasks of the step had rows.", True),
    MetricEntry("tallystick_state_copies_reused_total", COUNTER, STEP, "Local copies of state that tasks of committed epochs found, and brought forward by what changed since.", True),
    MetricEntry("tallystick_state_copies_rebuilt_total", COUNTER, STEP, "Local copies of state that they had to rebuild from the checkpoint.", True),
    MetricEntry("tallystick_state_written_files_total", COUNTER, PIPELINE, "Files of state that committed epochs wrote; each epoch writes one manifest besides.", True),
    MetricEntry("tallystick_state_written_bytes_total", COUNTER, PIPELINE, "Bytes of these files.", True),
)  # fmt: skip
"""The metrics; docs/operations.md shows this table."""
OF_STEPS = {
    ROWS_IN: "tallystick_step_rows_in_total",
    ROWS_OUT: "tallystick_step_rows_out_total",
    REUSED_COPIES: "tallystick_state_copies_reused_total",
    REBUILT_COPIES: "tallystick_state_copies_rebuilt_total",
}
"""The counters of a step, by their names in a progress."""
PIPELINE_COUNTERS = (
    "tallystick_epochs_total",
    "tallystick_read_offsets_total",
    "tallystick_read_records_total",
    "tallystick_read_bytes_total",
    "tallystick_written_bytes_total",
    "tallystick_written_files_total",
    "tallystick_written_file_bytes_total",
)
"""Counters that each epoch's progress adds to; 0 before the first."""
Sample = tuple[str, tuple[str, ...], float]
"""The name of a metric, the values of its labels, and its value."""


class SourceMetrics(Collector):
    """The state of all queries in this process, as Prometheus asks for it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._latest: dict[str, list[SourceProgress]] = {}
        self._counted: dict[str, int] = {}
        self._counts: Counter[tuple[str, tuple[str, ...]]] = Counter()  # by metric and labels
        self._entries: dict[tuple[str, str], int] = {}  # by query and step
        self._skipped: Counter[tuple[str, str]] = Counter()
        self._seconds = {
            metric.name: Histogram(
                metric.name, metric.meaning, metric.labels, buckets=BUCKETS_S, registry=None
            )
            for metric in TABLE
            if metric.kind == HISTOGRAM
        }

    def observe(self, query: str, progress: Mapping[str, Any] | None) -> None:
        """Add an epoch's progress; None: the query has ended. See `pipeline.listeners.Observer`."""
        with self._lock:
            if progress is None:
                self._latest.pop(query, None)
                self._entries = {at: count for at, count in self._entries.items() if at[0] != query}
                return
            sources = source_progress(progress)
            if not sources:
                return
            self._latest[query] = sources
            query_id, batch_id = str(progress["id"]), progress["batchId"]
            if self._counted.get(query_id, -1) >= batch_id:
                return
            self._counted[query_id] = batch_id
            self._counts["tallystick_epochs_total", (query,)] += 1
            if progress.get("epochSize"):  # a pipeline's
                self._count(query, progress)
            for part, took_ms in progress["durationMs"].items():
                self._seconds["tallystick_epoch_seconds"].labels(query, part).observe(
                    took_ms / 1000
                )
                name = "tallystick_epoch_part_seconds"
                where: tuple[str, ...] = (query, part)
                if part == WHOLE:
                    name, where = "tallystick_epoch_duration_seconds", (query,)
                self._seconds[name].labels(*where).observe(took_ms / 1000)
            for source in sources:
                for partition, (start, stop) in source.skipped.items():
                    self._skipped[query, partition.topic] += stop - start

    def _count(self, query: str, progress: Mapping[str, Any]) -> None:
        """Add the counts in a pipeline's progress to the metrics."""
        files = progress["files"]
        counts = {
            "tallystick_read_offsets_total": progress["epochSize"]["offsets"],
            "tallystick_read_records_total": progress["numInputRows"],
            "tallystick_read_bytes_total": progress["bytes"]["read"],
            "tallystick_written_bytes_total": progress["bytes"]["written"],
            "tallystick_written_files_total": files["written"],
            "tallystick_written_file_bytes_total": files["bytes"],
        }
        for name, count in counts.items():
            self._counts[name, (query,)] += count
        for step in progress["tasks"]:
            of_step = (query, step["step"])
            for counted, name in OF_STEPS.items():
                if counted in step:
                    self._counts[name, of_step] += step[counted]
            self._counts["tallystick_step_busy_seconds_total", of_step] += step["busyMs"] / 1000
            if LIVE_ENTRIES in step:
                self._entries[of_step] = step[LIVE_ENTRIES]

    def collect(self) -> Iterator[Metric]:
        """See `prometheus_client`."""
        by_name: defaultdict[str, list[Sample]] = defaultdict(list)
        for sample in self._samples():
            by_name[sample[0]].append(sample)
        for metric in TABLE:
            if metric.kind == HISTOGRAM:
                yield from self._seconds[metric.name].collect()
                continue
            family_class = CounterMetricFamily if metric.kind == COUNTER else GaugeMetricFamily
            family = family_class(metric.name, metric.meaning, labels=metric.labels)
            for _, labels, value in by_name[metric.new_name or metric.name]:
                family.add_metric(labels, value)
            yield family

    def _samples(self) -> Iterator[Sample]:
        with self._lock:
            latest = dict(self._latest)
            counts, skipped = dict(self._counts), dict(self._skipped)
            entries = dict(self._entries)
        watched = {name: counted.watched for name, counted in list(PIPELINES.items())}
        for query in {*latest, *watched}:
            for source in watched.get(query, ()) or latest.get(query, []):
                yield from _per_partition("position", query, source, source.positions)
                yield from _per_partition("latest_offset", query, source, source.latest)
                yield from _per_partition("lag_offsets", query, source, source.lag)
        for labels, count in skipped.items():
            yield "tallystick_source_skipped_offsets_total", labels, count
        for of_step, entry_count in entries.items():
            yield "tallystick_state_live_entries", of_step, entry_count
        for name in PIPELINE_COUNTERS:
            for pipeline in list(PIPELINES):
                counts.setdefault((name, (pipeline,)), 0)
        for (name, of_query), count in counts.items():
            yield name, of_query, count
        for query, group in list(COUNTS.items()):
            yield "tallystick_group_offset_failures_total", (query,), group.failures
        for pipeline, counted in list(PIPELINES.items()):
            yield from _of_pipeline(pipeline, counted)


def register(registry: CollectorRegistry = REGISTRY) -> SourceMetrics:
    """Offer the metrics of all queries in this process in a registry of your own.

    Args:
        registry: of `prometheus_client`; its default one unless given.

    Returns:
        The collector; `registry.unregister` takes it away again.
    """
    metrics = SourceMetrics()
    registry.register(metrics)
    OBSERVERS.append(metrics.observe)
    return metrics


def serve(port: int, host: str = "127.0.0.1") -> None:
    """Offer the metrics over HTTP, in a thread of this process.

    Args:
        port: a free TCP port; a second server needs another one.
        host: the address to listen on; "0.0.0.0" lets other machines ask, too.

    Raises:
        OSError: the port is taken.
    """
    registry = CollectorRegistry()
    start_http_server(port, host, registry)
    register(registry)


def page() -> str:
    """Return the part of the docs that lists the metrics."""
    rows = ["| metric | kind | labels | meaning |", "| --- | --- | --- | --- |"]
    for metric in TABLE:
        only = " Pipelines only." if metric.pipelines_only else ""
        labels = ", ".join(metric.labels)
        old = f" Old name of `{metric.new_name}`: it goes with the next minor version."
        meaning = f"{metric.meaning}{only}{old if metric.new_name else ''}"
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {meaning} |")
    return "\n".join(rows)


def _of_pipeline(name: str, counts: PipelineCounts) -> Iterator[Sample]:
    one = (name,)
    yield "tallystick_starts_total", one, counts.starts
    yield "tallystick_started_timestamp_seconds", one, counts.started_ms / 1000
    yield "tallystick_running", one, int(counts.runs > 0)
    yield "tallystick_epochs_started_total", one, counts.epochs_started
    yield "tallystick_rows_written_total", one, counts.rows_written
    yield "tallystick_dead_letters_total", one, counts.dead_letters
    yield "tallystick_state_written_files_total", one, counts.written_files
    yield "tallystick_state_written_bytes_total", one, counts.written_bytes
    yield "tallystick_last_commit_timestamp_seconds", one, counts.committed_ms / 1000
    at_ms, since_ms = now_ms(), counts.open_since_ms
    yield "tallystick_epoch_open_seconds", one, max(0, at_ms - since_ms) / 1000 if since_ms else 0
    if counts.timeout_ms is not None:
        yield "tallystick_transaction_timeout_seconds", one, counts.timeout_ms / 1000
    for sink, begun_ms in counts.open_since().items():
        oldest_ms = min(filter(None, begun_ms), default=at_ms)
        yield "tallystick_open_transactions", (name, sink), len(begun_ms)
        yield (
            "tallystick_oldest_transaction_seconds",
            (name, sink),
            max(0, at_ms - oldest_ms) / 1000,
        )
    for sink, due_output in list(counts.due_outputs.items()):
        due = due_output()
        waited_ms = max(0, at_ms - due.since_ms) if due.epochs else 0
        yield "tallystick_due_epochs", (name, sink), due.epochs
        yield "tallystick_due_rows", (name, sink), due.rows
        yield "tallystick_due_files", (name, sink), due.files
        yield "tallystick_due_bytes", (name, sink), due.size
        yield "tallystick_oldest_due_seconds", (name, sink), waited_ms / 1000
    for error, count in list(counts.failures.items()):
        yield "tallystick_epoch_failures_total", (name, error), count
    for error, count in list(counts.aborted.items()):
        yield "tallystick_aborted_epochs_total", (name, error), count
    for step, count in list(counts.late_rows.items()):
        yield "tallystick_late_rows_total", (name, step), count
    for state in counts.state:
        of_step = (name, state.uid)
        yield "tallystick_state_bytes", of_step, sum(file.size for file in state.files)
        yield "tallystick_state_files", of_step, len(state.files)
        yield "tallystick_state_entries", of_step, sum(file.rows for file in state.files)
        if state.watermark_ms is not None:
            yield "tallystick_watermark_timestamp_seconds", of_step, state.watermark_ms / 1000


def _per_partition(
    what: str, query: str, source: SourceProgress, values: Mapping[TopicPartition, int]
) -> Iterable[Sample]:
    name, index = f"tallystick_source_{what}", str(source.index)
    if len(source.positions) <= PARTITION_SERIES_MAX:
        for partition, value in values.items():
            yield name, (query, index, partition.topic, str(partition.partition)), value
        return
    totals: Counter[str] = Counter()
    for partition, value in values.items():
        totals[partition.topic] += value
    for topic, total in totals.items():
        yield name, (query, index, topic, ""), total
