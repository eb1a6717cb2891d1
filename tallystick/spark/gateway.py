"""The JVM of a local Spark, launched with an end to the wait for it.

PySpark waits without end for the file in which the JVM says where it listens. A JVM that cannot
write that file, as on a full disk, loses its main thread only, and lives on.
"""

import os
import signal
import subprocess
import tempfile
from concurrent.futures import Future
from threading import Thread
from typing import Any

from pyspark import SparkConf
from pyspark.java_gateway import launch_gateway

from tallystick.errors import TallystickError
from tallystick.host.processes import Process, all_processes

JVM_S = 120.0
"""The longest time until the JVM listens: on two busy cores it takes 2 to 10 s."""
COMMAND = "org.apache.spark.deploy.SparkSubmit"


def launched(conf: SparkConf, patience_s: float = JVM_S) -> Any:
    """Launch a JVM as PySpark does, and return py4j's gateway to it.

    Args:
        conf: for the JVM.
        patience_s: how long it may take.

    Raises:
        TallystickError: it takes longer; the JVM was ended.
        PySparkRuntimeError: the JVM has ended by itself.
    """
    gateway: Future[Any] = Future()

    def launch() -> None:
        try:
            gateway.set_result(launch_gateway(conf))  # type: ignore[no-untyped-call]
        except BaseException as error:
            gateway.set_exception(error)

    before = _own_jvms()
    Thread(target=launch, name="tallystick JVM", daemon=True).start()
    try:
        return gateway.result(patience_s)
    except TimeoutError:
        for pid, jvm in _own_jvms().items():
            if pid not in before:
                jvm.send(signal.SIGKILL)
        raise TallystickError(
            f"Spark's JVM has not said within {patience_s:.0f} s where it listens, which it writes "
            f"into a file in {tempfile.gettempdir()}. As a rule the disk is full: make room, then "
            f"start again. What the JVM has printed may say more. It was ended, and nothing was "
            f"changed."
        ) from None


def _own_jvms() -> dict[int, Process]:
    """Return the JVM processes of Spark that this process has launched, by process id."""
    try:
        processes = all_processes()
    except (OSError, subprocess.CalledProcessError):  # without `ps` it cannot be ended
        return {}
    return {
        process.pid: process
        for process in processes
        if process.parent == os.getpid() and COMMAND in process.command
    }
