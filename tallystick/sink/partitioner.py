"""Which output partition a record goes to, as Kafka's Java client would choose.

Invariant: equal keys go to equal partitions, whatever wrote them. A record that another client
wrote for a key stands in the same partition as ours, so readers that rely on it keep working.
"""

from tallystick import kernel_cache  # noqa: I001  it must come before numba

import numba
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tallystick.spans import spans_of

assert kernel_cache  # imported for its effect

Int32Array = NDArray[np.int32]

_SEED = np.uint32(0x9747B28C)
_MIX = np.uint32(0x5BD1E995)


def murmur2(keys: pa.Array) -> Int32Array:
    """Kafka's hash of each key, signed as in Java; 0 for a null key.

    Source: org.apache.kafka.common.utils.Utils.murmur2.
    """
    spans = spans_of(keys, "key")
    hashes = np.zeros(len(keys), np.int32)
    _murmur2(spans.data, spans.starts, spans.lengths, hashes)
    return hashes


def partition_of(keys: pa.Array, partition_count: int, spread: int) -> Int32Array:
    """The partition of each record.

    Keys go by hash. All records without a key go to partition `spread % partition_count`: like
    Java's sticky partitioner (KIP-480), which fills one batch before it turns to the next
    partition. The caller changes `spread` from call to call.

    Args:
        keys: binary or string; null where a record has no key.
        partition_count: how many partitions the topic has.
        spread: any number; it must not depend on the clock where an epoch may run again.
    """
    assert partition_count > 0, partition_count
    partitions = (murmur2(keys) & 0x7FFFFFFF) % np.int32(partition_count)
    if keys.null_count:
        partitions[keys.is_null().to_numpy(zero_copy_only=False)] = spread % partition_count
    return partitions


def group_by_partition(
    batch: pa.RecordBatch, partitions: Int32Array
) -> list[tuple[int, pa.RecordBatch]]:
    """The rows of each partition, partitions ascending, rows in the order that they had.

    Args:
        batch: the records.
        partitions: the partition of each row.
    """
    assert len(partitions) == batch.num_rows, (len(partitions), batch.num_rows)
    if batch.num_rows == 0:
        return []
    first = int(partitions[0])
    if (partitions == first).all():
        return [(first, batch)]
    assert partitions.min() >= 0, partitions.min()
    counts = np.bincount(partitions)
    ends = np.cumsum(counts)
    order = np.empty(len(partitions), np.int64)
    _counting_sort(partitions, ends - counts, order)
    grouped = batch.take(pa.array(order))
    return [
        (
            int(partition),
            grouped.slice(int(ends[partition] - counts[partition]), int(counts[partition])),
        )
        for partition in np.flatnonzero(counts)
    ]


def warm_up() -> None:
    """Compile the kernels, or load them from the cache."""
    keys = pa.array([b"a", b"b", None])
    group_by_partition(pa.record_batch([keys], names=["key"]), partition_of(keys, 2, 0))
    group_by_partition(pa.record_batch([keys], names=["key"]), np.array([0, 1, 0], np.int32))


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _murmur2(data, starts, lengths, hashes):  # type: ignore[no-untyped-def]
    for row in range(len(hashes)):
        length = lengths[row]
        at = starts[row]
        if length < 0 or at < 0 or at + length > len(data):
            continue
        value = _SEED ^ np.uint32(length)
        end = at + (length & ~3)
        while at < end:
            word = (
                np.uint32(data[at])
                | np.uint32(data[at + 1]) << np.uint32(8)
                | np.uint32(data[at + 2]) << np.uint32(16)
                | np.uint32(data[at + 3]) << np.uint32(24)
            )
            word = np.uint32(word * _MIX)
            word ^= word >> np.uint32(24)
            value = np.uint32(value * _MIX) ^ np.uint32(word * _MIX)
            at += 4
        rest = length & 3
        if rest == 3:
            value ^= np.uint32(data[at + 2]) << np.uint32(16)
        if rest >= 2:
            value ^= np.uint32(data[at + 1]) << np.uint32(8)
        if rest >= 1:
            value = np.uint32((value ^ np.uint32(data[at])) * _MIX)
        value ^= value >> np.uint32(13)
        value = np.uint32(value * _MIX)
        value ^= value >> np.uint32(15)
        hashes[row] = np.int32(value)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _counting_sort(partitions, places, order):  # type: ignore[no-untyped-def]
    """Write the row numbers into `order`, grouped; `places` is where each group starts."""
    for row in range(len(partitions)):
        partition = partitions[row]
        order[places[partition]] = row
        places[partition] += 1
