"""A finding of a check: what is so, what follows from it, and what to type.

A start logs those that are more than information; `tallystick doctor` and the page show all.
"""

from dataclasses import dataclass
from enum import IntEnum


class Severity(IntEnum):
    """The weight of a finding, which is the exit code too."""

    INFO = 0
    WARNING = 1
    ERROR = 2


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """One thing that a check found.

    Args:
        severity: how bad it is.
        check: the name of the check.
        found: what is so.
        meaning: what follows from that; "": it speaks for itself.
        remedy: what to type or to change; "": nothing.
    """

    severity: Severity
    check: str
    found: str
    meaning: str = ""
    remedy: str = ""

    @property
    def is_logged(self) -> bool:
        """True if a start logs it."""
        return self.severity > Severity.INFO

    def __str__(self) -> str:
        """Return all of it as one line, for a log."""
        sentences = (f"{self.check}: {self.found}", self.meaning, self.remedy)
        return " ".join(f"{each.rstrip('.')}." for each in sentences if each)
