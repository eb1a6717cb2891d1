"""Producer ids without a transactional id: kept by their process, one epoch for each writer.

Brokers remember an id for a day in each partition that it wrote to (producer.id.expiration.ms), so
an id per task and epoch would fill their memory. An idempotent producer may raise its own epoch,
and begins at sequence 0 in it; what is still under way of an older epoch is refused by then.

Source: KIP-360.
"""

from typing import Any

from tallystick.host.worker_cache import WorkerCache
from tallystick.kafka import protocol
from tallystick.kafka.client import AnyBroker, Client
from tallystick.kafka.config import KafkaConfig
from tallystick.values import Producer

EPOCH_MAX = 32_766
"""Kafka's own bound: the number is a short one, and its last value is never given out."""

_idle: WorkerCache[tuple[KafkaConfig, str], Producer] = WorkerCache()
"""By cluster, whose they are; a fork must not write with its parent's."""


def take(client: Client, config: KafkaConfig, cluster_id: str) -> Producer:
    """A producer for one writer, with an epoch that nobody had before.

    Raises:
        AuthorizationError: the right to write idempotently is missing.
        BrokerUnavailableError: the deadline passed.
    """
    last = _idle.take((config, cluster_id))
    if last is not None:
        return Producer("", last.producer_id, last.producer_epoch + 1)
    return _asked_for(client)


def give_back(producer: Producer, config: KafkaConfig, cluster_id: str) -> None:
    """Its writer writes no more; what has used up its epochs is forgotten."""
    if producer.producer_epoch < EPOCH_MAX:
        _idle.give_back((config, cluster_id), producer)


def _asked_for(client: Client) -> Producer:
    """Any broker gives one out."""

    def make() -> Any:
        return protocol.InitProducerIdRequest(
            transactional_id=None,
            transaction_timeout_ms=0x7FFFFFFF,
            producer_id=-1,
            producer_epoch=-1,
            min_version=3,
            max_version=5,
        )

    answer = client.call(
        make, AnyBroker(), lambda response: [(response.error_code, "an idempotent producer")]
    )
    return Producer("", int(answer.producer_id), int(answer.producer_epoch))
