"""What is decided and waits for a commit of a table, as operators see it."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

import tallystick as ts
from tallystick.__main__ import app
from tallystick.ops import due, metrics
from tallystick.ops.file_checks import file_findings
from tallystick.ops.inspection import inspect
from tallystick.ops.ui.page import CheckpointReader
from tallystick.ops.ui.rendering import sections
from tallystick.storage.file_storage import FileStorage
from tallystick.tables.publishing import Publisher
from tallystick.values import Severity
from tests.failover.sink_job import ROWS, SinkJob
from tests.tables.test_table_guarantees import COLUMNS

EPOCHS, TASKS, PARTITIONS = 3, 2, 3
HOUR_MS = 3_600_000


@pytest.fixture
def job(run: Callable[..., SinkJob], tmp_path: Path) -> SinkJob:
    """One with three epochs that wait for an hour."""
    table = ts.DeltaSink(tmp_path / "table", create=True, schema=COLUMNS, commit_every="1 hour")
    job = run(table)
    job.run_until(EPOCHS)
    return job


def gauge(registry: CollectorRegistry, name: str, job: SinkJob) -> float | None:
    return registry.get_sample_value(f"tallystick_{name}", {"query": job.name, "sink": "delta-1"})


def test_a_checkpoint_tells_what_waits_in_tables(job: SinkJob, tmp_path: Path) -> None:
    report = inspect(FileStorage(str(job.folder)))

    (waits,) = report.due
    size = sum(file.stat().st_size for file in (tmp_path / "table").glob("*.parquet"))
    assert asdict(waits) | {"since_ms": 0} == {
        "sink": "delta-1",
        "location": str(tmp_path / "table"),
        "epochs": EPOCHS,
        "rows": EPOCHS * PARTITIONS * ROWS,
        "files": EPOCHS * TASKS,
        "size": size,
        "since_ms": 0,
        "every_ms": HOUR_MS,
        "unknown": "",
    }
    assert 0 <= waits.waited_ms < HOUR_MS
    shown = CliRunner().invoke(app, ["inspect", str(job.folder)]).output
    assert "sink delta-1: 3 epochs with 72 rows, in 6 files of" in " ".join(shown.split())
    job.close()
    assert inspect(FileStorage(str(job.folder))).due == ()


def test_it_is_a_warning_once_it_waits_for_much_longer_than_it_is_meant_to(
    job: SinkJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finding(waited_ms: int) -> tuple[Severity, str]:
        (sink,) = inspect(FileStorage(str(job.folder))).due
        monkeypatch.setattr(due, "now_ms", lambda: sink.since_ms + waited_ms)
        report = inspect(FileStorage(str(job.folder)))
        (found,) = (one for one in file_findings(report) if one.check == "tables")
        return found.severity, found.found

    assert finding(2 * HOUR_MS)[0] is Severity.INFO
    severity, text = finding(3 * HOUR_MS + 1)
    assert severity is Severity.WARNING
    assert "3 epochs" in text
    assert "for 3 h (commit_every is 60 min)" in text


def test_a_table_that_cannot_be_read_is_said_to_be_unknown(job: SinkJob, tmp_path: Path) -> None:
    (record,) = (tmp_path / "table" / "_tallystick").glob("**/due/00000001")
    record.write_bytes(b"{}")

    (waits,) = inspect(FileStorage(str(job.folder))).due
    assert "due epoch" in waits.unknown
    assert str(record.relative_to(tmp_path / "table")) in waits.unknown


def test_the_page_shows_it(job: SinkJob) -> None:
    (job.folder / "metadata").write_text(json.dumps({"id": f"lineage-of-{job.name}"}))
    facts = CheckpointReader(str(job.folder), None).read()

    (waits,) = facts.due
    assert waits.epochs == EPOCHS
    shown = sections(facts)["transactions"]
    row = '<th scope="row">delta-1</th><td>3</td><td>72</td><td>6</td>'
    assert row in shown
    assert "Decided, and not published yet" in shown
    job.close()
    assert "Decided" not in sections(CheckpointReader(str(job.folder), None).read())["transactions"]


def test_metrics_count_what_waits_until_it_is_published(
    job: SinkJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = CollectorRegistry()
    registry.register(metrics.SourceMetrics())

    assert gauge(registry, "due_epochs", job) == EPOCHS
    assert gauge(registry, "due_rows", job) == EPOCHS * PARTITIONS * ROWS
    assert gauge(registry, "due_files", job) == EPOCHS * TASKS
    size = gauge(registry, "due_bytes", job)
    waited = gauge(registry, "oldest_due_seconds", job)
    assert size is not None
    assert size > 1_000
    assert waited is not None
    assert 0 <= waited < 60

    with monkeypatch.context() as patched:
        patched.setattr(Publisher, "publish", lambda *_: None)
        job.close()
    assert gauge(registry, "due_epochs", job) == EPOCHS, "the next start publishes them"
    job.run_next()
    job.close()
    for name in ("due_epochs", "due_rows", "due_files", "due_bytes", "oldest_due_seconds"):
        assert gauge(registry, name, job) == 0
