"""The last producer epoch of a transactional id: Kafka goes on with another producer id (KIP-890).

The real thing: all 32,766 epochs of an id are used up first, which takes some 15 seconds.
"""

import json

import pytest
from real_kafka import numbers, read_back
from task_sinks import committed, opened, place_of, written_by

from tallystick.epoch.two_phase import Outcome
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig

pytestmark = [pytest.mark.broker, pytest.mark.timeout(150)]
LAST_EPOCH = 32_766


def test_a_transaction_with_the_last_producer_epoch_is_committed_like_any_other(
    config: KafkaConfig, client: Client, topic: str
) -> None:
    """And is known as committed when EndTxn names it no more (FLINK-40689)."""
    pipeline = f"flights-{next(numbers)}"
    broker = KafkaBroker(config)
    name = f"tallystick-{pipeline}/out/0/0"
    last = broker.fence(name, None)
    while last.producer_epoch < LAST_EPOCH - 1:
        last = broker._init_producer(name, None)
    broker.close()
    with opened(config, topic, pipeline) as sink:
        edge = written_by(sink.plan(), place_of(pipeline, 0), "the last epoch")
        fields = json.loads(edge.details)
        assert (fields["producer_id"], fields["producer_epoch"]) == (last.producer_id, LAST_EPOCH)
        assert [committed(client, sink, edge) for _ in range(2)] == [Outcome.COMMITTED] * 2

        behind = written_by(sink.plan(), place_of(pipeline, 1), "a new producer id")

        assert json.loads(behind.details)["producer_id"] != last.producer_id
        assert sink.commit(edge) is Outcome.COMMITTED
        assert committed(client, sink, behind) is Outcome.COMMITTED
    assert read_back(config, topic) == ["a new producer id", "the last epoch"]
