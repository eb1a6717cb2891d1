"""The loops over flat JSON records and over texts of times, compiled by numba.

A record is read here only if the result is certain to be that of Arrow's parser. Where it is not
certain, nothing is decided: Arrow reads that record (see `json.read`).

Everything is an address (see `bytes_kernels`). A field is a run of numbers (see KIND); the fields
stand one after another, and after the last field a sentinel, from which each record starts.

Invariant: a slot is null until its byte of validity is set, and null again when its record is
given up. A position below 0 is a verdict, negated; nothing is read after it.

Dates and times are RFC 3339, and the forms of ISO 8601 that other writers make: a space for the T,
no seconds, no minutes, an offset without a colon; PostgreSQL's hours alone as an offset, after a
space only, as RFC 3339 wants minutes. A fraction is cut to microseconds, as Spark does. A leap
second, 23:59:60 in UTC, is the second before it, as in java.time.

Source of times: https://www.rfc-editor.org/rfc/rfc3339#section-5.6
"""

import numba
import numpy as np

from tallystick.codec.bytes_kernels import (
    inlined_kernel,
    inner_kernel,
    load8,
    load64,
    put_word,
    store8,
    store16,
    store32,
    store64,
    word_at,
)
from tallystick.codec.json.token_kernels import (
    CLOSE,
    COLON,
    COMMA,
    LOWS,
    MINUS,
    NINE,
    OPEN,
    OVER_NINE,
    PARSED,
    PLUS,
    POINT,
    QUOTE,
    SUSPECT,
    TOPS,
    UNSURE,
    ZERO,
    after_colon,
    after_space,
    byte_at,
    ignored,
    number,
    peek,
    string_end,
    text_word,
    to_double,
    unescape,
)

(BOOLEAN, INTEGER, FLOAT, DOUBLE, STRING, DATE, TIMESTAMP) = range(7)
"""The kinds of fields."""

(KIND, WIDTH, LIMIT, VALUES, LENGTHS, VALID, NAME) = range(7)
(WORDS, MASK, SIZE, CHAIN, SEEN, FOLLOWER) = range(7, 13)
"""The numbers of a field.

WIDTH is the bytes of an integer's slot, LIMIT the greatest one. VALUES, LENGTHS (of strings) and
VALID are addresses of slots. NAME is the address of the name with its closing quote: WORDS words,
of which the last counts only under MASK; SIZE is its length without the quote. CHAIN is the next
field of the same `name_hash`. SEEN is the number, plus 1, of the last row with the field, FOLLOWER
the field that came after it then.
"""
FIELD_SIZE = 128

HASHES = 64
SPARE, SPARE_END = HASHES, HASHES + 1
"""The state: the first field of each `name_hash`, then where the spare bytes begin and end, which
take the strings that had escapes. As many bytes as all records have are enough."""

UNSURE_FREE = 256
"""The number of records that may be UNSURE before their share counts."""

_TRUE = np.uint64(int.from_bytes(b"true", "little"))
_NULL = np.uint64(int.from_bytes(b"null", "little"))
_FALSE = np.uint64(int.from_bytes(b"false", "little"))
_FOUR_BYTES = np.uint64(0xFFFFFFFF)
_FIVE_BYTES = np.uint64(0xFFFFFFFFFF)
_FLOAT_MIN, _FLOAT_MAX = 2.0**-126, 2.0**127
_BELOW_FLOAT = np.uint64(2**29 - 1)
_HALF_OF_FLOAT = np.uint64(2**28)

_kernel = numba.njit(cache=True, nogil=True, error_model="numpy")
_merged = numba.njit(nogil=True, error_model="numpy", inline="always")
"""Compiles a function into its only caller, as if written there: it is optimised once less."""


@_kernel
def name_hash(first, last, size):  # type: ignore[no-untyped-def]
    """Return the chain of a name, by its first and last byte and its length."""
    return (first + 31 * last + 7 * size) & (HASHES - 1)


@inlined_kernel
def _matches(field, at, begin, end):  # type: ignore[no-untyped-def]
    """True if the key with its text at `at` is the field's name."""
    name = word_at(field, NAME)
    last = 8 * (word_at(field, WORDS) - 1)
    for place in range(0, last, 8):
        if peek(at + place, begin, end) != load64(name + place):
            return False
    return peek(at + last, begin, end) & np.uint64(word_at(field, MASK)) == load64(name + last)


@inner_kernel
def _find(at, close, begin, end, state):  # type: ignore[no-untyped-def]
    """Return the field of a key's text, 0 if no such field was declared."""
    size = close - at
    last = byte_at(close - 1, end) if size > 0 else np.int64(0)
    field = word_at(state, name_hash(byte_at(at, end), last, size))
    while field != 0 and not (word_at(field, SIZE) == size and _matches(field, at, begin, end)):
        field = word_at(field, CHAIN)
    return field


@inlined_kernel
def _key(before, at, begin, end, state):  # type: ignore[no-untyped-def]
    """(the field of the key with its text at `at`, 0: not declared; the key's closing quote)."""
    field = word_at(before, FOLLOWER)
    if _matches(field, at, begin, end):
        return field, at + word_at(field, SIZE)
    close = string_end(at, begin, end)
    if close < 0:
        return field, close
    field = _find(at, close, begin, end, state)
    if field != 0:
        put_word(before, FOLLOWER, field)
    return field, close


@inlined_kernel
def _string(at, begin, end, state):  # type: ignore[no-untyped-def]
    """(where the text begins, its length, the address after the closing quote)."""
    close = string_end(at, begin, end)
    if close != -UNSURE:
        return at, close - at, close if close < 0 else close + 1
    target = word_at(state, SPARE)
    close, after = unescape(at, end, target, word_at(state, SPARE_END))
    put_word(state, SPARE, after)
    return target, after - target, close if close < 0 else close + 1


@inlined_kernel
def _literal(at, begin, end):  # type: ignore[no-untyped-def]
    """(0 false, 1 true, -1 null; the address after it)."""
    word = peek(at, begin, end)
    if word & _FOUR_BYTES == _NULL:
        return np.int64(-1), at + 4
    if word & _FOUR_BYTES == _TRUE:
        return np.int64(1), at + 4
    if word & _FIVE_BYTES == _FALSE:
        return np.int64(0), at + 5
    return np.int64(0), np.int64(-UNSURE)  # NaN, maybe


@inlined_kernel
def _put_integer(field, row, mantissa, negative):  # type: ignore[no-untyped-def]
    """Write an integer into its slot; False: the field's type cannot hold the number."""
    if mantissa > np.uint64(word_at(field, LIMIT)) + np.uint64(negative):
        return False
    value = np.uint64(0) - mantissa if negative else mantissa
    width = word_at(field, WIDTH)
    place = word_at(field, VALUES) + width * row
    if width == 8:
        store64(place, value)
    elif width == 4:
        store32(place, value)
    elif width == 2:
        store16(place, value)
    else:
        store8(place, value)
    return True


@inner_kernel
def _put_float(field, kind, row, mantissa, exponent, negative):  # type: ignore[no-untyped-def]
    """Write a float or double into its slot; False: the nearest one is not certain."""
    value, is_certain = to_double(mantissa, exponent)
    if kind == FLOAT:
        # From the double next to it, a float is the nearest one unless that double is halfway
        # between two floats; and floats that are subnormal have fewer bits.
        below = np.float64(value).view(np.uint64) & _BELOW_FLOAT
        is_zero = mantissa == np.uint64(0)
        in_range = is_zero or (value >= _FLOAT_MIN and value < _FLOAT_MAX)
        is_certain = is_certain and in_range and below != _HALF_OF_FLOAT
        if is_certain:
            single = np.float32(-value if negative else value)
            store32(word_at(field, VALUES) + 4 * row, np.uint64(single.view(np.uint32)))
    elif is_certain:
        value = -value if negative else value
        store64(word_at(field, VALUES) + 8 * row, np.float64(value).view(np.uint64))
    return is_certain


@inlined_kernel
def _number_value(field, kind, row, at, begin, end):  # type: ignore[no-untyped-def]
    if kind != INTEGER and kind != FLOAT and kind != DOUBLE:
        return np.int64(-SUSPECT)
    negative = byte_at(at, end) == MINUS
    mantissa, exponent, is_whole, after = number(at, begin, end)
    if after < 0:
        return after
    if kind == INTEGER:
        if not is_whole or not _put_integer(field, row, mantissa, negative):
            return np.int64(-SUSPECT)
    elif not _put_float(field, kind, row, mantissa, exponent, negative):
        return np.int64(-UNSURE)
    store8(word_at(field, VALID) + row, np.uint64(1))
    return after


@inlined_kernel
def _string_value(field, kind, row, at, begin, end, state):  # type: ignore[no-untyped-def]
    if kind != STRING and kind != DATE and kind != TIMESTAMP:
        return np.int64(-SUSPECT)
    text, size, after = _string(at + 1, begin, end, state)
    if after < 0:
        return after
    if kind == STRING:
        put_word(word_at(field, VALUES), row, text)
        store32(word_at(field, LENGTHS) + 4 * row, np.uint64(size))
    elif kind == TIMESTAMP:
        micros, is_good = to_micros(text, size)
        if not is_good:
            return np.int64(-SUSPECT)
        put_word(word_at(field, VALUES), row, micros)
    else:
        days, is_good = to_days(text, size)
        if not is_good or size != 10:
            return np.int64(-UNSURE)
        store32(word_at(field, VALUES) + 4 * row, np.uint64(days))
    store8(word_at(field, VALID) + row, np.uint64(1))
    return after


@inlined_kernel
def _value(field, row, at, begin, end, state):  # type: ignore[no-untyped-def]
    """Read a declared field's value into its slot; return the address after the value."""
    if word_at(field, SEEN) == row + 1:
        return np.int64(-SUSPECT)
    put_word(field, SEEN, row + 1)
    kind = word_at(field, KIND)
    byte = byte_at(at, end)
    if byte == QUOTE:
        return _string_value(field, kind, row, at, begin, end, state)
    if byte == MINUS or ZERO <= byte <= NINE:
        return _number_value(field, kind, row, at, begin, end)
    if byte | 0x20 == OPEN:  # or OPEN_LIST
        return np.int64(-SUSPECT)
    value, after = _literal(at, begin, end)
    if after >= 0 and value >= 0:
        if kind != BOOLEAN:
            return np.int64(-SUSPECT)
        store8(word_at(field, VALUES) + row, np.uint64(value))
        store8(word_at(field, VALID) + row, np.uint64(1))
    return after


@_merged
def _record(row, begin, end, last_field, state):  # type: ignore[no-untyped-def]
    """Read a record's values into slots; return the address after the record."""
    at = after_space(begin, end)
    if byte_at(at, end) != OPEN:
        return np.int64(-SUSPECT)
    at = after_space(at + 1, end)
    if byte_at(at, end) == CLOSE:
        return after_space(at + 1, end)
    before = last_field
    while byte_at(at, end) == QUOTE:
        field, close = _key(before, at + 1, begin, end, state)
        at = close if close < 0 else after_colon(close, end)
        if at < 0:
            return at
        if field == 0:
            at = ignored(at, begin, end)
        else:
            before = field
            at = _value(field, row, at, begin, end, state)
        if at < 0:
            return at
        at = after_space(at, end)
        byte = byte_at(at, end)
        at = after_space(at + 1, end)
        if byte == CLOSE:
            return at
        if byte != COMMA:
            break
    return np.int64(-SUSPECT)


@_kernel
def parse_records(  # type: ignore[no-untyped-def]
    address, size, starts, lengths, fields, last_field, state, verdicts
):
    """Read records into slots; if most of them are UNSURE, so are all the rest.

    Args:
        address: the start of the data, from which `starts` count.
        size: the bytes of the data.
        starts: where each record begins.
        lengths: bytes, -1 for null, whose slots stay null.
        fields: the address of the first field.
        last_field: the address of the sentinel after the last field.
        state: an address; see SPARE.
        verdicts: gets PARSED, UNSURE or SUSPECT for each record.

    Returns:
        0, or -1 where a record is not within the bytes.
    """
    unsure = 0
    for row in range(len(starts)):
        if unsure > UNSURE_FREE + row // 2:
            verdicts[row:] = UNSURE
            break
        if lengths[row] < 0:
            verdicts[row] = PARSED
            continue
        if starts[row] < 0 or starts[row] + lengths[row] > size:
            return -1
        begin = np.int64(address + starts[row])
        end = np.int64(begin + lengths[row])
        at = _record(row, begin, end, last_field, state)
        if at == end:
            verdicts[row] = PARSED
            continue
        verdicts[row] = min(-at, SUSPECT) if at < 0 else SUSPECT
        unsure += verdicts[row] == UNSURE
        for field in range(fields, last_field, FIELD_SIZE):
            store8(word_at(field, VALID) + row, np.uint64(0))
    return 0


# ---- times ---------------------------------------------------------------------------------------

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
