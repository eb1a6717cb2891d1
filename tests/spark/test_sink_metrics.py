"""What Prometheus is told of files and of open transactions, beside the broker and the disk."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

import tallystick as ts
from tallystick.epoch.protocol import ManifestWritten
from tallystick.kafka.client import Client
from tallystick.kafka.transactions import TransactionDescription, found_open
from tallystick.ops import metrics
from tallystick.pipeline.listeners import OBSERVERS, PIPELINES
from tallystick.run.participants import OpenSinks
from tests.spark.flow import Flow, pass_on

pytestmark = [pytest.mark.broker, pytest.mark.spark]


class Died(BaseException):
    """Nobody in between can catch it and tidy up."""


def run(flow: Flow, folder: Path, listener: Callable[[object], None]) -> ts.Query:
    """Run to the end of the input, into a topic and into files; each task has its transactions."""
    sinks = flow.sink(transactions="task", uid="out"), ts.FileSink(str(folder), uid="files")
    source = ts.Pipeline(flow.name).read(flow.source(max_offsets_per_trigger=100))
    pipeline = source.map_batches(pass_on()).write(*sinks)
    trigger = {"availableNow": True}
    query = pipeline.start(
        flow.spark, checkpoint=str(flow.checkpoint), trigger=trigger, listener=listener
    )
    query.awaitTermination(120)
    return query


def test_files_and_open_transactions_are_the_truth(
    flow: Flow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that a run left open which died, until the next one has given them up."""
    flow.feed(300)
    folder = tmp_path / "files"
    registry = CollectorRegistry()
    collector = metrics.register(registry)
    looks: list[tuple[int, int]] = []

    def value(name: str, **labels: str) -> float:
        return registry.get_sample_value(name, {"query": flow.name, **labels}) or 0

    def compare() -> None:
        """With what the broker lists, and with the drafts on disk."""
        open_count = value("tallystick_open_transactions", sink="out")
        drafts = value("tallystick_open_transactions", sink="files")
        its_open = open_in_kafka(flow)
        assert open_count == len(its_open)
        assert drafts == len({draft.parent for draft in folder.rglob("*.draft")})
        if its_open:
            age_s = time.time() - min(transaction.begun_ms for transaction in its_open) / 1000
            shown_s = value("tallystick_oldest_transaction_seconds", sink="out")
            assert age_s - 1 < shown_s < age_s + 5, "it begins in Kafka with its first rows"
        looks.append((int(open_count), int(drafts)))

    def at_manifests(event: object) -> None:
        if isinstance(event, ManifestWritten):
            compare()
            if [min(look) > 0 for look in looks].count(True) == 2:  # in the second epoch
                raise Died

    abort = OpenSinks.abort

    def looked_at(self: OpenSinks, committables: Any) -> None:
        compare()
        abort(self, committables)

    try:
        with pytest.raises(Died):
            run(flow, folder, at_manifests)
        last_look = looks[-1]
        looks.clear()
        PIPELINES.pop(flow.name)  # as in another process
        monkeypatch.setattr(OpenSinks, "abort", looked_at)
        query = run(flow, folder, lambda _: None)
    finally:
        OBSERVERS.remove(collector.observe)
    assert looks == [last_look], "what was left was found, once"
    compare()
    assert looks[-1] == (0, 0)

    sizes = [path.stat().st_size for path in folder.rglob("*.parquet")]
    assert value("tallystick_written_files_total") == len(sizes) >= 3
    assert value("tallystick_written_file_bytes_total") == sum(sizes)
    assert sum(progress["files"]["written"] for progress in query.recentProgress) < len(sizes)
    flow.assert_exact()


def open_in_kafka(flow: Flow) -> list[TransactionDescription]:
    """The flow's open transactions, as the broker lists them."""
    client = Client(flow.sink().output.config)
    try:
        transactions = found_open(client)
    finally:
        client.close()
    return [
        transaction
        for transaction in transactions
        if f"-{flow.name}/" in transaction.transactional_id
    ]
