"""What a user's module makes at import, each process has for itself, as Spark's workers do."""

import json
import shutil
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import tallystick as ts
from tests.spark.flow import Flow, finish
from tests.spark.topics import produce, read_committed
from tests.spark.users_module import Service

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(600)]
_modules = count()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[str]:
    """The file with a service's address."""
    path = str(tmp_path / "service")
    service = Service(path)
    yield path
    service.close()


@pytest.fixture
def module(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that no process of Spark's has imported yet."""
    name = f"users_module_{next(_modules)}_{time.time_ns()}"
    folder = tmp_path / "modules"
    folder.mkdir()
    path = folder / f"{name}.py"
    shutil.copy(Path(__file__).with_name("users_module.py"), path)
    spark.sparkContext.addPyFile(str(path))
    monkeypatch.syspath_prepend(str(folder))
    return name


def observing(module: str, service: str, spark: Any) -> Any:
    """The module's function; the driver imports it too, as a user's program does."""
    imported: Any = __import__(module)
    return imported.Observing(service, spark.sparkContext.broadcast(7))


def feed(flow: Flow, record_count: int) -> None:
    for partition in range(flow.partitions):
        records = [("k", str(number)) for number in range(record_count)]
        produce(flow.confluent, flow.topic_in, records, partition=partition)


def observed(flow: Flow, pipeline: ts.Pipeline, execution: Any) -> list[dict[str, Any]]:
    """What the rows say that a run adds to the output."""
    before = values(flow)
    feed(flow, 20)
    finish(
        lambda: pipeline.start(
            flow.spark,
            checkpoint=str(flow.checkpoint),
            trigger={"availableNow": True},
            execution=execution,
        )
    )
    rows = values(flow) - before  # no two are alike: they have random numbers
    assert len(rows) == 20 * flow.partitions
    return [json.loads(row) for row in rows]


def values(flow: Flow) -> set[str]:
    return {record.value or "" for record in read_committed(flow.confluent, flow.topic_out)}


def assert_each_has_its_own(rows: list[dict[str, Any]]) -> set[int]:
    """Return the processes, of which no two share anything."""
    for row in rows:
        assert row["pids"] == [row["pid"]] * 3, "imported, connected and unpickled by itself"
        assert row["answers"] == [True, True]
        assert row["ticks"], "the module's thread runs"
        assert row["pools"]
        assert row["shared"] == 7
    for of_module, draws in enumerate(zip(*(row["draws"] for row in rows), strict=True)):
        assert len(set(draws)) == len(rows), f"generator {of_module} drew alike in two processes"
    by_pid = {row["pid"]: (row["token"], *row["ports"]) for row in rows}
    assert all((row["token"], *row["ports"]) == by_pid[row["pid"]] for row in rows)
    own = [thing for things in by_pid.values() for thing in things]
    assert len(set(own)) == len(own)
    return set(by_pid)


def test_a_member_has_what_each_worker_of_sparks_has(flow: Flow, module: str, service: str) -> None:
    """First in members, then in Spark's workers, then in members beside workers that have it."""
    pipeline = flow.pipeline(observing(module, service, flow.spark))
    members = assert_each_has_its_own(observed(flow, pipeline, "resident"))
    workers = assert_each_has_its_own(observed(flow, pipeline, "jobs"))
    assert len(members) == 2
    for _ in range(2):
        again = assert_each_has_its_own(observed(flow, pipeline, "resident"))
        assert len(again) == 2
        assert not again & (members | workers)
        members |= again


def test_a_module_that_cannot_be_imported_is_named(
    flow: Flow, module: str, service: str, tmp_path: Path
) -> None:
    """Its error ends the pipeline as one of a function does, with the line that raised it."""
    pipeline = flow.pipeline(observing(module, service, flow.spark))
    Path(service).unlink()
    feed(flow, 1)
    with pytest.raises(FileNotFoundError, match="service") as caught:
        finish(
            lambda: pipeline.start(
                flow.spark, checkpoint=str(flow.checkpoint), execution="resident"
            )
        )
    notes = "".join(getattr(caught.value, "__notes__", ()))
    assert "in __setstate__" in notes
