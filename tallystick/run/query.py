"""A run of a pipeline: the handle as of Spark's `StreamingQuery`."""

import atexit
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from html import escape
from threading import Event, Thread
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeAlias

from tallystick.arguments import as_path, checked
from tallystick.checkpoint.requests import DRAIN_S, RESCALE, STOP, Inbox, Request
from tallystick.errors import (
    FunctionError,
    OptionError,
    RetriableError,
    TallystickError,
)
from tallystick.run.console import Console, is_logging_set_up
from tallystick.run.epoch_loop import EpochEnded, EpochLoop
from tallystick.run.part_times import profile_text
from tallystick.run.requests import RequestWatch
from tallystick.run.signals import INTERRUPTED, StopSignals, exit_code, is_interactive
from tallystick.source.offsets import from_text
from tallystick.text import WAIT_MAX_MS, WAIT_MAX_WORDS
from tallystick.words import unknown_name

logger = logging.getLogger(__name__)

PROGRESS_COUNT = 100
"""The number of epochs in `recentProgress`, as in Spark by default."""
STOP_TIMEOUT_S = 60.0
ABORT_S = 5.0
"""The longest time to abort an epoch that did not end by then."""
ANNOUNCE_S = 1.0
"""A longer drain is announced."""
POLL_S = 0.1
TOLD_SOON_S = 1.0
"""The time in which a program that waits for a run's end asks for the error."""
RUNNING: "list[Query]" = []
"""The runs of this process that have begun and not ended."""


def refuse_second(name: str, key: str) -> None:
    """Refuse a start of a pipeline that runs in this process already.

    Raises:
        OptionError: it runs; nothing was started, and it goes on.
    """
    for query in RUNNING:
        if query.name == name and query.key == key:
            raise OptionError(
                f"pipeline {name!r} runs in this process already, since "
                f"{query.started.astimezone():%H:%M:%S}, with checkpoint {key}. Stop it first, "
                f"with the stop() of the query that its start() returned; or give this one another "
                f"name and checkpoint. Nothing was started, and the other one goes on."
            )


def _seconds(given: Any) -> Any:
    """Return a number of seconds that a process can wait."""
    if isinstance(given, int | float) and not given <= WAIT_MAX_MS / 1000:
        raise ValueError(f"seconds, {WAIT_MAX_WORDS}")
    return given


Seconds: TypeAlias = Annotated[float, _seconds]


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
        key: no other run of this process may have the same; "": any may.
        console: prints lines about the run.
        explain: adds what is known of the reason to the error that ends the run.
        on_end: called at the end, with the error if there was one.
        save: writes a savepoint of the newest epoch; None: nothing can.
        inbox: the requests of operators to this run; None: there are none.
        kill: ends the processes that run tasks, at once.
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
        key: str = "",
        console: Console | None = None,
        explain: Callable[[BaseException], BaseException] = lambda error: error,
        on_end: Callable[[BaseException | None], None] = lambda _: None,
        save: Callable[[str], None] | None = None,
        inbox: Inbox | None = None,
        kill: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.key = key
        self.started = datetime.now(UTC)
        self._console = console or Console(name)
        self._explain = explain
        self._on_end = on_end
        self._save = save
        self._kill = kill
        self._is_aborted = False
        self.id = query_id
        self.runId = run_id
        self._prepare = prepare
        self._cancel = cancel
        self._close = close
        self._describe = describe
        self._rescale = rescale
        self._progress: deque[dict[str, Any]] = deque(maxlen=PROGRESS_COUNT)
        self._error: BaseException | None = None
        self._is_over = Event()
        """Set before the requests of operators are answered, for which the end waits."""
        self._ended = Event()
        self._is_error_told = Event()
        self._has_logging = is_logging_set_up()
        self._loop = loop(self._note)
        self._thread = Thread(target=self._run, name=f"tallystick {name}", daemon=True)
        self._requests = (
            None if inbox is None else RequestWatch(self._console, inbox, self._requested)
        )

    def begin(self) -> None:
        """Start the thread."""
        atexit.register(self._note_exit)
        RUNNING.append(self)
        self._thread.start()
        if self._requests is not None:
            self._requests.begin()

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
    def lag(self) -> int | None:
        """The number of offsets behind, after the newest epoch; None: not known yet."""
        progress = self.lastProgress
        sources = [] if progress is None else progress["sources"]
        ends = [(source["endOffset"], source["latestOffset"]) for source in sources]
        if not ends or not all(isinstance(text, str) for pair in ends for text in pair):
            return None
        return sum(
            max(0, latest - read.positions.get(partition, latest))
            for end, newest in ends
            for read in [from_text(end)]
            for partition, latest in from_text(newest).positions.items()
        )

    def __repr__(self) -> str:
        """Return name, state, newest epoch and lag."""
        return f"<Query {self._described()}>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self._described())}</pre>"

    def _described(self) -> str:
        if self.isActive:
            state = "waits for records" if self._loop.is_idle else "runs"
        else:
            state = "has ended" if self._error is None else f"failed: {self._error}"
        progress, lag = self.lastProgress, self.lag
        epoch = "no epoch yet" if progress is None else f"epoch {progress['batchId']}"
        behind = "" if lag is None else f", {lag:,} records behind"
        return f"{self.name}: {state}; {epoch}{behind}"

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
        if self._ended.is_set():
            self._is_error_told.set()
        return self._error

    @checked
    def awaitTermination(self, timeout: Seconds | None = None) -> bool | None:  # noqa: N802
        """Wait for the run's end; in the main thread, SIGINT and SIGTERM drain the run meanwhile.

        Drained are all runs of this process, as by `stop(drain=True)`; then the process ends with
        code 130 after SIGINT, 0 after SIGTERM, and 143 where an epoch was lost, or the trigger's
        end was not reached. A second SIGINT ends it at once. In a shell or notebook this returns
        instead. Handlers of signals that the program has set are left alone.

        Args:
            timeout: seconds; None: as long as it takes.

        Returns:
            With a timeout, whether it has ended; else nothing.

        Raises:
            Exception: what the run ended with.
            SystemExit: a signal has ended the run.
        """
        until_s = None if timeout is None else time.monotonic() + timeout
        with StopSignals(self._end_at_once) as signals:
            has_ended = self._wait(until_s, signals)
            if signals.first is not None:
                return self._end_by(signals.first)
        if has_ended:
            self._raise()
        return None if timeout is None else has_ended

    def _wait(self, until_s: float | None, signals: StopSignals) -> bool:
        """Wait for the end, the time, or a signal; True if the run has ended."""
        while True:
            wait_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            if signals.are_noted:
                wait_s = POLL_S if wait_s is None else min(POLL_S, wait_s)
            if self._ended.wait(wait_s):
                return True
            if signals.first is not None or (until_s is not None and time.monotonic() >= until_s):
                return False

    def _end_by(self, by: signal.Signals) -> bool:
        """End all runs of the process, then the process."""
        runs, name = [self, *(run for run in RUNNING if run is not self)], by.name
        for run in runs:
            run._loop.stop()
        until_s = time.monotonic() + DRAIN_S
        if not all(run._ended.wait(ANNOUNCE_S / len(runs)) for run in runs):
            self._console.farewell(
                f"{name}: finishing the running epoch, for {DRAIN_S:.0f} s at most; ^C ends at once"
            )
        are_drained = [run._has_ended_by(until_s) for run in runs]
        until_s = time.monotonic() + ABORT_S
        for run, is_drained in zip(runs, are_drained, strict=True):
            if not is_drained:
                run._abort(until_s)
            run._console.farewell(f"{name}: {run._end_text(is_drained=is_drained)}")
        for run in runs:
            run._raise()
        if is_interactive():
            return True
        is_complete = all(are_drained) and all(run._loop.is_complete for run in runs)
        raise SystemExit(exit_code(by, is_complete=is_complete))

    def _end_text(self, *, is_drained: bool) -> str:
        progress = self.lastProgress
        newest = "no epoch was run" if progress is None else f"epoch {progress['batchId']} was"
        if not is_drained:
            return (
                f"stopped; the running epoch did not end within {DRAIN_S:.0f} s: it is aborted, "
                f"nothing is lost, and it runs again at the next start"
            )
        if progress is None:
            return f"stopped in order; {newest}"
        return f"stopped in order; {newest} the last one, and is committed"

    def _has_ended_by(self, until_s: float) -> bool:
        return self._ended.wait(max(0.0, until_s - time.monotonic()))

    def _abort(self, until_s: float) -> bool:
        """End the running epoch; False if it has not ended by then."""
        self._is_aborted = True
        self._loop.stop()
        while not self._is_over.wait(0.2):
            self._cancel()
            if time.monotonic() > until_s:
                return False
        return True

    def _end_at_once(self) -> None:
        """End the process; the open transaction is aborted by the next start."""
        self._console.draw("")
        self._kill()
        os._exit(INTERRUPTED)

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
        self._raise()

    def _raise(self) -> None:
        """Raise the error that ended the run, without the frames of the run's own thread."""
        self._is_error_told.set()
        if self._error is not None:
            raise self._error.with_traceback(None) from None

    @checked
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
        self._rescaling(parallelism)()

    def _rescaling(self, parallelism: int) -> Callable[[], str]:
        """Order another parallelism; return the wait for the change."""
        if parallelism < 1:
            raise OptionError(f"parallelism={parallelism}: expected 1 or more")
        done = self._loop.between_epochs(lambda: self._rescale(parallelism))

        def wait() -> str:
            while not self._is_over.wait(0.05) and not done.done():
                pass
            if not done.done():
                raise TallystickError(f"pipeline {self.name!r} has ended")
            done.result()
            return f"goes on with parallelism {parallelism}"

        return wait

    def _requested(self, request: Request) -> Callable[[], str]:
        """Begin a request of an operator; return the wait for its result."""
        if request.kind == RESCALE and self._loop.is_stopping:
            raise TallystickError(f"pipeline {self.name!r} is being stopped, and begins no epoch")
        if request.kind == RESCALE:
            return self._rescaling(request.parallelism)
        if request.kind != STOP:
            raise OptionError(f"{request.kind!r} is no request that this version knows")
        self._loop.stop()

        def wait() -> str:
            is_drained = request.drain or bool(request.savepoint)
            place = request.savepoint or None
            self._stop(drain=is_drained, savepoint=place, timeout_s=request.timeout_s)
            if self._error is not None:
                raise self._error.with_traceback(None)
            if not is_drained:
                return "stopped; an epoch that was running is aborted, and runs again at the start"
            return self._end_text(is_drained=True)

        return wait

    @checked
    def stop(
        self,
        *,
        drain: bool = False,
        savepoint: Annotated[str, as_path] | None = None,
        timeout: Seconds = DRAIN_S,
    ) -> None:
        """End the run. Nothing happens where it has ended.

        Args:
            drain: finish and commit the running epoch first; else it is aborted, and runs again at
                the next start.
            savepoint: a new folder, or URI, for a savepoint of the last epoch; drains.
            timeout: how long the running epoch may take to end, in seconds.

        Raises:
            OptionError: the savepoint's folder cannot be used; the run has ended all the same.
            TallystickError: the epoch did not end in time, and was aborted; or it does not end.
            Exception: the run ended with an error before the savepoint was taken.
        """
        try:
            self._stop(drain=drain or savepoint is not None, savepoint=savepoint, timeout_s=timeout)
        finally:
            if self._is_over.is_set():
                self._ended.wait()

    def _stop(self, *, drain: bool, savepoint: str | None, timeout_s: float) -> None:
        """End the run, but for the requests that are still to be answered."""
        if drain:
            self._drain(timeout_s)
        elif not self._abort(time.monotonic() + STOP_TIMEOUT_S):
            raise TallystickError(
                f"pipeline {self.name!r}: the run did not end within {STOP_TIMEOUT_S:.0f} s of "
                f"stop(). Its transaction is aborted by the next start"
            )
        if savepoint is None:
            return
        self._raise()
        if self._save is None:
            raise OptionError(f"pipeline {self.name!r}: this run cannot write savepoints")
        self._save(savepoint)

    def _drain(self, timeout_s: float) -> None:
        self._loop.stop()
        if not self._is_over.wait(timeout_s):
            self._abort(time.monotonic() + STOP_TIMEOUT_S)
            raise TallystickError(
                f"pipeline {self.name!r}: the running epoch did not end within {timeout_s:g} s of "
                f"stop(drain=True), and was aborted. Nothing is lost: it runs again at the next "
                f"start. Give it a longer timeout="
            )

    def _run(self) -> None:
        try:
            self._prepare()
            self._loop.run()
        except BaseException as error:
            may_be_of_stop = isinstance(error, RetriableError | FunctionError)
            is_ours = isinstance(error, TallystickError) and not may_be_of_stop
            if self._is_aborted and not is_ours:
                logger.info("pipeline %s was stopped in an epoch: %s", self.name, error)
            else:
                self._error = self._explain(error)
        finally:
            try:
                self._close()
            except Exception as error:  # the run's own error counts
                self._error = self._error or self._explain(error)
            finally:
                atexit.unregister(self._note_exit)
                if self in RUNNING:
                    RUNNING.remove(self)
                try:
                    self._on_end(self._error)
                finally:
                    self._is_over.set()
                    if self._requests is not None:
                        self._requests.close()
                    self._ended.set()
        if self._error is not None:
            self._log(self._error)

    def _log(self, error: BaseException) -> None:
        """Log the end; without logging of the user's only if nobody asks for the error soon.

        Both would be printed to the same place, one right after the other. Python sets logging up
        by itself where a library, as PySpark, logs without a logger: that is not the user's.
        """
        if not self._has_logging and self._is_error_told.wait(TOLD_SOON_S):
            return
        name = "" if isinstance(error, FunctionError) else f"{type(error).__name__}: "
        logger.error("pipeline %s ends: %s%s", self.name, name, error)

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

    def _note_exit(self) -> None:
        """Tell a program that ends while the run is at work; called as the process ends."""
        if self.isActive:
            logger.warning(
                "pipeline %r was at work when the program ended, and ends with it: wait for it "
                "with query.awaitTermination(), or end it with query.stop()",
                self.name,
            )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Raise an error about an unknown attribute, with the name that is meant."""
            if name.startswith("_"):
                raise AttributeError(f"'Query' object has no attribute {name!r}")
            raise unknown_name("Query", name, dir(self)) from None
