"""A member's share of an epoch: its tasks of each stage, and the frames that wait for them.

Beside these the answers of members to an order, which wait for the driver.

Frames wait by run of an epoch, stage, target and source. A sender never waits for the tasks here,
so no two members can wait for each other: what does not fit into memory waits in a file, as in
Spark's shuffle.
"""

import contextlib
import io
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from threading import Condition
from typing import IO, Any, NamedTuple, Protocol

from tallystick.tasks.frames import Frame
from tallystick.tasks.keyed import ProcessPlan, overflow_file
from tallystick.tasks.read import Report

HELD_BYTES_MAX = 256 << 20
"""The bytes of frames that wait in a member's memory."""


class EpochCancelledError(Exception):
    """The epoch is cancelled: another task failed."""


class _SpilledFrame(NamedTuple):
    """A frame whose data waits in the file of a run."""

    frame: Frame
    place: int
    size: int


class ChangeSignal(Protocol):
    """A signal that a task waits for; see `threading.Condition`."""

    def __enter__(self) -> object:
        """Take the lock."""
        ...

    def __exit__(self, kind: Any, value: Any, traceback: Any, /) -> object:
        """Release the lock."""
        ...

    def wait(self) -> object:
        """Wait until something has come."""
        ...

    def notify_all(self) -> None:
        """Wake the threads that wait."""
        ...


class Inbox:
    """Frames for the tasks of a member, sent by peers and by the member itself.

    Args:
        held_bytes_max: how many bytes of frames wait in memory.
        changed: the signal on which tasks wait; None: a condition of the inbox's own.
    """

    def __init__(
        self, held_bytes_max: int = HELD_BYTES_MAX, changed: ChangeSignal | None = None
    ) -> None:
        self._held_bytes_max = held_bytes_max
        self._changed: ChangeSignal = Condition() if changed is None else changed
        self._channels: dict[tuple[int, int, int, int], deque[Frame | _SpilledFrame]] = {}
        self._ended: set[tuple[int, int, int]] = set()
        self._files: dict[int, IO[bytes]] = {}
        self._run = 0
        self._cancelled = 0
        self._held_bytes = 0
        self._error: Exception | None = None

    def begin(self, run: int) -> None:
        """Forget the frames of earlier runs."""
        assert run > self._run, f"run {run} begins after run {self._run}"
        with self._changed:
            self._run = run
            for key in [key for key in self._channels if key[0] < run]:
                self._held_bytes -= sum(
                    len(frame.data) for frame in self._channels.pop(key) if isinstance(frame, Frame)
                )
            self._ended = {key for key in self._ended if key[0] >= run}
            for old in [earlier for earlier in self._files if earlier < run]:
                self._files.pop(old).close()

    def cancel(self, run: int) -> None:
        """End the wait for frames of a run, and of earlier ones."""
        with self._changed:
            self._cancelled = max(self._cancelled, run)
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """End every wait: no frame can be taken from here on."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def put(self, run: int, stage: int, frame: Frame) -> None:
        """Take a frame; it is not for waiting.

        Raises:
            OSError: there is no room on the disk.
        """
        with self._changed:
            if run < self._run:
                return
            kept: Frame | _SpilledFrame = frame
            if self._held_bytes + len(frame.data) > self._held_bytes_max:
                kept = self._kept(run, frame)
            else:
                self._held_bytes += len(frame.data)
            key = (run, stage, frame.target, frame.source)
            self._channels.setdefault(key, deque()).append(kept)
            self._changed.notify_all()

    def end(self, run: int, stage: int, source: int) -> None:
        """Note that a source has sent everything, to all targets here."""
        with self._changed:
            self._ended.add((run, stage, source))
            self._changed.notify_all()

    def frames(
        self, run: int, stage: int, target: int, source_count: int, *, by_source: bool = True
    ) -> Iterator[Frame]:
        """Wait for all frames for a target, in order of sequence per source.

        Args:
            run: of an epoch.
            stage: that gets them.
            target: the task of that stage.
            source_count: how many tasks send.
            by_source: all of one source come before all of the next; else as they arrive.

        Raises:
            EpochCancelledError: the run is given up.
            what `fail` was given.
        """
        turns = [range(source, source + 1) for source in range(source_count)]
        for sources in turns if by_source else [range(source_count)]:
            while (frame := self._next(run, stage, target, sources)) is not None:
                yield frame

    def _next(self, run: int, stage: int, target: int, sources: range) -> Frame | None:
        """Wait for the next frame of any of the sources; None: they have sent all."""
        with self._changed:
            while True:
                if self._cancelled >= run:
                    raise EpochCancelledError
                if self._error is not None:
                    raise self._error
                channels = (self._channels.get((run, stage, target, source)) for source in sources)
                channel = next(filter(None, channels), None)
                if channel:
                    first = channel.popleft()
                    break
                if all((run, stage, source) in self._ended for source in sources):
                    return None
                self._changed.wait()
            if isinstance(first, Frame):
                self._held_bytes -= len(first.data)
                return first
            file = self._files[run].fileno()
        return first.frame._replace(data=_read(file, first.size, first.place))

    def _kept(self, run: int, frame: Frame) -> _SpilledFrame:
        if run not in self._files:
            self._files[run] = overflow_file()  # closed by begin
        file = self._files[run]
        place = file.seek(0, io.SEEK_END)
        file.write(frame.data)
        file.flush()
        return _SpilledFrame(frame._replace(data=b""), place, len(frame.data))


def _read(file: int, size: int, place: int) -> bytes:
    """Read as many bytes as asked for; one call of the system's gives 2 GiB at most."""
    parts: list[bytes] = []
    while size:
        part = os.pread(file, size, place)
        if not part:
            raise OSError("the file of frames that wait is shorter than what was written to it")
        parts.append(part)
        size, place = size - len(part), place + len(part)
    return b"".join(parts)


READY, DONE, FAILED, CANCELLED, CUT = "ready", "done", "failed", "cancelled", "cut"
"""A reply of a member: of itself, of its run of an order, of its connections to others."""
WORKING = "working"
"""A sign of a member that it got on with an order since its last one."""


class Replies:
    """The answers to one order.

    Invariant: none is missing when `is_waiting` ends; so every member has stopped what it did for
    the order, and its frames and writes are after it.

    Args:
        run: the order's number; answers to others are not counted.
        members: the members that got the order.
        reports_of: reads the reports in a member's answer.
        error_of: reads the error.
    """

    def __init__(
        self,
        run: int,
        members: Iterable[int],
        reports_of: Callable[[Any], list[Report]],
        error_of: Callable[[Any], Exception],
    ) -> None:
        self._run = run
        self._missing = set(members)
        self._reports_of = reports_of
        self._error_of = error_of
        self.reports: list[Report] = []
        self.failure: Exception | None = None

    @property
    def is_waiting(self) -> bool:
        """True if members have not answered yet."""
        return bool(self._missing)

    def take(self, kind: str, index: int, run: int, answer: Any) -> bool:
        """Take an answer in.

        Args:
            kind: `DONE`, `FAILED` or `CANCELLED`.
            index: of the member.
            run: the number of the answered order.
            answer: the reports or the error.

        Returns:
            True for the first failure: the other members must be stopped.
        """
        if run != self._run:
            return False
        self._missing.discard(index)
        if kind == DONE:
            self.reports += self._reports_of(answer)
        elif kind == FAILED and self.failure is None:
            self.failure = self._error_of(answer)
            return True
        return False


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
