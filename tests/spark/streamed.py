"""A pipeline in Structured Streaming, as Tallystick 0.1.0 ran it: what a loop takes over."""

from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

import tallystick as ts
from tallystick.api.kafka_sink import topology_of
from tallystick.epoch.manifest import Identity
from tallystick.pipeline.compiled import PipelineRun
from tallystick.run.driver import Driver
from tallystick.spark.cluster import Cluster
from tallystick.spark.streaming import FORMAT
from tallystick.spark.streaming.executions import QueryRun
from tallystick.spark.streaming.foreach_batch import EpochRunner
from tallystick.spark.streaming.offset_reporter import at_end
from tallystick.spark.streaming.registration import register
from tallystick.storage.file_storage import FileStorage


def texts_of(source: ts.KafkaSource, group: str) -> dict[str, str]:
    """The options of `readStream` that say what a source of these tests says."""
    assert isinstance(source.topics, list)
    texts = {
        "kafka.bootstrap.servers": source.bootstrap_servers,
        "subscribe": ",".join(source.topics),
        "startingOffsets": str(source.starting_offsets),
        "kafka.group.id": group,
        **source.options,
    }
    if source.max_offsets_per_trigger is not None:
        texts["maxOffsetsPerTrigger"] = str(source.max_offsets_per_trigger)
    if source.value is None:
        return texts
    assert isinstance(source.value, ts.Json)
    assert source.value.schema is not None
    return {**texts, "value.format": "json", "value.schema": source.value.schema}


def streamed(
    pipeline: ts.Pipeline,
    spark: SparkSession,
    *,
    checkpoint: Path,
    trigger: dict[str, Any] | None = None,
    listener: Any = None,
) -> StreamingQuery:
    """Start a streaming query whose micro-batches are the pipeline's epochs."""
    run = PipelineRun(
        name=pipeline.name,
        cluster=Cluster.of(spark),
        inputs=pipeline.inputs.declared(pipeline.name),
        steps=pipeline.steps,
        topology=topology_of(pipeline.sinks),
        listener=listener,
    )
    run.check(None, is_new=not FileStorage(str(checkpoint)).names("offsets"))

    def make_driver(query: QueryRun, identity: Identity, storage: FileStorage) -> Driver:
        return run.make_driver(identity, storage)

    register(spark)
    runner = EpochRunner(run.name, make_driver, run.make_engine, frozenset(), run.close)
    query = (
        spark.readStream.format(FORMAT)
        .options(**texts_of(pipeline.inputs.sources[0], run.inputs[0].options.group))
        .load()
        .writeStream.queryName(run.name)
        .option("checkpointLocation", str(checkpoint))
        .foreachBatch(runner)
        .trigger(**(trigger or {"availableNow": True}))
        .start()
    )
    at_end(str(query.runId), runner.end, is_active=lambda: query.isActive)
    return query
