"""The side of a gang's port that takes calls: members get through, strangers hold up nobody.

Invariants:
    * It ends when the port is closed, and never by an error: without descriptors or threads it
      hangs up on strangers, and goes on.
    * At most `UNPROVED_MAX` callers that have not proved the secret are there at a time. When there
      are more, callers older than `UNPROVED_S` give way: a proof takes milliseconds.
"""

import contextlib
import socket
import time
from collections.abc import Callable
from threading import Lock, Thread

from tallystick.spark.gang.link import Link, LinkBrokenError

UNPROVED_MAX = 256
UNPROVED_S = 1.0
"""The time that a caller has for its proof where others wait; else `link.HANDSHAKE_MAX_S`."""
PAUSE_S = 0.05
"""The time after which it looks again where nobody can be taken."""


def accept_calls(listener: socket.socket, secret: bytes, take: Callable[[Link], None]) -> None:
    """Take calls until the listener is closed, each in a thread of its own.

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
