"""What the pre-flight check needs to know of a cluster, as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """What a cluster told about itself; None where it did not tell.

    Args:
        transaction_version: the finalized feature `transaction.version` (KIP-890); 0 where the
            cluster has features but not this one.
        api_versions: the highest version that brokers speak, for each API that exactly-once needs;
            APIs that are not spoken at all are absent.
        transaction_timeout_max_ms: `transaction.max.timeout.ms`.
        partition_verification: `transaction.partition.verification.enable`; False for brokers that
            are too old to have it (before 3.6).
        offsets_retention_minutes: `offsets.retention.minutes`.
        message_bytes_max: `message.max.bytes`.
        session_timeout_ms: `broker.session.timeout.ms`: after how long a broker counts as dead.
    """

    transaction_version: int | None
    api_versions: Mapping[str, int]
    transaction_timeout_max_ms: int | None
    partition_verification: bool | None
    offsets_retention_minutes: int | None
    message_bytes_max: int | None
    session_timeout_ms: int | None
