"""A standalone Spark cluster on this machine: its workers are hosts to each other.

Each has a loopback address of its own, since Spark puts no second attempt of a task on the same
host; a work folder and a folder for copies of state of its own, which its executors inherit.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

import pyspark

from tallystick.host.java import spark_java_home
from tallystick.testing.process import ProcessGroup, free_ports
from tests.spark import jvm, loaded_daemon

SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
HOST = "127.0.0.1"
WAIT_S = 120.0
SMALL_JVM = {
    "SPARK_DAEMON_MEMORY": "128m",
    "SPARK_NO_DAEMONIZE": "1",
    "SPARK_LOCAL_IP": HOST,
}


class Host:
    """A worker process with a core, the executors that it starts, and its disk."""

    def __init__(self, folder: Path, master: str, address: str) -> None:
        self.copies = folder / "copies"
        self.copies.mkdir(parents=True)
        work = ["--work-dir", str(folder / "work"), "--cores", "1", "--memory", "1g"]
        port = str(*free_ports(1, address))
        self._group = ProcessGroup()  # executors are in it too
        self._process = _start(
            self._group,
            ["worker.Worker", "--host", address, "--webui-port", port, *work, master],
            folder,
            SPARK_LOCAL_IP=address,
            TALLYSTICK_STATE_DIR=str(self.copies),
        )

    def kill(self) -> None:
        """It is gone with all its processes, and its disk with it."""
        self._group.close()
        self._process.wait()
        shutil.rmtree(self.copies, ignore_errors=True)

    def lose_copies(self) -> None:
        """Its executors meet an empty folder."""
        shutil.rmtree(self.copies, ignore_errors=True)

    @property
    def ranges(self) -> set[str]:
        """The key-group ranges of which it has a copy."""
        return {path.parent.name for path in self.copies.rglob("data.mdb")}


class Cluster:
    """A master and its hosts.

    Args:
        folder: for all of it.
        host_count: how many hosts.
    """

    def __init__(self, folder: Path, host_count: int) -> None:
        port, web = free_ports(2, HOST)
        self.master = f"spark://{HOST}:{port}"
        place = ["--host", HOST, "--port", str(port), "--webui-port", str(web)]
        self._folder = folder
        self._group = ProcessGroup()
        self._process = _start(self._group, ["master.Master", *place], folder / "master")
        _wait_for(port, self._process)
        self.hosts = [
            Host(folder / f"host-{n}", self.master, f"127.0.0.{1 + n}") for n in range(host_count)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.kill()
        self._group.close()
        self._process.wait()

    @property
    def settings(self) -> dict[str, str]:
        """For a driver."""
        return {
            "spark.master": self.master,
            "spark.driver.host": HOST,
            "spark.executor.cores": "1",
            "spark.executor.memory": "600m",
            "spark.executor.extraJavaOptions": jvm.options(),
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.locality.wait": "0s",
            **loaded_daemon.SETTINGS,
        }


def _start(
    group: ProcessGroup, arguments: list[str], folder: Path, **environment: str
) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    name, *rest = arguments
    java = {"SPARK_DAEMON_JAVA_OPTS": jvm.options(), "JAVA_HOME": str(spark_java_home())}
    settings = {**os.environ, **SMALL_JVM, **java, **environment}
    settings.pop(loaded_daemon.TEMPLATE, None)  # a host's daemons go with it, and are no forks
    return group.spawn(
        [SPARK_CLASS, f"org.apache.spark.deploy.{name}", *rest], folder / "log", env=settings
    )


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1):
            return
        assert process.poll() is None, "the master has ended"
        time.sleep(0.1)
    raise AssertionError("the master does not listen")
