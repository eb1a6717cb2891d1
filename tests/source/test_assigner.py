"""Flink's rule, bit for bit."""

import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tallystick.source.splits import assign, cut_splits, java_string_hash, share_out, share_pieces
from tallystick.values import SplitRange

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


@st.composite
def cut(draw: st.DrawFn) -> tuple[list[SplitRange], list[SplitRange]]:
    """Whole splits, and the pieces that they were cut into."""
    sizes = draw(st.dictionaries(st.tuples(st.sampled_from("ab"), st.integers(0, 12)), SIZES))
    splits = [SplitRange(t, p, 5, 5 + size, "id") for (t, p), size in sizes.items()]
    return splits, cut_splits(tuple(splits), draw(st.integers(1, 40)))


SIZES = st.integers(1, 5) | st.integers(1, 10**12)


@settings(deadline=None)
@given(cut(), st.integers(1, 16))
def test_pieces_are_shared_in_order_and_those_of_one_partition_are_joined(split_and_cut, count):
    """Reader after reader, split after split, every offset comes once and in order."""
    splits, pieces = split_and_cut
    shares = share_pieces(reversed(pieces), count)
    dealt = [split for share in shares for split in share]

    assert len(shares) == count
    assert dealt == sorted(dealt)
    assert share_pieces(dealt, 1) == (tuple(sorted(splits)),)
    for share in shares:
        partitions = [split.topic_partition for split in share]
        assert len(partitions) == len(set(partitions)), "a reader interleaves its splits"
    total = sum(split.offset_count for split in splits)
    largest = max((piece.offset_count for piece in pieces), default=0)
    for share in shares:
        assert sum(split.offset_count for split in share) <= total / count + largest + 1
