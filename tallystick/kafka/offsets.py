"""The offsets of a cluster's logs: where they begin and end, and which record came when."""

from collections.abc import Iterable, Mapping
from typing import Any

from tallystick.kafka import protocol
from tallystick.kafka.client import NO_EPOCH, Client
from tallystick.kafka.protocol import by_topic, partitions_of
from tallystick.source.subscription import EARLIEST, LATEST
from tallystick.values import TopicPartition

__all__ = [
    "EARLIEST",
    "LATEST",
    "READ_COMMITTED",
    "READ_UNCOMMITTED",
    "list_offsets",
    "offsets_for_times",
]

READ_UNCOMMITTED = 0
READ_COMMITTED = 1


def list_offsets(
    client: Client,
    partitions: Iterable[TopicPartition],
    at: int,
    *,
    isolation: int = READ_COMMITTED,
    absent_after_s: float | None = None,
) -> dict[TopicPartition, int]:
    """Return where the log of each partition begins, or ends.

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
    return _ask(client, times, isolation, absent_after_s)


def offsets_for_times(
    client: Client,
    times: Mapping[TopicPartition, int],
    *,
    absent_after_s: float | None = None,
) -> dict[TopicPartition, int | None]:
    """The first committed record of each partition at or after a time; None: there is none.

    Kafka counts the markers that end transactions too: it may be one, the next record after it.

    Args:
        client: of the cluster.
        times: ms since 1970, by partition.
        absent_after_s: see `list_offsets`.

    Raises:
        The same as `list_offsets`.
    """
    assert all(time_ms >= 0 for time_ms in times.values()), times
    found = _ask(client, times, READ_COMMITTED, absent_after_s)
    return {partition: None if offset < 0 else offset for partition, offset in found.items()}


def _ask(
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

    def make(asked: list[TopicPartition]) -> Any:
        return protocol.ListOffsetsRequest(
            replica_id=-1,
            isolation_level=isolation,
            topics=[
                topic_class(name=topic, partitions=[part(topic, index) for index in indexes])
                for topic, indexes in by_topic(asked).items()
            ],
            min_version=2,
            max_version=9,
        )

    answers = client.ask_leaders(times, make, partitions_of, absent_after_s=absent_after_s)
    return {partition: int(answer.offset) for partition, answer in answers.items()}
