"""The loop of a pipeline's epochs: begin one when it is due, until it is stopped or has read all.

The driver decides what an epoch is and whether it happened; the loop only asks for the next one.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event
from typing import Protocol

from tallystick.errors import StorageError, TallystickError
from tallystick.ports import EpochSource
from tallystick.run.driver import Driver
from tallystick.run.triggers import Trigger

logger = logging.getLogger(__name__)

IDLE_MIN_S = 0.005
IDLE_MAX_S = 0.1
"""How long to wait before Kafka is asked again for new records."""
IDLE_SHARE = 0.25
"""How much longer, at most, records wait for being that long in coming: of the time without any."""


class LoopSource(EpochSource, Protocol):
    """A source that plans a pipeline's epochs, and that may have an end."""

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
        began_s: when it was asked for, on the wall clock.
        took_s: from there to its end, planning included.
    """

    began_s: float
    took_s: float


class EpochLoop:
    """Runs the epochs of one run of a pipeline.

    Args:
        driver: runs one at a time.
        source: plans them, and runs their tasks.
        trigger: when one begins.
        on_end: told after each epoch.
    """

    def __init__(
        self,
        driver: Driver,
        source: LoopSource,
        trigger: Trigger,
        on_end: Callable[[EpochEnded], None],
    ) -> None:
        self._driver = driver
        self._source = source
        self._trigger = trigger
        self._on_end = on_end
        self._stopping = Event()
        self._woken = Event()
        self._waiting: SimpleQueue[tuple[Callable[[], None], Future[None]]] = SimpleQueue()
        self._looked = 0  # how often there was nothing to do
        self._has_work = True
        self._has_ended = False

    @property
    def is_idle(self) -> bool:
        """True if the newest look found nothing to read."""
        return not self._has_work

    @property
    def looks(self) -> int:
        """How often it found nothing to read."""
        return self._looked

    def stop(self) -> None:
        """Begin no further epoch."""
        self._stopping.set()
        self._woken.set()

    def between_epochs(self, do: Callable[[], None]) -> Future[None]:
        """Have the loop do something between two epochs."""
        done: Future[None] = Future()
        self._waiting.put((do, done))
        self._woken.set()
        return done

    @property
    def is_stopping(self) -> bool:
        """True if no further epoch begins."""
        return self._stopping.is_set()

    def run(self) -> None:
        """Run until stopped, or until all is read that was there.

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
        self._driver.end()

    def _run(self) -> None:
        if self._trigger.is_available_now:
            self._source.stop_at_what_is_there()
        idle_since: float | None = None
        is_noted = False
        while not self._stopping.is_set():
            began, began_s = time.monotonic(), time.time()
            self._has_work = self._driver.run_next(self._source)
            took_s = time.monotonic() - began
            self._do_what_waits()  # never before the first look: what is committed is known now
            if self._has_work:
                idle_since, is_noted = None, False
                self._on_end(EpochEnded(began_s, took_s))
                if not self._source.is_behind:  # the rest of an epoch that was cut is due too
                    self._pause(max(0.0, self._trigger.interval_ms / 1000 - took_s))
                continue
            self._looked += 1
            if self._trigger.is_available_now:
                break
            idle_since = began if idle_since is None else idle_since
            idle_s = began - idle_since
            if idle_s >= IDLE_MAX_S and not is_noted:
                self._note_settled()
                is_noted = True
            self._pause(min(max(IDLE_MIN_S, IDLE_SHARE * idle_s), IDLE_MAX_S))

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
        """Note that nothing is left to do, once per pause: who looks at the checkpoint reads it."""
        try:
            self._driver.end()
        except StorageError as error:  # the next pause, or the end of the run, notes it
            logger.warning("that the newest epoch is settled could not be noted: %s", error)
