"""Hears of every epoch that Spark commits, and shows its positions in the sources' groups.

One listener per session, one thread per query run: a cluster that does not answer holds up neither
Spark's listeners nor other queries. Only the newest positions of a run wait; older ones are moot.

At the end of a run, and at the end of the process, Spark's commit log is read, so that nothing
depends on events that are still on their way. What lies there may be another driver's: it only
moves groups forward.
"""

import atexit
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from threading import Condition, Thread
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)

from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.options.source import parse_source_options
from tallystick.source.offsets import SourceOffsets
from tallystick.spark.progress import sources_of
from tallystick.spark.streaming.executions import (
    committed_batch,
    committed_sources,
    execution_of,
    source_options,
)
from tallystick.spark.streaming.group_offsets import (
    COUNTS,
    GroupOffsets,
    SourceClient,
    forget_transactions,
    in_transaction,
)
from tallystick.storage.file_storage import FileStorage

logger = logging.getLogger(__name__)

EXIT_WAIT_S = 10.0
"""How long the end of the process may wait for positions on their way to Kafka."""

PREVIOUS_WAIT_S = 10.0
"""How long a run of a query may wait for its last one to show what it knows."""

Observer = Callable[[str, Mapping[str, Any] | None], None]
"""Told a query's name, or id, and each progress, Spark's or our loop's; None once it has ended."""
OBSERVERS: list[Observer] = []

LoggedBatch = list[SourceOffsets]
"""From Spark's log: the end offsets of those sources of a micro-batch that are ours."""

_listening: set[str] = set()
_runs: dict[str, "Run"] = {}
_at_end: dict[str, Callable[[], None]] = {}


def listen(spark: SparkSession, source_name: str) -> None:
    """Show the positions of every query that is started in this session from now on.

    Calling it again changes nothing. Spark Connect runs queries in another process: nothing is
    shown there.

    Args:
        spark: the session.
        source_name: the name of our format.
    """
    if not hasattr(spark, "_jsparkSession"):
        return
    session_id = spark._jsparkSession.sessionUUID()
    if session_id in _listening:
        return
    if not _listening:
        atexit.register(show_at_exit)
    spark.streams.addListener(Listener(spark, source_name))
    _listening.add(session_id)


def at_end(run_id: str, do: Callable[[], None], is_active: Callable[[], bool]) -> None:
    """Do something once when a run has ended, on a thread of its own; its session is listened to.

    Args:
        run_id: Spark's id of the run.
        do: what to do.
        is_active: whether the run has not ended; else there may be no event any more.
    """
    _at_end[run_id] = do
    if not is_active():
        _end(run_id)


def show_at_exit() -> None:
    """Show what runs have committed last, for a script that ends right after `query.stop()`."""
    deadline = time.monotonic() + EXIT_WAIT_S
    runs = list(_runs.values())
    for run in runs:
        run.end()
    for run in runs:
        run.join(max(0.0, deadline - time.monotonic()))
        if run.is_alive():
            logger.warning(
                "query %s: the process ends before its consumer groups show its last positions; "
                "they are committed all the same, and shown when the query is started again",
                run.query,
            )


class Run(Thread):
    """Shows the positions of one query run.

    Args:
        query: its name, or id.
        query_id: Spark's id of the query.
        run_id: Spark's id of the run.
        execution: Spark's object of the run, in the JVM.
        offsets: what its groups show.
        previous: runs of the same query that may still be at work.
    """

    def __init__(
        self,
        query: str,
        query_id: str,
        run_id: str,
        execution: Any,
        offsets: GroupOffsets,
        previous: Sequence["Run"] = (),
    ) -> None:
        super().__init__(name=f"tallystick-offsets-{query}", daemon=True)
        self.query = query
        self.query_id = query_id
        self._run_id = run_id
        self._execution = execution
        self._offsets = offsets
        self._previous = tuple(previous)
        self._first = committed_batch(execution)
        self._told = -1 if self._first is None else self._first
        self._caught_up = False
        self._changed = Condition()
        self._newest: StreamingQueryProgress | LoggedBatch | None = None
        self._woken = True
        self._ending = False
        self._replaced = False

    def tell(self, progress: StreamingQueryProgress) -> None:
        """An epoch is committed."""
        with self._changed:
            self._told = progress.batchId
            self._newest = progress  # parsed in the thread, unless it is moot by then
        self.wake()

    def wake(self) -> None:
        """Try again what could not be shown, if there is anything."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def end(self) -> None:
        """There will be no further epoch."""
        with self._changed:
            self._ending = True
            self._changed.notify()

    def replace(self) -> None:
        """A newer run of the query takes over: nothing more is shown here."""
        self._replaced = True

    def run(self) -> None:
        """Serve until the end."""
        try:
            self._wait_for_previous()
            while not self._ended():
                self._try(self._show)
            self._try(self._read_log)
            self._try(self._show)
        finally:
            self._offsets.close()
            _forget(self._run_id)

    def _wait_for_previous(self) -> None:
        """Two runs of a query at work at once could each put the other's positions back."""
        deadline = time.monotonic() + PREVIOUS_WAIT_S
        for run in self._previous:
            run.join(max(0.0, deadline - time.monotonic()))
            run.replace()
        self._previous = ()

    def _ended(self) -> bool:
        """Wait for something to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._woken or self._ending)
            self._woken = False
            return self._ending

    def _try(self, do: Callable[[], None]) -> None:
        """Log whatever fails, but for what Kafka refuses, which `GroupOffsets` logs."""
        try:
            do()
        except Exception as error:
            COUNTS[self.query].failures += 1
            logger.warning("query %s: its positions could not be shown: %s", self.query, error)

    def _show(self) -> None:
        """Show the newest epoch; before the first one, what an earlier run may not have shown."""
        if self._replaced:
            return
        with self._changed:
            newest = self._newest
        if newest is None:
            if self._first is not None and not self._caught_up:
                _, sources = committed_sources(self._execution, self._first)
                self._caught_up = self._offsets.show(sources, forward_only=True)
            return
        is_logged = isinstance(newest, list)
        sources = newest if isinstance(newest, list) else list(sources_of(newest))
        left = [s for s in sources if not in_transaction(self._run_id, s.cluster_id)]
        if self._offsets.show(left, forward_only=is_logged):
            with self._changed:
                self._newest = None if self._newest is newest else self._newest
                self._caught_up = True

    def _read_log(self) -> None:
        """Take what is committed by now, and Spark has not told of: by this run, or by another."""
        batch_id = committed_batch(self._execution)
        if batch_id is None or batch_id <= self._told:
            return
        batch_id, sources = committed_sources(self._execution, batch_id)
        with self._changed:
            if batch_id > self._told:
                self._newest = sources


class Listener(StreamingQueryListener):
    """Carries Spark's events to the runs and observers; nothing here waits, or fails a query."""

    def __init__(self, spark: SparkSession, source_name: str) -> None:
        self._session = spark
        self._source_name = source_name
        self._names: dict[str, str] = {}

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        """Called while the query starts, and before its first epoch."""
        run_id, query = str(event.runId), event.name or str(event.id)
        self._names[run_id] = query
        query_id = str(event.id)
        _mend(self._session, query_id, query)
        try:
            execution = execution_of(self._session, query_id)
            clients = _clients(source_options(execution, self._source_name))
            if any(client.group for client in clients):
                previous = [run for run in list(_runs.values()) if run.query_id == query_id]
                groups = GroupOffsets(query, clients)
                run = Run(query, query_id, run_id, execution, groups, previous)
                _runs[run_id] = run
                run.start()
        except Exception as error:
            logger.warning(
                "query %s: its consumer groups will not show its positions, as the settings of "
                "its sources cannot be found: %s",
                query,
                type(error).__name__,  # the text may hold the options, and so secrets
            )

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        """Called after an epoch is committed."""
        progress = event.progress
        run_id = str(progress.runId)
        if run := _runs.get(run_id):
            run.tell(progress)
        observe(self._names.get(run_id, str(progress.id)), progress)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        """Called now and then while there is nothing to do."""
        if run := _runs.get(str(event.runId)):
            run.wake()

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        """Called after the last epoch."""
        run_id = str(event.runId)
        if run := _runs.get(run_id):
            run.end()
        else:
            _forget(run_id)
        _end(run_id)
        observe(self._names.pop(run_id, str(event.id)), None)


def _mend(session: SparkSession, query_id: str, query: str) -> None:
    """Mend the log of a query that one of our sinks commits; Spark reads it right after this."""
    try:
        location = str(execution_of(session, query_id).resolvedCheckpointRoot())
        folder = CheckpointFolder(FileStorage(location))
        if folder.manifest_paths():
            folder.log.mend()
    except Exception as error:
        logger.warning(
            "query %s: its log is not looked through for what a power cut may have damaged: %s",
            query,
            error,
        )


def _clients(sources: list[dict[str, str]]) -> list[SourceClient]:
    parsed = [parse_source_options(options, streaming=True) for options in sources]
    return [SourceClient(each.group, each.config) for each in parsed]


def observe(query: str, progress: Mapping[str, Any] | None) -> None:
    """Tell all observers; see `Observer`."""
    for observer in OBSERVERS:
        try:
            observer(query, progress)
        except Exception:
            logger.exception("query %s: an observer of its progress failed", query)


def _end(run_id: str) -> None:
    do = _at_end.pop(run_id, None)
    if do is not None:
        Thread(target=do, name=f"tallystick-end-{run_id}", daemon=True).start()


def _forget(run_id: str) -> None:
    _runs.pop(run_id, None)
    forget_transactions(run_id)
