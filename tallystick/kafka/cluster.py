"""What a cluster tells about itself: topics, offsets, versions, settings."""

import time
from collections.abc import Iterable, Mapping
from typing import Any

from tallystick.errors import OptionError
from tallystick.kafka import admin, protocol, written
from tallystick.kafka.client import AnyBroker, Attempts, Client
from tallystick.kafka.reactions import STALE
from tallystick.sink.cluster_facts import ClusterFacts
from tallystick.topic_partition import TopicPartition

METADATA_LAG_MAX_S = 2.0
"""How long a topic that was just created may be unknown to some broker."""
EARLIEST = -2
LATEST = -1
READ_UNCOMMITTED = 0
READ_COMMITTED = 1
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


def list_offsets(
    client: Client,
    partitions: Iterable[TopicPartition],
    at: int,
    *,
    isolation: int = READ_COMMITTED,
) -> dict[TopicPartition, int]:
    """One offset of each partition.

    Args:
        client: of the cluster.
        partitions: which.
        at: EARLIEST; LATEST: the end, which for read_committed is the last stable offset; else a
            timestamp in ms: the first record at or after it, or the latest when there is none.
        isolation: READ_COMMITTED or READ_UNCOMMITTED.

    Raises:
        AuthorizationError: a topic may not be described.
        BrokerUnavailableError: the deadline passed; partitions that do not exist end so too.
    """
    topic_class = protocol.ListOffsetsRequest.ListOffsetsTopic
    part_class = topic_class.ListOffsetsPartition

    def make(asked: list[TopicPartition]) -> Any:
        return protocol.ListOffsetsRequest(
            replica_id=-1,
            isolation_level=isolation,
            topics=[
                topic_class(
                    name=topic,
                    partitions=[
                        part_class(partition_index=index, current_leader_epoch=-1, timestamp=at)
                        for index in indexes
                    ],
                )
                for topic, indexes in written.by_topic(asked).items()
            ],
            min_version=2,
            max_version=9,
        )

    answers = client.ask_leaders(partitions, make, written.partitions_of)
    found = {partition: int(answer.offset) for partition, answer in answers.items()}
    beyond = [partition for partition, offset in found.items() if offset < 0]
    if beyond:
        assert at >= 0, found
        found |= list_offsets(client, beyond, LATEST, isolation=isolation)
    return found


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
