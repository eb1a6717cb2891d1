"""One member's share of an epoch: its tasks of each stage, and the frames that they exchange."""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from tallystick.exchange import Frame
from tallystick.gang.inbox import Inbox
from tallystick.keyed_task import ProcessPlan
from tallystick.task import Report

Made = Callable[[int], Iterable[Frame]]
"""What the task of an index sends."""


class Writing(Protocol):
    """What the last tasks of an epoch do; see `task.WritePlan`."""

    def write(self, frames: Iterator[Frame], attempt_number: int) -> Report:
        """Write all frames; report once, and never write after."""
        ...


class Sending(Protocol):
    """Frames of one stage on their way to one peer."""

    def add(self, run: int, stage: int, frame: Frame) -> None:
        """Send a frame, perhaps with others."""
        ...

    def end(self, run: int, stage: int, source: int) -> None:
        """Say that a source has no more frames."""
        ...

    def flush(self) -> None:
        """Send what waits."""
        ...


class Share:
    """The tasks that fall to one of several members.

    Args:
        index: which member it is.
        count: how many there are.
        inbox: gets the frames of this member itself, and of its peers.
        send_to: begins to send to a peer.
        peers: the indices of the others.
        on_task: told the index of each task before it runs.
    """

    def __init__(
        self,
        index: int,
        count: int,
        inbox: Inbox,
        peers: Iterable[int],
        send_to: Callable[[int], Sending],
        on_task: Callable[[int], None],
    ) -> None:
        self._index, self._count = index, count
        self._inbox = inbox
        self._peers = tuple(peers)
        self._send_to = send_to
        self._on_task = on_task

    def run(
        self,
        run: int,
        made: Made,
        source_count: int,
        plans: Sequence[ProcessPlan],
        writer_count: int,
        write: Writing,
        attempt_number: int = 0,
    ) -> list[Report]:
        """Run the tasks of an order.

        Args:
            run: the order's number.
            made: what the readers send.
            source_count: how many readers there are.
            plans: of the keyed steps.
            writer_count: how many tasks write; 0: the last ones before them tell what they did.
            write: what those tasks do.
            attempt_number: of tasks that send to sinks of their own.

        Raises:
            EpochCancelledError: the run is given up.
            what a task, or the inbox, raises.
        """
        self._inbox.begin(run)
        for stage, plan in enumerate(plans, start=1):
            self._deliver(run, stage, source_count, made)
            made = self._processing(run, stage, plan, source_count, attempt_number)
            source_count = plan.base.parallelism
        if writer_count:
            stage = len(plans) + 1
            self._deliver(run, stage, source_count, made)
            made = self._received(run, stage, source_count)
        reports = []
        for at in self._mine(writer_count or source_count):
            with _closing(made(at)) as frames:
                reports.append(write.write(frames, 0))
        return reports

    def _processing(
        self, run: int, stage: int, plan: ProcessPlan, source_count: int, number: int
    ) -> Made:
        received = self._received(run, stage, source_count)
        return lambda at: plan.run(iter(received(at)), at, number)

    def _received(self, run: int, stage: int, source_count: int) -> Made:
        return lambda at: self._inbox.frames(run, stage, at, source_count)

    def _mine(self, task_count: int) -> Iterator[int]:
        """The tasks of a stage that this member runs."""
        for index in range(self._index, task_count, self._count):
            self._on_task(index)
            yield index

    def _deliver(self, run: int, stage: int, source_count: int, made: Made) -> None:
        """Send what the tasks of this member make to the members whose tasks get it."""
        sending: Mapping[int, Sending] = {peer: self._send_to(peer) for peer in self._peers}
        for source in self._mine(source_count):
            with _closing(made(source)) as frames:
                for frame in frames:
                    peer = frame.target % self._count
                    if peer == self._index:
                        self._inbox.put(run, stage, frame)
                    else:
                        sending[peer].add(run, stage, frame)
            self._inbox.end(run, stage, source)
            for each in sending.values():
                each.end(run, stage, source)
        for each in sending.values():
            each.flush()


@contextlib.contextmanager
def _closing(made: Iterable[Frame]) -> Iterator[Iterator[Frame]]:
    """What a task makes, which lets go of everything when it is not made to its end."""
    frames = iter(made)
    try:
        yield frames
    finally:
        if isinstance(frames, Generator):
            frames.close()
