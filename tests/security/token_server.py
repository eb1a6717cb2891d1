"""An identity provider: a token endpoint with TLS, and the keys that brokers check tokens with."""

import base64
import json
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from tallystick.testing.security import Stores, create_stores

HOST = "127.0.0.1"
AUDIENCE = "kafka"
Answer = tuple[int, dict[str, str], bytes]


def encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@dataclass
class Asked:
    """The content of a request for a token."""

    path: str
    login: str
    fields: dict[str, list[str]]


@dataclass
class TokenServer:
    """It answers on two ports, since the broker's Java trusts no certificate of ours.

    Args:
        folder: for its certificate.
        clients: id -> secret.
    """

    folder: Path
    clients: dict[str, str]
    lifetime_s: float = 60.0
    """The lifetime of the tokens from now on."""
    told_lifetime_s: float | None = None
    """The lifetime that it states for tokens; None: the true one."""
    audience: str = AUDIENCE
    answers_instead: Answer | None = None
    requests: list[Asked] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    """By `time.time`, when each of these tokens is no longer valid."""

    def __post_init__(self) -> None:
        self._key = rsa.generate_private_key(65537, 2048)
        self.stores: Stores = create_stores(self.folder, HOST)
        self._servers = [self._serve(self._answer_for_token), self._serve(self._keys)]
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(self.stores.keystore)
        plain = self._servers[0].socket
        self._servers[0].socket = tls.wrap_socket(plain, True, do_handshake_on_connect=False)
        self._threads = [threading.Thread(target=server.serve_forever) for server in self._servers]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()

    @property
    def issuer(self) -> str:
        return f"https://{HOST}:{self._servers[0].server_port}"

    @property
    def token_url(self) -> str:
        return f"{self.issuer}/token"

    @property
    def keys_url(self) -> str:
        return f"http://{HOST}:{self._servers[1].server_port}/keys"

    def options(self, client: str, secret: str | None = None, **further: str) -> dict[str, str]:
        """The settings of a user of Kafka's Java client, with Kafka's own login handler."""
        login = {
            "clientId": client,
            "clientSecret": secret or self.clients[client],
            "ssl.truststore.location": str(self.stores.truststore),
            **further,
        }
        module = "org.apache.kafka.common.security.oauthbearer"
        login_options = " ".join(f'{name}="{value}"' for name, value in login.items() if value)
        return {
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.jaas.config": f"{module}.OAuthBearerLoginModule required {login_options};",
            "sasl.login.callback.handler.class": f"{module}.OAuthBearerLoginCallbackHandler",
            "sasl.oauthbearer.token.endpoint.url": self.token_url,
        }

    def broker_properties(self) -> dict[str, str]:
        """The broker's side: who signs, and for whom."""
        listener = "listener.name.sasl_ssl.oauthbearer"
        module = "org.apache.kafka.common.security.oauthbearer"
        return {
            "sasl.enabled.mechanisms": "SCRAM-SHA-512,OAUTHBEARER",
            f"{listener}.sasl.jaas.config": f"{module}.OAuthBearerLoginModule required;",
            f"{listener}.sasl.server.callback.handler.class": (
                f"{module}.OAuthBearerValidatorCallbackHandler"
            ),
            f"{listener}.connections.max.reauth.ms": "3600000",
            "sasl.oauthbearer.jwks.endpoint.url": self.keys_url,
            "sasl.oauthbearer.expected.audience": AUDIENCE,
            "sasl.oauthbearer.expected.issuer": self.issuer,
            "sasl.oauthbearer.clock.skew.seconds": "0",
        }

    def token(self, client: str) -> str:
        """A signed token (RFC 7519) for a client."""
        now = time.time()
        end = now + self.lifetime_s
        head = {"alg": "RS256", "kid": "one", "typ": "JWT"}
        claims = {"iss": self.issuer, "aud": self.audience, "sub": client}
        claims |= {"iat": now - 1, "exp": end, "scope": "kafka", "n": len(self.tokens)}  # type: ignore[dict-item]
        text = ".".join(encoded(json.dumps(part).encode()) for part in (head, claims))
        signature = self._key.sign(text.encode(), padding.PKCS1v15(), hashes.SHA256())
        self.tokens.append(f"{text}.{encoded(signature)}")
        self.ends.append(end)
        return self.tokens[-1]

    def _serve(self, answer: Callable[[Any], Answer]) -> ThreadingHTTPServer:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                status, headers, body = answer(self)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST  # noqa: N815  the name is the method's

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        return ThreadingHTTPServer((HOST, 0), Handler)

    def _answer_for_token(self, request: Any) -> Answer:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0)).decode()
        _, _, login = request.headers.get("Authorization", "").partition("Basic ")
        login = base64.b64decode(login).decode()
        self.requests.append(Asked(request.path, login, parse_qs(body)))
        if self.answers_instead is not None:
            return self.answers_instead
        client, _, secret = login.partition(":")
        if self.clients.get(client) != secret:
            refusal = {"error": "invalid_client", "error_description": "no such client or secret"}
            return 401, {}, json.dumps(refusal).encode()
        lifetime_s = self.lifetime_s if self.told_lifetime_s is None else self.told_lifetime_s
        answer = {
            "access_token": self.token(client),
            "token_type": "Bearer",
            "expires_in": lifetime_s,
        }
        return 200, {"Content-Type": "application/json"}, json.dumps(answer).encode()

    def _keys(self, _: Any) -> Answer:
        numbers = self._key.public_key().public_numbers()
        n, e = (
            encoded(number.to_bytes(size)) for number, size in ((numbers.n, 256), (numbers.e, 3))
        )
        key = {"kty": "RSA", "kid": "one", "use": "sig", "alg": "RS256", "n": n, "e": e}
        body = json.dumps({"keys": [key]}).encode()
        return 200, {"Content-Type": "application/json"}, body
