"""Dates and times of JSON texts, compiled by numba.

RFC 3339, and the forms of ISO 8601 that other writers make: a space for the T, no seconds, no
minutes, an offset without a colon; PostgreSQL's hours alone as an offset, after a space only, as
RFC 3339 wants minutes. A fraction is cut to microseconds, as Spark does. A leap second, 23:59:60 in
UTC, is the second before it, as in java.time.

Source: https://www.rfc-editor.org/rfc/rfc3339#section-5.6
"""

import numba
import numpy as np

from tallystick.codec.json_token_kernels import (
    COLON,
    LOWS,
    MINUS,
    NINE,
    OVER_NINE,
    PLUS,
    POINT,
    TOPS,
    ZERO,
    byte_at,
    text_word,
)
from tallystick.codec.memory import inlined_kernel, inner_kernel, load8, load64, put_word

_BIG_T, _BIG_Z, _SPACE = 0x54, 0x5A, 0x20
_DATE_ZEROS, _DATE_SEPARATORS = text_word(b"0000-00-"), text_word(b"\0\0\0\0\xff\0\0\xff")
_DATE_TAIL_ZEROS = text_word(b"00-00-00")
_TIME_ZEROS, _TIME_SEPARATORS = text_word(b"00:00:00"), text_word(b"\0\0\xff\0\0\xff\0\0")
_DATE_TAIL_SEPARATORS = _TIME_SEPARATORS
_MONTH_DAYS = np.array([0, 31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31, 0, 0, 0])


@inlined_kernel
def _digits_apart(at, zeros, separators):  # type: ignore[no-untyped-def]
    """(eight digits as bytes, whether they are digits and separators as in `zeros`)."""
    word = load64(at) ^ zeros
    others = (((word & LOWS) + OVER_NINE) | word) & TOPS
    return word, others | (word & separators) == np.uint64(0)


@inlined_kernel
def _pair(word):  # type: ignore[no-untyped-def]
    """Return the number of the first two of the digits."""
    high = word & np.uint64(0xF)
    low = (word >> np.uint64(8)) & np.uint64(0xF)
    return np.int64(high * np.uint64(10) + low)


@inlined_kernel
def to_days(at, size):  # type: ignore[no-untyped-def]
    """(days since 1970 of a text that begins YYYY-MM-DD, whether the date is valid)."""
    if size < 10:
        return np.int64(0), False
    word, is_good = _digits_apart(at, _DATE_ZEROS, _DATE_SEPARATORS)
    # The last eight bytes are read too, for the day: their other digits are known by now.
    tail, is_tail = _digits_apart(at + 2, _DATE_TAIL_ZEROS, _DATE_TAIL_SEPARATORS)
    year, month, day = (
        100 * _pair(word) + _pair(word >> np.uint64(16)),
        _pair(word >> np.uint64(40)),
        _pair(tail >> np.uint64(48)),
    )
    is_good = is_good and is_tail and 1 <= month <= 12 and 1 <= day <= _MONTH_DAYS[month & 15]
    if day == 29 and month == 2:
        is_good = is_good and year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    # Years that begin in March, so that the leap day is the last one.
    since = year if month > 2 else year - 1
    in_year = (153 * (month - 3 if month > 2 else month + 9) + 2) // 5 + day - 1
    days = 365 * since + (since >> 2) - since // 100 + since // 400 + in_year - 719_468
    return days, is_good


@inner_kernel
def _two_digits(at, end):  # type: ignore[no-untyped-def]
    """(the number of two digits, 99: no digits; the address after the digits)."""
    high, low = byte_at(at, end), byte_at(at + 1, end)
    if ZERO <= high <= NINE and ZERO <= low <= NINE:
        return 10 * (high - ZERO) + low - ZERO, at + 2
    return np.int64(99), at


@inner_kernel
def _fraction(at, end):  # type: ignore[no-untyped-def]
    """(the microseconds of the digits after a point, the address after them)."""
    micros, unit = np.int64(0), np.int64(100_000)
    while ZERO <= byte_at(at, end) <= NINE:
        micros += unit * (byte_at(at, end) - ZERO)
        unit //= 10
        at += 1
    return micros, at


@inner_kernel
def _offset(at, end, hours_alone):  # type: ignore[no-untyped-def]
    """(minutes that a zone is ahead of UTC, whether such a zone can be, the address after it)."""
    sign = byte_at(at, end)
    if sign | 0x20 == _BIG_Z | 0x20:
        return np.int64(0), True, at + 1
    if sign != PLUS and sign != MINUS:
        return np.int64(0), True, at
    hours, at = _two_digits(at + 1, end)
    minutes = np.int64(0)
    if byte_at(at, end) == COLON:
        minutes, at = _two_digits(at + 1, end)
    elif at < end or not hours_alone:
        minutes, at = _two_digits(at, end)
    total = 60 * hours + minutes
    return -total if sign == MINUS else total, hours < 24 and minutes < 60, at


@inner_kernel
def _odd_time(at, end):  # type: ignore[no-untyped-def]
    """(microseconds from a day's start, in UTC, of the text after a date; whether it is a time)."""
    separator = byte_at(at, end)
    is_good = separator == _SPACE or separator | 0x20 == _BIG_T | 0x20
    hour, at = _two_digits(at + 1, end)
    minute = second = fraction = np.int64(0)
    if byte_at(at, end) == COLON:
        minute, at = _two_digits(at + 1, end)
        if byte_at(at, end) == COLON:
            second, at = _two_digits(at + 1, end)
            if byte_at(at, end) == POINT:
                first = at + 1
                fraction, at = _fraction(first, end)
                is_good = is_good and at > first
    offset, is_zone, at = _offset(at, end, separator == _SPACE)
    minutes = 60 * hour + minute - offset
    if second == 60 and minutes % 1440 == 1439:
        second = np.int64(59)
    is_good = is_good and is_zone and hour < 24 and minute < 60 and second < 60 and at == end
    return (60 * minutes + second) * 1_000_000 + fraction, is_good


@inlined_kernel
def to_micros(at, size):  # type: ignore[no-untyped-def]
    """(microseconds since 1970 of a text, whether it is a date, or a date and a time)."""
    days, is_good = to_days(at, size)
    micros = days * 86_400_000_000
    if size == 10 or not is_good:
        return micros, is_good
    end = at + size
    if size >= 19:  # the usual form is read at once: HH:MM:SS, maybe a fraction, maybe Z
        word, is_good = _digits_apart(at + 11, _TIME_ZEROS, _TIME_SEPARATORS)
        hour, minute = _pair(word), _pair(word >> np.uint64(24))
        second = _pair(word >> np.uint64(48))
        is_good = is_good and hour < 24 and minute < 60 and second < 60
        separator = np.int64(load8(at + 10))
        is_good = is_good and separator in (_BIG_T, _SPACE)
        place = at + 19
        fraction = np.int64(0)
        if byte_at(place, end) == POINT:
            fraction, place = _fraction(place + 1, end)
            is_good = is_good and np.int64(load8(place - 1)) != POINT
        if byte_at(place, end) == _BIG_Z:
            place += 1
        if is_good and place == end:
            return micros + (hour * 3600 + minute * 60 + second) * 1_000_000 + fraction, True
    in_day, is_good = _odd_time(at + 10, end)
    return micros + in_day, is_good


@numba.njit(cache=True, nogil=True, error_model="numpy")
def read_times(address, starts, lengths, out):  # type: ignore[no-untyped-def]
    """Read texts as microseconds since 1970; return the first row that is no time, -1: none.

    Args:
        address: the start of the data, from which `starts` count.
        starts: where each text begins.
        lengths: bytes, -1 for null.
        out: the address of as many int64.
    """
    for row in range(len(starts)):
        if lengths[row] < 0:
            continue
        micros, is_good = to_micros(np.int64(address + starts[row]), np.int64(lengths[row]))
        if not is_good:
            return row
        put_word(out, row, micros)
    return -1
