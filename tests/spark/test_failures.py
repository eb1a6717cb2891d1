"""What Spark's errors say: the failure of a task, or the line with the reason."""

import logging
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tallystick.errors import EpochAbortedError, FunctionError, OptionError, RecordError
from tallystick.host.failure import Failure
from tallystick.host.user_code import UserCall, calling_user
from tallystick.spark import jvm
from tallystick.spark.failures import (
    TaskFailedError,
    carrying_failures,
    from_text,
    reason_line,
    to_text,
)
from tallystick.spark.jobs import meaning_of
from tallystick.spark.worker_reasons import why_no_worker


def failing(error: Exception) -> Any:
    def task() -> Any:
        with calling_user("map_batches late"):
            yield 1
            raise error

    return carrying_failures(task)


def sparks(error: Exception) -> Exception:
    """As Spark gives a task's error to the driver."""
    with pytest.raises(TaskFailedError) as caught:
        list(failing(error)())
    text = f"Job aborted due to stage failure: {type(caught.value).__name__}: {caught.value}\n"
    return RuntimeError(text + "\tat org.apache.spark.Executor.run(Executor.scala:3)\n" * 9)


class OwnError(ValueError):
    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


@pytest.mark.parametrize("raised", [ValueError("a mistake"), OwnError("a mistake")])
def test_an_error_of_a_function_passes_through_spark(raised: Exception) -> None:
    error = meaning_of(sparks(raised))
    assert isinstance(error, FunctionError)
    assert isinstance(error, ValueError)
    name = type(raised).__name__
    assert str(error).startswith(f"map_batches late: {name}: a mistake (test_failures.py:")
    assert "org.apache" not in "".join(error.__notes__)


def test_an_error_of_ours_passes_with_all_its_lines() -> None:
    error = meaning_of(sparks(RecordError("flights-1, offset 3:\nno JSON")))
    assert type(error) is RecordError
    assert str(error) == "map_batches late: flights-1, offset 3:\nno JSON"


def test_a_text_that_only_looks_like_a_failure_is_none() -> None:
    assert from_text("tallystick-failure:AAAA") is None
    assert from_text("tallystick-failure:W10=") is None
    failure = Failure("KeyError", ("KeyError",), "x", UserCall("f", "", ("a",)))
    assert from_text(f"? {to_text(failure)}\n\tat") == failure


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "An error occurred while calling o31.collect.\n"
            ": org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage "
            "1.0 failed 1 times, most recent failure: Lost task 0.0 in stage 1.0 (TID 1) (host "
            "executor driver): java.io.IOException: No space left on device\n\tat java.io.X\n",
            "No space left on device",
        ),
        ("[PATH_NOT_FOUND] Path does not exist: x.\n\nJVM stacktrace:\n\tat x", "[PATH_NOT_FOUND]"),
        ("\n\tat only.frames", "at only.frames"),
    ],
)
def test_the_line_with_the_reason_is_found(text: str, reason: str) -> None:
    assert reason_line(text).startswith(reason)


TRACE = """Task 0 failed: An exception was thrown from the Python worker. Please see below.
Traceback (most recent call last):
  File "/opt/spark/python/lib/pyspark.zip/pyspark/worker.py", line 1, in main
{}

\tat org.apache.spark.api.python.BasePythonRunner
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ModuleNotFoundError: No module named 'tallystick'", "which has no module named 'tallyst"),
        ("ModuleNotFoundError: No module named 'pyarrow.lib'", f"PYSPARK_PYTHON={sys.executable}"),
        ("/usr/bin/python3: No module named pyspark", f"PYSPARK_PYTHON={sys.executable}"),
        (
            "pyspark.errors.exceptions.base.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python "
            "in worker has different version: 3.12 than that in driver: 3.11, PySpark cannot run",
            "workers run Python 3.12",
        ),
        (
            'java.io.IOException: Cannot run program "/nowhere/python": error=2, No such file or '
            "directory",
            "/nowhere/python: No such file",
        ),
        (
            "ModuleNotFoundError: No module named 'helpers_of_mine'",
            "addPyFile('helpers_of_mine.py')",
        ),
    ],
)
def test_workers_that_can_never_come_up_are_told_with_the_remedy(text: str, words: str) -> None:
    reason = why_no_worker(TRACE.format(text))
    assert isinstance(reason, OptionError)
    assert words in str(reason)
    assert isinstance(meaning_of(RuntimeError(TRACE.format(text))), OptionError)


def test_a_worker_that_died_is_no_such_worker() -> None:
    died = "Job aborted due to x: Python worker exited unexpectedly (crashed)\n"
    assert why_no_worker(died) is None
    assert isinstance(meaning_of(RuntimeError(died)), EpochAbortedError)


def test_an_error_of_a_udf_is_told_with_its_line() -> None:
    trace = TRACE.format(
        f'  File "{Path(__file__).parent}/late.py", line 9, in double\nTypeError: not a number'
    )
    error = meaning_of(RuntimeError(trace))
    assert str(error) == "Spark: TypeError: not a number (late.py:9)"


@pytest.mark.parametrize(
    ("logger", "file", "end", "is_shown"),
    [
        ("root", "site-packages/py4j/java_gateway.py", "Spark's JVM has ended", False),
        ("root", "site-packages/py4j/java_gateway.py", "", True),
        ("root", "py/program.py", "Spark's JVM has ended", True),
        ("py4j", "site-packages/py4j/java_gateway.py", "Spark's JVM has ended", False),
    ],
)
def test_only_what_py4j_says_of_a_jvm_that_has_ended_is_dropped(
    monkeypatch: pytest.MonkeyPatch, logger: str, file: str, end: str, is_shown: bool
) -> None:
    """Its answer that does not come it logs on the root logger, as a user's program may."""
    monkeypatch.setattr(jvm, "jvm_end", lambda wait_s: end)
    record = logging.LogRecord(logger, logging.ERROR, file, 1, "Exception while …", (), None)

    assert bool(jvm._NoNoise().filter(record)) is is_shown


def test_the_root_logger_has_the_filter_as_py4js_own_have() -> None:
    jvm.quiet_end(Mock(_accumulatorServer=None))

    for name in ("", "py4j", "py4j.clientserver", "py4j.java_gateway"):
        assert any(isinstance(known, jvm._NoNoise) for known in logging.getLogger(name).filters)
