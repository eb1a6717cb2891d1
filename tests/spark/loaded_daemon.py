"""Spark's daemons of Python workers, which have loaded what a pipeline's workers import.

A worker is a fork of its daemon, and each would take 2 s of a core to import packages and kernels
for itself. So would each daemon, one for every JVM of a test: a daemon here is a fork of one
template of the test process, and what Spark has started is a stand-in for it, as it is for
`tallystick.spark.early_daemon`. Without a template a daemon loads for itself.
The daemons of other workers, as those that create a data source, are Spark's own.

A stand-in is a process of each JVM, and imports next to nothing: PySpark alone takes 0.3 s.

    test process ── starts ──► template: imports packages, loads kernels, and listens
    JVM ── starts ──► stand-in ── its files, environment, arguments ──► fork of the template
"""

import importlib
import importlib.util
import os
import signal
import socket
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

MODULE = "tests.spark.loaded_daemon"
REPOSITORY = str(Path(__file__).parents[2])
SETTINGS = {
    "spark.python.daemon.module": MODULE,
    "spark.executorEnv.PYTHONPATH": REPOSITORY,
}
"""Of a Spark whose workers are such forks."""
SPARKS_OWN = {"spark.python.daemon.module": "pyspark.daemon"}
TASKS = "pyspark.worker"
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
    from tallystick.testing.process import ProcessGroup

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
            if early_daemon().take_place(connection):
                become_what_was_asked_for(connection)
            os._exit(0)
        connection.close()


@cache
def early_daemon() -> Any:
    """Load that module of ours by itself: its package would import PySpark."""
    package = importlib.util.find_spec("tallystick")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "spark" / "early_daemon.py"
    spec = importlib.util.spec_from_file_location("early_daemon_alone", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load() -> None:
    """Load what the workers of all pipelines import."""
    from tallystick.host.kernel_cache import WARM_UP_MODULES, are_compiled

    for package in early_daemon().PACKAGES:
        importlib.import_module(package)
    if are_compiled():
        for module in WARM_UP_MODULES:
            importlib.import_module(module).warm_up()


def become_what_was_asked_for(connection: socket.socket) -> None:
    """Be a daemon or a driver, to its end."""
    forked_driver = importlib.import_module("tests.spark.forked_driver")
    if forked_driver.GROUP in os.environ:
        forked_driver.keep(connection)
    else:
        serve()


def serve() -> None:
    """Serve the JVM as its daemon, to the end."""
    from tallystick.host.forks import make_ready_for_forks

    make_ready_for_forks()
    importlib.import_module("pyspark.daemon").manager()


def main() -> None:
    """Be the template, a stand-in for a fork of one, or a daemon."""
    if sys.argv[1] == TEMPLATE:
        serve_forks(sys.argv[2])
    address = os.environ.pop(TEMPLATE, None) if sys.argv[1] == TASKS else None
    if address is not None and early_daemon().stand_in(address):
        return
    if sys.argv[1] == TASKS:
        load()
    serve()


if __name__ == "__main__":
    main()
