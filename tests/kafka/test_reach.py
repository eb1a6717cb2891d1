"""Kafka that cannot be reached: a first start is refused at once, with the reasons of sockets."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tallystick.errors import BrokerUnavailableError, OptionError
from tallystick.kafka import outages, reach
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.outages import OUTAGES
from tallystick.kafka.reach import check_reachable
from tallystick.spark.masters import check_master
from tests.kafka.fake_broker import SILENCE, FakeBroker


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that is bound and not listened at: it refuses connections, and nobody takes it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def config(servers: str, **options: str) -> KafkaConfig:
    named = {name.replace("_", "."): value for name, value in options.items()}
    return KafkaConfig.from_options({"bootstrap.servers": servers, **named})


def unknown_name(code: int) -> object:
    def lookup(host: str, *_: object, **__: object) -> object:
        raise socket.gaierror(code, "Name or service not known")

    return lookup


def test_a_server_that_answers_is_enough(closed_port: int) -> None:
    with FakeBroker() as broker:
        check_reachable(config(f"127.0.0.1:{closed_port},127.0.0.1:{broker.port}"))

    assert broker.requests_of("Metadata"), "a connection alone says nothing"


def test_servers_that_refuse_connections_are_named_with_the_setting(closed_port: int) -> None:
    servers = f"127.0.0.1:{closed_port},localhost:{closed_port}"
    with pytest.raises(OptionError) as raised:
        check_reachable(config(servers))

    text = str(raised.value)
    assert text.startswith(f"Kafka at {servers} cannot be reached: ")
    assert f"127.0.0.1:{closed_port}: connection refused; localhost:{closed_port}: " in text
    assert text.endswith("correct bootstrap_servers.")


def test_a_name_that_no_server_knows_is_hopeless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", unknown_name(socket.EAI_NONAME))
    with pytest.raises(OptionError, match="kafka:9092: the name does not resolve"):
        check_reachable(config("kafka:9092"))


def test_a_name_server_that_is_away_is_asked_again_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reach, "LOOKUP_TRIES_S", 0.2)
    monkeypatch.setattr(reach, "LOOKUP_PAUSE_S", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", unknown_name(socket.EAI_AGAIN))
    began_s = time.monotonic()
    with pytest.raises(OptionError, match="does not resolve"):
        check_reachable(config("kafka:9092"))

    assert time.monotonic() - began_s > 0.2


@pytest.fixture
def abrupt_port() -> Iterator[int]:
    """A port that closes each connection at the first bytes, as Kafka does with those of TLS."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                connection.recv(4096)
                connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("protocol", ["PLAINTEXT", "SSL"])
def test_a_port_of_another_protocol_is_hopeless(protocol: str, abrupt_port: int) -> None:
    with pytest.raises(OptionError) as raised:
        check_reachable(config(f"127.0.0.1:{abrupt_port}", security_protocol=protocol))

    assert f"correct security.protocol, which is {protocol}" in str(raised.value)


def test_a_server_that_does_not_answer_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "PATIENCE_S", 0.2)
    with FakeBroker({"Metadata": lambda _: SILENCE}) as broker:
        check_reachable(broker.config())

    assert broker.requests_of("Metadata")


def test_failures_last_from_the_first_to_the_next_answer(closed_port: int) -> None:
    with FakeBroker() as broker:
        servers = f"127.0.0.1:{closed_port},127.0.0.1:{broker.port}"
        client = Client(config(servers))
        client.network._bootstrap.pop(-2)  # only the port that is closed
        with pytest.raises(BrokerUnavailableError):
            client.metadata(deadline=time.monotonic() + 0.4)

        away = OUTAGES.lasting([servers], 0.3)
        assert away == {f"127.0.0.1:{closed_port}": "connection refused"}
        assert OUTAGES.lasting([servers], 30.0) == {}, "it has not lasted so long"
        assert OUTAGES.lasting(["another:9092"], 0.0) == {}

        OUTAGES.answers(servers, f"127.0.0.1:{closed_port}")
        assert OUTAGES.lasting([servers], 0.0) == {}
        client.close()


def test_an_answer_that_is_waited_for_is_an_outage_before_it_is_given_up() -> None:
    seen: list[dict[str, str]] = []

    def slow(request: object) -> object:
        time.sleep(0.3)
        seen.append(OUTAGES.lasting([servers], 0.2))
        return broker.tell_metadata(request)

    with FakeBroker({"Metadata": slow}) as broker:
        servers = f"127.0.0.1:{broker.port}"
        client = Client(broker.config(request_timeout_ms="2000"))
        client.metadata()
        client.close()

    assert seen == [{servers: "no answer for 0 s"}]
    assert OUTAGES.lasting([servers], 0.0) == {}


def test_a_failure_of_long_ago_is_no_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    OUTAGES.fails("old:1", "old:1", ConnectionRefusedError(111, "Connection refused"))
    assert OUTAGES.lasting(["old:1"], 0.0)
    monkeypatch.setattr(outages, "RECENT_S", 0.0)
    assert OUTAGES.lasting(["old:1"], 0.0) == {}


def test_a_spark_master_that_is_away_is_refused_before_the_jvm_asks(closed_port: int) -> None:
    master = f"spark://127.0.0.1:{closed_port}"
    with pytest.raises(OptionError, match=r"Spark master .*: connection refused"):
        check_master(master)
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_master(f"{master},127.0.0.1:{server.getsockname()[1]}")
    check_master("local[2]")
