"""Nothing that a test run has started outlives it, whatever ends it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
DEADLINE_S = 30.0

RUN = """
import sys, time
from pathlib import Path
from tests.postgres.real_postgres import PostgresServer
from tests.spark.driver_process import DriverProcess
from tests.spark.standalone_cluster import Cluster
from tests.storage.test_storage_s3 import Server

folder = Path(sys.argv[1])
cluster = Cluster(folder / "cluster", 1)
driver = DriverProcess(folder / "driver.log", cluster.settings)
server, s3 = PostgresServer(), Server(folder)
connection = server.connect()
driver.wait_for_fact("Ready")
driver.pause()
print("ready", flush=True)
time.sleep(600)
"""
STARTED = {
    "a Spark cluster and its driver": [
        *("deploy.master.Master", "deploy.worker.Worker", "CoarseGrainedExecutor", "crash_job"),
    ],
    "a PostgreSQL server": ["-D", "postgres postgres"],
    "an S3 server": ["moto.server"],
}
"""The programs that one test run starts, and words of their commands."""


def parents() -> dict[int, int]:
    """The parent of each process that lives."""
    parent_by_pid = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rsplit(")", 1)[1].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parent_by_pid[int(path.parent.name)] = int(parent)
    return parent_by_pid


def below(ancestor: int) -> set[int]:
    """All processes that it has started, and those that they have."""
    known, family = parents(), {ancestor}
    while more := {pid for pid, parent in known.items() if parent in family} - family:
        family |= more
    return family - {ancestor}


def commands(pids: set[int]) -> str:
    """What they run."""
    ask = ["ps", "-ww", "-o", "args=", "-p", ",".join(map(str, pids))]
    return subprocess.run(ask, capture_output=True, text=True, check=False).stdout


@pytest.mark.spark
@pytest.mark.chaos
def test_nothing_outlives_a_killed_test_run(tmp_path: Path) -> None:
    """Killed with SIGKILL, it can tidy up nothing; a stopped driver hears of nothing."""
    expected = [name for names in STARTED.values() for name in names]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    started: set[int] = set()
    try:
        assert run.stdout is not None
        assert "ready\n" in run.stdout
        # Spark's session is there before the worker has started its executor.
        wait_until(
            lambda: all(name in commands(below(run.pid)) for name in expected),
            lambda: f"expected {expected}, found {commands(below(run.pid))}",
        )
        started = below(run.pid)
    finally:
        run.kill()
        run.communicate()

    try:
        deadline = time.monotonic() + DEADLINE_S
        while remaining := started & parents().keys():
            assert time.monotonic() < deadline, commands(remaining)
            time.sleep(0.1)
    finally:
        for pid in started & parents().keys():
            os.kill(pid, signal.SIGKILL)
