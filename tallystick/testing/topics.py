"""The creation of topics by a test's client; the package itself creates none."""

from collections.abc import Mapping
from typing import Any

from tallystick.errors import OptionError
from tallystick.kafka import protocol
from tallystick.kafka.client import AnyBroker, Client
from tallystick.kafka.error_policy import Attempts, kafka_message


def create_topic(
    client: Client,
    name: str,
    partitions: int = 1,
    replication_factor: int = -1,
    config: Mapping[str, str] | None = None,
) -> None:
    """Create a topic unless it exists, and return when every partition has a leader.

    Args:
        client: of the cluster.
        name: the topic.
        partitions: the number of partitions.
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
            (topic.error_code, f"topic {topic.name!r}{kafka_message(topic)}")
            for topic in response.topics
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
        raise OptionError(f"topic {name!r} cannot be created: {error_name}{kafka_message(answer)}.")
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
