"""A driver as a fork of a process that has loaded Tallystick, with Spark in a JVM that is there.

To start a Python and a JVM for each driver that a test kills takes seconds of a core, and no fact
of ours depends on either. Killed is the driver, as ever. Then its JVM, which would have stopped the
context and ended, stops the context, the workers with it, and serves the next driver.

    test process ── its pipes, arguments ──► template ── forks ──► keeper ── forks ──► the driver
                 ◄── the driver's process id, then how it has ended ──┘                  │ py4j
                 ── starts it, and clears it behind each driver ──► JVM ◄────────────────┘
"""

import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pyspark import SparkConf
from pyspark.java_gateway import launch_gateway

from tallystick.host.forks import draw_anew
from tallystick.spark import early_daemon
from tallystick.spark.context import JAVA_OPTIONS
from tests.spark import jvm, loaded_daemon
from tests.waiting import wait_until

GROUP = "TEST_DRIVER_GROUP"
"""The environment variable that makes a fork of the template a driver, in that process group."""
CLEAR_S = 30.0
"""A JVM that has not stopped a context for so long is killed."""


class KeptJvm:
    """A JVM with Spark, for one driver after another; it ends with this process.

    Args:
        log: where goes what it and its workers print.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self.is_taken = False
        conf = SparkConf(loadDefaults=False).set(JAVA_OPTIONS, jvm.options())
        with log.open("a") as output:
            options = {"stdout": output, "stderr": output, "process_group": 0}
            with loaded_daemon.stand_ins():
                self._gateway: Any = launch_gateway(conf, options)  # type: ignore[no-untyped-call]

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables by which PySpark finds the JVM, and the JVM a Python."""
        parameters = self._gateway.gateway_parameters
        return {
            "PYSPARK_GATEWAY_PORT": str(parameters.port),
            "PYSPARK_GATEWAY_SECRET": parameters.auth_token,
            loaded_daemon.PYTHON: loaded_daemon.stand_in(),
        }

    @property
    def is_alive(self) -> bool:
        """False once it was killed."""
        return self._gateway.proc.poll() is None

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the JVM, and nothing that it has started."""
        self._gateway.proc.send_signal(number)

    def clear(self) -> None:
        """Stop the context of a driver that has ended, workers included, or kill the JVM."""
        self.send_signal(signal.SIGCONT)
        limit = threading.Timer(CLEAR_S, self.send_signal, [signal.SIGKILL])
        limit.start()
        try:
            contexts = getattr(self._gateway.jvm.org.apache.spark, "SparkContext$")
            active = getattr(contexts, "MODULE$").getActive()
            if active.isDefined():
                active.get().stop()
        except Exception:  # py4j has its own, of a JVM that dies
            self.send_signal(signal.SIGKILL)
        finally:
            limit.cancel()
            self.is_taken = False


_jvms: list[KeptJvm] = []


def take_jvm(folder: Path) -> KeptJvm:
    """Take a JVM that no driver has; a new one has its log in a folder."""
    free = [kept for kept in _jvms if kept.is_alive and not kept.is_taken]
    if not free:
        free = [KeptJvm(folder / f"jvm-{len(_jvms)}.log")]
        _jvms.extend(free)
    free[0].is_taken = True
    return free[0]


@contextmanager
def environment_of_a_jvm(folder: Path) -> Iterator[dict[str, str]]:
    """Lend a JVM to one program; yield the environment in which the program finds it."""
    kept_jvm = take_jvm(folder)
    try:
        yield {**os.environ, **kept_jvm.variables}
    finally:
        kept_jvm.clear()


class ForkedProcess:
    """A driver's process, as `subprocess.Popen` would be.

    Args:
        arguments: of the program, its path first.
        group: the process group that it joins.
        variables: in addition to the environment of this process.
        stderr: of the program.
    """

    def __init__(
        self,
        arguments: list[str],
        group: int,
        variables: dict[str, str],
        stderr: IO[str],
    ) -> None:
        stdin, write_end = os.pipe()
        read_end, stdout = os.pipe()
        self.stdin, self.stdout = os.fdopen(write_end, "w"), os.fdopen(read_end)
        self._keeper = socket.socket(socket.AF_UNIX)
        template = loaded_daemon.start_template()
        wait_until(lambda: self._keeper.connect_ex(template) == 0, "the template does not listen")
        place = {
            "version": sys.version,
            "environment": {**os.environ, **variables, GROUP: str(group)},
            "folder": os.getcwd(),
            "path": [str(Path(arguments[0]).parent), *sys.path],
            "arguments": arguments,
        }
        socket.send_fds(self._keeper, [b"."], [stdin, stdout, stderr.fileno()])
        os.close(stdin)
        os.close(stdout)
        self._keeper.sendall(json.dumps(place).encode())
        self._keeper.shutdown(socket.SHUT_WR)
        assert self._keeper.recv(1) == early_daemon.TAKEN
        self._lines = self._keeper.makefile()
        self.pid = int(self._lines.readline())
        self._status: int | None = None

    def wait(self) -> int:
        """Wait for the end; the exit code, or the signal's number below 0."""
        if self._status is None:
            self._status = int(self._lines.readline())
            self._lines.close()
            self._keeper.close()
        return self._status


def keep(connection: socket.socket) -> None:
    """Fork the program that `sys.argv` names, say its process id, and how it has ended."""
    group = int(os.environ.pop(GROUP))
    pid = os.fork()
    if not pid:
        connection.close()
        os.setpgid(0, group)
        draw_anew()
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a job serves runs until it is killed
    for number in range(3):
        os.close(number)
    connection.sendall(f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
