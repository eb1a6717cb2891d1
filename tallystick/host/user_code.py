"""Calls of users' code: an error there keeps the step, the records and the user's own lines.

A traceback of a task is mostly of ours, of Spark's and of libraries. The frames that a user can
change are told from the others by the place of their files.
"""

import linecache
import os
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any

from tallystick.errors import FunctionError
from tallystick.host.origin import ALL_ROWS, place_of

_OWN = str(Path(__file__).parent.parent) + os.sep
_LIBRARIES = tuple(
    {
        sysconfig.get_path(name) + os.sep
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        if sysconfig.get_path(name)
    }
)
_MARK = "_tallystick_call"
LINES_SHOWN_MAX = 3
"""The most lines of a user's program that are shown beside a message."""
TEXT_LENGTH_MAX = 600
COLUMNS_SHOWN_MAX = 20


@dataclass(frozen=True)
class UserCall:
    """The call of a user's code that raised an error.

    Args:
        step: what called it, and its name, such as `map_batches late_only`.
        records: the place of the rows that it was given; "": not known.
        columns: of the rows.
    """

    step: str = ""
    records: str = ""
    columns: tuple[str, ...] = ()


NO_CALL = UserCall()


@dataclass(frozen=True)
class UserLine:
    """A line of a user's program in a traceback."""

    file: str
    number: int
    function: str

    @property
    def short(self) -> str:
        """The line as a message names it."""
        is_cell = "ipykernel" in self.file or "ipython-input" in self.file
        return f"{'cell' if is_cell else Path(self.file).name}:{self.number}"

    def __str__(self) -> str:
        """Return the place and the source text, as far as this process has the source."""
        source = linecache.getline(self.file, self.number).strip()
        return f"  {self.file}:{self.number} in {self.function}" + (source and f": {source}")


@contextmanager
def calling_user(step: str, rows: Any = None) -> Iterator[None]:
    """Note at an error of a user's code which call raised the error; the innermost call counts.

    Args:
        step: see `UserCall`.
        rows: the batch that the code gets; None: no rows.
    """
    try:
        yield
    except BaseException as error:
        if _MARK not in vars(error):
            records = "" if rows is None else place_of(rows, ALL_ROWS).words
            columns = () if rows is None else tuple(rows.schema.names)
            vars(error)[_MARK] = UserCall(step, records, columns)
        raise


def taken_call(error: BaseException) -> UserCall:
    """Return the noted call of an error, and remove the note."""
    call: UserCall = vars(error).pop(_MARK, NO_CALL)
    return call


def user_lines(trace: TracebackType | None) -> tuple[UserLine, ...]:
    """Return the lines of a traceback that are the user's, the innermost last.

    A line that follows itself, as in a recursion, counts once.
    """
    lines = (
        UserLine(frame.f_code.co_filename, number, frame.f_code.co_name)
        for frame, number in traceback.walk_tb(trace)
        if is_users(frame.f_code.co_filename)
        # Code that a library of Python made for us has no file.
        and not str(frame.f_globals.get("__name__")).startswith("tallystick.")
    )
    return tuple(line for line, _ in groupby(lines))


def is_users(file: str) -> bool:
    """True if a file with Python code is the user's: not ours, Spark's, or a library's."""
    if file.startswith(("<frozen", _OWN)) or not file.startswith((os.sep, "<")):
        return False  # compiled libraries name their files without a folder
    parts = Path(file).parts
    return not (
        file.startswith(_LIBRARIES)
        or {"site-packages", "dist-packages", "pyspark.zip", "pyspark"} & set(parts)
        or any(part.startswith("py4j-") for part in parts)
    )


def function_error(
    name: str,
    text: str,
    call: UserCall,
    lines: Sequence[UserLine],
    original: BaseException | None = None,
) -> FunctionError:
    """Return the error for a failed call of a user's code, of the original's class if possible.

    Args:
        name: of the original's class.
        text: of the original.
        call: which call failed.
        lines: of the user's program, the innermost last.
        original: the error that was raised; None: nobody has it here.
    """
    first, *others = (text.strip() or "").splitlines() or [""]
    what = ", ".join(filter(None, (call.step, call.records)))
    message = f"{what}: " * bool(what) + name + f": {first[:TEXT_LENGTH_MAX]}" * bool(first)
    if lines:
        message += f" ({lines[-1].short})"
    if call.columns:
        more = ", …" if len(call.columns) > COLUMNS_SHOWN_MAX else ""
        message += f"; columns: {', '.join(call.columns[:COLUMNS_SHOWN_MAX])}{more}"
    error = _of_class(name, message, original)
    cut = [line[:TEXT_LENGTH_MAX] for line in others[:LINES_SHOWN_MAX]]
    for note in (*cut, *map(str, lines[-LINES_SHOWN_MAX:])):
        error.add_note(note)
    return error


def _of_class(name: str, message: str, original: BaseException | None) -> FunctionError:
    """Return an error that is of the original's class too; some classes have no subclass."""
    kind: Any
    if isinstance(original, Exception):
        of: Any = type(original)
        with suppress(Exception):
            # Its class comes first: some have memory of their own, which `__new__` asks for.
            own = {method: getattr(FunctionError, method) for method in ("__str__", "__repr__")}
            kind = type(name, (of, FunctionError), {"__module__": of.__module__, **own})
            error: FunctionError = of.__new__(kind, *original.args)
            with suppress(Exception):
                of.__init__(error, *original.args)
            vars(error).update(vars(original))
            FunctionError.__init__(error, message)
            error.args = original.args
            return error
    kind = type(name, (FunctionError,), {})
    named: FunctionError = kind(message)
    return named
