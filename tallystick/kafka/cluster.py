"""What a cluster tells about itself: topics, offsets, versions, settings."""

import time
from collections.abc import Iterable, Mapping
from typing import Any

from tallystick.errors import OptionError
from tallystick.kafka import admin, protocol
from tallystick.kafka.attempts import Attempts
from tallystick.kafka.client import AnyBroker, Client
from tallystick.kafka.reactions import STALE
from tallystick.sink.cluster_facts import ClusterFacts

METADATA_LAG_MAX_S = 2.0
"""How long a topic that was just created may be unknown to some broker."""
FACT_APIS = (
    protocol.ProduceRequest,
    protocol.InitProducerIdRequest,
    protocol.EndTxnRequest,
    protocol.TxnOffsetCommitRequest,
    protocol.OffsetFetchRequest,
    protocol.DescribeProducersRequest,
    protocol.AddPartitionsToTxnRequest,
)
FACT_CONFIGS = (
    "transaction.max.timeout.ms",
    "transaction.partition.verification.enable",
    "offsets.retention.minutes",
    "message.max.bytes",
)


def cluster_id(client: Client) -> str:
    """The cluster's own name for itself."""
    client.metadata()
    return client.cluster_id


def topics(client: Client) -> list[str]:
    """All topics that may be described, without Kafka's internal ones, sorted."""
    response = client.metadata(None)
    return sorted(topic.name for topic in response.topics if not topic.is_internal)


def partition_counts(client: Client, topics: Iterable[str]) -> dict[str, int]:
    """How many partitions each topic has.

    Raises:
        OptionError: a topic does not exist.
        AuthorizationError: a topic may not be described.
        BrokerUnavailableError: the deadline passed.
    """
    wanted = sorted(set(topics))
    attempts = Attempts(client.deadline(), "Metadata", f"topics {', '.join(wanted)}")
    lag_until = time.monotonic() + METADATA_LAG_MAX_S
    while True:
        found = client.metadata(wanted).topics if wanted else []
        obstacles = {
            topic.name: name for topic in found if (name := protocol.error_name(topic.error_code))
        }
        if not obstacles:
            return {topic.name: len(topic.partitions) for topic in found}
        for topic, name in obstacles.items():
            absent = name == "UnknownTopicOrPartition" and time.monotonic() > lag_until
            if absent or name not in STALE:
                raise OptionError(
                    f"topic {topic!r} is not to be had at {client.config.bootstrap_servers} "
                    f"({name}): create it, or correct the name. Tallystick never creates topics "
                    f"by itself."
                )
        attempts.pause(", ".join(sorted(set(obstacles.values()))))


def cluster_facts(client: Client) -> ClusterFacts:
    """What the pre-flight check wants to know.

    Raises:
        BrokerUnavailableError: the deadline passed.
    """
    versions = _api_versions(client)
    highest = {api.api_key: int(api.max_version) for api in versions.api_keys}
    client.metadata()
    node = client.network.candidates()[0]
    configs = admin.describe_configs(client, admin.BROKER, str(node), FACT_CONFIGS)
    told: Mapping[str, str] = configs or {}
    verification = told.get("transaction.partition.verification.enable", "false")
    return ClusterFacts(
        transaction_version=_finalized_version(versions),
        api_versions={
            api.__name__.removesuffix("Request"): highest[api.API_KEY]
            for api in FACT_APIS
            if api.API_KEY in highest
        },
        transaction_timeout_max_ms=_number(told.get("transaction.max.timeout.ms")),
        partition_verification=None if configs is None else verification == "true",
        offsets_retention_minutes=_number(told.get("offsets.retention.minutes")),
        message_bytes_max=_number(told.get("message.max.bytes")),
    )


def transaction_version(client: Client) -> int | None:
    """The finalized feature transaction.version (KIP-890), 0 without it; None when not told."""
    return _finalized_version(_api_versions(client))


def _api_versions(client: Client) -> Any:
    return client.call(
        lambda: protocol.ApiVersionsRequest(
            client_software_name=protocol.SOFTWARE_NAME,
            client_software_version=protocol.SOFTWARE_VERSION,
        ),
        AnyBroker(),
        lambda response: [(response.error_code, "the cluster")],
    )


def _finalized_version(versions: Any) -> int | None:
    if versions.version < 3:
        return None
    for feature in versions.finalized_features or []:
        if feature.name == "transaction.version":
            return int(feature.max_version_level)
    return 0


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)
