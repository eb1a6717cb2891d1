"""The answers of a gang's members to an order, and what the driver makes of them."""

from collections.abc import Callable, Iterable
from typing import Any

from tallystick.tasks.read import Report

READY, DONE, FAILED, CANCELLED, CUT = "ready", "done", "failed", "cancelled", "cut"
"""A reply of a member: of itself, of its run of an order, of its connections to others."""
WORKING = "working"
"""A sign of a member that it got on with an order since its last one."""


class Replies:
    """The answers to one order.

    Invariant: none is missing when `is_waiting` ends; so every member has stopped what it did for
    the order, and its frames and writes are after it.

    Args:
        run: the order's number; answers to others are not counted.
        members: the members that got the order.
        read: makes reports, or an error, from a member's answer.
    """

    def __init__(self, run: int, members: Iterable[int], read: Callable[[Any], Any]) -> None:
        self._run = run
        self._missing = set(members)
        self._read = read
        self.reports: list[Report] = []
        self.failure: Exception | None = None

    @property
    def is_waiting(self) -> bool:
        """True if members have not answered yet."""
        return bool(self._missing)

    def take(self, kind: str, index: int, run: int, answer: Any) -> bool:
        """Take an answer in.

        Args:
            kind: `DONE`, `FAILED` or `CANCELLED`.
            index: of the member.
            run: the number of the answered order.
            answer: the reports or the error.

        Returns:
            True for the first failure: the other members must be stopped.
        """
        if run != self._run:
            return False
        self._missing.discard(index)
        if kind == DONE:
            self.reports += self._read(answer)
        elif kind == FAILED and self.failure is None:
            self.failure = self._read(answer)
            return True
        return False
