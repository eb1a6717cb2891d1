"""What a user writes: read, map, transform, write, start.

    query = (
        Pipeline("late-flights")
        .read(KafkaSource("localhost:9092", topics=["flights"], value=Json("dest string, n int")))
        .map_batches(late_only)
        .write(KafkaSink("localhost:9092", topic="late", key="dest", value=Json()))
        .start(spark, checkpoint="/data/late-flights", trigger={"processingTime": "1 second"})
    )

The functions of `map_batches` are chained into the reader: they get the Arrow batches that it
decoded, in the same task, and what they return is encoded for Kafka right there.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tallystick.endpoints import KafkaSink, KafkaSource
from tallystick.errors import OptionError
from tallystick.job import Listener
from tallystick.spark.running import PipelineRun, start_query
from tallystick.steps import FrameFunction, MapBatches, Step, Transform
from tallystick.task import BatchFunction

NAME_LENGTH_MAX = 200


@dataclass(frozen=True)
class Pipeline:
    """Kafka to Kafka, exactly once. Immutable: each step returns a new pipeline.

    Args:
        name: names the pipeline in Kafka (transactional id, groups). Two running pipelines must
            not share one: the newer fences the older.

    Raises:
        OptionError: the name has other characters than letters, digits, `.`, `_` and `-`.
    """

    name: str
    source: KafkaSource | None = None
    steps: tuple[Step, ...] = ()
    sink: KafkaSink | None = None

    def __post_init__(self) -> None:
        plain = self.name.replace(".", "").replace("_", "").replace("-", "")
        if not (plain.isascii() and plain.isalnum()) or len(self.name) > NAME_LENGTH_MAX:
            raise OptionError(
                f"pipeline name {self.name!r}: expected up to {NAME_LENGTH_MAX} letters, digits, "
                f"'.', '_' and '-'"
            )

    def read(self, source: KafkaSource) -> Self:
        """Say what is read; the first step."""
        return replace(self, source=source)

    def map_batches(self, function: BatchFunction, *, schema: str | None = None) -> Self:
        """Pass each Arrow batch through a function, in the task that read it.

        Args:
            function: gets a `pyarrow.RecordBatch` and returns one, or a Table, or None for no rows.
                It must not keep state between calls: batches are cut anew when an epoch is run
                again, and any worker may get any batch.
            schema: what the function returns, as DDL; needed where a `transform` follows.
        """
        return replace(self, steps=(*self.steps, MapBatches(function, schema)))

    def transform(self, function: FrameFunction) -> Self:
        """Pass the epoch's rows through Spark: any DataFrame code without streaming state.

        Only here do rows go through the JVM. A shuffle in it may change the order of rows.
        """
        return replace(self, steps=(*self.steps, Transform(function)))

    def write(self, sink: KafkaSink) -> Self:
        """Say where the rows go; the last step."""
        return replace(self, sink=sink)

    def start(
        self,
        spark: SparkSession,
        *,
        checkpoint: str,
        trigger: Mapping[str, Any] | None = None,
        accept: Collection[str] = (),
        listener: Listener | None = None,
    ) -> StreamingQuery:
        """Check everything that can be checked, then start.

        Args:
            spark: a classic session; `spark_session()` makes a good one.
            checkpoint: a folder of this pipeline's own, on storage that driver and executors reach.
            trigger: the arguments of Spark's `DataStreamWriter.trigger`.
            accept: decisions to state, as an error message names them.
            listener: told every event of the epoch protocol, in the driver.

        Returns:
            Spark's StreamingQuery. Its exception holds the text of ours.

        Raises:
            OptionError: the pipeline, the cluster, a topic or a setting cannot work.
            DataLossError: the checkpoint is another pipeline's.
        """
        if self.source is None or self.sink is None:
            raise OptionError(f"pipeline {self.name!r}: call read() and write() before start()")
        run = PipelineRun(
            name=self.name,
            spark=spark,
            source_options=self.source.to_options(self.name),
            steps=self.steps,
            sink=self.sink.settings,
            listener=listener,
        )
        return start_query(run, checkpoint, trigger, frozenset(accept))
