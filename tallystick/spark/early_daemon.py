"""Spark's daemon of Python workers, started by the driver beside the JVM instead of after it.

    driver ── starts ──► early daemon: imports packages, loads kernels, and waits
    JVM ── starts ──► stand-in ── its files, environment, arguments ──► early daemon: serves the JVM

Spark starts a daemon when its first Python task does. This daemon is the stand-in: it hands its
place to the early daemon, and only waits for the end. From then on the early daemon runs what
Spark's own would, with the pipes to the JVM: all that ends a daemon of Spark's, or its workers,
ends the early daemon too.

Invariants:
    * Without an early daemon, or with one that is taken, gone, or another Python, the stand-in is
      Spark's daemon itself: nothing but time is lost.
    * An early daemon that is not taken ends with the driver.
"""

import contextlib
import errno
import importlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import traceback
from types import SimpleNamespace
from typing import Any

MODULE = "tallystick.spark.early_daemon"
ADDRESS = "TALLYSTICK_EARLY_DAEMON"
"""The environment variable that says where the early daemon listens."""
PACKAGES = (
    *("pyarrow.compute", "pyspark.daemon", "pyspark.worker"),
    *(
        "tallystick.tasks.write",
        "tallystick.checkpoint.local.store",
        "tallystick.spark.gang.member",
        "tallystick.state.functions.ready_made",
    ),
)
"""The modules that a pipeline's workers import."""
POLL_S = 1.0
"""The time after which a daemon notices that the driver is gone."""
END_MAX_S = 10.0
ADDRESS_BYTES_MAX = 107
"""Linux takes no longer path of a socket; see unix(7)."""
TAKEN = b"."
_READ_ALREADY = ("NUMBA_CACHE_DIR",)
"""Variables that `host.kernel_cache` sets and numba reads at once; an older JVM lacks them."""


class EarlyDaemon:
    """An early daemon on the driver's side.

    Args:
        executable: the Python that Spark runs workers with.

    Raises:
        OSError: it cannot be started, or its socket has no room in the folder of temporary files.
    """

    def __init__(self, executable: str) -> None:
        self.address = os.path.join(tempfile.mkdtemp(prefix="tallystick-daemon-"), "socket")
        try:
            if len(os.fsencode(self.address)) > ADDRESS_BYTES_MAX:
                raise OSError(errno.ENAMETOOLONG, "too long for a socket", self.address)
            self._process = subprocess.Popen(
                [executable, "-m", MODULE, self.address, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # It has the JVM's once it serves; what it cannot import, Spark's own says.
                stderr=subprocess.DEVNULL,
                # As Spark does for its own: the interpreter and libraries read them at once.
                env={"PYTHONHASHSEED": "0", **os.environ, "OMP_NUM_THREADS": "1"},
            )
        except OSError:
            _remove(self.address)
            raise

    def end(self) -> None:
        """End the early daemon, serving a JVM or not."""
        self._process.terminate()
        try:
            self._process.wait(END_MAX_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _remove(self.address)


def _remove(address: str) -> None:
    """Remove the socket, and the folder of the socket if empty."""
    with contextlib.suppress(OSError):
        os.unlink(address)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(address))


def _wait_for_the_jvm(address: str, driver: int) -> None:
    """Import packages and load kernels, then serve the JVM whose stand-in asks."""
    os.setpgid(0, 0)  # Ctrl-C is for the driver
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(1)
    for package in PACKAGES:
        importlib.import_module(package)
    _load_kernels(listener, driver)
    listener.settimeout(POLL_S)
    connection = None
    while connection is None and os.getppid() == driver:
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
    listener.close()
    _remove(address)
    if connection is not None and take_place(connection):
        _serve()  # `connection` closes when this process ends


def _load_kernels(listener: socket.socket, driver: int) -> None:
    """Load kernels: those of every pipeline, then others until the JVM asks or the driver is gone.

    From the cache all take less time than a JVM. What must be compiled is compiled here once, and
    not by each worker; those of keyed state another process begins with, beside. Workers compile
    what their pipeline needs and does not find.
    """
    kernel_cache = importlib.import_module("tallystick.host.kernel_cache")
    kernel_cache.are_compiled()
    kernel_cache.load(kernel_cache.EVERY_PIPELINE)
    for module in (*kernel_cache.KEYED_PIPELINES, *kernel_cache.OTHERS):
        if select.select([listener], [], [], 0)[0] or os.getppid() != driver:
            return
        kernel_cache.load([module])


def take_place(connection: socket.socket) -> bool:
    """Take the place of the stand-in that asks: its files, environment, folder and arguments.

    Returns:
        False if the stand-in runs another version of Python.
    """
    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rb") as message:
        place = json.load(message)
    if place["version"] != sys.version:
        return False
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    kernels = {name: os.environ[name] for name in _READ_ALREADY if name in os.environ}
    os.environ.clear()
    os.environ.update(place["environment"], **kernels)
    os.chdir(place["folder"])
    sys.path[:], sys.argv[:] = place["path"], place["arguments"]
    connection.sendall(TAKEN)
    return True


def stand_in(address: str) -> bool:
    """Give this process's place to the early daemon, and wait for the end of the daemon.

    Returns:
        False if the early daemon did not take the place.
    """
    place = {
        "version": sys.version,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "path": sys.path,
        "arguments": sys.argv,
    }
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [TAKEN], [0, 1, 2])
        connection.sendall(json.dumps(place).encode())
        connection.shutdown(socket.SHUT_WR)
        if connection.recv(1) == TAKEN:
            os.close(0)
            os.close(1)
            with contextlib.suppress(OSError):
                connection.recv(1)
            return True
    return False


def _serve() -> None:
    importlib.import_module("tallystick.host.forks").make_ready_for_forks()
    daemon: Any = importlib.import_module("pyspark.daemon")
    daemon.traceback = SimpleNamespace(print_exc=_print_error, format_exc=traceback.format_exc)
    daemon.manager()


def _print_error() -> None:
    """Print the error that ends a worker, unless it only says that the JVM has hung up."""
    if not isinstance(sys.exc_info()[1], BrokenPipeError | ConnectionResetError):
        traceback.print_exc()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _wait_for_the_jvm(sys.argv[1], int(sys.argv[2]))
    elif ADDRESS not in os.environ or not stand_in(os.environ.pop(ADDRESS)):
        _serve()
