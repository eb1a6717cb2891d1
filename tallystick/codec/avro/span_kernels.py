"""Loops over spans of bytes, as addresses and sizes, compiled by numba; see `memory`."""

import numba
import numpy as np

from tallystick.codec.memory import copy, inner_kernel, load8

PAIRED_MAX = 32
"""Keys of maps up to this size are compared each with each."""

_kernel = numba.njit(cache=True, nogil=True, error_model="numpy")


@_kernel
def copy_spans(starts, offsets, target):  # type: ignore[no-untyped-def]
    """Copy bytes one after another.

    Args:
        starts: their addresses.
        offsets: where each goes in the target, one more than there are starts; so its length.
        target: an address with room for the last offset.
    """
    for row in range(len(starts)):
        begin = np.int64(offsets[row])
        copy(target + begin, starts[row], np.int64(offsets[row + 1]) - begin)


@inner_kernel
def _is_same(one, other, size):  # type: ignore[no-untyped-def]
    """True for the same bytes; from their end, as keys of a map more often begin alike."""
    for place in range(size - 1, -1, -1):  # noqa: SIM110  numba has no all()
        if load8(one + place) != load8(other + place):
            return False
    return True


@_kernel
def may_repeat(starts, sizes, counts):  # type: ignore[no-untyped-def]
    """Return whether a map has a key twice, or so many keys that another way finds it sooner.

    Args:
        starts: the address of each key, one map after another.
        sizes: the bytes of each key.
        counts: how many keys each map has.
    """
    first = np.int64(0)
    for row in range(len(counts)):
        after = first + counts[row]
        if counts[row] > PAIRED_MAX:
            return True
        for one in range(first, after):
            for other in range(one + 1, after):
                if sizes[one] == sizes[other] and _is_same(starts[one], starts[other], sizes[one]):
                    return True
        first = after
    return False
