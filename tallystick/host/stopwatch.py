"""The parts of a task's time: each moment counts for the innermost one.

Tasks are chains of generators, in which work of all kinds takes turns batch by batch. So the part
is switched where work changes hands: two readings of a clock per batch, nothing per row. Outside of
a task the same code counts for nobody.
"""

import json
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Self, TypeVar

READ, DECODE, FUNCTIONS, STATE, WRITE = "read", "decode", "functions", "state", "write"
EXCHANGE, WAIT, OTHER = "exchange", "wait", "other"
PARTS = (READ, DECODE, FUNCTIONS, STATE, WRITE, EXCHANGE, WAIT, OTHER)
"""The parts of a task's time; docs/performance.md explains each."""
_MARK = "times "

Item = TypeVar("Item")


class TaskTimes(NamedTuple):
    """How long one task of an epoch took.

    Args:
        stage: 0 for one that reads, from 1 on for those of keyed steps, the last for writing ones.
        ms: of each part that took any time.
    """

    stage: int
    ms: dict[str, float]

    @property
    def busy_ms(self) -> float:
        """How long it worked; while it waits, others do."""
        return sum(self.ms.values()) - self.ms.get(WAIT, 0.0)

    def to_note(self) -> str:
        """As it travels among the notes of tasks."""
        return _MARK + json.dumps([self.stage, self.ms])

    @classmethod
    def from_note(cls, text: str) -> Self | None:
        """Read back what `to_note` made; None: the note is another one."""
        return cls(*json.loads(text[len(_MARK) :])) if text.startswith(_MARK) else None


class Stopwatch:
    """The time of one task, by part."""

    def __init__(self) -> None:
        self._ns = dict.fromkeys(PARTS, 0)
        self._part = OTHER
        self._since_ns = time.perf_counter_ns()

    def switch(self, part: str) -> str:
        """From now on the time is that of a part; returns whose it was."""
        now_ns, before = time.perf_counter_ns(), self._part
        self._ns[before] += now_ns - self._since_ns
        self._part, self._since_ns = part, now_ns
        return before

    def times(self, stage: int) -> TaskTimes:
        """Return the times measured so far."""
        self.switch(self._part)
        return TaskTimes(stage, {part: round(ns / 1e6, 3) for part, ns in self._ns.items() if ns})


class _Here(threading.local):
    watch: Stopwatch | None = None


_here = _Here()


@contextmanager
def stopwatch() -> Iterator[Stopwatch]:
    """Measure what this thread does, as one task."""
    before, _here.watch = _here.watch, Stopwatch()
    try:
        yield _here.watch
    finally:
        _here.watch = before


@contextmanager
def counted_as(name: str) -> Iterator[None]:
    """Count what is done inside for a part of the task; outside of a task, for nobody."""
    watch = _here.watch
    if watch is None:
        yield
        return
    before = watch.switch(name)
    try:
        yield
    finally:
        watch.switch(before)


def timed(name: str, made: Iterable[Item]) -> Iterator[Item]:
    """Yield the same items; the time in which they are made, one by one, is that of a part."""
    items = iter(made)
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
