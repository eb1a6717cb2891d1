"""A user's module, with all that a process must have for itself: made once, at import."""

import atexit
import functools
import json
import os
import random
import secrets
import socket
import socketserver
import threading
import time
from multiprocessing.pool import Pool, ThreadPool
from typing import Any

import numpy as np
import pyarrow as pa

SERVER = "TESTS_USERS_SERVER"


class Echo(socketserver.StreamRequestHandler):
    """Says back what it hears."""

    def handle(self) -> None:
        """Until the caller hangs up."""
        for line in self.rfile:
            self.wfile.write(line)


class Service:
    """A service that a user's module talks to; its address is in a file that tasks can read."""

    def __init__(self, path: str) -> None:
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        with open(path, "w") as file:
            file.write(str(self._server.server_address[1]))

    def close(self) -> None:
        """Hear no further callers."""
        self._server.shutdown()
        self._server.server_close()


class Client:
    """A connection that asks and waits for the answer."""

    def __init__(self, path: str) -> None:
        with open(path) as file:
            self._raw = socket.create_connection(("127.0.0.1", int(file.read())))
        self._file = self._raw.makefile("rb")
        self.port = self._raw.getsockname()[1]

    def ask(self, number: int) -> bool:
        """Return whether the answer is to this question."""
        self._raw.sendall(b"%d\n" % number)
        return int(self._file.readline()) == number


class Reconnecting:
    """An object with a connection, made anew where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.__setstate__({"path": path})

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path, self.pid, self.client = state["path"], os.getpid(), Client(state["path"])


IMPORTED_BY = os.getpid()
GENERATOR = np.random.default_rng()
POOL, THREADS = Pool(1), ThreadPool(1)
atexit.register(POOL.terminate)
TICKS = [0]


def _tick() -> None:
    while True:
        TICKS[0] += 1
        time.sleep(0.001)


threading.Thread(target=_tick, daemon=True).start()


@functools.lru_cache
def client(path: str) -> tuple[int, Client]:
    """Return the process that connected, and its connection."""
    return os.getpid(), Client(path)


@functools.lru_cache
def token() -> str:
    """Return what this process calls itself."""
    return secrets.token_hex(8)


def ticks() -> bool:
    """Return whether the module's thread runs."""
    before, deadline = TICKS[0], time.monotonic() + 20
    while TICKS[0] == before and time.monotonic() < deadline:
        time.sleep(0.01)
    return TICKS[0] != before


class Observing:
    """A function of a pipeline: a row for each row, which says what its process has.

    Args:
        path: of the service's address.
        shared: a broadcast variable of Spark's, with the number 7.
    """

    def __init__(self, path: str, shared: Any) -> None:
        self.path, self.object, self.shared = path, Reconnecting(path), shared
        self.ballast = bytes(300 << 10)  # so large that it travels as a broadcast variable itself

    def __call__(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Ask, draw, and look around."""
        return pa.record_batch(
            {"value": [json.dumps(self.look(number)) for number in range(rows.num_rows)]}
        )

    def look(self, number: int) -> dict[str, Any]:
        """Return what is found."""
        connected_by, own = client(self.path)
        return {
            "pid": os.getpid(),
            "pids": [IMPORTED_BY, connected_by, self.object.pid],
            "ports": [own.port, self.object.client.port],
            "answers": [own.ask(number), self.object.client.ask(number)],
            "draws": [GENERATOR.random(), np.random.random(), random.random()],
            "token": token(),
            "shared": self.shared.value,
            "ticks": ticks(),
            "pools": [POOL.apply(abs, (-number,)), THREADS.apply(abs, (-number,))] == [number] * 2,
        }
