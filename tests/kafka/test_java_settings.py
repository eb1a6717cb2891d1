"""No setting of Kafka's Java client is merely unknown: each is mapped, passed over, or refused."""

import re
from pathlib import Path

import pytest

from tallystick.errors import OptionError
from tallystick.kafka import java_settings
from tallystick.kafka.config import FIELDS, SPECIAL, KafkaConfig
from tallystick.options.source import SOURCE

LIST = Path(__file__).parents[1] / "golden" / "kafka_client_settings.txt"
NAMES = [line for line in LIST.read_text().splitlines() if not line.startswith("#")]
SERVERS = {"bootstrap.servers": "one:9092"}
SECRET = "hunter2"
MAPPED = {
    "bootstrap.servers": "two:9092",
    "client.id": "billing",
    "security.protocol": "SSL",
    "sasl.mechanism": "PLAIN",
    "sasl.jaas.config": 'PlainLoginModule required username="ann" password="x";',
    "sasl.kerberos.service.name": "kafka",
    "sasl.oauthbearer.token.endpoint.url": "file:/run/token",
    "sasl.oauthbearer.client.credentials.client.id": "billing",
    "sasl.oauthbearer.client.credentials.client.secret": "x",
    "sasl.oauthbearer.scope": "kafka",
    "ssl.truststore.location": "/ca.pem",
    "ssl.truststore.certificates": "-----BEGIN CERTIFICATE-----",
    "ssl.keystore.location": "/key.pem",
    "ssl.keystore.certificate.chain": "-----BEGIN CERTIFICATE-----",
    "ssl.keystore.key": "-----BEGIN PRIVATE KEY-----",
    "ssl.key.password": "x",
    "ssl.endpoint.identification.algorithm": "",
    "request.timeout.ms": "5000",
    "delivery.timeout.ms": "60000",
    "socket.connection.setup.timeout.ms": "1000",
}
"""Settings that make another configuration, each with a value that does."""
TOGETHER = {
    "ssl.keystore.certificate.chain": {"ssl.keystore.key": "x"},
    "ssl.keystore.key": {"ssl.keystore.certificate.chain": "x"},
}
CHECKED = {"ssl.truststore.type": "JKS", "ssl.keystore.type": "JKS"}
"""Settings that may only say what holds anyway, each with a value that is refused."""


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_is_mapped_passed_over_or_refused_by_name(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is unknown, nothing without a word, and no value is shown that may be a secret."""
    java_settings.say_passed_over.cache_clear()
    own = {**SERVERS, **TOGETHER.get(name, {})}
    if name in MAPPED:
        without = {**own, name: "other"} if name in TOGETHER else own
        mapped = KafkaConfig.from_options({**own, name: MAPPED[name]})
        assert mapped != KafkaConfig.from_options(without)
        assert caplog.messages == []
        return
    try:
        config = KafkaConfig.from_options({**own, name: CHECKED.get(name, SECRET)})
    except OptionError as error:
        text = str(error)
        assert text.startswith((f"kafka.{name} is ", f"{name} is "))
        assert "is no option that Tallystick knows" not in text
        assert len(text.partition(":")[2]) > 20, "a reason"
        if name not in java_settings.ONE_VALUE:
            assert SECRET not in text
        return
    assert config == KafkaConfig.from_options(own)
    (warning,) = caplog.messages
    assert warning.startswith(f"kafka.{name} has no effect: ")
    assert SECRET not in warning


def test_no_name_stands_in_two_tables_or_is_misspelt() -> None:
    tables = [
        [*FIELDS],
        [*SPECIAL],
        [*java_settings.ONE_VALUE],
        [*java_settings.PASSED_OVER],
        [*java_settings.REFUSED],
    ]
    listed = [name for table in tables for name in table]

    assert len(listed) == len(set(listed))
    assert set(NAMES) <= set(listed)
    assert set(listed) - set(NAMES) == {
        "sasl.username",  # librdkafka's
        "sasl.password",
        "sasl.mechanisms",
        "sasl.oauthbearer.client.id",
        "sasl.oauthbearer.client.secret",
        "sasl.oauthbearer.extensions",
        "sasl.oauthbearer.method",
        "ssl.ca.location",
        "ssl.certificate.location",
    }


def test_a_reason_names_only_settings_that_are_taken() -> None:
    reasons = [
        *java_settings.PASSED_OVER.values(),
        *java_settings.REFUSED.values(),
        *(reason for _, reason in java_settings.ONE_VALUE.values()),
    ]
    named = {
        name for reason in reasons for name in re.findall(r"kafka\.((?:[a-z]+\.)+[a-z]+)\b", reason)
    }

    assert len(named) > 5
    taken = {*FIELDS, *SPECIAL, *(option.name.removeprefix("kafka.") for option in SOURCE.options)}
    assert named <= taken


@pytest.mark.parametrize("name", java_settings.ONE_VALUE)
def test_the_one_value_may_be_written_down_and_another_is_refused_with_the_reason(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    allowed, reason = java_settings.ONE_VALUE[name]
    for value in allowed:
        same = KafkaConfig.from_options({**SERVERS, name: value.upper()})
        assert same == KafkaConfig.from_options(SERVERS)
    assert caplog.messages == []
    with pytest.raises(OptionError, match=rf"kafka\.{name} is 'other'.*{re.escape(reason)}"):
        KafkaConfig.from_options({**SERVERS, name: "other"})
