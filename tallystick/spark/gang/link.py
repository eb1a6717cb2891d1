"""A connection between two processes of a gang: authenticated, with messages of known length.

Invariants:
    * Nothing is unpickled before the other side has proved the secret.
    * A lost host is noticed in `SILENCE_MAX_S`: the kernels of both sides probe an idle connection,
      and a side that only receives finds out even if the other side's data is what got lost.
    * A process that is paused, or computes without releasing the interpreter, is not taken for
      lost: its kernel answers. What is sent to it waits.
    * A process that a user's function forks keeps no connection open.
    * The side that takes calls lets members through, and strangers hold up nobody.
"""

import contextlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock, Thread
from typing import Any, TypeAlias
from weakref import WeakSet

from tallystick.errors import RetriableError
from tallystick.spark.gang.messages import dumps, loads

HANDSHAKE_MAX_S = 10.0
"""The time for all of a handshake, however its bytes come."""
SILENCE_MAX_S = 10
"""The time a host may be out of reach before its connections end."""
BUFFER_BYTES = 1 << 18
VIEWS_MAX = 512
"""The number of buffers that one call may send; Linux takes 1,024."""
LENGTH = struct.Struct("!Q")
NONCE_BYTES = 16
CALLER, CALLED = b"caller", b"called"
"""Both sides prove the same secret, in different words: no proof can be sent back as one's own."""

Address: TypeAlias = tuple[str, int]


class LinkBrokenError(RetriableError):
    """The other side of a connection is gone, or its host is out of reach."""


class Link:
    """An authenticated connection; any thread may send, a single one may receive.

    Args:
        raw: a connected socket, closed here if the other side proves nothing.
        secret: of the gang, known to both sides.
        mine: the word of this side in the proofs.
        theirs: the word of the other side.

    Raises:
        LinkBrokenError: the other side does not know the secret, or is gone.
    """

    def __init__(self, raw: socket.socket, secret: bytes, mine: bytes, theirs: bytes) -> None:
        self._raw = raw
        self._lock = Lock()
        self._file = raw.makefile("rb", BUFFER_BYTES)
        _links.add(self)
        try:
            _notice_silence(raw)
            handshake = _Handshake(raw, time.monotonic() + HANDSHAKE_MAX_S)
            nonce = secrets.token_bytes(NONCE_BYTES)
            handshake.send(nonce)
            handshake.send(_proof(secret, mine, handshake.read(NONCE_BYTES)))
            if not hmac.compare_digest(handshake.read(32), _proof(secret, theirs, nonce)):
                raise LinkBrokenError("the other side does not know the secret of this gang")
            raw.settimeout(None)
        except OSError as error:
            self.close()
            raise LinkBrokenError(f"no handshake: {error}") from error
        except LinkBrokenError:
            self.close()
            raise

    @classmethod
    def call(cls, address: Address, secret: bytes) -> "Link":
        """Connect to a listening member, or to the driver."""
        try:
            raw = socket.create_connection(address, HANDSHAKE_MAX_S)
        except OSError as error:
            raise LinkBrokenError(
                f"{address[0]}:{address[1]} cannot be reached: {error}"
            ) from error
        return cls(raw, secret, CALLER, CALLED)

    @classmethod
    def accept(cls, raw: socket.socket, secret: bytes) -> "Link":
        """Answer a call."""
        return cls(raw, secret, CALLED, CALLER)

    @property
    def host(self) -> str:
        """The address of this side, which the other side reached or was called from."""
        return str(self._raw.getsockname()[0])

    def expect_prompt_reading(self) -> None:
        """End the connection too where nothing that was sent is taken for `SILENCE_MAX_S`.

        For messages to a process that always reads. Without it, a sender to a lost host learns of
        that when the other members do.
        """
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            milliseconds = 1000 * SILENCE_MAX_S
            self._raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    def send_buffers(self, parts: Sequence[Any]) -> None:
        """Send buffers in their order, without a copy into one buffer.

        Raises:
            LinkBrokenError: not all arrived, perhaps.
        """
        views = deque(memoryview(part).cast("B") for part in parts if len(part))
        try:
            with self._lock:
                while views:
                    sent = self._raw.sendmsg(
                        [views[at] for at in range(min(len(views), VIEWS_MAX))]
                    )
                    while views and sent >= len(views[0]):
                        sent -= len(views.popleft())
                    if sent:
                        views[0] = views[0][sent:]
        except OSError as error:
            raise LinkBrokenError(str(error)) from error

    def send(self, *message: Any) -> None:
        """Send a message; see `send_buffers`."""
        data = dumps(message)
        self.send_buffers([LENGTH.pack(len(data)), data])

    def receive(self) -> Any:
        """Wait for the next message; see `read`."""
        (length,) = LENGTH.unpack(self.read(LENGTH.size))
        return loads(self.read(length))

    def read(self, size: int) -> bytes:
        """Wait for bytes.

        Raises:
            LinkBrokenError: the other side is gone.
        """
        try:
            data: bytes = self._file.read(size)
        except (OSError, ValueError) as error:  # ValueError: closed on this side
            raise LinkBrokenError(str(error)) from error
        if len(data) < size:
            raise LinkBrokenError("the other side is gone")
        return data

    def close(self) -> None:
        """Close the connection, and wake the threads that wait for the other side."""
        with contextlib.suppress(OSError):
            self._raw.shutdown(socket.SHUT_RDWR)  # wakes the reader, which so releases the file
        with contextlib.suppress(OSError):
            self._file.close()  # the descriptor closes with the last of both: then senders learn it
        self._raw.close()


class _Handshake:
    """The bytes before the first message: one deadline is for all of them, not for each."""

    def __init__(self, raw: socket.socket, until_s: float) -> None:
        self._raw = raw
        self._until_s = until_s

    def send(self, data: bytes) -> None:
        """Send all of it."""
        self._limit()
        self._raw.sendall(data)

    def read(self, size: int) -> bytes:
        """Wait for so many bytes, and take no more."""
        data = b""
        while len(data) < size:
            self._limit()
            more = self._raw.recv(size - len(data))
            if not more:
                raise LinkBrokenError("the other side is gone")
            data += more
        return data

    def _limit(self) -> None:
        remaining_s = self._until_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("timed out")
        self._raw.settimeout(remaining_s)


_links: WeakSet[Link] = WeakSet()


def _close_in_fork() -> None:
    """Close a fork's copies of connections: open copies would hide the end of the parent."""
    for link in _links:
        with contextlib.suppress(OSError):
            os.close(link._raw.detach())
    _links.clear()


os.register_at_fork(after_in_child=_close_in_fork)


def listen(host: str) -> socket.socket:
    """Listen on a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=256)


def stop_listening(listener: socket.socket) -> None:
    """Close a listening socket, and wake the thread that waits in `accept`."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def _proof(secret: bytes, word: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, word + nonce, "sha256")


def _notice_silence(raw: socket.socket) -> None:
    """Make the kernel probe an idle connection, and end it when the other host is silent."""
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 4),
        ("TCP_KEEPALIVE", 4),  # macOS's name for it
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", (SILENCE_MAX_S - 4) // 2),
    ):
        if hasattr(socket, name):
            raw.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


UNPROVED_MAX = 256
UNPROVED_S = 1.0
"""The time that a caller has for its proof where others wait; else `HANDSHAKE_MAX_S`."""
PAUSE_S = 0.05
"""The time after which it looks again where nobody can be taken."""


def accept_calls(listener: socket.socket, secret: bytes, take: Callable[[Link], None]) -> None:
    """Take calls until the listener is closed, each in a thread of its own.

    Invariants:
        * It ends when the port is closed, and never by an error: without descriptors or threads it
          hangs up on strangers, and goes on.
        * At most `UNPROVED_MAX` callers that have not proved the secret are there at a time. When
          there are more, callers older than `UNPROVED_S` give way: a proof takes milliseconds.

    Args:
        listener: where members call.
        secret: the secret that callers must prove.
        take: called with the link of each proved caller, in a thread that a `LinkBrokenError` ends.
    """
    callers = _Callers(secret, take)
    while listener.fileno() >= 0:
        if callers.are_too_many:
            callers.hang_up_on_slow_ones()
            time.sleep(PAUSE_S)
            continue
        try:
            raw, _ = listener.accept()
        except OSError:  # closed, or no descriptors
            callers.hang_up_on_slow_ones()
            time.sleep(PAUSE_S)
            continue
        callers.begin(raw)


class _Callers:
    """The callers that have not proved the secret yet."""

    def __init__(self, secret: bytes, take: Callable[[Link], None]) -> None:
        self._secret = secret
        self._take = take
        self._lock = Lock()
        self._since_s: dict[socket.socket, float] = {}

    @property
    def are_too_many(self) -> bool:
        """True if nobody else may come in."""
        return len(self._since_s) >= UNPROVED_MAX

    def begin(self, raw: socket.socket) -> None:
        """Greet a caller in a thread of its own."""
        with self._lock:
            self._since_s[raw] = time.monotonic()
        try:
            Thread(target=self._greet, args=(raw,), daemon=True, name="tallystick_greet").start()
        except RuntimeError:  # no further threads: the caller is refused
            self._forget(raw)
            raw.close()

    def hang_up_on_slow_ones(self) -> None:
        """Shut down callers' connections after `UNPROVED_S`; the callers' threads close them."""
        latest_s = time.monotonic() - UNPROVED_S
        with self._lock:
            slow = [raw for raw, since_s in self._since_s.items() if since_s <= latest_s]
        for raw in slow:
            with contextlib.suppress(OSError):  # closed meanwhile
                raw.shutdown(socket.SHUT_RDWR)

    def _greet(self, raw: socket.socket) -> None:
        with contextlib.suppress(LinkBrokenError):
            try:
                link = Link.accept(raw, self._secret)
            finally:
                self._forget(raw)
            self._take(link)

    def _forget(self, raw: socket.socket) -> None:
        with self._lock:
            del self._since_s[raw]
