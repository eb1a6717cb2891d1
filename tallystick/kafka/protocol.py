"""Kafka's messages as bytes: the only module that imports kafka-python.

kafka-python generates its message classes from Kafka's own JSON schemas, but does not call them
public API: the version is pinned, and a move to another library, or to the schemas, is a change to
this module only. Taken from it are message classes, error codes and SASL mechanisms. Its network
layer is not used: its deadlines, back-off and buffering are not ours to command. Nor is its
framing, which copies a fetched megabyte three times.

Invariant: nothing of kafka-python's exceptions or log lines leaves this module. Its loggers are
silenced because they print requests, and so credentials and records.
"""

import base64
import contextlib
import io
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol
from uuid import UUID

import kafka.errors
from kafka.net.sasl import get_sasl_mechanism
from kafka.net.sasl.oauth import AbstractTokenProvider
from kafka.protocol.admin import (
    CreateTopicsRequest,
    DeleteRecordsRequest,
    DeleteTopicsRequest,
    DescribeConfigsRequest,
    DescribeGroupsRequest,
    DescribeProducersRequest,
    DescribeQuorumRequest,
    DescribeTransactionsRequest,
    ListGroupsRequest,
    ListTransactionsRequest,
)
from kafka.protocol.consumer import (
    FetchRequest,
    ListOffsetsRequest,
    OffsetCommitRequest,
    OffsetFetchRequest,
)
from kafka.protocol.metadata import ApiVersionsRequest, FindCoordinatorRequest, MetadataRequest
from kafka.protocol.producer import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    ProduceRequest,
    TxnOffsetCommitRequest,
)
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

from tallystick.errors import TallystickError
from tallystick.kafka.producers_answer import decode_producers
from tallystick.values import TopicPartition

__all__ = [
    "NO_ID",
    "SOFTWARE_NAME",
    "SOFTWARE_VERSION",
    "AddOffsetsToTxnRequest",
    "AddPartitionsToTxnRequest",
    "ApiVersionsRequest",
    "CreateTopicsRequest",
    "DeleteRecordsRequest",
    "DeleteTopicsRequest",
    "DescribeConfigsRequest",
    "DescribeGroupsRequest",
    "DescribeProducersRequest",
    "DescribeQuorumRequest",
    "DescribeTransactionsRequest",
    "EndTxnRequest",
    "FetchRequest",
    "FindCoordinatorRequest",
    "InitProducerIdRequest",
    "ListGroupsRequest",
    "ListOffsetsRequest",
    "ListTransactionsRequest",
    "MetadataRequest",
    "OffsetCommitRequest",
    "OffsetFetchRequest",
    "ProduceRequest",
    "SaslAuthenticateRequest",
    "SaslHandshakeRequest",
    "SaslMechanism",
    "SentRequest",
    "TxnOffsetCommitRequest",
    "VersionRange",
    "api_name",
    "by_topic",
    "decode_response",
    "encode_request",
    "error_name",
    "partitions_of",
    "refuse_few_iterations",
    "sasl_mechanism",
    "set_version",
    "shortened",
    "topic_id_from",
    "topic_id_text",
]

logging.getLogger("kafka").setLevel(logging.CRITICAL + 1)

SOFTWARE_NAME = "tallystick"
SOFTWARE_VERSION = "0.1.0"
"""Our name in the metrics of brokers (KIP-511)."""
VersionRange = tuple[int, int]
"""The lowest and the highest version of one API."""
RESPONSE_HEADER_MAX = 1 << 16
"""More than any response header: four bytes, and tagged fields of which Kafka defines none."""
SCRAM_ITERATIONS_MIN = 4096
_ITERATIONS = re.compile(rb"(?:^|,)i=(\d{1,9})(?:,|$)")
NO_ID = UUID(int=0)
"""The answers of a broker that knows no topic ids (KIP-516)."""


def error_name(code: int) -> str | None:
    """Return Kafka's name of an error code, such as `NotCoordinator`; None for 0, no error."""
    if code == 0:
        return None
    error = kafka.errors.for_code(code)
    if error.__name__ == "UnrecognizedBrokerError":
        return f"Error{code}"
    return str(error.__name__.removesuffix("Error"))


def api_name(request: Any) -> str:
    """Return the name of a request's API: `Produce`, `EndTxn`, ..."""
    return type(request).__name__.removesuffix("Request")


def set_version(request: Any, broker_versions: Mapping[int, VersionRange], broker: str) -> None:
    """Set the highest version that the request, this client and the broker all speak.

    Raises:
        TallystickError: there is no such version; Kafka would just close the connection.
    """
    low, high = request._min_version or 0, request._max_version
    if request.API_VERSION is not None:
        low = high = request.API_VERSION
    high = request.max_version if high is None else min(high, request.max_version)
    theirs = broker_versions.get(request.API_KEY)
    if theirs is None or theirs[0] > high or theirs[1] < low:
        offered = "does not offer it" if theirs is None else f"offers {theirs[0]} to {theirs[1]}"
        raise TallystickError(
            f"{api_name(request)}: this client needs version {low} to {high}, the broker at "
            f"{broker} {offered}. Use a broker of Kafka 3.6 or newer."
        )
    request.API_VERSION = min(high, theirs[1])


def by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    """Return partition numbers by topic, as Kafka's requests want them."""
    found: dict[str, list[int]] = {}
    for partition in partitions:
        found.setdefault(partition.topic, []).append(partition.partition)
    return found


def partitions_of(response: Any) -> Iterator[tuple[TopicPartition, Any]]:
    """Return the parts of a response that has them by topic name, as most of Kafka's do."""
    for topic in response.topics:
        for part in topic.partitions:
            yield TopicPartition(topic.name, part.partition_index), part


def shortened(partitions: Iterable[TopicPartition], count_max: int = 5) -> str:
    """Return partitions in words, only the first ones of many."""
    names = [str(partition) for partition in sorted(partitions)]
    more = f" and {len(names) - count_max} more" if len(names) > count_max else ""
    return ", ".join(names[:count_max]) + more


def topic_id_text(topic_id: UUID | None) -> str:
    """Return 22 characters of base64url, as Kafka's own tools print it; "" for no id."""
    if topic_id is None or topic_id == NO_ID:
        return ""
    return base64.urlsafe_b64encode(topic_id.bytes).decode().rstrip("=")


def topic_id_from(text: str) -> UUID:
    """Read back what `topic_id_text` made."""
    if not text:
        return NO_ID
    return UUID(bytes=base64.urlsafe_b64decode(text + "=="))


@dataclass(frozen=True, slots=True)
class SentRequest:
    """The parts of a request that are needed to read its answer."""

    correlation_id: int
    header: Any = field(repr=False)


def encode_request(request: Any, correlation_id: int, client_id: str) -> tuple[SentRequest, bytes]:
    """Return the frame to send for a request that has its version, and what to remember of it."""
    request.with_header(correlation_id=correlation_id, client_id=client_id)
    frame = request.encode(framed=True, header=True)
    return SentRequest(correlation_id, request.header), frame


def decode_response(sent: SentRequest, payload: memoryview) -> Any:
    """Return the answer to a request; `payload` is a whole frame without its length.

    Raises:
        ConnectionError: the bytes are no answer to this request: the connection is of no more use.
    """
    response_class = sent.header.get_response_class()
    try:
        head = io.BytesIO(payload[:RESPONSE_HEADER_MAX])
        correlation_id = response_class.parse_header(head).correlation_id
        if correlation_id != sent.correlation_id:
            raise ConnectionError(
                f"answer {correlation_id} came where {sent.correlation_id} was due"
            )
        if response_class.API_KEY == DescribeProducersRequest.API_KEY:
            with contextlib.suppress(ValueError):  # what it does not know, the generated one may
                return decode_producers(payload[head.tell() :])
        response = response_class.decode(payload[head.tell() :])
        _refuse_nulls(response, response.version)
        return response
    except ConnectionError:
        raise
    except Exception as error:  # any error of a generated decoder on bytes that are not its own
        raise ConnectionError(f"answer cannot be read ({type(error).__name__})") from None


def _refuse_nulls(message: Any, version: int) -> None:
    """Raise ValueError where something is null that Kafka's schema says is there."""
    for name, is_nullable, is_list, is_nested in _objects_in(message.__class__, version):
        value = getattr(message, name)
        if value is None and not is_nullable:
            raise ValueError(f"{name} is null")
        if value is not None and is_nested:
            for each in value if is_list else (value,):
                _refuse_nulls(each, version)


@cache
def _objects_in(kind: Any, version: int) -> tuple[tuple[str, bool, bool, bool], ...]:
    """Return what of a message is no number: name, may be null, is a list, has fields itself."""
    found = []
    for each in kind._struct.fields.values():
        is_nested = each.is_struct() or each.is_struct_array()
        is_object = is_nested or each.is_array() or each.type_str in ("string", "bytes", "records")
        is_nullable = each.nullable_for_version_q(version)
        is_there = each.for_version_q(version) and not each.tagged_field_q(version)
        if is_there and is_object and (is_nested or not is_nullable):
            found.append((each.name, is_nullable, each.is_array(), is_nested))
    return tuple(found)


class SaslMechanism(Protocol):
    """The client's half of one SASL conversation."""

    def auth_bytes(self) -> bytes:
        """Return what to send next."""
        ...

    def receive(self, auth_bytes: bytes) -> object:
        """Take the server's answer; raises on a bad one."""
        ...

    def is_done(self) -> bool:
        """True if nothing is left to send."""
        ...


def refuse_few_iterations(auth_bytes: bytes) -> None:
    """Raise ValueError where a SCRAM server asks for a proof from which passwords can be guessed.

    Source: RFC 7677, and Java's `ScramMechanism.minIterations`.
    """
    found = _ITERATIONS.search(auth_bytes)
    if found and int(found[1]) < SCRAM_ITERATIONS_MIN:
        raise ValueError(f"{int(found[1])} iterations, expected {SCRAM_ITERATIONS_MIN} or more")


class _Token(AbstractTokenProvider):  # type: ignore[misc]  # kafka-python insists on its class
    def __init__(self, text: str, extensions: Iterable[tuple[str, str]]) -> None:
        self._text, self._extensions = text, dict(extensions)

    def token(self) -> str:
        return self._text

    def extensions(self) -> dict[str, str]:
        return self._extensions


def sasl_mechanism(
    name: str,
    *,
    host: str,
    username: str,
    password: str,
    kerberos_service_name: str,
    token: str = "",
    extensions: Iterable[tuple[str, str]] = (),
) -> SaslMechanism:
    """Start a SASL conversation with the broker at `host`."""
    if name.startswith("SCRAM"):
        username = username.replace("=", "=3D").replace(",", "=2C")  # RFC 5802, left out below
    mechanism: SaslMechanism = get_sasl_mechanism(name)(
        host=host,
        sasl_mechanism=name,
        sasl_plain_username=username,
        sasl_plain_password=password,
        sasl_kerberos_service_name=kerberos_service_name,
        sasl_oauth_token_provider=_Token(token, extensions),
    )
    return mechanism
