"""What cannot log in is told at once, with what to change; nothing is tried again.

By a password, or by a certificate at a port of the same broker that asks for one.
"""

import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from tallystick.errors import (
    AuthorizationError,
    BrokerUnavailableError,
    OptionError,
    TallystickError,
)
from tallystick.kafka import cluster
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.testing import EmbeddedKafka, Grant, Security, create_acls
from tallystick.testing.node import HOST, Node
from tallystick.testing.process import free_ports
from tallystick.testing.security import create_stores
from tests.security.people import GRANTS, PASSWORDS, TOPIC, config_of, options_of

pytestmark = pytest.mark.broker

USER = "CN=localhost"
"""The subject of the one certificate that the cluster's authority has signed."""
KEY_PASSWORD = "Zebra.42-in-the-attic"


@pytest.fixture(scope="module")
def both_ways() -> Iterator[tuple[EmbeddedKafka, str]]:
    """A broker for passwords, and the address at which it asks for certificates."""
    (port,) = free_ports(1, HOST)
    address = f"{HOST}:{port}"

    def properties(node: Node) -> dict[str, str]:
        return {
            "listeners": (
                f"SASL_SSL://{node.address},MUTUAL://{address},"
                f"CONTROLLER://{HOST}:{node.controller_port}"
            ),
            "listener.security.protocol.map": ("SASL_SSL:SASL_SSL,MUTUAL:SSL,CONTROLLER:PLAINTEXT"),
            "listener.name.mutual.ssl.client.auth": "required",
        }

    with EmbeddedKafka(security=Security(PASSWORDS), properties=properties) as running:
        running.create_topic(TOPIC, 2)
        owned = Grant(USER, "TOPIC", TOPIC, "READ")
        create_acls(running.confluent_options(), [owned, *GRANTS["alice"]])
        yield running, address


@pytest.fixture(scope="module")
def guarded(both_ways: tuple[EmbeddedKafka, str]) -> EmbeddedKafka:
    return both_ways[0]


Change = Callable[[dict[str, str], EmbeddedKafka, Path], None]


def wrong_password(options: dict[str, str], _: EmbeddedKafka, __: Path) -> None:
    options["sasl.jaas.config"] = options["sasl.jaas.config"].replace("s3cr3t", "gu3ss")


def unknown_user(options: dict[str, str], _: EmbeddedKafka, __: Path) -> None:
    options["sasl.jaas.config"] = options["sasl.jaas.config"].replace('"alice"', '"mallory"')


def mechanism_that_is_not_offered(options: dict[str, str], _: EmbeddedKafka, __: Path) -> None:
    options["sasl.mechanism"] = "SCRAM-SHA-256"


def unknown_authority(options: dict[str, str], _: EmbeddedKafka, folder: Path) -> None:
    options["ssl.truststore.location"] = str(create_stores(folder, "127.0.0.1").truststore)


def no_trust_store(options: dict[str, str], _: EmbeddedKafka, __: Path) -> None:
    del options["ssl.truststore.location"]


def plain_text(options: dict[str, str], _: EmbeddedKafka, __: Path) -> None:
    options["security.protocol"] = "PLAINTEXT"


def login_in_plain_text(options: dict[str, str], _: EmbeddedKafka, __: Path) -> None:
    options["security.protocol"] = "SASL_PLAINTEXT"


def no_login(options: dict[str, str], _: EmbeddedKafka, __: Path) -> None:
    options["security.protocol"] = "SSL"


def tls_to_a_plain_port(options: dict[str, str], kafka: EmbeddedKafka, _: Path) -> None:
    options["bootstrap.servers"] = f"127.0.0.1:{kafka.nodes[0].controller_port}"


MISTAKES: list[tuple[Change, type[TallystickError], str]] = [
    (wrong_password, AuthorizationError, r"login of 'alice'.*Check user name, password"),
    (unknown_user, AuthorizationError, r"login of 'mallory'"),
    (mechanism_that_is_not_offered, AuthorizationError, r"does not offer.*SCRAM-SHA-512"),
    (unknown_authority, AuthorizationError, r"is not trusted.*ssl\.truststore\.location"),
    (no_trust_store, AuthorizationError, r"is not trusted.*ssl\.truststore\.location"),
    (plain_text, OptionError, r"speaks TLS, and security\.protocol is PLAINTEXT"),
    (login_in_plain_text, OptionError, r"speaks TLS, and security\.protocol is SASL_PLAINTEXT"),
]
SUSPICIONS: list[tuple[Change, str]] = [
    (no_login, r"asks for a login, security\.protocol \(SSL\) must be one with SASL"),
    (tls_to_a_plain_port, r"check that security\.protocol \(SASL_SSL\) is what this port speaks"),
]
"""A broker that is going down looks the same: these are tried until the deadline."""


@pytest.mark.parametrize(
    ("mistake", "kind", "says"), MISTAKES, ids=[mistake.__name__ for mistake, _, _ in MISTAKES]
)
def test_a_mistake_is_told_at_once_and_shows_no_secret(
    mistake: Change,
    kind: type[TallystickError],
    says: str,
    guarded: EmbeddedKafka,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = options_of(guarded, "alice")
    mistake(options, guarded, tmp_path)
    client = Client(KafkaConfig.from_options(options))

    with caplog.at_level("DEBUG"), pytest.raises(kind, match=says) as raised:
        client.metadata([TOPIC])

    assert not client.obstacles, "nothing of this is worth another try"
    for text in (str(raised.value), repr(raised.value), caplog.text, repr(client.config)):
        assert "s3cr3t" not in text
        assert "gu3ss" not in text
    client.close()


@pytest.mark.parametrize(
    ("mistake", "says"), SUSPICIONS, ids=[mistake.__name__ for mistake, _ in SUSPICIONS]
)
def test_what_may_be_a_mistake_is_suspected_at_the_deadline(
    mistake: Change, says: str, guarded: EmbeddedKafka, tmp_path: Path
) -> None:
    options = options_of(guarded, "alice")
    mistake(options, guarded, tmp_path)
    short = {"request.timeout.ms": "500", "delivery.timeout.ms": "1500"}
    client = Client(KafkaConfig.from_options({**options, **short}))

    with pytest.raises(BrokerUnavailableError, match=says):
        client.metadata([TOPIC])
    client.close()


def test_a_mechanism_that_does_not_exist_is_refused_before_anything_is_sent(
    guarded: EmbeddedKafka,
) -> None:
    with pytest.raises(OptionError, match=r"'SCRAM-MD5'.*one of PLAIN, SCRAM-SHA-256"):
        config_of(guarded, "alice", **{"sasl.mechanism": "SCRAM-MD5"})


def test_a_certificate_for_another_host_is_refused_unless_told(
    guarded: EmbeddedKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trusting the authority is not enough."""
    name = "broker.example"
    ask = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *how, **more: ask("127.0.0.1" if host == name else host, *how, **more),
    )
    servers = guarded.bootstrap_servers.replace("127.0.0.1", name)
    strict = config_of(guarded, "alice", **{"bootstrap.servers": servers})
    with pytest.raises(AuthorizationError, match=r"ssl\.endpoint\.identification\.algorithm"):
        Client(strict).metadata([TOPIC])

    lenient = config_of(
        guarded,
        "alice",
        **{"bootstrap.servers": servers, "ssl.endpoint.identification.algorithm": ""},
    )
    broker = KafkaBroker(lenient)
    assert cluster.partition_counts(broker.client, [TOPIC]) == {TOPIC: 2}
    broker.close()


def test_everything_on_the_wire_is_encrypted(guarded: EmbeddedKafka) -> None:
    broker = KafkaBroker(config_of(guarded, "alice"))
    broker.cluster_id()

    sockets = [connection._socket for connection in broker.client.network._connections.values()]
    assert sockets
    assert all(isinstance(connection, ssl.SSLSocket) for connection in sockets)
    broker.close()


# --- certificates --------------------------------------------------------------------------------


@pytest.fixture
def options(both_ways: tuple[EmbeddedKafka, str]) -> dict[str, str]:
    """How the broker is reached without a certificate; and quickly given up."""
    truststore = both_ways[0].kafka_options["kafka.ssl.truststore.location"]
    return {
        "bootstrap.servers": both_ways[1],
        "security.protocol": "SSL",
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": truststore,
    }


def keystore_of(options: dict[str, str]) -> Path:
    """The key and the certificate that the cluster's authority has signed."""
    return Path(options["ssl.truststore.location"]).with_name("broker.pem")


def parts_of(keystore: Path) -> tuple[str, str]:
    key, mark, certificate = keystore.read_text().partition("-----BEGIN CERTIFICATE-----")
    return key, mark + certificate


def as_a_file(options: dict[str, str], _: Path) -> dict[str, str]:
    return {"ssl.keystore.location": str(keystore_of(options))}


def inline(options: dict[str, str], _: Path) -> dict[str, str]:
    key, certificate = parts_of(keystore_of(options))
    return {"ssl.keystore.key": key, "ssl.keystore.certificate.chain": certificate}


def with_a_password(options: dict[str, str], folder: Path) -> dict[str, str]:
    key, certificate = parts_of(keystore_of(options))
    encrypted = serialization.load_pem_private_key(key.encode(), None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(KEY_PASSWORD.encode()),
    )
    path = folder / "encrypted.pem"
    path.write_text(encrypted.decode() + certificate)
    return {"ssl.keystore.location": str(path), "ssl.key.password": KEY_PASSWORD}


@pytest.mark.parametrize("given", [as_a_file, inline, with_a_password])
def test_a_certificate_is_enough(
    given: Callable[[dict[str, str], Path], dict[str, str]],
    options: dict[str, str],
    tmp_path: Path,
) -> None:
    client = Client(KafkaConfig.from_options(options | given(options, tmp_path)))

    assert cluster.partition_counts(client, [TOPIC]) == {TOPIC: 2}
    client.close()


def test_without_one_the_setting_is_named_at_once(options: dict[str, str]) -> None:
    client = Client(KafkaConfig.from_options(options))

    with pytest.raises(AuthorizationError, match=r"client certificate, set ssl\.keystore\.loc"):
        client.metadata([TOPIC])
    assert not client.obstacles
    client.close()


def test_one_that_another_authority_has_signed_is_refused(
    options: dict[str, str], tmp_path: Path
) -> None:
    stranger = create_stores(tmp_path, HOST).keystore
    client = Client(KafkaConfig.from_options({**options, "ssl.keystore.location": str(stranger)}))

    with pytest.raises(AuthorizationError, match="refused the TLS handshake"):
        client.metadata([TOPIC])
    assert not client.obstacles
    client.close()


@pytest.mark.parametrize("password", ["", "gu3ss"])
def test_a_wrong_password_of_the_key_is_told_and_not_shown(
    password: str, options: dict[str, str], tmp_path: Path
) -> None:
    given = {**options, **with_a_password(options, tmp_path), "ssl.key.password": password}

    with pytest.raises(OptionError, match=r"check ssl\.key\.password") as raised:
        Client(KafkaConfig.from_options(given))
    assert not password or password not in str(raised.value)
