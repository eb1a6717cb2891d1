"""TLS, SCRAM and ACLs on a real broker: what works with which rights, and how the lack is told."""

import time
from collections.abc import Iterator

import pyarrow as pa
import pytest
from real_kafka import commit

from tallystick.codec.records.encoder import encode
from tallystick.errors import AuthorizationError, BrokerUnavailableError, OptionError
from tallystick.kafka import cluster
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.fetcher import fetch
from tallystick.kafka.reach import check_reachable
from tallystick.kafka.writer import PartitionWriter
from tallystick.testing.kafka import EmbeddedKafka, create_topic
from tallystick.testing.security import Grant, Security, create_acls
from tallystick.values import ProducedRange, Producer, SplitRange, TopicPartition

pytestmark = pytest.mark.broker
TOPIC = "guarded"
PARTITION = TopicPartition(TOPIC, 0)
PASSWORDS = {user: f"{user}-secret" for user in ("admin", "pipeline", "writer", "stranger")}
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
def kafka() -> Iterator[EmbeddedKafka]:
    with EmbeddedKafka(security=Security(users=PASSWORDS)) as running:
        client = Client(config_of(running, "admin"))
        create_topic(client, TOPIC)
        client.close()
        create_acls(running.confluent_options(), ENOUGH + TOO_LITTLE)
        yield running


def config_of(kafka: EmbeddedKafka, user: str, **changes: str) -> KafkaConfig:
    options = kafka.kafka_options_for(user).items()
    named = {name.removeprefix("kafka."): value for name, value in options}
    return KafkaConfig.from_options({**named, "delivery.timeout.ms": "20000"} | changes)


def write_one(config: KafkaConfig, producer: Producer) -> tuple[ProducedRange, ...]:
    values = pa.array([b"value"], pa.binary())
    batch = pa.record_batch({"key": values, "value": values})
    client = Client(config)
    writer = PartitionWriter(client, producer, transaction_version=2)
    writer.write([(PARTITION, encoded) for encoded in encode(batch, now_ms=1)])
    client.close()
    return writer.close()


def test_four_rights_are_enough_for_a_whole_epoch(kafka: EmbeddedKafka) -> None:
    config = config_of(kafka, "pipeline")
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


def test_settings_that_may_not_be_seen_are_unknown(kafka: EmbeddedKafka) -> None:
    facts = cluster.cluster_facts(KafkaBroker(config_of(kafka, "pipeline")).client)

    assert facts.transaction_version == 2
    assert facts.partition_verification is None
    assert facts.transaction_timeout_max_ms is None


def test_rights_that_are_missing_are_named_with_their_resource(kafka: EmbeddedKafka) -> None:
    stranger = KafkaBroker(config_of(kafka, "stranger"))
    writer_config = config_of(kafka, "writer")
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


def test_a_wrong_password_is_final_and_stays_secret(kafka: EmbeddedKafka) -> None:
    login = config_of(kafka, "pipeline", **{"sasl.jaas.config": 'M required username="pipeline" '
                                           'password="hunter2";'})  # fmt: skip

    with pytest.raises(AuthorizationError, match="login of 'pipeline'") as refused:
        Client(login).metadata()

    assert "hunter2" not in str(refused.value)


def test_a_certificate_of_an_unknown_authority_is_final(kafka: EmbeddedKafka) -> None:
    options = {name.removeprefix("kafka."): text for name, text in kafka.kafka_options.items()}
    del options["ssl.truststore.location"]

    with pytest.raises(AuthorizationError, match="is not trusted"):
        Client(KafkaConfig.from_options(options)).metadata()


def test_a_trust_store_may_be_given_inline(kafka: EmbeddedKafka) -> None:
    options = {name.removeprefix("kafka."): text for name, text in kafka.kafka_options.items()}
    with open(options.pop("ssl.truststore.location")) as file:
        options["ssl.truststore.certificates"] = file.read()
    config = KafkaConfig.from_options(options)

    assert cluster.partition_counts(KafkaBroker(config).client, [TOPIC]) == {TOPIC: 1}


def test_plain_text_to_the_tls_port_names_the_setting(kafka: EmbeddedKafka) -> None:
    config = KafkaConfig(kafka.bootstrap_servers, request_timeout_ms=500, delivery_timeout_ms=2000)

    with pytest.raises((OptionError, BrokerUnavailableError), match=r"security\.protocol"):
        Client(config).metadata()


def test_a_first_start_with_another_protocol_than_the_ports_ends_at_once(
    kafka: EmbeddedKafka, tallystick_kafka: EmbeddedKafka
) -> None:
    """Waiting mends neither; without the look the usual tries would go on for two minutes."""
    plain_at_tls = {"bootstrap.servers": kafka.bootstrap_servers}
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
        check_reachable(config_of(kafka, "pipeline", **{"sasl.jaas.config": jaas}))
