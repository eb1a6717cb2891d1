"""A login as at Amazon MSK with IAM, before a real broker: it checks the signature of a token.

It stands where MSK's listener for IAM stands: TLS, `OAUTHBEARER`, and behind a login everything
goes to a broker that names it as its own address. The signature is computed here from Amazon's
description of it, without the library that made it.
"""

import base64
import contextlib
import hashlib
import hmac
import json
import socket
import socketserver
import ssl
import struct
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Self
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from tallystick.testing.security import Stores, create_stores

HOST = "127.0.0.1"
SERVICE = "kafka-cluster"
ALGORITHM = "AWS4-HMAC-SHA256"
API_VERSIONS, HANDSHAKE, AUTHENTICATE = 18, 17, 36
UNSUPPORTED_MECHANISM, LOGIN_FAILED = 33, 58


class RefusedError(Exception):
    """A token that is not taken, and why."""


def end_of(token: str, secrets: dict[str, str], now: float) -> float:
    """Return the moment from which on a token is no longer valid, by `time.time`.

    Args:
        token: a presigned URL in base64, without padding.
        secrets: access key -> secret key.
        now: by `time.time`.

    Raises:
        RefusedError: it is not signed by one of these, or not for now.

    Source: "Authenticating Requests: Using Query Parameters (AWS Signature Version 4)".
    """
    try:
        url = urlsplit(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode())
        parameters = dict(parse_qsl(url.query, strict_parsing=True))
        signature, _ = parameters.pop("X-Amz-Signature"), parameters.pop("User-Agent")
        key, *scope = parameters["X-Amz-Credential"].split("/")
        day, region, service, end = scope
        signed = datetime.strptime(parameters["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        until = signed.timestamp() + int(parameters["X-Amz-Expires"])
    except (ValueError, KeyError) as error:
        raise RefusedError(f"no presigned request: {error!r}") from None
    if key not in secrets:
        raise RefusedError("the security token included in the request is invalid")
    query = urlencode(sorted(parameters.items()), quote_via=quote, safe="-_.~")
    nothing = hashlib.sha256(b"").hexdigest()
    canonical = f"GET\n{url.path}\n{query}\nhost:{url.netloc}\n\nhost\n{nothing}"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = "\n".join([ALGORITHM, parameters["X-Amz-Date"], "/".join(scope), digest])
    signing_key = f"AWS4{secrets[key]}".encode()
    for part in (day, region, SERVICE, "aws4_request", text):
        signing_key = hmac.digest(signing_key, part.encode(), "sha256")
    checks = {
        "host": url.netloc == f"kafka.{region}.amazonaws.com",
        "action": parameters.get("Action") == "kafka-cluster:Connect",
        "scope": (service, end) == (SERVICE, "aws4_request"),
        "signature": hmac.compare_digest(signing_key.hex(), signature),
        "time": signed.timestamp() - 300 <= now < until,
    }
    if wrong := [name for name, fits in checks.items() if not fits]:
        raise RefusedError(f"access denied: {', '.join(wrong)}")
    return until


@dataclass
class MskServer:
    """It takes connections on a port of its own, and passes them on to a broker.

    Args:
        folder: for its certificate.
        port: where it listens; the broker advertises it.
        broker: the port of a listener of the broker's without a login.
        secrets: access key -> secret key.
    """

    folder: Path
    port: int
    broker: int
    secrets: dict[str, str]
    ahead_s: float = 0.0
    """The time that its clock is ahead of its clients'."""
    session_s: float = 900.0
    """The longest time from a login to the next on a connection."""
    tokens: list[str] = field(default_factory=list)
    """Each that was taken."""
    refused: list[str] = field(default_factory=list)
    """Why others were not."""
    overdue: int = 0
    """The number of connections whose login had run out when a request came."""

    def __post_init__(self) -> None:
        self.stores: Stores = create_stores(self.folder, HOST)
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(self.stores.keystore)
        self._server = _Listener((HOST, self.port), self._serve)  # type: ignore[arg-type]
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def options(self, token_file: Path) -> dict[str, str]:
        """The settings of a program whose token another one renews, in a file."""
        return {
            "kafka.security.protocol": "SASL_SSL",
            "kafka.ssl.truststore.type": "PEM",
            "kafka.ssl.truststore.location": str(self.stores.truststore),
            "kafka.sasl.mechanism": "OAUTHBEARER",
            "kafka.sasl.oauthbearer.token.endpoint.url": token_file.as_uri(),
        }

    def now(self) -> float:
        """Return its time."""
        return time.time() + self.ahead_s

    def _serve(self, request: socket.socket, *_: object) -> None:
        with contextlib.suppress(OSError, EOFError):
            _Connection(self, self._tls.wrap_socket(request, server_side=True)).serve()


class _Listener(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True


class _Connection:
    """One connection: its login, then request by request."""

    def __init__(self, server: MskServer, client: socket.socket) -> None:
        self._server, self._client = server, client
        self._valid_until = 0.0
        self._refusal = ""

    def serve(self) -> None:
        with socket.create_connection((HOST, self._server.broker)) as broker, self._client:
            while True:
                request = _frame(self._client)
                api, version = struct.unpack_from(">hh", request)
                if api in (HANDSHAKE, AUTHENTICATE):
                    answer = self._log_in(api, version, request)
                else:
                    self._check(api)
                    broker.sendall(_framed(request))
                    answer = _frame(broker)
                self._client.sendall(_framed(answer))

    def _check(self, api: int) -> None:
        if api != API_VERSIONS and self._server.now() >= self._valid_until:
            self._server.overdue += self._valid_until > 0
            raise EOFError("no login")

    def _log_in(self, api: int, version: int, request: bytes) -> bytes:
        """Answer one of these two requests, in the form that the protocol's guide gives."""
        number = request[4:8]
        (name_size,) = struct.unpack_from(">h", request, 8)
        body = request[10 + max(name_size, 0) :]
        if api == HANDSHAKE:
            fits = body[2:] == b"OAUTHBEARER"
            return (
                number
                + struct.pack(">hih", 0 if fits else UNSUPPORTED_MECHANISM, 1, 11)
                + b"OAUTHBEARER"
            )
        assert version == 2, "the newest, which a broker of today offers"
        size, skipped = _varint(body[1:])  # after the tags of the header
        error, message, back, left_ms = self._authenticate(body[1 + skipped : skipped + size])
        answer = struct.pack(">h", error) + _compact(message) + _compact(back)
        return number + b"\0" + answer + struct.pack(">q", left_ms) + b"\0"

    def _authenticate(self, message: bytes) -> tuple[int, bytes, bytes, int]:
        """Return an error code, its text, the message for the client, and its time in ms."""
        if self._refusal:  # the client has acknowledged it (RFC 7628, 3.2.3)
            return LOGIN_FAILED, self._refusal.encode(), b"", 0
        now = self._server.now()
        try:
            token = dict(
                pair.partition("=")[::2] for pair in message.decode().split("\x01") if "=" in pair
            )["auth"].removeprefix("Bearer ")
            until = end_of(token, self._server.secrets, now)
        except RefusedError as error:
            self._refusal = str(error)
            self._server.refused.append(self._refusal)
            return 0, b"", json.dumps({"status": "invalid_token"}).encode(), 0
        self._server.tokens.append(token)
        self._valid_until = min(until, now + self._server.session_s)
        return 0, b"", b"", int((self._valid_until - now) * 1000)


def _frame(stream: socket.socket) -> bytes:
    (size,) = struct.unpack(">i", _exactly(stream, 4))
    return _exactly(stream, size)


def _framed(message: bytes) -> bytes:
    return struct.pack(">i", len(message)) + message


def _exactly(stream: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not (part := stream.recv(size - len(data))):
            raise EOFError("closed")
        data += part
    return bytes(data)


def _varint(data: bytes) -> tuple[int, int]:
    """Return a number, and how many bytes it takes."""
    number = 0
    for index, byte in enumerate(data):
        number |= (byte & 127) << (7 * index)
        if byte < 128:
            return number, index + 1
    raise EOFError("cut off")


def _compact(data: bytes) -> bytes:
    size, encoded = len(data) + 1, bytearray()
    while size > 127:
        encoded.append(size & 127 | 128)
        size >>= 7
    return bytes([*encoded, size]) + data
