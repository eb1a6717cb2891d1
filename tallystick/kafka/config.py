"""The settings of a connection to Kafka, under the names of Kafka's Java client.

Users of Spark's connector know these names with the prefix `kafka.`; `KafkaConfig.from_options`
takes them without it. Certificates are PEM only, as files or inline. Paths are read where the
connection is made: on the driver and on every executor.

Invariants:
    * request.timeout.ms < delivery.timeout.ms < the timeout of the transaction that is written: one
      hung broker must not use up a call, nor a call that is tried until its deadline the
      transaction that it is for.
    * A call outlasts the failover of a broker wherever its transaction does; else each failover
      fails the call.
    * Passwords, keys and certificates appear in no `repr`, and so in no log and no error.
"""

import os
import re
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self, TypeAlias
from urllib.parse import urlsplit
from urllib.request import url2pathname

from tallystick.errors import OptionError
from tallystick.kafka.java_settings import check_without_field
from tallystick.text import WAIT_MAX_MS, WAIT_MAX_WORDS

TRANSACTION_TIMEOUT_MS = 900_000
"""The most that brokers allow by default (transaction.max.timeout.ms): a first epoch may have a
backlog to write, and what waits for its commit must outlive the time that a pipeline is down."""
TRANSACTION_TIMEOUT_MIN_MS = 1_000
"""With less, a pause of a broker or of the driver aborts every epoch."""
CALL_TIMEOUT_MS = 120_000
REQUEST_TIMEOUT_MS = 8_000
SESSION_TIMEOUT_MS = 9_000
"""After how long without a heartbeat a broker counts as dead, by default
(broker.session.timeout.ms)."""
ELECTION_MS = 5_000
"""The time for the rest of a failover: new leaders and coordinators, and finding them."""

SECURITY_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
SASL_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "GSSAPI", "OAUTHBEARER")
PASSWORD_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")

FIELDS = {
    "bootstrap.servers": "bootstrap_servers",
    "client.id": "client_id",
    "security.protocol": "security_protocol",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.username": "sasl_username",
    "sasl.password": "sasl_password",
    "sasl.kerberos.service.name": "kerberos_service_name",
    "sasl.oauthbearer.client.credentials.client.id": "oauth_client_id",
    "sasl.oauthbearer.client.credentials.client.secret": "oauth_secret",
    "sasl.oauthbearer.scope": "oauth_scope",
    "ssl.truststore.location": "truststore_location",
    "ssl.truststore.certificates": "truststore_certificates",
    "ssl.keystore.location": "keystore_location",
    "ssl.keystore.certificate.chain": "keystore_certificates",
    "ssl.keystore.key": "keystore_key",
    "ssl.key.password": "key_password",
    "request.timeout.ms": "request_timeout_ms",
    "delivery.timeout.ms": "delivery_timeout_ms",
    "socket.connection.setup.timeout.ms": "connection_timeout_ms",
}
"""Option name -> field, where the value is taken as it stands (or as a number for `_ms`)."""
SPECIAL = (
    "sasl.jaas.config",
    "sasl.oauthbearer.token.endpoint.url",
    "ssl.truststore.type",
    "ssl.keystore.type",
    "ssl.endpoint.identification.algorithm",
)
"""Options whose value means something else than a field."""
JAAS_ENTRY = re.compile(
    r"""([\w.]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|([^\s;"']+))"""
)

JAAS_FIELDS = {
    "username": "sasl_username",
    "password": "sasl_password",
    "serviceName": "kerberos_service_name",
    "clientId": "oauth_client_id",
    "clientSecret": "oauth_secret",
    "scope": "oauth_scope",
    "ssl.truststore.location": "oauth_truststore_location",
}
"""The same for what a JAAS line says."""
EXTENSION = "extension_"
"""The beginning of the names of SASL extensions in a JAAS line."""

ConfigValue: TypeAlias = str | int | bool | tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class KafkaConfig:
    """The settings of a connection. Immutable, and picklable: it travels to the executors.

    Args:
        bootstrap_servers: `host:port,host:port`; any live one will do.
        client_id: shows up in the brokers' logs and quotas.
        request_timeout_ms: the longest wait for one answer of one broker.
        delivery_timeout_ms: the longest that one call may take, retries included. More than the
            brokers' session timeout plus 5 s, or each failover fails a call.
        connection_timeout_ms: the longest that connecting, TLS and SASL together may take.
    """

    bootstrap_servers: str
    client_id: str = "tallystick"
    security_protocol: str = "PLAINTEXT"
    sasl_mechanism: str = "GSSAPI"
    sasl_username: str = ""
    sasl_password: str = field(default="", repr=False)
    kerberos_service_name: str = ""
    token_file: str = ""
    token_endpoint: str = ""
    oauth_client_id: str = ""
    oauth_secret: str = field(default="", repr=False)
    oauth_scope: str = ""
    oauth_truststore_location: str = ""
    sasl_extensions: tuple[tuple[str, str], ...] = ()
    truststore_location: str = ""
    truststore_certificates: str = field(default="", repr=False)
    keystore_location: str = ""
    keystore_certificates: str = field(default="", repr=False)
    keystore_key: str = field(default="", repr=False)
    key_password: str = field(default="", repr=False)
    check_hostname: bool = True
    request_timeout_ms: int = REQUEST_TIMEOUT_MS
    delivery_timeout_ms: int = CALL_TIMEOUT_MS
    connection_timeout_ms: int = 3_000

    def __post_init__(self) -> None:
        _one_of("security.protocol", self.security_protocol, SECURITY_PROTOCOLS)
        for address in self.bootstrap_addresses:
            assert address
        for option, name in FIELDS.items():
            if name.endswith("_ms") and getattr(self, name) < 1:
                raise OptionError(f"{option} is {getattr(self, name)}: it must be at least 1 ms")
        if self.request_timeout_ms >= self.delivery_timeout_ms:
            raise OptionError(
                f"request.timeout.ms is {self.request_timeout_ms} and delivery.timeout.ms is "
                f"{self.delivery_timeout_ms}: the first must be the smaller one, or a single hung "
                f"broker uses up the time in which another could have answered."
            )
        if self.uses_sasl:
            self._check_sasl()
        if bool(self.keystore_key) != bool(self.keystore_certificates):
            raise OptionError(
                "ssl.keystore.key and ssl.keystore.certificate.chain belong together: set both."
            )

    def _check_sasl(self) -> None:
        _one_of("sasl.mechanism", self.sasl_mechanism, SASL_MECHANISMS)
        if self.sasl_mechanism in PASSWORD_MECHANISMS and not (
            self.sasl_username and self.sasl_password
        ):
            raise OptionError(
                f"sasl.mechanism {self.sasl_mechanism} needs a user name and a password: set "
                f"sasl.jaas.config (with username= and password=), or sasl.username and "
                f"sasl.password."
            )
        if self.sasl_mechanism == "GSSAPI" and not self.kerberos_service_name:
            raise OptionError("sasl.mechanism GSSAPI needs sasl.kerberos.service.name.")
        if self.sasl_mechanism == "OAUTHBEARER" and not self.token_file:
            if not self.token_endpoint:
                raise OptionError(
                    "sasl.mechanism OAUTHBEARER needs sasl.oauthbearer.token.endpoint.url: https: "
                    "and the token endpoint of your identity provider, or file: and a file that "
                    "holds the token, which is read at each login."
                )
            if not (self.oauth_client_id and self.oauth_secret):
                raise OptionError(
                    "sasl.oauthbearer.token.endpoint.url needs a client to ask as: set clientId= "
                    "and clientSecret= in sasl.jaas.config, or "
                    "sasl.oauthbearer.client.credentials.client.id and .client.secret."
                )

    @classmethod
    def from_options(
        cls, options: Mapping[str, str], *, transaction_timeout_ms: int | None = None
    ) -> Self:
        """Make a configuration from the Java client's option names, without `kafka.`.

        Args:
            options: what the user set; timeouts that are not set follow from those that are.
            transaction_timeout_ms: of the transactions that the connection is for; None: of none.

        Raises:
            OptionError: a name is not known, a value cannot be used, or something is missing.
        """
        values: dict[str, ConfigValue] = {}
        for option, text in options.items():
            if option in FIELDS:
                name = FIELDS[option]
                values[name] = _milliseconds(option, text) if name.endswith("_ms") else text
            elif option not in SPECIAL:
                check_without_field(option, text, [*FIELDS, *SPECIAL])
        if not options.get("bootstrap.servers"):
            raise OptionError("bootstrap.servers is missing: name at least one broker, host:port.")
        values["security_protocol"] = options.get("security.protocol", "PLAINTEXT").upper()
        values |= _special_values(options)
        values["request_timeout_ms"], values["delivery_timeout_ms"] = call_timeouts(
            transaction_timeout_ms,
            _set_timeout(options, "request.timeout.ms"),
            _set_timeout(options, "delivery.timeout.ms"),
        )
        return cls(**values)  # type: ignore[arg-type]  # names and types follow from FIELDS

    @property
    def bootstrap_addresses(self) -> list[tuple[str, int]]:
        """Host and port of each bootstrap server."""
        texts = [text.strip() for text in self.bootstrap_servers.split(",")]
        return [_address(text) for text in texts if text] or [_address(self.bootstrap_servers)]

    @property
    def uses_tls(self) -> bool:
        """True if connections are encrypted."""
        return self.security_protocol.endswith("SSL")

    @property
    def uses_sasl(self) -> bool:
        """True if connections log in."""
        return self.security_protocol.startswith("SASL")

    def ssl_context(self) -> ssl.SSLContext:
        """Read the certificates.

        Raises:
            OptionError: a file is missing, or is not what it should be.
        """
        try:
            context = ssl.create_default_context(
                cafile=self.truststore_location or None, cadata=self.truststore_certificates or None
            )
        except (OSError, ValueError) as error:
            raise OptionError(
                f"the trust store (ssl.truststore.location {self.truststore_location!r}, or "
                f"ssl.truststore.certificates) cannot be read: {error}. It must be PEM."
            ) from None
        context.check_hostname = self.check_hostname
        try:
            self._load_key(context)
        except (OSError, ValueError) as error:
            raise OptionError(
                f"the key store (ssl.keystore.location {self.keystore_location!r}, or "
                f"ssl.keystore.key and .certificate.chain) cannot be read: {error}. It must be "
                f"PEM, key and certificates; check ssl.key.password."
            ) from None
        return context

    def _load_key(self, context: ssl.SSLContext) -> None:
        # A password is always given, since without one OpenSSL would ask on the terminal.
        if self.keystore_location:
            context.load_cert_chain(self.keystore_location, password=self.key_password)
        elif self.keystore_key:
            handle, path = tempfile.mkstemp(suffix=".pem")  # readable by this user only
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(f"{self.keystore_key}\n{self.keystore_certificates}\n")
                context.load_cert_chain(path, password=self.key_password)
            finally:
                os.unlink(path)


def _special_values(options: Mapping[str, str]) -> dict[str, ConfigValue]:
    values: dict[str, ConfigValue] = {}
    for option in ("ssl.truststore.type", "ssl.keystore.type"):
        if options.get(option, "PEM").upper() != "PEM":
            raise OptionError(
                f"{option} is {options[option]!r}: only PEM can be read. Convert a Java store with "
                f"`keytool -importkeystore ... -deststoretype PKCS12` and `openssl pkcs12`."
            )
    algorithm = options.get("ssl.endpoint.identification.algorithm", "https").strip().lower()
    if algorithm not in ("https", ""):
        raise OptionError(
            f"ssl.endpoint.identification.algorithm is {algorithm!r}: it is either `https`, or "
            f"empty for brokers whose certificate does not name their host."
        )
    values["check_hostname"] = algorithm == "https"
    if "sasl.jaas.config" in options:
        values |= _jaas_values(options["sasl.jaas.config"])
    if url := options.get("sasl.oauthbearer.token.endpoint.url"):
        values |= _token_values(url)
    return values


def _token_values(url: str) -> dict[str, ConfigValue]:
    parsed = urlsplit(url)
    if parsed.scheme == "file":
        return {"token_file": str(Path(url2pathname(parsed.path)))}
    if parsed.scheme not in ("http", "https") or not parsed.hostname or "@" in parsed.netloc:
        raise OptionError(
            "sasl.oauthbearer.token.endpoint.url must be an https: or file: URL, with a host and "
            "without a password: that goes to sasl.jaas.config, clientSecret=. (Its text is not "
            "shown, it may hold one.)"
        )
    return {"token_endpoint": url}


def _jaas_values(text: str) -> dict[str, ConfigValue]:
    """Return the settings of a JAAS line, written as for Spark's connector, by their fields."""
    values: dict[str, ConfigValue] = {}
    extensions: list[tuple[str, str]] = []
    for match in JAAS_ENTRY.finditer(text):
        name, double, single, bare = match.groups()
        quoted = double if double is not None else single
        value = bare if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
        if name in JAAS_FIELDS:
            values[JAAS_FIELDS[name]] = value
        elif name.startswith(EXTENSION):
            extensions.append((name.removeprefix(EXTENSION), value))
    if extensions:
        values["sasl_extensions"] = tuple(extensions)
    if not values and "OAuthBearer" not in text:
        raise OptionError(
            "sasl.jaas.config names neither username nor serviceName (its text is not shown, it "
            'may hold a password); expected: <LoginModule> required username="..." password="...";'
        )
    return values


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise OptionError(f"{option} is {value!r}: it must be one of {', '.join(allowed)}.")


def _set_timeout(options: Mapping[str, str], option: str) -> int | None:
    return _milliseconds(option, options[option]) if option in options else None


def _milliseconds(option: str, text: str) -> int:
    try:
        ms = int(text)
    except ValueError:
        raise OptionError(f"{option} is {text!r}: it must be a whole number of ms.") from None
    if ms > WAIT_MAX_MS:
        raise OptionError(f"{option} is {text!r}: it must be {WAIT_MAX_WORDS}.")
    return ms


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise OptionError(
            f"bootstrap.servers holds {text!r}: each server is host:port, separated by commas."
        )
    return host.strip("[]"), int(port)


class CallTimeouts(NamedTuple):
    """The time limits of a broker's single answer, and of a call with all its tries."""

    request_ms: int
    call_ms: int


def call_timeouts(
    transaction_ms: int | None, request_ms: int | None, call_ms: int | None
) -> CallTimeouts:
    """Return both limits: the user's own, and a limit that is not set derived from the others.

    Contradictions of the user's own stay as they are: the code that uses the values refuses them.

    Args:
        transaction_ms: the timeout of the transactions that the calls are for; None: there is none.
        request_ms: what the user set; None: nothing.
        call_ms: the same.
    """
    if call_ms is None:
        call_ms = max(CALL_TIMEOUT_MS, 2 * (request_ms or 0))
        if transaction_ms is not None:
            call_ms = min(call_ms, _call_within(transaction_ms, request_ms or 0))
    if request_ms is None:
        request_ms = min(REQUEST_TIMEOUT_MS, max(1, call_ms // 2))
    return CallTimeouts(request_ms, call_ms)


def failover_ms(session_timeout_ms: int) -> int:
    """Return how long a broker's death may keep its partitions without a leader."""
    return session_timeout_ms + ELECTION_MS


def _call_within(transaction_ms: int, request_ms: int) -> int:
    """Return four fifths of a transaction, or more where a failover or a request needs more."""
    least = max(transaction_ms * 4 // 5, request_ms + 1)
    enough = failover_ms(SESSION_TIMEOUT_MS) + 1
    if least < enough < transaction_ms:
        least = enough
    return min(least, transaction_ms - 1)
