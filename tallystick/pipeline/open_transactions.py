"""The transactions that wait for their end, as far as the driver has seen; makes no request."""

from collections import defaultdict
from collections.abc import Iterable

from tallystick.epoch.two_phase import Committable
from tallystick.run.participants import Result


class OpenTransactions:
    """The transactions in sinks without an end yet: prepared by tasks, or left over.

    A task's transaction is known once the task has reported; one that an earlier run or a failed
    attempt left, once a recovery has looked. Threads of the driver write, that of metrics reads.
    """

    def __init__(self) -> None:
        self._begun_ms: dict[tuple[str, str], int] = {}

    def prepared(self, committables: Iterable[Committable]) -> None:
        """Add transactions that tasks reported."""
        self._begun_ms |= {
            (committable.sink, committable.name): committable.begun_ms
            for committable in committables
        }

    def replace_all(self, committables: Iterable[Committable]) -> None:
        """Replace all entries by what a look through all sinks found."""
        self._begun_ms = {
            (committable.sink, committable.name): committable.begun_ms
            for committable in committables
        }

    def note(self, committable: Committable, result: Result) -> None:
        """Take in the result of one commit or abort; see `run.participants.Note`."""
        if not isinstance(result, Exception):
            self._begun_ms.pop((committable.sink, committable.name), None)

    def begun_ms(self) -> dict[str, list[int]]:
        """Return the begin times of each sink's transactions, in ms since 1970; 0: not known."""
        by_sink = defaultdict[str, list[int]](list)
        for (sink, _), begun_ms in list(self._begun_ms.items()):
            by_sink[sink].append(begun_ms)
        return by_sink
