"""The demo's look at how far its pipeline has come, on a broker that is not ready yet."""

from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from tallystick_tools.demo import flights
from tallystick_tools.demo.run import NO_COORDINATOR, Positions


class Group:
    """A consumer group that answers what it is told to, one call after another."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)

    def committed(self, partitions: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        """See `confluent_kafka.Consumer`."""
        answer = self._answers.pop(0)
        if isinstance(answer, KafkaError):
            raise KafkaException(answer)
        return [TopicPartition(flights.TOPIC_IN, 0, answer)]


def positions(*answers: Any) -> Positions:
    demo_positions = Positions("127.0.0.1:1")
    demo_positions.close()
    demo_positions._consumer = Group(*answers)
    return demo_positions


@pytest.mark.parametrize("code", sorted(NO_COORDINATOR))
def test_without_a_coordinator_it_is_what_was_read_last(code: int) -> None:
    shown = positions(KafkaError(code), 7, KafkaError(code), 9)

    assert [shown.read() for _ in range(4)] == [0, 7, 7, 9]


def test_any_other_error_ends_the_demo() -> None:
    with pytest.raises(KafkaException, match="GROUP_AUTHORIZATION_FAILED"):
        positions(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED)).read()
