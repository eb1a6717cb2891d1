"""The inner loops of JSON reading and writing: bytes in, bytes out, compiled by numba.

Values are spans (see `codec.spans`): a length of -1 is null. Invariant: no kernel reads or writes
outside the arrays it is given; where the numbers would lead it outside, it returns -1 and the
caller raises.
"""

import numba
import numpy as np

from tallystick.codec.memory import inner_kernel

GOOD, EMPTY, NOT_AN_OBJECT, CONTROL_CHARACTER, NOT_UTF8 = range(5)
"""The verdicts of `join_records` on a record; only GOOD ones go to the parser."""

NULL_SIZE = 4
"""The length of the text `null`."""

RECORD_OVERHEAD = 3
"""A record takes at most this many bytes more in the joined text: `{}` and a newline."""

_NULL = np.frombuffer(b"null", np.uint8)
_N, _I = np.uint8(0x4E), np.uint8(0x49)
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)
_BASE64 = np.frombuffer(
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", np.uint8
)
_SHORT_ESCAPES = {0x22: '"', 0x5C: "\\", 0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r"}
_LETTER = np.zeros(256, np.uint8)
"""The letter after the backslash, per byte; 0: the byte stands for itself, or needs `\\u00xx`."""
_GROWTH = np.zeros(256, np.uint8)
"""The bytes that the escape of a byte adds to it."""
_GROWTH[:0x20] = 5
for _byte, _letter in _SHORT_ESCAPES.items():
    _LETTER[_byte] = ord(_letter)
    _GROWTH[_byte] = 1


@numba.njit(cache=True, nogil=True, inline="always")
def _is_space(byte):  # type: ignore[no-untyped-def]
    return byte == 0x20 or byte == 0x0A or byte == 0x0D or byte == 0x09


@inner_kernel
def _is_utf8(data, at, end):  # type: ignore[no-untyped-def]
    """True if data[at:end] is UTF-8: no overlong form, no surrogate."""
    while at < end:
        byte = data[at]
        at += 1
        if byte < 0x80:
            continue
        low, high = 0x80, 0xBF
        if 0xC2 <= byte <= 0xDF:
            more = 1
        elif 0xE0 <= byte <= 0xEF:
            more = 2
            low = 0xA0 if byte == 0xE0 else low
            high = 0x9F if byte == 0xED else high
        elif 0xF0 <= byte <= 0xF4:
            more = 3
            low = 0x90 if byte == 0xF0 else low
            high = 0x8F if byte == 0xF4 else high
        else:
            return False
        if at + more > end:
            return False
        for _ in range(more):
            if data[at] < low or data[at] > high:
                return False
            low, high = 0x80, 0xBF
            at += 1
    return True


@inner_kernel
def _break_to_tab(text):  # type: ignore[no-untyped-def]
    """Make raw line breaks tabs; False where there are other control characters."""
    for index in range(len(text)):
        if text[index] == 0x0A or text[index] == 0x0D:
            text[index] = 0x09
        elif text[index] < 0x20 and text[index] != 0x09:
            return False
    return True


@inner_kernel
def _may_have_odd_word(text):  # type: ignore[no-untyped-def]
    """True if NaN or Inf is anywhere; no early end, so that it becomes vector instructions."""
    low = np.uint8(0xFF)
    first, second, third = text[:-2], text[1:-1], text[2:]
    for index in range(len(third)):
        nan = np.uint8((first[index] ^ _N) | (second[index] ^ np.uint8(0x61)) | (third[index] ^ _N))
        inf = np.uint8(
            (first[index] ^ _I) | (second[index] ^ np.uint8(0x6E)) | (third[index] ^ np.uint8(0x66))
        )
        low = min(low, min(nan, inf))
    return low == 0


@numba.njit(cache=True, nogil=True)
def has_odd_word(text):  # type: ignore[no-untyped-def]
    """True if a word in the place of a value begins like NaN or Inf, maybe inside a string."""
    if not _may_have_odd_word(text):
        return False
    for index in range(1, len(text) - 2):
        byte = text[index]
        nan = byte == _N and text[index + 1] == 0x61 and text[index + 2] == _N
        if nan or (byte == _I and text[index + 1] == 0x6E and text[index + 2] == 0x66):
            before = text[index - 1]
            if before <= 0x20 or before in (0x3A, 0x2C, 0x5B, 0x2D):  # : , [ -
                return True
    return False


@inner_kernel
def _copy_record(data, begin, end, out, position):  # type: ignore[no-untyped-def]
    """Copy a trimmed record, raw line breaks as tabs; return the verdict on the record."""
    if data[begin] != 0x7B or data[end - 1] != 0x7D:
        return NOT_AN_OBJECT
    # Slices, not indices: only then does the loop become vector instructions (13 times as fast).
    source = data[begin:end]
    target = out[position : position + end - begin]
    low = np.uint8(0xFF)
    high = np.uint8(0)
    for index in range(len(source)):
        byte = source[index]
        target[index] = byte
        low = min(low, byte)
        high = high | byte
    if low < 0x20 and not _break_to_tab(target):
        return CONTROL_CHARACTER
    if high >= 0x80 and not _is_utf8(data, begin, end):
        return NOT_UTF8
    return GOOD


@numba.njit(cache=True, nogil=True)
def join_records(data, starts, lengths, out, line_starts, verdicts):  # type: ignore[no-untyped-def]
    """Write one line per record, `{}` for a null or a hopeless one; return the bytes written.

    A raw line break inside a record becomes a tab: both are white space between tokens and both are
    forbidden inside strings, so this changes neither meaning nor validity.
    """
    position = np.int64(0)  # no literal, for which the callee would be compiled once more
    for row in range(len(lengths)):
        line_starts[row] = position
        begin = starts[row]
        end = begin + max(lengths[row], 0)
        if begin < 0 or end > len(data) or position + end - begin + RECORD_OVERHEAD > len(out):
            return -1
        while begin < end and _is_space(data[begin]):
            begin += 1
        while begin < end and _is_space(data[end - 1]):
            end -= 1
        verdict = EMPTY if begin == end else _copy_record(data, begin, end, out, position)
        if verdict == GOOD:
            position += end - begin
        else:
            out[position] = 0x7B
            out[position + 1] = 0x7D
            position += 2
        out[position] = 0x0A
        position += 1
        verdicts[row] = GOOD if lengths[row] < 0 else verdict
    line_starts[len(lengths)] = position
    return position


@numba.njit(cache=True, nogil=True)
def has_escapes(text):  # type: ignore[no-untyped-def]
    """True if any byte needs an escape; no early end, so that it becomes vector instructions."""
    needs_escape = np.uint8(0)
    for byte in text:
        needs_escape |= np.uint8((byte < 0x20) | (byte == 0x22) | (byte == 0x5C))
    return needs_escape != 0


@numba.njit(cache=True, nogil=True)
def escape_growth(data, starts, lengths):  # type: ignore[no-untyped-def]
    """Return how many bytes longer the values get by escaping; -1: a span leaves the data."""
    growth = 0
    for row in range(len(lengths)):
        if starts[row] < 0 or starts[row] + lengths[row] > len(data):
            return -1
        for at in range(starts[row], starts[row] + lengths[row]):
            byte = data[at]
            if byte < 0x20 or byte == 0x22 or byte == 0x5C:
                growth += _GROWTH[byte]
    return growth


@numba.njit(cache=True, nogil=True)
def escape_strings(data, starts, lengths, out, out_starts, out_lengths):  # type: ignore[no-untyped-def]
    """Write the values with JSON's escapes, without quotes; return the bytes written or -1."""
    position = 0
    for row in range(len(lengths)):
        out_starts[row] = position
        out_lengths[row] = -1
        if lengths[row] < 0:
            continue
        if starts[row] < 0 or starts[row] + lengths[row] > len(data):
            return -1
        for at in range(starts[row], starts[row] + lengths[row]):
            byte = data[at]
            if position + 1 + _GROWTH[byte] > len(out):
                return -1
            if _GROWTH[byte] == 0:
                out[position] = byte
                position += 1
                continue
            out[position] = 0x5C
            if _LETTER[byte]:
                out[position + 1] = _LETTER[byte]
            else:
                out[position + 1] = 0x75
                out[position + 2] = 0x30
                out[position + 3] = 0x30
                out[position + 4] = _HEX[byte >> 4]
                out[position + 5] = _HEX[byte & 15]
            position += 1 + _GROWTH[byte]
        out_lengths[row] = position - out_starts[row]
    return position


@numba.njit(cache=True, nogil=True)
def encode_base64(data, starts, lengths, out, out_starts):  # type: ignore[no-untyped-def]
    """Write the values as padded base64; return the bytes written or -1."""
    position = 0
    for row in range(len(lengths)):
        out_starts[row] = position
        length = lengths[row]
        if length < 0:
            continue
        begin = starts[row]
        if begin < 0 or begin + length > len(data) or position + (length + 2) // 3 * 4 > len(out):
            return -1
        for at in range(begin, begin + length, 3):
            remaining = begin + length - at
            bits = np.uint32(data[at]) << np.uint32(16)
            if remaining > 1:
                bits |= np.uint32(data[at + 1]) << np.uint32(8)
            if remaining > 2:
                bits |= np.uint32(data[at + 2])
            out[position] = _BASE64[(bits >> np.uint32(18)) & np.uint32(63)]
            out[position + 1] = _BASE64[(bits >> np.uint32(12)) & np.uint32(63)]
            out[position + 2] = (
                _BASE64[(bits >> np.uint32(6)) & np.uint32(63)] if remaining > 1 else 0x3D
            )
            out[position + 3] = _BASE64[bits & np.uint32(63)] if remaining > 2 else 0x3D
            position += 4
    return position


@numba.njit(cache=True, nogil=True)
def add_sizes(lengths, overhead, null_overhead, sizes):  # type: ignore[no-untyped-def]
    """Add the bytes of a column's text to the size of each row.

    Args:
        lengths: the lengths of the column's texts; -1: null.
        overhead: bytes around a text: the field's name, the quotes.
        null_overhead: bytes around a `null`.
        sizes: the sum so far, changed in place.
    """
    for row in range(len(sizes)):
        if lengths[row] < 0:
            sizes[row] += null_overhead + NULL_SIZE
        else:
            sizes[row] += overhead + lengths[row]


@numba.njit(cache=True, nogil=True, inline="always")
def _put(out, position, data, begin, length):  # type: ignore[no-untyped-def]
    """Copy; the caller has checked both ranges. Slices, as they become vector instructions."""
    source = data[begin : begin + length]
    target = out[position : position + length]
    for index in range(len(source)):
        target[index] = source[index]
    return position + length


@numba.njit(cache=True, nogil=True)
def write_column(prefix, data, starts, lengths, quoted, out, cursors):  # type: ignore[no-untyped-def]
    """Write `prefix` and one column's text at each row's cursor, and move the cursors; 0 or -1.

    One body on purpose: with the text's part in a function of its own it takes twice the time.
    """
    for row in range(len(cursors)):
        position = cursors[row]
        start, length = starts[row], lengths[row]
        size = len(prefix) + (NULL_SIZE if length < 0 else length + 2 * quoted)
        if position < 0 or position + size > len(out):
            return -1
        if start < 0 or start + length > len(data):
            return -1
        position = _put(out, position, prefix, 0, len(prefix))
        if length < 0:
            position = _put(out, position, _NULL, 0, NULL_SIZE)
        else:
            if quoted:
                out[position] = 0x22
                position += 1
            position = _put(out, position, data, start, length)
            if quoted:
                out[position] = 0x22
                position += 1
        cursors[row] = position
    return 0
