"""What a group is to show of a source."""

from hypothesis import given
from hypothesis import strategies as st

from tallystick.source.offsets import POSITIONS_PER_REQUEST, SourceOffsets, requests, shown
from tallystick.values import TopicPartition


def test_a_topic_that_is_gone_is_not_shown():
    """Its position is kept in case it comes back; Kafka would refuse the whole request."""
    here, gone = TopicPartition("here", 0), TopicPartition("gone", 0)
    source = SourceOffsets("c", "g", {here: 1, gone: 2}, gone={"gone": 99})

    assert shown(source) == {here: 1}


@given(st.sampled_from((0, 1, POSITIONS_PER_REQUEST, POSITIONS_PER_REQUEST + 1, 10_000)))
def test_every_position_is_in_one_request_and_none_is_too_large(count):
    positions = {TopicPartition("t", number): number for number in range(count)}
    sent = list(requests(positions))

    assert [item for part in sent for item in part.items()] == [
        (partition, (offset, "")) for partition, offset in positions.items()
    ]
    assert all(0 < len(part) <= POSITIONS_PER_REQUEST for part in sent)
