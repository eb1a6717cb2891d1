"""Settings under the Java client's names."""

import pickle

import pytest

from tallystick.errors import OptionError
from tallystick.kafka.config import KafkaConfig

SERVERS = {"bootstrap.servers": "one:9092,two:9093"}
LOGIN = {
    **SERVERS,
    "security.protocol": "SASL_SSL",
    "sasl.mechanism": "SCRAM-SHA-512",
    "sasl.jaas.config": "org.apache.kafka.common.security.scram.ScramLoginModule required "
    'username="ann" password="s\\"ec;ret=1";',
}


def test_addresses_and_defaults() -> None:
    config = KafkaConfig.from_options(SERVERS)

    assert config.bootstrap_addresses == [("one", 9092), ("two", 9093)]
    assert (config.uses_tls, config.uses_sasl) == (False, False)


def test_ipv6_addresses_lose_their_brackets() -> None:
    config = KafkaConfig.from_options({"bootstrap.servers": "[::1]:9092"})

    assert config.bootstrap_addresses == [("::1", 9092)]


def test_user_and_password_come_out_of_a_jaas_line() -> None:
    config = KafkaConfig.from_options(LOGIN)

    assert (config.sasl_username, config.sasl_password) == ("ann", 's"ec;ret=1')
    assert config.uses_tls
    assert config.uses_sasl


def test_plain_user_and_password_do_as_well() -> None:
    options = {**SERVERS, "security.protocol": "sasl_plaintext", "sasl.mechanism": "PLAIN"}
    config = KafkaConfig.from_options(
        {**options, "sasl.username": "ann", "sasl.password": "secret"}
    )

    assert (config.sasl_username, config.sasl_password) == ("ann", "secret")


def test_no_secret_shows_in_a_repr() -> None:
    inline = {
        "ssl.keystore.key": "SECRET-KEY",
        "ssl.keystore.certificate.chain": "SECRET-CERTIFICATE",
        "ssl.key.password": "SECRET-WORD",
    }
    text = repr(KafkaConfig.from_options(LOGIN | inline))

    assert "SECRET" not in text
    assert "ret=1" not in text


def test_it_travels_whole() -> None:
    config = KafkaConfig.from_options(LOGIN)

    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301  # our own bytes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "bootstrap.servers"),
        ({"bootstrap.servers": "host"}, "host:port"),
        ({"bootstrap.servers": "host:99999"}, "host:port"),
        ({"bootstrap.servers": " , "}, "host:port"),
        ({**SERVERS, "security.protcol": "SSL"}, "security.protocol"),
        ({**SERVERS, "security.protocol": "TLS"}, "SASL_SSL"),
        ({**SERVERS, "request.timeout.ms": "soon"}, "whole number"),
        ({**SERVERS, "request.timeout.ms": "0"}, "at least 1"),
        ({**SERVERS, "request.timeout.ms": "9", "delivery.timeout.ms": "9"}, "delivery.timeout.ms"),
        ({**SERVERS, "ssl.truststore.type": "JKS"}, "PEM"),
        ({**SERVERS, "ssl.ca.location": "x"}, "ssl.truststore.location"),
        ({**SERVERS, "ssl.endpoint.identification.algorithm": "http"}, "https"),
        ({**SERVERS, "ssl.keystore.key": "x"}, "ssl.keystore.certificate.chain"),
        ({**SERVERS, "security.protocol": "SASL_SSL", "sasl.mechanism": "SHA"}, "SCRAM-SHA-512"),
        ({**SERVERS, "security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN"}, "jaas"),
        ({**SERVERS, "security.protocol": "SASL_SSL"}, "kerberos"),
        ({**LOGIN, "sasl.jaas.config": "Module required password=hunter2;"}, "user"),
        (
            {**SERVERS, "sasl.oauthbearer.token.endpoint.url": "https://me:hunter2@example.org/"},
            "https: or file: URL",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_do(options: dict[str, str], words: str) -> None:
    with pytest.raises(OptionError, match=words) as refused:
        KafkaConfig.from_options(options)

    assert "hunter2" not in str(refused.value)


def test_a_trust_store_that_is_not_there_is_named() -> None:
    config = KafkaConfig.from_options({**SERVERS, "ssl.truststore.location": "/nowhere/ca.pem"})

    with pytest.raises(OptionError, match=r"/nowhere/ca\.pem"):
        config.ssl_context()


def test_an_inline_trust_store_that_is_no_pem_is_refused() -> None:
    config = KafkaConfig.from_options({**SERVERS, "ssl.truststore.certificates": "nonsense"})

    with pytest.raises(OptionError, match="PEM"):
        config.ssl_context()
