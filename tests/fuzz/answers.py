"""What brokers answer, through the client that asks: one frame of a conversation is damaged."""

import io
import json
import secrets
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar
from unittest.mock import patch

from tallystick.errors import UNREADABLE, OptionError
from tallystick.kafka import cluster, protocol, sasl
from tallystick.kafka import registry as registry_module
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.connection import Network, PendingRequest
from tallystick.kafka.fetcher import fetch
from tallystick.kafka.registry import SchemaRegistry
from tallystick.source.subscription import EARLIEST
from tallystick.values import Producer, SplitRange, TopicPartition
from tests.fuzz.decoder import Decoder
from tests.fuzz.mutations import mutated_text
from tests.kafka.fake_broker import REQUESTS, FakeBroker, answer, part, payload_of, read_request
from tests.kafka.test_fetcher import Log

PARTITION = TopicPartition("orders", 0)
PRODUCER = Producer("t", 7, 3)
CONFIG = KafkaConfig("127.0.0.1:9", request_timeout_ms=60, delivery_timeout_ms=150)
Answers = dict[str, bytes]


class Wire(Network):
    """A network without sockets, to a broker in this process.

    Args:
        broker: says what is true.
        damaged: by API, what the first answer to it is replaced by, after its correlation id.
    """

    def __init__(self, broker: FakeBroker, damaged: Answers) -> None:
        super().__init__(CONFIG)
        self.damaged, self.broker = dict(damaged), broker
        self.sent: Answers = {}
        self._waiting: dict[int, tuple[protocol.SentRequest, bytes]] = {}
        self._versions = {api: (0, request.versions[1]) for api, request in REQUESTS.items()}

    def post(self, node: int, request: Any, deadline: float) -> PendingRequest:
        self._keep_pause(node, deadline)
        protocol.set_version(request, self._versions, "fake")
        correlation_id = len(self._waiting) + 1
        sent, frame = protocol.encode_request(request, correlation_id, "client")
        received, _ = read_request(frame[4:])
        name = protocol.api_name(received)
        response = self.broker.handlers[name](received)
        payload = payload_of(received, response, correlation_id)
        self.sent.setdefault(name, payload[4:])
        body = self.damaged.pop(name, payload[4:])
        self._waiting[correlation_id] = (sent, payload[:4] + body)
        return PendingRequest(node, self, correlation_id)  # type: ignore[arg-type]

    def wait(self, posted: PendingRequest, deadline: float) -> Any:
        sent, payload = self._waiting[posted.correlation_id]
        return protocol.decode_response(sent, memoryview(payload))

    def answered(self, posted: Sequence[PendingRequest], deadline: float) -> list[PendingRequest]:
        return list(posted)

    def discard(self, posted: PendingRequest) -> None:
        pass


class Cluster(FakeBroker):
    """A broker that knows a topic, a group and a transaction."""

    def __init__(self) -> None:
        super().__init__()
        self._server.close()
        log = Log(5)
        self.handlers |= {
            "Fetch": log.fetch,
            "ListOffsets": log.list_offsets,
            "InitProducerId": self.init_producer,
            "EndTxn": lambda r: answer(r, error_code=0, producer_id=7, producer_epoch=4),
            "OffsetFetch": self.fetch_offsets,
            "TxnOffsetCommit": self.commit_offsets,
            "OffsetCommit": self.commit_offsets,
            "AddOffsetsToTxn": lambda r: answer(r, error_code=0),
            "DescribeTransactions": self.describe_transactions,
            "ListTransactions": self.list_transactions,
            "DescribeProducers": self.describe_producers,
        }

    def init_producer(self, request: Any) -> Any:
        return answer(request, error_code=0, producer_id=7, producer_epoch=3)

    def fetch_offsets(self, request: Any) -> Any:
        group = part(request, "OffsetFetchResponseGroup")
        topic = group.OffsetFetchResponseTopics
        offsets = topic.OffsetFetchResponsePartitions(
            partition_index=0, committed_offset=5, committed_leader_epoch=-1, metadata="x"
        )
        topics = [topic(name="orders", partitions=[offsets])]
        return answer(request, groups=[group(group_id="g", topics=topics, error_code=0)])

    def commit_offsets(self, request: Any) -> Any:
        name = type(request).__name__.replace("Request", "Response")
        topic = part(request, f"{name}Topic")
        entry = getattr(topic, f"{name}Partition")(partition_index=0, error_code=0)
        return answer(request, topics=[topic(name="orders", partitions=[entry])])

    def describe_transactions(self, request: Any) -> Any:
        state = part(request, "TransactionState")
        entry = state(
            error_code=0,
            transactional_id="t",
            transaction_state="Ongoing",
            transaction_timeout_ms=1000,
            transaction_start_time_ms=5,
            producer_id=7,
            producer_epoch=3,
            topics=[state.TopicData(topic="orders", partitions=[0])],
        )
        return answer(request, transaction_states=[entry])

    def list_transactions(self, request: Any) -> Any:
        state = part(request, "TransactionState")
        entry = state(transactional_id="t", producer_id=7, transaction_state="Ongoing")
        return answer(request, error_code=0, unknown_state_filters=[], transaction_states=[entry])

    def describe_producers(self, request: Any) -> Any:
        topic = part(request, "TopicResponse")
        partition = topic.PartitionResponse
        producer = partition.ProducerState(
            producer_id=7,
            producer_epoch=3,
            last_sequence=4,
            last_timestamp=5,
            coordinator_epoch=0,
            current_txn_start_offset=0,
        )
        offsets = partition(
            partition_index=0, error_code=0, error_message=None, active_producers=[producer]
        )
        return answer(request, topics=[topic(name="orders", partitions=[offsets])])


def _kafka(client: Client) -> KafkaBroker:
    broker = KafkaBroker(CONFIG)
    broker.client = client
    return broker


ACTIONS: dict[str, Callable[[Client], object]] = {
    "Metadata": lambda c: c.metadata(["orders"]),
    "FindCoordinator": lambda c: _kafka(c).group_offsets("g", PARTITION),
    "OffsetFetch": lambda c: _kafka(c).group_offsets("g", PARTITION),
    "ListOffsets": lambda c: cluster.list_offsets(c, [PARTITION], EARLIEST),
    "Fetch": lambda c: list(fetch(c, SplitRange("orders", 0, 0, 20), headers=True)),
    "InitProducerId": lambda c: _kafka(c).fence("t", None),
    "EndTxn": lambda c: _kafka(c).commit_transaction(PRODUCER),
    "TxnOffsetCommit": lambda c: _kafka(c).stage_offsets(PRODUCER, "g", {PARTITION: (5, "")}),
    "OffsetCommit": lambda c: _kafka(c).commit_offsets("g", {PARTITION: (5, "")}),
    "DescribeProducers": lambda c: _kafka(c).last_sequences(PRODUCER, [PARTITION]),
    "ApiVersions": lambda c: cluster.transaction_version(c),
}
"""By API, something that asks for it."""


def converse(action: str, damaged: bytes | None) -> Wire:
    """Run an action whose API is answered so, once; afterwards as it should be."""
    client = Client(CONFIG)
    answers = {} if damaged is None else {action: damaged}
    wire = Wire(Cluster(), answers)
    client.network = wire
    ACTIONS[action](client)
    return wire


def _decoder(action: str) -> Decoder:
    @cache
    def samples() -> list[bytes]:
        return [converse(action, None).sent[action]]

    def read(data: bytes, original: bytes) -> bool:
        assert not converse(action, data).damaged, "the damaged answer was not asked for"
        return True

    return Decoder(samples, read)


# ---- logins and schema registries ----


def read_scram(data: bytes, original: bytes) -> bool:
    """Take what a server says first, as a connection does."""
    with patch.object(secrets, "token_hex", return_value="n"):
        login = sasl.scram("sha256", "u", "p")
        next(login)
        try:
            login.send(data)
        except UNREADABLE:
            return False
    return True


class Response(io.BytesIO):
    """A stand-in for urllib3's."""

    def __init__(self, data: bytes, status: int) -> None:
        super().__init__(data)
        self.status = status


class Pool:
    """Answers each request of a registry with the same."""

    headers: ClassVar[dict[str, str]] = {}

    def __init__(self, data: bytes) -> None:
        self.data = data

    def request(self, method: str, url: str, **more: Any) -> Response:
        return Response(self.data, 200 if len(self.data) % 5 else 409)


def registry_answers() -> list[bytes]:
    """Return an answer about a schema that refers to another."""
    reference = {"name": "other", "subject": "other-value", "version": 1}
    whole = {"schema": '"string"', "schemaType": "AVRO", "references": [reference], "id": 3}
    return [json.dumps({**whole, "references": []}).encode() + b" ", json.dumps(whole).encode()]


def read_registry(data: bytes, original: bytes) -> bool:
    """Ask a registry for schemas, and for an id."""
    registry = SchemaRegistry("http://registry:8081")
    with patch.object(registry_module, "_connected", lambda _: Pool(data)):
        registry_module._known.close()
        registry_module._connections.close()
        if data == original == registry_answers()[1]:
            return True  # it refers to itself
        registry.register("a/b", '"string"')
        return registry.schema(3) is not None


def token_answers() -> list[bytes]:
    """Return a token with its lifetime, and one without, beside an error."""
    token = {"access_token": "eyJhbGciOiJub25lIn0.e30.", "token_type": "Bearer"}
    strange = {**token, "error": "invalid_client", "error_description": "no such client"}
    return [json.dumps(fields).encode() for fields in ({**token, "expires_in": 60}, strange)]


def read_token(data: bytes, original: bytes) -> bool:
    """Take what is one token and its lifetime, or a reason."""
    sasl._reason_in(data)
    try:
        text, lifetime_s = sasl.token_in(data, "https://provider/token")
    except OptionError:
        return False
    assert sasl.TOKEN.fullmatch(text)
    assert 0 <= lifetime_s < float("inf")
    return True


DECODERS = {f"answer to {action}": _decoder(action) for action in ACTIONS}
DECODERS |= {
    "login by SCRAM": Decoder(lambda: [b"r=nserver,s=c2FsdA==,i=4096"], read_scram),
    "answer of a token endpoint": Decoder(token_answers, read_token, mutated_text),
    "answer of a registry": Decoder(registry_answers, read_registry, mutated_text),
}
