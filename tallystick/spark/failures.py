"""Errors of tasks on their way to the driver, and the reasons in Spark's own errors.

Spark returns an error of a job as text. In the text a failure stands as JSON, in Base64: texts may
hold values of records, so nothing that is read there is ever unpickled.
"""

import base64
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import wraps
from typing import ParamSpec, TypeVar

from tallystick import errors
from tallystick.errors import FunctionError, WorkerOrphanedError
from tallystick.host.excepthook import shows_full_tracebacks
from tallystick.host.failure import Failure, text_of
from tallystick.host.user_code import UserCall, UserLine, function_error, is_users, user_lines

_Args = ParamSpec("_Args")
_Item = TypeVar("_Item")


MARK = "tallystick-failure:"
_CARRIED = re.compile(rf"{MARK}([A-Za-z0-9+/=]+)")


def to_text(failure: Failure) -> str:
    """Return the text with which a failure passes through Spark."""
    return MARK + base64.b64encode(json.dumps(asdict(failure)).encode()).decode()


def from_text(text: str) -> Failure | None:
    """Return the failure in a text of Spark's; None: there is none."""
    carried = _CARRIED.search(text)
    if carried is None:
        return None
    try:
        return Failure.from_fields(json.loads(base64.b64decode(carried[1])))
    except errors.UNREADABLE:
        return None


class TaskFailedError(Exception):
    """A task of Spark's has failed; the text holds the `Failure`."""


def carrying_failures(
    run: Callable[_Args, Iterator[_Item]],
) -> Callable[_Args, Iterator[_Item]]:
    """Return a task's generator that raises errors in a form that passes through Spark."""

    @wraps(run)
    def task(*args: _Args.args, **kwargs: _Args.kwargs) -> Iterator[_Item]:
        try:
            yield from run(*args, **kwargs)
        except (WorkerOrphanedError, GeneratorExit, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise TaskFailedError(to_text(Failure.of(error))) from None

    return task


_QUERY_CONTEXTS = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")
_PYTHON_ERROR = re.compile(
    r"^((?!org\.|java\.|scala\.|py4j\.)(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt|Iteration))"
    r"(?:: (.*))?$",
    re.MULTILINE,
)
_LINE = re.compile(r'^\s*File "([^"]+)", line (\d+), in (\S+)', re.MULTILINE)
_WRAPPING = re.compile(
    r"^(?:(?:Caused by: )?[\w.$]+(?:Exception|Error): |: |Job aborted due to stage failure: |"
    r"Task \d+ in stage \S+ failed \d+ times, most recent failure: |"
    r"Lost task \S+ in stage \S+ \(TID \d+\) \(.*? executor \S+\): )+"
)
_NO_REASON = re.compile(r"\s*(?:at |\.\.\.|An error occurred while calling|Driver stacktrace|$)")


@contextmanager
def without_query_contexts() -> Iterator[None]:
    """Keep PySpark from printing an error as JSON before the error is raised."""
    try:
        from pyspark.logger import PySparkLogger
    except ImportError:  # PySpark 3.5 prints none
        yield
        return
    loggers = [PySparkLogger.getLogger(name) for name in _QUERY_CONTEXTS]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = not shows_full_tracebacks()
    try:
        yield
    finally:
        for logger, is_disabled in zip(loggers, before, strict=True):
            logger.disabled = is_disabled


def spark_error(
    error: Exception, step: str = "Spark", columns: Sequence[str] = ()
) -> FunctionError:
    """Return an error of Spark's or of the JVM's with the reason alone, of the same class too.

    Args:
        error: as Spark raised it; the text may hold tracebacks of Python and of Java.
        step: what Spark was doing.
        columns: of the rows.
    """
    text, call = text_of(error), UserCall(step, columns=tuple(columns))
    raised = _PYTHON_ERROR.findall(text)
    lines = user_lines(error.__traceback__)
    if raised and "Traceback (most recent call last)" in text:
        name, message = raised[-1]
        inner = tuple(
            UserLine(file, int(number), function)
            for file, number, function in _LINE.findall(text)
            if is_users(file)
        )
        name = name.rpartition(".")[2]
        return function_error(name, message, call, inner or lines, error)
    return function_error(type(error).__name__, reason_line(text), call, lines, error)


def reason_line(text: str) -> str:
    """Return the line of a text of Spark's that has the reason: no Java frames, no wrapping."""
    for line in text.splitlines():
        words = _WRAPPING.sub("", line.strip()).strip(" :")
        if words and not _NO_REASON.match(line):
            return words
    return text.strip()
