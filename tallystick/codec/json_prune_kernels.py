"""Removal of undeclared fields from JSON records, compiled by numba.

Arrow's parser refuses a record for a number or half a character that it cannot hold, in any field.
A schema is a tree of nodes, rows of numbers (see KIND); the root is a struct. A pruned record
is never longer than it was. Numbers with an exponent that Arrow takes for too large are written as
their value: 0 or Inf.
"""

import numba
import numpy as np

from tallystick.codec.json_ignored_kernels import NO_NUMBER, after_colon, ignored, text_end
from tallystick.codec.json_token_kernels import (
    CLOSE,
    CLOSE_LIST,
    COLON,
    COMMA,
    LETTER_E,
    MINUS,
    NINE,
    OPEN,
    OPEN_LIST,
    PARSED,
    PLUS,
    POINT,
    QUOTE,
    SUSPECT,
    UNSURE,
    ZERO,
    after_space,
    byte_at,
    string_end,
    unescape,
)
from tallystick.codec.memory import copy, inner_kernel, load8, store8

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
