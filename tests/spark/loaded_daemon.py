"""Spark's daemons of Python workers, which have loaded what a pipeline's workers import.

A worker is a fork of its daemon, and each would take 2 s of a core to import packages and kernels
for itself. So would each daemon, one for every JVM of a test: a daemon here is a fork of one
template of the test process, and what Spark has started is a stand-in for it, as it is for
`tallystick.spark.early_daemon`. Without a template a daemon loads for itself.
What Spark starts for data sources and streams is its own, whatever is configured; in the JVM of the
shared session it is a stand-in too, by `stand_ins/sitecustomize.py`.

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

from tallystick.host.forks import make_ready_for_forks
from tallystick.host.kernel_cache import WARM_UP_MODULES, are_compiled
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
TASKS = "pyspark.worker"
PROGRAMS = (
    "pyspark.sql.streaming.python_streaming_source_runner",
    "pyspark.sql.streaming.transform_with_state_driver_worker",
)
"""Those that Spark starts for each streaming query without a daemon."""
OF_SOURCES = (
    *PROGRAMS,
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.plan_data_source_read",
    "tallystick.spark.streaming.source",
)
"""The modules that Spark's processes of streams and of a data source of ours import."""
STAND_INS = str(Path(__file__).with_name("stand_ins"))
TEMPLATE = "TEST_DAEMONS_TEMPLATE"
"""The environment variable that says where the template listens; what a test starts inherits it."""


_kept: list[object] = []
"""What ends with this process."""


@cache
def start_template() -> str:
    """Start the template of this process; what starts from now on has workers of its forks.

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


@contextmanager
def stand_ins_of_sources() -> Iterator[None]:
    """Have the JVM that starts in here start forks of the template for sources, too."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (STAND_INS, before)))
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


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
    for package in (*early_daemon.PACKAGES, *(OF_SOURCES if has_sources() else ())):
        importlib.import_module(package)
    if are_compiled():
        for module in WARM_UP_MODULES:
            importlib.import_module(module).warm_up()


def has_sources() -> bool:
    """Tell whether this PySpark has data sources that ours can be one of."""
    return PYSPARK_VERSION >= streaming.PYSPARK_VERSION_MIN


def become_what_was_asked_for(connection: socket.socket) -> None:
    """Be a daemon or a driver, to its end."""
    forked_driver = importlib.import_module("tests.spark.forked_driver")
    if forked_driver.GROUP in os.environ:
        forked_driver.keep(connection)
    elif sys.argv[0] in PROGRAMS:
        threading.Thread(target=end_with, args=[connection], daemon=True).start()
        runpy.run_module(sys.argv[0], run_name="__main__")
    else:
        serve()


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
