"""A cluster's account of itself: topics, where their logs begin and end, versions, settings."""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tallystick.codec.records.compression import CODEC_IDS
from tallystick.errors import AuthorizationError, OptionError
from tallystick.kafka import protocol
from tallystick.kafka.client import NO_EPOCH, AnyBroker, Client, Node, Target
from tallystick.kafka.error_policy import (
    ABSENT,
    OUT_OF_RANGE,
    STALE,
    UNAUTHORIZED,
    Attempts,
    kafka_message,
)
from tallystick.kafka.preflight import STATE_TOPIC, ClusterFacts, Replication
from tallystick.kafka.protocol import topic_id_from, topic_id_text
from tallystick.source.subscription import EARLIEST, LATEST, FoundTopic
from tallystick.values import TopicLimit, TopicPartition

METADATA_LAG_MAX_S = 2.0
"""The time for which a topic that was just created may be unknown to some broker."""
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
    protocol.AddOffsetsToTxnRequest,
    protocol.DescribeTransactionsRequest,
)
FACT_SETTINGS = (
    "transaction.max.timeout.ms",
    "transaction.partition.verification.enable",
    "offsets.retention.minutes",
    "message.max.bytes",
    "broker.session.timeout.ms",
)
BATCH_LIMIT = "max.message.bytes"
COMPRESSION = "compression.type"
COMPRESSIONS = {"uncompressed": "none", **{name: name for name in CODEC_IDS if name != "none"}}
"""The names of `KafkaSink` for a topic's own compression; "producer" is none of its own."""
LIMITS_FOR_S = 60.0
"""The time for which the limit of a topic is not asked for again, unless an epoch fails."""
IN_SYNC_MIN = "min.insync.replicas"
TOPIC = 2
BROKER = 4
"""Resource types of DescribeConfigs."""
STATE = (TOPIC, STATE_TOPIC)
"""The coordinator's own topic, which is there once somebody has used a transactional id."""


def cluster_id(client: Client) -> str:
    """Return the cluster's own name for itself."""
    client.metadata()
    return client.cluster_id


def topics(client: Client) -> list[str]:
    """Return all topics that may be described, without Kafka's internal ones, sorted."""
    return sorted(describe_topics(client, None))


def describe_topics(client: Client, topics: Iterable[str] | None) -> dict[str, FoundTopic]:
    """Describe topics; a topic that does not exist is absent.

    A topic is described with all its partitions, whether or not they have a leader at the moment.

    Args:
        client: of the cluster.
        topics: which; None: all that may be described, without Kafka's internal ones.

    Raises:
        AuthorizationError: a named topic may not be described.
        BrokerUnavailableError: the deadline passed.
    """
    return _look_for(client, topics)[0]


def partition_counts(client: Client, topics: Iterable[str]) -> dict[str, int]:
    """Return the number of partitions of each topic.

    Raises:
        OptionError: a topic does not exist.
        AuthorizationError: a topic may not be described.
        BrokerUnavailableError: the deadline passed.
    """
    existing, absent = _look_for(client, topics)
    for topic, error_name in absent.items():
        raise OptionError(
            f"topic {topic!r} is not available at {client.config.bootstrap_servers} "
            f"({error_name}): create it, or correct the name. Tallystick never creates topics "
            f"by itself."
        )
    return {name: topic.partition_count for name, topic in existing.items()}


def _look_for(
    client: Client, topics: Iterable[str] | None
) -> tuple[dict[str, FoundTopic], dict[str, str]]:
    """Return the existing topics, and Kafka's error for each of the others.

    A broker that has not heard of a topic yet looks like one without it, so it is asked again for
    a while; one that reports a topic is believed at once.
    """
    waiting = None if topics is None else sorted(set(topics))
    existing: dict[str, FoundTopic] = {}
    absent: dict[str, str] = {}
    attempts: Attempts | None = None
    lag_until = time.monotonic() + METADATA_LAG_MAX_S
    while waiting is None or waiting:
        obstacles: dict[str, str] = {}
        lag_over = time.monotonic() > lag_until
        for topic in client.metadata(waiting).topics:
            error_name = protocol.error_name(topic.error_code)
            if waiting is None and topic.is_internal:
                continue
            if error_name is None:
                topic_id = topic_id_text(topic.topic_id)
                existing[topic.name] = FoundTopic(topic_id, len(topic.partitions))
            elif error_name in STALE and not (error_name in ABSENT and lag_over):
                obstacles[topic.name] = error_name
            else:
                absent[topic.name] = error_name
        waiting = sorted(obstacles)
        if waiting:
            subject = f"topics {', '.join(waiting)}"
            attempts = attempts or Attempts(client.deadline(), "Metadata", subject)
            attempts.pause(", ".join(sorted(set(obstacles.values()))))
    return existing, absent


def list_offsets(
    client: Client,
    partitions: Iterable[TopicPartition],
    at: int,
    *,
    isolation: int = READ_COMMITTED,
    absent_after_s: float | None = None,
) -> dict[TopicPartition, int]:
    """Return the offset at which each partition's log begins, or ends.

    Args:
        client: of the cluster.
        partitions: which.
        at: EARLIEST; or LATEST: the end, which for read_committed is the last stable offset.
        isolation: READ_COMMITTED or READ_UNCOMMITTED.
        absent_after_s: partitions that Kafka goes on calling unknown for so long are left out;
            None: they are asked for until the deadline.

    Raises:
        AuthorizationError: a topic may not be described.
        BrokerUnavailableError: the deadline passed.
    """
    assert at in (EARLIEST, LATEST), f"{at}: for timestamps there is offsets_for_times"
    times = dict.fromkeys(partitions, at)
    return _list_offsets(client, times, isolation, absent_after_s)


def confirm_topic_ids(
    client: Client,
    topic_ids: Mapping[TopicPartition, str],
    *,
    absent_after_s: float | None = None,
) -> set[TopicPartition]:
    """Return the partitions whose leaders have the topic with the expected id.

    ListOffsets names topics by name only. Where a topic was deleted and created again, a leader
    that has not heard of it yet answers with the old log, while others name the new id. A Fetch
    names a topic by its id, and a leader that has another one says so (KIP-516, ReplicaManager's
    InconsistentTopicIdException): one that has answered it has given the old log up for good.

    Args:
        client: of the cluster.
        topic_ids: the ids, as `describe_topics` returns them. A partition without one is believed,
            and so is a broker that knows no Fetch by id.
        absent_after_s: see `list_offsets`.

    Raises:
        AuthorizationError: a topic may not be read.
        BrokerUnavailableError: the deadline passed.
    """
    topic_class = protocol.FetchRequest.FetchTopic
    ids = {partition.topic: topic_id_from(text) for partition, text in topic_ids.items() if text}
    names = {topic_id: topic for topic, topic_id in ids.items()}
    unnamed = {partition for partition in topic_ids if partition.topic not in ids}

    def make(partitions: list[TopicPartition]) -> Any:
        return protocol.FetchRequest(
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=1,
            topics=[
                topic_class(
                    topic=topic,
                    topic_id=ids[topic],
                    partitions=[
                        topic_class.FetchPartition(
                            partition=index, fetch_offset=0, partition_max_bytes=1
                        )
                        for index in indexes
                    ],
                )
                for topic, indexes in protocol.by_topic(partitions).items()
            ],
        )

    def answers(response: Any) -> Iterator[tuple[TopicPartition, Any]]:
        for topic in response.responses or []:
            for part in topic.partitions:
                name = topic.topic or names[topic.topic_id]
                yield TopicPartition(name, part.partition_index), part

    answered = client.ask_leaders(
        topic_ids.keys() - unnamed,
        make,
        answers,
        accept=OUT_OF_RANGE,
        absent_after_s=absent_after_s,
    )
    return unnamed | answered.keys()


def offsets_for_times(
    client: Client,
    times: Mapping[TopicPartition, int],
    *,
    absent_after_s: float | None = None,
) -> dict[TopicPartition, int | None]:
    """Return the first committed record of each partition at or after a time; None: there is none.

    Kafka counts the markers that end transactions too: it may be one, the next record after it.

    Args:
        client: of the cluster.
        times: ms since 1970, by partition.
        absent_after_s: see `list_offsets`.

    Raises:
        The same as `list_offsets`.
    """
    assert all(time_ms >= 0 for time_ms in times.values()), times
    offsets = _list_offsets(client, times, READ_COMMITTED, absent_after_s)
    return {partition: None if offset < 0 else offset for partition, offset in offsets.items()}


def _list_offsets(
    client: Client,
    times: Mapping[TopicPartition, int],
    isolation: int,
    absent_after_s: float | None,
) -> dict[TopicPartition, int]:
    topic_class = protocol.ListOffsetsRequest.ListOffsetsTopic
    part_class = topic_class.ListOffsetsPartition

    def part(topic: str, index: int) -> Any:
        partition = TopicPartition(topic, index)
        return part_class(
            partition_index=index,
            current_leader_epoch=client.leader_epochs.get(partition, NO_EPOCH),
            timestamp=times[partition],
        )

    def make(partitions: list[TopicPartition]) -> Any:
        return protocol.ListOffsetsRequest(
            replica_id=-1,
            isolation_level=isolation,
            topics=[
                topic_class(name=topic, partitions=[part(topic, index) for index in indexes])
                for topic, indexes in protocol.by_topic(partitions).items()
            ],
            min_version=2,
            max_version=9,
        )

    answers = client.ask_leaders(times, make, protocol.partitions_of, absent_after_s=absent_after_s)
    return {partition: int(answer.offset) for partition, answer in answers.items()}


def cluster_facts(client: Client, topics: Iterable[str] = ()) -> ClusterFacts:
    """Return the facts that the pre-flight check needs, in three requests whatever the topics.

    Args:
        client: of the cluster.
        topics: existing ones, whose copies are counted.

    Raises:
        AuthorizationError: a topic may not be described.
        BrokerUnavailableError: the deadline passed.
    """
    names = sorted(topics)
    versions = _api_versions(client)
    highest = {api.api_key: int(api.max_version) for api in versions.api_keys}
    metadata = client.metadata(names)
    node = client.network.candidates()[0]
    # A broker knows its own settings only, and refuses to speak of another's.
    broker = (BROKER, str(node))
    of_topics = {(TOPIC, name): (IN_SYNC_MIN,) for name in names}
    wanted = {broker: FACT_SETTINGS, STATE: (BATCH_LIMIT,), **of_topics}
    configs = _settings(client, Node(node), wanted, accept=UNAUTHORIZED | ABSENT)
    settings: Mapping[str, str] = configs[broker] or {}
    verification = settings.get("transaction.partition.verification.enable")
    return ClusterFacts(
        transaction_version=_finalized_version(versions),
        api_versions={
            api.__name__.removesuffix("Request"): highest[api.API_KEY]
            for api in FACT_APIS
            if api.API_KEY in highest
        },
        transaction_timeout_max_ms=_number(settings.get("transaction.max.timeout.ms")),
        partition_verification=None if verification is None else verification == "true",
        offsets_retention_minutes=_number(settings.get("offsets.retention.minutes")),
        message_bytes_max=_number(settings.get("message.max.bytes")),
        session_timeout_ms=_number(settings.get("broker.session.timeout.ms")),
        metadata_version=_metadata_version(versions),
        replication={
            topic.name: _replication(len(metadata.brokers), topic, configs[TOPIC, topic.name] or {})
            for topic in metadata.topics
            if topic.partitions
        },
        partition_counts={topic.name: len(topic.partitions) for topic in metadata.topics},
        transaction_record_max=_number((configs[STATE] or {}).get(BATCH_LIMIT)),
    )


def _replication(brokers: int, topic: Any, settings: Mapping[str, str]) -> Replication:
    partitions = topic.partitions
    return Replication(
        brokers=brokers,
        replicas=min(len(partition.replica_nodes) for partition in partitions),
        in_sync=min(
            len(partition.isr_nodes) if partition.leader_id >= 0 else 0 for partition in partitions
        ),
        in_sync_min=_number(settings.get(IN_SYNC_MIN)),
    )


def _settings(
    client: Client,
    to: Target,
    wanted: Mapping[tuple[int, str], Iterable[str]],
    accept: frozenset[str] = UNAUTHORIZED,
) -> Mapping[tuple[int, str], Mapping[str, str] | None]:
    """Return settings of brokers and topics; a setting that a resource does not have is absent.

    A resource's settings are None if DESCRIBE_CONFIGS is missing, or the broker keeps them secret.

    Args:
        client: of the cluster.
        to: the broker that is asked.
        wanted: the settings' names, by type and name of the resource.
        accept: the errors of a resource that make its settings None.
    """
    resource_class = protocol.DescribeConfigsRequest.DescribeConfigsResource

    def make() -> Any:
        return protocol.DescribeConfigsRequest(
            resources=[
                resource_class(
                    resource_type=kind, resource_name=name, configuration_keys=sorted(names)
                )
                for (kind, name), names in wanted.items()
            ],
            include_synonyms=False,
            include_documentation=False,
        )

    def codes(response: Any) -> list[tuple[int, str]]:
        return [
            (result.error_code, f"{result.resource_name}{kafka_message(result)}")
            for result in response.results
        ]

    response = client.call(make, to, codes, accept=accept)
    return {
        (result.resource_type, result.resource_name): None
        if protocol.error_name(result.error_code) is not None
        else {entry.name: entry.value for entry in result.configs if entry.value is not None}
        for result in response.results
    }


def batch_limits(client: Client, topics: Iterable[str]) -> dict[str, TopicLimit]:
    """Return the record batches that each topic takes: its `max.message.bytes`, and compression.

    A topic whose settings this user may not see (DESCRIBE_CONFIGS on it) is absent, as is one that
    is gone.

    Args:
        client: of the cluster.
        topics: existing ones.

    Raises:
        BrokerUnavailableError: the deadline passed.
    """
    wanted = {(TOPIC, name): (BATCH_LIMIT, COMPRESSION) for name in sorted(topics)}
    if not wanted:
        return {}
    configs = _settings(
        client, AnyBroker(), wanted, accept=UNAUTHORIZED | ABSENT | {"InvalidTopic"}
    )
    limits = {}
    for (_, name), settings in configs.items():
        if settings and (size := _number(settings.get(BATCH_LIMIT))) is not None:
            limits[name] = TopicLimit(size, COMPRESSIONS.get(settings.get(COMPRESSION) or ""))
    return limits


class BatchLimits:
    """The limits of topics as they were a while ago; see `batch_limits`.

    Args:
        client: of the cluster.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._limits: dict[str, TopicLimit | None] = {}
        self._asked_s = 0.0

    def of(self, topics: Iterable[str]) -> dict[str, TopicLimit]:
        """Return the limits of topics, where they are known."""
        if time.monotonic() - self._asked_s > LIMITS_FOR_S:
            self._limits, self._asked_s = {}, time.monotonic()
        if lacking := [name for name in topics if name not in self._limits]:
            limits = batch_limits(self._client, lacking)
            self._limits |= {name: limits.get(name) for name in lacking}
        return {name: limit for name, limit in self._limits.items() if limit is not None}

    def forget(self) -> None:
        """Ask again: an epoch has failed, perhaps because a limit has been lowered."""
        self._asked_s = -LIMITS_FOR_S


def clock_ms(client: Client) -> int | None:
    """Return the time at the cluster's leading controller, in ms since 1970; None: not known.

    The controller gives it in the description of its quorum (KIP-836), which takes DESCRIBE on the
    cluster.

    Raises:
        BrokerUnavailableError: the deadline passed.
    """
    topic_class = protocol.DescribeQuorumRequest.TopicData
    partition = topic_class.PartitionData(partition_index=0)
    topic = topic_class(topic_name="__cluster_metadata", partitions=[partition])
    # A broker without a connection is not asked: making one takes longer than the answer.
    connected = filter(client.network.is_connected, client.network.candidates())
    try:
        response = client.call(
            lambda: protocol.DescribeQuorumRequest(topics=[topic], min_version=1),
            next(map(Node, connected), AnyBroker()),
            lambda response: [(response.error_code, "the cluster")],
        )
    except AuthorizationError:
        return None
    quorum = response.topics[0].partitions[0]
    for voter in quorum.current_voters:
        if voter.replica_id == quorum.leader_id and voter.last_caught_up_timestamp > 0:
            return int(voter.last_caught_up_timestamp)
    return None


def transaction_version(client: Client) -> int | None:
    """Return the finalized transaction.version (KIP-890); 0 without it, None if not reported."""
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


def _metadata_version(versions: Any) -> int | None:
    if versions.version < 3:
        return None
    for feature in versions.supported_features or []:
        if feature.name == "metadata.version":
            return int(feature.max_version)
    return None


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)
