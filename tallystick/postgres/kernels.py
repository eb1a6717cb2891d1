"""Columns into the rows of PostgreSQL's binary COPY; compiled.

A row is a count of fields, and each field its length and its bytes, all big-endian. `at` holds
where in the output each row's next field begins; a kernel writes one column's fields and moves it.

Invariant: the caller has summed up the very sizes that are written here; nothing is checked again.
"""

import numba
import numpy as np

_kernel = numba.njit(cache=True, nogil=True, error_model="numpy")

NUMERIC_BYTES_MAX = 8 + 2 * 11
"""A decimal of 38 digits, of which up to 11 groups of four are made."""
_NEGATIVE = 0x40  # the high byte of the sign 0x4000


@_kernel
def _put_length(out, place, length):  # type: ignore[no-untyped-def]
    out[place] = (length >> 24) & 0xFF
    out[place + 1] = (length >> 16) & 0xFF
    out[place + 2] = (length >> 8) & 0xFF
    out[place + 3] = length & 0xFF


@_kernel
def put_counts(out, at, count):  # type: ignore[no-untyped-def]
    """Begin each row with its number of fields."""
    for row in range(len(at)):
        place = at[row]
        out[place] = count >> 8
        out[place + 1] = count & 0xFF
        at[row] = place + 2


@_kernel
def put_fixed(out, at, data, width, valid):  # type: ignore[no-untyped-def]
    """Fields of one width; `valid` is empty where there is no null."""
    every = len(valid) == 0
    for row in range(len(at)):
        place = at[row]
        if every or valid[row]:
            _put_length(out, place, width)
            place += 4
            start = row * width
            for byte in range(width):
                out[place + byte] = data[start + byte]
            at[row] = place + width
        else:
            _put_length(out, place, -1)
            at[row] = place + 4


@_kernel
def put_ragged(out, at, data, offsets, valid, version):  # type: ignore[no-untyped-def]
    """Fields of any length; `version` is a byte before each, or negative: none."""
    every = len(valid) == 0
    more = 1 if version >= 0 else 0
    for row in range(len(at)):
        place = at[row]
        if every or valid[row]:
            start, stop = offsets[row], offsets[row + 1]
            _put_length(out, place, stop - start + more)
            place += 4
            if more:
                out[place] = version
                place += 1
            for byte in range(start, stop):
                out[place + byte - start] = data[byte]
            at[row] = place + stop - start
        else:
            _put_length(out, place, -1)
            at[row] = place + 4


@_kernel
def _groups_of(low, high, pad, limbs, groups):  # type: ignore[no-untyped-def]
    """Split a magnitude times 10**pad into groups of four digits, the lowest first; their count."""
    mask = np.uint64(0xFFFFFFFF)
    limbs[0], limbs[1] = low & mask, low >> np.uint64(32)
    limbs[2], limbs[3], limbs[4] = high & mask, high >> np.uint64(32), np.uint64(0)
    for _ in range(pad):
        carry = np.uint64(0)
        for place in range(5):
            product = limbs[place] * np.uint64(10) + carry
            limbs[place] = product & mask
            carry = product >> np.uint64(32)
    count = 0
    while limbs[0] | limbs[1] | limbs[2] | limbs[3] | limbs[4]:
        rest = np.uint64(0)
        for place in range(4, -1, -1):
            value = (rest << np.uint64(32)) | limbs[place]
            limbs[place] = value // np.uint64(10000)
            rest = value % np.uint64(10000)
        groups[count] = rest
        count += 1
    return count


@_kernel
def numerics(words, scale, out, offsets):  # type: ignore[no-untyped-def]
    """Write decimals of 128 bits, pairs of words, in the form of numeric_send; return the size."""
    limbs, groups = np.zeros(5, np.uint64), np.zeros(12, np.uint64)
    pad = (4 - scale % 4) % 4
    behind_point = (scale + pad) // 4
    place = 0
    for row in range(len(offsets) - 1):
        offsets[row] = place
        low, high = words[2 * row], words[2 * row + 1]
        negative = high >> np.uint64(63) != 0
        if negative:
            low, high = ~low + np.uint64(1), ~high
            if low == 0:
                high += np.uint64(1)
        count = _groups_of(low, high, pad, limbs, groups)
        first = 0
        while first < count and groups[first] == 0:
            first += 1
        weight = count - behind_point - 1 if count else 0
        shown = count - first
        out[place], out[place + 1] = shown >> 8, shown & 0xFF
        out[place + 2], out[place + 3] = (weight >> 8) & 0xFF, weight & 0xFF
        out[place + 4], out[place + 5] = _NEGATIVE if negative else 0, 0
        out[place + 6], out[place + 7] = scale >> 8, scale & 0xFF
        place += 8
        for group in range(count - 1, first - 1, -1):
            out[place], out[place + 1] = (
                groups[group] >> np.uint64(8),
                groups[group] & np.uint64(0xFF),
            )
            place += 2
    offsets[len(offsets) - 1] = place
    return place
