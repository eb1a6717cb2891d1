"""Spark's worker daemon is killed and the executor lives on: epochs run again, in new workers."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tallystick.checkpoint import protocol as c
from tallystick.spark.sinks import SinkCluster
from tallystick.task import Report, WritePlan
from tests.spark.flow import Flow

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.chaos]

EPOCH_RECORDS = 60
KILLS = {"epoch": ("100", "writing", "idle"), "task": ("100", "400", "idle")}
"""When a daemon dies: at the record of that number, when a task has written, before an epoch."""
IDLE_AT = 4
"""The epoch before which a daemon dies, while no worker has anything to do."""


class Daemons:
    """Who ran the tasks, and which daemons were killed; told in files, since tasks tell it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def dying(self, kills: tuple[str, ...]) -> Any:
        """A function that lets the daemon of its worker die, once at each of some records.

        It goes on when it is an orphan: nothing but the end of its process may stop it.
        """
        folder = str(self.folder)

        def pass_on(rows: pa.RecordBatch) -> pa.RecordBatch:
            daemon = os.getppid()
            with open(f"{folder}/workers", "a") as file:
                file.write(f"{os.getpid()} {daemon}\n")
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
                    Path(marker).write_text(str(daemon))
                    os.kill(daemon, signal.SIGKILL)
                    while os.getppid() == daemon:
                        time.sleep(0.01)
                return report

        return Dying(**vars(plan))

    def before_epoch(self, event: c.Event) -> None:
        """A listener that kills the newest daemon before an epoch."""
        if isinstance(event, c.EpochRequested) and event.request.checkpoint_id == IDLE_AT:
            _, newest = self.workers()[-1]
            assert newest > 1, "the newest worker is an orphan"
            (self.folder / "dead-idle").write_text(str(newest))
            os.kill(newest, signal.SIGKILL)

    def workers(self) -> list[tuple[int, int]]:
        """The workers and their parents, in the order of their calls."""
        lines = (self.folder / "workers").read_text().splitlines()
        return [(int(pid), int(parent)) for pid, parent in map(str.split, lines)]

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
    """Among its rows, while it writes, and between two epochs; with one attempt for each task."""
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
        daemons.before_epoch(event)
        if isinstance(event, c.ActionFailed):
            aborted.append(str(event.error))

    flow.run(pipeline, listener=listen)

    flow.assert_exact()
    dead = daemons.dead()
    assert dead.keys() == set(kills)
    assert len(set(dead.values())) == len(dead), "each was the daemon of new workers"
    assert not [each for each in dead.values() if _lives(each)]
    # Everyone was of a daemon's, never of who adopts orphans; the last ones' lives.
    parents = [parent for _, parent in daemons.workers()]
    assert parents[-1] not in dead.values()
    assert _lives(parents[-1])
    assert 1 not in parents
    for killed in dead.values():
        of_it = {pid for pid, parent in daemons.workers() if parent == killed}
        assert not [pid for pid in of_it if _lives(pid)]
    assert len(aborted) >= len(dead), aborted
    assert all("Python worker" in each for each in aborted), aborted


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
