"""A broker that asks for a certificate in place of a login."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from tallystick.errors import AuthorizationError, OptionError
from tallystick.kafka import cluster
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.testing import EmbeddedKafka, Grant, Security, create_acls
from tallystick.testing.node import HOST, Node
from tallystick.testing.process import free_ports
from tallystick.testing.security import create_stores
from tests.security.people import PASSWORDS

pytestmark = pytest.mark.broker

TOPIC = "guarded"
USER = "CN=localhost"
"""The subject of the one certificate that the cluster's authority has signed."""
KEY_PASSWORD = "Zebra.42-in-the-attic"


@pytest.fixture(scope="module")
def kafka() -> Iterator[tuple[EmbeddedKafka, str]]:
    """A broker, and the address at which it asks for certificates."""
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
        create_acls(running.confluent_options(), [Grant(USER, "TOPIC", TOPIC, "READ")])
        yield running, address


@pytest.fixture
def options(kafka: tuple[EmbeddedKafka, str]) -> dict[str, str]:
    """How the broker is reached without a certificate; and quickly given up."""
    truststore = kafka[0].kafka_options["kafka.ssl.truststore.location"]
    return {
        "bootstrap.servers": kafka[1],
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
