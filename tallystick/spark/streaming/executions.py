"""Spark's own objects of running queries: identity, options, offsets and commit log."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from tallystick.checkpoint.spark_log import replaced
from tallystick.errors import OptionError, QueryEndedError, TallystickError
from tallystick.source.offsets import SourceOffsets, parse_source

NO_OFFSETS = "-"
"""The entry in Spark's log of a source that has no offset yet."""


@dataclass(frozen=True, slots=True)
class QueryRun:
    """The run of a streaming query to which a micro-batch belongs."""

    spark: SparkSession
    query_id: str
    query_name: str | None
    checkpoint: str
    trigger_interval_ms: int | None


def current_run(spark: SparkSession) -> QueryRun:
    """Return the run that the calling micro-batch belongs to.

    Raises:
        OptionError: the caller is not in `foreachBatch` of a classic (not Connect) session.
    """
    query_id = query_id_of(spark)
    execution = execution_of(spark, query_id)
    trigger = execution.trigger()
    timed = trigger.getClass().getSimpleName() == "ProcessingTimeTrigger"
    return QueryRun(
        spark=spark,
        query_id=query_id,
        query_name=execution.name(),
        checkpoint=str(execution.resolvedCheckpointRoot()),
        trigger_interval_ms=int(trigger.intervalMs()) if timed else None,
    )


def current_run_id(spark: SparkSession) -> str:
    """Return Spark's id of the run that the calling micro-batch belongs to.

    Not the thread's job group, which is the same at first: a user's function may set its own.

    Raises:
        OptionError: as `current_run`.
    """
    return str(execution_of(spark, query_id_of(spark)).runId())


def query_id_of(spark: SparkSession) -> str:
    """Return Spark's id of the query whose micro-batch a session is of.

    The session does, for each query has a copy of its own; for rows of another session the thread
    does, if Spark calls it or it takes over the calls meant for the one that Spark calls.

    Raises:
        OptionError: it is none's.
    """
    queries = spark._jsparkSession.sharedState().activeStreamingQueries()
    of_thread = spark.sparkContext.getLocalProperty("sql.streaming.queryId")
    for query_id in sorted(queries, key=lambda query_id: str(query_id) != of_thread):
        query = queries.get(query_id)
        if query is not None and query.sparkSessionForStream().equals(spark._jsparkSession):
            return str(query.id())
    if of_thread is not None:
        return of_thread
    raise OptionError(
        "KafkaSink is for writeStream.foreachBatch(sink): call it from there only, with the rows "
        "of the micro-batch"
    )


def execution_of(spark: SparkSession, query_id: str) -> Any:
    """Return Spark's own object of a running query, in the JVM.

    Raises:
        QueryEndedError: it runs no more.
    """
    jvm: Any = spark.sparkContext._jvm
    queries = spark._jsparkSession.sharedState().activeStreamingQueries()
    execution = queries.get(jvm.java.util.UUID.fromString(query_id))
    if execution is None:
        raise QueryEndedError(f"query {query_id} has ended")
    return execution


def active_runs(spark: SparkSession) -> set[str]:
    """Return the ids of all runs in this process that have not ended, of any session."""
    queries = spark._jsparkSession.sharedState().activeStreamingQueries()
    running = [queries.get(query_id) for query_id in list(queries)]  # None: it has ended just now
    return {str(query.runId()) for query in running if query is not None}


def runs_in(spark: SparkSession, batch_id: int) -> dict[str, str]:
    """Return the runs whose `foreachBatch` function may be at work on a micro-batch of this number.

    Returns:
        Their checkpoints by their ids, of any session.
    """
    queries = spark._jsparkSession.sharedState().activeStreamingQueries()
    return {
        str(query.runId()): str(query.resolvedCheckpointRoot())
        for query in [queries.get(query_id) for query_id in list(queries)]
        if query is not None and query.sink().getClass().getSimpleName() == "ForeachBatchSink"
        if query.status().isTriggerActive()
        if query.getLatestExecutionContext().batchId() == batch_id
    }


def session_of(spark: SparkSession) -> SparkSession:
    """Return the session in which the micro-batch's query was started; Spark gives it a clone."""
    started_in = execution_of(spark, query_id_of(spark)).sparkSession()
    return SparkSession(spark.sparkContext, started_in)


def source_options(execution: Any, source_name: str) -> list[dict[str, str]]:
    """Return the options of each source of a kind in a running query; they may hold secrets."""
    leaves = [
        leaf
        for leaf in _items(execution.analyzedPlan().collectLeaves())
        if leaf.getClass().getSimpleName() == "StreamingRelationV2"
    ]
    ours = [leaf for leaf in leaves if leaf.sourceName().lower() == source_name]
    return [dict(leaf.extraOptions().asCaseSensitiveMap()) for leaf in ours]


def committed_batch(execution: Any) -> int | None:
    """Return the newest micro-batch that Spark's commit log holds; None if there is none.

    The log of a temporary checkpoint goes with its query: then the last progress of the run counts.
    """
    try:
        newest = execution.commitLog().getLatestBatchId()
        if newest.isDefined():
            return int(newest.get())
    except Py4JJavaError:
        pass  # its folder is deleted
    progress = execution.lastProgress()
    return None if progress is None else int(progress.batchId())


def committed_sources(execution: Any, batch_id: int) -> tuple[int, list[SourceOffsets]]:
    """Return a committed micro-batch, and the end offsets of our sources in the micro-batch."""
    try:
        entry = execution.offsetLog().get(batch_id)
        defined = [offset for offset in _items(entry.get().offsets()) if offset.isDefined()]
        texts = [offset.get().json() for offset in defined]
    except Py4JJavaError:
        progress = execution.lastProgress()
        if progress is None:
            raise
        batch_id = int(progress.batchId())
        texts = [source.endOffset() for source in progress.sources()]
    parsed = [parse_source(text or "") for text in texts]
    return batch_id, [source for source in parsed if source is not None]


def check_is_read(
    spark: SparkSession, location: str, batch_id: int, logged: tuple[str, ...]
) -> None:
    """Check that the logged end offsets of the running micro-batch are those that Spark reads to.

    On an object store another query's entry may replace it. A stream that is used twice has two
    lines in the log, and one end.
    """
    ends = execution_of(spark, query_id_of(spark)).availableOffsets().values()
    read = sorted({end.json() for end in _items(ends)})
    if read != sorted(set(logged) - {NO_OFFSETS}):
        raise TallystickError(replaced(location, batch_id, logged, read))


def _items(sequence: Any) -> Iterator[Any]:
    """Return the items of a Scala collection."""
    iterator = sequence.iterator()
    while iterator.hasNext():
        yield iterator.next()
