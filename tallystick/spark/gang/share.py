"""One member's share of an epoch: tasks of each stage, and the frames between members."""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from tallystick.spark.gang.inbox import Inbox
from tallystick.tasks.frames import Frame
from tallystick.tasks.keyed import ProcessPlan
from tallystick.tasks.read import Report

FramesOf = Callable[[int], Iterable[Frame]]
"""The frames that the task of an index sends."""
Result = Callable[[], list[Report]]
Beside = Callable[[Result], Result]
"""Begins something beside what this process does, and returns how its result is waited for."""


class WriteStep(Protocol):
    """The work of an epoch's last tasks; see `task.WritePlan`."""

    def write(self, frames: Iterator[Frame], attempt_number: int) -> Report:
        """Write all frames; report once, and never write after."""
        ...


class PeerStream(Protocol):
    """The stream of a stage's frames to a peer."""

    def add(self, run: int, stage: int, frame: Frame) -> None:
        """Send a frame, perhaps with others."""
        ...

    def end(self, run: int, stage: int, source: int) -> None:
        """Report that a source has no more frames."""
        ...

    def flush(self) -> None:
        """Send what waits."""
        ...


class Share:
    """A member's share of the tasks of an epoch.

    Args:
        index: of the member.
        count: the number of members.
        inbox: gets frames of the member itself, and of its peers.
        send_to: opens a stream to a peer.
        peers: the indices of the other members.
        on_task: called with the index of each task before it runs.
        beside: runs the writing tasks while the others run.
    """

    def __init__(
        self,
        index: int,
        count: int,
        inbox: Inbox,
        peers: Iterable[int],
        send_to: Callable[[int], PeerStream],
        on_task: Callable[[int], None],
        beside: Beside,
    ) -> None:
        self._index, self._count = index, count
        self._inbox = inbox
        self._peers = tuple(peers)
        self._send_to = send_to
        self._on_task = on_task
        self._beside = beside

    def run(
        self,
        run: int,
        frames_of: FramesOf,
        source_count: int,
        plans: Sequence[ProcessPlan],
        writer_count: int,
        write: WriteStep,
        attempt_number: int = 0,
        *,
        is_cut: bool = False,
    ) -> list[Report]:
        """Run the tasks of an order.

        Args:
            run: the order's number.
            frames_of: returns the frames of a reader.
            source_count: the number of readers.
            plans: of the keyed steps.
            writer_count: how many tasks write; 0: the last tasks report instead.
            write: writes a task's frames and reports.
            attempt_number: of tasks that send to sinks of their own.
            is_cut: several readers read parts of one partition, whose order is kept.

        Raises:
            EpochCancelledError: the run is given up.
            what a task, or the inbox, raises.
        """
        self._inbox.begin(run)
        for stage, plan in enumerate(plans, start=1):
            self._deliver(run, stage, source_count, frames_of)
            frames_of = self._processing(run, stage, plan, source_count, attempt_number)
            source_count = plan.base.parallelism
        if not writer_count:
            return [_written(write, frames_of(at)) for at in self._mine(source_count)]
        stage = len(plans) + 1
        received = self._received(run, stage, source_count, by_source=is_cut)
        written = self._beside(
            lambda: [_written(write, received(at)) for at in self._tasks(writer_count)]
        )
        try:
            self._deliver(run, stage, source_count, frames_of)
        except BaseException:
            self._inbox.cancel(run)
            with contextlib.suppress(Exception):
                written()  # the driver may begin the next run once it gets the error
            raise
        return written()

    def _processing(
        self, run: int, stage: int, plan: ProcessPlan, source_count: int, number: int
    ) -> FramesOf:
        received = self._received(run, stage, source_count)
        return lambda at: plan.run(iter(received(at)), at, number)

    def _received(
        self, run: int, stage: int, source_count: int, *, by_source: bool = True
    ) -> FramesOf:
        return lambda at: self._inbox.frames(run, stage, at, source_count, by_source=by_source)

    def _tasks(self, task_count: int) -> range:
        """Return this member's tasks of a stage."""
        return range(self._index, task_count, self._count)

    def _mine(self, task_count: int) -> Iterator[int]:
        """Yield the indices of `_tasks`, and call `on_task` with each before the task runs."""
        for index in self._tasks(task_count):
            self._on_task(index)
            yield index

    def _deliver(self, run: int, stage: int, source_count: int, frames_of: FramesOf) -> None:
        """Run this member's source tasks, and send each frame to the member of its target task."""
        sending: Mapping[int, PeerStream] = {peer: self._send_to(peer) for peer in self._peers}
        for source in self._mine(source_count):
            with _closing(frames_of(source)) as frames:
                for frame in frames:
                    peer = frame.target % self._count
                    if peer == self._index:
                        self._inbox.put(run, stage, frame)
                    else:
                        sending[peer].add(run, stage, frame)
            self._inbox.end(run, stage, source)
            for stream in sending.values():
                stream.end(run, stage, source)
        for stream in sending.values():
            stream.flush()


def _written(write: WriteStep, sent: Iterable[Frame]) -> Report:
    with _closing(sent) as frames:
        return write.write(frames, 0)


@contextlib.contextmanager
def _closing(sent: Iterable[Frame]) -> Iterator[Iterator[Frame]]:
    """Yield the frames of a task, and close their generator even if it is not read to the end."""
    frames = iter(sent)
    try:
        yield frames
    finally:
        if isinstance(frames, Generator):
            frames.close()
