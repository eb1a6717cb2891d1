"""The inner loops over keys: hash codes, and bytes that sort in the order of the values.

Invariant: no kernel reads or writes outside the arrays it is given; where the numbers would lead
it outside, it returns -1 and the caller raises.
"""

import numba
import numpy as np

NULL, PRESENT = 0, 1
"""The first byte of a key's value: nulls come first, as in Spark."""

ZERO_FOLLOWS = 0xFF
"""Follows a zero byte that is part of a text; a zero after it would end the text."""

END_SIZE = 2
HEADER_SIZE = 3
"""An entry begins with the key group in two bytes and the state's id."""


@numba.njit(cache=True, nogil=True)
def hash_texts(data, starts, lengths, codes):  # type: ignore[no-untyped-def]
    """Compute Java's String.hashCode of UTF-8 texts, over UTF-16 units; 0 for a null."""
    for row in range(len(codes)):
        at, end = starts[row], starts[row] + lengths[row]
        code = np.uint64(0)  # the low 32 bits of what Java has: nothing flows down
        if lengths[row] < 0 or at < 0 or end > len(data):
            codes[row] = 0
            continue
        while at < end:
            lead = np.uint64(data[at])
            at += 1
            if lead < 0x80:
                code = code * np.uint64(31) + lead
                continue
            more = 1 if lead < 0xE0 else (2 if lead < 0xF0 else 3)
            point = lead & np.uint64(0x3F >> more)
            for _ in range(min(more, end - at)):
                point = (point << np.uint64(6)) | np.uint64(data[at] & 0x3F)
                at += 1
            if point >= 0x10000:
                point -= np.uint64(0x10000)
                code = code * np.uint64(31) + np.uint64(0xD800) + (point >> np.uint64(10))
                point = np.uint64(0xDC00) + (point & np.uint64(0x3FF))
            code = code * np.uint64(31) + point
        codes[row] = np.int32(np.uint32(code))


@numba.njit(cache=True, nogil=True)
def hash_bytes(data, starts, lengths, codes):  # type: ignore[no-untyped-def]
    """Compute Java's Arrays.hashCode(byte[]), whose bytes are signed; 0 for a null."""
    for row in range(len(codes)):
        at, end = starts[row], starts[row] + lengths[row]
        if lengths[row] < 0 or at < 0 or end > len(data):
            codes[row] = 0
            continue
        code = np.int64(1)
        for place in range(at, end):
            code = code * np.int64(31) + np.int64(np.int8(data[place]))
        codes[row] = np.int32(code)


@numba.njit(cache=True, nogil=True)
def hash_long(data, starts, lengths, codes):  # type: ignore[no-untyped-def]
    """Compute the 64-bit FNV-1a hash of bytes; 0 for a null."""
    for row in range(len(codes)):
        at, end = starts[row], starts[row] + lengths[row]
        code = np.uint64(0xCBF29CE484222325)
        if lengths[row] < 0 or at < 0 or end > len(data):
            codes[row] = 0
            continue
        for place in range(at, end):
            code = (code ^ np.uint64(data[place])) * np.uint64(0x100000001B3)
        codes[row] = code


@numba.njit(cache=True, nogil=True)
def add_fixed_sizes(valid, width, sizes):  # type: ignore[no-untyped-def]
    """Add the bytes of a fixed-width column to each key's size."""
    for row in range(len(sizes)):
        sizes[row] += 1 + (width if valid[row] else 0)


@numba.njit(cache=True, nogil=True)
def add_text_sizes(data, starts, lengths, sizes):  # type: ignore[no-untyped-def]
    """Add the bytes of a text column to each key's size; 0, or -1 where a span leaves the data."""
    for row in range(len(sizes)):
        begin, length = starts[row], lengths[row]
        size = 1
        if length >= 0:
            if begin < 0 or begin + length > len(data):
                return -1
            zeros = 0
            for byte in data[begin : begin + length]:
                zeros += byte == 0
            size += length + zeros + END_SIZE
        sizes[row] += size
    return 0


@numba.njit(cache=True, nogil=True)
def write_words(words, valid, width, out, cursors):  # type: ignore[no-untyped-def]
    """Write the low `width` bytes of each word, the highest first; 0 or -1."""
    for row in range(len(cursors)):
        at = cursors[row]
        if at < 0 or at >= len(out) or (valid[row] and at + 1 + width > len(out)):
            return -1
        if not valid[row]:
            out[at] = NULL
            cursors[row] = at + 1
            continue
        out[at] = PRESENT
        word = words[row]
        for place in range(at + width, at, -1):
            out[place] = np.uint8(word & np.uint64(0xFF))
            word >>= np.uint64(8)
        cursors[row] = at + 1 + width
    return 0


@numba.njit(cache=True, nogil=True)
def write_pairs(highs, lows, valid, out, cursors):  # type: ignore[no-untyped-def]
    """Write numbers of 16 bytes, the highest first; 0 or -1."""
    for row in range(len(cursors)):
        at = cursors[row]
        if at < 0 or at >= len(out) or (valid[row] and at + 17 > len(out)):
            return -1
        out[at] = PRESENT if valid[row] else NULL
        if valid[row]:
            high, low = highs[row], lows[row]
            for place in range(8, 0, -1):
                out[at + place] = np.uint8(high & np.uint64(0xFF))
                out[at + 8 + place] = np.uint8(low & np.uint64(0xFF))
                high >>= np.uint64(8)
                low >>= np.uint64(8)
        cursors[row] = at + (17 if valid[row] else 1)
    return 0


@numba.njit(cache=True, nogil=True)
def write_texts(data, starts, lengths, out, cursors):  # type: ignore[no-untyped-def]
    """Write texts, a zero byte as two, and two zeros at the end; 0 or -1."""
    for row in range(len(cursors)):
        at, begin, length = cursors[row], starts[row], lengths[row]
        if at < 0 or at >= len(out):
            return -1
        if length < 0:
            out[at] = NULL
            cursors[row] = at + 1
            continue
        if begin < 0 or begin + length > len(data):
            return -1
        if at + 1 + length + END_SIZE > len(out):
            return -1
        out[at] = PRESENT
        at += 1
        for place in range(begin, begin + length):
            byte = data[place]
            if at + END_SIZE + 1 > len(out):
                return -1
            out[at] = byte
            at += 1
            if byte == 0:
                out[at] = ZERO_FOLLOWS
                at += 1
        if at + END_SIZE > len(out):
            return -1
        out[at] = 0
        out[at + 1] = 0
        cursors[row] = at + END_SIZE
    return 0


@numba.njit(cache=True, nogil=True)
def read_words(data, cursors, ends, width, words, valid):  # type: ignore[no-untyped-def]
    """Read the words of `write_words` and move the cursors; 0, or -1 for damaged data."""
    for row in range(len(cursors)):
        at, end = cursors[row], ends[row]
        if at < 0 or at >= end or end > len(data) or data[at] > PRESENT:
            return -1
        valid[row] = data[at] == PRESENT
        word = np.uint64(0)
        at += 1
        if valid[row]:
            if at + width > end:
                return -1
            for place in range(at, at + width):
                word = (word << np.uint64(8)) | np.uint64(data[place])
            at += width
        words[row] = word
        cursors[row] = at
    return 0


@numba.njit(cache=True, nogil=True)
def read_pairs(data, cursors, ends, highs, lows, valid):  # type: ignore[no-untyped-def]
    """Read the numbers of `write_pairs` and move the cursors; 0, or -1 for damaged data."""
    for row in range(len(cursors)):
        at, end = cursors[row], ends[row]
        if at < 0 or at >= end or end > len(data) or data[at] > PRESENT:
            return -1
        valid[row] = data[at] == PRESENT
        at += 1
        high = low = np.uint64(0)
        if valid[row]:
            if at + 16 > end:
                return -1
            for place in range(at, at + 8):
                high = (high << np.uint64(8)) | np.uint64(data[place])
                low = (low << np.uint64(8)) | np.uint64(data[place + 8])
            at += 16
        highs[row], lows[row] = high, low
        cursors[row] = at
    return 0


@numba.njit(cache=True, nogil=True)
def read_texts(data, cursors, ends, out, offsets, valid):  # type: ignore[no-untyped-def]
    """Read the texts of `write_texts` into `out` and move the cursors; the bytes written or -1."""
    written = 0
    for row in range(len(cursors)):
        at, end = cursors[row], ends[row]
        offsets[row] = written
        if at < 0 or at >= end or end > len(data) or data[at] > PRESENT:
            return -1
        valid[row] = data[at] == PRESENT
        at += 1
        while valid[row]:
            if at + 1 > end or (data[at] == 0 and at + END_SIZE > end) or written >= len(out):
                return -1
            byte = data[at]
            at += 1
            if byte == 0:
                at += 1
                if data[at - 1] == 0:
                    break
                if data[at - 1] != ZERO_FOLLOWS:
                    return -1
            out[written] = byte
            written += 1
        cursors[row] = at
    offsets[len(cursors)] = written
    return written


@numba.njit(cache=True, nogil=True)
def write_entries(groups, state_id, data, starts, lengths, out, offsets):  # type: ignore[no-untyped-def]
    """Write `key group | state id | key` of each row; the bytes written or -1."""
    at = 0
    for row in range(len(groups)):
        begin, length = starts[row], lengths[row]
        offsets[row] = at
        if length < 0 or begin < 0 or begin + length > len(data):
            return -1
        if at + HEADER_SIZE + length > len(out):
            return -1
        out[at] = np.uint8(groups[row] >> 8)
        out[at + 1] = np.uint8(groups[row] & 0xFF)
        out[at + 2] = np.uint8(state_id)
        at += HEADER_SIZE
        for place in range(length):
            out[at + place] = data[begin + place]
        at += length
    offsets[len(groups)] = at
    return at


@numba.njit(cache=True, nogil=True)
def copy_behind(data, starts, lengths, skip, out, offsets):  # type: ignore[no-untyped-def]
    """Copy each value without its first `skip` bytes; the bytes written or -1."""
    at = 0
    for row in range(len(starts)):
        begin, length = starts[row] + skip, lengths[row] - skip
        offsets[row] = at
        if length < 0 or begin < 0 or begin + length > len(data) or at + length > len(out):
            return -1
        for place in range(length):
            out[at + place] = data[begin + place]
        at += length
    offsets[len(starts)] = at
    return at
