"""The printing of errors that end a program: what is wrong first, then the user's own lines.

Python prints every frame of ours between the user's call and the message, and the message last.
`TALLYSTICK_TRACEBACKS=full` leaves the printing to Python. Other errors are never touched.
"""

import os
import sys
from types import TracebackType

from tallystick.errors import FunctionError, TallystickError

TRACEBACKS = "TALLYSTICK_TRACEBACKS"
"""The environment variable that shows whole tracebacks, if its value is `full`."""

LINES_MAX = 10
"""The most lines that an error is shown with; all are in its text."""


def shows_full_tracebacks() -> bool:
    """True if the user wants the frames of Tallystick, Spark and libraries too."""
    return os.environ.get(TRACEBACKS, "") == "full"


def lines_of(error: TallystickError, trace: TracebackType | None) -> list[str]:
    """Return the lines that tell an error: the message, its notes, the user's lines."""
    # Every import of the package installs the hook; few processes print an error.
    from tallystick.host.user_code import LINES_SHOWN_MAX, user_lines

    name = "" if isinstance(error, FunctionError) else f"{type(error).__name__}: "
    notes: list[str] = getattr(error, "__notes__", [])
    lines = [str(line) for line in user_lines(trace)[-LINES_SHOWN_MAX:]]
    new = [line for line in lines if line not in notes]
    first, *others = str(error).splitlines() or [""]
    more = [*others[:LINES_SHOWN_MAX], *["  …"] * (len(others) > LINES_SHOWN_MAX)]
    shown = [f"{name}{first}", *more, *notes, *new][: LINES_MAX - 1]
    return [*shown, f"  ({TRACEBACKS}=full shows all frames)"]


def install() -> None:
    """Print errors of Tallystick's so, in programs and notebooks; a hook of the user's stays."""
    # IPython asks an error for its lines; without them the error is shown as any other.
    if not shows_full_tracebacks():
        TallystickError._render_traceback_ = _lines  # type: ignore[attr-defined]
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_error


def _lines(error: TallystickError) -> list[str]:
    return lines_of(error, error.__traceback__)


def _print_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    error = _inside_sparks(error)
    if not isinstance(error, TallystickError) or shows_full_tracebacks():
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write("\n".join(lines_of(error, trace)) + "\n")


def _inside_sparks(error: BaseException) -> BaseException:
    """Return an error of ours that ended a query of Structured Streaming, or the error itself."""
    jobs = sys.modules.get("tallystick.spark.jobs")
    is_sparks = type(error).__module__.startswith("pyspark.")
    if jobs is None or not is_sparks or "tallystick.errors." not in str(error):
        return error
    meaning: BaseException = jobs.meaning_of(error)
    return meaning
