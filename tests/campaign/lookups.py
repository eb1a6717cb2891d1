"""A module as users write them: a client, a generator, a thread and a cache, made at import.

What Spark gives each worker, each process that runs a function of the user's must have for itself:
two that share a socket get each other's answers, two that share a generator draw the same numbers,
and a thread does not live on in a fork.
"""

import functools
import os
import random
import socket
import threading
import time

from tests.campaign.answers import ADDRESS_VARIABLE

REFRESH_S = 0.05
PATIENCE_S = 30.0


class Client:
    """A client of one connection; an answer does not say which question it is of."""

    def __init__(self, address: str) -> None:
        host, _, port = address.partition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._lines = self._socket.makefile("rwb", buffering=0)

    def ask(self, question: str) -> str:
        """Return the answer to a question."""
        self._lines.write(question.encode() + b"\n")
        return self._lines.readline().decode().strip()


class Refresher:
    """Keeps something fresh, in a thread of its own."""

    def __init__(self) -> None:
        self.count = 0
        self.thread = threading.Thread(target=self._go, daemon=True)
        self.thread.start()

    def _go(self) -> None:
        while True:
            time.sleep(REFRESH_S)
            self.count += 1


CLIENT = Client(os.environ[ADDRESS_VARIABLE])
GENERATOR = random.Random()
REFRESHER = Refresher()


def wait_for_refresh(count: int) -> None:
    """Wait until the thread has gone on, for as long as one that lives takes."""
    deadline = time.monotonic() + PATIENCE_S
    while REFRESHER.count == count and REFRESHER.thread.is_alive() and time.monotonic() < deadline:
        time.sleep(REFRESH_S)


@functools.lru_cache(maxsize=64)
def team_of(player: str) -> str:
    """Return what the server says of a player, asked once in each process."""
    return CLIENT.ask(f"team of {player}")
