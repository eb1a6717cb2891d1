"""The servers that this process cannot reach now, and a first look whether waiting can help.

Connections note what becomes of them; the console of a run tells it after a few seconds.
"""

import errno
import socket
import time
from collections.abc import Iterable
from threading import Lock

from tallystick.errors import OptionError

RECENT_S = 15.0
"""A server that was not tried for so long is no longer one that somebody waits for."""
REFUSED = frozenset({errno.ECONNREFUSED})
LOOKUP_TRIES_S = 3.0
"""A name server may be away for a moment, as where a container has just begun."""


class SilentServerError(ConnectionError):
    """A server has closed the connection at the first bytes, as one with another protocol does."""


class Outages:
    """The servers, by bootstrap servers and address, that do not answer. Threads share it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiting: dict[tuple[str, str], float] = {}
        self._failed: dict[tuple[str, str], tuple[float, float, str]] = {}

    def waits(self, cluster: str, server: str) -> None:
        """Note that an answer is waited for."""
        self._waiting.setdefault((cluster, server), time.monotonic())

    def answers(self, cluster: str, server: str) -> None:
        """Note that a server has answered."""
        self._waiting.pop((cluster, server), None)
        self._failed.pop((cluster, server), None)

    def fails(self, cluster: str, server: str, error: BaseException) -> None:
        """Note that a server cannot be reached, or did not answer in time."""
        now_s = time.monotonic()
        with self._lock:
            since_s = self._waiting.pop((cluster, server), now_s)
            first_s, last_s, _ = self._failed.get((cluster, server), (since_s, now_s, ""))
            first_s = first_s if now_s - last_s < RECENT_S else since_s
            self._failed[cluster, server] = (first_s, now_s, reason_of(error))

    def lasting(self, clusters: Iterable[str], least_s: float) -> dict[str, str]:
        """Return the reasons of the servers that have not answered for so long, by address.

        Args:
            clusters: bootstrap servers of the clusters.
            least_s: the shortest time, in seconds.
        """
        now_s, wanted = time.monotonic(), set(clusters)
        with self._lock:
            failed, waiting = dict(self._failed), dict(self._waiting)
        reasons = {
            server: f"no answer for {now_s - since_s:.0f} s"
            for (cluster, server), since_s in waiting.items()
            if cluster in wanted and now_s - since_s >= least_s
        }
        return reasons | {
            server: reason
            for (cluster, server), (first_s, last_s, reason) in failed.items()
            if cluster in wanted and now_s - first_s >= least_s and now_s - last_s < RECENT_S
        }


OUTAGES = Outages()


def reason_of(error: BaseException) -> str:
    """Return the reason of a failed connection in words, as the socket gave it."""
    if isinstance(error, socket.gaierror):
        return f"the name does not resolve ({error.strerror})"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[0].lower() + error.strerror[1:]
    return str(error) or type(error).__name__


def is_hopeless(error: BaseException) -> bool:
    """True if a server that never answered fails for a reason that waiting rarely mends."""
    if isinstance(error, socket.gaierror | SilentServerError):
        return True
    return isinstance(error, OSError) and error.errno in REFUSED


def unreachable(what: str, reasons: dict[str, str], setting: str) -> OptionError:
    """Return the error for servers none of which can be reached.

    Args:
        what: whose servers, as the beginning of the message.
        reasons: why not, by address.
        setting: the settings to look at.
    """
    listed = "; ".join(f"{server}: {reason}" for server, reason in reasons.items())
    return OptionError(
        f"{what} cannot be reached: {listed}. Nothing was started. Start the server, or correct "
        f"{setting}."
    )
