"""The inner loops of `row_codec`: columns into the bytes of rows, and back.

Invariant: no kernel reads or writes outside the arrays it is given; where the numbers would lead
it outside, it returns -1 and the caller raises.
"""

import numba
import numpy as np

LENGTH_SIZE = 4


@numba.njit(cache=True, nogil=True, inline="always")
def _copy(target, at, source, begin, length):  # type: ignore[no-untyped-def]
    """Copy; the caller has checked both ranges. Slices, as they become vector instructions."""
    inside = source[begin : begin + length]
    outside = target[at : at + length]
    for place in range(len(inside)):
        outside[place] = inside[place]


@numba.njit(cache=True, nogil=True)
def write_records(records, width, present, out, cursors):  # type: ignore[no-untyped-def]
    """Write each present row's record and move its cursor; 0 or -1."""
    for row in range(len(cursors)):
        if not present[row]:
            continue
        at = cursors[row]
        if at < 0 or at + width > len(out) or (row + 1) * width > len(records):
            return -1
        _copy(out, at, records, row * width, width)
        cursors[row] = at + width
    return 0


@numba.njit(cache=True, nogil=True)
def append_texts(data, starts, lengths, present, out, cursors):  # type: ignore[no-untyped-def]
    """Write each present row's bytes and move its cursor; a null has none; 0 or -1."""
    for row in range(len(cursors)):
        begin, length, at = starts[row], lengths[row], cursors[row]
        if not present[row] or length <= 0:
            continue
        if at < 0 or at + length > len(out) or begin < 0 or begin + length > len(data):
            return -1
        _copy(out, at, data, begin, length)
        cursors[row] = at + length
    return 0


@numba.njit(cache=True, nogil=True)
def read_records(data, starts, lengths, width, records):  # type: ignore[no-untyped-def]
    """Copy the record at the start of each row; zeros for a null; 0 or -1."""
    for row in range(len(starts)):
        begin = starts[row]
        if lengths[row] < 0:
            records[row * width : (row + 1) * width] = 0
            continue
        if begin < 0 or lengths[row] < width or begin + width > len(data):
            return -1
        if (row + 1) * width > len(records):
            return -1
        _copy(records, row * width, data, begin, width)
    return 0


@numba.njit(cache=True, nogil=True)
def read_texts(data, cursors, ends, lengths, out, offsets):  # type: ignore[no-untyped-def]
    """Copy the bytes at each row's cursor, and move the cursors; the bytes written or -1."""
    written = 0
    for row in range(len(cursors)):
        at, length = cursors[row], lengths[row]
        offsets[row] = written
        if length == 0:
            continue
        if length < 0 or at < 0 or at + length > ends[row] or ends[row] > len(data):
            return -1
        if written + length > len(out):
            return -1
        _copy(out, written, data, at, length)
        written += length
        cursors[row] = at + length
    offsets[len(cursors)] = written
    return written


@numba.njit(cache=True, nogil=True)
def write_elements(data, starts, lengths, out, offsets):  # type: ignore[no-untyped-def]
    """Write length and bytes of each text, -1 for a null; the bytes written or -1."""
    at = 0
    for row in range(len(starts)):
        offsets[row] = at
        begin, length = starts[row], lengths[row]
        size = max(length, 0)
        if at + LENGTH_SIZE + size > len(out) or begin < 0 or begin + size > len(data):
            return -1
        for place in range(LENGTH_SIZE):
            out[at + place] = np.uint8((length >> (8 * place)) & 0xFF)
        at += LENGTH_SIZE
        _copy(out, at, data, begin, size)
        at += size
    offsets[len(starts)] = at
    return at


@numba.njit(cache=True, nogil=True)
def find_elements(data, starts, ends, counts, places, lengths):  # type: ignore[no-untyped-def]
    """Find the elements of each list; return the number of all, or -1."""
    count = 0
    for row in range(len(starts)):
        at, end = starts[row], ends[row]
        if at < 0 or end > len(data):
            return -1
        before = count
        while at < end:
            if at + LENGTH_SIZE > end or count >= len(places):
                return -1
            length = np.int64(np.int8(data[at + 3]))
            for place in range(2, -1, -1):
                length = (length << 8) | np.int64(data[at + place])
            at += LENGTH_SIZE
            places[count], lengths[count] = at, length
            at += max(length, 0)
            if length < -1 or at > end:
                return -1
            count += 1
        counts[row] = count - before
    return count


@numba.njit(cache=True, nogil=True)
def differs(data, starts, lengths, other, other_starts, other_lengths, out):  # type: ignore[no-untyped-def]
    """Write to `out` whether each row's bytes differ between two columns of checked spans."""
    for row in range(len(out)):
        length = lengths[row]
        out[row] = length != other_lengths[row]
        if out[row] or length <= 0:
            continue
        one = data[starts[row] : starts[row] + length]
        two = other[other_starts[row] : other_starts[row] + length]
        difference = np.uint8(0)
        for place in range(length):
            difference |= one[place] ^ two[place]
        out[row] = difference != 0
