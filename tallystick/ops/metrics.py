"""Positions, lag and losses of running queries for Prometheus; nothing is kept unless asked for.

    import tallystick.ops.metrics
    tallystick.ops.metrics.serve(9400)              # a page of its own, or:
    tallystick.ops.metrics.register(my_registry)    # along with what you have

Series of a query are there from its first epoch until it ends; what is counted stays. A query has
one series per partition, or one per topic (`partition=""`, sums) where it reads more than
`PARTITION_SERIES_MAX` partitions: so a pattern that matches too much costs no monitoring system.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from threading import Lock
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tallystick.spark.listeners import LATE_ROWS
from tallystick.spark.progress import SourceProgress, source_progress
from tallystick.spark.streaming import offset_reporter
from tallystick.spark.streaming.group_offsets import COUNTS
from tallystick.values import TopicPartition

PARTITION_SERIES_MAX = 1_000
"""Sources with more partitions than this have one series per topic."""
SOURCE_LABELS = ("query", "source", "topic", "partition")


class SourceMetrics(Collector):
    """The state of all queries in this process, as Prometheus asks for it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._latest: dict[str, list[SourceProgress]] = {}
        self._counted: dict[str, int] = {}
        self._epochs: Counter[str] = Counter()
        self._skipped: Counter[tuple[str, str]] = Counter()

    def observe(self, query: str, progress: Mapping[str, Any] | None) -> None:
        """Take in what an epoch did; None: the query has ended. See `offset_reporter.Observer`."""
        with self._lock:
            if progress is None:
                self._latest.pop(query, None)
                return
            sources = source_progress(progress)
            if not sources:
                return
            self._latest[query] = sources
            query_id, batch_id = str(progress["id"]), progress["batchId"]
            if self._counted.get(query_id, -1) >= batch_id:
                return
            self._counted[query_id] = batch_id
            self._epochs[query] += 1
            for source in sources:
                for partition, (start, stop) in source.skipped.items():
                    self._skipped[query, partition.topic] += stop - start

    def collect(self) -> Iterator[Metric]:
        """See `prometheus_client`."""
        with self._lock:
            latest = dict(self._latest)
            epochs, skipped = dict(self._epochs), dict(self._skipped)
        position = _gauge("tallystick_source_position", "Next offset to read.")
        end = _gauge("tallystick_source_latest_offset", "End of what can be read.")
        lag = _gauge("tallystick_source_lag_offsets", "Offsets that are left to read.")
        for query, sources in latest.items():
            for source in sources:
                _add(position, query, source, source.positions)
                _add(end, query, source, source.latest)
                _add(lag, query, source, source.lag)
        yield from (position, end, lag)
        lost = CounterMetricFamily(
            "tallystick_source_skipped_offsets",
            "Offsets that were lost unread and passed over, as a policy of the source says.",
            labels=("query", "topic"),
        )
        for (query, topic), count in skipped.items():
            lost.add_metric((query, topic), count)
        done = CounterMetricFamily("tallystick_epochs", "Epochs committed.", labels=("query",))
        for query, count in epochs.items():
            done.add_metric((query,), count)
        failures = CounterMetricFamily(
            "tallystick_group_offset_failures",
            "How often positions could not be shown in a consumer group; they are sent again.",
            labels=("query",),
        )
        for query, counts in list(COUNTS.items()):
            failures.add_metric((query,), counts.failures)
        late = CounterMetricFamily(
            "tallystick_late_rows",
            "Rows that a keyed step dropped, since they came later than its watermark.",
            labels=("query", "step"),
        )
        for labels, count in list(LATE_ROWS.items()):
            late.add_metric(labels, count)
        yield from (lost, done, failures, late)


def register(registry: CollectorRegistry = REGISTRY) -> SourceMetrics:
    """Offer the metrics of all queries in this process in a registry of your own.

    Args:
        registry: of `prometheus_client`; its default one unless given.

    Returns:
        The collector; `registry.unregister` takes it away again.
    """
    metrics = SourceMetrics()
    registry.register(metrics)
    offset_reporter.OBSERVERS.append(metrics.observe)
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


def _gauge(name: str, what: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, what, labels=SOURCE_LABELS)


def _add(
    family: GaugeMetricFamily,
    query: str,
    source: SourceProgress,
    values: Mapping[TopicPartition, int],
) -> None:
    index = str(source.index)
    if len(source.positions) <= PARTITION_SERIES_MAX:
        for partition, value in values.items():
            family.add_metric((query, index, partition.topic, str(partition.partition)), value)
        return
    totals: Counter[str] = Counter()
    for partition, value in values.items():
        totals[partition.topic] += value
    for topic, total in totals.items():
        family.add_metric((query, index, topic, ""), total)
