"""A connection between two processes of a gang: authenticated, with messages of known length."""

import contextlib
import hmac
import secrets
import socket
import struct
from collections import deque
from collections.abc import Sequence
from threading import Lock
from typing import Any, TypeAlias

from tallystick.errors import RetriableError
from tallystick.spark.gang.messages import dumps, loads

HANDSHAKE_MAX_S = 10.0
SILENCE_MAX_S = 10
"""How long a host may be out of reach before its connections end; a paused process is in reach."""
BUFFER_BYTES = 1 << 18
VIEWS_MAX = 512
"""How many buffers one call may send; Linux takes 1,024."""
LENGTH = struct.Struct("!Q")
NONCE_BYTES = 16
CALLER, CALLED = b"caller", b"called"
"""Both sides prove the same secret, in different words: no proof can be sent back as one's own."""

Address: TypeAlias = tuple[str, int]


class LinkBrokenError(RetriableError):
    """The other side of a connection is gone, or its host is out of reach."""


class Link:
    """One authenticated connection; any thread may send, one may receive.

    Args:
        raw: a connected socket, closed here if the other side proves nothing.
        secret: what both sides know.
        mine: the word of this side.
        theirs: that of the other.

    Raises:
        LinkBrokenError: the other side does not know the secret, or is gone.
    """

    def __init__(self, raw: socket.socket, secret: bytes, mine: bytes, theirs: bytes) -> None:
        self._raw = raw
        self._lock = Lock()
        self._file = raw.makefile("rb", BUFFER_BYTES)
        try:
            _notice_silence(raw)
            raw.settimeout(HANDSHAKE_MAX_S)
            nonce = secrets.token_bytes(NONCE_BYTES)
            raw.sendall(nonce)
            raw.sendall(_proof(secret, mine, self.read(NONCE_BYTES)))
            if not hmac.compare_digest(self.read(32), _proof(secret, theirs, nonce)):
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
    def taken(cls, raw: socket.socket, secret: bytes) -> "Link":
        """Answer a call."""
        return cls(raw, secret, CALLED, CALLER)

    @property
    def host(self) -> str:
        """The address of this side, which the other side reached or was called from."""
        return str(self._raw.getsockname()[0])

    def send(self, parts: Sequence[Any]) -> None:
        """Send buffers one after another, without joining them.

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

    def say(self, *message: Any) -> None:
        """Send a message; see `send`."""
        data = dumps(message)
        self.send([LENGTH.pack(len(data)), data])

    def hear(self) -> Any:
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
        """Hang up; whoever waits for the other side is woken."""
        with contextlib.suppress(OSError):
            self._raw.shutdown(socket.SHUT_RDWR)
        self._raw.close()


def listen(host: str) -> socket.socket:
    """Listen on a free port."""
    return socket.create_server((host, 0), backlog=256)


def _proof(secret: bytes, word: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, word + nonce, "sha256")


def _notice_silence(raw: socket.socket) -> None:
    """Have the kernel end the connection when the other host is silent.

    The kernels ask and answer: a process that is paused, or whose threads are all at work, is not
    taken for lost.
    """
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 4),
        ("TCP_KEEPALIVE", 4),  # macOS's name for it
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", (SILENCE_MAX_S - 4) // 2),
        ("TCP_USER_TIMEOUT", 1000 * SILENCE_MAX_S),  # for what was sent and not acknowledged
    ):
        if hasattr(socket, name):
            raw.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
