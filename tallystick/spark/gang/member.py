"""A resident task: one process of a gang, which runs its share of every epoch."""

import contextlib
import os
import struct
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from socket import socket
from threading import Thread
from typing import Any, NoReturn

from tallystick.errors import TallystickError, WorkerOrphanedError
from tallystick.exchange import Frame
from tallystick.keyed_task import ProcessPlan
from tallystick.parent_process import bind_to_forker
from tallystick.spark.gang.inbox import HELD_BYTES_MAX, EpochCancelledError, Inbox
from tallystick.spark.gang.link import Address, Link, LinkBrokenError, listen
from tallystick.spark.gang.messages import Known, Order, dumps, loads
from tallystick.spark.shipment import Parcel
from tallystick.task import Report, send

HEAD = struct.Struct("!BqiiiiiiqHQ")
"""Kind, run, stage, target, source, sequence, partition, records, attempt; lengths."""
ROWS, END = 0, 1
SEND_BYTES = 256 << 10
SEND_PARTS = 300
"""Frames for a peer are sent together up to here."""

READY, DONE, FAILED, CANCELLED, CUT = "ready", "done", "failed", "cancelled", "cut"
"""What a member says: of itself, of its run of an order, of its connections to others."""
ORDER, CANCEL, LEAVE = "order", "cancel", "leave"
"""What the driver says."""


@dataclass(frozen=True)
class Spec:
    """What each member has from the Spark job that it runs in.

    Args:
        driver: where the driver listens.
        secret: what members and driver prove to each other.
        count: how many members there are.
        known: what orders leave out; see `order.Known`.
        held_bytes_max: see `Inbox`.
    """

    driver: Address
    secret: bytes = field(repr=False)
    count: int
    known: Parcel[tuple[Any, ...]] = field(repr=False)
    held_bytes_max: int = HELD_BYTES_MAX


def serve(spec: Spec, indices: Sequence[int]) -> None:
    """Be one member, and fork a process for each other one; return when the driver says so.

    Raises:
        LinkBrokenError: the driver does not want them, as when Spark runs a lost task again.
    """
    children = [pid for index in indices[1:] if (pid := _fork(spec, index))]
    try:
        Member(spec, indices[0]).serve()
    finally:
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _fork(spec: Spec, index: int) -> int:
    """Start a member in a process of its own; it ends with this one."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        bind_to_forker(parent)
        Member(spec, index).serve()
    except LinkBrokenError:
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


class Member:
    """One process of a gang.

    Args:
        spec: what it has from the driver.
        index: which member it is.
    """

    def __init__(self, spec: Spec, index: int) -> None:
        self._index, self._count = index, spec.count
        self._secret = spec.secret
        self._known = spec.known.plan
        self._inbox = Inbox(spec.held_bytes_max)
        self._orders: SimpleQueue[tuple[int, bytes] | None] = SimpleQueue()
        self._driver = Link.call(spec.driver, spec.secret)
        with listen(self._driver.host) as listener:
            self._driver.say(index, listener.getsockname(), os.getpid())
            addresses: tuple[Address, ...] = self._driver.hear()
            _begin(self._listen)  # from here on the driver may give the gang up
            accepting = _begin(self._accept, listener)
            self._peers = {
                peer: Link.call(address, spec.secret)
                for peer, address in enumerate(addresses)
                if peer != index
            }
            accepting.join()

    def serve(self) -> None:
        """Run orders until the driver says that there are no more."""
        self._driver.say(READY, self._index, 0, None)
        while (order := self._orders.get()) is not None:
            run, data = order
            try:
                said, found = DONE, dumps(self._run(Known.loads(data, self._known)))
            except EpochCancelledError:
                said, found = CANCELLED, b""
            except LinkBrokenError as error:
                said, found = CUT, dumps(error)
            except WorkerOrphanedError:
                _end_process()  # Spark must take another worker
            except BaseException as error:
                said, found = FAILED, _portable(error)
            self._driver.say(said, self._index, run, found)

    def _run(self, order: Order) -> list[Report]:
        run = order.run
        self._inbox.begin(run)
        shares, read = order.unread.shares, order.unread.plan
        source_count = len(shares)

        def made_by_reader(at: int) -> Iterable[Frame]:
            return send(order.first, read.read_both(shares[at]), source=at)

        made: Callable[[int], Iterable[Frame]] = made_by_reader
        for stage, plan in enumerate(order.plans, start=1):
            self._deliver(run, stage, source_count, made)
            made = self._processing(run, stage, plan, source_count)
            source_count = plan.base.parallelism
        if order.writer_count:
            stage = len(order.plans) + 1
            self._deliver(run, stage, source_count, made)
            made = self._received(run, stage, source_count)
        last_count = order.writer_count or source_count
        return [order.write.write(iter(made(at)), 0) for at in self._mine(last_count)]

    def _processing(
        self, run: int, stage: int, plan: ProcessPlan, source_count: int
    ) -> Callable[[int], Iterable[Frame]]:
        received = self._received(run, stage, source_count)
        return lambda at: plan.run(iter(received(at)), at, 0)

    def _received(
        self, run: int, stage: int, source_count: int
    ) -> Callable[[int], Iterable[Frame]]:
        return lambda at: self._inbox.frames(run, stage, at, source_count)

    def _mine(self, task_count: int) -> range:
        """The tasks of a stage that this member runs."""
        return range(self._index, task_count, self._count)

    def _deliver(
        self, run: int, stage: int, source_count: int, made: Callable[[int], Iterable[Frame]]
    ) -> None:
        """Send what the tasks of this member make to the members whose tasks get it."""
        sending = {peer: _Sending(link) for peer, link in self._peers.items()}
        for source in self._mine(source_count):
            for frame in made(source):
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

    def _listen(self) -> None:
        """Hear the driver; when it is gone, so is this process, whatever it is doing."""
        try:
            while True:
                said = self._driver.hear()
                if said[0] == ORDER:
                    self._orders.put(said[1:])
                elif said[0] == CANCEL:
                    self._inbox.cancel(said[1])
                else:
                    self._orders.put(None)
                    return
        except BaseException:
            _end_process()

    def _accept(self, listener: socket) -> None:
        missing = self._count - 1
        while missing:
            raw, _ = listener.accept()
            try:
                link = Link.taken(raw, self._secret)
            except LinkBrokenError:
                continue  # a stranger
            missing -= 1
            _begin(self._take, link)

    def _take(self, link: Link) -> None:
        """Put what a peer sends into the inbox, until one of both ends."""
        try:
            while True:
                head = HEAD.unpack(link.read(HEAD.size))
                kind, run, stage, target, source, sequence, partition, records, attempt, t, d = head
                if kind == END:
                    self._inbox.end(run, stage, source)
                    continue
                topic, data = link.read(t).decode(), link.read(d)
                frame = Frame(target, source, sequence, topic, partition, records, data, attempt)
                self._inbox.put(run, stage, frame)
        except LinkBrokenError as error:
            # Members leave one after another: then the driver does not listen any more.
            self._inbox.fail(error)
            with contextlib.suppress(LinkBrokenError):
                self._driver.say(CUT, self._index, 0, dumps(error))
        except Exception as error:
            self._inbox.fail(error)


class _Sending:
    """Frames of one stage on their way to one peer."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._parts: list[bytes] = []
        self._bytes = 0

    def add(self, run: int, stage: int, frame: Frame) -> None:
        """Send a frame, with others."""
        topic, data = frame.topic.encode(), frame.data
        head = HEAD.pack(
            ROWS,
            *(run, stage, frame.target, frame.source, frame.sequence, frame.partition),
            *(frame.record_count, frame.attempt, len(topic), len(data)),
        )
        self._parts += (head, topic, data)
        self._bytes += len(data)
        if self._bytes >= SEND_BYTES or len(self._parts) >= SEND_PARTS:
            self.flush()

    def end(self, run: int, stage: int, source: int) -> None:
        """Say that a source has no more frames."""
        self._parts.append(HEAD.pack(END, run, stage, 0, source, 0, 0, 0, 0, 0, 0))

    def flush(self) -> None:
        """Send what waits."""
        self._link.send(self._parts)
        self._parts, self._bytes = [], 0


def _portable(error: BaseException) -> bytes:
    """An error as the driver can have it: of its own class where that can travel, else its text."""
    text = "".join(traceback.format_exception(error))
    note = f"in a resident task:\n{text}"
    try:
        again = loads(dumps(error))
        if isinstance(again, Exception) and type(again) is type(error):
            again.add_note(note)
            return dumps(again)
    except Exception:
        pass
    again = TallystickError(f"{type(error).__name__}: {error}")
    again.add_note(note)
    return dumps(again)


def _begin(do: Callable[..., None], *given: object) -> Thread:
    thread = Thread(target=do, args=given, daemon=True, name=f"tallystick{do.__name__}")
    thread.start()
    return thread


def _end_process() -> NoReturn:
    os._exit(1)
