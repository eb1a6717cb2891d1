"""Resident tasks on the driver's side: `GangTasks` starts a `Gang`, and again where it is lost.

A gang is the Spark job of its members, and the orders that they get.
"""

import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import Any
from weakref import WeakKeyDictionary

from pyspark import SparkContext

from tallystick.errors import EpochAbortedError, OptionError
from tallystick.host.forks import check_parent
from tallystick.spark.cluster import is_local, members_max
from tallystick.spark.failures import reason_line
from tallystick.spark.gang.inbox import CUT, FAILED, HELD_BYTES_MAX, READY, WORKING, Replies
from tallystick.spark.gang.link import Link, LinkBrokenError, accept_calls, listen, stop_listening
from tallystick.spark.gang.member import CANCEL, LEAVE, ORDER, Spec, serve
from tallystick.spark.gang.messages import (
    Order,
    PicklingError,
    SharedObjects,
    loads,
    loads_failure,
)
from tallystick.spark.jobs import JobTasks
from tallystick.spark.jvm import quiet_tasks
from tallystick.spark.tasks import BroadcastPlans, Unread
from tallystick.spark.worker_reasons import why_no_worker
from tallystick.tasks.epoch_plan import EpochPlan
from tallystick.tasks.read import Report, WritePlan
from tallystick.tasks.write import CollectPlan

logger = logging.getLogger(__name__)

STOP_MAX_S = 10.0
"""The time members have to stop what they do for an epoch that is given up, or to leave."""
START_MAX_S = 20.0
"""The time the others may need after the first member; then another gang is started."""
STEP_MAX_S = 900.0
"""The time in which some member must get on with an epoch, or import the pipeline's functions.

It is as long as a transaction of an epoch may be by default. A step is what a function does with
one batch, or less.
"""
WARN_EVERY_S = 10.0
"""The interval at which a start that waits reports the reason."""
LOST = "lost"


class GangLostError(EpochAbortedError):
    """The gang is lost, since a member is gone; the gang's writes are not known."""


class GangStoppedError(Exception):
    """The gang was stopped, because its query was; nothing is wrong."""


class GangTooLargeError(Exception):
    """Spark has fewer slots than the gang has tasks, as when an executor is gone.

    Args:
        there: how many members came up.
    """

    def __init__(self, there: int) -> None:
        super().__init__(f"{there} members came up")
        self.there = there


@dataclass(frozen=True)
class Size:
    """The spread of a gang over executors.

    Args:
        tasks: how many tasks of Spark's it is; each holds a slot.
        processes: how many members run in each of them.
    """

    tasks: int
    processes: int = 1

    @property
    def members(self) -> int:
        """The number of members in all."""
        return self.tasks * self.processes


class Gang:
    """A running Spark job of resident tasks, broken for good once a task is lost.

    Args:
        context: runs the job.
        size: the numbers of tasks and members.
        known: the objects that orders may leave out.
        name: the pipeline's.
        stopped: set when its query is stopped, before `give_up` is called.
        epoch_max_s: how long an epoch may take; a member that takes longer is hung. None: as long
            as members get on with it, see `STEP_MAX_S`.

    Raises:
        GangStoppedError: the query was stopped before all members were there.
        GangLostError: not all members came up.
        OptionError: members can never come up, as with another Python.
        GangTooLargeError: members are missing for so long that Spark may have no slots for them.
        PicklingError: the objects that members need cannot be sent.
        what a module of the user's raised while it was imported.
    """

    def __init__(
        self,
        context: SparkContext,
        size: Size,
        known: Sequence[Any],
        name: str,
        stopped: Event,
        epoch_max_s: float | None = None,
    ) -> None:
        self.size = size
        self.pids: dict[int, int] = {}
        self._context = context
        self._name = name
        self._epoch_max_s = epoch_max_s
        self._group = f"tallystick-{secrets.token_hex(8)}"
        self._secret = secrets.token_bytes(32)
        self._known = SharedObjects(known)
        self._answers: SimpleQueue[tuple[str, int, int, bytes]] = SimpleQueue()
        self._links: dict[int, Link] = {}
        self._stopped = stopped
        self._is_lost = False
        self._job_ended = Event()
        self._job_error: Exception | None = None
        self._end = ""
        host, reached = _addresses(context)
        self._listener = listen(host)
        self._port = int(self._listener.getsockname()[1])
        Thread(target=self._run_job, args=(reached,), daemon=True, name=f"gang of {name}").start()
        try:
            self._gather()
        except BaseException:
            self.give_up()
            raise

    @property
    def is_lost(self) -> bool:
        """True if a member is gone, so that nothing can be run here from now on."""
        return self._is_lost

    def run(self, order: Order) -> list[Report]:
        """Run an epoch in the members; every one has stopped when this returns, or raises.

        Args:
            order: with a run number that is larger than those before.

        Raises:
            GangLostError: a member is lost, or hung.
            GangStoppedError: the query was stopped.
            what a function of the user's raised.
        """
        data = self._known.dumps(order)
        for link in self._links.values():
            self._send(link, ORDER, order.run, data)
        replies = Replies(order.run, self._links, loads, loads_failure)
        give_up_s, late = time.monotonic() + self._limit_s, self._too_long("the epoch")
        while replies.is_waiting:
            kind, index, run, answer = self._next(give_up_s, late)
            if kind in (LOST, CUT):
                self._raise_lost(replies.failure, kind, answer, is_late=index < 0)
            if kind == WORKING:
                if self._epoch_max_s is None and replies.failure is None:
                    give_up_s = time.monotonic() + self._limit_s
                continue
            if replies.take(kind, index, run, answer):
                give_up_s, late = time.monotonic() + STOP_MAX_S, "a member did not stop in time"
                for link in self._links.values():
                    self._send(link, CANCEL, order.run)
        if replies.failure is not None:
            raise replies.failure
        return replies.reports

    def leave(self) -> None:
        """Release the members: none has anything to do."""
        for link in self._links.values():
            self._send(link, LEAVE)
        self._job_ended.wait(STOP_MAX_S)
        self.give_up()

    def give_up(self) -> None:
        """End the members at once, even in the middle of work; threads that wait get an error."""
        self._is_lost = True
        stop_listening(self._listener)
        for link in self._links.values():
            link.close()
        if not self._job_ended.wait(0.5):
            with contextlib.suppress(Exception):  # the context is stopping: then so is the job
                self._context.cancelJobGroup(self._group)
            self._job_ended.wait(STOP_MAX_S)

    @property
    def _limit_s(self) -> float:
        return STEP_MAX_S if self._epoch_max_s is None else self._epoch_max_s

    def _too_long(self, what: str) -> str:
        if self._epoch_max_s is None:
            return (
                f"no member got on with {what} for {STEP_MAX_S:.0f} s: a function hangs, or one "
                f"call of it takes longer, for which there is execution='jobs'"
            )
        return (
            f"{what} takes longer than the {self._epoch_max_s:.0f} s that its transaction may: a "
            f"function hangs, or transaction_timeout_ms of the KafkaSink is too short"
        )

    def _next(self, give_up_s: float, late: str) -> tuple[str, int, int, bytes]:
        try:
            return self._answers.get(timeout=max(0.0, give_up_s - time.monotonic()))
        except Empty:
            return CUT, -1, 0, late.encode()

    def _raise_lost(
        self, failure: Exception | None, kind: str, answer: bytes, *, is_late: bool = False
    ) -> None:
        """End all members, since one or the job is gone, and raise what became of the epoch."""
        self.give_up()
        if failure is not None:
            raise failure
        self._check_wanted()
        # The end of a process says more than a link of another one that broke because of it.
        cut = f": {answer.decode()}" if kind == CUT else ""
        why = cut if is_late else self._end or cut
        raise GangLostError(
            f"a resident task of pipeline {self._name!r} is gone or hung{why}. What it wrote is "
            f"not known: the epoch is aborted"
        )

    def _send(self, link: Link, *message: Any) -> None:
        with contextlib.suppress(LinkBrokenError):  # the thread that listens to it says so
            link.send(*message)

    def _run_job(self, host: str) -> None:
        """Run the Spark job: it lasts as long as the gang."""
        processes = self.size.processes
        with BroadcastPlans(self._context) as broadcast_plans:
            spec = Spec(
                driver=(host, self._port),
                secret=self._secret,
                count=self.size.members,
                known=broadcast_plans.pack(self._known.objects),
                held_bytes_max=HELD_BYTES_MAX,
            )

            def run_members(task: int, nothing: Iterable[int]) -> Iterator[str]:
                deque(nothing, maxlen=0)  # Spark does not reuse a worker that left input unread
                check_parent()
                return iter(serve(spec, range(task * processes, (task + 1) * processes)))

            try:
                _hold_slots(self._context, self.size.tasks)
                _end_progress_bar(self._context)
                self._context.setJobGroup(self._group, f"resident tasks of pipeline {self._name}")
                workers = in_clean_workers(self._context)
                tasks = workers.parallelize(range(self.size.tasks), self.size.tasks)
                with quiet_tasks(self._context):
                    ends = tasks.mapPartitionsWithIndex(run_members).collect()
                self._end = f": {'; '.join(ends)}" if ends else ""
            except Exception as error:
                self._job_error = error
                if not (self._is_lost and "cancelled" in str(error)):  # by `give_up`
                    self._end = f". Spark says: {reason_line(str(error))[:600]}"
            finally:
                self._is_lost = True
                _hold_slots(self._context, -self.size.tasks)
                self._job_ended.set()
                self._answers.put((LOST, -1, 0, b""))

    def _gather(self) -> None:
        """Wait until all members are there and know each other."""
        addresses: dict[int, tuple[str, int]] = {}
        calls: SimpleQueue[tuple[Link, int, tuple[str, int], int]] = SimpleQueue()
        Thread(target=self._answer, args=(calls,), daemon=True).start()
        began_s = warned_s = came_s = time.monotonic()
        while len(addresses) < self.size.members:
            try:
                link, index, address, pid = calls.get(timeout=0.2)
            except Empty:
                self._check_coming(len(addresses))
                is_late = time.monotonic() - came_s > START_MAX_S
                if is_late and addresses:
                    self._raise_late(len(addresses))
                if time.monotonic() - warned_s > WARN_EVERY_S:
                    warned_s = time.monotonic()
                    self._warn(warned_s - began_s, len(addresses))
                continue
            if index in addresses:
                link.close()  # Spark runs a task again: the first one is lost
                raise GangLostError(f"resident task {index} started twice")
            link.expect_prompt_reading()
            came_s = time.monotonic()
            self._links[index], addresses[index], self.pids[index] = link, address, pid
        stop_listening(self._listener)
        for index, link in self._links.items():
            self._send(link, *(addresses[at] for at in range(self.size.members)))
            Thread(target=self._listen, args=(index, link), daemon=True).start()
        self._await_ready()
        self._warn_of_slots()

    def _await_ready(self) -> None:
        """Wait until all members have imported and unpickled what the user gave.

        That is the user's code, and may load a model: all together have `STEP_MAX_S`.
        """
        missing = set(self._links)
        began_s = warned_s = time.monotonic()
        while missing:
            self._check_wanted()
            now_s = time.monotonic()
            if now_s - began_s > STEP_MAX_S:
                raise GangLostError(
                    f"resident tasks {sorted(missing)} of pipeline {self._name!r} did not import "
                    f"its functions in {STEP_MAX_S:.0f} s"
                )
            if now_s - warned_s > WARN_EVERY_S:
                warned_s = now_s
                self._warn_of_import(now_s - began_s, len(missing))
            try:
                kind, index, _, answer = self._answers.get(timeout=0.2)
            except Empty:
                continue
            if kind == FAILED:
                error = loads_failure(answer)
                is_import = isinstance(error, ModuleNotFoundError)
                raise (why_no_worker(str(error)) if is_import else None) or error
            if kind in (LOST, CUT):
                self._raise_lost(None, kind, answer)
            if kind == READY:
                missing.discard(index)

    def _warn_of_import(self, waited_s: float, missing: int) -> None:
        logger.warning(
            "pipeline %s: %d of its %d resident tasks import its functions since %.0f s",
            self._name,
            missing,
            self.size.members,
            waited_s,
        )

    def _warn_of_slots(self) -> None:
        """Warn a user at once why other jobs of the application do nothing."""
        slots, held_slots = self._context.defaultParallelism, _held_slots.get(self._context, 0)
        if held_slots >= slots:
            logger.warning(
                "pipeline %s: resident tasks now hold all %d slots of this application: its other "
                "Spark jobs wait until a pipeline ends. Give it more cores, for example "
                "master='local[%d]', or start a pipeline with execution='jobs'",
                self._name,
                slots,
                slots + 1,
            )

    def _check_wanted(self) -> None:
        if self._stopped.is_set():
            raise GangStoppedError(f"pipeline {self._name!r} was stopped")
        if self._context._jsc is None:
            raise GangStoppedError(f"pipeline {self._name!r}: its SparkContext was stopped")

    def _check_coming(self, there: int) -> None:
        self._check_wanted()
        if isinstance(self._job_error, PicklingError):
            raise self._job_error
        if self._job_ended.is_set():
            reason = why_no_worker(str(self._job_error or ""))
            if reason is not None:
                raise reason
            raise GangLostError(f"{there} of {self.size.members} resident tasks came up{self._end}")

    def _raise_late(self, there: int) -> None:
        """Raise the error for a gang of which some members do not come."""
        if self.size.processes == 1:
            raise GangTooLargeError(there)
        # They are forked together: the others hang.
        raise GangLostError(f"{there} of {self.size.members} resident tasks came up in time")

    def _warn(self, waited_s: float, there: int) -> None:
        logger.warning(
            "pipeline %s: waits since %.0f s for Spark to start its resident tasks, which need %d "
            "slots: %d of %d members are there. Other jobs of this application may hold the slots; "
            "give it more cores, or start the pipeline with execution='jobs'",
            self._name,
            waited_s,
            self.size.tasks,
            there,
            self.size.members,
        )

    def _answer(self, calls: SimpleQueue[tuple[Link, int, tuple[str, int], int]]) -> None:
        """Take calls until all members are there."""

        def take(link: Link) -> None:
            index, address, pid = link.receive()
            calls.put((link, index, address, pid))

        accept_calls(self._listener, self._secret, take)

    def _listen(self, index: int, link: Link) -> None:
        try:
            while True:
                self._answers.put(link.receive())
        except Exception:
            self._is_lost = True
            self._answers.put((LOST, index, 0, b""))


_held_slots: WeakKeyDictionary[SparkContext, int] = WeakKeyDictionary()
"""Return the slots that the gangs of an application hold, or wait for."""
_slots_lock = Lock()


def _hold_slots(context: SparkContext, count: int) -> None:
    with _slots_lock:
        _held_slots[context] = _held_slots.get(context, 0) + count


def _addresses(context: SparkContext) -> tuple[str, str]:
    """Return where the driver listens, and how executors reach it there; as Spark's own driver."""
    if is_local(context):
        return "127.0.0.1", "127.0.0.1"
    conf = context.getConf()
    host = conf.get("spark.driver.host", "127.0.0.1")
    return conf.get("spark.driver.bindAddress", host), host


def _end_progress_bar(context: SparkContext) -> None:
    """Keep Spark from drawing a bar on the console: this job would show one for ever."""
    with contextlib.suppress(Exception):  # of another release, perhaps: then there is a bar
        bar = context._jsc.sc().progressBar()
        if bar.isDefined():
            bar.get().stop()


ENVIRONMENT: Mapping[str, str] = {"TALLYSTICK_FORKS_MEMBERS": "1"}
"""Environment variables of the workers that fork members, and of no others."""


def in_clean_workers(context: SparkContext) -> SparkContext:
    """Return the same context, for jobs that run nothing of the user's in Spark's workers.

    These workers fork members, and none of them has ever run a user's code. Spark gives a task any
    idle worker of the same environment. One that ran an earlier job has the user's modules, with
    their connections, generators and caches, and forks would share these; threads would be gone in
    them. Spark keeps a daemon and a pool of workers for each environment, so the jobs of gangs have
    one of their own. Their functions hold the user's objects pickled (`tasks.Parcel`), and only
    members unpickle them.

    Source: `SparkEnv.createPythonWorker`, whose pools go by executable, modules and environment.

    Args:
        context: is left as it is: other threads start their jobs with it.
    """
    same = object.__new__(type(context))
    vars(same).update(vars(context))
    same.environment = {**context.environment, **ENVIRONMENT}
    return same


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
