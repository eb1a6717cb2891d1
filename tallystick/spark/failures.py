"""Errors of tasks on their way to the driver, and the reasons in Spark's own errors.

Spark returns an error of a job as text. In the text a failure stands as JSON, in Base64: texts may
hold values of records, so nothing that is read there is ever unpickled.
"""

import base64
import builtins
import json
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from typing import ParamSpec, Self, TypeVar

from tallystick import errors
from tallystick.errors import FunctionError, TallystickError, WorkerOrphanedError
from tallystick.host.excepthook import shows_full_tracebacks
from tallystick.host.user_code import (
    NO_CALL,
    UserCall,
    UserLine,
    function_error,
    is_users,
    taken_call,
    user_lines,
)

_Args = ParamSpec("_Args")
_Item = TypeVar("_Item")
TRACE_LENGTH_MAX = 20_000


@dataclass(frozen=True)
class Failure:
    """The error of a task.

    Args:
        name: of its class.
        classes: the names of that class and its bases.
        text: of the error.
        call: of the user's code that raised it.
        lines: of the user's program, the innermost last.
        trace: the end of the whole traceback.
    """

    name: str
    classes: tuple[str, ...]
    text: str
    call: UserCall = NO_CALL
    lines: tuple[UserLine, ...] = ()
    trace: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Return the failure of a task that ends with an error."""
        call, lines = taken_call(error), user_lines(error.__traceback__)
        if not lines and error.__cause__ is not None:  # as of a StopIteration in a generator
            lines = user_lines(error.__cause__.__traceback__)
        trace = "".join(traceback.format_exception(error))[-TRACE_LENGTH_MAX:]
        classes = tuple(kind.__name__ for kind in type(error).__mro__)
        return cls(type(error).__name__, classes, _text_of(error), call, lines, trace)

    def to_error(self, original: Exception | None = None) -> Exception:
        """Return the error, of the original's class if it is known here.

        Args:
            original: the error itself; None: it did not come along.
        """
        error = original or self._known()
        if isinstance(error, TallystickError):
            if self.call.step and self.call.step not in str(error):
                error.args = (f"{self.call.step}: {error}",)
            for line in self.lines[-1:]:
                error.add_note(str(line))
        else:
            error = function_error(self.name, self.text, self.call, self.lines, error)
        if shows_full_tracebacks():
            error.add_note(f"in a task:\n{self.trace}")
        return error

    def _known(self) -> Exception | None:
        """Return an error of the nearest class that Tallystick or Python has."""
        for name in self.classes:
            kind = getattr(errors, name, getattr(builtins, name, None))
            if isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception:
                try:
                    return kind(self.text)
                except TypeError:  # more belongs to it than its text
                    continue
        return None

    def to_text(self) -> str:
        """Return the text that passes through Spark."""
        return MARK + base64.b64encode(json.dumps(asdict(self)).encode()).decode()

    @classmethod
    def from_text(cls, text: str) -> Self | None:
        """Return the failure in a text of Spark's; None: there is none."""
        carried = _CARRIED.search(text)
        if carried is None:
            return None
        try:
            fields = json.loads(base64.b64decode(carried[1]))
            call = fields.pop("call")
            call["columns"] = tuple(call["columns"])
            lines = tuple(UserLine(**line) for line in fields.pop("lines"))
            fields["classes"] = tuple(fields["classes"])
            return cls(**fields, call=UserCall(**call), lines=lines)
        except errors.UNREADABLE:
            return None


MARK = "tallystick-failure:"
_CARRIED = re.compile(rf"{MARK}([A-Za-z0-9+/=]+)")


class TaskFailedError(Exception):
    """A task of Spark's has failed; the text holds the `Failure`."""


def carrying_failures(
    run: Callable[_Args, Iterator[_Item]],
) -> Callable[_Args, Iterator[_Item]]:
    """Return a task's generator that raises its errors in a form that passes through Spark."""

    @wraps(run)
    def task(*args: _Args.args, **kwargs: _Args.kwargs) -> Iterator[_Item]:
        try:
            yield from run(*args, **kwargs)
        except (WorkerOrphanedError, GeneratorExit, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise TaskFailedError(Failure.of(error).to_text()) from None

    return task


def _text_of(error: BaseException) -> str:
    if isinstance(error, KeyError) and len(error.args) == 1 and " " in str(error.args[0]):
        return str(error.args[0])  # a sentence, which the class would quote
    try:
        return str(error)
    except Exception:
        return "(its text cannot be made)"


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
    """Keep PySpark from printing an error that it raises, as JSON: whoever takes it says it."""
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
    text, call = _text_of(error), UserCall(step, columns=tuple(columns))
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
