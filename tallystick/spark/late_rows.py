"""Counts the late rows of committed epochs, for metrics."""

from collections import Counter

from tallystick.epoch import protocol as c
from tallystick.run.driver import Listener

LATE_ROWS: Counter[tuple[str, str]] = Counter()
"""By the pipeline's name and the step's uid, since this process began."""


class LateRows:
    """A listener that counts them, and passes every event on.

    An epoch counts once, when it is committed, as its output does; where the answer to the commit
    is lost, it is left out.

    Args:
        pipeline: its name.
        listener: the user's; None: there is none.
    """

    def __init__(self, pipeline: str, listener: Listener | None) -> None:
        self._pipeline = pipeline
        self._listener = listener
        self._ran: tuple[tuple[str, int], ...] = ()

    def __call__(self, event: c.Event) -> None:
        """See `job.Listener`."""
        match event:
            case c.EpochRequested() | c.ProducerFenced():  # what ran before is not committed next
                self._ran = ()
            case c.EpochRan():
                self._ran = event.late
            case c.TransactionCommitted():
                for step, count in self._ran:
                    LATE_ROWS[self._pipeline, step] += count
                self._ran = ()
        if self._listener is not None:
            self._listener(event)
