"""The gang of one run of a pipeline: started when it is needed, and again when it is lost."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from threading import Event, Lock, Thread
from typing import Any

from pyspark import SparkContext

from tallystick.errors import OptionError
from tallystick.spark.cluster import is_local, members_max
from tallystick.spark.gang.gang import (
    Gang,
    GangLostError,
    GangStoppedError,
    GangTooLargeError,
    Size,
    in_clean_workers,
)
from tallystick.spark.gang.messages import Order
from tallystick.spark.jobs import JobTasks
from tallystick.spark.tasks import Unread
from tallystick.tasks.epoch_plan import EpochPlan
from tallystick.tasks.read import Report, WritePlan
from tallystick.tasks.write import CollectPlan

logger = logging.getLogger(__name__)


class GangTasks:
    """Runs the tasks of every epoch in the same processes; see `tasks.TaskRunner`.

    Args:
        context: runs them.
        size: how many there are.
        name: the pipeline's.
        known: what the plans of its epochs have in common.
        epoch_max_s: see `Gang`.
    """

    def __init__(
        self,
        context: SparkContext,
        size: Size,
        name: str,
        known: Sequence[Any] = (),
        epoch_max_s: float | None = None,
    ) -> None:
        self._context = context
        self._size = size
        self._name = name
        self._known = tuple(known)
        self._epoch_max_s = epoch_max_s
        self._runs = count(1)
        self._lock = Lock()
        self._gang: Gang | None = None
        self._stopped = Event()
        self._attempt_number = 0
        self._refusal: OptionError | None = None

    def run(self, unread: Unread, epoch: EpochPlan, write: WritePlan | CollectPlan) -> list[Report]:
        """See `tasks.TaskRunner.run`."""
        gang = self.start()
        if isinstance(write, WritePlan):
            write = replace(write, has_second_attempts=False)
        order = Order(
            run=next(self._runs),
            unread=unread,
            first=epoch.first,
            plans=epoch.plans,
            writer_count=epoch.writer_count,
            write=write,
            attempt_number=self._attempt_number,
        )
        try:
            return gang.run(order)
        except Exception as error:
            if gang.is_lost:
                self._attempt_number = 1  # from now on: a process that is not heard of may wake up
            if isinstance(error, GangLostError):
                self._heal()  # before tasks of a new gang come into dead workers
            raise

    def start(self) -> Gang:
        """Return the gang; if none lives, start one, which takes as long as Spark's tasks do.

        Raises:
            GangStoppedError: the query was stopped.
            GangLostError: it did not come up.
        """
        with self._lock:
            self._check_wanted()
            self.check()
            if self._gang is not None and self._gang.is_lost:
                self._gang.give_up()
                self._gang = None
            if self._gang is None:
                self._gang = self._started()
                if self._stopped.is_set():  # meanwhile, by `close` or `cancel`, which saw no gang
                    self._gang.leave()
                self._check_wanted()
            return self._gang

    def _started(self) -> Gang:
        """Start a gang, a smaller one if Spark has not the slots."""
        size = self._size
        while True:
            try:
                return Gang(
                    self._context, size, self._known, self._name, self._stopped, self._epoch_max_s
                )
            except GangTooLargeError as error:
                logger.warning(
                    "pipeline %s: Spark has slots for %d of its %d resident tasks: it runs with "
                    "that many until one is lost",
                    self._name,
                    error.there,
                    size.tasks,
                )
                size = Size(tasks=error.there)
            except OptionError as error:
                self._refusal = error
                raise
            except GangLostError:
                self._heal()  # its tasks met dead workers, and there may be more
                raise

    def check(self) -> None:
        """Raise the error for tasks that can never come up, once that is known.

        Raises:
            OptionError: workers have another Python, lack a module, or the like.
        """
        if self._refusal is not None:
            raise self._refusal

    def _heal(self) -> None:
        JobTasks(in_clean_workers(self._context)).heal()

    def _check_wanted(self) -> None:
        if self._stopped.is_set():
            raise GangStoppedError(f"pipeline {self._name!r} was stopped")

    def resize(self, size: Size, known: Sequence[Any]) -> None:
        """End the tasks, and start as many as the new size says."""
        with self._lock:
            if self._gang is not None and not self._gang.is_lost:
                self._gang.leave()
            self._gang, self._size, self._known = None, size, tuple(known)

    def prepare(self) -> None:
        """Start the gang in the background; the first epoch waits for it."""

        def start() -> None:
            try:
                self.start()
            except Exception as error:  # the first epoch tries again, and raises
                logger.info("pipeline %s: its resident tasks do not start: %s", self._name, error)

        Thread(target=start, daemon=True, name=f"gang of {self._name}, start").start()

    def cancel(self) -> None:
        """End what the tasks are doing: the query is stopped."""
        self._stopped.set()
        gang = self._gang
        if gang is not None:
            gang.give_up()

    def close(self) -> None:
        """Release the tasks: there is no further epoch."""
        self._stopped.set()
        gang = self._gang
        if gang is not None and not gang.is_lost:
            gang.leave()


def size_of(context: SparkContext, parallelism: int) -> Size:
    """Return the spread of a gang over the slots of a cluster.

    On one machine it holds one slot, whose task forks the other members: the rest of the slots are
    for other jobs of the session, and all cores are used. On a cluster each member holds a slot,
    and if there are some, one is left for other jobs.

    Args:
        context: the cluster's.
        parallelism: how many tasks there are to run; members run several, if there are fewer.
    """
    slots = context.defaultParallelism
    if is_local(context):
        return Size(tasks=1, processes=min(parallelism, slots))
    return Size(tasks=min(parallelism, members_max(slots)))
