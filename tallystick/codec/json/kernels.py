"""The inner loops of JSON reading and writing: bytes in, bytes out, compiled by numba.

Values are spans (see `codec.spans`): a length of -1 is null. Invariant: no kernel reads or writes
outside the arrays it is given; where the numbers would lead it outside, it returns -1 and the
caller raises.

Undeclared fields are removed from records (`prune_records`), as Arrow's parser refuses a record for
a number or half a character that it cannot hold, in any field. The schema is then a tree of nodes,
rows of numbers (see KIND); the root is a struct. A pruned record is never longer than it was.
Numbers with an exponent that Arrow takes for too large are written as their value: 0 or Inf.
"""

import numba
import numpy as np

from tallystick.codec.bytes_kernels import copy, inner_kernel, is_utf8, load8, store8
from tallystick.codec.json.token_kernels import (
    CLOSE,
    CLOSE_LIST,
    COLON,
    COMMA,
    LETTER_E,
    MINUS,
    NINE,
    NO_NUMBER,
    OPEN,
    OPEN_LIST,
    PARSED,
    PLUS,
    POINT,
    QUOTE,
    SUSPECT,
    UNSURE,
    ZERO,
    after_colon,
    after_space,
    byte_at,
    ignored,
    string_end,
    text_end,
    unescape,
)

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
    if high >= 0x80 and not is_utf8(data, begin, end):
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


# ---- removal of undeclared fields ----------------------------------------------------------------

VALUE, STRUCT, LIST = range(3)
"""The kinds of nodes; a VALUE is copied whole."""
KIND, FIRST, COUNT, NAME, SIZE = range(5)
"""The numbers of a node: of a struct FIRST and COUNT are its fields, of a list FIRST is its items'.
NAME is the address of a field's name, SIZE its bytes."""
NODE_NUMBERS = 5

_EXPONENT_MAX = 308
"""Arrow takes any number with an exponent up to this."""
_DIGITS_MAX = 9


@inner_kernel
def _is_bytes(one, other, size):  # type: ignore[no-untyped-def]
    for place in range(size):  # noqa: SIM110  numba has no all()
        if load8(one + place) != load8(other + place):
            return False
    return True


@inner_kernel
def _field(tree, node, key, close, begin, end, spare):  # type: ignore[no-untyped-def]
    """Return the node of a key, -1 if no such field was declared."""
    size = close - key
    if string_end(key, begin, end) == -UNSURE:
        closed, after = unescape(key, end, spare, spare + (end - key))
        if closed < 0:  # half a character: no name has one
            return np.int64(-1)
        key, size = spare, after - spare
    for child in range(tree[node, FIRST], tree[node, FIRST] + tree[node, COUNT]):
        if tree[child, SIZE] == size and _is_bytes(key, tree[child, NAME], size):
            return np.int64(child)
    return np.int64(-1)


@inner_kernel
def _too_large(at, end):  # type: ignore[no-untyped-def]
    """Return 1 for a number infinite by its exponent, 0 for a zero with such an exponent, or -1."""
    zeros, is_zero, is_fraction = np.int64(0), True, False
    while at < end and load8(at) | np.uint64(0x20) != np.uint64(LETTER_E):
        byte = np.int64(load8(at))
        at += 1
        if byte == POINT:
            is_fraction = True
        elif ZERO <= byte <= NINE:
            zeros += is_fraction and is_zero
            is_zero = is_zero and byte == ZERO
    at += 1
    if at < end and np.int64(load8(at)) == PLUS:
        at += 1
    power = np.int64(0)
    while at < end and ZERO <= np.int64(load8(at)) <= NINE:
        power = min(10 * power + np.int64(load8(at)) - ZERO, 10**_DIGITS_MAX)
        at += 1
    if at < end or power <= _EXPONENT_MAX:  # a minus, or no exponent
        return np.int64(-1)
    if is_zero:
        return np.int64(0)
    return np.int64(1 if power - zeros > _EXPONENT_MAX else -1)


@inner_kernel
def _put_value(at, after, out):  # type: ignore[no-untyped-def]
    """Copy a value; return the address after it."""
    first = np.int64(load8(at))
    if first == MINUS or ZERO <= first <= NINE:
        size = _too_large(at, after)
        if size >= 0:
            if first == MINUS:
                store8(out, np.uint64(MINUS))
                out += 1
            text = (0x49, 0x6E, 0x66) if size > 0 else (ZERO, LETTER_E, ZERO)  # Inf, 0e0
            for place in range(3):
                store8(out + place, np.uint64(text[place]))
            return out + 3
    copy(out, at, after - at)
    return out + after - at


@inner_kernel
def _prune(at, end, out, tree, nodes, counts, spare):  # type: ignore[no-untyped-def]  # noqa: PLR0912, PLR0915  one loop, for speed
    """(address after the pruned record, or a verdict, negated; address after the record)."""
    begin = at
    node, depth = np.int64(0), np.int64(0)
    while True:
        byte, kind = byte_at(at, end), tree[node, KIND]
        is_open = (byte == OPEN and kind == STRUCT) or (byte == OPEN_LIST and kind == LIST)
        if is_open:
            store8(out, np.uint64(byte))
            out += 1
            nodes[depth], counts[depth] = node, 0
            depth += 1
            at = after_space(at + 1, end)
        else:
            after = ignored(at, begin, end)
            if after < 0:
                return after, at
            out = _put_value(at, after, out)
            at = after
        is_value = False
        while not is_value:
            if depth == 0:
                return out, at
            node = nodes[depth - 1]
            is_list = tree[node, KIND] == LIST
            closing = CLOSE_LIST if is_list else CLOSE
            at = after_space(at, end)
            byte = byte_at(at, end)
            if byte == closing:
                store8(out, np.uint64(closing))
                out += 1
                at += 1
                depth -= 1
                is_open = False
                continue
            if not is_open:
                if byte != COMMA:
                    return np.int64(-SUSPECT), at
                at = after_space(at + 1, end)
            is_open = False
            key = at + 1
            close = key
            if not is_list:
                if byte_at(at, end) != QUOTE:
                    return np.int64(-SUSPECT), at
                close = text_end(key, begin, end)
                at = close if close < 0 else after_colon(close, end)
                if at < 0:
                    return at, key
                node = _field(tree, node, key, close, begin, end, spare)
                if node < 0:
                    at = ignored(at, begin, end)
                    if at < 0:
                        return at, key
                    continue
            if counts[depth - 1] > 0:
                store8(out, np.uint64(COMMA))
                out += 1
            counts[depth - 1] += 1
            if is_list:
                node = tree[node, FIRST]
            else:
                copy(out, key - 1, close + 2 - key)
                out += close + 2 - key
                store8(out, np.uint64(COLON))
                out += 1
            is_value = True


@numba.njit(cache=True, nogil=True, error_model="numpy")
def prune_records(text, line_starts, tree, depth_max, out, out_starts, verdicts):  # type: ignore[no-untyped-def]
    """Write the lines of records without undeclared fields; a line that is not JSON as it is.

    Args:
        text: the address of the lines, each with a line break at its end.
        line_starts: where each line begins, and the end of the last.
        tree: the schema's nodes.
        depth_max: of the tree.
        out: the address of as much room.
        out_starts: gets where each line begins in `out`, and the end of the last.
        verdicts: gets PARSED for a pruned record, else the reason; for NO_NUMBER the line is `{}`.
    """
    nodes, counts = np.zeros(depth_max, np.int64), np.zeros(depth_max, np.int64)
    longest = np.int64(0)
    for row in range(len(verdicts)):
        longest = max(longest, line_starts[row + 1] - line_starts[row])
    spare = np.empty(longest, np.uint8)
    target = np.int64(out)
    for row in range(len(verdicts)):
        out_starts[row] = target - out
        begin, end = text + line_starts[row], text + line_starts[row + 1] - 1
        after, at = _prune(begin, end, target, tree, nodes, counts, spare.ctypes.data)
        if after >= 0 and at != end:
            after = np.int64(-SUSPECT)
        verdicts[row] = -after if after < 0 else PARSED
        if after == -NO_NUMBER:  # Arrow would take it
            store8(target, np.uint64(OPEN))
            store8(target + 1, np.uint64(CLOSE))
            after = target + 2
        elif after < 0:
            copy(target, begin, end - begin)
            after = target + end - begin
        store8(after, np.uint64(0x0A))
        target = after + 1
    out_starts[len(verdicts)] = target - out


assert NO_NUMBER > SUSPECT, "verdicts are told apart"
