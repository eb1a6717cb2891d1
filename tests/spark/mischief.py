"""What happens to the members of a gang, at a place and to one of them, once it is asked for.

Asked for by files, since members are other processes; so are the answers.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext

from tallystick.pipeline.sinks import SinkCluster
from tallystick.spark.gang.gang import Gang
from tallystick.tasks.read import Report, WritePlan
from tests.waiting import wait_until

WAIT_S = 90.0
WORKER, FORKED = "worker", "forked"
"""Who: the member that is Spark's worker, or one that it forked."""
READ, KEYED, WRITTEN = "read", "keyed", "written"
"""Where: in a reader's function, in one after a keyed step, after writing and before the report"""


class Mischief:
    """What a test asks for, and what came of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def ask(self, place: str, who: str, what: str) -> None:
        """Let it happen, once: kill, stop, exit, or any error's class that a function may raise."""
        (self.folder / f"{place}.{who}.{what}").touch()

    def wait(self, place: str, who: str, what: str) -> int:
        """Wait until it has hit; the process that it hit."""
        path = self.folder / f"hit.{place}.{who}.{what}"
        deadline = time.monotonic() + WAIT_S
        while not path.exists():
            assert time.monotonic() < deadline, f"{path.name} did not happen"
            time.sleep(0.02)
        pid = int(path.read_text())
        path.unlink()
        return pid

    def at(self, place: str) -> Callable[[], None]:
        """What to call there; made here, so that workers need no tests."""
        folder = str(self.folder)

        def act() -> None:
            # Of two members the first runs tasks 0, 2, …; both are forks of Spark's worker.
            who = "forked" if TaskContext.get().partitionId() % 2 else "worker"
            for name in os.listdir(folder):
                if not name.startswith(f"{place}.{who}."):
                    continue
                with open(f"{folder}/{name}", "w") as file:
                    file.write(str(os.getpid()))
                os.rename(f"{folder}/{name}", f"{folder}/hit.{name}")
                what = name.rsplit(".", 1)[1]
                if what in ("kill", "stop"):
                    os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
                elif what == "exit":
                    raise SystemExit(3)
                else:
                    raise MemoryError("no room") if what == "memory" else ValueError("a mistake")

        return act

    def function(self, place: str, columns: tuple[str, ...] | None = None) -> Any:
        """A function of a pipeline that passes rows on: as they are, or some columns as text."""
        act = self.at(place)

        def pass_on(rows: pa.RecordBatch) -> pa.RecordBatch:
            act()
            if columns is None:
                return rows
            return pa.record_batch({name: rows[name].cast(pa.string()) for name in columns})

        return pass_on

    @property
    def write_plan(self) -> Callable[[SinkCluster, Any], WritePlan]:
        """For the place of `SinkCluster.write_plan`."""
        act, written = self.at(WRITTEN), f"{self.folder}/files"

        class Mischievous(WritePlan):
            def write(self, frames: Any, attempt_number: int) -> Report:
                report = WritePlan.write(self, frames, attempt_number)
                with open(written, "a") as file:
                    for size in sizes_of_files_without_a_name():
                        file.write(f"{os.getpid()} {size}\n")
                if report.produced:
                    act()
                return report

        return lambda cluster, producer: Mischievous(**vars(WRITE_PLAN(cluster, producer)))

    def files(self) -> list[tuple[int, int]]:
        """The members whose frames waited in files, and how large these were."""
        lines = (self.folder / "files").read_text().splitlines()
        return [(int(pid), int(size)) for pid, size in map(str.split, lines)]


def sizes_of_files_without_a_name() -> list[int]:
    """Of those that this process has where Spark keeps its shuffle files."""
    sizes, folder = [], os.environ["SPARK_LOCAL_DIRS"].split(",")[0]
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            stat = os.stat(f"/proc/self/fd/{name}")
            if stat.st_nlink == 0 and os.readlink(f"/proc/self/fd/{name}").startswith(folder):
                sizes.append(stat.st_size)
    return sizes


WRITE_PLAN = SinkCluster.write_plan


class Gangs:
    """Every gang that came up."""

    def __init__(self, monkeypatch: Any) -> None:
        self.all: list[Gang] = []
        self._patch, begin = monkeypatch, Gang.__init__

        def begun(gang: Gang, *given: Any, **further: Any) -> None:
            begin(gang, *given, **further)
            self.all.append(gang)

        monkeypatch.setattr(Gang, "__init__", begun)

    @property
    def newest(self) -> Gang:
        """The one that runs."""
        return self.all[-1]

    def pid(self, who: str) -> int:
        """A member of the newest."""
        pids = [pid for _, pid in sorted(self.newest.pids.items())]
        return pids[0] if who == WORKER else pids[1]


def processes_told_in(folder: Path) -> set[int]:
    """Return the processes in which a job's function has run, as it tells by `tells_pids`."""
    return {int(path.name) for path in folder.glob("*")}


def is_gone(pid: int) -> bool:
    """Whether a process has ended, also where nobody has asked for its status."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    return True


def wait_until_gone(pids: Any) -> None:
    """Wait for the end of processes."""
    wait_until(
        lambda: all(map(is_gone, pids)),
        lambda: f"processes live on: {[pid for pid in pids if not is_gone(pid)]}",
        timeout_s=WAIT_S,
    )
