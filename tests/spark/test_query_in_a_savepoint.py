"""No query runs in a savepoint's own folder, however it is started: it would collect its files."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tallystick.checkpoint.forks import FORK, Fork
from tallystick.errors import OptionError
from tallystick.ops import savepoints
from tallystick.pipeline.loop import start_loop
from tallystick.run.epoch_loop import Trigger
from tallystick.spark.streaming.executions import QueryRun
from tallystick.spark.streaming.foreach_batch import EpochRunner
from tallystick.storage.file_storage import FileStorage
from tests.checkpoint_on_disk import Job


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A savepoint, with what Spark puts into the checkpoint of a new query before it calls us."""
    job = Job(tmp_path / "checkpoint")
    job.run(3)
    storage = FileStorage(str(tmp_path / "saved"))
    savepoints.create(job.storage, storage)
    storage.put("metadata", b'{"id":"a-query"}')
    storage.put("offsets/0", b'v1\n{}\n{"to":1}')
    return tmp_path / "saved"


def nobody(*_: Any) -> Any:
    raise AssertionError("it is refused before anyone is asked")


def of_a_pipeline(folder: Path) -> None:
    run: Any = SimpleNamespace(name="job", configs=[], keyed=SimpleNamespace(check=nobody))
    start_loop(run, str(folder), Trigger(), frozenset())


def of_foreach_batch(folder: Path) -> None:
    run = QueryRun(None, "a-query", "job", f"file:{folder}", None)  # type: ignore[arg-type]
    EpochRunner("job", nobody, nobody, frozenset())._open("a-run", run)


@pytest.mark.parametrize("start", [of_a_pipeline, of_foreach_batch])
def test_a_query_is_refused_in_a_savepoints_folder_and_told_to_restore_it(saved, start):
    before = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}

    with pytest.raises(OptionError, match=r"savepoint restore .*saved <new folder>") as refused:
        start(saved)

    assert "savepoint.json" in str(refused.value)
    assert {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()} == before


def test_a_query_of_structured_streaming_is_refused_in_a_fork(tmp_path):
    """Nothing leads what its function writes to the fork's own topics."""
    note = Fork("job-fork-1", {"out": "canary"}, {"out": (0,)}, "file:///original")
    FileStorage(str(tmp_path)).put(FORK, note.encode())

    with pytest.raises(OptionError, match=r"is a fork of file:///original .*Structured Streaming"):
        of_foreach_batch(tmp_path)
