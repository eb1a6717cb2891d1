"""A finding of a check: the observation, the consequence, and the command to type.

A start logs warnings and errors; `tallystick doctor` and the page show all findings.
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
    """A check's observation, with the consequence and the remedy.

    Args:
        severity: how bad it is.
        check: the name of the check.
        found: the observation.
        meaning: the consequence; "": the observation speaks for itself.
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
        """Return observation, consequence and remedy as one line, for a log."""
        sentences = (f"{self.check}: {self.found}", self.meaning, self.remedy)
        return " ".join(f"{sentence.rstrip('.')}." for sentence in sentences if sentence)
