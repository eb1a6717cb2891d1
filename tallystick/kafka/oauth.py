"""The token of an OAUTHBEARER login: read from a file, or asked of a token endpoint.

An endpoint is asked as Kafka's own clients do: by the grant `client_credentials`, with id and
secret in a Basic header. Its token serves all logins of the process until most of its time is over.

Invariants:
    * No token and no secret is in an error or a log line.
    * A secret goes to the endpoint that the user named, and nowhere else: no redirect is followed.

Source: RFC 6749, 4.4 and 5; KIP-768; KIP-1139.
"""

import json
import re
import ssl
import time
from base64 import b64encode
from pathlib import Path
from threading import Lock
from typing import NamedTuple
from urllib.parse import urlencode

import urllib3

from tallystick.errors import UNREADABLE, AuthorizationError, OptionError
from tallystick.kafka.config import KafkaConfig

KEPT_SHARE = 0.8
"""The share of its lifetime for which a token is kept (sasl.login.refresh.window.factor)."""
ANSWER_BYTES_MAX = 1 << 20
SHOWN_CHARACTERS_MAX = 200
PASSING_STATUSES = (408, 429, 500, 502, 503, 504)
REFUSED_STATUSES = (400, 401, 403)
TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*", re.ASCII)
"""RFC 6750, 2.1; anything else could end the token's field in the message to the broker."""
ENDPOINT = "sasl.oauthbearer.token.endpoint.url"


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
