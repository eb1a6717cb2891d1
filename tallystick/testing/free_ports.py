"""Ports that stay free while a broker is down."""

import random
import socket
from collections.abc import Sequence
from contextlib import ExitStack

from tallystick.errors import OptionError

CANDIDATES = range(20_000, 32_000)
"""Below what Linux (32768 to 60999) and macOS (from 49152) give to outgoing connections.

A port from that range could be taken while its broker is down, so that the broker cannot come back;
even by a client of the broker itself: who connects to a free local port of that range again and
again is connected to itself one day.
"""
TRIES_MAX = 1_000


def free_ports(count: int, host: str) -> Sequence[int]:
    """Different ports that nobody listens on right now. Another process may still be quicker.

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
