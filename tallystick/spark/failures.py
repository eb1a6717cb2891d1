"""What a failed Spark job meant: the error that one of our tasks raised, with its class again.

Spark hands over a task's Python error as text. Our classes stand for what to do about an error, so
they are found again by name; whatever else failed stays what it was.
"""

import re
from collections.abc import Callable

from tallystick import errors
from tallystick.errors import EpochAbortedError, TallystickError

_RAISED = re.compile(r"tallystick\.errors\.(\w+): ([^\n]*)")
_WORKER_LOST = re.compile(
    r"Python worker exited unexpectedly|PythonWorkerFactory\.\S*(?:stop|create)Worker\b"
)
"""A worker died in its task, or in Spark's pool of idle ones, or while it was forked."""
_JOB_ABORTED = "Job aborted due to"
_STAGE_GIVEN_UP = "has failed the maximum allowable number of times"
"""What Spark says of a stage whose input is gone: an executor was lost with its shuffle files."""

POOL_JOBS_MAX = 100
"""More than a pool has dead workers, each of which fails a job."""


def meaning_of(error: Exception) -> Exception:
    """Our own error inside what a Spark job raised, or the error itself."""
    if isinstance(error, TallystickError):
        return error
    text = str(error)
    found = _RAISED.findall(text)
    if not found and _STAGE_GIVEN_UP in text:
        return _stage_lost(text)
    if not found and _WORKER_LOST.search(text):
        return _worker_lost(text)
    if not found:
        return error
    name, message = found[-1]
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, TallystickError)):
        return error
    try:
        return kind(message)
    except TypeError:  # more belongs to it than its text
        return TallystickError(f"{name}: {message}")


def _stage_lost(text: str) -> EpochAbortedError:
    """Spark may not run the stage again, so the epoch has to."""
    reason = text[text.index(_STAGE_GIVEN_UP) :].splitlines()[:2]
    return EpochAbortedError(
        f"a stage of the epoch lost its input, as when an executor is gone: it {' '.join(reason)}"
    )


def _worker_lost(text: str) -> EpochAbortedError:
    """Spark may not try the task again, so the epoch has to."""
    lines = (
        line for line in text.splitlines() if _JOB_ABORTED in line or _WORKER_LOST.search(line)
    )
    return EpochAbortedError(
        f"a Python worker died in the middle of the epoch, of a crash or for lack of memory, or "
        f"with its daemon: {next(lines)}"
    )


def run_until_alive(run_nothing: Callable[[], None]) -> None:
    """Run jobs that do nothing until one passes, if what fails them are workers that died.

    When a worker daemon dies, all its workers do. Spark keeps the idle ones in its pool, and takes
    one out only by giving it a task, which fails: an epoch has too few attempts to do that itself.
    """
    for _ in range(POOL_JOBS_MAX):
        try:
            return run_nothing()
        except Exception as error:
            if not isinstance(meaning_of(error), EpochAbortedError):
                return  # the next attempt at the epoch meets it too
