"""The meaning of Kafka's error codes: what to do next, which of our errors to raise, when to retry.

Every code belongs to one set. Kafka's own retriable errors do not serve: they do not distinguish
"same place again" from "look for the leader first".
"""

import random
import time
from typing import Any

from tallystick.errors import (
    AuthorizationError,
    BrokerUnavailableError,
    EpochAbortedError,
    RecordError,
    TallystickError,
)

RETRY = frozenset(
    {
        "ConcurrentTransactions",
        "CoordinatorLoadInProgress",
        "NotEnoughReplicas",
        "NotEnoughReplicasAfterAppend",
        "RequestTimedOut",
        "UnstableOffsetCommit",
        "NetworkException",
        "ThrottlingQuotaExceeded",
        "OffsetNotAvailable",
        "BrokerNotAvailable",
        "PreferredLeaderNotAvailable",
    }
)
"""The same request to the same place, a little later."""
STALE = frozenset(
    {
        "NotLeaderForPartition",
        "LeaderNotAvailable",
        "UnknownTopicOrPartition",
        "ReplicaNotAvailable",
        "KafkaStorage",
        "FencedLeaderEpoch",
        "UnknownLeaderEpoch",
        "UnknownTopicId",
        "InconsistentTopicId",
        "NotCoordinator",
        "CoordinatorNotAvailable",
        "NotController",
        "ListenerNotFound",
    }
)
"""Another broker is in charge: look up the leader or coordinator, then again."""
ABSENT = frozenset({"UnknownTopicOrPartition", "UnknownTopicId", "InconsistentTopicId"})
"""Answers about a topic that does not exist, or that the broker has not heard of yet; it may have
an older one of the name."""
ONLY_ASKS = ("Metadata", "FindCoordinator", "OffsetFetch", "Describe", "List", "ApiVersions")
"""APIs, by the beginning of their names, that change nothing in Kafka."""
FENCED = frozenset(
    {
        "ProducerFenced",
        "InvalidProducerEpoch",
        "InvalidProducerIdMapping",
        "TransactionCoordinatorFenced",
    }
)
"""The transactional id has a newer producer epoch: a newer run, or Kafka after a time-out."""
ABORT = frozenset(
    {
        "TransactionAbortable",
        "InvalidTxnState",
        "OutOfOrderSequenceNumber",
        "UnknownProducerId",
    }
)
"""The open transaction can no longer be committed."""
UNAUTHORIZED = frozenset(
    {
        "TopicAuthorizationFailed",
        "GroupAuthorizationFailed",
        "ClusterAuthorizationFailed",
        "TransactionalIdAuthorizationFailed",
        "DelegationTokenAuthorizationFailed",
        "SaslAuthenticationFailed",
    }
)
"""An ACL is missing: no retry will help before it is granted."""
OUT_OF_RANGE = frozenset({"OffsetOutOfRange"})
TOO_LARGE = frozenset({"MessageSizeTooLarge", "RecordListTooLarge"})
"""A record batch is larger than the topic's max.message.bytes, or than a segment of its log."""
UNEXPLAINED = "Unknown"
"""Error -1: the server has met what it has no error for."""
AGAIN = RETRY | STALE

ACL = {
    ("TopicAuthorizationFailed", "Produce"): "WRITE on the topic",
    ("TopicAuthorizationFailed", "AddPartitionsToTxn"): "WRITE on the topic",
    ("TopicAuthorizationFailed", "Metadata"): "DESCRIBE (or READ, or WRITE) on the topic",
    ("TopicAuthorizationFailed", "ListOffsets"): "DESCRIBE (or READ) on the topic",
    ("TopicAuthorizationFailed", "CreateTopics"): "CREATE on the topic or the cluster",
    ("ClusterAuthorizationFailed", "CreateTopics"): "CREATE on the topic or the cluster",
    ("ClusterAuthorizationFailed", "DescribeConfigs"): "DESCRIBE_CONFIGS on the cluster",
    ("ClusterAuthorizationFailed", "InitProducerId"): "WRITE on a topic",
    ("TransactionalIdAuthorizationFailed", "DescribeTransactions"): "DESCRIBE (or WRITE) on the "
    "transactional id",
}
"""The missing ACL, by error and request, where it is not the usual one of the resource."""
ACL_USUAL = {
    "TopicAuthorizationFailed": "READ on the topic",
    "GroupAuthorizationFailed": "READ on the consumer group",
    "ClusterAuthorizationFailed": "DESCRIBE on the cluster",
    "TransactionalIdAuthorizationFailed": "WRITE on the transactional id",
}
BACKOFF_MIN_S = 0.02
BACKOFF_MAX_S = 1.0
TRY_MIN_S = 0.1
"""A try with less time than this left is not worth it."""


def refusal(
    error_name: str,
    doing: str,
    subject: str,
    *,
    fenced: type[TallystickError] = EpochAbortedError,
) -> TallystickError:
    """Return our error for an error code of Kafka's; not for the codes in `AGAIN`.

    Args:
        error_name: Kafka's name of the code.
        doing: the API that was asked, such as `Produce`.
        subject: what it was asked about, and what Kafka said to it.
        fenced: what to make of a newer producer epoch. A task cannot distinguish its own time-out
            from a take-over, so for it the epoch is lost; the driver learns the truth when it
            fences.
    """
    assert error_name not in AGAIN, error_name
    what = f"{doing} for {subject}: {error_name}"
    if error_name in UNAUTHORIZED:
        acl = ACL.get((error_name, doing)) or ACL_USUAL.get(error_name, "the right")
        return AuthorizationError(f"{what}. The user of this connection needs {acl}.")
    if error_name in FENCED:
        if issubclass(fenced, EpochAbortedError):
            meaning = "the transaction timed out, or another run has taken over"
        else:
            meaning = "another run has taken over the transactional id"
        return fenced(f"{what}: {meaning}.")
    if error_name in ABORT:
        return EpochAbortedError(f"{what}: the open transaction can only be aborted.")
    if error_name == "InvalidTimestamp":
        return RecordError(
            f"{what}: a record's timestamp lies too far ahead (message.timestamp.after.max.ms, one "
            f"hour by default) or behind. Correct the column 'timestamp', or raise the limit."
        )
    return TallystickError(f"{what}.")


def too_large(subject: object, words: str, size: int, limit: int | None) -> TallystickError:
    """Return the error for a single record that a broker has refused as too large.

    Args:
        subject: the partition that it was for.
        words: the name of Kafka's error, and what it says.
        size: of the record batch that the record makes.
        limit: the topic's max.message.bytes now; None: not known.
    """
    what = f"Produce for {subject}: {words}: a single record takes {size} bytes as a record batch"
    if limit is not None and limit < size:
        return EpochAbortedError(
            f"{what}, and the topic takes {limit} (max.message.bytes), which was not so when the "
            f"epoch began. It runs again, and names the record, or leaves it to the dead letters."
        )
    known = "this user may not see the topic's limit (DESCRIBE_CONFIGS on it): grant that, and the "
    known += "input record is named, or left to the dead letters"
    if limit is not None:
        known = f"the topic takes {limit} (max.message.bytes), and its log segments segment.bytes; "
        known += "its own compression.type may make of a record more than was sent"
    return RecordError(
        f"{what}, and {known}. Raise the topic's max.message.bytes, or make the record smaller in "
        f"a map_batches."
    )


def unavailable(doing: str, subject: str, reason: str, seconds: float) -> BrokerUnavailableError:
    """Return the error for a deadline that passed while only passing obstacles were met."""
    doubt = "" if doing.startswith(ONLY_ASKS) else " Whether Kafka acted on it is unknown."
    return BrokerUnavailableError(
        f"{doing} for {subject}: no usable answer within {seconds:.1f} s; the last obstacle was "
        f"{reason}.{doubt}"
    )


class Attempts:
    """The limits of a retry loop: the pauses, and the deadline.

    Args:
        deadline: `time.monotonic` when to give up.
        doing: the API that is asked, for the error.
        subject: what it is asked about, for the error.
        first_s: the longest that the first pause may be; each further one may be twice as long.
    """

    def __init__(
        self, deadline: float, doing: str, subject: str, first_s: float = BACKOFF_MIN_S
    ) -> None:
        self.deadline = deadline
        self._longest_s = first_s
        self._doing = doing
        self._subject = subject
        self._started = time.monotonic()
        self._reason = ""

    def pause(self, reason: str) -> None:
        """Wait before the next try; raises as `delay`."""
        time.sleep(self.delay(reason))

    def delay(self, reason: str) -> float:
        """Return the number of seconds to wait before the next try.

        Raises:
            BrokerUnavailableError: the deadline has come.
        """
        longest_s, self._longest_s = self._longest_s, min(BACKOFF_MAX_S, 2 * self._longest_s)
        # The last try is given some time too: one that is cut short only hides what is in the way.
        remaining_s = self.deadline - time.monotonic() - TRY_MIN_S
        if remaining_s <= 0:
            if reason.startswith(TimeoutError.__name__):
                reason = self._reason or reason
            spent = time.monotonic() - self._started
            raise unavailable(self._doing, self._subject, reason, spent)
        self._reason = reason
        return min(remaining_s, longest_s * random.uniform(0.5, 1.0))


def describe(error: BaseException) -> str:
    """Return an obstacle in words: many socket errors have no text of their own."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def kafka_message(item: Any) -> str:
    """Return Kafka's own words to an error code, where the API has a field for them."""
    message = getattr(item, "error_message", None)
    return f" (Kafka says: {message})" if message else ""
