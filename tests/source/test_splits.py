"""How far an epoch reads, and in how many pieces."""

from hypothesis import given
from hypothesis import strategies as st

from tallystick.source.offsets import SourceOffsets
from tallystick.source.splits import cut_splits, limit_offsets, plan_splits
from tallystick.values import SplitRange, TopicPartition

PARTITIONS = st.builds(TopicPartition, st.sampled_from(["a", "b"]), st.integers(0, 5))
POSITIONS = st.dictionaries(PARTITIONS, st.integers(0, 1000))


@given(POSITIONS, POSITIONS, st.none() | st.integers(1, 500))
def test_a_position_never_goes_back_and_never_beyond_what_is_there(start, available, limit):
    reached = limit_offsets(start, available, limit)

    assert reached.keys() == available.keys()
    for partition, position in reached.items():
        begin = start.get(partition, 0)
        assert begin <= position <= max(begin, available[partition])


@given(POSITIONS, POSITIONS, st.integers(1, 500))
def test_the_limit_holds_up_to_one_offset_per_partition_and_nobody_starves(start, available, limit):
    reached = limit_offsets(start, available, limit)
    taken = {p: reached[p] - start.get(p, 0) for p in reached}

    assert sum(taken.values()) <= limit + len(taken)
    for partition, count in taken.items():
        assert count > 0 or available[partition] <= start.get(partition, 0)


def test_a_partition_read_for_the_first_time_starts_where_the_log_says():
    """Also after a crash in the very first epoch: nothing is resolved a second time."""
    new, old = TopicPartition("t", 1), TopicPartition("t", 0)
    start = SourceOffsets("c", "g", {old: 5})
    stop = SourceOffsets("c", "g", {old: 9, new: 40}, starts={new: 30})

    assert plan_splits(start, stop) == (SplitRange("t", 0, 5, 9), SplitRange("t", 1, 30, 40))


def test_a_partition_without_new_records_gives_no_split():
    start = SourceOffsets("c", "g", {TopicPartition("t", 0): 5})

    assert plan_splits(start, start) == ()


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=8), st.integers(1, 40))
def test_cutting_keeps_every_offset_once_and_in_order(sizes, least):
    splits = tuple(SplitRange("t", p, 100, 100 + size) for p, size in enumerate(sizes))
    pieces = cut_splits(splits, least)

    for split in splits:
        mine = [piece for piece in pieces if piece.partition == split.partition]
        offsets = [o for piece in mine for o in range(piece.start_offset, piece.stop_offset)]
        assert offsets == list(range(split.start_offset, split.stop_offset))


def test_few_large_splits_become_about_as_many_as_asked_for():
    splits = (SplitRange("t", 0, 0, 900), SplitRange("t", 1, 0, 100))

    assert len(cut_splits(splits, 10)) == 10
