"""Files are compacted in threads beside the epochs: none waits for one, and none is named twice."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tallystick.epoch import protocol as c
from tallystick.tables import background
from tallystick.tables.compacting import SILENT_EPOCHS, Phase
from tests.failover.sink_job import SinkJob, flat
from tests.tables.test_compacting import (
    SMALL,
    compaction_count,
    files_in,
    publisher_of,
    run_until_share,
)
from tests.tables.test_table_guarantees import Delta, Iceberg, Kind
from tests.waiting import wait_for


class Gate:
    """Holds the threads of jobs up, before they read their sources."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self.waiting = 0
        read = background.rows_of

        def rows_of(*args: Any) -> Iterator[Any]:
            assert threading.current_thread() is not threading.main_thread()
            self.waiting += 1
            assert self._open.wait(60)
            return read(*args)

        monkeypatch.setattr(background, "rows_of", rows_of)

    def open(self) -> None:
        """Let them go on."""
        self._open.set()


def jobs() -> list[background.Job]:
    return [*background._jobs.values()]


def wait_for_jobs() -> None:
    for job in jobs():
        job.wait()


def first_done(job: SinkJob, monkeypatch: pytest.MonkeyPatch) -> background.Job:
    """Run epochs until a process has a compacted file that no epoch has yet."""
    gate = Gate(monkeypatch)
    run_until_share(job)
    job.run_next()
    gate.open()
    wait_for_jobs()
    (done, *_) = jobs()
    assert done.compactions
    return done


def test_epochs_go_on_while_files_are_compacted_and_a_later_one_has_the_file(
    kind: Kind, run: Callable[..., SinkJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    job = run(kind.sink(tmp_path / "table", commit_every="1 hour", target_file_size=SMALL))
    run_until_share(job)
    job.run_until(job.logged + 4)
    assert gate.waiting >= 1
    assert compaction_count(job) == 0, "no epoch has waited"
    gate.open()
    wait_for_jobs()
    job.run_next()
    assert compaction_count(job) >= 1
    job.close()
    assert kind.seen(tmp_path / "table") == flat(job.expected())
    assert len(files_in(kind, tmp_path / "table")) < 2 * job.logged
    assert kind.unnamed(tmp_path / "table") == []
    assert jobs() == []


def test_a_commit_waits_for_what_is_compacted_and_leaves_later_epochs(
    kind: Kind, run: Callable[..., SinkJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    job = run(kind.sink(tmp_path / "table", commit_every="1 hour"))
    job.run_until(5)
    publisher = publisher_of(job)
    publisher._publish_in_time()
    job.run_until(9)
    assert publisher._compactor._phase is Phase.GIVEN
    assert publisher.due == (*range(9),)
    gate.open()
    wait_for_jobs()
    job.run_next()
    wait_for(lambda: publisher.due, (5, 6, 7, 8, 9), "a publish of what was due at the question")
    assert kind.seen(tmp_path / "table") == flat(job.expected(range(5)))
    assert len(files_in(kind, tmp_path / "table")) == 1 + 10 * isinstance(kind, Iceberg)
    job.close()
    assert kind.seen(tmp_path / "table") == flat(job.expected())
    assert kind.unnamed(tmp_path / "table") == []


def test_a_driver_dies_while_files_are_compacted_and_its_successor_removes_the_file(
    kind: Kind, run: Callable[..., SinkJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of the dead run goes on, and finds its intent gone."""
    gate = Gate(monkeypatch)
    job = run(kind.sink(tmp_path / "table", commit_every="1 hour", target_file_size=SMALL))
    run_until_share(job)
    job.run_next()
    (orphan, *_) = jobs()
    wait_for(lambda: gate.waiting, 1, "a job under way")
    monkeypatch.setattr(background, "_jobs", {})  # the successor has processes of its own
    job.die_at(c.EpochRan)
    successor = job.leave()
    successor.run_until(successor.logged + 2)
    gate.open()
    orphan.wait()
    assert orphan.has_failed
    wait_for_jobs()
    successor.run_until(successor.logged + 2)
    successor.close()
    assert kind.seen(tmp_path / "table") == flat(successor.expected())
    assert kind.unnamed(tmp_path / "table") == []


@pytest.mark.parametrize("is_decided", [True, False])
def test_a_file_that_is_done_is_there_once_when_the_driver_dies_in_the_epoch_that_has_it(
    kind: Kind,
    run: Callable[..., SinkJob],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_decided: bool,
) -> None:
    job = run(kind.sink(tmp_path / "table", commit_every="1 hour", target_file_size=SMALL))
    (compacted,) = first_done(job, monkeypatch).compactions
    job.die_at(c.TransactionCommitted if is_decided else c.EpochRan)
    background._jobs.clear()
    name = compacted.file.path.rpartition("/")[2]
    assert [*(tmp_path / "table").rglob(name)]
    successor = job.leave()
    successor.run_next()
    successor.close()
    assert kind.seen(tmp_path / "table") == flat(successor.expected())
    assert kind.unnamed(tmp_path / "table") == []


def test_what_a_run_compacts_is_no_stray_of_it(
    run: Callable[..., SinkJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that fails lets the driver abort what lingers, beside jobs that are under way."""
    gate = Gate(monkeypatch)
    job = run(Delta().sink(tmp_path / "table", commit_every="1 hour", target_file_size=SMALL))
    run_until_share(job)
    job.run_next()
    wait_for(lambda: gate.waiting, 1, "a job under way")
    assert job._open is not None
    job._open[1].abort_strays()
    gate.open()
    wait_for_jobs()
    job.run_next()
    assert compaction_count(job) == 1
    job.close()
    assert Delta().seen(tmp_path / "table") == flat(job.expected())


def test_a_process_that_is_gone_costs_time_and_no_rows(
    run: Callable[..., SinkJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file stays, unseen, until the next start."""
    job = run(Delta().sink(tmp_path / "table", commit_every="1 hour", target_file_size=SMALL))
    lost, start = first_done(job, monkeypatch), job.logged
    background._jobs.clear()

    def is_compacted() -> bool:
        due = publisher_of(job)._due.values()
        sources = {path for one in due for done in one.compactions for path in done.sources}
        return {*lost.compactions[0].sources} <= sources

    while not is_compacted():
        job.run_next()
        wait_for_jobs()
        assert job.logged < start + 2 * SILENT_EPOCHS
    assert job.logged > start + SILENT_EPOCHS
    job.close()
    assert Delta().seen(tmp_path / "table") == flat(job.expected())
    assert len(Delta().unnamed(tmp_path / "table")) == 1
    successor = job.leave()
    successor.run_next()
    successor.close()
    assert Delta().unnamed(tmp_path / "table") == []


def test_a_compacted_file_that_is_gone_is_done_without(
    run: Callable[..., SinkJob],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = run(Delta().sink(tmp_path / "table", commit_every="1 hour", target_file_size=SMALL))
    (compacted,) = first_done(job, monkeypatch).compactions
    (tmp_path / "table" / compacted.file.path).unlink()
    job.run_next()
    assert "compacted files are gone" in caplog.text
    job.run_until(job.logged + 2)
    job.close()
    assert Delta().seen(tmp_path / "table") == flat(job.expected())
    assert Delta().unnamed(tmp_path / "table") == []
