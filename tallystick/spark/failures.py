"""What a failed Spark job meant: the error that one of our tasks raised, with its class again.

Spark hands over a task's Python error as text. Our classes stand for what to do about an error, so
they are found again by name; whatever else failed stays what it was.
"""

import re

from tallystick import errors
from tallystick.errors import TallystickError

_RAISED = re.compile(r"tallystick\.errors\.(\w+): ([^\n]*)")


def meaning_of(error: Exception) -> Exception:
    """Our own error inside what a Spark job raised, or the error itself."""
    if isinstance(error, TallystickError):
        return error
    found = _RAISED.findall(str(error))
    if not found:
        return error
    name, message = found[-1]
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, TallystickError)):
        return error
    return kind(message)
