"""Topics and broker settings: what is asked of a cluster outside the flow of records."""

from collections.abc import Iterable, Mapping
from typing import Any

from tallystick.errors import AuthorizationError, OptionError
from tallystick.kafka import protocol
from tallystick.kafka.client import AnyBroker, Client, Node
from tallystick.kafka.error_policy import Attempts, said

TOPIC = 2
BROKER = 4
"""DescribeConfigs' resource types."""


def create_topic(
    client: Client,
    name: str,
    partitions: int = 1,
    replication_factor: int = -1,
    config: Mapping[str, str] | None = None,
) -> None:
    """Create a topic, and return when every partition of it has a leader. One that exists is fine.

    Args:
        client: of the cluster.
        name: the topic.
        partitions: how many.
        replication_factor: replicas of each; -1 is the broker's default.
        config: topic settings, such as `retention.ms`.

    Raises:
        OptionError: the broker refused name, numbers or settings.
        AuthorizationError: CREATE is missing.
        BrokerUnavailableError: the deadline passed.
    """
    topic_class = protocol.CreateTopicsRequest.CreatableTopic
    config_class = topic_class.CreatableTopicConfig

    def make() -> Any:
        settings = [config_class(name=key, value=value) for key, value in (config or {}).items()]
        topic = topic_class(
            name=name,
            num_partitions=partitions,
            replication_factor=replication_factor,
            assignments=[],
            configs=settings,
        )
        return protocol.CreateTopicsRequest(
            topics=[topic], timeout_ms=client.config.request_timeout_ms * 3 // 4, min_version=4
        )

    def codes(response: Any) -> list[tuple[int, str]]:
        return [
            (topic.error_code, f"topic {topic.name!r}{said(topic)}") for topic in response.topics
        ]

    refused = frozenset(
        {
            "InvalidTopic",
            "InvalidPartitions",
            "InvalidReplicationFactor",
            "InvalidConfiguration",
            "PolicyViolation",
            "TopicAlreadyExists",
        }
    )
    answer = client.call(make, AnyBroker(), codes, accept=refused).topics[0]
    error_name = protocol.error_name(answer.error_code)
    if error_name not in (None, "TopicAlreadyExists"):
        raise OptionError(f"topic {name!r} cannot be created: {error_name}{said(answer)}.")
    _wait_for_leaders(client, name)


def _wait_for_leaders(client: Client, name: str) -> None:
    attempts = Attempts(client.deadline(), "Metadata", f"topic {name!r}")
    while True:
        topic = client.metadata([name]).topics[0]
        error_name = protocol.error_name(topic.error_code)
        leaderless = [part for part in topic.partitions if part.leader_id < 0]
        if error_name is None and not leaderless:
            return
        attempts.pause(error_name or "LeaderNotAvailable")


def delete_topic(client: Client, name: str) -> None:
    """Delete a topic; one that does not exist is fine.

    Raises:
        AuthorizationError: DELETE is missing.
        BrokerUnavailableError: the deadline passed.
    """

    def make() -> Any:
        return protocol.DeleteTopicsRequest(
            topic_names=[name], timeout_ms=client.config.request_timeout_ms * 3 // 4, max_version=5
        )

    def codes(response: Any) -> list[tuple[int, str]]:
        return [(topic.error_code, f"topic {name!r}{said(topic)}") for topic in response.responses]

    client.call(make, AnyBroker(), codes, accept=frozenset({"UnknownTopicOrPartition"}))


def describe_configs(
    client: Client, resource_type: int, resource_name: str, names: Iterable[str]
) -> Mapping[str, str] | None:
    """Settings of a topic or a broker; those that it does not have are absent.

    Args:
        client: of the cluster.
        resource_type: `TOPIC` or `BROKER`.
        resource_name: the topic, or a broker's node id.
        names: which settings.

    Returns:
        Values by name; None when DESCRIBE_CONFIGS is missing, or the broker keeps them secret.

    Raises:
        BrokerUnavailableError: the deadline passed.
    """
    resource_class = protocol.DescribeConfigsRequest.DescribeConfigsResource

    def make() -> Any:
        resource = resource_class(
            resource_type=resource_type,
            resource_name=resource_name,
            configuration_keys=sorted(names),
        )
        return protocol.DescribeConfigsRequest(
            resources=[resource], include_synonyms=False, include_documentation=False
        )

    def codes(response: Any) -> list[tuple[int, str]]:
        subject = f"broker {resource_name}" if resource_type == BROKER else resource_name
        return [(result.error_code, subject + said(result)) for result in response.results]

    try:
        # A broker knows its own settings only, and refuses to speak of another's.
        target = Node(int(resource_name)) if resource_type == BROKER else AnyBroker()
        result = client.call(make, target, codes).results[0]
    except AuthorizationError:
        return None
    return {entry.name: entry.value for entry in result.configs if entry.value is not None}
