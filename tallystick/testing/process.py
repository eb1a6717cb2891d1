"""Child processes that cannot outlive their parent, not even when it is killed with SIGKILL.

Invariant: every child is in the process group of one small watchdog, a shell that waits for the
end of a pipe whose other end only this process holds. When this process ends, in whatever way, the
kernel closes the pipe, and the shell kills the group, itself included.

Why not PR_SET_PDEATHSIG: it is Linux only, and it fires when the *thread* that started the child
ends. Why a group: its number cannot be given to other processes as long as the watchdog lives, so
the shell needs no process ids that may be stale by then.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from tallystick.errors import OptionError

WATCHDOG = "read -r _; kill -9 0"


class ProcessGroup:
    """A group of child processes, killed when this process dies."""

    def __init__(self) -> None:
        read_end, write_end = os.pipe()  # close-on-exec: no other child inherits the write end
        self._watchdog = subprocess.Popen(
            ["/bin/sh", "-c", WATCHDOG],
            stdin=read_end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        os.close(read_end)
        self._lifeline = os.fdopen(write_end, "wb", buffering=0)
        _close_in_forked_children(self._lifeline)

    @property
    def id(self) -> int:
        """The number of the group."""
        return self._watchdog.pid

    def spawn(
        self, command: Sequence[str | Path], log_path: Path, **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start a command in the group, its output appended to a file; options are Popen's."""
        with open(log_path, "ab") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            return self.start(command, **streams, **options)

    def start(self, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        """Start a command in the group, as `subprocess.Popen` would."""
        return subprocess.Popen(command, process_group=self._watchdog.pid, **options)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to all in the group; where it stops them, the watchdog goes on."""
        os.killpg(self._watchdog.pid, number)
        self._watchdog.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill what still runs in the group; may be called again."""
        self._lifeline.close()
        self._watchdog.wait()


def _close_in_forked_children(lifeline: BinaryIO) -> None:
    """Close a pipe's end in forks (multiprocessing): their copy would keep the children alive."""
    reference = weakref.ref(lifeline)

    def close() -> None:
        copy = reference()
        if copy is not None:
            with contextlib.suppress(OSError):
                copy.close()

    os.register_at_fork(after_in_child=close)


CANDIDATES = range(20_000, 32_000)
"""Below what Linux (32768 to 60999) and macOS (from 49152) give to outgoing connections.

A port from that range could be taken while its broker is down, so that the broker cannot come back;
even by a client of the broker itself: a process that connects to a free local port of that range
again and again is connected to itself one day.
"""
TRIES_MAX = 1_000
PORTS_APART = 100
PORT_MAX = 2**16


def free_ports(count: int, host: str) -> Sequence[int]:
    """Return different ports on which no process listens; another process may take one before us.

    Raises:
        OptionError: None was found in many tries.
    """
    ports: list[int] = []
    with ExitStack() as bound:
        for port in random.sample(CANDIDATES, TRIES_MAX):
            if len(ports) == count:
                break
            candidate = bound.enter_context(socket.socket())
            try:
                candidate.bind((host, port))
            except OSError:
                continue
            ports.append(port)
    if len(ports) < count:
        raise OptionError(
            f"{count} free ports are needed on {host} and only {len(ports)} were found in "
            f"{TRIES_MAX} tries between {CANDIDATES.start} and {CANDIDATES.stop}: stop what "
            f"listens there, or choose the port yourself."
        )
    return ports


def first_taken(port: int, count: int, host: str = "127.0.0.1") -> int | None:
    """Return the first of successive ports on which a process listens; None: all are free."""
    return next((number for number in range(port, port + count) if _is_taken(number, host)), None)


def free_port_after(port: int, count: int, host: str = "127.0.0.1") -> int:
    """Return the first of `count` free ports beyond a taken one."""
    later = (port + PORTS_APART * number for number in range(1, TRIES_MAX))
    usable = (number for number in later if number + count < PORT_MAX)
    free = (number for number in usable if first_taken(number, count, host) is None)
    return next(free, None) or free_ports(1, host)[0]


def _is_taken(port: int, host: str) -> bool:
    with socket.socket() as candidate:
        # As a broker does: connections that have just ended do not count.
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind((host, port))
        except OSError:
            return True
    return False
