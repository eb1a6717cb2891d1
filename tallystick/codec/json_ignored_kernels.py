r"""Skipping of values without a column, compiled by numba: only their end is looked for.

They must be JSON, but may be values that no column could hold: any number, and halves of characters
(`\ud800`). A function returns the address after a value, or a verdict, negated: see
`json_token_kernels`, and NO_NUMBER.
"""

import numpy as np

from tallystick.codec.json_kernels import _is_utf8
from tallystick.codec.json_token_kernels import (
    _ESCAPED,
    BACKSLASH,
    CLOSE,
    CLOSE_LIST,
    COLON,
    COMMA,
    LETTER_E,
    MINUS,
    NINE,
    OPEN,
    PLUS,
    POINT,
    QUOTE,
    SUSPECT,
    UNSURE,
    ZERO,
    after_space,
    byte_at,
    digits,
    hex4,
    peek,
    string_end,
    text_word,
)
from tallystick.codec.memory import bytes_at, inlined_kernel, inner_kernel

NO_NUMBER = 3
"""One more verdict: Inf or -NaN, which Arrow would read; NaN, Infinity and -Infinity are words."""
DEPTH_MAX = 64
"""The maximum nesting depth of values that are looked at here."""

_NULL, _TRUE, _FALSE = text_word(b"null"), text_word(b"true"), text_word(b"false")
_NAN, _INF, _INFINITY = text_word(b"NaN"), text_word(b"Inf"), text_word(b"Infinity")
_THREE_BYTES, _FOUR_BYTES = np.uint64(0xFFFFFF), np.uint64(0xFFFFFFFF)
_FIVE_BYTES = np.uint64(0xFFFFFFFFFF)


@inlined_kernel
def after_colon(close, end):  # type: ignore[no-untyped-def]
    """Return the address of a value, from its key's closing quote."""
    at = after_space(close + 1, end)
    return after_space(at + 1, end) if byte_at(at, end) == COLON else np.int64(-SUSPECT)


@inner_kernel
def _escaped_text_end(at, end):  # type: ignore[no-untyped-def]
    """See `text_end`: the text has escapes."""
    start = at
    while True:
        byte = byte_at(at, end)
        if byte == QUOTE:
            break
        if byte < 0x20:
            return np.int64(-SUSPECT)
        if byte != BACKSLASH:
            at += 1
        elif byte_at(at + 1, end) == 0x75:
            if hex4(at + 2, end) < 0:
                return np.int64(-SUSPECT)
            at += 6
        elif _ESCAPED[byte_at(at + 1, end)] == 0:
            return np.int64(-SUSPECT)
        else:
            at += 2
    is_text = _is_utf8(bytes_at(start, at - start), 0, at - start)
    return at if is_text else np.int64(-SUSPECT)


@inlined_kernel
def text_end(at, begin, end):  # type: ignore[no-untyped-def]
    """Return the place of the closing quote, from the text's first byte."""
    close = string_end(at, begin, end)
    return _escaped_text_end(at, end) if close == -UNSURE else close


@inner_kernel
def _word_end(at, begin, end):  # type: ignore[no-untyped-def]
    """Return the address after null, true, false, NaN, Infinity or -Infinity."""
    word = peek(at, begin, end)
    if word & _FOUR_BYTES == _NULL or word & _FOUR_BYTES == _TRUE:
        return at + 4
    if word & _FIVE_BYTES == _FALSE:
        return at + 5
    is_negative = byte_at(at, end) == MINUS
    if is_negative:
        at += 1
        word = peek(at, begin, end)
    if word == _INFINITY:
        return at + 8
    if word & _THREE_BYTES == _NAN:
        return np.int64(-NO_NUMBER) if is_negative else at + 3
    return np.int64(-NO_NUMBER if word & _THREE_BYTES == _INF else -SUSPECT)


@inlined_kernel
def number_end(at, begin, end):  # type: ignore[no-untyped-def]
    """Return the address after a number, however large, or -Infinity."""
    first = at
    if byte_at(at, end) == MINUS:
        at += 1
    leading = byte_at(at, end)
    after = digits(np.uint64(0), at, begin, end)[1]
    if after == at:
        return _word_end(first, begin, end)
    if leading == ZERO and after > at + 1:
        return np.int64(-SUSPECT)
    if byte_at(after, end) == POINT:
        at = after + 1
        after = digits(np.uint64(0), at, begin, end)[1]
        if after == at:
            return np.int64(-SUSPECT)
    if byte_at(after, end) | 0x20 == LETTER_E:
        at = after + 1
        sign = byte_at(at, end)
        if sign in (MINUS, PLUS):
            at += 1
        after = digits(np.uint64(0), at, begin, end)[1]
        if after == at:
            return np.int64(-SUSPECT)
    return np.int64(after)


@inlined_kernel
def _scalar_end(at, begin, end):  # type: ignore[no-untyped-def]
    """Return the address after a string, number or word."""
    byte = byte_at(at, end)
    if byte == QUOTE:
        close = text_end(at + 1, begin, end)
        return close if close < 0 else close + 1
    if byte == MINUS or ZERO <= byte <= NINE:
        return number_end(at, begin, end)
    return _word_end(at, begin, end)


@inner_kernel
def ignored(at, begin, end):  # type: ignore[no-untyped-def]  # noqa: PLR0912  one loop, for speed
    """Return the address after a value of any kind."""
    objects = np.uint64(0)  # a bit for each that is open, the innermost one lowest; 0: a list
    depth = 0
    while True:
        byte = byte_at(at, end)
        if byte | 0x20 == OPEN:  # or OPEN_LIST
            if depth == DEPTH_MAX:
                return np.int64(-UNSURE)
            depth += 1
            objects = (objects << np.uint64(1)) | np.uint64(byte == OPEN)
            at = after_space(at + 1, end)
            is_value = byte_at(at, end) != (CLOSE if byte == OPEN else CLOSE_LIST)
        else:
            at = _scalar_end(at, begin, end)
            if at < 0:
                return at
            is_value = False
        while not is_value:
            if depth == 0:
                return at
            at = after_space(at, end)
            is_object = objects & np.uint64(1) != np.uint64(0)
            byte = byte_at(at, end)
            at += 1
            if byte == COMMA:
                at = after_space(at, end)
                is_value = True
            elif byte == (CLOSE if is_object else CLOSE_LIST):
                depth -= 1
                objects >>= np.uint64(1)
            else:
                return np.int64(-SUSPECT)
        if objects & np.uint64(1) != np.uint64(0):
            if byte_at(at, end) != QUOTE:
                return np.int64(-SUSPECT)
            close = text_end(at + 1, begin, end)
            at = close if close < 0 else after_colon(close, end)
            if at < 0:
                return at
