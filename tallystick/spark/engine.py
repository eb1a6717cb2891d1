"""The Engine port for real: one epoch as one Spark job, from splits or from a DataFrame.

    splits      read ─► decode ─► functions ─► encode ─┐ frames  ┌─► write ─► report
    DataFrame   any Spark plan ─► functions ─► encode ─┘ shuffle └

Without a Kafka transaction for the epoch there is no writing stage: the tasks that have the rows
write them, each into transactions of its own.

A keyed step is one more stage before the encoding one: readers route rows to its tasks, in frames
of the same kind.

Malformed records that go to a dead-letter topic become frames as well: in the splits engine of the
same pass. Spark's plans have one kind of row, so after a DataFrame they are found by reading the
same splits a second time, in the same job and transaction; only mode deadletter pays for that.

Everything up to the shuffle is pure, so Spark may retry it; the writing stage runs once. Rows that
a reader of ours decoded travel as raw bytes between RDD stages, which costs least; rows that a
DataFrame made are encoded where they are, and their frames are shuffled as rows of that plan.
"""

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from tallystick.epoch.protocol import EpochRan
from tallystick.errors import OptionError, TallystickError
from tallystick.host.forks import check_parent
from tallystick.spark.failures import carrying_failures, spark_error, without_query_contexts
from tallystick.spark.jobs import attempt_number, in_living_workers, task_context
from tallystick.spark.jvm import quiet_tasks
from tallystick.spark.tasks import BroadcastPlans, Parcel, TaskRunner, Unread
from tallystick.state.catalog import StepState
from tallystick.tasks.epoch_plan import NO_STEPS, EpochPlan, PipelinePlan
from tallystick.tasks.event_times import InputState
from tallystick.tasks.frames import FRAME_DDL, Frame
from tallystick.tasks.hints import name_of
from tallystick.tasks.keyed import ProcessPlan
from tallystick.tasks.read import EncodePlan, Outlet, Report, WritePlan, send
from tallystick.tasks.write import CollectPlan, FanOut
from tallystick.values import Producer

MakeWritePlan = Callable[[Producer], WritePlan | CollectPlan]
MakeLast = Callable[[int], EncodePlan | FanOut]
"""The end of an epoch's plan: it writes the rows."""
REPORT_DDL = "report string"
NO_ROWS = -(1 << 31)
"""The source of frames that only begin an epoch; no task's index."""


@dataclass(frozen=True)
class SplitsEngine:
    """Runs an epoch from splits that our own readers fetch; no row reaches the JVM."""

    tasks: TaskRunner
    unread: Unread
    last: MakeLast
    write: MakeWritePlan
    keyed: PipelinePlan = NO_STEPS
    timestamp_ms: int = 0
    source: InputState | None = None

    def run_epoch(
        self, checkpoint_id: int, producer: Producer, state: tuple[StepState, ...]
    ) -> EpochRan:
        """Read, transform and write all of the epoch into the producer's open transaction."""
        if self.keyed.is_idle(state) and self.unread.is_empty:
            return EpochRan((), self.keyed.carried(state))
        last = self._placed(self.last(checkpoint_id))
        epoch = self.keyed.epoch(
            checkpoint_id,
            self.timestamp_ms,
            _token(),
            state,
            last,
            self.source,
            self.unread.control,
        )
        unread = self.unread.with_state(epoch.tables, epoch.lists)
        write = replace(self.write(producer), stage=epoch.stage)
        return epoch.prepared(self.tasks.run(unread, epoch, write))

    def _placed(self, last: EncodePlan | FanOut) -> EncodePlan | FanOut:
        """Let readers write, where their rows are on their way to partitions of the same numbers.

        After a keyed step rows are where their key groups are, whatever their partition was.
        """
        topic = self.unread.only_topic
        if self.keyed.steps or not topic:
            return last
        if isinstance(last, EncodePlan):
            return replace(last, follows=topic)
        return replace(last, encode=last.encode and replace(last.encode, follows=topic))


@dataclass(frozen=True)
class DataFrameEngine:
    """Runs an epoch from any DataFrame: a micro-batch of the user's, or a transformed one.

    Args:
        spark: runs it.
        rows: makes the DataFrame, once per attempt of the epoch.
        dead_letters: where malformed records are to be found, by a second reading; None: nowhere.
        is_over: the epoch ends where all inputs end.
    """

    spark: SparkSession
    rows: Callable[[BroadcastPlans], DataFrame]
    last: MakeLast
    write: MakeWritePlan
    dead_letters: Unread | None = None
    keyed: PipelinePlan = NO_STEPS
    timestamp_ms: int = 0
    is_over: bool = False

    def run_epoch(
        self, checkpoint_id: int, producer: Producer, state: tuple[StepState, ...]
    ) -> EpochRan:
        """Encode and write all rows into the producer's open transaction."""
        last = self.last(checkpoint_id)
        epoch = self.keyed.epoch(
            checkpoint_id, self.timestamp_ms, _token(), state, last, is_over=self.is_over
        )
        write = replace(self.write(producer), stage=epoch.stage)
        context = self.spark.sparkContext
        with quiet_tasks(context), BroadcastPlans(context) as broadcast_plans:
            rows = self.rows(broadcast_plans)
            reports = in_living_workers(
                lambda: self._reports(rows, epoch, write, broadcast_plans), self._run_nothing
            )
        return epoch.prepared(reports)

    def _run_nothing(self) -> None:
        """Do as `SplitsEngine` does: Spark has workers of another pool for DataFrames."""
        count = self.spark.sparkContext.defaultParallelism
        self.spark.range(0, count, 1, count).mapInArrow(_idle_rows, "id bigint").collect()

    def _reports(
        self,
        rows: DataFrame,
        epoch: EpochPlan,
        write: WritePlan | CollectPlan,
        broadcast_plans: BroadcastPlans,
    ) -> list[Report]:
        """Run a Spark job: encode rows where they are, route frames, write; return reports."""
        first, writing = broadcast_plans.pack(epoch.first), broadcast_plans.pack(write)

        def send_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            number = attempt_number()
            for frame in send(first.plan, batches, source=_task_index(), attempt_number=number):
                yield _frame_row(frame)

        def write_frames(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            report = writing.plan.write(_frames_of(batches), attempt_number())
            yield pa.RecordBatch.from_pydict({"report": [report.to_json()]})

        frames = rows.mapInArrow(carrying_failures(send_rows), FRAME_DDL)
        if self.dead_letters is not None:
            unread = broadcast_plans.pack(self.dead_letters)
            frames = frames.union(_dead_letter_frames(self.spark, unread, first))
        if epoch.plans:
            frames = frames.union(_opening_frames(self.spark, first))
        for plan in epoch.plans:
            process = _process_rows(broadcast_plans.pack(plan))
            frames = _routed(frames, plan.base.parallelism).mapInArrow(process, FRAME_DDL)
        if epoch.writer_count:
            frames = _routed(frames, epoch.writer_count)
        reports = frames.mapInArrow(carrying_failures(write_frames), REPORT_DDL).collect()
        return [Report.from_json(row["report"]) for row in reports]


def _process_rows(
    parcel: Parcel[ProcessPlan],
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def process(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for frame in parcel.plan.run(_frames_of(batches), _task_index(), attempt_number()):
            yield _frame_row(frame)

    return carrying_failures(process)


def _routed(frames: DataFrame, task_count: int) -> DataFrame:
    """Each frame in the partition of its target, in order."""
    return frames.repartitionById(task_count, "target").sortWithinPartitions("source", "sequence")


def _frames_of(batches: Iterable[pa.RecordBatch]) -> Iterator[Frame]:
    return (Frame(**row) for batch in batches for row in batch.to_pylist())


def transformed(
    functions: Iterable[Callable[[DataFrame], DataFrame]], rows: DataFrame
) -> DataFrame:
    """Return a DataFrame after the functions of `transform` steps.

    Raises:
        OptionError: a function returned something else.
    """
    for function in functions:
        returned: object = _returned(function, rows)
        if not isinstance(returned, DataFrame):
            kind = f"{type(returned).__module__}.{type(returned).__name__}"
            returned_words = "None" if returned is None else f"a {kind}"
            remedy = "has it no `return`?" if returned is None else "return it as Spark made it"
            raise OptionError(
                f"transform {name_of(function)}: the function returned "
                f"{returned_words}, expected a DataFrame of PySpark: {remedy}"
            )
        rows = returned
    return rows


def _returned(function: Callable[[DataFrame], DataFrame], rows: DataFrame) -> object:
    """Call a function of a `transform` step; its error gets the name and the user's line."""
    try:
        with without_query_contexts():
            return function(rows)
    except TallystickError:
        raise
    except Exception as error:
        raise spark_error(error, f"transform {name_of(function)}", rows.columns) from None


def read_frame(
    spark: SparkSession, unread: Unread, ddl: str, broadcast_plans: BroadcastPlans
) -> DataFrame:
    """The well-formed records of the splits as a DataFrame, read by our own readers."""
    reading = broadcast_plans.pack(unread)

    def read_share(indices: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from reading.plan.read(_ids(indices))

    return _one_row_per_reader(spark, unread).mapInArrow(carrying_failures(read_share), ddl)


def _opening_frames(spark: SparkSession, first: Parcel[Outlet]) -> DataFrame:
    """Return empty frames, from a source of their own.

    Spark plans no task at all after a DataFrame that it knows to be empty; a keyed step has timers
    to look for, and a state to carry on.
    """

    def send_nothing(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        deque(batches, maxlen=0)
        for frame in send(first.plan, (), source=NO_ROWS):
            yield _frame_row(frame)

    return spark.range(0, 1, 1, 1).mapInArrow(carrying_failures(send_nothing), FRAME_DDL)


def _dead_letter_frames(
    spark: SparkSession, reading: Parcel[Unread], first: Parcel[Outlet]
) -> DataFrame:
    def encode_share(indices: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        letters = reading.plan.read_dead_letters(_ids(indices))
        # A source of its own: Spark may run both sides of the union as one task.
        source, number = -1 - _task_index(), attempt_number()
        for frame in send(first.plan, letters, source=source, attempt_number=number):
            yield _frame_row(frame)

    return _one_row_per_reader(spark, reading.plan).mapInArrow(
        carrying_failures(encode_share), FRAME_DDL
    )


def _one_row_per_reader(spark: SparkSession, unread: Unread) -> DataFrame:
    count = unread.reader_count
    return spark.range(0, count, 1, count)


def _ids(indices: Iterable[pa.RecordBatch]) -> list[int]:
    """Return the readers' numbers in rows of `_one_row_per_reader`."""
    return [index for batch in indices for index in batch.column("id").to_pylist()]


def _token() -> str:
    return secrets.token_hex(8)


def _idle_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    check_parent()
    yield from batches


def _task_index() -> int:
    return task_context().partitionId()


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
