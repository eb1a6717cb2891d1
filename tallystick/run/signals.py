"""SIGINT and SIGTERM while the main thread waits for a run: the run is drained, then it ends.

Only default handlers are replaced, Python's and PySpark's, and they are put back afterwards: a
handler of the user's own decides by itself. `docs/decisions/0056-signals.md` has the exit codes.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

SAME_SIGNAL_S = 0.3
"""A second SIGINT within this time is the first one again: `timeout` sends to process and group."""
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM


class StopSignals:
    """Notes the first SIGINT or SIGTERM in a block of the main thread; elsewhere it does nothing.

    Args:
        at_once: called by a second SIGINT.
    """

    def __init__(self, at_once: Callable[[], None]) -> None:
        self.first: signal.Signals | None = None
        self._at_once = at_once
        self._first_s = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if _is_default(signal.getsignal(number)):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def are_noted(self) -> bool:
        """True if a signal would be noted here."""
        return bool(self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.first is None:
            self.first, self._first_s = signal.Signals(number), now_s
        elif number == signal.SIGINT and now_s > self._first_s + SAME_SIGNAL_S:
            self._at_once()


def _is_default(handler: Any) -> bool:
    """True for Python's handlers, and PySpark's, which cancels all jobs and so the epoch."""
    if handler in (signal.SIG_DFL, signal.default_int_handler):
        return True
    return getattr(handler, "__module__", "").startswith("pyspark.")


def exit_code(by: signal.Signals, *, is_complete: bool) -> int:
    """Return the exit code of a process whose run was ended by a signal.

    Args:
        by: the signal.
        is_complete: the run was drained, and had no work left that it was started for.
    """
    if by == signal.SIGINT:
        return INTERRUPTED
    return 0 if is_complete else TERMINATED


def interruption() -> BaseException:
    """Return what ends a program whose start a SIGINT has ended, with a line and no traceback."""
    return KeyboardInterrupt() if is_interactive() else SystemExit(INTERRUPTED)


def is_interactive() -> bool:
    """True in a shell or notebook, which outlives the run."""
    return hasattr(sys, "ps1") or hasattr(sys.modules.get("builtins"), "__IPYTHON__")
