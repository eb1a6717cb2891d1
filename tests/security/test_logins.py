"""What cannot log in is told at once, with what to change; nothing is tried again."""

import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

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
from tallystick.testing import EmbeddedKafka
from tallystick.testing.security import create_stores
from tests.security.people import TOPIC, config_of, options_of

pytestmark = pytest.mark.broker

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
