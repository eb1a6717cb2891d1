"""The Engine port for real: one epoch as one Spark job, from splits or from a DataFrame.

    splits      read ─► decode ─► functions ─► encode ─┐ frames  ┌─► write ─► report
    DataFrame   any Spark plan ─► functions ─► encode ─┘ shuffle └

Without a Kafka transaction for the epoch there is no writing stage: the tasks that have the rows
write them, each into transactions of its own.

A keyed step is one more stage before the encoding one: readers route rows to its tasks, in frames
of the same kind.

Malformed records that go to a dead-letter topic become frames as well: in the splits engine of the
same pass. Spark's plans have one kind of row, so behind a DataFrame they are found by reading the
same splits a second time, in the same job and transaction; only mode deadletter pays for that.

Everything up to the shuffle is pure, so Spark may retry it; the writing stage runs once. Rows that
a reader of ours decoded travel as raw bytes between RDD stages, which costs least; rows that a
DataFrame made are encoded where they are, and their frames are shuffled as rows of that plan.
"""

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession

from tallystick.errors import EpochAbortedError
from tallystick.exchange import FRAME_DDL, Frame
from tallystick.fan_out import CollectPlan, FanOut
from tallystick.keyed_epoch import NO_STEPS, KeyedEpoch, KeyedSteps
from tallystick.keyed_task import ProcessPlan
from tallystick.parent_process import check_parent
from tallystick.ports import Prepared
from tallystick.sink.transaction import Producer
from tallystick.source.assigner import share_out, share_pieces
from tallystick.source.planner import cut_splits
from tallystick.source.split import SplitRange
from tallystick.spark.failures import meaning_of, run_until_alive
from tallystick.spark.shipment import Parcel, Shipment
from tallystick.state.handles import StepState
from tallystick.task import EncodePlan, Outlet, ReadPlan, Report, WritePlan, send

MakeWritePlan = Callable[[Producer], WritePlan | CollectPlan]
MakeLast = Callable[[int], EncodePlan | FanOut]
"""Where the rows of an epoch go in the end."""
REPORT_DDL = "report string"
NO_ROWS = -(1 << 31)
"""The source of frames that only begin an epoch; no task's index."""
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
    last: MakeLast
    write: MakeWritePlan
    keyed: KeyedSteps = NO_STEPS
    timestamp_ms: int = 0

    def run_epoch(
        self, checkpoint_id: int, producer: Producer, state: tuple[StepState, ...]
    ) -> Prepared:
        """Read, transform and write all of the epoch into the producer's open transaction."""
        if self.keyed.is_idle(state) and not any(self.unread.shares):
            return Prepared((), self.keyed.carried(state))
        last = self.last(checkpoint_id)
        epoch = self.keyed.epoch(checkpoint_id, self.timestamp_ms, _token(), state, last)
        write = replace(self.write(producer), stage=epoch.stage)
        with Shipment(self.spark.sparkContext) as shipment:
            return _collect(lambda: self._reports(epoch, write, shipment), epoch, self._run_nothing)

    def _run_nothing(self) -> None:
        """One idle task for each core, in the workers that those of an epoch run in."""
        count = self.spark.sparkContext.defaultParallelism
        self.spark.sparkContext.parallelize(range(count), count).foreachPartition(_idle)

    def _reports(
        self, epoch: KeyedEpoch, write: WritePlan | CollectPlan, shipment: Shipment
    ) -> list[Report]:
        context, task_count = self.spark.sparkContext, len(self.unread.shares)
        reading, writing = shipment.pack((self.unread, epoch.first)), shipment.pack(write)

        def read_share(index: int, indices: Iterable[int]) -> Iterator[tuple[Any, Any]]:
            deque(indices, maxlen=0)  # Spark does not reuse a worker that left input unread
            unread, first = reading.plan
            rows = unread.plan.read_both(unread.shares[index])
            for frame in send(first, rows, source=index, attempt_number=_attempt_number()):
                yield frame[:3], frame[3:]

        def write_frames(pairs: Iterable[tuple[Any, Any]]) -> Iterator[Report]:
            yield writing.plan.write(_frames(pairs), _attempt_number())

        frames = context.parallelize(range(task_count), task_count).mapPartitionsWithIndex(
            read_share
        )
        for plan in epoch.plans:
            routed = frames.repartitionAndSortWithinPartitions(plan.base.parallelism, _target)
            frames = routed.mapPartitionsWithIndex(_process_pairs(shipment.pack(plan)))
        if epoch.writer_count:
            frames = frames.repartitionAndSortWithinPartitions(epoch.writer_count, _target)
        return frames.mapPartitions(write_frames).collect()


def _process_pairs(
    parcel: Parcel[ProcessPlan],
) -> Callable[[int, Iterable[tuple[Any, Any]]], Iterator[tuple[Any, Any]]]:
    def process(index: int, pairs: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        for frame in parcel.plan.run(_frames(pairs), index, _attempt_number()):
            yield frame[:3], frame[3:]

    return process


def _frames(pairs: Iterable[tuple[Any, Any]]) -> Iterator[Frame]:
    return (Frame(*key, *value) for key, value in pairs)


@dataclass(frozen=True)
class DataFrameEngine:
    """Runs an epoch from any DataFrame: a micro-batch of the user's, or a transformed one.

    Args:
        spark: runs it.
        rows: makes the DataFrame, once per attempt of the epoch.
        dead_letters: where malformed records are to be found, by a second reading; None: nowhere.
    """

    spark: SparkSession
    rows: Callable[[Shipment], DataFrame]
    last: MakeLast
    write: MakeWritePlan
    dead_letters: Unread | None = None
    keyed: KeyedSteps = NO_STEPS
    timestamp_ms: int = 0

    def run_epoch(
        self, checkpoint_id: int, producer: Producer, state: tuple[StepState, ...]
    ) -> Prepared:
        """Encode and write all rows into the producer's open transaction."""
        last = self.last(checkpoint_id)
        epoch = self.keyed.epoch(checkpoint_id, self.timestamp_ms, _token(), state, last)
        write = replace(self.write(producer), stage=epoch.stage)
        with Shipment(self.spark.sparkContext) as shipment:
            rows = self.rows(shipment)
            return _collect(
                lambda: self._reports(rows, epoch, write, shipment), epoch, self._run_nothing
            )

    def _run_nothing(self) -> None:
        """As `SplitsEngine`: Spark has workers of another pool for DataFrames."""
        count = self.spark.sparkContext.defaultParallelism
        self.spark.range(0, count, 1, count).mapInArrow(_idle_rows, "id bigint").collect()

    def _reports(
        self,
        rows: DataFrame,
        epoch: KeyedEpoch,
        write: WritePlan | CollectPlan,
        shipment: Shipment,
    ) -> list[Report]:
        """One Spark job: encode where the rows are, route the frames, write them."""
        first, writing = shipment.pack(epoch.first), shipment.pack(write)

        def send_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            number = _attempt_number()
            for frame in send(first.plan, batches, source=_task_index(), attempt_number=number):
                yield _frame_row(frame)

        def write_frames(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            report = writing.plan.write(_frames_of(batches), _attempt_number())
            yield pa.RecordBatch.from_pydict({"report": [report.to_json()]})

        frames = rows.mapInArrow(send_rows, FRAME_DDL)
        if self.dead_letters is not None:
            unread = shipment.pack(self.dead_letters)
            frames = frames.union(_dead_letter_frames(self.spark, unread, first))
        if epoch.plans:
            frames = frames.union(_opening_frames(self.spark, first))
        for plan in epoch.plans:
            process = _process_rows(shipment.pack(plan))
            frames = _routed(frames, plan.base.parallelism).mapInArrow(process, FRAME_DDL)
        if epoch.writer_count:
            frames = _routed(frames, epoch.writer_count)
        reports = frames.mapInArrow(write_frames, REPORT_DDL).collect()
        return [Report.from_json(row["report"]) for row in reports]


def _process_rows(
    parcel: Parcel[ProcessPlan],
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def process(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for frame in parcel.plan.run(_frames_of(batches), _task_index(), _attempt_number()):
            yield _frame_row(frame)

    return process


def _routed(frames: DataFrame, task_count: int) -> DataFrame:
    """Each frame in the partition of its target, in order."""
    return frames.repartitionById(task_count, "target").sortWithinPartitions("source", "sequence")


def _frames_of(batches: Iterable[pa.RecordBatch]) -> Iterator[Frame]:
    return (Frame(**row) for batch in batches for row in batch.to_pylist())


def read_frame(spark: SparkSession, unread: Unread, ddl: str, shipment: Shipment) -> DataFrame:
    """The well-formed records of the splits as a DataFrame, read by our own readers."""
    reading = shipment.pack(unread)

    def read_share(indices: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        unread = reading.plan
        yield from unread.plan.read(_chosen(unread.shares, indices))

    return _one_row_per_reader(spark, unread).mapInArrow(read_share, ddl)


def _opening_frames(spark: SparkSession, first: Parcel[Outlet]) -> DataFrame:
    """Frames that say nothing, from a source of their own.

    Spark plans no task at all behind a DataFrame that it knows to be empty; a keyed step has timers
    to look for, and a state to carry on.
    """

    def send_nothing(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        deque(batches, maxlen=0)
        for frame in send(first.plan, (), source=NO_ROWS):
            yield _frame_row(frame)

    return spark.range(0, 1, 1, 1).mapInArrow(send_nothing, FRAME_DDL)


def _dead_letter_frames(
    spark: SparkSession, reading: Parcel[Unread], first: Parcel[Outlet]
) -> DataFrame:
    def encode_share(indices: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        unread = reading.plan
        letters = unread.plan.read_dead_letters(_chosen(unread.shares, indices))
        # A source of its own: Spark may run both sides of the union as one task.
        source, number = -1 - _task_index(), _attempt_number()
        for frame in send(first.plan, letters, source=source, attempt_number=number):
            yield _frame_row(frame)

    return _one_row_per_reader(spark, reading.plan).mapInArrow(encode_share, FRAME_DDL)


def _one_row_per_reader(spark: SparkSession, unread: Unread) -> DataFrame:
    count = len(unread.shares)
    return spark.range(0, count, 1, count)


def _chosen(shares: Shares, indices: Iterable[pa.RecordBatch]) -> list[SplitRange]:
    """The splits of the readers whose rows these are."""
    ids = [index for batch in indices for index in batch.column("id").to_pylist()]
    return [split for index in ids for split in shares[index]]


def _token() -> str:
    return secrets.token_hex(8)


def _collect(
    run: Callable[[], list[Report]], epoch: KeyedEpoch, run_nothing: Callable[[], None]
) -> Prepared:
    """Run the job and gather its reports; the first error met is the epoch's.

    Where the epoch has to run again, Spark's dead workers are got rid of: see `run_until_alive`.
    """
    try:
        reports = run()
        for report in reports:
            error_met = report.to_error()
            if error_met is not None:
                raise error_met
    except Exception as error:
        meaning = meaning_of(error)
        if isinstance(meaning, EpochAbortedError):
            run_until_alive(run_nothing)
        if meaning is error:
            raise
        raise meaning from error
    return epoch.prepared(reports)


def _idle(elements: Iterable[int]) -> None:
    deque(elements, maxlen=0)
    check_parent()


def _idle_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    check_parent()
    yield from batches


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
