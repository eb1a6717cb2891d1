"""Puts an epoch's parts together: the driver with its ports, and the engine of a micro-batch."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from pyspark.sql import DataFrame, SparkSession

from tallystick.checkpoint.verdict import Identity
from tallystick.errors import OptionError
from tallystick.job import Driver, Listener, Target
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.config import KafkaConfig
from tallystick.keyed_epoch import NO_STEPS, KeyedSteps
from tallystick.sink.preflight import Settings, check
from tallystick.sink.rows import RowLayout
from tallystick.sink.transaction import Producer
from tallystick.spark.engine import DataFrameEngine, Unread
from tallystick.spark.query import Batch, EpochRunner, QueryRun, RunnerPerRun
from tallystick.spark.session import tell_what_is_missing
from tallystick.storage import FileStorage, SystemClock
from tallystick.task import BatchFunction, EncodePlan, WritePlan
from tallystick.topic_partition import TopicPartition

logger = logging.getLogger(__name__)

DELETES_AT_A_TIME = 16
"""An object store takes some 30 ms for each file that is removed."""


@dataclass(frozen=True)
class SinkSettings:
    """What the shell needs of a sink; see `KafkaSink` for the meaning of each."""

    config: KafkaConfig
    topic: str | None
    token_topic: str
    json: bool
    key: str | None
    compression: str
    batch_bytes: int
    transaction_timeout_ms: int
    dead_letter_topic: str | None = None


class SinkCluster:
    """The driver's side of a sink: its broker, and the plans that it gives to tasks."""

    def __init__(self, settings: SinkSettings) -> None:
        self.settings = settings
        self.broker = KafkaBroker(settings.config, settings.transaction_timeout_ms)

    def target(self, pipeline: str) -> Target:
        """Where the pipeline of this name keeps its decision."""
        return Target(
            transactional_id=f"tallystick-{pipeline}",
            token_group=f"tallystick-{pipeline}-token",
            token_partition=TopicPartition(self.settings.token_topic, 0),
            cluster_id=self.broker.cluster_id(),
        )

    def encode_plan(self, spark: SparkSession, functions: tuple[BatchFunction, ...]) -> EncodePlan:
        """How this epoch's tasks encode, with the partitions that the topics have now."""
        counts = self._partition_counts()
        partition_count, dead_letters = sum(counts.values()), None
        topic = self.settings.dead_letter_topic
        if topic is not None:
            dead_letters = RowLayout(self.broker.partition_counts([topic]), topic)
            partition_count += dead_letters.partition_counts[topic]
        task_count = min(spark.sparkContext.defaultParallelism, partition_count)
        return EncodePlan(
            rows=RowLayout(counts, self.settings.topic, self.settings.json, self.settings.key),
            target_count=task_count,
            compression=self.settings.compression,
            batch_bytes=self.settings.batch_bytes,
            functions=functions,
            dead_letters=dead_letters,
        )

    def write_plan(self, producer: Producer) -> WritePlan:
        """How this epoch's tasks write."""
        return WritePlan(self.settings.config, producer, self.broker.transaction_version)

    def _partition_counts(self) -> Mapping[str, int]:
        if self.settings.topic is not None:
            return self.broker.partition_counts([self.settings.topic])
        return self.broker.partition_counts(self.broker.topics())


def preflight(cluster: SinkCluster, spark: SparkSession, trigger_interval_ms: int | None) -> None:
    """Check cluster, topics and settings before anything starts.

    Raises:
        OptionError: something cannot work; all problems are named.
    """
    settings = cluster.settings
    topics = (settings.token_topic, settings.topic, settings.dead_letter_topic)
    cluster.broker.partition_counts({topic for topic in topics if topic is not None})
    findings = check(
        cluster.broker.cluster_facts(),
        Settings(
            transaction_timeout_ms=settings.transaction_timeout_ms,
            delivery_timeout_ms=settings.config.delivery_timeout_ms,
            batch_bytes=settings.batch_bytes,
            trigger_interval_ms=trigger_interval_ms,
            speculation=spark.sparkContext.getConf().get("spark.speculation", "false") == "true",
        ),
    )
    for warning in findings.warnings:
        logger.warning("%s", warning)
    if findings.problems:
        raise OptionError("; ".join(findings.problems))
    tell_what_is_missing(spark)


def foreach_batch_runner(
    settings: SinkSettings, name: str | None, accepted: frozenset[str]
) -> RunnerPerRun:
    """What `foreachBatch` calls for a sink that stands behind queries of the user's own."""
    if settings.dead_letter_topic is not None:
        raise OptionError(
            f"dead_letter_topic={settings.dead_letter_topic!r} works in a Pipeline only: behind a "
            f"query of your own, write malformed rows with a second sink, or read in mode "
            f"permissive and split them"
        )

    def make() -> EpochRunner:
        cluster: list[SinkCluster] = []  # of the one run that this runner is for

        def make_driver(run: QueryRun, identity: Identity, storage: FileStorage) -> Driver:
            cluster[:] = [SinkCluster(settings)]
            preflight(cluster[0], run.spark, run.trigger_interval_ms)
            return driver_of(cluster[0], identity, storage)

        def make_engine(batch: Batch) -> DataFrameEngine:
            return engine_of(cluster[0], batch.rows)

        return EpochRunner(name, make_driver, make_engine, accepted)

    return RunnerPerRun(make)


def driver_of(
    cluster: SinkCluster,
    identity: Identity,
    storage: FileStorage,
    *,
    listener: Listener | None = None,
) -> Driver:
    """The driver of one query run, with the real ports."""
    make = partial(Driver, deletes_at_a_time=DELETES_AT_A_TIME)
    if listener is not None:
        make = partial(make, listener=listener)
    return make(
        identity,
        cluster.target(identity.pipeline),
        cluster.broker,
        storage,
        SystemClock(),
    )


def engine_of(
    cluster: SinkCluster,
    rows: DataFrame,
    functions: tuple[BatchFunction, ...] = (),
    dead_letters: Unread | None = None,
    keyed: KeyedSteps = NO_STEPS,
    timestamp_ms: int = 0,
) -> DataFrameEngine:
    """Runs an epoch from the rows of a DataFrame, and the malformed records that it leaves out."""
    spark = rows.sparkSession
    return DataFrameEngine(
        rows,
        lambda: cluster.encode_plan(spark, functions),
        cluster.write_plan,
        dead_letters,
        keyed,
        timestamp_ms,
    )
