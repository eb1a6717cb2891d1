"""The loop of epochs of a run, and the trigger that says when one is due.

The loop begins an epoch when one is due, until it is stopped or has read all. The driver decides
what an epoch is and whether it happened; the loop only asks for the next one.
"""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from threading import Event
from typing import Any, Protocol

from tallystick.arguments import near
from tallystick.errors import (
    OptionError,
    StorageError,
    TallystickError,
)
from tallystick.ports import EpochSource
from tallystick.run.driver import Driver
from tallystick.text import WAIT_MAX_MS, WAIT_MAX_WORDS, span_ms

logger = logging.getLogger(__name__)

IDLE_MIN_S = 0.005
IDLE_MAX_S = 0.1
"""The longest wait before Kafka is asked again for new records."""
IDLE_SHARE = 0.25
"""The extra wait of records, at most, as a share of the time that went by without any."""
LOOK_SHARE = 0.1
"""The share of a core that looks may take: one of thousands of partitions takes its time."""


_ONCE = ("availableNow", "once")
_NAMES = ("processingTime", *_ONCE)


@dataclass(frozen=True, slots=True)
class Trigger:
    """The rule for when epochs begin, and whether the loop ends by itself.

    Args:
        interval_ms: the shortest time between the begins of two epochs; 0: one after the other.
        is_available_now: read the records that are there, in as many epochs as needed, and end.
    """

    interval_ms: int = 0
    is_available_now: bool = False

    @classmethod
    def of(cls, arguments: Mapping[str, Any] | str | timedelta | None) -> "Trigger":
        """Read the arguments of Spark's `DataStreamWriter.trigger`.

        Args:
            arguments: `processingTime`, `availableNow` or `once`; None: one epoch after the other.

        Raises:
            OptionError: the argument is another, or its text is no interval.
        """
        given = dict(trigger_arguments(arguments) or {})
        if not given:
            return cls()
        if len(given) == 1:
            (name, value), *_ = given.items()
            if name in _ONCE and value is True:
                return cls(is_available_now=True)
            if name == "processingTime":
                return cls(interval_ms=interval_ms(value))
        hint = "" if {*given} & {*_NAMES} else near(next(iter(given)), _NAMES)
        raise OptionError(
            f"trigger={given!r}: expected {{'processingTime': '1 second'}}, "
            f"{{'availableNow': True}} or {{'once': True}}, which reads the same.{hint}"
        )


def trigger_arguments(
    given: Mapping[str, Any] | str | timedelta | None,
) -> Mapping[str, Any] | None:
    """Return the arguments of a trigger; an interval or a name alone says which are meant."""
    if given is None or isinstance(given, Mapping):
        return given
    return {str(given): True} if given in _ONCE else {"processingTime": given}


def interval_ms(text: object) -> int:
    """Read an interval as Spark writes it, such as `1 second` or `2 minutes 500 ms`.

    Raises:
        OptionError: it is none.
    """
    ms = span_ms(text) if isinstance(text, str) else None
    if isinstance(text, timedelta) and text >= timedelta():
        ms = text // timedelta(milliseconds=1)
    if ms is not None and ms > WAIT_MAX_MS:
        raise OptionError(f"trigger: processingTime={text!r}: expected {WAIT_MAX_WORDS}")
    if ms is None:
        raise OptionError(
            f"trigger: processingTime={text!r} is no interval: expected a number and a unit, such "
            f"as '500 milliseconds', '1 second' or '2 minutes'"
        )
    return ms


class LoopSource(EpochSource, Protocol):
    """A source that plans a pipeline's epochs and may come to an end."""

    def stop_at_what_is_there(self) -> None:
        """Plan no further than what can be read now."""
        ...

    @property
    def is_behind(self) -> bool:
        """True if the newest epoch was cut short, and not because a user wants it so."""
        ...


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """An epoch that the loop has run.

    Args:
        began_s: the time at which the driver was asked for the epoch, on the wall clock.
        took_s: the time from then to the end of the epoch, planning included.
    """

    began_s: float
    took_s: float


class EpochLoop:
    """The loop of one run of a pipeline, epoch after epoch.

    Args:
        driver: runs an epoch at a time.
        source: plans epochs, and runs their tasks.
        trigger: when epochs begin.
        on_end: called after each epoch.
        strays_live_s: how long, after an epoch, attempts of its tasks that do not count may still
            begin to write; 0: no such attempts.
    """

    def __init__(
        self,
        driver: Driver,
        source: LoopSource,
        trigger: Trigger,
        on_end: Callable[[EpochEnded], None],
        strays_live_s: float = 0.0,
    ) -> None:
        self._driver = driver
        self._source = source
        self._trigger = trigger
        self._on_end = on_end
        self._strays_live_s = strays_live_s
        self._has_strays = False
        self._stopping = Event()
        self._woken = Event()
        self._waiting: SimpleQueue[tuple[Callable[[], None], Future[None]]] = SimpleQueue()
        self._looked = 0  # how often there was nothing to do
        self._has_work = True
        self._has_ended = False
        self._idle_since_s: float | None = None
        self._is_read_through = False

    @property
    def is_idle(self) -> bool:
        """True if the newest look found nothing to read, and no epoch runs since then."""
        return not (self._has_work or self._driver.runs_epoch)

    @property
    def idle_since_s(self) -> float | None:
        """The first of the looks that found nothing, by the monotonic clock; None: none did."""
        return None if self._driver.runs_epoch else self._idle_since_s

    @property
    def is_complete(self) -> bool:
        """True unless the trigger names an end that is not reached yet."""
        return self._is_read_through or not self._trigger.is_available_now

    @property
    def looks(self) -> int:
        """The number of times it found nothing to read."""
        return self._looked

    def look_soon(self) -> None:
        """Look for records now if it waits for some, whatever the trigger says."""
        if self.is_idle:
            self._woken.set()

    def stop(self) -> None:
        """Begin no further epoch."""
        self._stopping.set()
        self._woken.set()

    def between_epochs(self, do: Callable[[], None]) -> Future[None]:
        """Make the loop do something between two epochs."""
        done: Future[None] = Future()
        self._waiting.put((do, done))
        self._woken.set()
        return done

    @property
    def is_stopping(self) -> bool:
        """True if no further epoch begins."""
        return self._stopping.is_set()

    def run(self) -> None:
        """Run epochs until stopped; with availableNow, until the records present are read.

        Raises:
            TallystickError, or what the user's function raised: see `Driver.run_epoch`.
        """
        try:
            self._run()
        except BaseException:
            if self._stopping.is_set():
                self._driver.end()
            raise
        finally:
            self._has_ended = True
            self._do_what_waits()
        if self._has_strays:
            time.sleep(self._strays_live_s)
            self._driver.abort_strays()
        self._driver.end()

    def _run(self) -> None:
        if self._trigger.is_available_now:
            self._source.stop_at_what_is_there()
        is_noted = False
        cost_s = 0.0
        while not self._stopping.is_set():
            began, began_s, before_s = time.monotonic(), time.time(), time.thread_time()
            self._has_work = self._driver.run_next(self._source)
            took_s, worked_s = time.monotonic() - began, time.thread_time() - before_s
            self._do_what_waits()  # never before the first look: what is committed is known now
            if self._has_work:
                self._idle_since_s, is_noted = None, False
                self._has_strays = self._strays_live_s > 0
                self._on_end(EpochEnded(began_s, took_s))
                if not self._source.is_behind:  # the rest of an epoch that was cut is due too
                    self._pause(max(0.0, self._trigger.interval_ms / 1000 - took_s))
                continue
            self._looked += 1
            if self._trigger.is_available_now:
                self._is_read_through = True
                break
            self._idle_since_s = began if self._idle_since_s is None else self._idle_since_s
            idle_s = began - self._idle_since_s
            # A look that costs more than the one before is a rare one, such as a discovery.
            share_s, cost_s = min(worked_s, cost_s) / LOOK_SHARE, worked_s
            due_s = self._trigger.interval_ms / 1000 - took_s
            soon_s = min(max(IDLE_MIN_S, IDLE_SHARE * idle_s), IDLE_MAX_S)
            pause_s = max(soon_s, share_s, due_s)
            if max(idle_s, pause_s) >= IDLE_MAX_S and not is_noted:
                self._note_settled()
                is_noted = True
            self._pause(pause_s)

    def _pause(self, seconds: float) -> None:
        self._woken.wait(seconds)
        self._woken.clear()

    def _do_what_waits(self) -> None:
        while not self._waiting.empty():
            do, done = self._waiting.get()
            try:
                if self._has_ended:
                    raise TallystickError("the query has ended")
                do()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

    def _note_settled(self) -> None:
        """Note, once per pause, that nothing is left to do: for commands on the checkpoint."""
        try:
            self._driver.end()
        except StorageError as error:  # the next pause, or the end of the run, notes it
            logger.warning("that the newest epoch is settled could not be noted: %s", error)
