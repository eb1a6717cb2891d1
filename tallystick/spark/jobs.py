"""Tasks as Spark jobs: each epoch is one, with Spark's shuffle between its stages.

Spark returns a task's Python error as text; see `failures`. A worker that dies is known by Spark's
words for it.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pyspark import SparkContext, TaskContext

from tallystick.errors import EpochAbortedError, TallystickError
from tallystick.host.failure import Failure
from tallystick.host.forks import check_parent
from tallystick.spark.failures import (
    carrying_failures,
    from_text,
    spark_error,
    without_query_contexts,
)
from tallystick.spark.jvm import quiet_tasks
from tallystick.spark.tasks import BroadcastPlans, Parcel, Unread
from tallystick.spark.worker_reasons import why_no_worker
from tallystick.tasks.epoch_plan import EpochPlan
from tallystick.tasks.frames import Frame
from tallystick.tasks.keyed import ProcessPlan
from tallystick.tasks.read import Report, WritePlan
from tallystick.tasks.write import CollectPlan


@dataclass(frozen=True)
class JobTasks:
    """Runs the tasks of each epoch as one Spark job; see `tasks.TaskRunner`."""

    context: SparkContext

    def run(self, unread: Unread, epoch: EpochPlan, write: WritePlan | CollectPlan) -> list[Report]:
        """See `tasks.TaskRunner.run`."""
        with quiet_tasks(self.context), BroadcastPlans(self.context) as broadcast_plans:
            return in_living_workers(
                lambda: self._reports(unread, epoch, write, broadcast_plans), self._run_nothing
            )

    def heal(self) -> None:
        """Remove dead workers from Spark's pool; see `run_until_alive`."""
        run_until_alive(self._run_nothing)

    def _run_nothing(self) -> None:
        """Run one empty task per core, in the workers that run an epoch's tasks."""
        count = self.context.defaultParallelism
        self.context.parallelize(range(count), count).foreachPartition(_idle)

    def _reports(
        self,
        unread: Unread,
        epoch: EpochPlan,
        write: WritePlan | CollectPlan,
        broadcast_plans: BroadcastPlans,
    ) -> list[Report]:
        task_count = unread.reader_count
        reading, writing = broadcast_plans.pack((unread, epoch.first)), broadcast_plans.pack(write)

        def read_share(index: int, indices: Iterable[int]) -> Iterator[tuple[Any, Any]]:
            deque(indices, maxlen=0)  # Spark does not reuse a worker that left input unread
            unread, first = reading.plan
            for frame in unread.send(index, first, attempt_number()):
                yield frame[:3], frame[3:]

        def write_frames(pairs: Iterable[tuple[Any, Any]]) -> Iterator[Report]:
            yield writing.plan.write(_frames(pairs), attempt_number())

        tasks = self.context.parallelize(range(task_count), task_count)
        frames = tasks.mapPartitionsWithIndex(carrying_failures(read_share))
        for plan in epoch.plans:
            routed = frames.repartitionAndSortWithinPartitions(plan.base.parallelism, _target)
            frames = routed.mapPartitionsWithIndex(_process_pairs(broadcast_plans.pack(plan)))
        if epoch.writer_count:
            frames = frames.repartitionAndSortWithinPartitions(epoch.writer_count, _target)
        return frames.mapPartitions(carrying_failures(write_frames)).collect()


def _process_pairs(
    parcel: Parcel[ProcessPlan],
) -> Callable[[int, Iterable[tuple[Any, Any]]], Iterator[tuple[Any, Any]]]:
    def process(index: int, pairs: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        for frame in parcel.plan.run(_frames(pairs), index, attempt_number()):
            yield frame[:3], frame[3:]

    return carrying_failures(process)


def _frames(pairs: Iterable[tuple[Any, Any]]) -> Iterator[Frame]:
    return (Frame(*key, *value) for key, value in pairs)


def in_living_workers(
    run: Callable[[], list[Report]], run_nothing: Callable[[], None]
) -> list[Report]:
    """Run a Spark job; raise the error of a task of ours in place of Spark's error.

    If the epoch has to run again, dead workers are first removed: see `run_until_alive`.
    """
    try:
        with without_query_contexts():
            return run()
    except Exception as error:
        meaning = meaning_of(error)
        if isinstance(meaning, EpochAbortedError):
            run_until_alive(run_nothing)
        if meaning is error:
            raise
        raise meaning from None


def _idle(elements: Iterable[int]) -> None:
    deque(elements, maxlen=0)
    check_parent()


def _target(key: tuple[int, int, int]) -> int:
    return key[0]


def task_context() -> TaskContext:
    """Return the context of the running Spark task."""
    context = TaskContext.get()
    assert context is not None, "runs in a Spark task"
    return context


def attempt_number() -> int:
    """Return Spark's number of this attempt at the task."""
    return task_context().attemptNumber()


_RAISED = re.compile(r"tallystick\.errors\.(\w+): ([^\n]*)")
_WORKER_LOST = re.compile(
    r"Python worker exited unexpectedly|PythonWorkerFactory\.\S*(?:stop|create)Worker\b"
)
"""A worker died in its task, or in Spark's pool of idle ones, or while it was forked."""
_JOB_ABORTED = "Job aborted due to"
_STAGE_GIVEN_UP = "has failed the maximum allowable number of times"
"""Spark's words for a stage whose input is gone: an executor was lost with its shuffle files."""

POOL_JOBS_MAX = 100
"""More than a pool has dead workers, each of which fails a job."""


def meaning_of(error: Exception) -> Exception:
    """Return our own error inside what a Spark job raised, or Spark's with the reason alone."""
    if isinstance(error, TallystickError):
        return error
    text = str(error)
    failure = from_text(text)
    if failure is not None:
        return failure.to_error()
    raised = _RAISED.findall(text)
    if not raised and _STAGE_GIVEN_UP in text:
        return _stage_lost(text)
    if not raised and (reason := why_no_worker(text)):
        return reason
    if not raised and _WORKER_LOST.search(text):
        return _worker_lost(text)
    if not raised:
        return spark_error(error)
    name, message = raised[-1]
    return Failure(name, (name, "TallystickError"), message).to_error()


def _stage_lost(text: str) -> EpochAbortedError:
    """Spark may not run the stage again, so the epoch has to."""
    reason = text[text.index(_STAGE_GIVEN_UP) :].splitlines()[:2]
    return EpochAbortedError(
        f"a stage of the epoch lost its input, as when an executor is gone: it {' '.join(reason)}"
    )


def _worker_lost(text: str) -> EpochAbortedError:
    """Spark may not try the task again, so the epoch has to."""
    lines = (
        line for line in text.splitlines() if _JOB_ABORTED in line or _WORKER_LOST.search(line)
    )
    return EpochAbortedError(
        f"a Python worker died in the middle of the epoch, of a crash or for lack of memory, or "
        f"with its daemon: {next(lines)}"
    )


def run_until_alive(run_nothing: Callable[[], None]) -> None:
    """Run empty jobs until one passes, to remove dead workers from Spark's pool.

    When a worker daemon dies, all its workers do. Spark keeps the idle ones in its pool, and takes
    one out only by giving it a task, which fails: an epoch has too few attempts to do that itself.
    """
    for _ in range(POOL_JOBS_MAX):
        try:
            return run_nothing()
        except Exception as error:
            if not isinstance(meaning_of(error), EpochAbortedError):
                return  # the next attempt at the epoch meets it too
