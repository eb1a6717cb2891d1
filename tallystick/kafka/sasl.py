"""The client's half of a SASL login: PLAIN, SCRAM, OAUTHBEARER and Kerberos.

Each mechanism is a generator: it yields what the client sends, and is sent what the broker answers.
A `ValueError` says that an answer is wrong.

The token of an OAUTHBEARER login is read from a file, or asked of a token endpoint, as Kafka's own
clients do: by the grant `client_credentials`, with id and secret in a Basic header. Such a token
serves all logins of the process until most of its time is over.

Invariants:
    * No token and no secret is in an error or a log line.
    * A secret goes to the endpoint that the user named, and nowhere else: no redirect is followed.

Source: RFC 6749, 4.4 and 5; KIP-768; KIP-1139.
"""

import base64
import hashlib
import hmac
import json
import re
import secrets
import ssl
import time
from base64 import b64encode
from collections.abc import Generator, Iterable
from pathlib import Path
from threading import Lock
from typing import NamedTuple
from urllib.parse import urlencode

import urllib3

from tallystick.errors import UNREADABLE, AuthorizationError, OptionError
from tallystick.kafka.config import KafkaConfig

Conversation = Generator[bytes, bytes, None]

SCRAM_ITERATIONS_MIN = 4096
SCRAM_ITERATIONS_MAX = 1_000_000
"""More would keep a client busy for seconds at a broker's word."""
SCRAM_HASHES = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
SERVER_FIRST = re.compile(rb"r=([^,]+),s=([A-Za-z0-9+/=]+),i=([0-9]{1,9})(?:,.*)?")
QUALITY_AUTHENTICATION = b"\x01"
"""Kafka offers neither integrity nor confidentiality below SASL (RFC 4752, section 3.1)."""
KEPT_SHARE = 0.8
"""The share of its lifetime for which a token is kept (sasl.login.refresh.window.factor)."""
ANSWER_BYTES_MAX = 1 << 20
SHOWN_CHARACTERS_MAX = 200
PASSING_STATUSES = (408, 429, 500, 502, 503, 504)
REFUSED_STATUSES = (400, 401, 403)
TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*", re.ASCII)
"""RFC 6750, 2.1; anything else could end the token's field in the message to the broker."""
ENDPOINT = "sasl.oauthbearer.token.endpoint.url"


def conversation(
    mechanism: str,
    *,
    host: str,
    username: str,
    password: str,
    kerberos_service_name: str,
    token: str = "",
    extensions: Iterable[tuple[str, str]] = (),
) -> Conversation:
    """Begin a login with the broker at `host`.

    Args:
        mechanism: one of `config.SASL_MECHANISMS`.
        host: the broker's name, which Kerberos knows it by.
        username: of PLAIN and SCRAM.
        password: of PLAIN and SCRAM.
        kerberos_service_name: the primary of the broker's principal.
        token: of OAUTHBEARER.
        extensions: of OAUTHBEARER, name and value.
    """
    if mechanism == "PLAIN":
        return plain(username, password)
    if mechanism in SCRAM_HASHES:
        return scram(SCRAM_HASHES[mechanism], username, password)
    if mechanism == "OAUTHBEARER":
        return oauth_bearer(token, extensions)
    return kerberos(f"{kerberos_service_name}@{host}")


def plain(username: str, password: str) -> Conversation:
    """Send name and password as they are (RFC 4616)."""
    yield f"\0{username}\0{password}".encode()


def scram(hash_name: str, username: str, password: str) -> Conversation:
    """Prove that the password is known, and let the broker prove the same (RFC 5802, RFC 7677).

    Raises:
        ValueError: the broker repeats another nonce, asks for a proof from which the password can
            be guessed, or does not know the password.
    """
    name = username.replace("=", "=3D").replace(",", "=2C")
    nonce = secrets.token_hex(16).encode()
    client_first = b"n=%b,r=%b" % (name.encode(), nonce)
    server_first = yield b"n,," + client_first
    parts = SERVER_FIRST.fullmatch(server_first)
    if parts is None:
        raise ValueError("the first message is not one of SCRAM")
    both_nonces, salt, iterations = parts[1], base64.b64decode(parts[2]), int(parts[3])
    if not both_nonces.startswith(nonce) or both_nonces == nonce:
        raise ValueError("the nonce does not begin with ours")
    if not SCRAM_ITERATIONS_MIN <= iterations <= SCRAM_ITERATIONS_MAX:
        raise ValueError(
            f"{iterations} iterations, expected {SCRAM_ITERATIONS_MIN} to {SCRAM_ITERATIONS_MAX}"
        )
    salted = hashlib.pbkdf2_hmac(hash_name, password.encode(), salt, iterations)
    client_key = hmac.digest(salted, b"Client Key", hash_name)
    stored_key = hashlib.new(hash_name, client_key).digest()
    without_proof = b"c=biws,r=" + both_nonces
    conversation_so_far = b",".join([client_first, server_first, without_proof])
    signature = hmac.digest(stored_key, conversation_so_far, hash_name)
    proof = bytes(one ^ other for one, other in zip(client_key, signature, strict=True))
    server_final = yield without_proof + b",p=" + base64.b64encode(proof)
    server_key = hmac.digest(salted, b"Server Key", hash_name)
    expected = base64.b64encode(hmac.digest(server_key, conversation_so_far, hash_name))
    if not hmac.compare_digest(server_final.partition(b",")[0], b"v=" + expected):
        raise ValueError("the signature is wrong: the broker does not know the password")


def oauth_bearer(token: str, extensions: Iterable[tuple[str, str]]) -> Conversation:
    """Send a token (RFC 7628); a broker that refuses it says why, and is answered with a byte."""
    pairs = "".join(f"\x01{name}={value}" for name, value in extensions)
    reason = yield f"n,,\x01auth=Bearer {token}{pairs}\x01\x01".encode()
    if reason:
        yield b"\x01"


def kerberos(service: str) -> Conversation:
    """Log in with the ticket of this process (RFC 4752); needs the package `gssapi`.

    Raises:
        OptionError: the package is missing.
        ValueError: the broker wants a layer of Kerberos' own below Kafka.
    """
    try:
        import gssapi  # needs Kerberos' own libraries
    except (ImportError, OSError) as error:
        raise OptionError(
            f"sasl.mechanism GSSAPI needs the Python package gssapi: pip install gssapi ({error})."
        ) from None
    target = gssapi.Name(service, name_type=gssapi.NameType.hostbased_service)
    context = gssapi.SecurityContext(
        name=target.canonicalize(gssapi.MechType.kerberos), usage="initiate"
    )
    answer = None
    while not context.complete:
        answer = yield context.step(answer) or b""
    offer = context.unwrap(answer).message
    if not offer[0] & QUALITY_AUTHENTICATION[0]:
        raise ValueError("the broker does not offer Kerberos without a layer of its own")
    reply = QUALITY_AUTHENTICATION + offer[1:] + service.encode()
    yield context.wrap(reply, False).message


class Token(NamedTuple):
    """A token to log in with, and whether an earlier login has used it."""

    text: str
    is_kept: bool = False


NO_TOKEN = Token("")
"""For logins of other mechanisms."""


class _KeptTokens:
    """The tokens of the process, by endpoint, client id, secret and scope."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._tokens: dict[tuple[str, ...], tuple[str, float]] = {}

    def find(self, config: KafkaConfig) -> str | None:
        with self._lock:
            text, until = self._tokens.get(_key(config), ("", 0.0))
        return text if time.monotonic() < until else None

    def keep(self, config: KafkaConfig, text: str, until: float) -> None:
        with self._lock:
            self._tokens[_key(config)] = text, until

    def forget(self, config: KafkaConfig) -> None:
        with self._lock:
            self._tokens.pop(_key(config), None)


_KEPT = _KeptTokens()
forget = _KEPT.forget
"""Forget a token that a broker has refused: it may have been revoked, or the clocks may differ."""


def token_for(config: KafkaConfig, timeout_s: float) -> Token:
    """Return the token for a login.

    Raises:
        OSError: there is none now; worth another try.
        AuthorizationError: the endpoint, or its certificate, was refused.
        OptionError: the URL is not that of a token endpoint.
    """
    if config.token_file:
        return Token(Path(config.token_file).read_text().strip())
    if kept := _KEPT.find(config):
        return Token(kept, is_kept=True)
    requested_at = time.monotonic()
    text, lifetime_s = token_in(_ask(config, timeout_s), config.token_endpoint)
    _KEPT.keep(config, text, requested_at + lifetime_s * KEPT_SHARE)
    return Token(text)


def token_in(answer: bytes, url: str) -> tuple[str, float]:
    """Return the token in an endpoint's answer, and for how many seconds it is valid; 0: unknown.

    Raises:
        OptionError: there is none in it.
    """
    try:
        fields = json.loads(answer)
        text, lifetime_s = fields["access_token"], float(fields.get("expires_in") or 0)
        if not TOKEN.fullmatch(text) or not 0 <= lifetime_s < float("inf"):
            raise ValueError("no token")
    except UNREADABLE:  # its text may hold the token
        raise OptionError(
            f"{url} answers without an access_token of RFC 6750, or with an expires_in that is no "
            f"number of seconds: check that {ENDPOINT} is the token endpoint of OAuth 2."
        ) from None
    return text, lifetime_s


def _key(config: KafkaConfig) -> tuple[str, ...]:
    return config.token_endpoint, config.oauth_client_id, config.oauth_secret, config.oauth_scope


def _ask(config: KafkaConfig, timeout_s: float) -> bytes:
    """Ask the endpoint for a token, and return the answer; raise if the endpoint refuses."""
    url = config.token_endpoint
    fields = {"grant_type": "client_credentials"}
    if config.oauth_scope:
        fields["scope"] = config.oauth_scope
    login = f"{config.oauth_client_id}:{config.oauth_secret}"
    headers = {
        "Authorization": f"Basic {b64encode(login.encode()).decode()}",
        "Accept": "application/json",
        "Content-Type": "application/x-www-form-urlencoded",
    }
    try:
        with urllib3.PoolManager(
            ssl_context=_trusted(config.oauth_truststore_location), timeout=timeout_s
        ) as pool:
            response = pool.urlopen(
                "POST",
                url,
                redirect=False,
                retries=False,
                body=urlencode(fields),
                headers=headers,
                preload_content=False,
            )
            answer = response.read(ANSWER_BYTES_MAX)
    except urllib3.exceptions.SSLError as error:
        raise AuthorizationError(
            f"the certificate of the token endpoint {url} is not trusted, or it speaks no TLS: "
            f"{error}. For an authority of your own, set ssl.truststore.location=... (PEM) in "
            f"sasl.jaas.config."
        ) from None
    except urllib3.exceptions.HTTPError as error:
        raise ConnectionError(
            f"the token endpoint {url} ({ENDPOINT}) does not answer: {error}"
        ) from None
    if response.status == 200:
        return answer
    raise _refusal(config, response.status, answer)


def _refusal(config: KafkaConfig, status: int, answer: bytes) -> Exception:
    says = f"the token endpoint {config.token_endpoint} answers {status}{_reason_in(answer)}"
    if status in PASSING_STATUSES:
        return ConnectionError(says)
    if status in REFUSED_STATUSES:
        return AuthorizationError(
            f"{says} to client {config.oauth_client_id!r}. Check clientId, clientSecret and scope "
            f"in sasl.jaas.config, or sasl.oauthbearer.client.credentials.client.id and "
            f".client.secret and sasl.oauthbearer.scope."
        )
    return OptionError(f"{says}, expected 200: check {ENDPOINT}. A redirect is not followed.")


def _reason_in(answer: bytes) -> str:
    """Return the reason that an endpoint gives for its refusal (RFC 6749, 5.2)."""
    try:
        fields = json.loads(answer)
        reasons = [str(fields[name]) for name in ("error", "error_description") if name in fields]
    except UNREADABLE:
        return ""
    return f" ({': '.join(reasons)[:SHOWN_CHARACTERS_MAX]!r})" if reasons else ""


def _trusted(location: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=location or None)
    except (OSError, ValueError) as error:
        raise OptionError(
            f"ssl.truststore.location {location!r} in sasl.jaas.config cannot be read: {error}. It "
            f"must be PEM."
        ) from None
