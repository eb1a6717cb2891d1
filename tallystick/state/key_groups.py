"""The task that owns a key: Flink's key groups, bit for bit.

A key's hash code picks one of `max_parallelism` key groups, for the life of the job. Tasks own
contiguous ranges of key groups, so a job is rescaled by handing over slices, never single keys.

Source: Flink's KeyGroupRangeAssignment, MathUtils.murmurHash, KeyGroupRange.
"""

import itertools
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from tallystick.errors import OptionError

MAX_PARALLELISM_MAX = 1 << 15
DEFAULT_MAX_PARALLELISM_MIN = 1 << 7


@dataclass(frozen=True, slots=True, order=True)
class KeyGroupRange:
    """Key groups `first` to `last`, both included; empty where `last` is less than `first`."""

    first: int
    last: int

    @property
    def count(self) -> int:
        """The number of key groups."""
        return max(0, self.last - self.first + 1)

    def intersection(self, other: Self) -> "KeyGroupRange":
        """Return the key groups common to both ranges, or `EMPTY`."""
        first, last = max(self.first, other.first), min(self.last, other.last)
        return KeyGroupRange(first, last) if first <= last else EMPTY

    def parts(self, count: int) -> list["KeyGroupRange"]:
        """Divide the range into `count` ranges of like size, at most one per key group."""
        edges = [self.first + self.count * at // count for at in range(count + 1)]
        pairs = itertools.pairwise(edges)
        return [KeyGroupRange(start, stop - 1) for start, stop in pairs if start < stop]


EMPTY = KeyGroupRange(0, -1)


def key_groups_of(key_hashes: npt.NDArray[np.int32], max_parallelism: int) -> npt.NDArray[np.int32]:
    """Return the key groups of keys, by their Java hash codes.

    Source: Flink's `computeKeyGroupForKeyHash`.
    """
    code = key_hashes.view(np.uint32) * np.uint32(0xCC9E2D51)
    code = (code << np.uint32(15)) | (code >> np.uint32(17))
    code = code * np.uint32(0x1B873593)
    code = (code << np.uint32(13)) | (code >> np.uint32(19))
    code = code * np.uint32(5) + np.uint32(0xE6546B64)
    code = code ^ np.uint32(4)
    code = (code ^ (code >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    code = (code ^ (code >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    signed = (code ^ (code >> np.uint32(16))).view(np.int32)
    # Java: the value where it is not negative, else its negation, and 0 for the smallest int.
    positive = np.where(signed >= 0, signed, np.where(signed == np.int32(-(1 << 31)), 0, -signed))
    return (positive % np.int32(max_parallelism)).astype(np.int32)


def key_group_range(max_parallelism: int, parallelism: int, index: int) -> KeyGroupRange:
    """Return the key groups that task `index` of `parallelism` owns.

    Source: Flink's `computeKeyGroupRangeForOperatorIndex`.

    Raises:
        OptionError: there are more tasks than key groups.
    """
    check_parallelism(parallelism, max_parallelism)
    first = (index * max_parallelism + parallelism - 1) // parallelism
    last = ((index + 1) * max_parallelism - 1) // parallelism
    return KeyGroupRange(first, last)


def operator_index(max_parallelism: int, parallelism: int, key_group: int) -> int:
    """Return the task that owns a key group.

    Source: Flink's `computeOperatorIndexForKeyGroup`.
    """
    return key_group * parallelism // max_parallelism


def default_max_parallelism(parallelism: int) -> int:
    """Return 1.5 times the parallelism, rounded up to a power of two, within 128 and 32768.

    Source: Flink's `computeDefaultMaxParallelism`.

    Raises:
        OptionError: the parallelism is not within 1 and 32768.
    """
    check_parallelism(parallelism, MAX_PARALLELISM_MAX)
    wanted = parallelism + parallelism // 2
    rounded = 1 << (wanted - 1).bit_length()
    return min(max(rounded, DEFAULT_MAX_PARALLELISM_MIN), MAX_PARALLELISM_MAX)


def check_parallelism(parallelism: int, max_parallelism: int) -> None:
    """Refuse a parallelism or a number of key groups that is out of bounds.

    Raises:
        OptionError: a number is out of its bounds.
    """
    if not 1 <= max_parallelism <= MAX_PARALLELISM_MAX:
        raise OptionError(
            f"max_parallelism {max_parallelism}: expected 1 to {MAX_PARALLELISM_MAX} key groups"
        )
    if not 1 <= parallelism <= max_parallelism:
        raise OptionError(
            f"parallelism {parallelism}: expected 1 to {max_parallelism}, the number of key groups "
            f"(max_parallelism)"
        )
