"""Tasks as Spark jobs: each epoch is one, with Spark's shuffle between its stages."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pyspark import SparkContext, TaskContext

from tallystick.errors import EpochAbortedError
from tallystick.host.parent_process import check_parent
from tallystick.run.exchange import Frame
from tallystick.run.keyed_epoch import KeyedEpoch
from tallystick.run.keyed_task import ProcessPlan
from tallystick.run.sink_task import CollectPlan
from tallystick.run.task import Report, WritePlan, send
from tallystick.spark.failures import meaning_of, run_until_alive
from tallystick.spark.shipment import Parcel, Shipment
from tallystick.spark.tasks import Unread


@dataclass(frozen=True)
class JobTasks:
    """Runs the tasks of each epoch as one Spark job; see `tasks.TaskRunner`."""

    context: SparkContext

    def run(
        self, unread: Unread, epoch: KeyedEpoch, write: WritePlan | CollectPlan
    ) -> list[Report]:
        """See `tasks.TaskRunner.run`."""
        with Shipment(self.context) as shipment:
            return in_living_workers(
                lambda: self._reports(unread, epoch, write, shipment), self._run_nothing
            )

    def heal(self) -> None:
        """Get rid of workers of Spark's pool that are dead; see `run_until_alive`."""
        run_until_alive(self._run_nothing)

    def _run_nothing(self) -> None:
        """One idle task for each core, in the workers that those of an epoch run in."""
        count = self.context.defaultParallelism
        self.context.parallelize(range(count), count).foreachPartition(_idle)

    def _reports(
        self,
        unread: Unread,
        epoch: KeyedEpoch,
        write: WritePlan | CollectPlan,
        shipment: Shipment,
    ) -> list[Report]:
        task_count = len(unread.shares)
        reading, writing = shipment.pack((unread, epoch.first)), shipment.pack(write)

        def read_share(index: int, indices: Iterable[int]) -> Iterator[tuple[Any, Any]]:
            deque(indices, maxlen=0)  # Spark does not reuse a worker that left input unread
            unread, first = reading.plan
            rows = unread.plan.read_both(unread.shares[index])
            for frame in send(first, rows, source=index, attempt_number=attempt_number()):
                yield frame[:3], frame[3:]

        def write_frames(pairs: Iterable[tuple[Any, Any]]) -> Iterator[Report]:
            yield writing.plan.write(_frames(pairs), attempt_number())

        frames = self.context.parallelize(range(task_count), task_count).mapPartitionsWithIndex(
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
        for frame in parcel.plan.run(_frames(pairs), index, attempt_number()):
            yield frame[:3], frame[3:]

    return process


def _frames(pairs: Iterable[tuple[Any, Any]]) -> Iterator[Frame]:
    return (Frame(*key, *value) for key, value in pairs)


def in_living_workers(
    run: Callable[[], list[Report]], run_nothing: Callable[[], None]
) -> list[Report]:
    """Run a job, and raise the error that one of our tasks raised in it.

    Where the epoch has to run again, Spark's dead workers are got rid of: see `run_until_alive`.
    """
    try:
        return run()
    except Exception as error:
        meaning = meaning_of(error)
        if isinstance(meaning, EpochAbortedError):
            run_until_alive(run_nothing)
        if meaning is error:
            raise
        raise meaning from error


def _idle(elements: Iterable[int]) -> None:
    deque(elements, maxlen=0)
    check_parent()


def _target(key: tuple[int, int, int]) -> int:
    return key[0]


def task_context() -> TaskContext:
    """The Spark task that this runs in."""
    context = TaskContext.get()
    assert context is not None, "runs in a Spark task"
    return context


def attempt_number() -> int:
    """Spark's number of this attempt at the task."""
    return task_context().attemptNumber()
