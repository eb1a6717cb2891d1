"""`foreachBatch(KafkaSink(…))` and `KafkaSink.write`: the driver and the engine of one epoch."""

import secrets
from collections.abc import Callable
from contextlib import suppress
from tempfile import TemporaryDirectory

from pyspark.sql import DataFrame

from tallystick.epoch.facts import Identity, Request
from tallystick.epoch.transactional_ids import batch_name
from tallystick.errors import OptionError, TallystickError
from tallystick.pipeline.sinks import Sinks, engine_of
from tallystick.pipeline.topology import OutputTopology
from tallystick.run.driver import Driver
from tallystick.spark.cluster import Cluster
from tallystick.spark.engine import DataFrameEngine
from tallystick.spark.streaming import FORMAT, check_pyspark
from tallystick.spark.streaming.executions import (
    NO_OFFSETS,
    QueryRun,
    active_runs,
    session_of,
)
from tallystick.spark.streaming.foreach_batch import Batch, EpochRunner, RunnerPerRun
from tallystick.spark.streaming.offset_reporter import at_end, listen
from tallystick.storage.file_storage import FileStorage


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
                sinks.check()
                return sinks.make_driver(identity, storage)
            except BaseException:
                close()
                raise

        def make_engine(batch: Batch) -> DataFrameEngine:
            return engine_of(opened[0], batch.rows.sparkSession, lambda _: batch.rows)

        return EpochRunner(name, make_driver, make_engine, accepted, close)

    return RunnerPerRun(sink, make, _at_end)


def write_batch(topology: OutputTopology, rows: DataFrame) -> None:
    """Write a DataFrame as the only epoch of a checkpoint that is deleted afterwards.

    The name is drawn for the write: nothing that was decided before is asked for, and no other
    write is fenced.

    Args:
        topology: a sink whose transaction decides.
        rows: the DataFrame.

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
        identity = Identity(name, name, storage.location)
        try:
            sinks.check()
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
