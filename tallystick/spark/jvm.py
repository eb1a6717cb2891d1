"""The output of Spark's JVM: its end in a line, and no errors of tasks, raised here anyway."""

import contextlib
import logging
import subprocess
from collections.abc import Iterator, Mapping
from threading import Lock, Timer
from typing import Any
from weakref import WeakKeyDictionary

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import PySparkException

from tallystick.errors import FunctionError, TallystickError
from tallystick.host.excepthook import shows_full_tracebacks
from tallystick.host.user_code import (
    function_error,
    taken_call,
    user_lines,
)
from tallystick.spark.failures import spark_error

TASK_LOGGERS = (
    "org.apache.spark.executor.Executor",
    "org.apache.spark.scheduler.TaskSetManager",
    "org.apache.spark.api.python.PythonRunner",
    "org.apache.spark.sql.execution.python",  # workers that are killed with a failed job
)
END_S = 1.0
"""The time in which the process of a JVM ends after its connections."""
STRAGGLERS_S = 5.0
"""The time in which the other tasks of a failed job end."""
PY4J_LOGGERS = ("py4j", "py4j.clientserver", "py4j.java_gateway", "")
"""The last one is the root: py4j uses it for an answer that does not come."""


def jvm_end(wait_s: float = 0.0) -> str:
    """Return how the JVM that this process launched has ended; "": it runs, or is another's.

    Args:
        wait_s: how long an end is waited for.
    """
    process = getattr(SparkContext._gateway, "proc", None)
    if process is None:
        return ""
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(wait_s)
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"Spark's JVM (pid {process.pid}) has ended ({how})"
    return ""


def reason_of_end(error: BaseException) -> BaseException:
    """Return the error that ends a run, with the reason that users can act on."""
    if isinstance(error, FunctionError) or not isinstance(error, Exception):
        return error
    is_sparks = isinstance(error, Py4JError | PySparkException | OSError | TallystickError)
    if is_sparks and (end := jvm_end(END_S if _may_be_of_jvm(error) else 0.0)):
        return TallystickError(
            f"{end}, and with it the run. Signal 9 is the kernel's where memory is short. Nothing "
            f"is lost: start again, in a new process"
        )
    if isinstance(error, Py4JError | PySparkException):
        return spark_error(error)
    lines = user_lines(error.__traceback__)
    if lines and not isinstance(error, TallystickError):  # of a listener, for example
        return function_error(type(error).__name__, str(error), taken_call(error), lines, error)
    return error


def _may_be_of_jvm(error: Exception) -> bool:
    return not isinstance(error, TallystickError) or "resident task" in str(error)


_quiet_lock = Lock()
_quiet_users: WeakKeyDictionary[SparkContext, int] = WeakKeyDictionary()
_levels: WeakKeyDictionary[SparkContext, dict[str, Any]] = WeakKeyDictionary()
"""The levels of loggers before."""


@contextlib.contextmanager
def quiet_tasks(context: SparkContext) -> Iterator[None]:
    """Keep the JVM from printing errors of tasks: whoever runs the job raises them, and shorter."""
    with _quiet_lock:
        _quiet_users[context] = _quiet_users.get(context, 0) + 1
        if _quiet_users[context] == 1 and not shows_full_tracebacks():
            _levels[context] = _set_levels(context, dict.fromkeys(TASK_LOGGERS))
    try:
        yield
    except BaseException:
        # Tasks of a failed job that still run are killed, and each is a warning with the error.
        late = Timer(STRAGGLERS_S, _end_quiet, (context,))
        late.daemon = True
        late.start()
        raise
    _end_quiet(context)


def _end_quiet(context: SparkContext) -> None:
    with _quiet_lock:
        _quiet_users[context] -= 1
        if _quiet_users[context] == 0:
            _set_levels(context, _levels.pop(context, {}))


def _set_levels(context: SparkContext, levels: Mapping[str, Any]) -> dict[str, Any]:
    """Set the levels of loggers, None for OFF; return the levels before."""
    before = {}
    with contextlib.suppress(Exception):  # it logs with other software, or has ended
        jvm: Any = context._jvm
        log4j = jvm.org.apache.logging.log4j
        for name, level in levels.items():
            before[name] = log4j.LogManager.getLogger(name).getLevel()
            log4j.core.config.Configurator.setLevel(name, level or log4j.Level.OFF)
    return before


class _NoNoise(logging.Filter):
    """Drops what py4j says of connections to a JVM that has ended."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == "root" and "py4j" not in record.pathname:
            return True
        return not (record.levelno >= logging.WARNING or record.exc_info) or not jvm_end(END_S)


def quiet_end(context: SparkContext) -> None:
    """Keep py4j and PySpark from printing tracebacks about connections to a JVM that has ended."""
    server: Any = getattr(context, "_accumulatorServer", None)
    if server is not None and "handle_error" not in vars(server):
        handle = server.handle_error
        server.handle_error = lambda *words: None if jvm_end(END_S) else handle(*words)
    for name in PY4J_LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(known, _NoNoise) for known in logger.filters):
            logger.addFilter(_NoNoise())
