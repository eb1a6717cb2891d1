"""The transactions that wait for their end, as far as the driver has seen; makes no request."""

from collections import defaultdict
from collections.abc import Iterable

from tallystick.epoch.two_phase import Committable
from tallystick.run.participants import Result


class OpenTransactions:
    """Transactions in sinks that wait for the decision: prepared ones, and left-over ones.

    A task's transaction is known from its report on, one that an earlier run or a failed attempt
    left from the recovery's look on. Used by the driver's threads, and read by that of the metrics.
    """

    def __init__(self) -> None:
        self._begun_ms: dict[tuple[str, str], int] = {}

    def prepared(self, committables: Iterable[Committable]) -> None:
        """Take in what tasks reported."""
        self._begun_ms |= {(each.sink, each.name): each.begun_ms for each in committables}

    def found(self, committables: Iterable[Committable]) -> None:
        """Take in a look at all sinks: there is nothing else."""
        self._begun_ms = {(each.sink, each.name): each.begun_ms for each in committables}

    def note(self, committable: Committable, result: Result) -> None:
        """Take in the result of one commit or abort; see `run.participants.Note`."""
        if not isinstance(result, Exception):
            self._begun_ms.pop((committable.sink, committable.name), None)

    def begun_ms(self) -> dict[str, list[int]]:
        """Return when those of each sink were begun, in ms since 1970; 0: that is not known."""
        found = defaultdict[str, list[int]](list)
        for (sink, _), begun_ms in list(self._begun_ms.items()):
            found[sink].append(begun_ms)
        return found
