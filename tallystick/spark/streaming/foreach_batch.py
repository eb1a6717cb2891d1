"""Structured Streaming's call per micro-batch: the bridge from its checkpoint to ours.

Spark writes `offsets/N` before it calls and `commits/N` after; both hold per source a line of JSON.
That log and our manifests share one checkpoint location, so they are found, copied and lost
together. The id of the query lives there too and is the lineage of our manifests.

A driver per run and an engine per micro-batch run the epochs; `KafkaSink.write` is a single epoch.
"""

import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from threading import Lock

from pyspark.sql import DataFrame

from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.checkpoint.forks import refuse_fork
from tallystick.checkpoint.savepoint_folder import refuse_savepoint
from tallystick.checkpoint.spark_log import LoggedBatch, SparkLog
from tallystick.epoch.facts import Request
from tallystick.epoch.manifest import Identity
from tallystick.epoch.micro_batches import failure_paths
from tallystick.epoch.protocol import EpochRan
from tallystick.epoch.transactional_ids import batch_name, check_name
from tallystick.errors import DataLossError, OptionError, QueryEndedError, TallystickError
from tallystick.pipeline.group_offsets import shown_in_transaction
from tallystick.pipeline.sinks import Sinks, engine_of
from tallystick.pipeline.topology import OutputTopology
from tallystick.ports import Engine
from tallystick.run.driver import Driver
from tallystick.spark.cluster import Cluster
from tallystick.spark.engine import DataFrameEngine
from tallystick.spark.streaming import FORMAT, check_pyspark
from tallystick.spark.streaming.executions import (
    NO_OFFSETS,
    QueryRun,
    active_runs,
    check_is_read,
    current_run,
    current_run_id,
    runs_in,
    session_of,
)
from tallystick.spark.streaming.micro_batch import run_micro_batch, second_call
from tallystick.spark.streaming.offset_reporter import at_end, listen
from tallystick.state.catalog import StepState
from tallystick.storage.file_storage import FileStorage
from tallystick.values import Producer

logger = logging.getLogger(__name__)


def lineage_of(storage: FileStorage, query_id: str) -> str:
    """Return the query id stored in a checkpoint; raise unless it is the running query's."""
    stored = CheckpointFolder(storage).lineage()
    if stored != query_id:
        raise DataLossError(
            f"checkpoint {storage.location}: its metadata names query {stored}, the running one is "
            f"{query_id}: the checkpoint was replaced under a running query"
        )
    return query_id


@dataclass(frozen=True)
class Batch:
    """A micro-batch: the rows, and Spark's log of the end offsets of sources."""

    rows: DataFrame
    batch_id: int
    logged: LoggedBatch
    log: SparkLog

    @property
    def sources(self) -> tuple[str, ...]:
        """The end offsets of the sources."""
        return self.logged.sources

    @property
    def timestamp_ms(self) -> int:
        """The processing time in Spark's log."""
        return self.logged.timestamp_ms

    @property
    def previous_sources(self) -> tuple[str, ...]:
        """The end offsets of the micro-batch before; none before the first."""
        return self.log.batch(self.batch_id - 1).sources if self.batch_id > 0 else ()


MakeDriver = Callable[[QueryRun, Identity, FileStorage], Driver]
MakeEngine = Callable[[Batch], Engine]
AtEnd = Callable[[DataFrame, str, Callable[[], None]], None]
"""Takes a micro-batch's rows and run; returns the function to call when the run has ended."""


@dataclass
class _Witness:
    """An engine that runs epochs by another engine, and remembers having run one."""

    engine: Engine
    has_run: bool = False

    def run_epoch(
        self, checkpoint_id: int, producer: Producer, state: tuple[StepState, ...]
    ) -> EpochRan:
        """See `ports.Engine.run_epoch`."""
        self.has_run = True
        return self.engine.run_epoch(checkpoint_id, producer, state)


@dataclass(frozen=True, slots=True)
class _OpenRun:
    """The parts of a query run that all epochs share."""

    run_id: str
    folder: CheckpointFolder
    driver: Driver


@dataclass(slots=True)
class _Call:
    """One call of a sink for a micro-batch, with the outcome as far as it is known."""

    rows: DataFrame
    batch_id: int
    is_first: bool = False  # in its micro-batch
    is_noted: bool = False  # that it failed


class EpochRunner:
    """The function that Spark calls with each micro-batch of a query, to run an epoch.

    A runner serves one query at a time; for several see `RunnerPerRun`.

    Args:
        name: the pipeline's name; None: the query's name, or its id.
        make_driver: called once per run of a query.
        make_engine: called once per micro-batch.
        accepted: the decisions that a person stated.
        close: called when the run is over, perhaps more than once.
    """

    def __init__(
        self,
        name: str | None,
        make_driver: MakeDriver,
        make_engine: MakeEngine,
        accepted: frozenset[str],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._make_driver = make_driver
        self._make_engine = make_engine
        self._accepted = accepted
        self._close = close
        self._opened: _OpenRun | None = None
        self._called: int | None = None  # the newest micro-batch that was handed to the driver
        self._failed: BaseException | None = None  # what the first call that failed has raised
        self._turn = Lock()  # of the calls: a function may make them from several threads
        self._lock = Lock()
        self._is_running = self._has_ended = False

    def __call__(self, rows: DataFrame, batch_id: int) -> None:
        """Run a micro-batch as an epoch; return after the commit, raise without a commit."""
        self._in_turn(self._take, _Call(rows, batch_id))

    def _in_turn(self, take: Callable[[_Call], None], call: _Call) -> None:
        try:
            with self._turn:
                take(call)
        except BaseException as error:
            if not call.is_noted:  # a time limit of the user's own may end a call anywhere
                self._fail_with_note(error, call)
            raise

    def _take(self, call: _Call) -> None:
        with self._lock:
            self._is_running = True
        try:
            self._run_for_user(call)
        finally:
            with self._lock:
                self._is_running = False
                has_ended = self._has_ended
            if has_ended:
                self._close()

    def end(self) -> None:
        """Close after the run, at once or after the epoch for which Spark no longer waits."""
        with self._lock:
            self._has_ended = True
            is_running = self._is_running
        if not is_running:
            self._close()

    def refuse_another(self, rows: DataFrame, batch_id: int) -> None:
        """Refuse a second sink in the same function of `foreachBatch`.

        Raises:
            SecondCallError: always. The checkpoint notes that the micro-batch is partial, with the
                rows of the first sink's call only, or failed. A function that catches the error
                gets no further with the first sink.
        """
        self._in_turn(self._refuse_another, _Call(rows, batch_id))

    def _refuse_another(self, call: _Call) -> None:
        name = self._name_in(current_run(call.rows.sparkSession))
        refusal = second_call(name, call.batch_id, "another KafkaSink")
        self.fail(refusal)
        self._note_failure(call)
        raise refusal

    def fail(self, error: BaseException) -> None:
        """Refuse further writes: a call's micro-batch cannot be known."""
        self._failed = self._failed or error

    def fail_with_note(
        self, error: BaseException, rows: DataFrame, batch_id: int, checkpoint: str
    ) -> None:
        """Refuse further writes after the call under way, and note that a call has failed."""
        self._fail_with_note(error, _Call(rows, batch_id), checkpoint)

    def _fail_with_note(self, error: BaseException, call: _Call, checkpoint: str = "") -> None:
        with self._turn:
            self.fail(error)
            self._note_failure(call, checkpoint)

    def _run_for_user(self, call: _Call) -> None:
        if self._failed is not None or call.batch_id == self._called:
            self._note_failure(call)
            refusal = self._refusal(call)
            self.fail(refusal)
            raise refusal from self._failed
        call.is_first, self._called = True, call.batch_id
        try:
            self._run(call.rows, call.batch_id)
        except BaseException as error:
            self._failed = error
            self._note_failure(call)
            raise

    def _refusal(self, call: _Call) -> TallystickError:
        if self._failed is None:
            return second_call(self._name_in(current_run(call.rows.sparkSession)), call.batch_id)
        return TallystickError(
            f"micro-batch {call.batch_id}: an earlier call of this sink failed ({self._failed}), "
            f"and the function of foreachBatch went on. Nothing was written. Do not catch what "
            f"the sink raises: Spark takes a micro-batch whose function returns for done. "
            f"Start the query again."
        )

    def _note_failure(self, call: _Call, checkpoint: str = "") -> None:
        """Note a failed call for the next run: the function may return, and Spark log an end.

        A second call in a micro-batch is noted as such: the first call, or the run before, may
        have committed the micro-batch, even if that call failed.
        """
        number, opened = call.batch_id, self._opened
        committed = "" if opened is None else opened.driver.coordinator.manifest_path(number)
        is_second = not call.is_first and number == self._called
        note(call.rows, number, committed, checkpoint, is_second=is_second)
        call.is_noted = True

    def _run(self, rows: DataFrame, batch_id: int) -> None:
        run_id, opened = current_run_id(rows.sparkSession), self._opened
        if opened is None or opened.run_id != run_id:
            # Seen only when it is complete: parts of two runs must never be mixed.
            self._opened = opened = self._open(run_id, current_run(rows.sparkSession))
        folder, log = opened.folder, opened.folder.log
        log.sync(batch_id)
        logged = log.batch(batch_id)
        check_is_read(rows.sparkSession, folder.location, batch_id, logged.sources)
        engine = _Witness(self._make_engine(Batch(rows, batch_id, logged, log)))
        request = Request(batch_id, logged.sources)
        run_micro_batch(opened.driver, folder, request, engine)
        shown_in_transaction(run_id, opened.driver.cluster_id)
        if not engine.has_run and folder.has_sparks_state:
            # Committed by an earlier run. Spark wants its own state of this micro-batch all the
            # same, and it comes about by running the plan; the rows of it are in Kafka already.
            rows.write.format("noop").mode("overwrite").save()

    def _name_in(self, run: QueryRun) -> str:
        return self._name or run.query_name or run.query_id

    def _open(self, run_id: str, run: QueryRun) -> _OpenRun:
        storage = FileStorage(run.checkpoint)
        refuse_savepoint(storage)
        refuse_fork(
            storage,
            "A query of Structured Streaming would write where the original does: start the "
            "pipeline there, or name another checkpoint for the query.",
        )
        name = self._name_in(run)
        check_name(name)
        identity = Identity(
            pipeline=name,
            lineage=lineage_of(storage, run.query_id),
            checkpoint=storage.location,
            accepted=self._accepted,
        )
        driver = self._make_driver(run, identity, storage)
        return _OpenRun(run_id, CheckpointFolder(storage), driver)


def note(
    rows: DataFrame,
    batch_id: int,
    manifest_path: str = "",
    checkpoint: str = "",
    *,
    is_second: bool = False,
) -> None:
    """Leave notes in the checkpoint of a micro-batch that a call for it failed.

    Args:
        rows: of the micro-batch.
        batch_id: its number.
        manifest_path: of the micro-batch if the run knows that it is committed, else "".
        checkpoint: "": of the query that the rows are of.
        is_second: the sink was called for this micro-batch before.
    """
    try:
        checkpoint = checkpoint or current_run(rows.sparkSession).checkpoint
        folder = CheckpointFolder(FileStorage(checkpoint))
        paths = folder.files() if is_second and not manifest_path else ()
        for path in failure_paths(paths, batch_id, manifest_path, is_second=is_second):
            folder.note(path)
    except Exception as error:
        logger.warning(
            "micro-batch %d failed, which could not be noted in its checkpoint: %s. If the "
            "function of foreachBatch catches the failure, its rows are lost",
            batch_id,
            error,
        )


_sink_of_run: dict[str, "RunnerPerRun"] = {}
"""The sink that the function of a run calls: one, for there is one decision per epoch."""
_refused: dict[str, BaseException] = {}
"""Runs of which a call, or what may be one, failed before it had a runner: they write no more."""
_sink_lock = Lock()


class RunnerPerRun:
    """A function for `foreachBatch` of several queries, with a runner for each of their runs.

    Spark calls it on a thread per query. A runner's parts (driver, storage, cluster) belong to one
    run; with another's, rows of this query would be committed as that query's epoch.

    Args:
        sink: the sink and its settings; equal for sinks that are the same but for their identity.
        make: makes a runner, without asking anyone anything.
        at_end: called within a micro-batch, with its rows: has the function called when the run
            has ended.
    """

    def __init__(self, sink: object, make: Callable[[], EpochRunner], at_end: AtEnd) -> None:
        self._sink = sink
        self._make = make
        self._at_end = at_end
        self._lock = Lock()
        self._runners: dict[str, EpochRunner] = {}

    def __call__(self, rows: DataFrame, batch_id: int) -> None:
        """Run one epoch; see `EpochRunner`.

        Raises:
            SecondCallError: the function of this run calls another sink too.
            QueryEndedError: the run is over, so that Spark takes nothing more for done.
        """
        try:
            run_id = current_run_id(rows.sparkSession)
        except QueryEndedError:
            raise
        except BaseException as error:  # such as a time limit's of the user's own
            self._refuse_all_that_may_call(rows, batch_id, error)
            raise
        try:
            with _sink_lock:
                owner = _sink_of_run.setdefault(run_id, self)
            runner = owner._runner(rows, run_id)
        except BaseException as error:
            with _sink_lock:
                _refused[run_id] = error
            note(rows, batch_id)
            raise
        if owner._sink != self._sink:
            runner.refuse_another(rows, batch_id)
        if run_id in _refused:
            runner.fail(_refused[run_id])
        runner(rows, batch_id)

    def _refuse_all_that_may_call(
        self, rows: DataFrame, batch_id: int, error: BaseException
    ) -> None:
        """Refuse further calls: the function may catch the error, and Spark log its batch."""
        at_work, active = runs_in(rows.sparkSession, batch_id), active_runs(rows.sparkSession)
        with _sink_lock:
            for ended in set(_refused) - active:
                del _refused[ended]
            _refused.update(dict.fromkeys({*at_work, *self._runners}, error))
            owners = [(run_id, _sink_of_run.get(run_id)) for run_id in at_work]
        for run_id, owner in owners:
            # Seen here, or it sees after its own making that its run is refused.
            runner = None if owner is None else owner._runners.get(run_id)
            if runner is None:
                note(rows, batch_id, checkpoint=at_work[run_id])
            else:
                runner.fail_with_note(error, rows, batch_id, at_work[run_id])

    def _runner(self, rows: DataFrame, run_id: str) -> EpochRunner:
        with self._lock:
            if run_id in self._runners:
                return self._runners[run_id]
            active = active_runs(rows.sparkSession)
            ended = [known for known in self._runners if known not in active]
            self._runners[run_id] = runner = self._make()
        for known in ended:
            self._end(known)
        self._at_end(rows, run_id, partial(self._end, run_id))
        return runner

    def _end(self, run_id: str) -> None:
        with _sink_lock:
            _sink_of_run.pop(run_id, None)
        with self._lock:
            ended = self._runners.pop(run_id, None)
        if ended is not None:
            ended.end()


def foreach_batch_runner(
    sink: object,
    put_in_order: Callable[[], OutputTopology],
    name: str | None,
    accepted: frozenset[str],
) -> RunnerPerRun:
    """Return what `foreachBatch` calls for a sink in a query of the user's own.

    Args:
        sink: equal for sinks that are the same but for their identity.
        put_in_order: called by a run's first call, which fails like any other if the sink cannot be
            used: its rows are missing then, also beside another sink's.
        name: see `EpochRunner`.
        accepted: see `EpochRunner`.
    """
    check_pyspark("foreachBatch(KafkaSink(…))")

    def make() -> EpochRunner:
        opened: list[Sinks] = []  # of the one run that this runner is for

        def close() -> None:
            while opened:
                opened.pop().close()

        def make_driver(run: QueryRun, identity: Identity, storage: FileStorage) -> Driver:
            close()
            topology = _usable(put_in_order())
            cluster = Cluster.of(run.spark)
            sinks = Sinks(topology, identity.pipeline, cluster, run.trigger_interval_ms)
            opened.append(sinks)
            try:
                sinks.check(accepted=identity.accepted)
                return sinks.make_driver(identity, storage)
            except BaseException:
                close()
                raise

        def make_engine(batch: Batch) -> DataFrameEngine:
            return engine_of(opened[0], batch.rows.sparkSession, lambda _: batch.rows)

        return EpochRunner(name, make_driver, make_engine, accepted, close)

    return RunnerPerRun(sink, make, _at_end)


def write_batch(topology: OutputTopology, rows: DataFrame, accepted: frozenset[str]) -> None:
    """Write a DataFrame as the only epoch of a checkpoint that is deleted afterwards.

    The name is drawn for the write: nothing that was decided before is asked for, and no other
    write is fenced.

    Args:
        topology: a sink whose transaction decides.
        rows: the DataFrame.
        accepted: see `EpochRunner`.

    Raises:
        OptionError: the sink cannot be used.
        TallystickError, or what a function behind the rows raised: nothing is visible.
    """
    check_pyspark("KafkaSink.write")
    topology, name = _usable(topology), batch_name(secrets.token_hex(8))
    spark = rows.sparkSession
    sinks = Sinks(topology, name, Cluster.of(spark), trigger_interval_ms=None)
    with TemporaryDirectory(prefix="tallystick-") as folder:
        storage = FileStorage(folder)
        identity = Identity(name, name, storage.location, accepted)
        try:
            sinks.check(accepted=accepted)
            driver = sinks.make_driver(identity, storage)
            engine = engine_of(sinks, spark, lambda _: rows)
            driver.run_epoch(Request(0, (NO_OFFSETS,), may_skip=False), engine)
        except KeyboardInterrupt:  # readers of the output would wait until the timeout
            assert sinks.cluster is not None, "its transaction decides"
            with suppress(TallystickError):
                sinks.cluster.broker.fence(f"{topology.id_prefix}{name}", None)
            raise
        finally:
            sinks.close()


def _usable(topology: OutputTopology) -> OutputTopology:
    if topology.dead_letter_topic is not None:
        raise OptionError(
            f"dead_letter_topic={topology.dead_letter_topic!r} works in a Pipeline only: after a "
            f"query of your own, write malformed rows with a second sink, or read with "
            f"the option value.mode=permissive and split them"
        )
    return topology


def _at_end(rows: DataFrame, run_id: str, do: Callable[[], None]) -> None:
    """Call `do` at the end of a run; its source may be any, so listen to the session first."""
    listen(session_of(rows.sparkSession), FORMAT)
    at_end(run_id, do, is_active=lambda: run_id in active_runs(rows.sparkSession))
