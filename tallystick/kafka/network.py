"""The connections of one client: one per broker, with suspects and requested pauses.

Invariants:
    * At most one connection per broker, so that what is posted to it stays in order.
    * A broker that failed is suspect for a while: others are asked first. Suspicion never excludes.
    * A pause that a broker asked for (throttle_time_ms, KIP-219) is kept before the next request.
"""

import random
import select
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.connection import Connection

SUSPECT_S = 5.0
"""The time for which a broker that failed is asked last; about half of a default broker session."""


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request under way."""

    node: int
    connection: Connection
    correlation_id: int


class Network:
    """Brokers by node id; the bootstrap servers, whose ids are unknown, have negative ones."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._tls = config.ssl_context() if config.uses_tls else None
        self._bootstrap = {
            -1 - index: address for index, address in enumerate(config.bootstrap_addresses)
        }
        self._addresses = dict(self._bootstrap)
        self._connections: dict[int, Connection] = {}
        self._suspect_until: dict[int, float] = {}
        self._paused_until: dict[int, float] = {}
        self._alive: list[int] = []

    def learn(self, brokers: Iterable[tuple[int, str, int]]) -> None:
        """Take over the brokers that a Metadata answer names: (node id, host, port)."""
        self._alive = []
        for node, host, port in brokers:
            if self._addresses.get(node) != (host, port):
                self.drop(node)
            self._addresses[node] = (host, port)
            self._alive.append(node)

    def knows(self, node: int) -> bool:
        """True if the address of a node is known."""
        return node in self._addresses

    def is_connected(self, node: int) -> bool:
        """True if there is a connection to a node."""
        return node in self._connections

    def candidates(self) -> list[int]:
        """Return the nodes to ask what any broker can answer: trusted first, then suspects.

        Among these, idle ones come first, and the bootstrap servers last.
        """
        now = time.monotonic()
        nodes = [*self._alive, *self._bootstrap]
        random.shuffle(nodes)

        def rank(node: int) -> tuple[bool, bool, bool]:
            connection = self._connections.get(node)
            is_busy = connection is not None and connection.is_busy
            return self._suspect_until.get(node, 0.0) > now, is_busy, node < 0

        return sorted(nodes, key=rank)

    def post(self, node: int, request: Any, deadline: float) -> PendingRequest:
        """Send a request; connects first when there is no connection.

        Raises:
            OSError: the broker is in trouble; it is suspect now.
        """
        self._keep_pause(node, deadline)
        try:
            connection = self._connection(node, deadline)
            return PendingRequest(node, connection, connection.post(request, deadline))
        except OSError:
            self._suspect(node)
            raise

    def wait(self, posted: PendingRequest, deadline: float) -> Any:
        """Return the answer; if the connection fails, all requests under way on it are lost."""
        try:
            answer = posted.connection.wait(posted.correlation_id, deadline)
        except OSError:
            posted.connection.close()
            if self._connections.get(posted.node) is posted.connection:
                self._suspect(posted.node)
            raise
        self._suspect_until.pop(posted.node, None)
        throttle_ms = getattr(answer, "throttle_time_ms", 0) or 0
        if throttle_ms > 0:
            self._paused_until[posted.node] = time.monotonic() + throttle_ms / 1000
        return answer

    def discard(self, posted: PendingRequest) -> None:
        """Drop the answer to a posted request when it comes."""
        posted.connection.discard(posted.correlation_id)

    def answered(self, posted: Sequence[PendingRequest], deadline: float) -> list[PendingRequest]:
        """Return the requests whose answer begins to come, or never will; none if time is over."""
        ready = [
            request
            for request in posted
            if request.connection.fileno() < 0
            or request.connection.has_input(request.correlation_id)
        ]
        poll = select.poll()
        by_number = {
            request.connection.fileno(): request for request in posted if request not in ready
        }
        for number in by_number:
            poll.register(number, select.POLLIN)
        patience_s = 0.0 if ready else max(0.0, deadline - time.monotonic())
        ready += [by_number[number] for number, _ in poll.poll(patience_s * 1000)]
        return ready

    def ask(self, node: int, request: Any, deadline: float) -> Any:
        """Send a request and wait for the answer."""
        return self.wait(self.post(node, request, deadline), deadline)

    def drop(self, node: int) -> None:
        """Close the connection to a broker."""
        connection = self._connections.pop(node, None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Close all connections."""
        for node in list(self._connections):
            self.drop(node)

    def _connection(self, node: int, deadline: float) -> Connection:
        connection = self._connections.get(node)
        if connection is not None and connection.expired:
            self.drop(node)
            connection = None
        if connection is None:
            patience_s = self._config.connection_timeout_ms / 1000
            until = min(deadline, time.monotonic() + patience_s)
            connection = Connection(self._addresses[node], self._config, self._tls, until)
            self._connections[node] = connection
        return connection

    def _keep_pause(self, node: int, deadline: float) -> None:
        now = time.monotonic()
        paused_until = self._paused_until.get(node, 0.0)
        if paused_until > now:
            time.sleep(min(paused_until, max(now, deadline)) - now)
        else:
            self._paused_until.pop(node, None)

    def _suspect(self, node: int) -> None:
        self.drop(node)
        self._suspect_until[node] = time.monotonic() + SUSPECT_S
