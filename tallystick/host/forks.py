"""The duties of a fork: it ends with its parent, and draws random numbers of its own.

Spark's daemon forks the workers; it ends them when the executor ends, and when Spark gives up a
task. A worker whose daemon was killed has no process to end it: it would write on for a run that
has been replaced, and Spark would give it task after task.

Invariants:
    * On Linux the kernel ends such a worker together with its daemon, at any place.
    * Elsewhere, and where it lost its daemon before its first task of ours, it is refused its next
      step; the error ends it, since Spark takes no worker back that raised one.

A fork has its parent's generators, and would draw the same numbers. Python's and numba's are seeded
again in each fork, as is whatever asks the system. numpy's is not. Arrow's `random` function cannot
be: docs/performance.md says so.
"""

import ctypes
import gc
import os
import signal
import sys

from tallystick.errors import WorkerOrphanedError

DAEMON = "pyspark.daemon"
PR_SET_PDEATHSIG = 1

_parents: dict[int, int] = {}
"""Process id -> id of its parent at the first check; a fork has an entry of its own."""


def check_parent() -> None:
    """Bind a Spark worker to its parent process; cheap enough to call before each step.

    Does nothing in a process that Spark does not use as a worker.

    Raises:
        WorkerOrphanedError: the parent process is gone.
    """
    if os.environ.get("SPARK_PYTHON_RUNTIME") != "PYTHON_WORKER":
        return
    pid = os.getpid()
    if pid not in _parents:
        _parents[pid] = _bind_to_parent()
    if os.getppid() != _parents[pid]:
        raise WorkerOrphanedError(
            f"the process that started Python worker {pid} is gone, and so may be the executor: "
            f"the task stops here, and the epoch runs again in other workers"
        )


def bind_to_forker(parent: int) -> None:
    """Bind a process to the worker that has just forked it, with the id `parent`."""
    _end_with_parent()
    _parents[os.getpid()] = parent


def _bind_to_parent() -> int:
    """Return the id that the parent must have; if Spark's daemon is the parent, end with it."""
    main = getattr(sys.modules["__main__"], "__spec__", None)
    if DAEMON not in sys.modules and (main is None or main.name != DAEMON):
        return os.getppid()  # Spark runs without a daemon (spark.python.use.daemon=false)
    _end_with_parent()
    return os.getpgrp()  # the daemon leads the group of its workers, and may be gone already


def _end_with_parent() -> None:
    if sys.platform == "linux":
        # The signal comes with the end of the thread that forked us: a daemon has one only.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def draw_anew() -> None:
    """Seed numpy's global generator, in a process that was just forked; cheap where it is absent.

    Source: numpy.random.seed, which takes the system's entropy where no seed is given.
    """
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def make_ready_for_forks() -> None:
    """Reseed numpy in each direct fork, and exempt what this process has loaded from collection.

    Forks of forks are not seeded. Spark's daemon has a worker collect garbage after every task; to
    visit the objects of all loaded modules takes 90 ms of a core, and copies their pages. Frozen
    objects are not visited (`gc.freeze`).
    """
    parent = os.getpid()
    os.register_at_fork(
        after_in_child=lambda: draw_anew() if os.getppid() == parent else None,
    )
    gc.freeze()
