"""Spark's worker daemon is killed and the executor lives on: epochs run again, in new workers."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tallystick.epoch import protocol as c
from tallystick.epoch.coordinator import ATTEMPTS_MAX
from tallystick.pipeline.sinks import SinkCluster
from tallystick.spark.jobs import run_until_alive
from tallystick.tasks.read import Report, WritePlan
from tallystick.testing import EmbeddedKafka
from tests.spark.driver_process import Drivers
from tests.spark.flow import Facts, Flow
from tests.spark.mischief import Gangs, is_gone, processes_told_in, wait_until_gone
from tests.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.chaos]

EPOCH_RECORDS = 60
KILLS = {"epoch": ("100", "writing", "idle"), "task": ("100", "400", "idle")}
"""When a daemon dies: at the record of that number, when a task has written, between epochs."""
REAPED = """Job aborted due to stage failure: Lost task 0.0 in stage 2.0: \
java.io.IOException: Stream closed
\tat java.base/java.io.DataOutputStream.flush(DataOutputStream.java:128)
\tat org.apache.spark.api.python.PythonWorkerFactory.$anonfun$stopWorker$2\
(PythonWorkerFactory.scala:527)
\tat org.apache.spark.api.python.PythonWorkerFactory.create(PythonWorkerFactory.scala:174)"""
ZOMBIE = "Job aborted due to stage failure: Lost task 0.0 in stage 2.0: \
org.apache.spark.SparkException: Python worker exited unexpectedly (crashed). Consider …"
IDLE_AT = 4
"""The epoch from which on a daemon dies, while no worker has anything to do."""


class Daemons:
    """Who ran the tasks, and which daemons were killed; told in files, since tasks tell it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.epochs = 0
        folder.mkdir()

    def dying(self, kills: tuple[str, ...]) -> Any:
        """A function that lets the daemon of its worker die, once at each of some records.

        It goes on when it is an orphan: nothing but the end of its process may stop it.
        """
        folder = str(self.folder)

        def pass_on(rows: pa.RecordBatch) -> pa.RecordBatch:
            called_s = time.monotonic()
            daemon = os.getppid()
            assert daemon == os.getpgrp(), "an orphan was given a task"
            with open(f"{folder}/workers", "a") as file:
                file.write(f"{called_s} {os.getpid()} {daemon}\n")
            met = {value.decode() for value in rows["value"].to_pylist()}
            for number in met.intersection(kills):
                if not os.path.exists(f"{folder}/dead-{number}"):
                    Path(f"{folder}/dead-{number}").write_text(str(daemon))
                    os.kill(daemon, signal.SIGKILL)
                    while os.getppid() == daemon:
                        time.sleep(0.01)
            return rows.select(["key", "value"])

        return pass_on

    def dying_write(self, plan: WritePlan) -> WritePlan:
        """The same in a writing task, before it can report."""
        marker = str(self.folder / "dead-writing")

        class Dying(WritePlan):
            def write(self, frames: Any, attempt_number: int) -> Report:
                report = WritePlan.write(self, frames, attempt_number)
                if report.produced and not os.path.exists(marker):
                    daemon = os.getppid()
                    assert daemon == os.getpgrp(), "an orphan was given a task"
                    Path(marker).write_text(str(daemon))
                    os.kill(daemon, signal.SIGKILL)
                    while os.getppid() == daemon:
                        time.sleep(0.01)
                return report

        return Dying(**vars(plan))

    def behind_epoch(self, event: c.Event) -> None:
        """A listener that kills the newest daemon that lives, after an epoch."""
        self.epochs += isinstance(event, c.OutputConfirmed)
        is_due = self.epochs >= IDLE_AT and not (self.folder / "dead-idle").exists()
        if not is_due or not isinstance(event, c.OutputConfirmed):
            return
        # The newest one may be dead: of an orphan that could report before it ended.
        living = [parent for _, parent in self.workers() if not is_gone(parent)]
        if living:
            (self.folder / "dead-idle").write_text(str(living[-1]))
            os.kill(living[-1], signal.SIGKILL)

    def workers(self) -> list[tuple[int, int]]:
        """The workers and their parents, in the order of their calls.

        Not of the lines: a task beside one whose daemon was killed may write its line late.
        """
        lines = map(str.split, (self.folder / "workers").read_text().splitlines())
        calls = sorted((float(called_s), int(pid), int(parent)) for called_s, pid, parent in lines)
        return [(pid, parent) for _, pid, parent in calls]

    def dead(self) -> dict[str, int]:
        """Which daemons were killed, and when."""
        return {
            path.name.removeprefix("dead-"): int(path.read_text())
            for path in self.folder.glob("dead-*")
        }


@pytest.mark.parametrize("transactions", ["epoch", "task"])
def test_epochs_go_on_in_workers_of_another_daemon(
    flow: Flow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transactions: str
) -> None:
    """Among its rows, while it writes, and between two epochs; Spark jobs, one attempt per task."""
    daemons, kills = Daemons(tmp_path / "daemons"), KILLS[transactions]
    write_plan = SinkCluster.write_plan
    monkeypatch.setattr(
        SinkCluster,
        "write_plan",
        lambda cluster, producer: daemons.dying_write(write_plan(cluster, producer)),
    )
    flow.feed(600)
    pipeline = flow.pipeline(
        daemons.dying(kills),
        max_offsets_per_trigger=EPOCH_RECORDS,
        sink={"transactions": transactions},
    )
    aborted = []

    def listen(event: c.Event) -> None:
        daemons.behind_epoch(event)
        if isinstance(event, c.ActionFailed):
            aborted.append(str(event.error))

    flow.run(pipeline, listener=listen, execution="jobs")

    flow.assert_exact()
    dead = daemons.dead()
    assert dead.keys() == set(kills)
    assert len(set(dead.values())) == len(dead), "each was the daemon of new workers"
    wait_until_gone(dead.values())
    # Everyone was of a daemon's, never of who adopts orphans; the last ones' lives.
    parents = [parent for _, parent in daemons.workers()]
    assert parents[-1] not in dead.values()
    assert not is_gone(parents[-1])
    assert 1 not in parents
    for killed in dead.values():
        wait_until_gone({pid for pid, parent in daemons.workers() if parent == killed})
    assert len(aborted) >= len(dead), aborted
    assert all("Python worker" in reason for reason in aborted), aborted


def test_resident_tasks_whose_worker_or_daemon_dies_between_epochs_come_up_again(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    gangs, facts = Gangs(monkeypatch), Facts()
    query = flow.pipeline().start(
        flow.spark,
        checkpoint=str(flow.checkpoint),
        trigger={"processingTime": "20 milliseconds"},
        listener=facts,
    )
    for above in (_parent, os.getpgid, _parent):
        flow.feed(30)
        query.processAllAvailable()
        gang = gangs.newest
        os.kill(above(gang.pids[0]), signal.SIGKILL)
        wait_until_gone(gang.pids.values())
        wait_until(lambda gang=gang: gang.is_lost, "nobody misses it")  # type: ignore[misc]
    flow.feed(30)
    query.processAllAvailable()
    query.stop()
    assert len(gangs.all) == 4
    flow.assert_exact()


@pytest.mark.parametrize("execution", ["jobs", "resident"])
def test_more_dead_workers_than_an_epoch_has_attempts_are_taken_out_of_the_pool(
    kafka: EmbeddedKafka, drivers: Drivers, tmp_path: Path, execution: str
) -> None:
    """Spark gives each of them a task before it sees that it is dead; this epoch has one task."""
    flow, all_there = Flow(kafka, None, tmp_path, partitions=6), tmp_path / "all"
    flow.feed(120, keys=60)
    spec = flow.spec(master="local[6]", map_waits_for=str(all_there))
    driver, before = drivers.take(), tmp_path / "before"
    driver.run({**spec, "execution": "jobs", "tells_pids": str(before)})
    wait_until(lambda: len(processes_told_in(before)) > ATTEMPTS_MAX + 1, "too few workers")
    workers = processes_told_in(before)
    daemons = {_parent(worker) for worker in workers}
    all_there.touch()
    assert driver.wait_for_end() is None

    flow.feed(10, partition=0)
    for daemon in daemons:
        os.kill(daemon, signal.SIGKILL)
    wait_until_gone(daemons | workers)
    driver.run({**spec, "execution": execution, "tells_pids": str(tmp_path / "after")})
    assert driver.wait_for_end() is None

    # Resident tasks start before the first epoch does, which waits for them.
    assert driver.facts.count("ActionFailed") in ((1,) if execution == "jobs" else (0, 1))
    assert processes_told_in(tmp_path / "after").isdisjoint(workers)
    assert processes_told_in(tmp_path / "after")
    flow.assert_exact()
    drivers.give_back(driver)


@pytest.mark.parametrize("dead", [0, 1, 20])
def test_jobs_run_until_the_pool_has_no_dead_worker(dead: int) -> None:
    """As Spark says it where the dead are reaped, and where they stay as zombies."""
    ran = []

    def run_nothing() -> None:
        ran.append(1)
        if len(ran) <= dead:
            raise RuntimeError(REAPED if len(ran) % 2 else ZOMBIE)

    run_until_alive(run_nothing)

    assert len(ran) == dead + 1


def test_only_workers_that_died_are_waited_out() -> None:
    ran = []

    def run_nothing() -> None:
        ran.append(1)
        raise RuntimeError("Job 3 cancelled as part of cancellation of all jobs")

    run_until_alive(run_nothing)

    assert len(ran) == 1


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
