"""Processes that Spark starts with Python, as forks of one that has loaded what they import.

A worker is a fork of its daemon, and each would take 2 s of a core to import packages and kernels
for itself. So would each daemon, one for every JVM of a test, and each process that creates a data
source, plans its read, or serves a query: here they are forks of one template of the test process.
What Spark has started is a stand-in for its fork, as it is for `tallystick.spark.early_daemon`.
Without a template it is what Spark wants, and a daemon of tasks loads for itself.

    test process ── starts ──► template: imports packages, loads kernels, and listens
    JVM ── starts ──► stand-in ── its files, environment, arguments ──► fork of the template
"""

import importlib
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest import mock

from tallystick.host import kernel_cache
from tallystick.host.forks import make_ready_for_forks
from tallystick.spark import PYSPARK_VERSION, early_daemon, streaming
from tallystick.testing.process import ProcessGroup

MODULE = "tests.spark.loaded_daemon"
REPOSITORY = str(Path(__file__).parents[2])
SETTINGS = {
    "spark.python.daemon.module": MODULE,
    "spark.executorEnv.PYTHONPATH": REPOSITORY,
}
"""Of a Spark whose workers are such forks."""
SPARKS_OWN = {"spark.python.daemon.module": "pyspark.daemon"}
DAEMON, TASKS = "pyspark.daemon", "pyspark.worker"
PROGRAMS = (
    "pyspark.sql.streaming.python_streaming_source_runner",
    "pyspark.sql.streaming.transform_with_state_driver_worker",
)
"""The programs that Spark starts for each streaming query, without a daemon."""
OF_SOURCES = (
    *PROGRAMS,
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.plan_data_source_read",
    "tallystick.spark.streaming.source",
)
"""The modules that Spark's processes of streams and of a data source of ours import."""
PYTHON = "PYSPARK_PYTHON"
"""The environment variable that says which Python Spark starts."""
STAND_IN = """#!{python} -IS
# Isolated and without packages, since all that it does is to hand its place on.
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("early_daemon", {early_daemon!r})
early_daemon = importlib.util.module_from_spec(spec)
spec.loader.exec_module(early_daemon)
sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(":")), *{path!r}]
is_sparks = sys.argv[1:2] == ["-m"] and sys.argv[2].startswith(("pyspark.", {module!r}))
if not is_sparks or not early_daemon.stand_in({address!r}):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
"""
TEMPLATE = "TEST_DAEMONS_TEMPLATE"
"""The environment variable that says where the template listens; what a test starts inherits it."""


_kept: list[object] = []
"""The template and the folder of its socket, which end with this process."""


@cache
def start_template() -> str:
    """Start the template of this process; daemons of tasks are its forks from now on.

    Returns:
        the address where it listens.
    """
    folder = tempfile.TemporaryDirectory(prefix="test-daemons-")
    address = os.path.join(folder.name, "socket")
    group = ProcessGroup()
    group.start(
        [sys.executable, "-m", MODULE, TEMPLATE, address],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},  # as Spark's daemons
    )
    os.environ[TEMPLATE] = address
    _kept.extend((group, folder))
    return address


def serve_forks(address: str) -> None:
    """Load once, and give each stand-in that connects a fork; ends with the group of processes."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(16)
    load()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps; a daemon handles its own
    while True:
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if early_daemon.take_place(connection):
                become_what_was_asked_for(connection)
            os._exit(0)
        connection.close()


def load() -> None:
    """Load what the workers of all pipelines import."""
    has_sources = PYSPARK_VERSION >= streaming.PYSPARK_VERSION_MIN
    for package in (*early_daemon.PACKAGES, *(OF_SOURCES if has_sources else ())):
        importlib.import_module(package)
    if kernel_cache.are_compiled():
        kernel_cache.load(kernel_cache.WARM_UP_MODULES)


@cache
def stand_in() -> str:
    """Return the Python for a Spark on this machine whose every process is to be a fork."""
    address = start_template()
    program = Path(address).with_name("python")
    program.write_text(
        STAND_IN.format(
            python=sys.executable,
            early_daemon=early_daemon.__file__,
            path=[entry for entry in sys.path if entry],
            module=MODULE,
            address=address,
        )
    )
    program.chmod(0o700)
    return str(program)


@contextmanager
def stand_ins() -> Iterator[None]:
    """Have the JVM that starts in here start stand-ins as its Python."""
    with mock.patch.dict(os.environ, {PYTHON: stand_in()}):
        yield


def become_what_was_asked_for(connection: socket.socket) -> None:
    """Be a driver, a daemon or another program of Spark's, to its end."""
    forked_driver = importlib.import_module("tests.spark.forked_driver")
    if forked_driver.GROUP in os.environ:
        forked_driver.keep(connection)
        return
    os.environ.pop(TEMPLATE, None)
    module = MODULE
    if sys.argv[1] == "-m":
        module = sys.argv.pop(2)
        del sys.argv[1]
    if module in (MODULE, DAEMON):
        serve()
    else:
        threading.Thread(target=end_with, args=[connection], daemon=True).start()
        sys.modules.pop(module, None)  # else runpy warns of it
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def end_with(connection: socket.socket) -> None:
    """End this process as soon as its stand-in does, which Spark kills."""
    poll = select.poll()
    poll.register(connection, 0)  # for POLLHUP
    poll.poll()
    os._exit(0)


def serve() -> None:
    """Serve the JVM as its daemon, to the end."""
    make_ready_for_forks()
    importlib.import_module("pyspark.daemon").manager()


def main() -> None:
    """Be the template, a stand-in for a fork of one, or a daemon."""
    if sys.argv[1] == TEMPLATE:
        serve_forks(sys.argv[2])
    address = os.environ.pop(TEMPLATE, None) if sys.argv[1] == TASKS else None
    if address is not None and early_daemon.stand_in(address):
        return
    if sys.argv[1] == TASKS:
        load()
    serve()


if __name__ == "__main__":
    main()
