r"""The tokens of JSON records, compiled by numba: white space, strings, numbers, ignored values.

A function that reads a token returns the address after it, or a verdict, negated: SUSPECT where
Arrow's parser refuses the token, UNSURE where only Arrow can decide, or knows the value.

Of a value without a column only the end is looked for (`ignored`). The value must be JSON, but may
be one that no column could hold: any number (NO_NUMBER), and halves of characters (`\ud800`).

Invariants
    A record, begin ... end, is read by `peek` and `byte_at` alone, which see zeros after its end.
    A zero byte fits no rule, so nothing goes on past the end.

Sources: https://www.rfc-editor.org/rfc/rfc8259; D. Lemire, Number Parsing at a Gigabyte per Second,
https://arxiv.org/abs/2101.11408
"""

import numpy as np

from tallystick.codec.bytes_kernels import (
    bytes_at,
    inlined_kernel,
    inner_kernel,
    is_utf8,
    leading_zeros,
    load8,
    load64,
    multiply_high,
    store8,
    trailing_zeros,
)

PARSED, UNSURE, SUSPECT = range(3)
"""Verdicts on a token or a record."""

QUOTE, BACKSLASH, COMMA, COLON, MINUS = 0x22, 0x5C, 0x2C, 0x3A, 0x2D
OPEN, CLOSE, OPEN_LIST, CLOSE_LIST = 0x7B, 0x7D, 0x5B, 0x5D
ZERO, NINE = 0x30, 0x39
PLUS, POINT, LETTER_E, _U = 0x2B, 0x2E, 0x65, 0x75


def text_word(text: bytes) -> np.uint64:
    """Return eight bytes of text as `peek` reads them from a record."""
    return np.uint64(int.from_bytes(text, "little"))


_ONES = np.uint64(0x0101010101010101)
TOPS = np.uint64(0x8080808080808080)
LOWS = np.uint64(0x7F7F7F7F7F7F7F7F)
_QUOTES = np.uint64(0x0101010101010101 * QUOTE)
_BACKSLASHES = np.uint64(0x0101010101010101 * BACKSLASH)
_SPACES = np.uint64(0x0101010101010101 * 0x20)
_ZEROS = np.uint64(0x0101010101010101 * ZERO)
OVER_NINE = np.uint64(0x0101010101010101 * (0x80 - 10))

_DIGITS_MAX = 19
"""This many always fit into 64 bits."""
_POWERS = 10 ** np.arange(9, dtype=np.uint64)
_EXACT_POWERS = np.array([float(10**exponent) for exponent in range(23)])
"""The powers of ten that are a double."""
_MANTISSA_MAX = np.uint64(2**53)
_EXPONENT_MIN, _EXPONENT_MAX = -280, 280
"""With at most 19 digits before it: far from subnormal numbers and from infinity."""


def _five_to(exponent: int) -> int:
    """Return the first 128 bits of a power of five, as Lemire's paper has them."""
    if exponent >= 0:
        power: int = 5**exponent
        surplus = power.bit_length() - 128
        return power >> surplus if surplus > 0 else power << -surplus
    power = 5**-exponent
    above: int = 2 ** (power.bit_length() + 127)
    if exponent >= -27:
        return above // power + 1
    inverse = (above << power.bit_length() + 1) // power + 1
    return inverse >> (inverse.bit_length() - 128)


_FIVES = np.array(
    [divmod(_five_to(exponent), 2**64) for exponent in range(_EXPONENT_MIN, _EXPONENT_MAX + 1)],
    np.uint64,
)
"""High and low 64 bits."""

_ESCAPED = np.zeros(256, np.uint8)
"""The meaning of a letter after a backslash; 0: none."""
for _letter, _byte in zip(b'"\\/bfnrt', b'"\\/\b\f\n\r\t', strict=True):
    _ESCAPED[_letter] = _byte


@inlined_kernel
def byte_at(at, end):  # type: ignore[no-untyped-def]
    """Return the byte of a record at an address; 0 after the record's end."""
    return np.int64(load8(at)) if at < end else np.int64(0)


@inner_kernel
def _peek_at_end(at, begin, end):  # type: ignore[no-untyped-def]
    """See `peek`: fewer than eight bytes are left."""
    if at >= end:
        return np.uint64(0)
    if end - 8 >= begin:
        return load64(end - 8) >> np.uint64(8 * (at + 8 - end))
    word = np.uint64(0)
    for place in range(at, end):
        word |= load8(place) << np.uint64(8 * (place - at))
    return word


@inlined_kernel
def peek(at, begin, end):  # type: ignore[no-untyped-def]
    """Return eight bytes of a record, the first lowest; 0 after the record's end."""
    return load64(at) if at + 8 <= end else _peek_at_end(at, begin, end)


@inlined_kernel
def after_space(at, end):  # type: ignore[no-untyped-def]
    """Return the address of the next byte that is no white space."""
    while at < end:
        byte = np.int64(load8(at))
        if byte > 0x20 or not (byte == 0x20 or byte == 0x0A or byte == 0x0D or byte == 0x09):
            break
        at += 1
    return at


@inlined_kernel
def string_end(at, begin, end):  # type: ignore[no-untyped-def]
    """Return the place of the closing quote, from the text's first byte; UNSURE: it has escapes."""
    start = at
    high = np.uint64(0)
    while True:
        word = peek(at, begin, end)
        quote = word ^ _QUOTES
        backslash = word ^ _BACKSLASHES
        # Top bits mark quotes, backslashes and controls; only the lowest mark is to be trusted.
        stops = (quote - _ONES) & ~quote
        stops |= (backslash - _ONES) & ~backslash
        stops |= (word - _SPACES) & ~word
        stops &= TOPS
        if stops != np.uint64(0):
            break
        high |= word
        at += 8
    zeros = trailing_zeros(stops)
    high |= word & ((np.uint64(1) << zeros) - np.uint64(1))
    at += np.int64(zeros >> np.uint64(3))
    byte = byte_at(at, end)
    if byte != QUOTE:
        return np.int64(-UNSURE if byte == BACKSLASH else -SUSPECT)
    if high & TOPS != np.uint64(0) and not is_utf8(bytes_at(start, at - start), 0, at - start):
        return np.int64(-SUSPECT)
    return at


@inner_kernel
def hex4(at, end):  # type: ignore[no-untyped-def]
    """Return the number of four hexadecimal digits; -1: other characters."""
    value = np.int64(0)
    for place in range(at, at + 4):
        byte = byte_at(place, end)
        letter = byte | 0x20
        if ZERO <= byte <= NINE:
            value = 16 * value + byte - ZERO
        elif 0x61 <= letter <= 0x66:
            value = 16 * value + letter - 0x61 + 10
        else:
            return np.int64(-1)
    return value


@inner_kernel
def _put_utf8(code, target):  # type: ignore[no-untyped-def]
    """Write a code point in UTF-8; return the address after its bytes."""
    if code < 0x80:
        store8(target, np.uint64(code))
        return target + 1
    more = 1 if code < 0x800 else 2 if code < 0x10000 else 3
    lead = 0xC0 if more == 1 else 0xE0 if more == 2 else 0xF0
    store8(target, np.uint64(lead | (code >> (6 * more))))
    for index in range(more):
        bits = (code >> (6 * (more - 1 - index))) & 0x3F
        store8(target + 1 + index, np.uint64(0x80 | bits))
    return target + 1 + more


@inner_kernel
def unescape(at, end, target, limit):  # type: ignore[no-untyped-def]
    """Write the text of a string with escapes, from its first byte.

    Args:
        at: the first byte of the text.
        end: of the record.
        target: the address to write to.
        limit: the end of the room to write to.

    Returns:
        (the address of the closing quote, the address after the written text).
    """
    start = at
    if limit - target < end - at:  # no text gets longer by this
        return np.int64(-UNSURE), target
    while True:
        byte = byte_at(at, end)
        if byte == QUOTE:
            break
        if byte < 0x20:
            return np.int64(-SUSPECT), target
        if byte != BACKSLASH:
            store8(target, np.uint64(byte))
            target += 1
            at += 1
            continue
        letter = byte_at(at + 1, end)
        if letter != _U:
            if _ESCAPED[letter] == 0:
                return np.int64(-SUSPECT), target
            store8(target, np.uint64(_ESCAPED[letter]))
            target += 1
            at += 2
            continue
        code = hex4(at + 2, end)
        at += 6
        if 0xD800 <= code < 0xDC00 and byte_at(at, end) == BACKSLASH:
            low = hex4(at + 2, end) if byte_at(at + 1, end) == _U else np.int64(-1)
            if 0xDC00 <= low < 0xE000:
                code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
                at += 6
        if code < 0 or 0xD800 <= code < 0xE000:
            return np.int64(-SUSPECT), target
        target = _put_utf8(code, target)
    if not is_utf8(bytes_at(start, at - start), 0, at - start):
        return np.int64(-SUSPECT), target
    return at, target


@inlined_kernel
def digits(value, at, begin, end):  # type: ignore[no-untyped-def]
    """(`value` with the digits at `at` appended, the address after them); reads eight at a time."""
    while True:
        word = peek(at, begin, end) ^ _ZEROS
        others = (((word & LOWS) + OVER_NINE) | word) & TOPS
        if others == np.uint64(0):
            count = np.int64(8)
        else:
            count = np.int64(trailing_zeros(others) >> np.uint64(3))
            if count == 0:
                return value, at
        word <<= np.uint64(64 - 8 * count)
        word = word * np.uint64(10) + (word >> np.uint64(8))
        low = (word & np.uint64(0x000000FF000000FF)) * np.uint64(0x000F424000000064)
        word = (word >> np.uint64(16)) & np.uint64(0x000000FF000000FF)
        word = (low + word * np.uint64(0x0000271000000001)) >> np.uint64(32)
        value = value * _POWERS[count] + word
        at += count
        if count < 8:
            return value, at


@inlined_kernel
def number(at, begin, end):  # type: ignore[no-untyped-def]
    """Read a number, sign apart, as mantissa times a power of ten.

    Returns:
        (mantissa, exponent, whether it is spelled as an integer, the address after it).
    """
    mantissa, exponent = np.uint64(0), np.int64(0)
    if byte_at(at, end) == MINUS:
        at += 1
    first = byte_at(at, end)
    mantissa, after = digits(mantissa, at, begin, end)
    count = after - at
    if count == 0:  # -Infinity, maybe
        return mantissa, exponent, False, np.int64(-UNSURE)
    if first == ZERO and count > 1:
        return mantissa, exponent, False, np.int64(-SUSPECT)
    is_whole = True
    byte = byte_at(after, end)
    if byte == POINT:
        is_whole = False
        at = after + 1
        mantissa, after = digits(mantissa, at, begin, end)
        exponent = at - after
        count -= exponent
        if exponent == 0:
            return mantissa, exponent, False, np.int64(-SUSPECT)
        if count > _DIGITS_MAX and first == ZERO:
            count -= 1
            while byte_at(at, end) == ZERO:  # up to another digit, or all of them count for 0
                count -= 1
                at += 1
        byte = byte_at(after, end)
    if byte | 0x20 == LETTER_E:
        is_whole = False
        at = after + 1
        sign = byte_at(at, end)
        if sign in (MINUS, PLUS):
            at += 1
        power, after = digits(np.uint64(0), at, begin, end)
        if after == at:
            return mantissa, exponent, False, np.int64(-SUSPECT)
        if after - at > 4:
            return mantissa, exponent, False, np.int64(-UNSURE)
        exponent += -np.int64(power) if sign == MINUS else np.int64(power)
    if count > _DIGITS_MAX or exponent < _EXPONENT_MIN or exponent > _EXPONENT_MAX:
        return mantissa, exponent, False, np.int64(-UNSURE)
    return mantissa, exponent, is_whole, np.int64(after)


@inner_kernel
def _to_double_by_fives(mantissa, exponent):  # type: ignore[no-untyped-def]
    """See `to_double`: by the first 128 bits of the power of five."""
    if mantissa == np.uint64(0):
        return np.float64(0), True
    zeros = leading_zeros(mantissa)
    scaled = mantissa << zeros
    high = multiply_high(scaled, _FIVES[exponent - _EXPONENT_MIN, 0])
    low = scaled * _FIVES[exponent - _EXPONENT_MIN, 0]
    if high & np.uint64(0x1FF) == np.uint64(0x1FF):
        more = multiply_high(scaled, _FIVES[exponent - _EXPONENT_MIN, 1])
        low += more
        if low < more:
            high += np.uint64(1)
        if low == np.uint64(2**64 - 1):
            return np.float64(0), False
    upper = high >> np.uint64(63)
    shift = upper + np.uint64(9)
    bits = high >> shift
    halfway = low <= np.uint64(1) and exponent >= -4 and exponent <= 23
    if halfway and bits & np.uint64(3) == np.uint64(1) and bits << shift == high:
        bits &= ~np.uint64(1)
    bits = (bits + (bits & np.uint64(1))) >> np.uint64(1)
    power = ((217706 * exponent) >> 16) + 63 + np.int64(upper) - np.int64(zeros) + 1023
    # A carry out of the 53 bits goes where it belongs: into the exponent.
    return np.uint64((np.uint64(power - 1) << np.uint64(52)) + bits).view(np.float64), True


@inlined_kernel
def to_double(mantissa, exponent):  # type: ignore[no-untyped-def]
    """(the double next to mantissa * 10 ** exponent, whether that is certain)."""
    if mantissa <= _MANTISSA_MAX and exponent >= -22 and exponent <= 22:
        value = np.float64(mantissa)
        if exponent < 0:
            return value / _EXACT_POWERS[-exponent], True
        return value * _EXACT_POWERS[exponent], True
    return _to_double_by_fives(mantissa, exponent)


# ---- values without a column ---------------------------------------------------------------------

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
    is_text = is_utf8(bytes_at(start, at - start), 0, at - start)
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
