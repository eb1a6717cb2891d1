"""Flink's rule, bit for bit."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tallystick.source.assigner import assign, java_string_hash, share_out
from tallystick.source.split import SplitRange

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/flink_partition_owner.json").read_text())


def test_every_partition_goes_to_the_reader_that_flink_gives_it_to():
    for topic, partition, reader_count, owner in GOLDEN["owners"]:
        assert assign(topic, partition, reader_count) == owner, (topic, partition, reader_count)


def test_string_hashes_are_those_of_java():
    for text, hash_code in GOLDEN["string_hash_codes"]:
        assert java_string_hash(text) == hash_code, text


@given(st.integers(1, 64), st.integers(0, 200), st.text(min_size=1))
def test_readers_share_a_topic_evenly(reader_count, partition_count, topic):
    """Round robin: no reader has more than one partition more than another."""
    splits = [SplitRange(topic, partition, 0, 1) for partition in range(partition_count)]
    shares = share_out(splits, reader_count)

    assert sorted(split for share in shares for split in share) == sorted(splits)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
