"""The connections of one client: one per broker, with suspects and requested pauses.

A connection is blocking: socket, TLS, SASL, frames, deadlines.

A deadline is a point of `time.monotonic`. No call outlives its deadline by more than a scheduling
delay; the one exception is the name look-up, which the C library does not let us bound.

Invariants:
    * Requests are answered in the order in which they were posted (Kafka promises that).
    * After any OSError, a missed deadline included, the connection is of no more use: an answer
      may be under way that is not waited for. The owner closes it and opens another.
    * What waiting cannot fix (certificate, credentials, plain text where TLS is due) is no
      OSError but an OptionError, so that no retry loop hides it until the deadline.
    * At most one connection per broker, so that what is posted to it stays in order.
    * A broker that failed is suspect for a while: others are asked first. Suspicion never excludes.
    * A pause that a broker asked for (throttle_time_ms, KIP-219) is kept before the next request.
"""

import contextlib
import random
import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tallystick.errors import UNREADABLE, AuthorizationError, OptionError
from tallystick.kafka import protocol, sasl
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.outages import OUTAGES, SilentServerError

FRAME_BYTES_MAX = 1 << 30
"""A longer answer is not Kafka's: no request of ours asks for as much."""
SEND_BYTES_MAX = 1 << 20
"""The bytes given to the socket at once; TLS would otherwise copy a whole request."""
SESSION_SHARE = 0.8
"""The share of a SASL session's lifetime after which its connection is replaced (KIP-368)."""
NO_ACKS = 0
"""A Produce request with it is the one request that gets no answer."""
TLS_ALERT = b"\x15\x03"
"""The answer of a TLS server to plain text."""
SUSPECT_S = 5.0
"""The time for which a broker that failed is asked last; about half of a default broker session."""


class Connection:
    """A connection that is ready for requests: versions are known, the login is done.

    Args:
        address: host and port.
        config: security and client id.
        tls: the certificates, when `config.uses_tls`.
        deadline: when connecting, TLS and SASL must be done.

    Raises:
        OSError: not reachable, or gone again; worth another try.
        AuthorizationError: certificate or credentials were refused.
        OptionError: security.protocol does not fit this port.
    """

    def __init__(
        self,
        address: tuple[str, int],
        config: KafkaConfig,
        tls: ssl.SSLContext | None,
        deadline: float,
    ) -> None:
        self.name = f"{address[0]}:{address[1]}"
        self._expires_at: float | None = None
        self._config = config
        self._versions: dict[int, protocol.VersionRange] = {}
        self._in_flight: deque[protocol.SentRequest] = deque()
        self._answers: dict[int, Any] = {}
        self._unwanted: set[int] = set()
        self._correlation_id = 0
        self._answer_count = 0
        self._socket = _connect(address, deadline)
        try:
            if tls is not None:
                self._socket = self._wrap(tls, address[0], deadline)
            self._learn_versions(deadline)
            if config.uses_sasl:
                self._log_in(address[0], deadline)
        except BaseException:
            self.close()
            raise

    @property
    def expired(self) -> bool:
        """True if the login is about to end, and nothing is under way that would be lost."""
        if self._expires_at is None or self._in_flight:
            return False
        return time.monotonic() > self._expires_at

    @property
    def is_busy(self) -> bool:
        """True if an answer is under way, after which the next one would have to wait."""
        return bool(self._in_flight)

    def post(self, request: Any, deadline: float) -> int:
        """Send a request; several may be under way. Returns what `wait` wants to know."""
        protocol.set_version(request, self._versions, self.name)
        return self._send(request, deadline)

    def wait(self, correlation_id: int, deadline: float) -> Any:
        """Return the answer to a posted request."""
        while correlation_id not in self._answers:
            payload = self._read_frame(deadline)
            sent = self._in_flight.popleft()
            if sent.correlation_id in self._unwanted:
                self._unwanted.discard(sent.correlation_id)
                continue
            self._answers[sent.correlation_id] = protocol.decode_response(sent, payload)
        return self._answers.pop(correlation_id)

    def discard(self, correlation_id: int) -> None:
        """Drop the answer to a posted request when it comes."""
        if self._answers.pop(correlation_id, None) is None:
            self._unwanted.add(correlation_id)

    def fileno(self) -> int:
        """Return the socket's number, for `poll`; -1 when closed."""
        return self._socket.fileno()

    def has_input(self, correlation_id: int) -> bool:
        """True if something was received already that `poll` would not report."""
        inside_tls = isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0
        return inside_tls or correlation_id in self._answers

    def ask(self, request: Any, deadline: float) -> Any:
        """Send a request and wait for its answer."""
        return self.wait(self.post(request, deadline), deadline)

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def _send(self, request: Any, deadline: float) -> int:
        self._correlation_id += 1
        sent, frame = protocol.encode_request(request, self._correlation_id, self._config.client_id)
        view = memoryview(frame)
        while view:
            self._socket.settimeout(_remaining_s(deadline, self.name))
            view = view[self._socket.send(view[:SEND_BYTES_MAX]) :]
        if getattr(request, "acks", None) != NO_ACKS:
            self._in_flight.append(sent)
        return sent.correlation_id

    def _read_frame(self, deadline: float) -> memoryview:
        head = self._read(4, deadline)
        if not self._answer_count and bytes(head[:2]) == TLS_ALERT:
            raise OptionError(
                f"the broker at {self.name} speaks TLS, and security.protocol is "
                f"{self._config.security_protocol}: set SSL or SASL_SSL, or use its other port."
            )
        (size,) = struct.unpack(">i", head)
        if not 4 <= size <= FRAME_BYTES_MAX:
            raise ConnectionError(f"{self.name} sent a frame of {size} bytes, which Kafka does not")
        payload = self._read(size, deadline)
        self._answer_count += 1
        return payload

    def _read(self, size: int, deadline: float) -> memoryview:
        buffer = np.empty(size, np.uint8).data  # unlike a bytearray, not zeroed first
        filled = 0
        while filled < size:
            self._socket.settimeout(_remaining_s(deadline, self.name))
            try:
                count = self._socket.recv_into(buffer[filled:])
            except TimeoutError:
                continue  # `_remaining_s` says it better
            if count == 0:
                raise self._closed()
            filled += count
        return buffer

    def _closed(self) -> ConnectionError:
        protocol_name = self._config.security_protocol
        if self._answer_count == 0:
            return SilentServerError(
                f"{self.name} closed the connection without a word; check that security.protocol "
                f"({protocol_name}) is what this port speaks"
            )
        if self._answer_count == 1 and not self._config.uses_sasl:
            return SilentServerError(
                f"{self.name} told its versions, and closed the connection at the next request; "
                f"if this port asks for a login, security.protocol ({protocol_name}) must be one "
                f"with SASL"
            )
        return ConnectionError(f"{self.name} closed the connection")

    def _wrap(self, tls: ssl.SSLContext, host: str, deadline: float) -> ssl.SSLSocket:
        self._socket.settimeout(_remaining_s(deadline, self.name))
        try:
            return tls.wrap_socket(self._socket, server_hostname=host)
        except ssl.SSLError as error:
            raise self._tls_error(error) from None

    def _tls_error(self, error: ssl.SSLError) -> Exception:
        """Return the error for a failure of TLS: certificates, a wrong port, or bad luck."""
        reason = error.reason or ""
        if isinstance(error, ssl.SSLCertVerificationError):
            return AuthorizationError(
                f"the certificate of the broker at {self.name} is not trusted: "
                f"{error.verify_message}. Check ssl.truststore.location or .certificates; a host "
                f"name that the certificate does not hold is "
                f"ssl.endpoint.identification.algorithm's matter."
            )
        if "ALERT" in reason:
            return AuthorizationError(
                f"the broker at {self.name} refused the TLS handshake ({reason}). If it asks for "
                f"a client certificate, set ssl.keystore.location."
            )
        if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"):
            return OptionError(
                f"the broker at {self.name} does not speak TLS on this port, and "
                f"security.protocol is {self._config.security_protocol}: use its TLS port, or "
                f"change security.protocol."
            )
        return SilentServerError(
            f"TLS handshake with {self.name} failed ({reason or error}); check that "
            f"security.protocol ({self._config.security_protocol}) is what this port speaks"
        )

    def _learn_versions(self, deadline: float) -> None:
        """Ask which versions of each API the broker speaks (KIP-35)."""
        for version in (3, 0):  # a broker that knows no 3 answers in 0, and is asked again in it
            request = protocol.ApiVersionsRequest(
                version=version,
                client_software_name=protocol.SOFTWARE_NAME,
                client_software_version=protocol.SOFTWARE_VERSION,
            )
            try:
                response = self.wait(self._send(request, deadline), deadline)
            except ssl.SSLError as error:  # with TLS 1.3 a refused client certificate shows here
                raise self._tls_error(error) from None
            if response.error_code == 0:
                break
        else:
            error_name = protocol.error_name(response.error_code)
            raise ConnectionError(f"{self.name} does not tell its API versions: {error_name}")
        self._versions = {
            api.api_key: (api.min_version, api.max_version) for api in response.api_keys
        }

    def _log_in(self, host: str, deadline: float) -> None:
        name = self._config.sasl_mechanism
        shake = self.ask(protocol.SaslHandshakeRequest(mechanism=name, version=1), deadline)
        if shake.error_code:
            raise AuthorizationError(
                f"the broker at {self.name} does not offer sasl.mechanism {name}; it offers "
                f"{', '.join(shake.mechanisms) or 'none'}."
            )
        token = sasl.NO_TOKEN
        if name == "OAUTHBEARER":
            token = sasl.token_for(self._config, _remaining_s(deadline, self.name))
        login = sasl.conversation(
            name,
            host=host,
            username=self._config.sasl_username,
            password=self._config.sasl_password,
            kerberos_service_name=self._config.kerberos_service_name,
            token=token.text,
            extensions=self._config.sasl_extensions,
        )
        lifetime_ms = 0
        message: bytes | None = next(login)
        while message is not None:
            request = protocol.SaslAuthenticateRequest(auth_bytes=message, max_version=2)
            response = self.ask(request, deadline)
            if response.error_code:
                raise self._refused_login(response, token)
            try:
                message = _next_message(login, response.auth_bytes)
            except UNREADABLE as error:
                raise AuthorizationError(
                    f"SASL {name} with {self.name}: the broker's answer is wrong ({error})."
                ) from None
            lifetime_ms = response.session_lifetime_ms
        if lifetime_ms:
            self._expires_at = time.monotonic() + lifetime_ms / 1000 * SESSION_SHARE

    def _refused_login(self, response: Any, token: sasl.Token) -> Exception:
        config, error_name = self._config, protocol.error_name(response.error_code)
        error_text = f"({error_name}: {response.error_message})"
        if token.text:
            sasl.forget(config)
            if token.is_kept:
                return ConnectionError(
                    f"{self.name} refused a token that was kept {error_text}: a new one is asked "
                    f"for"
                )
            origin = config.token_file or config.token_endpoint
            return AuthorizationError(
                f"the broker at {self.name} refused the token of {origin} {error_text}. Check that "
                f"it is one for this broker: its issuer, audience, scope and time."
            )
        user = config.sasl_username or config.sasl_mechanism
        return AuthorizationError(
            f"the broker at {self.name} refused the login of {user!r} {error_text}. Check user "
            f"name, password and sasl.mechanism {config.sasl_mechanism}."
        )


def _next_message(login: sasl.Conversation, answer: bytes) -> bytes | None:
    """Return what the client sends after the broker's answer; None: the login is done."""
    try:
        return login.send(answer)
    except StopIteration:
        return None


def _remaining_s(deadline: float, name: str) -> float:
    """Return the seconds until the deadline; without any left, raise what a socket would."""
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError(f"{name} did not answer in time")
    return remaining_s


def _connect(address: tuple[str, int], deadline: float) -> socket.socket:
    """Connect to the first of the host's addresses that takes us; they share the time left."""
    addresses = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    failure: OSError = ConnectionError(f"{address[0]} has no address")
    for index, (family, kind, number, _, target) in enumerate(addresses):
        connection = socket.socket(family, kind, number)
        try:
            remaining_s = _remaining_s(deadline, f"{address[0]}:{address[1]}")
            connection.settimeout(remaining_s / (len(addresses) - index))
            connection.connect(target)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return connection
        except OSError as error:
            connection.close()
            failure = error
    raise failure


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

    @property
    def bootstrap(self) -> dict[int, str]:
        """The bootstrap servers as host:port, by node id."""
        return {node: self._name(node) for node in self._bootstrap}

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
        except OSError as error:
            OUTAGES.fails(self._config.bootstrap_servers, self._name(node), error)
            self._suspect(node)
            raise
        except BaseException:
            OUTAGES.answers(self._config.bootstrap_servers, self._name(node))
            raise

    def wait(self, posted: PendingRequest, deadline: float) -> Any:
        """Return the answer; if the connection fails, all requests under way on it are lost."""
        cluster, server = self._config.bootstrap_servers, self._name(posted.node)
        OUTAGES.waits(cluster, server)
        try:
            answer = posted.connection.wait(posted.correlation_id, deadline)
        except OSError as error:
            OUTAGES.fails(cluster, server, error)
            posted.connection.close()
            if self._connections.get(posted.node) is posted.connection:
                self._suspect(posted.node)
            raise
        except BaseException:
            OUTAGES.answers(cluster, server)
            raise
        OUTAGES.answers(cluster, server)
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
            OUTAGES.waits(self._config.bootstrap_servers, self._name(node))
            connection = Connection(self._addresses[node], self._config, self._tls, until)
            OUTAGES.answers(self._config.bootstrap_servers, self._name(node))
            self._connections[node] = connection
        return connection

    def _keep_pause(self, node: int, deadline: float) -> None:
        now = time.monotonic()
        paused_until = self._paused_until.get(node, 0.0)
        if paused_until > now:
            time.sleep(min(paused_until, max(now, deadline)) - now)
        else:
            self._paused_until.pop(node, None)

    def _name(self, node: int) -> str:
        return "{}:{}".format(*self._addresses[node])

    def _suspect(self, node: int) -> None:
        self.drop(node)
        self._suspect_until[node] = time.monotonic() + SUSPECT_S
