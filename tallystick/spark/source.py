"""`format("tallystick")`: Kafka as a Spark data source, with options and columns Spark users know.

The reader decides on the driver side (here: a Python process that Spark keeps per query) and reads
in tasks. Everything an epoch reads follows from the offsets that Spark logged, so a replay reads
the same records: nothing is resolved a second time.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from tallystick.errors import OptionError
from tallystick.json_format import PERMISSIVE
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.config import KafkaConfig
from tallystick.options import EARLIEST, SourceOptions, parse_source_options
from tallystick.source.columns import Layout, ddl
from tallystick.source.offsets import SourceOffsets, from_json
from tallystick.source.planner import Positions, cut_splits, limit_offsets, plan_splits
from tallystick.source.split import SplitRange
from tallystick.spark.topics import ending_positions, resolve, subscribed
from tallystick.task import ReadPlan

FORMAT = "tallystick"


def register(spark: SparkSession) -> None:
    """Make `format("tallystick")` known to a session."""
    spark.dataSource.register(TallystickSource)


class SplitPartition(InputPartition):
    """One split, as it travels to the task that reads it."""

    def __init__(self, split: SplitRange) -> None:
        super().__init__(split)
        self.split = split


class TallystickSource(DataSource):
    """Kafka topics as rows; see `options` for what can be set."""

    @classmethod
    def name(cls) -> str:
        """The name for `format`."""
        return FORMAT

    def schema(self) -> str:
        """The columns, which follow from the options."""
        options = parse_source_options(self.options, streaming=False)
        return ddl(
            options.value_schema,
            mode=options.value_mode,
            prefix=options.metadata_prefix,
            headers=options.headers,
        )

    def reader(self, schema: StructType) -> DataSourceReader:
        """For `spark.read`."""
        options = parse_source_options(self.options, streaming=False)
        return BatchReader(options, layout_of(options, schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """For `spark.readStream`."""
        options = parse_source_options(self.options, streaming=True)
        return StreamReader(options, layout_of(options, schema))


def layout_of(options: SourceOptions, schema: StructType) -> Layout:
    """The layout whose columns are `schema`, which Spark parsed from our DDL."""
    value_schema = None
    if options.value_format == "json":
        kafka_columns = 6 + options.headers + (options.value_mode == PERMISSIVE)
        value_schema = to_arrow_schema(StructType(schema.fields[:-kafka_columns]))
    return Layout(value_schema, options.value_mode, options.metadata_prefix, options.headers)


def read_plan(options: SourceOptions, layout: Layout) -> ReadPlan:
    """How tasks read, from a query's options."""
    return ReadPlan(
        config=KafkaConfig.from_options(options.client),
        layout=layout,
        fail_on_data_loss=options.fail_on_data_loss,
    )


def read_split(plan: ReadPlan, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """The rows of one Spark input partition; Spark has one with None where we have none."""
    if partition.value is None:
        return
    assert isinstance(partition, SplitPartition)
    yield from plan.read([partition.split])


class Cluster:
    """The brokers as the driver side sees them: connected when first needed, never pickled."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._connected: KafkaBroker | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_config": self._config, "_connected": None}

    @property
    def broker(self) -> KafkaBroker:
        """The connection, made on first use."""
        if self._connected is None:
            self._connected = KafkaBroker(self._config)
        return self._connected


class BatchReader(DataSourceReader):
    """`spark.read.format("tallystick")`: a bounded range, settled when the query is planned."""

    def __init__(self, options: SourceOptions, layout: Layout) -> None:
        self._options = options
        self._plan = read_plan(options, layout)
        self._cluster = Cluster(self._plan.config)

    def partitions(self) -> list[SplitPartition]:
        """One task per split."""
        partitions = subscribed(self._cluster.broker, self._options.subscription)
        start = resolve(self._cluster.broker, self._options.starting_offsets, partitions)
        stop = ending_positions(self._cluster.broker, self._options.ending_offsets, partitions)
        wrong = [p for p in partitions if start[p] > stop[p]]
        if wrong:
            p = wrong[0]
            raise OptionError(
                f"{p}: startingOffsets is {start[p]}, after endingOffsets {stop[p]}: swap them"
            )
        splits = plan_splits(SourceOffsets("", "", start), SourceOffsets("", "", stop))
        return [SplitPartition(s) for s in cut_splits(splits, self._options.split_count_min)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs in a task: the records of one split."""
        return read_split(self._plan, partition)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`spark.readStream.format("tallystick")`: positions go to Spark's log, epoch by epoch."""

    def __init__(self, options: SourceOptions, layout: Layout) -> None:
        self._options = options
        self._plan = read_plan(options, layout)
        self._cluster = Cluster(self._plan.config)
        self._initial: SourceOffsets | None = None
        self._frozen: Positions | None = None

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """`maxOffsetsPerTrigger`, or all there is."""
        limit = self._options.offset_count_max
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Settle the end of an AvailableNow query: what is there now."""
        self._frozen = self._latest()

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Where a new query starts; resolved once, and logged with its first epoch."""
        if self._initial is None:
            partitions = subscribed(self._cluster.broker, self._options.subscription)
            positions = resolve(self._cluster.broker, self._options.starting_offsets, partitions)
            self._initial = SourceOffsets(
                cluster_id=self._cluster.broker.cluster_id(),
                group=self._options.group,
                positions=positions,
                initial=True,
            )
        return self._initial.to_json()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """How far the next epoch reads; partitions seen for the first time start at earliest."""
        begin = from_json(start)
        available = self._frozen if self._frozen is not None else self._latest()
        unseen = [p for p in available if p not in begin.positions]
        new = self._cluster.broker.list_offsets(unseen, EARLIEST) if unseen else {}
        positions = {**begin.positions, **new}
        reachable = {p: available.get(p, positions[p]) for p in positions}
        maximum = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        stop = replace(
            begin,
            group=self._options.group,
            positions=limit_offsets(positions, reachable, maximum),
            starts={**begin.positions, **new} if begin.initial else new,
            initial=False,
        )
        if stop.positions == begin.positions and not begin.initial:
            return start
        return stop.to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[SplitPartition]:
        """One task per split of the epoch."""
        splits = plan_splits(from_json(start), from_json(end))
        return [SplitPartition(s) for s in cut_splits(splits, self._options.split_count_min)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs in a task: the records of one split."""
        return read_split(self._plan, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing to do: whoever commits the epoch shows the positions in Kafka."""

    def _latest(self) -> Positions:
        partitions = subscribed(self._cluster.broker, self._options.subscription)
        return ending_positions(self._cluster.broker, self._options.ending_offsets, partitions)
