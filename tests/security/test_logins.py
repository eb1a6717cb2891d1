"""A client that cannot log in is told at once what to change; nothing is tried again.

By a password, or by a certificate at a port of the same broker that asks for one; and what works
there with which rights.
"""

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from confluent_kafka import Producer as Witness
from cryptography.hazmat.primitives import serialization

from tallystick.codec.records.encoder import encode
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
from tallystick.kafka.fetcher import fetch
from tallystick.kafka.reach import check_reachable
from tallystick.kafka.writer import PartitionWriter
from tallystick.testing import EmbeddedKafka, Grant, Security, create_acls
from tallystick.testing.node import HOST, Node
from tallystick.testing.process import free_ports
from tallystick.testing.security import create_stores
from tallystick.values import ProducedRange, Producer, SplitRange, TopicPartition
from tests.kafka.real_kafka import commit
from tests.security.people import GRANTS, PASSWORDS, TOPIC, config_of, options_of
from tests.waiting import wait_until

pytestmark = pytest.mark.broker

USER = "CN=localhost"
"""The subject of the one certificate that the cluster's authority has signed."""
KEY_PASSWORD = "Zebra.42-in-the-attic"
PARTITION = TopicPartition(TOPIC, 0)
USERS = {**PASSWORDS, **{user: f"{user}-s3cr3t" for user in ("pipeline", "stranger")}}
ENOUGH = [
    Grant("pipeline", "TRANSACTIONAL_ID", "tallystick-", "WRITE", prefixed=True),
    Grant("pipeline", "TOPIC", TOPIC, "WRITE"),
    Grant("pipeline", "TOPIC", TOPIC, "READ"),
    Grant("pipeline", "GROUP", "tallystick-", "READ", prefixed=True),
]
"""The rights that a pipeline needs; the rest only makes the pre-flight check more precise."""
TOO_LITTLE = [
    Grant("writer", "TRANSACTIONAL_ID", "tallystick-", "WRITE", prefixed=True),
    Grant("writer", "TOPIC", TOPIC, "WRITE"),
]


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

    with EmbeddedKafka(security=Security(USERS), properties=properties) as running:
        running.create_topic(TOPIC, 2)
        owned = Grant(USER, "TOPIC", TOPIC, "READ")
        create_acls(running.confluent_options(), [owned, *GRANTS["alice"], *ENOUGH, *TOO_LITTLE])
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


# --- rights ---------------------------------------------------------------------------------------


def may_write(guarded: EmbeddedKafka, user: str) -> bool:
    """True if an independent client may."""
    refused: list[object] = []
    producer = Witness({**guarded.confluent_options(user), "message.timeout.ms": 30_000})
    producer.produce(TOPIC, b"x", on_delivery=lambda error, _: error and refused.append(error))
    assert producer.flush(60) == 0
    return not refused


def test_only_who_was_granted_may_write(guarded: EmbeddedKafka) -> None:
    wait_until(lambda: may_write(guarded, "alice"), "alice may not write")
    assert not may_write(guarded, "stranger")
    assert PASSWORDS["alice"] not in repr(guarded)
    spark_options = guarded.kafka_options_for("alice")
    assert spark_options["kafka.security.protocol"] == "SASL_SSL"
    assert spark_options["kafka.ssl.truststore.type"] == "PEM"
    with pytest.raises(OptionError, match="no user 'carol'"):
        guarded.kafka_options_for("carol")


def write_one(config: KafkaConfig, producer: Producer) -> tuple[ProducedRange, ...]:
    values = pa.array([b"value"], pa.binary())
    batch = pa.record_batch({"key": values, "value": values})
    client = Client(config)
    writer = PartitionWriter(client, producer, transaction_version=2)
    writer.write([(PARTITION, encoded) for encoded in encode(batch, now_ms=1)])
    client.close()
    return writer.close()


def test_four_rights_are_enough_for_a_whole_epoch(guarded: EmbeddedKafka) -> None:
    config = config_of(guarded, "pipeline")
    broker = KafkaBroker(config)
    producer = broker.fence("tallystick-guarded", None)
    produced = write_one(config, producer)
    assert broker.last_sequences(producer, [PARTITION]) == {PARTITION: 0}
    broker.stage_offsets(producer, "tallystick-guarded", {PARTITION: (1, "path")})

    commit(broker, producer)

    assert broker.group_offsets("tallystick-guarded") == {PARTITION: (1, "path")}
    assert broker.foreign_rows(producer, produced) == {}
    end = cluster.list_offsets(broker.client, [PARTITION], -1)[PARTITION]
    rows = sum(batch.num_rows for batch in fetch(broker.client, SplitRange(TOPIC, 0, 0, end)))
    assert rows >= 1
    broker.close()


def test_settings_that_may_not_be_seen_are_unknown(guarded: EmbeddedKafka) -> None:
    facts = cluster.cluster_facts(KafkaBroker(config_of(guarded, "pipeline")).client)

    assert facts.transaction_version == 2
    assert facts.partition_verification is None
    assert facts.transaction_timeout_max_ms is None


def test_rights_that_are_missing_are_named_with_their_resource(guarded: EmbeddedKafka) -> None:
    stranger = KafkaBroker(config_of(guarded, "stranger"))
    writer_config = config_of(guarded, "writer")
    writer = KafkaBroker(writer_config)

    with pytest.raises(AuthorizationError, match=r"'tallystick-x'.*WRITE on the transactional id"):
        stranger.fence("tallystick-x", None)
    with pytest.raises(AuthorizationError, match=f"'{TOPIC}'.*DESCRIBE"):
        cluster.partition_counts(stranger.client, [TOPIC])

    producer = writer.fence("tallystick-x", None)
    write_one(writer_config, producer)
    assert writer.last_sequences(producer, [PARTITION]) is None, "needs READ on the topic"
    with pytest.raises(AuthorizationError, match=r"'tallystick-x'.*READ on the consumer group"):
        writer.stage_offsets(producer, "tallystick-x", {PARTITION: (1, "")})
    with pytest.raises(AuthorizationError, match=f"{TOPIC}-0.*READ on the topic"):
        list(fetch(writer.client, SplitRange(TOPIC, 0, 0, 1)))
    writer.abort_transaction(producer)
    writer.close()
    stranger.close()


def test_a_wrong_password_is_final_and_stays_secret(guarded: EmbeddedKafka) -> None:
    login = config_of(guarded, "pipeline", **{"sasl.jaas.config": 'M required username="pipeline" '
                                           'password="hunter2";'})  # fmt: skip

    with pytest.raises(AuthorizationError, match="login of 'pipeline'") as refused:
        Client(login).metadata()

    assert "hunter2" not in str(refused.value)


def test_a_certificate_of_an_unknown_authority_is_final(guarded: EmbeddedKafka) -> None:
    options = {name.removeprefix("kafka."): text for name, text in guarded.kafka_options.items()}
    del options["ssl.truststore.location"]

    with pytest.raises(AuthorizationError, match="is not trusted"):
        Client(KafkaConfig.from_options(options)).metadata()


def test_a_trust_store_may_be_given_inline(guarded: EmbeddedKafka) -> None:
    options = {name.removeprefix("kafka."): text for name, text in guarded.kafka_options.items()}
    with open(options.pop("ssl.truststore.location")) as file:
        options["ssl.truststore.certificates"] = file.read()
    config = KafkaConfig.from_options(options)

    assert cluster.partition_counts(KafkaBroker(config).client, [TOPIC]) == {TOPIC: 2}


def test_plain_text_to_the_tls_port_names_the_setting(guarded: EmbeddedKafka) -> None:
    config = KafkaConfig(
        guarded.bootstrap_servers, request_timeout_ms=500, delivery_timeout_ms=2000
    )

    with pytest.raises((OptionError, BrokerUnavailableError), match=r"security\.protocol"):
        Client(config).metadata()


def test_a_first_start_with_another_protocol_than_the_ports_ends_at_once(
    guarded: EmbeddedKafka, tallystick_kafka: EmbeddedKafka
) -> None:
    """Waiting mends neither; without the look the usual tries would go on for two minutes."""
    plain_at_tls = {"bootstrap.servers": guarded.bootstrap_servers}
    tls_at_plain = {
        "bootstrap.servers": tallystick_kafka.bootstrap_servers,
        "security.protocol": "SSL",
        "ssl.endpoint.identification.algorithm": "",
    }
    for options in (plain_at_tls, tls_at_plain):
        config = KafkaConfig.from_options(options)
        began_s = time.monotonic()
        with pytest.raises(OptionError, match=r"security\.protocol") as raised:
            check_reachable(config)

        assert config.bootstrap_servers in str(raised.value)
        assert time.monotonic() - began_s < 5
    jaas = 'M required username="pipeline" password="wrong";'
    with pytest.raises(AuthorizationError, match="login of 'pipeline'"):
        check_reachable(config_of(guarded, "pipeline", **{"sasl.jaas.config": jaas}))
