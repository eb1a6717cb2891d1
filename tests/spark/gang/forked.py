"""A gang without Spark: its tasks are forks of the test, its plans pass numbers on."""

import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Event
from types import SimpleNamespace
from typing import Any, ClassVar

from tallystick.host.stopwatch import WRITE
from tallystick.spark.gang import link as links
from tallystick.spark.gang.gang import Gang, Size
from tallystick.spark.gang.messages import Order
from tallystick.tasks.frames import Frame, Note, NoteKind
from tallystick.tasks.read import OpenOutlet, Outlet, Report, StatelessOutlet, send
from tests.spark.mischief import is_gone
from tests.waiting import wait_for

WAIT_S = 30.0
LEFT_SOMETHING = 7


class ForkedContext:
    """What `Gang` needs of a SparkContext; each task is a process, and none is tried again.

    Args:
        begin: called in each of them first, with the task's number.
    """

    master = "local[2]"
    defaultParallelism = 2  # noqa: N815  Spark's name for it

    def __init__(self, begin: Callable[[int], None] = lambda task: None) -> None:
        self._begin = begin
        self._jsc = object()
        self.environment: dict[str, str] = {}
        self.pids: list[int] = []
        self._lock = threading.Lock()

    def setJobGroup(self, *_: object) -> None:
        """Nothing to do."""

    def cancelJobGroup(self, _: str) -> None:
        """As Spark does it in the end with a task that does not listen."""
        with self._lock:
            for pid in self.pids:
                os.kill(pid, signal.SIGKILL)

    def parallelize(self, tasks: range, _: int) -> Any:
        """A job of so many tasks."""

        def collect(function: Callable[[int, Iterator[int]], Any]) -> list[str]:
            self.pids[:] = [forked(lambda at=at: self._run(function, at)) for at in tasks]
            statuses = [self._status(pid) for pid in list(self.pids)]
            if any(statuses):
                raise RuntimeError(f"tasks ended with {statuses}")
            return []

        return SimpleNamespace(
            mapPartitionsWithIndex=lambda function: SimpleNamespace(
                collect=lambda: collect(function)
            )
        )

    def _run(self, function: Callable[[int, Iterator[int]], Any], task: int) -> None:
        self._begin(task)
        function(task, iter(()))
        _check_left()

    def _status(self, pid: int) -> int:
        """Of one that has ended; its id is nobody's then."""
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            self.pids.remove(pid)
            return os.waitpid(pid, 0)[1]


def forked(run: Callable[[], Any]) -> int:
    """Run something in a fork, which never gets after it: there the tests would go on."""
    pid = os.fork()
    if pid:
        return pid
    try:
        run()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _check_left() -> None:
    """End this process if it keeps threads or connections."""
    deadline = time.monotonic() + 5
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    is_open = any(link._raw.fileno() >= 0 for link in links._links)
    if is_open or threading.active_count() > 1:
        os._exit(LEFT_SOMETHING)


def gang_of(
    size: Size, *, epoch_max_s: float | None = None, begin: Callable[[int], None] | None = None
) -> Gang:
    """A gang that runs."""
    context: Any = ForkedContext(begin) if begin else ForkedContext()
    return Gang(context, size, (), "numbers", Event(), epoch_max_s)


@dataclass(frozen=True)
class Reading:
    """Reads the numbers that a share is, and tells somebody of each."""

    act: Callable[[int], None] = lambda number: None
    at_end: Callable[[], None] = lambda: None

    def send(
        self, share: tuple[int, ...], outlet: Outlet, source: int, attempt_number: int
    ) -> Iterator[Frame]:
        """See `ReadPlan`."""
        return send(outlet, self._numbers(share), source, attempt_number=attempt_number)

    def _numbers(self, share: tuple[int, ...]) -> Iterator[int]:
        try:
            for number in share:
                self.act(number)
                yield number
        finally:
            self.at_end()


@dataclass(frozen=True)
class UnreadNumbers:
    """The numbers of each reader, in the place of an epoch's splits."""

    shares: tuple[tuple[int, ...], ...]
    reading: Reading
    is_cut: bool = False

    @property
    def reader_count(self) -> int:
        """See `Unread`."""
        return len(self.shares)

    def send(self, reader: int, outlet: Outlet, attempt_number: int) -> Iterator[Frame]:
        """See `Unread`."""
        return self.reading.send(self.shares[reader], outlet, reader, attempt_number)


@dataclass(frozen=True)
class Numbers:
    """An outlet for numbers, each in a frame as large as asked for."""

    target_count: int
    size: int = 20
    part: ClassVar[str] = WRITE

    def begun(self, source: int, attempt: int, attempt_number: int) -> OpenOutlet:
        """See `Outlet`."""
        return StatelessOutlet(self.frames, source, attempt)

    def frames(self, number: Any, source: int, sequence: int, attempt: int) -> Iterator[Frame]:
        """One."""
        target, data = number % self.target_count, str(number).encode().ljust(self.size)
        yield Frame(target, source, sequence, "", 0, 1, data, attempt)


@dataclass(frozen=True)
class Processing:
    """A keyed step that adds a million."""

    parallelism: int
    outlet: Numbers
    act: Callable[[int], None] = lambda number: None
    at_end: Callable[[], None] = lambda: None
    base: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", SimpleNamespace(parallelism=self.parallelism))

    def run(self, frames: Iterator[Frame], at: int, number: int) -> Iterator[Frame]:
        """See `ProcessPlan`."""

        def numbers() -> Iterator[int]:
            try:
                for frame in frames:
                    if frame.record_count:
                        self.act(int(frame.data))
                        yield int(frame.data) + 1_000_000
            finally:
                self.at_end()

        yield from send(self.outlet, numbers(), at)


@dataclass(frozen=True)
class WriteStep:
    """Reports what it got."""

    act: Callable[[int], None] = lambda count: None

    def write(self, frames: Iterator[Frame], attempt_number: int) -> Report:
        """See `WritePlan`."""
        assert attempt_number == 0
        numbers = [int(frame.data) for frame in frames if frame.record_count]
        self.act(len(numbers))
        return Report(notes=tuple(Note(NoteKind.LIST, number) for number in numbers))


def order(
    run: int,
    shares: tuple[tuple[int, ...], ...],
    *,
    reading: Reading | None = None,
    steps: tuple[Processing, ...] = (),
    writing: WriteStep | None = None,
    size: int = 20,
    writers: int = 3,
) -> Order:
    """An epoch of numbers."""
    settings: Any = {
        "unread": UnreadNumbers(shares, reading or Reading()),
        "first": Numbers(steps[0].parallelism if steps else writers, size),
        "plans": steps,
        "write": writing or WriteStep(),
    }
    return Order(run=run, writer_count=writers, **settings)


def numbers_of(reports: list[Report]) -> list[int]:
    """What was written."""
    return sorted(note.fields for report in reports for note in report.notes)


def wait_until_gone(pids: list[int]) -> None:
    """Wait for the end of processes."""
    wait_for(lambda: [pid for pid in pids if not is_gone(pid)], [], "processes that live on")


def end(pids: list[int]) -> None:
    """Let a failed test leave nobody behind."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
