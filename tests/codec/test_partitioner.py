import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.codec.rows import group_by_partition, murmur2, partition_of, warm_up
from tallystick.errors import RecordError

KAFKAS_OWN_VALUES = {
    "21": -973932308,
    "foobar": -790332482,
    "a-little-bit-long-string": -985981536,
    "a-little-bit-longer-string": -1486304829,
    "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    "abc": 479470107,
}
"""Source: testMurmur2 in Kafka's UtilsTest."""

warm_up()  # Hypothesis would take the time of a compiler for that of an example

KEYS = st.lists(st.none() | st.binary(max_size=20), max_size=60)


def java_murmur2(key: bytes) -> int:
    """The definition, one key at a time."""
    mask, mix = 0xFFFFFFFF, 0x5BD1E995
    value = 0x9747B28C ^ len(key)
    whole = len(key) & ~3
    for at in range(0, whole, 4):
        word = int.from_bytes(key[at : at + 4], "little") * mix & mask
        word = (word ^ word >> 24) * mix & mask
        value = value * mix & mask ^ word
    if whole < len(key):
        value = (value ^ int.from_bytes(key[whole:], "little")) * mix & mask
    value = (value ^ value >> 13) * mix & mask
    value ^= value >> 15
    return value - (1 << 32) if value >> 31 else value


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.binary(), pa.large_binary(), pa.large_string(), pa.string_view()]
)
def test_hashes_are_those_of_kafkas_own_test(kind: pa.DataType) -> None:
    keys = pa.array(list(KAFKAS_OWN_VALUES), kind)

    assert murmur2(keys).tolist() == list(KAFKAS_OWN_VALUES.values())
    assert murmur2(keys.dictionary_encode() if kind == pa.string() else keys).dtype == np.int32


@given(KEYS, st.data())
def test_hashes_follow_the_definition_for_any_key_and_slice(
    keys: list[bytes | None], data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(keys)))
    sliced = pa.array(keys, pa.binary()).slice(start)

    assert murmur2(sliced).tolist() == [
        0 if key is None else java_murmur2(key) for key in keys[start:]
    ]


@given(KEYS, st.integers(1, 1000), st.integers(0, 2**40))
def test_keys_go_by_hash_and_the_rest_to_one_partition(
    keys: list[bytes | None], partition_count: int, spread: int
) -> None:
    partitions = partition_of(pa.array(keys, pa.binary()), partition_count, spread)

    assert partitions.dtype == np.int32
    assert partitions.tolist() == [
        spread % partition_count
        if key is None
        else (java_murmur2(key) & 0x7FFFFFFF) % partition_count
        for key in keys
    ]


def test_a_column_without_any_key_goes_to_one_partition() -> None:
    assert partition_of(pa.nulls(3), 4, 6).tolist() == [2, 2, 2]


@given(st.lists(st.integers(0, 5), max_size=50))
def test_groups_hold_each_row_once_in_its_order(partitions: list[int]) -> None:
    batch = pa.record_batch({"row": pa.array(range(len(partitions)), pa.int64())})

    grouped = group_by_partition(batch, np.array(partitions, np.int32))

    assert [partition for partition, _ in grouped] == sorted(set(partitions))
    assert {partition: rows.column("row").to_pylist() for partition, rows in grouped} == {
        wanted: [row for row, partition in enumerate(partitions) if partition == wanted]
        for wanted in partitions
    }


def test_a_batch_of_one_partition_is_not_copied() -> None:
    batch = pa.record_batch({"value": pa.array([b"a", b"b"])})

    ((_, rows),) = group_by_partition(batch, np.array([3, 3], np.int32))

    assert rows is batch


def test_keys_of_another_type_are_refused_by_name() -> None:
    with pytest.raises(RecordError, match="column key is int64"):
        murmur2(pa.array([1, 2]))
