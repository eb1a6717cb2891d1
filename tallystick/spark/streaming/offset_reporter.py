"""Reports each epoch that Spark commits: shows its positions in the sources' groups.

One listener per session, one thread per query run: a cluster that does not answer holds up neither
Spark's listeners nor other queries. Only the newest positions of a run wait; older ones are moot.

At the end of a run, and at the end of the process, Spark's commit log is read, so that nothing
depends on events that are still on their way. What lies there may be another driver's: it only
moves groups forward.
"""

import atexit
import logging
import time
from collections.abc import Callable, Iterable
from threading import Lock, Thread
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
from tallystick.pipeline.group_offsets import (
    COUNTS,
    GroupOffsets,
    GroupOffsetsBeside,
    SourceClient,
    forget_transactions,
    in_transaction,
)
from tallystick.pipeline.listeners import observe, sources_of
from tallystick.source.offsets import SourceOffsets
from tallystick.spark.streaming.executions import (
    committed_batch,
    committed_sources,
    execution_of,
    source_options,
)
from tallystick.storage.file_storage import FileStorage

logger = logging.getLogger(__name__)

EXIT_WAIT_S = 10.0
"""The time the end of the process may wait for positions on their way to Kafka."""

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
    """Do something once when a run has ended, on its own thread; listen to its session.

    Args:
        run_id: Spark's id of the run.
        do: what to do.
        is_active: whether the run has not ended; else there may be no further event.
    """
    _at_end[run_id] = do
    if not is_active():
        _end(run_id)


def show_at_exit() -> None:
    """Show what runs have committed last, for a script that ends right after `query.stop()`."""
    deadline = time.monotonic() + EXIT_WAIT_S
    runs = list(_runs.values())
    for run in runs:
        run.groups.end()
    for run in runs:
        run.groups.close(max(0.0, deadline - time.monotonic()))


class Run:
    """One run of a query, with consumer groups for the positions of committed epochs.

    Args:
        query: the name, or the id.
        query_id: Spark's id of the query.
        run_id: Spark's id of the run.
        execution: Spark's object of the run, in the JVM.
        offsets: shows positions in the groups.
        previous: runs of the same query that may still be at work.
    """

    def __init__(
        self,
        query: str,
        query_id: str,
        run_id: str,
        execution: Any,
        offsets: GroupOffsets,
        previous: Iterable["Run"] = (),
    ) -> None:
        self.query = query
        self.query_id = query_id
        self._run_id = run_id
        self._execution = execution
        self._newest = -1  # the batch that was shown last
        self._lock = Lock()
        self.groups: GroupOffsetsBeside = GroupOffsetsBeside(
            offsets, [run.groups for run in previous], before_end=self.read_log
        )
        self.read_log()

    def tell(self, progress: StreamingQueryProgress) -> None:
        """Show the positions of a committed epoch."""
        self._show(progress.batchId, sources_of(progress), forward_only=False)

    def read_log(self) -> None:
        """Show what is committed by now and not reported by Spark: by this run, or by another."""
        try:
            batch_id = committed_batch(self._execution)
            if batch_id is not None and batch_id > self._newest:
                batch_id, sources = committed_sources(self._execution, batch_id)
                self._show(batch_id, sources, forward_only=True)
        except Exception as error:
            COUNTS[self.query].failures += 1
            logger.warning("query %s: its positions could not be shown: %s", self.query, error)

    def end(self) -> None:
        """Show the positions of the last epoch, and close the connections."""
        self.groups.close()
        _forget(self._run_id)

    def _show(self, batch_id: int, sources: Iterable[SourceOffsets], *, forward_only: bool) -> None:
        to_show = [
            source for source in sources if not in_transaction(self._run_id, source.cluster_id)
        ]
        with self._lock:
            if batch_id > self._newest:
                self._newest = batch_id
                self.groups.show(*to_show, forward_only=forward_only)


class Listener(StreamingQueryListener):
    """Carries Spark's events to the runs and observers; nothing here waits, or fails a query."""

    def __init__(self, spark: SparkSession, source_name: str) -> None:
        self._session = spark
        self._source_name = source_name
        self._names: dict[str, str] = {}

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        """Prepare the consumer groups of a started query, before its first epoch."""
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
                _runs[run_id] = Run(query, query_id, run_id, execution, groups, previous)
        except Exception as error:
            logger.warning(
                "query %s: its consumer groups will not show its positions, as the settings of "
                "its sources cannot be found: %s",
                query,
                type(error).__name__,  # the text may hold the options, and so secrets
            )

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        """Show the positions of an epoch that was committed."""
        progress = event.progress
        run_id = str(progress.runId)
        if run := _runs.get(run_id):
            run.tell(progress)
        observe(self._names.get(run_id, str(progress.id)), progress)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        """Show the positions again now and then while there is nothing to do."""
        if run := _runs.get(str(event.runId)):
            run.groups.show_again()

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        """End the run after its last epoch."""
        run_id = str(event.runId)
        if run := _runs.get(run_id):
            _in_thread(run_id, run.end)
        else:
            _forget(run_id)
        _end(run_id)
        observe(self._names.pop(run_id, str(event.id)), None)


def _mend(session: SparkSession, query_id: str, query: str) -> None:
    """Mend Spark's log of a query with a sink of ours; Spark reads the log right after."""
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
    return [SourceClient(options.group, options.config) for options in parsed]


def _end(run_id: str) -> None:
    do = _at_end.pop(run_id, None)
    if do is not None:
        _in_thread(run_id, do)


def _in_thread(run_id: str, do: Callable[[], None]) -> None:
    Thread(target=do, name=f"tallystick-end-{run_id}", daemon=True).start()


def _forget(run_id: str) -> None:
    _runs.pop(run_id, None)
    forget_transactions(run_id)
