"""Requests, answers, errors and versions of Kafka's protocol, for all modules of this folder.

Errors have the names of the classes in `org.apache.kafka.common.protocol.Errors`.

Invariant: bytes of a broker raise nothing but a `ConnectionError`: an answer that cannot be read
ends its connection.
"""

import base64
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from tallystick.errors import UNREADABLE, TallystickError
from tallystick.kafka import messages
from tallystick.kafka.messages import NO_ID
from tallystick.values import TopicPartition

SOFTWARE_NAME = "tallystick"
SOFTWARE_VERSION = "0.1.0"
"""Our name in the metrics of brokers (KIP-511)."""
VersionRange = tuple[int, int]
"""The lowest and the highest version of one API."""
CORRELATION_ID = struct.Struct(">i")
ERROR_CODE = struct.Struct(">h")
UNSUPPORTED_VERSION = 35

REQUESTS = messages.requests()
"""The class of each request, by its name."""
AddOffsetsToTxnRequest: Any = REQUESTS["AddOffsetsToTxnRequest"]
AddPartitionsToTxnRequest: Any = REQUESTS["AddPartitionsToTxnRequest"]
ApiVersionsRequest: Any = REQUESTS["ApiVersionsRequest"]
CreateTopicsRequest: Any = REQUESTS["CreateTopicsRequest"]
DeleteRecordsRequest: Any = REQUESTS["DeleteRecordsRequest"]
DeleteTopicsRequest: Any = REQUESTS["DeleteTopicsRequest"]
DescribeConfigsRequest: Any = REQUESTS["DescribeConfigsRequest"]
DescribeGroupsRequest: Any = REQUESTS["DescribeGroupsRequest"]
DescribeProducersRequest: Any = REQUESTS["DescribeProducersRequest"]
DescribeQuorumRequest: Any = REQUESTS["DescribeQuorumRequest"]
DescribeTransactionsRequest: Any = REQUESTS["DescribeTransactionsRequest"]
EndTxnRequest: Any = REQUESTS["EndTxnRequest"]
FetchRequest: Any = REQUESTS["FetchRequest"]
FindCoordinatorRequest: Any = REQUESTS["FindCoordinatorRequest"]
InitProducerIdRequest: Any = REQUESTS["InitProducerIdRequest"]
ListGroupsRequest: Any = REQUESTS["ListGroupsRequest"]
ListOffsetsRequest: Any = REQUESTS["ListOffsetsRequest"]
ListTransactionsRequest: Any = REQUESTS["ListTransactionsRequest"]
MetadataRequest: Any = REQUESTS["MetadataRequest"]
OffsetCommitRequest: Any = REQUESTS["OffsetCommitRequest"]
OffsetFetchRequest: Any = REQUESTS["OffsetFetchRequest"]
ProduceRequest: Any = REQUESTS["ProduceRequest"]
SaslAuthenticateRequest: Any = REQUESTS["SaslAuthenticateRequest"]
SaslHandshakeRequest: Any = REQUESTS["SaslHandshakeRequest"]
TxnOffsetCommitRequest: Any = REQUESTS["TxnOffsetCommitRequest"]


_IN_ORDER = """
Unknown None OffsetOutOfRange CorruptRecord UnknownTopicOrPartition InvalidFetchRequest
LeaderNotAvailable NotLeaderForPartition RequestTimedOut BrokerNotAvailable
ReplicaNotAvailable MessageSizeTooLarge StaleControllerEpoch OffsetMetadataTooLarge
NetworkException CoordinatorLoadInProgress CoordinatorNotAvailable NotCoordinator
InvalidTopic RecordListTooLarge NotEnoughReplicas NotEnoughReplicasAfterAppend
InvalidRequiredAcks IllegalGeneration InconsistentGroupProtocol InvalidGroupId
UnknownMemberId InvalidSessionTimeout RebalanceInProgress InvalidCommitOffsetSize
TopicAuthorizationFailed GroupAuthorizationFailed ClusterAuthorizationFailed
InvalidTimestamp UnsupportedSaslMechanism IllegalSaslState UnsupportedVersion
TopicAlreadyExists InvalidPartitions InvalidReplicationFactor
InvalidReplicationAssignment InvalidConfiguration NotController InvalidRequest
UnsupportedForMessageFormat PolicyViolation OutOfOrderSequenceNumber
DuplicateSequenceNumber InvalidProducerEpoch InvalidTxnState InvalidProducerIdMapping
InvalidTransactionTimeout ConcurrentTransactions TransactionCoordinatorFenced
TransactionalIdAuthorizationFailed SecurityDisabled OperationNotAttempted KafkaStorage
LogDirNotFound SaslAuthenticationFailed UnknownProducerId ReassignmentInProgress
DelegationTokenAuthDisabled DelegationTokenNotFound DelegationTokenOwnerMismatch
DelegationTokenRequestNotAllowed DelegationTokenAuthorizationFailed
DelegationTokenExpired InvalidPrincipalType NonEmptyGroup GroupIdNotFound
FetchSessionIdNotFound InvalidFetchSessionEpoch ListenerNotFound TopicDeletionDisabled
FencedLeaderEpoch UnknownLeaderEpoch UnsupportedCompressionType StaleBrokerEpoch
OffsetNotAvailable MemberIdRequired PreferredLeaderNotAvailable GroupMaxSizeReached
FencedInstanceId EligibleLeadersNotAvailable ElectionNotNeeded NoReassignmentInProgress
GroupSubscribedToTopic InvalidRecord UnstableOffsetCommit ThrottlingQuotaExceeded
ProducerFenced ResourceNotFound DuplicateResource UnacceptableCredential
InconsistentVoterSet InvalidUpdateVersion FeatureUpdateFailed
PrincipalDeserializationFailure SnapshotNotFound PositionOutOfRange UnknownTopicId
DuplicateBrokerRegistration BrokerIdNotRegistered InconsistentTopicId
InconsistentClusterId TransactionalIdNotFound FetchSessionTopicId IneligibleReplica
NewLeaderElected OffsetMovedToTieredStorage FencedMemberEpoch UnreleasedInstanceId
UnsupportedAssignor StaleMemberEpoch MismatchedEndpointType UnsupportedEndpointType
UnknownControllerId UnknownSubscriptionId TelemetryTooLarge InvalidRegistration
TransactionAbortable InvalidRecordState ShareSessionNotFound InvalidShareSessionEpoch
FencedStateEpoch InvalidVoterKey DuplicateVoter VoterNotFound InvalidRegularExpression
RebootstrapRequired StreamsInvalidTopology StreamsInvalidTopologyEpoch
StreamsTopologyFenced ShareSessionLimitReached
"""

NAMES = dict(enumerate(_IN_ORDER.split(), -1))
"""The name of each code, from -1 on; 0 is no error."""


def error_name(code: int) -> str | None:
    """Return Kafka's name of an error code, such as `NotCoordinator`; None for 0, no error."""
    return None if code == 0 else NAMES.get(code, f"Error{code}")


def api_name(request: Any) -> str:
    """Return the name of a request's API: `Produce`, `EndTxn`, ..."""
    return type(request).__name__.removesuffix("Request")


def set_version(request: Any, broker_versions: Mapping[int, VersionRange], broker: str) -> None:
    """Set the highest version that the request, this client and the broker all speak.

    Raises:
        TallystickError: there is no such version; Kafka would just close the connection.
    """
    low, high = request.speaks
    offered = broker_versions.get(request.API_KEY)
    if offered is None or offered[0] > high or offered[1] < low:
        offer = "does not offer it" if offered is None else f"offers {offered[0]} to {offered[1]}"
        raise TallystickError(
            f"{api_name(request)}: this client needs version {low} to {high}, the broker at "
            f"{broker} {offer}. Use a broker of Kafka 3.6 or newer."
        )
    request.version = min(high, offered[1])


def by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    """Return partition numbers by topic, as Kafka's requests want them."""
    numbers: dict[str, list[int]] = {}
    for partition in partitions:
        numbers.setdefault(partition.topic, []).append(partition.partition)
    return numbers


def partitions_of(response: Any) -> Iterator[tuple[TopicPartition, Any]]:
    """Return the parts of a response that has them by topic name, as most of Kafka's do."""
    for topic in response.topics:
        for part in topic.partitions:
            yield TopicPartition(topic.name, part.partition_index), part


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
    kind: type[messages.Request]
    version: int


def encode_request(request: Any, correlation_id: int, client_id: str) -> tuple[SentRequest, bytes]:
    """Return the frame of a request that has a version, after the parts for `decode_response`."""
    frame = messages.encode_request(request, correlation_id, client_id)
    return SentRequest(correlation_id, type(request), request.version), frame


def decode_response(sent: SentRequest, payload: memoryview) -> Any:
    """Return the answer to a request; `payload` is a whole frame without its length.

    Raises:
        ConnectionError: the bytes are no answer to this request: the connection is of no more use.
    """
    kind, version = sent.kind, sent.version
    try:
        (correlation_id,) = CORRELATION_ID.unpack_from(payload)
        if correlation_id != sent.correlation_id:
            raise ConnectionError(
                f"answer {correlation_id} came where {sent.correlation_id} was due"
            )
        body = payload[messages.response_header_size(kind, version, payload) :]
        if kind is ApiVersionsRequest and ERROR_CODE.unpack_from(body)[0] == UNSUPPORTED_VERSION:
            version = 0  # of a broker that does not know the version asked in (KIP-511)
        return messages.decode(kind.response, version, kind.flexible_since, body)
    except (*UNREADABLE, struct.error) as error:
        raise ConnectionError(f"answer cannot be read ({type(error).__name__})") from None
