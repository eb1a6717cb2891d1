"""What a failed Spark job meant: the error that one of our tasks raised, with its class again.

Spark hands over a task's Python error as text. Our classes stand for what to do about an error, so
they are found again by name; whatever else failed stays what it was.
"""

import re

from tallystick import errors
from tallystick.errors import EpochAbortedError, TallystickError

_RAISED = re.compile(r"tallystick\.errors\.(\w+): ([^\n]*)")
_STAGE_GIVEN_UP = "has failed the maximum allowable number of times"
"""What Spark says of a stage whose input is gone: an executor was lost with its shuffle files."""


def meaning_of(error: Exception) -> Exception:
    """Our own error inside what a Spark job raised, or the error itself."""
    if isinstance(error, TallystickError):
        return error
    text = str(error)
    found = _RAISED.findall(text)
    if not found:
        return _stage_lost(text) if _STAGE_GIVEN_UP in text else error
    name, message = found[-1]
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, TallystickError)):
        return error
    return kind(message)


def _stage_lost(text: str) -> EpochAbortedError:
    """Spark may not run the stage again, so the epoch has to."""
    reason = text[text.index(_STAGE_GIVEN_UP) :].splitlines()[:2]
    return EpochAbortedError(
        f"a stage of the epoch lost its input, as when an executor is gone: it {' '.join(reason)}"
    )
