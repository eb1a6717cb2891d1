"""OAUTHBEARER with a token endpoint: a real broker checks the tokens of an identity provider."""

import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.errors import AuthorizationError, BrokerUnavailableError, OptionError
from tallystick.kafka import cluster, sasl
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.testing import EmbeddedKafka, Security, create_acls
from tallystick.testing.security import create_stores
from tests.failover.evidence import read_committed
from tests.security.people import PASSWORDS, minimal
from tests.security.token_server import TokenServer

pytestmark = pytest.mark.broker

CLIENT, SECRET = "shipping", "a-s3cret/of+mine=="
TOPIC = "guarded-in"
KAFKA_VERSION = "4.3.0"
"""The one whose jars have what checks a signature."""
PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenServer]:
    with TokenServer(tmp_path_factory.mktemp("provider"), {CLIENT: SECRET}) as server:
        yield server


@pytest.fixture(scope="module")
def kafka(provider: TokenServer) -> Iterator[EmbeddedKafka]:
    """A broker that takes passwords too, for the witness."""
    allowed = f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={provider.keys_url}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAVA_TOOL_OPTIONS", allowed)
        kafka = EmbeddedKafka(
            security=Security(PASSWORDS),
            properties=provider.broker_properties(),
            version=KAFKA_VERSION,
        )
        kafka.start()
    for topic in (TOPIC, "guarded-out"):
        kafka.create_topic(topic, 2)
    create_acls(
        kafka.confluent_options(), [rule for some in minimal(CLIENT).values() for rule in some]
    )
    yield kafka
    kafka.stop()


@pytest.fixture(autouse=True)
def _as_before(provider: TokenServer) -> Iterator[None]:
    """No test has the tokens of another, nor its settings."""
    provider.requests.clear()
    provider.tokens.clear()
    provider.ends.clear()
    yield
    provider.lifetime_s, provider.told_lifetime_s = 60.0, None
    provider.audience, provider.answers_instead = "kafka", None
    sasl._KEPT.__init__()  # type: ignore[misc]


def options_of(kafka: EmbeddedKafka, login: dict[str, str]) -> dict[str, str]:
    """Kafka's own options with another login."""
    given = {name.removeprefix("kafka."): value for name, value in kafka.kafka_options.items()}
    return {**given, **login}


def client_of(kafka: EmbeddedKafka, login: dict[str, str], **more: str) -> Client:
    return Client(KafkaConfig.from_options(options_of(kafka, login) | more))


def partitions_seen(client: Client) -> dict[str, int]:
    return cluster.partition_counts(client, [TOPIC])


def test_one_token_serves_all_logins_of_a_process(
    kafka: EmbeddedKafka, provider: TokenServer
) -> None:
    for _ in range(3):
        client = client_of(kafka, provider.options(CLIENT, scope="kafka read"))
        assert partitions_seen(client) == {TOPIC: 2}
        client.close()

    (request,) = provider.requests
    assert (request.path, request.login) == ("/token", f"{CLIENT}:{SECRET}")
    assert request.fields == {"grant_type": ["client_credentials"], "scope": ["kafka read"]}


def test_the_newer_names_of_the_settings_do_the_same(
    kafka: EmbeddedKafka, provider: TokenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kafka 4.1 has them; the endpoint's authority is one that the system trusts."""
    monkeypatch.setenv("SSL_CERT_FILE", str(provider.stores.truststore))
    login = provider.options(CLIENT)
    del login["sasl.jaas.config"], login["sasl.login.callback.handler.class"]
    names = "sasl.oauthbearer.client.credentials.client"
    login |= {f"{names}.id": CLIENT, f"{names}.secret": SECRET, "sasl.oauthbearer.scope": "all"}
    options = options_of(kafka, login)
    del options["sasl.jaas.config"]

    client = Client(KafkaConfig.from_options(options | login))

    assert partitions_seen(client) == {TOPIC: 2}
    assert provider.requests[0].fields["scope"] == ["all"]
    client.close()


def test_an_expired_token_is_replaced_on_a_client_that_lives(
    kafka: EmbeddedKafka, provider: TokenServer
) -> None:
    provider.lifetime_s = 3.0
    client = client_of(kafka, provider.options(CLIENT))
    assert partitions_seen(client) == {TOPIC: 2}
    time.sleep(max(0.0, provider.ends[-1] - time.time()) + 0.5)

    assert partitions_seen(client) == {TOPIC: 2}

    assert not client.obstacles, "the new login came before the broker ended the old one"
    assert len(provider.tokens) == 2
    client.close()


def test_a_kept_token_that_is_refused_is_asked_for_anew(
    kafka: EmbeddedKafka, provider: TokenServer
) -> None:
    """As after a change of keys: the provider said that it would live longer than it does."""
    provider.lifetime_s, provider.told_lifetime_s = 1.0, 3600.0
    first = client_of(kafka, provider.options(CLIENT))
    assert partitions_seen(first) == {TOPIC: 2}
    first.close()
    provider.lifetime_s = 60.0
    time.sleep(max(0.0, provider.ends[-1] - time.time()) + 0.5)
    second = client_of(kafka, provider.options(CLIENT))

    assert partitions_seen(second) == {TOPIC: 2}

    assert any("refused a token that was kept" in obstacle for obstacle in second.obstacles)
    assert len(provider.tokens) == 2
    second.close()


def assert_told(
    client: Client, provider: TokenServer, kind: type[Exception], says: str, log: str
) -> None:
    """It fails at once, and with nothing that somebody could use."""
    with pytest.raises(kind, match=says) as raised:
        partitions_seen(client)
    assert not client.obstacles
    for text in (str(raised.value), repr(client.config), log):
        assert SECRET not in text
        assert not any(token in text for token in provider.tokens)
    client.close()


def test_a_client_that_the_provider_refuses_is_told(
    kafka: EmbeddedKafka, provider: TokenServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    client = client_of(kafka, provider.options(CLIENT, "no" + SECRET))

    assert_told(
        client,
        provider,
        AuthorizationError,
        rf"answers 401 \('invalid_client: .*to client '{CLIENT}'. Check .*clientSecret",
        caplog.text,
    )
    assert len(provider.requests) == 1
    assert SECRET not in caplog.text


def test_a_token_that_the_broker_refuses_is_told(
    kafka: EmbeddedKafka, provider: TokenServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    provider.audience = "another-cluster"
    client = client_of(kafka, provider.options(CLIENT))

    assert_told(
        client,
        provider,
        AuthorizationError,
        r"refused the token of https://.*/token.*audience",
        caplog.text,
    )
    assert len(provider.tokens) == 1
    provider.audience = "kafka"
    corrected = client_of(kafka, provider.options(CLIENT))
    assert partitions_seen(corrected) == {TOPIC: 2}, "what was refused is not kept"
    corrected.close()


def test_a_providers_certificate_of_another_authority_is_refused(
    kafka: EmbeddedKafka, provider: TokenServer, tmp_path: Path
) -> None:
    """Its client's secret is not even sent."""
    stranger = str(create_stores(tmp_path, "127.0.0.1").truststore)
    login = provider.options(CLIENT, **{"ssl.truststore.location": stranger})

    assert_told(
        client_of(kafka, login), provider, AuthorizationError, r"ssl\.truststore\.location", ""
    )
    assert provider.requests == []


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        ((302, {"Location": "/elsewhere"}, b""), OptionError, "302.*redirect is not followed"),
        ((404, {}, b"<html>"), OptionError, r"404.*token\.endpoint\.url"),
        ((200, {}, b"<html>welcome</html>"), OptionError, "without an access_token"),
        ((200, {}, b'{"access_token": "a\\u0001b"}'), OptionError, "without an access_token"),
        ((200, {}, b'{"access_token": "a", "expires_in": "x"}'), OptionError, "expires_in"),
    ],
)
def test_what_is_no_token_endpoint_is_told_at_once(
    answer: tuple[int, dict[str, str], bytes],
    kind: type[Exception],
    says: str,
    kafka: EmbeddedKafka,
    provider: TokenServer,
) -> None:
    provider.answers_instead = answer

    assert_told(client_of(kafka, provider.options(CLIENT)), provider, kind, says, "")
    assert len(provider.requests) == 1


def test_a_provider_that_is_down_is_waited_for_until_the_deadline(
    kafka: EmbeddedKafka, provider: TokenServer
) -> None:
    provider.answers_instead = (503, {}, b"")
    short = {"request.timeout.ms": "500", "delivery.timeout.ms": "2000"}
    client = client_of(kafka, provider.options(CLIENT), **short)

    with pytest.raises(BrokerUnavailableError, match=r"token endpoint https://.* answers 503"):
        partitions_seen(client)

    assert len(provider.requests) > 1
    client.close()


@pytest.mark.spark
def test_a_pipeline_outlives_its_tokens(
    shared_spark: SparkSession, kafka: EmbeddedKafka, provider: TokenServer, tmp_path: Path
) -> None:
    """Every token of its first epochs has expired when it reads and writes again."""
    provider.lifetime_s = 8.0
    login = {f"kafka.{name}": value for name, value in provider.options(CLIENT).items()}
    options = {**kafka.kafka_options, **login}
    servers = options.pop("kafka.bootstrap.servers")
    witness = kafka.confluent_options()

    def feed(first: int) -> None:
        producer = Producer(witness)
        for number in range(first, first + 50):
            producer.produce(TOPIC, str(number), partition=number % 2)
        producer.flush()

    def wait_for(count: int) -> list[str]:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            rows_by_partition = read_committed(witness, "guarded-out", 2)
            rows = sorted((row for rows in rows_by_partition.values() for row in rows), key=int)
            if len(rows) >= count or time.monotonic() > deadline:
                return rows
            assert query.exception() is None
            time.sleep(0.3)

    def values(rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows.select(["value"])

    source = ts.KafkaSource(servers, topics=[TOPIC], starting_offsets="earliest", options=options)
    sink = ts.KafkaSink(servers, topic="guarded-out", options=options)
    pipeline = ts.Pipeline(CLIENT).read(source).map_batches(values).write(sink)
    feed(0)
    query = pipeline.start(shared_spark, checkpoint=str(tmp_path / "checkpoint"))
    try:
        assert wait_for(50) == [str(number) for number in range(50)]
        before = len(provider.tokens)
        time.sleep(max(0.0, max(provider.ends) - time.time()) + 1)
        feed(50)
        assert wait_for(100) == [str(number) for number in range(100)]
    finally:
        query.stop()

    assert 0 < before < len(provider.tokens)
    kept = [path for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()]
    assert kept
    for text in (path.read_bytes() for path in kept):
        assert SECRET.encode() not in text
        assert not any(token.encode() in text for token in provider.tokens)
