"""The lines about a run: through `logging`, on a terminal without any logging set up, on a page.

A terminal has besides one line for all runs of the process that is drawn again in place. It is
off where stderr is no terminal, where the program has set up logging, with `quiet=True`, and with
the environment variable TALLYSTICK_QUIET.
"""

import contextlib
import logging
import os
import shutil
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, TextIO

from tallystick.errors import without_values

logger = logging.getLogger("tallystick")

QUIET = "TALLYSTICK_QUIET"
"""The environment variable that turns the terminal off, with any value but "" and "0"."""
CLEAR = "\r\x1b[2K"
WIDTH_MIN = 20
LINES_KEPT = 200
"""The number of lines that a page can show."""


class Terminal(logging.Handler):
    """Prints the log of `tallystick` on a terminal, above a line that is drawn again in place.

    Args:
        stream: the terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        self._stream = stream
        self._texts: dict[str, str] = {}
        self._level = logging.NOTSET

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record; the user's own handlers print it where there are any."""
        if self.is_wanted:
            self._write(f"{CLEAR}{self.format(record)}\n{self._line}")

    def draw(self, run: str, text: str) -> None:
        """Draw a run's part of the line."""
        with self.lock or contextlib.nullcontext():
            self._texts[run] = text
            if self.is_wanted:
                self._write(f"{CLEAR}{self._line}")

    def add(self, run: str) -> None:
        """Begin to print, with the first run."""
        if not self._texts:
            self._level = logger.level
            if self._level == logging.NOTSET:
                logger.setLevel(logging.INFO)
            logger.addHandler(self)
        self._texts[run] = ""

    def remove(self, run: str) -> None:
        """Print no more of a run; after the last one all is as it was before."""
        with self.lock or contextlib.nullcontext():
            if self._texts.pop(run, None) is None:
                return
            if self.is_wanted:
                self._write(f"{CLEAR}{self._line}")
        if not self._texts:
            logger.removeHandler(self)
            if self._level == logging.NOTSET:
                logger.setLevel(logging.NOTSET)

    @property
    def is_wanted(self) -> bool:
        """False once the program has set up logging."""
        return not is_logging_set_up(self)

    @property
    def _line(self) -> str:
        width = max(WIDTH_MIN, shutil.get_terminal_size().columns - 1)
        return " | ".join(filter(None, self._texts.values()))[:width]

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone: the run goes on
            self._stream.write(text)
            self._stream.flush()


def is_logging_set_up(ours: logging.Handler | None = None) -> bool:
    """True if a handler of the program's own gets the records of `tallystick`."""
    handlers = [*logger.handlers, *(logging.root.handlers if logger.propagate else ())]
    return any(handler not in (ours, LINES) for handler in handlers)


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of the driver's log, without values of records or state.

    Args:
        at_ms: when.
        level: `INFO`, `WARNING` or `ERROR`.
        text: of the line.
    """

    at_ms: int
    level: str
    text: str


class LogLines(logging.Handler):
    """Keeps the newest lines of the log of `tallystick`, for a page.

    Errors among the arguments of a line become their text without values. Where a program has set
    up no logging, warnings are printed as Python does it where there is no handler at all.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[LogLine] = deque(maxlen=LINES_KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.add(record.created, record.levelname, str(record.msg), record.args or ())
        last = logging.lastResort
        if last is not None and record.levelno >= last.level and not is_logging_set_up():
            last.handle(record)

    def add(self, at_s: float, level: str, text: str, arguments: Any) -> None:
        """Keep a line that is given in parts."""
        if isinstance(arguments, tuple):
            arguments = tuple(
                without_values(argument) if isinstance(argument, BaseException) else argument
                for argument in arguments
            )
        with contextlib.suppress(TypeError, ValueError):  # arguments that do not fit
            text = text % arguments if arguments else text
        self._lines.append(LogLine(round(1000 * at_s), level, text))

    def attach(self) -> None:
        """Begin to keep lines; a second call changes nothing."""
        logger.addHandler(self)

    def newest(self) -> tuple[LogLine, ...]:
        """Return the lines, the newest last."""
        return tuple(self._lines.copy())


LINES = LogLines()
_TERMINALS: list[Terminal] = []


class Console:
    """The lines about one run.

    Args:
        name: of the pipeline; each line begins with it.
        is_quiet: only `logging` gets the lines.
    """

    def __init__(self, name: str, *, is_quiet: bool = False) -> None:
        self.name = name
        self._is_quiet = is_quiet or os.environ.get(QUIET, "") not in ("", "0")
        self._terminal: Terminal | None = None

    def open(self) -> None:
        """Begin to print on the terminal, if stderr is one."""
        if self._is_quiet or not sys.stderr.isatty():
            return
        if not _TERMINALS:
            _TERMINALS.append(Terminal(sys.stderr))
        self._terminal = _TERMINALS[0]
        self._terminal.add(self.name)

    def info(self, text: str) -> None:
        """Log a line."""
        logger.info("%s: %s", self.name, text)
        if LINES in logger.handlers and not logger.isEnabledFor(logging.INFO):
            LINES.add(time.time(), "INFO", "%s: %s", (self.name, text))

    def warning(self, text: str) -> None:
        """Log a warning."""
        logger.warning("%s: %s", self.name, text)

    def draw(self, text: str) -> None:
        """Draw the line of the terminal again."""
        if self._terminal is not None:
            self._terminal.draw(self.name, f"{self.name}: {text}")

    def farewell(self, text: str) -> None:
        """Say how a signal has ended the run: on stderr too where nobody reads the log."""
        if self._terminal is not None or is_logging_set_up() or self._is_quiet:
            self.info(text)
        else:
            with contextlib.suppress(OSError):
                sys.stderr.write(f"{self.name}: {text}\n")
                sys.stderr.flush()

    def close(self) -> None:
        """Print no more."""
        if self._terminal is not None:
            self._terminal.remove(self.name)
            self._terminal = None
