"""The Engine port for real: one epoch as one Spark job, from splits or from a DataFrame.

    splits      read ─► decode ─► functions ─► encode ─┐ frames  ┌─► write ─► report
    DataFrame   any Spark plan ─► functions ─► encode ─┘ shuffle └

Everything up to the shuffle is pure, so Spark may retry it; the writing stage runs once. Rows that
a reader of ours decoded travel as raw bytes between RDD stages, which costs least; rows that a
DataFrame made are encoded where they are, and their frames are shuffled as rows of that plan.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession

from tallystick.exchange import FRAME_DDL, Frame
from tallystick.sink.transaction import ProducedRange, Producer
from tallystick.source.assigner import share_out
from tallystick.source.split import SplitRange
from tallystick.spark.failures import meaning_of
from tallystick.task import EncodePlan, ReadPlan, Report, WritePlan

MakeWritePlan = Callable[[Producer], WritePlan]
MakeEncodePlan = Callable[[], EncodePlan]
REPORT_DDL = "report string"


@dataclass(frozen=True)
class SplitsEngine:
    """Runs an epoch from splits that our own readers fetch; no row reaches the JVM."""

    spark: SparkSession
    splits: tuple[SplitRange, ...]
    read: ReadPlan
    encode: MakeEncodePlan
    write: MakeWritePlan

    def run_epoch(self, checkpoint_id: int, producer: Producer) -> tuple[ProducedRange, ...]:
        """Read, transform and write all of the epoch into the producer's open transaction."""
        if not self.splits:
            return ()
        context = self.spark.sparkContext
        task_count = min(context.defaultParallelism, len(self.splits))
        shares = share_out(self.splits, task_count)
        read, encode, write = self.read, self.encode(), self.write(producer)

        def encode_share(index: int, unread: Iterable[int]) -> Iterator[tuple[Any, Any]]:
            deque(unread, maxlen=0)  # Spark does not reuse a worker that left input unread
            for frame in encode.encode(read.read(shares[index]), source=index):
                yield frame[:3], frame[3:]

        def write_frames(pairs: Iterable[tuple[Any, Any]]) -> Iterator[Report]:
            frames = (Frame(*key, *value) for key, value in pairs)
            yield write.write(frames, _attempt_number())

        frames = context.parallelize(range(task_count), task_count).mapPartitionsWithIndex(
            encode_share
        )
        routed = frames.repartitionAndSortWithinPartitions(encode.target_count, _target)
        return _collect(lambda: routed.mapPartitions(write_frames).collect())


@dataclass(frozen=True)
class DataFrameEngine:
    """Runs an epoch from any DataFrame: a micro-batch of the user's, or a transformed one."""

    rows: DataFrame
    encode: MakeEncodePlan
    write: MakeWritePlan

    def run_epoch(self, checkpoint_id: int, producer: Producer) -> tuple[ProducedRange, ...]:
        """Encode and write all rows into the producer's open transaction."""
        encode, write = self.encode(), self.write(producer)
        return _collect(lambda: write_rows(self.rows, encode, write))


def write_rows(rows: DataFrame, encode: EncodePlan, write: WritePlan) -> list[Report]:
    """One Spark job: encode where the rows are, route the frames, write them."""

    def encode_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for frame in encode.encode(batches, source=_task_index()):
            yield _frame_row(frame)

    def write_frames(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        frames = (Frame(**row) for batch in batches for row in batch.to_pylist())
        report = write.write(frames, _attempt_number())
        yield pa.RecordBatch.from_pydict({"report": [report.to_json()]})

    reports = (
        rows.mapInArrow(encode_rows, FRAME_DDL)
        .repartitionById(encode.target_count, "target")
        .sortWithinPartitions("source", "sequence")
        .mapInArrow(write_frames, REPORT_DDL)
        .collect()
    )
    return [Report.from_json(row["report"]) for row in reports]


def read_frame(
    spark: SparkSession, splits: tuple[SplitRange, ...], read: ReadPlan, ddl: str
) -> DataFrame:
    """The records of the splits as a DataFrame, read by our own readers."""
    task_count = max(1, min(spark.sparkContext.defaultParallelism, len(splits)))
    shares = share_out(splits, task_count)

    def read_share(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for index in batch.column("id").to_pylist():
                yield from read.read(shares[index])

    return spark.range(0, task_count, 1, task_count).mapInArrow(read_share, ddl)


def _collect(run: Callable[[], list[Report]]) -> tuple[ProducedRange, ...]:
    """Run the job and gather its reports; the first error met is the epoch's."""
    try:
        reports = run()
    except Exception as error:
        raise meaning_of(error) from error
    for report in reports:
        error_met = report.to_error()
        if error_met is not None:
            raise error_met
    return tuple(produced for report in reports for produced in report.produced)


def _target(key: tuple[int, int, int]) -> int:
    return key[0]


def _task_context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "runs in a Spark task"
    return context


def _attempt_number() -> int:
    return _task_context().attemptNumber()


def _task_index() -> int:
    return _task_context().partitionId()


def _frame_row(frame: Frame) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {name: [value] for name, value in frame._asdict().items()}, schema=_FRAME_SCHEMA
    )


_FRAME_SCHEMA = pa.schema(
    [
        ("target", pa.int32()),
        ("source", pa.int32()),
        ("sequence", pa.int32()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("record_count", pa.int32()),
        ("data", pa.binary()),
    ]
)
