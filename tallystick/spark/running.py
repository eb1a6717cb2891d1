"""A started pipeline: Spark's micro-batches on one side, driver and engine on the other."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from tallystick.checkpoint import manifest as m
from tallystick.checkpoint.verdict import Identity
from tallystick.errors import DataLossError
from tallystick.job import Driver, Listener
from tallystick.kafka.broker import KafkaBroker
from tallystick.options import parse_source_options
from tallystick.ports import Engine
from tallystick.source.columns import ddl
from tallystick.source.offsets import SourceOffsets, from_json
from tallystick.source.planner import plan_splits
from tallystick.source.split import SplitRange
from tallystick.spark.engine import SplitsEngine, read_frame
from tallystick.spark.epochs import SinkCluster, SinkSettings, driver_of, engine_of, preflight
from tallystick.spark.query import Batch, EpochRunner, QueryRun
from tallystick.spark.source import FORMAT, layout_of, read_plan, register
from tallystick.spark.topics import subscribed
from tallystick.steps import Step, arrange
from tallystick.storage import FileStorage


class PipelineRun:
    """The parts of one started pipeline, on the driver."""

    def __init__(
        self,
        name: str,
        spark: SparkSession,
        source_options: Mapping[str, str],
        steps: tuple[Step, ...],
        sink: SinkSettings,
        listener: Listener | None,
    ) -> None:
        self.name = name
        self.spark = spark
        self.source_options = source_options
        self._sink = sink
        self._listener = listener
        self._cluster: SinkCluster | None = None
        options = parse_source_options(source_options, streaming=True)
        columns = ddl(
            options.value_schema,
            mode=options.value_mode,
            prefix=options.metadata_prefix,
            headers=options.headers,
        )
        self._subscription = options.subscription
        self._read = read_plan(options, layout_of(options, _parse(spark, columns)))
        self._stages = arrange(steps, columns)

    def check(self, trigger_interval_ms: int | None) -> None:
        """Find what cannot work before anything starts.

        Args:
            trigger_interval_ms: how long Spark waits between two epochs; None: it does not.

        Raises:
            OptionError: a topic, an ACL, a broker setting or a Spark setting is in the way.
        """
        source = KafkaBroker(self._read.config)
        try:
            subscribed(source, self._subscription)
        finally:
            source.close()
        self._cluster = SinkCluster(self._sink)
        preflight(self._cluster, self.spark, trigger_interval_ms)

    def make_driver(self, run: QueryRun, identity: Identity, storage: FileStorage) -> Driver:
        """Called once per run of the query."""
        assert self._cluster is not None, "checked before it is started"
        return driver_of(
            self._cluster,
            identity,
            storage,
            source_broker=KafkaBroker(self._read.config),
            listener=self._listener,
        )

    def make_engine(self, batch: Batch) -> Engine:
        """Called once per epoch."""
        assert self._cluster is not None, "checked before it is started"
        cluster, stages = self._cluster, self._stages
        splits = splits_of(batch)
        read = replace(self._read, functions=stages.before)
        if stages.frames is None:
            return SplitsEngine(
                spark=self.spark,
                splits=splits,
                read=read,
                encode=lambda: cluster.encode_plan(self.spark, ()),
                write=cluster.write_plan,
            )
        rows = read_frame(self.spark, splits, read, stages.frames.ddl)
        for function in stages.frames.functions:
            rows = function(rows)
        return engine_of(cluster, rows, stages.after)


def start_query(
    run: PipelineRun, checkpoint: str, trigger: Mapping[str, Any] | None, accepted: frozenset[str]
) -> StreamingQuery:
    """Check, then start the streaming query whose micro-batches are the pipeline's epochs."""
    check_checkpoint(FileStorage(checkpoint), run.name)
    run.check(interval_ms(run.spark, trigger or {}))
    register(run.spark)
    runner = EpochRunner(run.name, run.make_driver, run.make_engine, accepted)
    writer = (
        run.spark.readStream.format(FORMAT)
        .options(**run.source_options)
        .load()
        .writeStream.queryName(run.name)
        .option("checkpointLocation", checkpoint)
        .foreachBatch(runner)
    )
    return (writer.trigger(**trigger) if trigger else writer).start()


def interval_ms(spark: SparkSession, trigger: Mapping[str, Any]) -> int | None:
    """The interval of a `processingTime` trigger, as Spark reads its text; None for the others."""
    text = trigger.get("processingTime")
    if text is None:
        return None
    java_trigger = getattr(spark.sparkContext._jvm, "org.apache.spark.sql.streaming.Trigger")
    return int(java_trigger.ProcessingTime(text).intervalMs())


def check_checkpoint(storage: FileStorage, name: str) -> None:
    """Refuse a checkpoint in which another pipeline's manifests lie.

    Raises:
        DataLossError: it is another pipeline's.
        ManifestError: its newest manifest is damaged.
    """
    names = storage.names(m.FOLDER)
    if not names:
        return
    manifest = m.decode(storage.get(names[-1]) or b"", names[-1])
    if manifest.pipeline != name:
        raise DataLossError(
            f"checkpoint {storage.location} belongs to pipeline {manifest.pipeline!r}, this one is "
            f"{name!r}: use that name, or a checkpoint folder of its own. Nothing was changed."
        )


def splits_of(batch: Batch) -> tuple[SplitRange, ...]:
    """The ranges of an epoch, from what Spark logged for it and for the one before."""
    stop = from_json(json.loads(batch.sources[0]))
    if batch.previous_sources:
        return plan_splits(from_json(json.loads(batch.previous_sources[0])), stop)
    return plan_splits(SourceOffsets(stop.cluster_id, stop.group), stop)


def _parse(spark: SparkSession, columns: str) -> StructType:
    return spark.createDataFrame([], columns).schema
