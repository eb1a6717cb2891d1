"""`format("tallystick")`: Kafka as a source of Spark, with options and columns Spark users know.

The reader decides on the driver side (here: a Python process that Spark keeps per query) and reads
in tasks. Everything an epoch reads follows from the offsets that Spark logged, so a replay reads
the same records: nothing is resolved a second time.
"""

from collections.abc import Iterator
from typing import Any, NoReturn

import pyarrow as pa
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

from tallystick.codec.layout import Layout
from tallystick.errors import OptionError
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.fetcher import KafkaFetch
from tallystick.options.source import SourceOptions, parse_source_options
from tallystick.pipeline.planning import StreamPlanner
from tallystick.pipeline.topics import (
    STARTING,
    check_named,
    columns_ddl,
    ending_positions,
    find_topics,
    layout_of,
    partitions_of,
    resolve,
)
from tallystick.source.offsets import SourceOffsets, from_json
from tallystick.source.splits import cut_splits, plan_splits
from tallystick.spark.streaming import FORMAT
from tallystick.tasks.read_plan import ReadPlan
from tallystick.values import SplitRange


class SplitPartition(InputPartition):
    """One split, as Spark's input partition for a reading task."""

    def __init__(self, split: SplitRange) -> None:
        super().__init__(split)
        self.split = split


class TallystickSource(DataSource):
    """Kafka topics as rows; see `options` for what can be set."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `format`."""
        return FORMAT

    def schema(self) -> str:
        """Return the columns, which follow from the options."""
        options = parse_source_options(self.options)
        return columns_ddl(options)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader for `spark.read`."""
        options = parse_source_options(self.options, streaming=False)
        return BatchReader(options, layout_of(options, to_arrow_schema(schema, timezone="UTC")))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Return the reader for `spark.readStream`."""
        options = parse_source_options(self.options, streaming=True)
        return StreamReader(options, layout_of(options, to_arrow_schema(schema, timezone="UTC")))

    def writer(self, schema: StructType, overwrite: bool) -> NoReturn:
        """Refuse `df.write` and show what to write instead.

        Raises:
            OptionError: always.
        """
        raise OptionError(
            'df.write.format("tallystick") does not write. For one transaction with all rows, '
            f"write:\n    {self._sink}\n    sink.write(df)"
        )

    def streamWriter(self, schema: StructType, overwrite: bool) -> NoReturn:  # noqa: N802
        """Refuse `writeStream` and show what to write instead.

        Raises:
            OptionError: always.
        """
        raise OptionError(
            'writeStream.format("tallystick") does not write. For one transaction per micro-batch, '
            f"in any output mode, write:\n    {self._sink}\n    "
            'df.writeStream.foreachBatch(sink).option("checkpointLocation", …).start()\n'
            'To go on from the checkpoint that there is, add transactions="task", uid="kafka"'
        )

    @property
    def _sink(self) -> str:
        given = {name.lower(): value for name, value in self.options.items()}
        servers = given.get("kafka.bootstrap.servers", "host1:9092")
        return f"sink = ts.KafkaSink({servers!r}, topic={given.get('topic', 'out')!r})"


def read_split(plan: ReadPlan, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a Spark input partition; Spark has one with None where we have none."""
    if partition.value is None:
        return
    assert isinstance(partition, SplitPartition)
    yield from plan.read([partition.split])


class BatchReader(DataSourceReader):
    """`spark.read.format("tallystick")`: a bounded range, settled when the query is planned."""

    def __init__(self, options: SourceOptions, layout: Layout) -> None:
        self._options = options
        self._config = options.config
        self._plan = ReadPlan(KafkaFetch(self._config), layout, options.policy)

    def partitions(self) -> list[SplitPartition]:
        """Return one task per split."""
        broker = KafkaBroker(self._config)
        try:
            splits = self._splits(broker)
        finally:
            broker.close()
        return [SplitPartition(s) for s in cut_splits(splits, self._options.split_count_min)]

    def _splits(self, broker: KafkaBroker) -> tuple[SplitRange, ...]:
        subscription = self._options.subscription
        topics = find_topics(broker, subscription)
        check_named(broker, subscription, topics)
        partitions = partitions_of(subscription, topics)
        start = resolve(broker, self._options.start, partitions, STARTING)
        assert self._options.stop is not None, "a batch has an end"
        stop = ending_positions(broker, self._options.stop, partitions)
        wrong = [p for p in partitions if start[p] > stop[p]]
        if wrong:
            p = wrong[0]
            raise OptionError(
                f"{p}: startingOffsets is {start[p]}, after endingOffsets {stop[p]}: swap them"
            )
        ids = {topic: facts.topic_id for topic, facts in topics.items()}
        return plan_splits(SourceOffsets("", "", start), SourceOffsets("", "", stop, topic_ids=ids))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of one split, in a task."""
        return read_split(self._plan, partition)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`spark.readStream.format("tallystick")`: positions go to Spark's log, epoch by epoch."""

    def __init__(self, options: SourceOptions, layout: Layout) -> None:
        self._options = options
        self._config = options.config
        self._plan = ReadPlan(KafkaFetch(self._config), layout, options.policy)
        self._connected: StreamPlanner | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connected": None}  # tasks read; they never plan

    @property
    def _planner(self) -> StreamPlanner:
        """Connected when first needed."""
        if self._connected is None:
            self._connected = StreamPlanner(KafkaBroker(self._config), self._options)
        return self._connected

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """`maxOffsetsPerTrigger`, or all there is."""
        limit = self._options.offset_count_max
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """End an AvailableNow query at the records that are there now."""
        self._planner.stop_at_what_is_there()

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return where a new query starts; resolved once, and logged with its first epoch."""
        return self._planner.first().to_json()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next epoch; `start` when there is nothing to do."""
        begin = from_json(start)
        maximum = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        stop = self._planner.next(begin, maximum)
        return start if stop is begin else stop.to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return the ends of the logs, for the query's progress: the difference is the lag."""
        latest = self._planner.latest()
        return None if latest is None else latest.to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[SplitPartition]:
        """Return one task per split of the epoch."""
        stop = from_json(end)
        self._planner.check_cluster(stop)  # a replayed epoch comes here before anything is planned
        splits = plan_splits(from_json(start), stop)
        return [SplitPartition(s) for s in cut_splits(splits, self._options.split_count_min)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of one split, in a task."""
        return read_split(self._plan, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: the committer of the epoch shows the positions in Kafka."""
