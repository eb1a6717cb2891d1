"""Keys go to the task that Flink would give them to, by the functions that the pipeline uses."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tallystick.errors import OptionError
from tallystick.source.splits import java_string_hash
from tallystick.state.key_groups import (
    EMPTY,
    KeyGroupRange,
    default_max_parallelism,
    key_group_range,
    key_groups_of,
    operator_index,
)
from tallystick.state.keys import KeyCodec

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "flink_key_groups.json").read_text())
ARROW_TYPES = {"String": pa.string(), "Integer": pa.int32(), "Long": pa.int64()}


@pytest.mark.parametrize("java_type", ARROW_TYPES)
def test_whole_columns_of_keys_have_flinks_hash_codes_groups_and_tasks(java_type: str) -> None:
    cases = [case for case in GOLDEN["assign_to_key_group"] if case[0] == java_type]
    assert len(cases) >= 150
    _, keys, max_parallelism, parallelism, hash_codes, groups, tasks = zip(*cases, strict=True)
    rows = pa.record_batch({"key": pa.array(keys, ARROW_TYPES[java_type])})

    codes = KeyCodec(rows.schema).hash_codes(rows)

    assert codes.tolist() == list(hash_codes)
    for count in set(max_parallelism):
        of_count = np.flatnonzero(np.array(max_parallelism) == count)
        expected = [groups[row] for row in of_count]
        assert key_groups_of(codes, count)[of_count].tolist() == expected
    owners = map(operator_index, max_parallelism, parallelism, groups)
    assert list(owners) == list(tasks)


def test_groups_of_hash_codes_are_flinks() -> None:
    for key_hash, max_parallelism, group in GOLDEN["key_group_for_key_hash"]:
        assert key_groups_of(np.array([key_hash], np.int32), max_parallelism) == [group]


def test_ranges_of_tasks_are_flinks() -> None:
    for max_parallelism, parallelism, ranges in GOLDEN["key_group_ranges"]:
        for index, (first, last) in enumerate(ranges):
            key_groups = key_group_range(max_parallelism, parallelism, index)
            assert key_groups == KeyGroupRange(first, last)
            for group in (first, last):
                assert operator_index(max_parallelism, parallelism, group) == index


def test_owners_of_groups_are_flinks() -> None:
    for max_parallelism, parallelism, group, index in GOLDEN["operator_index"]:
        assert operator_index(max_parallelism, parallelism, group) == index


def test_the_default_number_of_key_groups_is_flinks() -> None:
    for parallelism, max_parallelism in GOLDEN["default_max_parallelism"]:
        assert default_max_parallelism(parallelism) == max_parallelism


@pytest.mark.parametrize("parallelism", GOLDEN["default_max_parallelism_refuses"])
def test_what_flink_refuses_is_refused(parallelism: int) -> None:
    with pytest.raises(OptionError, match=f"parallelism {parallelism}: expected 1 to 32768"):
        default_max_parallelism(parallelism)


def test_intersections_are_flinks() -> None:
    for left_range, right, expected, count in GOLDEN["intersection"]:
        common = KeyGroupRange(*left_range).intersection(KeyGroupRange(*right))
        assert common == (KeyGroupRange(*expected) if expected else EMPTY)
        assert common.count == count


def test_more_tasks_than_key_groups_are_refused() -> None:
    with pytest.raises(OptionError, match=r"parallelism 5: expected 1 to 4.*max_parallelism"):
        key_group_range(4, 5, 0)


@settings(deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=[])), max_size=20))
def test_a_columns_hash_codes_are_those_of_each_text(texts: list[str]) -> None:
    texts = [text.encode("utf-16", "replace").decode("utf-16") for text in texts]
    rows = pa.record_batch({"key": pa.array(texts, pa.string())})

    codes = KeyCodec(rows.schema).hash_codes(rows)

    assert codes.tolist() == [java_string_hash(text) for text in texts]


@settings(deadline=None)
@given(st.integers(1, 1 << 15), st.data())
def test_each_group_has_one_owner_and_it_is_the_one_rows_go_to(
    max_parallelism: int, data: st.DataObject
) -> None:
    parallelism = data.draw(st.integers(1, min(max_parallelism, 300)))
    ranges = [key_group_range(max_parallelism, parallelism, i) for i in range(parallelism)]

    assert ranges[0].first == 0
    assert ranges[-1].last == max_parallelism - 1
    for index, (one, next_one) in enumerate(zip(ranges, [*ranges[1:], None], strict=True)):
        assert next_one is None or one.last + 1 == next_one.first
        assert operator_index(max_parallelism, parallelism, one.first) == index
        assert operator_index(max_parallelism, parallelism, one.last) == index
