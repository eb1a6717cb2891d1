"""The answer to DescribeProducers beside what kafka-python makes of the same bytes."""

import random
from typing import Any

import pytest
from fake_broker import FakeBroker, answer, part

from tallystick.kafka import protocol
from tallystick.kafka.audit import producer_states
from tallystick.kafka.client import Client
from tallystick.kafka.producers_answer import ProducersAnswer, ProducerStates, decode_producers
from tallystick.values import Producer, TopicPartition

FIELDS = (
    "producer_id",
    "producer_epoch",
    "last_sequence",
    "last_timestamp",
    "coordinator_epoch",
    "current_txn_start_offset",
)


def made(count: int, error_code: int = 0) -> Any:
    """An answer with the entries of many producers in two partitions of each of two topics."""
    chosen = random.Random(count)
    request = protocol.DescribeProducersRequest(topics=[])
    request.API_VERSION = 0
    protocol.encode_request(request, 1, "test")
    topic_class = part(request, "TopicResponse")
    part_class = topic_class.PartitionResponse
    topics = [
        topic_class(
            name=name,
            partitions=[
                part_class(
                    partition_index=index,
                    error_code=error_code,
                    error_message="why" if error_code else None,
                    active_producers=[
                        part_class.ProducerState(
                            producer_id=chosen.getrandbits(62),
                            producer_epoch=chosen.getrandbits(15),
                            last_sequence=chosen.getrandbits(31) - 1,
                            last_timestamp=chosen.getrandbits(62),
                            coordinator_epoch=-1,
                            current_txn_start_offset=chosen.choice([-1, 7]),
                        )
                        for _ in range(count)
                    ],
                )
                for index in range(2)
            ],
        )
        for name in ("a", "topic-ü")
    ]
    return answer(request, topics=topics, throttle_time_ms=3)


@pytest.mark.parametrize("count", [0, 1, 300])
@pytest.mark.parametrize("error_code", [0, 6])
def test_every_field_is_as_the_generated_decoder_reads_it(count: int, error_code: int) -> None:
    theirs = made(count, error_code)
    body = theirs.encode()
    ours = decode_producers(memoryview(body))

    assert ours.throttle_time_ms == 3
    assert [each.name for each in ours.topics] == ["a", "topic-ü"]
    for mine, other in zip(ours.topics, theirs.topics, strict=True):
        for one, two in zip(mine.partitions, other.partitions, strict=True):
            assert (one.partition_index, one.error_code, one.error_message) == (
                two.partition_index,
                two.error_code,
                two.error_message,
            )
            assert [tuple(each) for each in one.active_producers] == [
                tuple(getattr(each, name) for name in FIELDS) for each in two.active_producers
            ]
            for each in two.active_producers:
                assert [found.last_sequence for found in one.active_producers.of(each.producer_id)]


def test_what_is_cut_off_or_has_more_is_refused() -> None:
    body = bytes(made(3).encode())
    for size in range(len(body)):
        with pytest.raises(ValueError, match=r".*"):
            decode_producers(memoryview(body[:size]))
    with pytest.raises(ValueError, match="tagged fields"):
        decode_producers(memoryview(body[:-1] + b"\1\0\1x"))


def test_the_entries_of_others_stay_bytes() -> None:
    """A count before a commit looks at its own producer's, whoever else writes to the topic."""
    theirs = made(2000)
    own = theirs.topics[0].partitions[1].active_producers[1234]
    received: list[Any] = []

    def describe(request: Any) -> Any:
        return answer(request, topics=theirs.topics)

    with FakeBroker({"DescribeProducers": describe}) as broker:
        broker.partitions = {"a": 2}
        client = Client(broker.config())
        wait = client.network.wait
        client.network.wait = lambda *a: received.append(wait(*a)) or received[-1]  # type: ignore[func-returns-value, method-assign]
        producer = Producer("t", own.producer_id, own.producer_epoch)
        states = producer_states(client, producer, [TopicPartition("a", 1)])
        client.close()

    assert states is not None
    assert {p: s.last_sequence for p, s in states.items()} == {
        TopicPartition("a", 1): own.last_sequence
    }
    (found,) = [each for each in received if isinstance(each, ProducersAnswer)]
    assert isinstance(found.topics[0].partitions[1].active_producers, ProducerStates)
