"""Write record batches, and wait for nothing: acks=0.

Kafka answers such a request with nothing, not even when it refuses it; then it hangs up.
"""

from collections import deque
from typing import Any

from tallystick.kafka import protocol
from tallystick.kafka.client import Client
from tallystick.kafka.error_policy import Attempts, describe
from tallystick.kafka.protocol import shortened
from tallystick.kafka.records import EncodedBatch, stamp
from tallystick.values import Producer, TopicPartition

NOBODY = Producer("", -1, -1)
"""Who writes without a producer id: Kafka checks no sequence."""


class UnawaitedWriter:
    """Hands batches to the sockets of their leaders.

    Args:
        client: of the cluster; nobody else may use it meanwhile.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def write(self, frames: list[tuple[TopicPartition, EncodedBatch]]) -> None:
        """Send batches that are part of no transaction, in order per partition.

        Raises:
            BrokerUnavailableError: no leader could be reached within delivery.timeout.ms.
        """
        left = deque((partition, stamp(encoded.data, NOBODY, 0)) for partition, encoded in frames)
        partitions = {partition for partition, _ in frames}
        attempts = Attempts(self._client.deadline(), "Produce", shortened(partitions))
        while left:
            partition, data = left[0]
            led = self._client.by_leader([partition], attempts.deadline)
            obstacle = self._client.leader_obstacle(partition)
            for node in led:
                try:
                    until = self._client.try_until(attempts.deadline)
                    self._client.network.post(node, _request(partition, data, self._client), until)
                except OSError as error:
                    self._client.forget_leaders([partition])
                    obstacle = describe(error)
                else:
                    left.popleft()
                    obstacle = ""
            if obstacle:
                attempts.pause(obstacle)


def _request(partition: TopicPartition, data: bytes, client: Client) -> Any:
    topic_class = protocol.ProduceRequest.TopicProduceData
    part = topic_class.PartitionProduceData(index=partition.partition, records=data)
    topic_id = client.topic_ids.get(partition.topic)
    topic = topic_class(name=partition.topic, topic_id=topic_id, partition_data=[part])
    return protocol.ProduceRequest(
        transactional_id=None,
        acks=0,
        timeout_ms=client.config.request_timeout_ms,
        topic_data=[topic],
    )
