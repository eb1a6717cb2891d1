"""A task's time by part, each moment counted for the innermost part; and a task's counters.

Tasks are chains of generators, in which work of all kinds takes turns batch by batch. So the part
is switched where work changes hands: two readings of a clock per batch, nothing per row. Outside of
a task the same code counts nothing.
"""

import socket
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

READ, DECODE, FUNCTIONS, STATE, WRITE = "read", "decode", "functions", "state", "write"
EXCHANGE, WAIT, OTHER = "exchange", "wait", "other"
PARTS = (READ, DECODE, FUNCTIONS, STATE, WRITE, EXCHANGE, WAIT, OTHER)
"""The parts of a task's time; docs/performance.md explains each."""
READ_RECORDS, READ_BYTES, WRITTEN_BYTES = "readRecords", "readBytes", "writtenBytes"
"""Records read; bytes of record batches as read and as written, both compressed."""
ROWS_IN, ROWS_OUT = "rowsIn", "rowsOut"
"""Rows that a task got from tasks before, and that it handed on, those of side outputs included."""
REBUILT_COPIES = "rebuiltCopies"
"""Local copies of state that were rebuilt from the checkpoint."""
REUSED_COPIES = "reusedCopies"
"""Local copies of state that existed, and were brought forward by the changes since, if any."""
LIVE_ENTRIES = "liveEntries"
"""Entries of state in a task's local copy, at the end of the epoch before."""
WRITTEN_FILES, WRITTEN_FILE_BYTES = "writtenFiles", "writtenFileBytes"
"""Files that a sink of files wrote, and their bytes."""

Item = TypeVar("Item")


def now_ms() -> int:
    """Return the time by the clock of this machine, in ms since 1970."""
    return time.time_ns() // 1_000_000


class TaskTimes(NamedTuple):
    """The time of a task in an epoch, by part.

    Args:
        stage: 0 for a reading task, from 1 on for keyed steps, the last for a writing task.
        ms: milliseconds of each part that took any time.
        counts: the task's counters, by name.
        task: the number of the task in its stage.
        host: of its process; "": not known.
    """

    stage: int
    ms: dict[str, float]
    counts: Mapping[str, int] = MappingProxyType({})
    task: int = 0
    host: str = ""

    @property
    def wait_ms(self) -> float:
        """The time in which the task waited for other tasks."""
        return self.ms.get(WAIT, 0.0)

    @property
    def rows_in(self) -> int:
        """The records that a reading task read, or the rows that another got."""
        return self.counts.get(ROWS_IN if self.stage else READ_RECORDS, 0)

    @property
    def rows_out(self) -> int:
        """The rows that the task handed on."""
        return self.counts.get(ROWS_OUT, 0)

    @property
    def busy_ms(self) -> float:
        """The task's working time: all parts but `wait`, in which other tasks work."""
        return sum(self.ms.values()) - self.wait_ms

    def to_fields(self) -> list[Any]:
        """Return the values that travel in a task's note, as JSON has them."""
        return [*self[:2], dict(self.counts), *self[3:]]


class Stopwatch:
    """The running count of a task's time, by part."""

    switches = 0
    """Switches of part in this process so far; two at the same time may count as one."""

    def __init__(self) -> None:
        self._ns = dict.fromkeys(PARTS, 0)
        self._part = OTHER
        self.counts: Counter[str] = Counter()
        self._since_ns = time.perf_counter_ns()

    def switch(self, part: str) -> str:
        """Count the time from now on for a part; return the part before."""
        Stopwatch.switches += 1
        now_ns, before = time.perf_counter_ns(), self._part
        self._ns[before] += now_ns - self._since_ns
        self._part, self._since_ns = part, now_ns
        return before

    def times(self, stage: int, task: int = 0) -> TaskTimes:
        """Return the times measured so far, as those of a task."""
        self.switch(self._part)
        ms = {part: round(ns / 1e6, 3) for part, ns in self._ns.items() if ns}
        return TaskTimes(stage, ms, dict(self.counts), task, socket.gethostname())


class _Here(threading.local):
    watch: Stopwatch | None = None


_here = _Here()


@contextmanager
def stopwatch() -> Iterator[Stopwatch]:
    """Measure this thread's work inside the block, as the work of a task."""
    before, _here.watch = _here.watch, Stopwatch()
    try:
        yield _here.watch
    finally:
        _here.watch = before


@contextmanager
def counted_as(name: str) -> Iterator[None]:
    """Count the time inside the block for a part of the task; outside of a task, do nothing."""
    watch = _here.watch
    if watch is None:
        yield
        return
    before = watch.switch(name)
    try:
        yield
    finally:
        watch.switch(before)


def count(name: str, number: int) -> None:
    """Add to a counter of this thread's task; outside of a task, do nothing."""
    if _here.watch is not None:
        _here.watch.counts[name] += number


def timed(name: str, iterable: Iterable[Item]) -> Iterator[Item]:
    """Yield the items of an iterable; count the time that each takes to make for a part."""
    items = iter(iterable)
    try:
        while True:
            with counted_as(name):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item
    finally:
        if isinstance(items, Generator):
            items.close()
