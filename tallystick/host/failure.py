"""The error of a task on its way to the driver, the same in all engines.

It stands in a `Report`, in the answer of a resident task, or as JSON inside an error of Spark's.
"""

import builtins
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from tallystick import errors
from tallystick.errors import TallystickError
from tallystick.host.excepthook import shows_full_tracebacks
from tallystick.host.user_code import (
    NO_CALL,
    UserCall,
    UserLine,
    function_error,
    taken_call,
    user_lines,
)

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
        return cls(type(error).__name__, classes, text_of(error), call, lines, trace)

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
        if self.trace and shows_full_tracebacks():
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

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Read back the fields of a failure, as JSON has them."""
        call = UserCall(**{**fields["call"], "columns": tuple(fields["call"]["columns"])})
        lines = tuple(UserLine(**line) for line in fields["lines"])
        return cls(**{**fields, "classes": tuple(fields["classes"]), "call": call, "lines": lines})


def text_of(error: BaseException) -> str:
    """Return the text of an error; the text of a user's class may raise."""
    if isinstance(error, KeyError) and len(error.args) == 1 and " " in str(error.args[0]):
        return str(error.args[0])  # a sentence, which the class would quote
    try:
        return str(error)
    except Exception:
        return "(its text cannot be made)"
