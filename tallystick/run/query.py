"""The handle of a running pipeline, as users of Spark's `StreamingQuery` know it."""

import logging
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from threading import Event, Thread
from typing import Any

from tallystick.errors import OptionError, RetriableError, TallystickError
from tallystick.run.loop import EpochEnded, EpochLoop
from tallystick.run.part_times import profile_text

logger = logging.getLogger(__name__)

PROGRESS_COUNT = 100
"""The number of epochs in `recentProgress`, as in Spark by default."""
STOP_TIMEOUT_S = 60.0


class Query:
    """A run of a pipeline, in a thread of its own.

    Args:
        name: the pipeline's.
        query_id: of its checkpoint; the same in each run.
        run_id: of this run.
        loop: makes the loop of epochs; is given the function that makes an epoch's progress.
        prepare: called in the thread before the first epoch.
        cancel: ends the running tasks.
        close: called when the run is over.
        describe: called after each epoch; returns its work and duration, as JSON types.
        rescale: changes the parallelism, between two epochs.
    """

    def __init__(
        self,
        name: str,
        query_id: str,
        run_id: str,
        *,
        loop: Callable[[Callable[[EpochEnded], dict[str, Any]]], EpochLoop],
        prepare: Callable[[], None],
        cancel: Callable[[], None],
        close: Callable[[], None],
        describe: Callable[[EpochEnded], dict[str, Any]],
        rescale: Callable[[int], None],
    ) -> None:
        self.name = name
        self.id = query_id
        self.runId = run_id
        self._prepare = prepare
        self._cancel = cancel
        self._close = close
        self._describe = describe
        self._rescale = rescale
        self._progress: deque[dict[str, Any]] = deque(maxlen=PROGRESS_COUNT)
        self._error: BaseException | None = None
        self._ended = Event()
        self._loop = loop(self._note)
        self._thread = Thread(target=self._run, name=f"tallystick {name}", daemon=True)

    def begin(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def isActive(self) -> bool:  # noqa: N802 - Spark's name for it
        """True if the run has not ended."""
        return not self._ended.is_set()

    @property
    def status(self) -> dict[str, Any]:
        """The current work of the run, in the form of Spark's `StreamingQuery.status`."""
        is_idle = self._loop.is_idle
        message = (
            "Stopped" if self._ended.is_set() else "Waiting for data" if is_idle else "Running"
        )
        return {
            "message": message,
            "isDataAvailable": not is_idle,
            "isTriggerActive": self.isActive and not is_idle,
        }

    @property
    def lastProgress(self) -> dict[str, Any] | None:  # noqa: N802
        """The progress of the newest epoch; None before the first."""
        return self._progress[-1] if self._progress else None

    @property
    def recentProgress(self) -> list[dict[str, Any]]:  # noqa: N802
        """The progress of the newest epochs, the newest last."""
        return list(self._progress)

    def profile(self) -> str:
        """Return a table of where the time of the newest epochs went (docs/performance.md)."""
        return profile_text(self.name, self.recentProgress)

    def exception(self) -> BaseException | None:
        """Return the error that ended the run; None if it runs, or ended in order."""
        return self._error

    def awaitTermination(self, timeout: float | None = None) -> bool | None:  # noqa: N802
        """Wait for the run's end.

        Args:
            timeout: seconds; None: as long as it takes.

        Returns:
            With a timeout, whether it has ended; else nothing.

        Raises:
            Exception: what the run ended with.
        """
        has_ended = self._ended.wait(timeout)
        if has_ended and self._error is not None:
            raise self._error
        return None if timeout is None else has_ended

    def processAllAvailable(self) -> None:  # noqa: N802
        """Wait until everything is committed that can be read now; for tests.

        Raises:
            Exception: what the run ended with.
        """
        seen = self._loop.looks
        while not self._ended.wait(0.01):
            if self._loop.looks > seen + 1:  # a look that began after this call
                return
            self._loop.look_soon()
        if self._error is not None:
            raise self._error

    def rescale(self, *, parallelism: int) -> None:
        """Go on with another parallelism from the next epoch on; returns when it is set.

        The key groups of all keyed steps are divided again, with any `parallelism` that their
        `process` was given; a later start has that of the pipeline again. Nothing else is restarted
        but resident tasks.

        Args:
            parallelism: how many tasks read, and how many hold the keys of each step.

        Raises:
            OptionError: it is less than 1, or more than a step has key groups; all is as before.
            TallystickError: the query has ended.
        """
        if parallelism < 1:
            raise OptionError(f"parallelism={parallelism}: expected 1 or more")
        done = self._loop.between_epochs(lambda: self._rescale(parallelism))
        while not self._ended.wait(0.05) and not done.done():
            pass
        if not done.done():
            raise TallystickError(f"pipeline {self.name!r} has ended")
        done.result()

    def stop(self) -> None:
        """End the run: the epoch in flight is aborted. Nothing happens where it has ended.

        Raises:
            TallystickError: it does not end.
        """
        self._loop.stop()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while not self._ended.wait(0.2):
            self._cancel()
            if time.monotonic() > deadline:
                raise TallystickError(
                    f"pipeline {self.name!r}: the run did not end within {STOP_TIMEOUT_S:.0f} s of "
                    f"stop(). Its transaction is aborted by the next start"
                )

    def _run(self) -> None:
        try:
            self._prepare()
            self._loop.run()
        except BaseException as error:
            is_ours = isinstance(error, TallystickError) and not isinstance(error, RetriableError)
            if self._loop.is_stopping and not is_ours:
                logger.info("pipeline %s was stopped in an epoch: %s", self.name, error)
            else:
                self._error = error
                logger.error("pipeline %s ends: %s: %s", self.name, type(error).__name__, error)
        finally:
            try:
                self._close()
            finally:
                self._ended.set()

    def _note(self, ended: EpochEnded) -> dict[str, Any]:
        began = datetime.fromtimestamp(ended.began_s, UTC)
        progress = {
            "id": self.id,
            "runId": self.runId,
            "name": self.name,
            "timestamp": began.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            **self._describe(ended),
        }
        self._progress.append(progress)
        return progress
