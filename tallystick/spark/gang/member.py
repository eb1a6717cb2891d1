"""A resident task: a process of a gang, which runs a share of every epoch."""

import contextlib
import ctypes
import os
import platform
import signal
import struct
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from socket import socket
from threading import Thread
from typing import Any, NoReturn

from pyspark import TaskContext

# Members of every pipeline need them: imported here, before there are members, it is once.
import tallystick.codec.records.decoder
import tallystick.kafka.fetcher
import tallystick.kafka.output
import tallystick.kafka.registry  # noqa: F401
from tallystick.errors import WorkerOrphanedError
from tallystick.host.forks import bind_to_forker, draw_anew
from tallystick.host.stopwatch import Stopwatch
from tallystick.spark.gang.inbox import (
    CANCELLED,
    CUT,
    DONE,
    FAILED,
    READY,
    WORKING,
    EpochCancelledError,
    Inbox,
    Share,
)
from tallystick.spark.gang.link import (
    Address,
    Link,
    LinkBrokenError,
    accept_calls,
    listen,
    stop_listening,
)
from tallystick.spark.gang.messages import Order, SharedObjects, dumps, dumps_failure
from tallystick.spark.tasks import Parcel
from tallystick.tasks.frames import Frame
from tallystick.tasks.read import Report

MMAP_BYTES_MIN = 32 << 20
"""Blocks from this size on come from the kernel as before; glibc allows no higher limit."""
KEPT_BYTES = 256 << 20
"""Free memory beyond this, at the end of the heap, goes back to the system."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def keep_freed_memory() -> None:
    """Make malloc keep what is freed, for the next batch: up to `KEPT_BYTES`.

    By default a block of some hundred kilobytes, as batches are made of, comes from the kernel and
    goes back to it each time, and each of its pages is cleared and mapped again: a tenth of the CPU
    seconds of a stateless pipeline. Where malloc is not glibc's, nothing is changed.

    Source: mallopt(3).
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES_MIN)
    libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


HEAD = struct.Struct("!BqiiiiiiqHQ")
"""Kind, run, stage, target, source, sequence, partition, records, attempt; lengths."""
ROWS, END = 0, 1
SEND_BYTES = 256 << 10
SEND_PARTS = 300
"""Frames for a peer are sent together up to here."""

LEFT = 172
"""A member's exit code when it leaves as ordered."""
LOST_OTHERS = 173
"""A member's exit code when its driver, its Spark worker or another member is gone.

Functions that end their process do so with small numbers, and with 0.
"""
SIGN_EVERY_S = 10.0
"""The interval at which a member that works says so."""
ORDER, CANCEL, LEAVE = "order", "cancel", "leave"
"""Kinds of messages of the driver."""


@dataclass(frozen=True)
class Spec:
    """The settings of a gang's members, sent with the gang's Spark job.

    Args:
        driver: where the driver listens.
        secret: of the gang; members and driver prove to each other that they know it.
        count: the number of members.
        known: the objects that orders leave out; see `messages.SharedObjects`. Members unpack it.
        held_bytes_max: see `Inbox`.
    """

    driver: Address
    secret: bytes = field(repr=False)
    count: int
    known: Parcel[tuple[Any, ...]] = field(repr=False)
    held_bytes_max: int


def serve(spec: Spec, indices: Sequence[int]) -> list[str]:
    """Fork members and wait until all have ended; when a member is lost, kill the others.

    Spark did not start the members: its worker, which forks them, lives on independently, and ends
    members that hang. The worker never runs anything of the user's (see `gang.in_clean_workers`):
    each member imports the user's modules and unpickles the user's objects for itself, as Spark's
    workers do.

    Returns:
        Texts about members that ended without an order to leave, except members that only lost
        the driver or another member: they say nothing of the reason.
    """
    assert not spec.known.is_open, "members would share the user's objects"
    members = {_fork(spec, index): index for index in indices}
    ends: list[tuple[int, int]] = []
    try:
        while members and all(code == LEFT for _, code in ends):
            ends += _ended_members(members)
    finally:
        for pid in members:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [
        f"member {index} {_ended(code)}" for index, code in ends if code not in (LEFT, LOST_OTHERS)
    ]


def _ended_members(members: dict[int, int]) -> list[tuple[int, int]]:
    """Wait for the end of members, take out all that have ended, and return their exit codes."""
    ends: list[tuple[int, int]] = []
    pid, status = os.wait()
    while pid:
        if pid in members:
            ends.append((members.pop(pid), os.waitstatus_to_exitcode(status)))
        pid, status = os.waitpid(-1, os.WNOHANG) if members else (0, 0)
    return ends


_SIGNALS: dict[int, str] = {
    signal.SIGKILL: "when memory is short",
    signal.SIGSEGV: "by an error in a compiled library",
    signal.SIGABRT: "by an error in a compiled library",
}
"""The usual reasons of an end by a signal."""


def _ended(code: int) -> str:
    if code < 0:
        meaning = _SIGNALS.get(-code, "")
        return f"was ended by signal {-code}{meaning and f', as {meaning}'}"
    return f"ended with exit code {code}, as where a function calls os._exit()"


def _fork(spec: Spec, index: int) -> int:
    """Fork a process for a member, and return its id; a member ends with its parent."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        bind_to_forker(parent)
        draw_anew()
        keep_freed_memory()
        member = Member(spec, index)
        try:
            member.serve()
        finally:
            member.close()
    except LinkBrokenError:
        os._exit(LOST_OTHERS)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(LEFT)


class Member:
    """One process of a gang.

    Args:
        spec: the settings from the driver.
        index: of the member.
    """

    def __init__(self, spec: Spec, index: int) -> None:
        self._index = index
        self._secret = spec.secret
        self._parcel = spec.known
        self._inbox = Inbox(spec.held_bytes_max)
        self._writer = ThreadPoolExecutor(1, "tallystick_write")
        self._orders: SimpleQueue[tuple[int, bytes] | None] = SimpleQueue()
        self._peers: dict[int, Link] = {}
        self._callers: SimpleQueue[Link] = SimpleQueue()
        self._driver = Link.call(spec.driver, spec.secret)
        self._driver.expect_prompt_reading()
        listener = listen(self._driver.host)
        try:
            self._driver.send(index, listener.getsockname()[:2], os.getpid())
            addresses: tuple[Address, ...] = self._driver.receive()
            _begin(self._listen)  # from here on the driver may give the gang up
            _begin(self._accept, listener)
            for peer, address in enumerate(addresses):
                if peer != index:
                    self._peers[peer] = Link.call(address, spec.secret)
            self._calls = [self._callers.get() for _ in self._peers]
        finally:
            stop_listening(listener)
        for call in self._calls:
            _begin(self._take, call)
        self._share = Share(
            index,
            spec.count,
            self._inbox,
            self._peers,
            lambda peer: _PeerStream(self._peers[peer]),
            _show_task,
            lambda work: self._writer.submit(work).result,
        )

    def serve(self) -> None:
        """Unpack the user's objects, then run orders until the driver has no more.

        They are the first user code in this process: modules are imported here.
        """
        try:
            known = self._parcel.plan
        except BaseException as error:
            self._driver.send(FAILED, self._index, 0, dumps_failure(error))
            self._orders.get()  # the driver ends the gang: it must not hear first that peers did
        else:
            self._driver.send(READY, self._index, 0, b"")
            _begin(self._give_signs)
            self._run_orders(known)

    def _run_orders(self, known: tuple[Any, ...]) -> None:
        while (order := self._orders.get()) is not None:
            run, data = order
            try:
                kind, answer = DONE, dumps(self._run(SharedObjects.loads(data, known)))
            except EpochCancelledError:
                kind, answer = CANCELLED, b""
            except LinkBrokenError as error:
                kind, answer = CUT, str(error).encode()
            except WorkerOrphanedError:
                _end_process()  # Spark must take another worker
            except BaseException as error:
                kind, answer = FAILED, dumps_failure(error)
            self._driver.send(kind, self._index, run, answer)

    def close(self) -> None:
        """Leave the gang; Spark has other tasks for this process, perhaps."""
        self._writer.shutdown()
        for link in (self._driver, *self._peers.values(), *self._calls):
            link.close()

    def _run(self, order: Order) -> list[Report]:
        unread, number = order.unread, order.attempt_number

        def read_share(at: int) -> Iterable[Frame]:
            return unread.send(at, order.first, number)

        return self._share.run(
            order.run,
            read_share,
            unread.reader_count,
            order.plans,
            order.writer_count,
            order.write,
            number,
            is_cut=unread.is_cut,
        )

    def _listen(self) -> None:
        """Receive the driver's messages; if the driver is lost, end this process at once."""
        try:
            while True:
                message = self._driver.receive()
                if message[0] == ORDER:
                    self._orders.put(message[1:])
                elif message[0] == CANCEL:
                    self._inbox.cancel(message[1])
                else:
                    self._orders.put(None)
                    return
        except BaseException:
            _end_process()

    def _give_signs(self) -> None:
        """Report progress to the driver now and then; a member that hangs is silent."""
        with contextlib.suppress(LinkBrokenError):
            before = Stopwatch.switches
            while True:
                time.sleep(SIGN_EVERY_S)
                if Stopwatch.switches != before:
                    before = Stopwatch.switches
                    self._driver.send(WORKING, self._index, 0, b"")

    def _accept(self, listener: socket) -> None:
        """Take calls until all peers are there."""
        accept_calls(listener, self._secret, self._callers.put)

    def _take(self, link: Link) -> None:
        """Put a peer's frames into the inbox, until the peer or the link ends."""
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
            # Members leave one after another: then the driver no longer listens.
            self._inbox.fail(error)
            with contextlib.suppress(LinkBrokenError):
                self._driver.send(CUT, self._index, 0, str(error).encode())
        except Exception as error:
            self._inbox.fail(error)


class _PeerStream:
    """The stream of a stage's frames to a peer, over a link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._parts: list[bytes] = []
        self._bytes = 0

    def add(self, run: int, stage: int, frame: Frame) -> None:
        """Add a frame, which is sent together with others."""
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
        """Report that a source has no more frames."""
        self._parts.append(HEAD.pack(END, run, stage, 0, source, 0, 0, 0, 0, 0, 0))

    def flush(self) -> None:
        """Send what waits."""
        self._link.send_buffers(self._parts)
        self._parts, self._bytes = [], 0


def _show_task(index: int) -> None:
    """Show a task's index to the user's functions, instead of the number of Spark's task."""
    context: Any = TaskContext.get()
    if context is not None:
        context._partitionId = index


def _begin(do: Callable[..., None], *given: object) -> Thread:
    thread = Thread(target=do, args=given, daemon=True, name=f"tallystick{do.__name__}")
    thread.start()
    return thread


def _end_process() -> NoReturn:
    os._exit(LOST_OTHERS)
