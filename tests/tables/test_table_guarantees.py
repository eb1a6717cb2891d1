"""A pipeline with a table and files, killed at each fact of an epoch: both hold the same rows.

The checkpoint decides; the driver, its sinks and its tasks are real, without Spark and Kafka.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

import tallystick as ts
from tallystick.epoch import protocol as c
from tests.delta.delta_sinks import numbers_of_log, unnamed
from tests.failover.sink_job import SinkJob, flat, read_files
from tests.iceberg.iceberg_sinks import sink_in, unnamed_in, values_in

COLUMNS = pa.schema([("value", pa.string()), ("partition", pa.int32())])
FACTS = (
    c.EpochRan,
    c.ManifestWritten,
    c.OutputCounted,
    c.TransactionCommitted,
    c.OutputSettled,
    c.OutputConfirmed,
)


class Delta:
    """A Delta table, and its rows for delta-rs and for DuckDB with the log read by hand."""

    def sink(self, path: Path, **settings: Any) -> ts.DeltaSink:
        return ts.DeltaSink(path, create=True, schema=COLUMNS, **settings)

    def seen(self, path: Path) -> Counter[str]:
        values = DeltaTable(path).to_pyarrow_table()["value"].to_pylist()
        assert sorted(values) == numbers_of_log(path, "value")
        return Counter(values)

    def unnamed(self, path: Path) -> list[str]:
        return unnamed(path)


class Upserts(Delta):
    """A Delta table that rows are merged into: each has a key of its own, so all are there."""

    def sink(self, path: Path, **settings: Any) -> ts.DeltaSink:
        return super().sink(path, key=["value"], **settings)

    def unnamed(self, path: Path) -> list[str]:
        return [*path.glob("_tallystick/staged/*")]


class Iceberg:
    """An Iceberg table, and its rows for pyiceberg and for DuckDB with metadata read by hand."""

    def sink(self, path: Path, **settings: Any) -> ts.IcebergSink:
        return sink_in(path, create=True, schema=COLUMNS, **settings)

    def seen(self, path: Path) -> Counter[str]:
        return values_in(path, "value")

    def unnamed(self, path: Path) -> list[str]:
        return unnamed_in(path)


class Files:
    """A folder of files, published together where they wait, and its rows for pyarrow."""

    def sink(self, path: Path, **settings: Any) -> ts.FileSink:
        return ts.FileSink(path, schema=COLUMNS, **settings)

    def seen(self, path: Path) -> Counter[str]:
        return read_files(path) if path.exists() else Counter()

    def unnamed(self, path: Path) -> list[str]:
        return [str(draft) for draft in path.glob("_tallystick/**/*.draft")]


Kind = Delta | Iceberg | Files


@pytest.fixture(
    params=[Delta, Upserts, Iceberg, Files], ids=["delta", "upserts", "iceberg", "files"]
)
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param()
    return kind


def killed(job: SinkJob, event: type) -> SinkJob:
    """The job that goes on after a driver that died at a fact, and closed nothing."""
    job.die_at(event)
    successor = job.leave()
    successor.run_until(job.logged + 1)
    return successor


@pytest.mark.parametrize("every", [0, "1 hour"])
@pytest.mark.parametrize("event", FACTS)
def test_a_table_and_files_agree_wherever_the_driver_is_killed(
    kind: Kind, run: Callable[..., SinkJob], tmp_path: Path, event: type, every: Any
) -> None:
    table, files = tmp_path / "table", tmp_path / "files"
    job = run(kind.sink(table, commit_every=every), ts.FileSink(files))
    job.run_until(1)
    for _ in range(2):
        job = killed(job, event)
    if every:
        assert set(kind.seen(table)) <= set(flat(job.expected())), "it lags behind, and no more"
    job.run_until(5)
    job.close()

    assert kind.seen(table) == flat(job.expected())
    assert read_files(files) == flat(job.expected())
    assert kind.unnamed(table) == []


@pytest.mark.parametrize("every", [0, "1 hour"])
def test_the_rows_of_a_task_that_is_killed_are_there_once(
    kind: Kind, run: Callable[..., SinkJob], tmp_path: Path, every: Any
) -> None:
    job = run(kind.sink(tmp_path / "table", commit_every=every))
    job.run_until(1)

    job.run_into_a_death()
    assert len(kind.unnamed(tmp_path / "table")) >= (1 if not every else 3)
    job.restart(midway=lambda _: None)
    job.run_until(3)
    job.close()
    assert kind.seen(tmp_path / "table") == flat(job.expected())
    assert kind.unnamed(tmp_path / "table") == []


@pytest.mark.parametrize("every", [0, "1 hour"])
def test_of_two_drivers_one_goes_on(
    kind: Kind, run: Callable[..., SinkJob], tmp_path: Path, every: Any
) -> None:
    table, files = tmp_path / "table", tmp_path / "files"
    job = run(kind.sink(table, commit_every=every), ts.FileSink(files))
    job.run_until(2)
    other = job.leave()
    other.run_until(4)
    with pytest.raises(ts.FencedError):
        job.run_next()
    job.close()  # publishes what it had decided, unless the other did
    other.run_until(5)
    other.close()
    assert kind.seen(table) == flat(other.expected()) == read_files(files)


def test_a_table_is_added_and_taken_out_again(
    kind: Kind, run: Callable[..., SinkJob], tmp_path: Path
) -> None:
    """Each sink has the rows of the epochs in which it was there."""
    table, files = kind.sink(tmp_path / "table", commit_every="1 hour"), tmp_path / "files"
    job = run(ts.FileSink(files))
    job.run_until(2)
    job.restart(ts.FileSink(files), table)
    job.run_until(4)
    job.restart(ts.FileSink(files))
    job.run_until(6)
    job.close()
    assert read_files(files) == flat(job.expected())
    assert kind.seen(tmp_path / "table") == flat(job.expected(range(2, 4)))


def test_a_table_whose_commit_is_due_cannot_be_taken_out(
    kind: Kind, run: Callable[..., SinkJob], tmp_path: Path
) -> None:
    """The driver died between the decision and the table's commit."""
    table, files = kind.sink(tmp_path / "table"), ts.FileSink(tmp_path / "files")
    job = run(table, files)
    job.run_until(1)
    job.die_at(c.TransactionCommitted)
    successor = job.leave()
    successor.sinks = [files]
    with pytest.raises(ts.OptionError, match=r"'\w+-\d'.* Add the sink again"):
        successor.run_next()
    successor.restart(table, files)
    successor.run_until(3)
    successor.close()
    assert kind.seen(tmp_path / "table") == flat(successor.expected())
