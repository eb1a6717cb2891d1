"""The client against a peer that misbehaves: hung, gone, wrong, slow, or speaking TLS."""

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_broker import CLOSE, CODES, SILENCE, FakeBroker, answer, part

from tallystick.errors import (
    AuthorizationError,
    BrokerUnavailableError,
    EpochAbortedError,
    FencedError,
    OptionError,
    TallystickError,
)
from tallystick.kafka import protocol
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.connection import Connection
from tallystick.values import Producer, TopicPartition

PRODUCER = Producer("tallystick-test", 7, 3)
pytestmark = pytest.mark.timeout(60)  # what a deadline is missed by if nothing keeps it


def one_by_one(*answers: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Each answer once, the last one for ever."""
    remaining = list(answers)

    def handler(request: Any) -> Any:
        return (remaining.pop(0) if len(remaining) > 1 else remaining[0])(request)

    return handler


def refuse(name: str) -> Callable[[Any], Any]:
    return lambda request: answer(request, error_code=CODES[name])


def accept(request: Any) -> Any:
    return answer(request, error_code=0, producer_id=7, producer_epoch=4)


def silent(_: Any) -> str:
    return SILENCE


def hang_up(_: Any) -> str:
    return CLOSE


def version_2(broker: FakeBroker) -> Callable[[Any], Any]:
    """ApiVersions with the finalized feature of KIP-890."""

    def handler(request: Any) -> Any:
        response = broker.tell_versions(request)
        feature = type(response).FinalizedFeatureKey(
            name="transaction.version", max_version_level=2, min_version_level=1
        )
        if request.version >= 3:
            response.finalized_features = [feature]
        return response

    return handler


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    with FakeBroker() as fake:
        fake.handlers["ApiVersions"] = version_2(fake)
        yield fake


def port_of_nobody() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_refused_connection_ends_at_the_deadline_and_names_the_servers() -> None:
    address = f"127.0.0.1:{port_of_nobody()}"
    config = KafkaConfig(address, request_timeout_ms=100, delivery_timeout_ms=300)

    with pytest.raises(BrokerUnavailableError, match="ConnectionRefused") as failed:
        Client(config).metadata()

    assert f"bootstrap.servers {address}" in str(failed.value)


def test_a_hung_peer_costs_the_deadline_and_no_more() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        config = KafkaConfig(address, request_timeout_ms=200, delivery_timeout_ms=500)

        with pytest.raises(BrokerUnavailableError, match="did not answer in time"):
            Client(config).metadata()


def test_a_broker_that_hangs_after_the_handshake_is_bounded_too(broker: FakeBroker) -> None:
    broker.handlers["Metadata"] = silent
    client = Client(broker.config(delivery_timeout_ms="700"))
    with pytest.raises(BrokerUnavailableError, match="did not answer in time"):
        client.metadata()


def test_a_peer_that_accepts_and_closes_hints_at_the_security_protocol() -> None:
    with FakeBroker({"ApiVersions": hang_up}) as fake:
        client = Client(fake.config(delivery_timeout_ms="600"))

        with pytest.raises(BrokerUnavailableError, match=r"check that security\.protocol"):
            client.metadata()

        assert fake.connection_count < 30, "there are pauses between the tries"


def test_a_dead_bootstrap_server_does_not_matter_while_another_lives(broker: FakeBroker) -> None:
    servers = f"127.0.0.1:{port_of_nobody()},127.0.0.1:{broker.port}"

    for _ in range(5):
        assert Client(KafkaConfig(servers)).metadata().cluster_id == "fake"


def test_when_all_known_brokers_are_gone_the_bootstrap_servers_are_asked_again(
    broker: FakeBroker,
) -> None:
    client = Client(broker.config())
    with FakeBroker() as other:
        broker.nodes = [other]
        client.metadata()
    broker.nodes = [broker]
    client.network.drop(0)

    client.metadata(["orders"])

    assert client.by_leader([TopicPartition("orders", 0)], client.deadline())


def test_plain_text_to_a_tls_port_says_so_at_once() -> None:
    """A TLS server answers plain text with an alert, whose first bytes look like a length."""

    def serve() -> None:
        connection, _ = server.accept()
        connection.recv(1024)
        connection.sendall(b"\x15\x03\x03\x00\x02\x02\x50")
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        config = KafkaConfig(f"127.0.0.1:{server.getsockname()[1]}")

        with pytest.raises(OptionError, match=r"speaks TLS.*security\.protocol is PLAINTEXT"):
            Client(config).metadata()


def test_tls_to_a_plain_port_says_so_at_once() -> None:
    def serve() -> None:
        connection, _ = server.accept()
        connection.recv(1024)
        connection.sendall(b"\x00\x00\x00\x04nope")
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        config = KafkaConfig(f"127.0.0.1:{server.getsockname()[1]}", security_protocol="SSL")

        with pytest.raises(OptionError, match=r"does not speak TLS.*security\.protocol"):
            Client(config).metadata()


def test_an_untrusted_certificate_is_final_at_once(certificate: str) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)

    def serve() -> None:
        connection, _ = server.accept()
        try:
            tls.wrap_socket(connection, server_side=True)
        except OSError:
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        config = KafkaConfig(f"127.0.0.1:{server.getsockname()[1]}", security_protocol="SSL")

        with pytest.raises(AuthorizationError, match=r"certificate .* ssl\.truststore\.location"):
            Client(config).metadata()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A certificate that nobody signed, and its key, in one file."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "nobody")])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "key-and-certificate.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + built.public_bytes(serialization.Encoding.PEM)
    )
    return str(path)


def test_a_wrong_password_is_final_at_once_and_not_shown(broker: FakeBroker) -> None:
    broker.handlers["SaslHandshake"] = lambda request: answer(
        request, error_code=0, mechanisms=["PLAIN"]
    )
    broker.handlers["SaslAuthenticate"] = lambda request: answer(
        request,
        error_code=CODES["SaslAuthenticationFailed"],
        error_message="no",
        auth_bytes=b"",
        session_lifetime_ms=0,
    )
    config = broker.config(
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="PLAIN",
        sasl_username="ann",
        sasl_password="hunter2",
    )

    with pytest.raises(AuthorizationError, match="login of 'ann'") as failed:
        Client(config).metadata()

    assert "hunter2" not in str(failed.value)
    assert broker.connection_count == 1


def test_a_mechanism_that_is_not_offered_names_those_that_are(broker: FakeBroker) -> None:
    broker.handlers["SaslHandshake"] = lambda request: answer(
        request, error_code=CODES["UnsupportedSaslMechanism"], mechanisms=["SCRAM-SHA-512"]
    )
    config = broker.config(
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="PLAIN",
        sasl_username="ann",
        sasl_password="hunter2",
    )

    with pytest.raises(AuthorizationError, match="it offers SCRAM-SHA-512"):
        Client(config).metadata()


def test_a_login_that_ends_is_renewed_by_a_new_connection(broker: FakeBroker) -> None:
    broker.handlers["SaslHandshake"] = lambda request: answer(
        request, error_code=0, mechanisms=["PLAIN"]
    )
    broker.handlers["SaslAuthenticate"] = lambda request: answer(
        request, error_code=0, error_message=None, auth_bytes=b"", session_lifetime_ms=100
    )
    config = broker.config(
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="PLAIN",
        sasl_username="ann",
        sasl_password="hunter2",
    )
    connection = Connection(("127.0.0.1", broker.port), config, None, time.monotonic() + 5)
    assert not connection.expired
    time.sleep(0.1)
    assert connection.expired
    connection.close()

    client = Client(config)
    client.metadata()
    time.sleep(0.1)
    connections_before = broker.connection_count
    client.metadata()

    assert broker.connection_count == connections_before + 1


def test_a_version_that_the_broker_does_not_speak_is_named(broker: FakeBroker) -> None:
    broker.versions["EndTxn"] = (0, 4)

    with pytest.raises(TallystickError, match="EndTxn: this client needs version 5") as failed:
        KafkaBroker(broker.config()).commit_transaction(PRODUCER)

    assert "offers 0 to 4" in str(failed.value)
    assert not broker.requests_of("EndTxn")


def test_a_broker_that_knows_no_recent_api_versions_is_asked_in_the_oldest() -> None:
    def old(request: Any) -> Any:
        if request.version > 0:
            refused = answer(request, error_code=CODES["UnsupportedVersion"])
            refused.version = 0
            return refused
        return fake.tell_versions(request)

    with FakeBroker() as fake:
        fake.handlers["ApiVersions"] = old

        assert Client(fake.config()).metadata().cluster_id == "fake"


def test_the_wrong_coordinator_is_looked_up_again(broker: FakeBroker) -> None:
    with FakeBroker({"EndTxn": refuse("NotCoordinator")}) as wrong:
        broker.nodes = wrong.nodes = [broker, wrong]
        coordinator = one_by_one(
            lambda request: broker.tell_coordinator(request, 1), broker.tell_coordinator
        )
        broker.handlers["FindCoordinator"] = wrong.handlers["FindCoordinator"] = coordinator
        broker.handlers["EndTxn"] = accept

        following = KafkaBroker(broker.config()).commit_transaction(PRODUCER)

        assert following == Producer("tallystick-test", 7, 4)
        assert (len(wrong.requests_of("EndTxn")), len(broker.requests_of("EndTxn"))) == (1, 1)


def test_a_pause_that_the_broker_asks_for_is_kept(broker: FakeBroker) -> None:
    def throttled(request: Any) -> Any:
        response = broker.tell_metadata(request)
        response.throttle_time_ms = 300
        return response

    broker.handlers["Metadata"] = one_by_one(throttled, broker.tell_metadata)
    client = Client(broker.config())

    client.metadata()
    node = client.network.candidates()[-1]
    client.network.ask(node, protocol.MetadataRequest(topics=[]), client.deadline())

    first, second = broker.when("Metadata")
    assert second - first >= 0.29


def test_a_pause_longer_than_the_deadline_ends_at_the_deadline(broker: FakeBroker) -> None:
    def throttled(request: Any) -> Any:
        response = broker.tell_metadata(request)
        response.throttle_time_ms = 60_000
        return response

    broker.handlers["Metadata"] = throttled
    broker.nodes = []
    client = Client(broker.config(delivery_timeout_ms="600"))
    client.metadata()
    with pytest.raises(BrokerUnavailableError):
        client.metadata()


def test_an_end_of_transaction_whose_answer_is_lost_is_sent_again(broker: FakeBroker) -> None:
    """Rule 5: the repetition of what Kafka did is answered with what it did."""
    broker.handlers["EndTxn"] = one_by_one(hang_up, refuse("ConcurrentTransactions"), accept)

    following = KafkaBroker(broker.config()).commit_transaction(PRODUCER)

    sent = broker.requests_of("EndTxn")
    assert following.producer_epoch == 4
    assert {(request.producer_epoch, request.committed) for request in sent} == {(3, True)}
    assert len(sent) == 3


def test_an_unanswered_commit_is_an_unknown_outcome_and_never_aborted(broker: FakeBroker) -> None:
    broker.handlers["EndTxn"] = silent

    with pytest.raises(BrokerUnavailableError, match="unknown"):
        KafkaBroker(broker.config(delivery_timeout_ms="900")).commit_transaction(PRODUCER)

    assert all(request.committed for request in broker.requests_of("EndTxn"))


@pytest.mark.parametrize("name", ["ProducerFenced", "InvalidProducerEpoch", "InvalidTxnState"])
def test_a_commit_that_is_too_late_says_that_the_epoch_is_lost(
    broker: FakeBroker, name: str
) -> None:
    broker.handlers["EndTxn"] = refuse(name)

    with pytest.raises(EpochAbortedError, match=name):
        KafkaBroker(broker.config()).commit_transaction(PRODUCER)


def test_aborting_what_is_not_open_is_fine(broker: FakeBroker) -> None:
    broker.handlers["EndTxn"] = refuse("InvalidTxnState")

    KafkaBroker(broker.config()).abort_transaction(PRODUCER)

    assert [request.committed for request in broker.requests_of("EndTxn")] == [False]


def describe(state: str, epoch: int) -> Callable[[Any], Any]:
    """What the coordinator keeps of our transactional id."""

    def handler(request: Any) -> Any:
        transaction_state = part(request, "TransactionState")(
            error_code=0,
            transactional_id=request.transactional_ids[0],
            transaction_state=state,
            transaction_timeout_ms=60_000,
            transaction_start_time_ms=-1,
            producer_id=7,
            producer_epoch=epoch,
            topics=[],
        )
        return answer(request, transaction_states=[transaction_state])

    return handler


def test_a_successors_open_transaction_is_left_alone(broker: FakeBroker) -> None:
    """Kafka would abort it before it notices that the asker is not its owner."""
    broker.handlers["DescribeTransactions"] = describe("Ongoing", 5)

    with pytest.raises(FencedError, match="another run has taken over and is writing"):
        KafkaBroker(broker.config()).fence("tallystick-test", PRODUCER)

    assert not broker.requests_of("InitProducerId")


def test_after_kafkas_own_abort_the_epoch_that_it_left_is_ours(broker: FakeBroker) -> None:
    broker.handlers["DescribeTransactions"] = describe("CompleteAbort", 4)
    broker.handlers["InitProducerId"] = accept

    KafkaBroker(broker.config()).fence("tallystick-test", PRODUCER)

    (request,) = broker.requests_of("InitProducerId")
    assert (request.producer_id, request.producer_epoch) == (7, 4)


def test_an_abort_that_our_own_fencing_caused_is_not_a_take_over(broker: FakeBroker) -> None:
    broker.handlers["DescribeTransactions"] = one_by_one(
        describe("Ongoing", 3), describe("PrepareAbort", 4)
    )
    broker.handlers["InitProducerId"] = one_by_one(refuse("ProducerFenced"), accept)

    KafkaBroker(broker.config()).fence("tallystick-test", PRODUCER)

    epochs = [request.producer_epoch for request in broker.requests_of("InitProducerId")]
    assert epochs == [3, 4]


def test_fencing_as_the_current_owner_after_a_take_over_stops(broker: FakeBroker) -> None:
    broker.handlers["DescribeTransactions"] = describe("Empty", 5)
    broker.handlers["InitProducerId"] = refuse("ProducerFenced")

    with pytest.raises(FencedError, match="taken over"):
        KafkaBroker(broker.config()).fence("tallystick-test", PRODUCER)

    (request,) = broker.requests_of("InitProducerId")
    assert (request.producer_id, request.producer_epoch) == (7, 3)


def test_the_first_fence_takes_over_whoever_is_there(broker: FakeBroker) -> None:
    broker.handlers["InitProducerId"] = accept

    assert KafkaBroker(broker.config()).fence("tallystick-test", None).producer_epoch == 4

    (request,) = broker.requests_of("InitProducerId")
    assert (request.producer_id, request.producer_epoch) == (-1, -1)
    assert request.version <= 5


def test_a_missing_right_names_what_is_missing(broker: FakeBroker) -> None:
    broker.handlers["InitProducerId"] = refuse("TransactionalIdAuthorizationFailed")

    with pytest.raises(AuthorizationError, match="WRITE on the transactional id") as failed:
        KafkaBroker(broker.config()).fence("tallystick-test", None)

    assert "tallystick-test" in str(failed.value)


def test_what_nobody_expects_is_raised_under_kafkas_name(broker: FakeBroker) -> None:
    broker.handlers["EndTxn"] = refuse("InvalidRequest")

    with pytest.raises(TallystickError, match=r"EndTxn for transactional id .*: InvalidRequest"):
        KafkaBroker(broker.config()).commit_transaction(PRODUCER)


def test_an_answer_that_cannot_be_read_costs_the_connection_only(broker: FakeBroker) -> None:
    """Bytes of somebody else must not take the process down."""

    def serve() -> None:
        for _ in range(3):
            connection, _ = server.accept()
            connection.recv(1024)
            connection.sendall(b"\x00\x00\x00\x08\x00\x00\x00\x01\xff\xff\xff\xff")
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        config = KafkaConfig(address, request_timeout_ms=100, delivery_timeout_ms=400)

        with pytest.raises(BrokerUnavailableError):
            Client(config).metadata()
