"""The Engine port for real: one epoch as one Spark job, from splits or from a DataFrame.

    splits      read ─► decode ─► functions ─► encode ─┐ frames  ┌─► write ─► report
    DataFrame   any Spark plan ─► functions ─► encode ─┘ shuffle └

Malformed records that go to a dead-letter topic become frames as well: in the splits engine of the
same pass. Spark's plans have one kind of row, so behind a DataFrame they are found by reading the
same splits a second time, in the same job and transaction; only mode deadletter pays for that.

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

from tallystick.exchange import FRAME_DDL, Frame, check_same_attempts
from tallystick.ports import Prepared
from tallystick.sink.transaction import Producer
from tallystick.source.assigner import share_out, share_pieces
from tallystick.source.planner import cut_splits
from tallystick.source.split import SplitRange
from tallystick.spark.failures import meaning_of
from tallystick.state.handles import StepState
from tallystick.task import EncodePlan, ReadPlan, Report, WritePlan

MakeWritePlan = Callable[[Producer], WritePlan]
MakeEncodePlan = Callable[[], EncodePlan]
REPORT_DDL = "report string"
Shares = tuple[tuple[SplitRange, ...], ...]
"""The splits of each reader."""


def share(
    spark: SparkSession, splits: tuple[SplitRange, ...], split_count_min: int | None
) -> Shares:
    """Divide the splits among as many readers as Spark runs tasks at a time.

    Args:
        spark: where they run.
        splits: one per partition.
        split_count_min: partitions are cut until there are about so many pieces; None: they stay
            whole, and the reader of each is the one that Flink gives it.
    """
    pieces = cut_splits(splits, split_count_min)
    reader_count = max(1, min(spark.sparkContext.defaultParallelism, len(pieces)))
    if len(pieces) > len(splits):
        return share_pieces(pieces, reader_count)
    return share_out(pieces, reader_count)


@dataclass(frozen=True)
class Unread:
    """The splits of an epoch by reader, and how they are read."""

    shares: Shares
    plan: ReadPlan


@dataclass(frozen=True)
class SplitsEngine:
    """Runs an epoch from splits that our own readers fetch; no row reaches the JVM."""

    spark: SparkSession
    unread: Unread
    encode: MakeEncodePlan
    write: MakeWritePlan

    def run_epoch(
        self, checkpoint_id: int, producer: Producer, state: tuple[StepState, ...]
    ) -> Prepared:
        """Read, transform and write all of the epoch into the producer's open transaction."""
        shares, read = self.unread.shares, self.unread.plan
        if not any(shares):
            return Prepared(())
        context, task_count = self.spark.sparkContext, len(shares)
        encode, write = self.encode(), self.write(producer)

        def encode_share(index: int, unread: Iterable[int]) -> Iterator[tuple[Any, Any]]:
            deque(unread, maxlen=0)  # Spark does not reuse a worker that left input unread
            for frame in encode.encode(read.read_both(shares[index]), source=index):
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
    """Runs an epoch from any DataFrame: a micro-batch of the user's, or a transformed one.

    Args:
        dead_letters: where malformed records are to be found, by a second reading; None: nowhere.
    """

    rows: DataFrame
    encode: MakeEncodePlan
    write: MakeWritePlan
    dead_letters: Unread | None = None

    def run_epoch(
        self, checkpoint_id: int, producer: Producer, state: tuple[StepState, ...]
    ) -> Prepared:
        """Encode and write all rows into the producer's open transaction."""
        encode, write = self.encode(), self.write(producer)
        return _collect(lambda: write_rows(self.rows, encode, write, self.dead_letters))


def write_rows(
    rows: DataFrame, encode: EncodePlan, write: WritePlan, dead_letters: Unread | None = None
) -> list[Report]:
    """One Spark job: encode where the rows are, route the frames, write them."""

    def encode_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for frame in encode.encode(batches, source=_task_index()):
            yield _frame_row(frame)

    def write_frames(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        frames = (Frame(**row) for batch in batches for row in batch.to_pylist())
        report = write.write(frames, _attempt_number())
        yield pa.RecordBatch.from_pydict({"report": [report.to_json()]})

    frames = rows.mapInArrow(encode_rows, FRAME_DDL)
    if dead_letters is not None:
        frames = frames.union(_dead_letter_frames(rows.sparkSession, dead_letters, encode))
    reports = (
        frames.repartitionById(encode.target_count, "target")
        .sortWithinPartitions("source", "sequence")
        .mapInArrow(write_frames, REPORT_DDL)
        .collect()
    )
    return [Report.from_json(row["report"]) for row in reports]


def read_frame(spark: SparkSession, unread: Unread, ddl: str) -> DataFrame:
    """The well-formed records of the splits as a DataFrame, read by our own readers."""

    def read_share(indices: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from unread.plan.read(_chosen(unread.shares, indices))

    return _one_row_per_reader(spark, unread).mapInArrow(read_share, ddl)


def _dead_letter_frames(spark: SparkSession, unread: Unread, encode: EncodePlan) -> DataFrame:
    def encode_share(indices: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        letters = unread.plan.read_dead_letters(_chosen(unread.shares, indices))
        # A source of its own: Spark may run both sides of the union as one task.
        for frame in encode.encode(letters, source=-1 - _task_index()):
            yield _frame_row(frame)

    return _one_row_per_reader(spark, unread).mapInArrow(encode_share, FRAME_DDL)


def _one_row_per_reader(spark: SparkSession, unread: Unread) -> DataFrame:
    count = len(unread.shares)
    return spark.range(0, count, 1, count)


def _chosen(shares: Shares, indices: Iterable[pa.RecordBatch]) -> list[SplitRange]:
    """The splits of the readers whose rows these are."""
    ids = [index for batch in indices for index in batch.column("id").to_pylist()]
    return [split for index in ids for split in shares[index]]


def _collect(run: Callable[[], list[Report]]) -> Prepared:
    """Run the job and gather its reports; the first error met is the epoch's."""
    try:
        reports = run()
    except Exception as error:
        raise meaning_of(error) from error
    for report in reports:
        error_met = report.to_error()
        if error_met is not None:
            raise error_met
    check_same_attempts(report.attempts for report in reports)
    return Prepared(tuple(produced for report in reports for produced in report.produced))


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
        ("attempt", pa.int64()),
    ]
)
