"""Where the logs begin and end, and which record came when."""

from collections.abc import Iterable
from typing import Any

from tallystick.kafka import protocol
from tallystick.kafka.client import Client
from tallystick.kafka.partitions import by_topic, partitions_of
from tallystick.topic_partition import TopicPartition

EARLIEST = -2
LATEST = -1
READ_UNCOMMITTED = 0
READ_COMMITTED = 1


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
                for topic, indexes in by_topic(asked).items()
            ],
            min_version=2,
            max_version=9,
        )

    answers = client.ask_leaders(partitions, make, partitions_of)
    found = {partition: int(answer.offset) for partition, answer in answers.items()}
    beyond = [partition for partition, offset in found.items() if offset < 0]
    if beyond:
        assert at >= 0, found
        found |= list_offsets(client, beyond, LATEST, isolation=isolation)
    return found


def earliest_offset(client: Client, topic_partition: TopicPartition) -> int:
    """The first offset that retention has left; raises as `list_offsets`."""
    return list_offsets(client, [topic_partition], EARLIEST)[topic_partition]
