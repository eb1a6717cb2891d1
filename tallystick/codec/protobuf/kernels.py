"""The loops that read and write Protobuf messages, bytes from and to slots, compiled by numba.

One call reads or writes one type of message, many of them: the messages inside them are bytes to
it, read by a call of their own afterwards, or written before. So there is no stack, however deep a
type is nested.

Invariants
    Every read is checked against the end of its message; writes go where sizes were counted.
    A position below 0 is a problem's code, negated; nothing is read after it.
    Only addresses go from function to function: an array would have its references counted, which
    costs more than a short message.

Source of the format: https://protobuf.dev/programming-guides/encoding/
"""

import numba
import numpy as np

from tallystick.codec.bytes_kernels import (
    copy,
    inlined_kernel,
    inner_kernel,
    is_text,
    load8,
    load32,
    load64,
    put_word,
    store8,
    store32,
    store64,
    word_at,
)

(INT32, INT64, UINT32, UINT64, SINT32, SINT64, BOOL, ENUM) = range(8)
(FIXED32, SFIXED32, FLOAT, FIXED64, SFIXED64, DOUBLE) = range(8, 14)
(BYTES, STRING, MESSAGE, GROUPED) = range(14, 18)
"""Kinds of fields, in the order of their wire types: varint, 4 bytes, 8 bytes, bytes, group."""

VARINT, EIGHT_BYTES, SIZED, GROUP, GROUP_END, FOUR_BYTES = range(6)
"""Wire types."""

(TRUNCATED, VARINT_TOO_LONG, NO_FIELD, WIRE_TYPE, GROUP_OPEN, NOT_UTF8, PACKED_SIZE) = range(1, 8)
TAG_TOO_LONG = 8
"""Problems of a message."""

NUMBER, KIND, IS_LIST, HAS_PRESENCE, IS_PACKED, ONEOF, SYMBOLS, SYMBOL_COUNT = range(8)
"""The numbers of a field. IS_LIST: it may be there many times; HAS_PRESENCE: absent is no value.
ONEOF is the oneof that it is a member of, -1 for none. SYMBOLS is the address of the numbers of a
closed enum, ascending, and SYMBOL_COUNT how many; 0: any number will do.
"""
VALUES, SIZES, ORDER, COUNTS, ITEMS, ITEM_SIZES, CURSOR = range(8, 15)
"""The addresses of a field's slots, an int64 per message: the number, a float's bits, or the
address of its bytes; how many bytes; 0 absent, else the place of its last occurrence; how often it
is there, since it last became absent. Then the addresses to write the value and the size of every
occurrence to, 0: only count. CURSOR gets how many occurrences were written; if they are only
counted, how many there were, with those that another member of their oneof made absent.
"""
FIELD_WORDS = 16
FIELD_SIZE = 8 * FIELD_WORDS

VARINT_SIZE_MAX = 10
TAG_SIZE_MAX = 5
"""The most bytes of a tag, in Google's readers too."""
GROUPS_MAX = 100
"""The depth of groups in groups; others' readers allow as much."""
INDEXES_MAX = 33
"""The most numbers that say which type a message is of, their count among them."""
_kernel = numba.njit(cache=True, nogil=True, error_model="numpy")


@inlined_kernel
def _varint(at, end):  # type: ignore[no-untyped-def]
    """(value, address after it); instead of the address a negated problem when it is none."""
    if at < end and load8(at) < np.uint64(0x80):
        return load8(at), at + 1
    return _long_varint(at, end)


@inner_kernel
def _long_varint(at, end):  # type: ignore[no-untyped-def]
    value = np.uint64(0)
    for index in range(VARINT_SIZE_MAX):
        if at >= end:
            return value, np.int64(-TRUNCATED)
        byte = load8(at)
        at += 1
        value |= (byte & np.uint64(0x7F)) << np.uint64(7 * index)
        if byte < np.uint64(0x80):
            return value, np.int64(at)
    return value, np.int64(-VARINT_TOO_LONG)


@inlined_kernel
def _wire_type(kind):  # type: ignore[no-untyped-def]
    if kind <= ENUM:
        return VARINT
    if kind <= FLOAT:
        return FOUR_BYTES
    if kind == GROUPED:
        return GROUP
    return EIGHT_BYTES if kind <= DOUBLE else SIZED


@inner_kernel
def _skip(wire, at, end):  # type: ignore[no-untyped-def]
    """Return the address after a value without fields of its own."""
    if wire == VARINT:
        return _varint(at, end)[1]
    size = np.uint64(4 if wire == FOUR_BYTES else 8)
    if wire == SIZED:
        size, at = _varint(at, end)
    if at >= 0 and size > np.uint64(end - at):
        return np.int64(-TRUNCATED)
    return at if at < 0 else at + np.int64(size)


@inlined_kernel
def _tag(at, end):  # type: ignore[no-untyped-def]
    """(field number, wire type, address after it)."""
    begin = at
    tag, at = _varint(at, end)
    if at > begin + TAG_SIZE_MAX or at == -VARINT_TOO_LONG:
        at = np.int64(-TAG_TOO_LONG)
    elif at >= 0 and (tag < np.uint64(8) or tag >= np.uint64(2**32)):
        at = np.int64(-NO_FIELD)
    elif at >= 0 and (tag & np.uint64(7)) > np.uint64(FOUR_BYTES):
        at = np.int64(-WIRE_TYPE)
    return np.int64(tag >> np.uint64(3)), np.int64(tag & np.uint64(7)), at


@inner_kernel
def _skip_group(number, at, end):  # type: ignore[no-untyped-def]
    """Return the address after a group: an old way of nesting, which no field asked for has."""
    open_groups = np.zeros(GROUPS_MAX, np.int64)
    open_groups[0] = number
    depth = 1
    while at >= 0 and depth > 0:
        number, wire, at = _tag(at, end)
        if at < 0:
            break
        if wire == GROUP:
            if depth == GROUPS_MAX:
                return np.int64(-GROUP_OPEN)
            open_groups[depth] = number
            depth += 1
        elif wire == GROUP_END:
            depth -= 1
            if open_groups[depth] != number:
                return np.int64(-GROUP_OPEN)
        else:
            at = _skip(wire, at, end)
    return at


@inner_kernel
def _scalar(kind, at, end):  # type: ignore[no-untyped-def]
    """(value as int64, address after it) of a number; floats as their bits."""
    if kind <= ENUM:
        value, at = _varint(at, end)
        if kind in (UINT64, INT64):
            return np.int64(value), at
        if kind == BOOL:
            return np.int64(1 if value != np.uint64(0) else 0), at
        if kind in (SINT32, SINT64):
            if kind == SINT32:
                value &= np.uint64(0xFFFFFFFF)
            return np.int64(value >> np.uint64(1)) ^ -np.int64(value & np.uint64(1)), at
        low = np.int64(value & np.uint64(0xFFFFFFFF))
        if kind != UINT32 and low >= 2**31:
            low -= 2**32
        return low, at
    size = 4 if kind <= FLOAT else 8
    if end - at < size:
        return np.int64(0), np.int64(-TRUNCATED)
    if size == 8:
        return np.int64(load64(at)), at + 8
    low = np.int64(load32(at))
    if kind == SFIXED32 and low >= 2**31:
        low -= 2**32
    return low, at + 4


@inner_kernel
def _is_stray(symbols, count, value):  # type: ignore[no-untyped-def]
    """True for a number that the closed enum of a field does not have: it is an unknown field."""
    low, high = np.int64(0), count
    if count == 0:
        return False
    while low < high:
        middle = (low + high) >> 1
        if word_at(symbols, middle) < value:
            low = middle + 1
        else:
            high = middle
    return low == count or word_at(symbols, low) != value


@inner_kernel
def _packed(kind, symbols, symbol_count, at, end, target, cursor):  # type: ignore[no-untyped-def]
    """(how many numbers stand in a range, or a negated problem); written too, given a target."""
    count = np.int64(0)
    while at < end:
        value, at = _scalar(kind, at, end)
        if at < 0:
            return np.int64(-PACKED_SIZE)
        if symbol_count != 0 and _is_stray(symbols, symbol_count, value):
            continue
        if target != 0:
            put_word(target, cursor + count, value)
        count += 1
    return count


@inlined_kernel
def _known_field(fields, count, number, near):  # type: ignore[no-untyped-def]
    """Return the index of a field, -1 if nobody asked for it; they mostly come in their order."""
    for step in range(count):
        index = near + step
        if index >= count:
            index -= count
        if word_at(fields, index * FIELD_WORDS + NUMBER) == number:
            return index
    return np.int64(-1)


@_kernel
def read_indexes(bodies, starts, indexes):  # type: ignore[no-untyped-def]
    """Read which type each body is of: how many indexes, and they, in zigzag; a zero is one zero.

    Args:
        bodies: rows 0 and 1: addresses where each begins and ends.
        starts: gets the address after the indexes.
        indexes: row 0 gets how many, -1 for none that can be; the rows after it get them.

    Returns:
        True if each is the zero.
    """
    is_zero = True
    for row in range(bodies.shape[1]):
        end = bodies[1, row]
        number, at = _varint(bodies[0, row], end)
        count = np.int64(number >> np.uint64(1))
        is_zero = is_zero and at >= 0 and number == 0
        if at >= 0 and ((number & np.uint64(1)) or count >= len(indexes)):
            at = np.int64(-NO_FIELD)
        for place in range(count if at >= 0 else 0):
            number, at = _varint(at, end)
            if at < 0:
                break
            indexes[1 + place, row] = np.int64(number >> np.uint64(1))
            if number & np.uint64(1):
                at = np.int64(-NO_FIELD)
                break
        indexes[0, row] = max(count, 1) if at >= 0 else -1
        starts[row] = at
    return is_zero


@inlined_kernel
def _value(kind, wire, at, end):  # type: ignore[no-untyped-def]
    """(number, or address of bytes, how many bytes, address after it) of a field's value."""
    if wire != SIZED:
        value, at = _scalar(kind, at, end)
        return value, np.int64(0), at
    length, begin = _varint(at, end)
    size = np.int64(length)
    if begin >= 0 and length > np.uint64(end - begin):
        begin = np.int64(-TRUNCATED)
    if begin >= 0 and kind == STRING and not is_text(begin, size):
        begin = np.int64(-NOT_UTF8)
    return begin, size, begin if begin < 0 else begin + size


@inner_kernel
def _occurrences(field, wire, value, size):  # type: ignore[no-untyped-def]
    """Return how many values an occurrence of a field has, or a negated problem."""
    kind, items, cursor = word_at(field, KIND), word_at(field, ITEMS), word_at(field, CURSOR)
    if wire == SIZED and kind < BYTES:
        symbols, symbol_count = word_at(field, SYMBOLS), word_at(field, SYMBOL_COUNT)
        return _packed(kind, symbols, symbol_count, value, value + size, items, cursor)
    if items != 0:
        put_word(items, cursor, value)
        put_word(word_at(field, ITEM_SIZES), cursor, size)
    return np.int64(1)


@inner_kernel
def _take_oneof(fields, index, wanted, row, holders):  # type: ignore[no-untyped-def]
    """Make a field the set member of its oneof, and the member that was set before absent."""
    oneof = word_at(fields + index * FIELD_SIZE, ONEOF)
    before = word_at(holders, oneof)
    if before >= 0 and before != index:
        field = fields + before * FIELD_SIZE
        counts = word_at(field, COUNTS)
        if word_at(field, ITEMS) != 0:
            put_word(field, CURSOR, word_at(field, CURSOR) - word_at(counts, row))
        put_word(counts, row, 0)
        put_word(word_at(field, ORDER), row, 0)
    put_word(holders, oneof, index if index < wanted else -1)


@inner_kernel
def _skip_member(fields, index, wanted, row, wire, at, end, holders):  # type: ignore[no-untyped-def]
    """Return the address after a member of a oneof that nobody asks for, but whose others are."""
    field = fields + index * FIELD_SIZE
    is_stray = False
    if word_at(field, KIND) == ENUM:
        value, at = _scalar(ENUM, at, end)
        is_stray = _is_stray(word_at(field, SYMBOLS), word_at(field, SYMBOL_COUNT), value)
    elif wire == GROUP:
        at = _skip_group(word_at(field, NUMBER), at, end)
    else:
        at = _skip(wire, at, end)
    if at >= 0 and not is_stray:
        _take_oneof(fields, index, wanted, row, holders)
    return at


@inlined_kernel
def _read_message(row, at, end, fields, known, wanted, holders, strays):  # type: ignore[no-untyped-def]
    """Read a message; return its end or a negated problem, and the problem's field or -1."""
    near, place = np.int64(0), np.int64(0)
    while at < end and at >= 0:
        number, wire, at = _tag(at, end)
        if at >= 0 and wire == GROUP_END:
            at = np.int64(-GROUP_OPEN)
        if at < 0:
            break
        index = _known_field(fields, known, number, near)
        field = fields + index * FIELD_SIZE
        kind = word_at(field, KIND) if index >= 0 else np.int64(-1)
        is_packed = wire == SIZED and 0 <= kind < BYTES and word_at(field, IS_LIST) != 0
        if index < 0 or (wire != _wire_type(kind) and not is_packed):
            at = _skip_group(number, at, end) if wire == GROUP else _skip(wire, at, end)
            continue
        if index >= wanted:
            at = _skip_member(fields, index, wanted, row, wire, at, end, holders)
            continue
        value, size, at = _value(kind, wire, at, end)
        if at < 0:
            return at, index
        symbol_count = word_at(field, SYMBOL_COUNT)
        is_single = symbol_count != 0 and not is_packed
        if is_single and _is_stray(word_at(field, SYMBOLS), symbol_count, value):
            store8(strays + row, np.uint64(1))
            continue
        if word_at(field, ONEOF) >= 0:
            _take_oneof(fields, index, wanted, row, holders)
        count = _occurrences(field, wire, value, size)
        if count < 0:
            return count, index
        place += 1
        near = index + 1
        put_word(field, CURSOR, word_at(field, CURSOR) + count)
        counts = word_at(field, COUNTS)
        put_word(counts, row, word_at(counts, row) + count)
        put_word(word_at(field, VALUES), row, value)
        put_word(word_at(field, SIZES), row, size)
        put_word(word_at(field, ORDER), row, place)
    return at, np.int64(-1)


@_kernel
def read_messages(spans, fields, wanted, holders, problems, strays):  # type: ignore[no-untyped-def]
    """Read messages of one type; twice, if fields that may be there many times are: `ITEMS`.

    Args:
        spans: rows 0 and 1: addresses where each message begins and ends.
        fields: a row per field asked for, then one per other member of their oneofs; see NUMBER
            and, of those asked for, VALUES.
        wanted: how many fields are asked for.
        holders: per oneof, for the kernel alone: the field that has its value, -1: none asked for.
        problems: rows 0 and 1 get for each message: problem or 0, the index of the field or -1.
        strays: gets for each message whether it has a number that a closed enum has not.
    """
    first = fields.ctypes.data
    for row in range(spans.shape[1]):
        for index in range(wanted):
            put_word(word_at(first + index * FIELD_SIZE, COUNTS), row, 0)
        for oneof in range(len(holders)):
            holders[oneof] = -1
        at, index = _read_message(
            *(row, spans[0, row], spans[1, row], first, len(fields), wanted),
            *(holders.ctypes.data, strays.ctypes.data),
        )
        if at < 0:
            problems[0, row] = -at
            problems[1, row] = index


# ---- writing -------------------------------------------------------------------------------------

COLUMN_VALUES, COLUMN_SIZES, VALID, OFFSETS = range(4)
"""The addresses of a column: numbers, float bits or addresses of bytes (int64); how many bytes
(int64); a byte per row, 0 for null, or address 0; where each list begins (int64)."""


@inner_kernel
def _put_varint(value, at, writes):  # type: ignore[no-untyped-def]
    while value >= np.uint64(0x80):
        if writes:
            store8(at, (value & np.uint64(0x7F)) | np.uint64(0x80))
        value >>= np.uint64(7)
        at += 1
    if writes:
        store8(at, value)
    return at + 1


@inner_kernel
def _put_number(kind, value, at, writes):  # type: ignore[no-untyped-def]
    if kind <= ENUM:
        bits = np.uint64(value)
        if kind in (SINT32, SINT64):
            bits = np.uint64((value << 1) ^ (value >> 63))
        return _put_varint(bits, at, writes)
    if kind <= FLOAT:
        if writes:
            store32(at, np.uint64(value))
        return at + 4
    if writes:
        store64(at, np.uint64(value))
    return at + 8


@inner_kernel
def _put_field(field, column, row, at, writes):  # type: ignore[no-untyped-def]
    """Write a row's field, once, many times or not at all; return the address after the field."""
    kind = field[KIND]
    first, last = np.int64(row), np.int64(row) + 1
    if column[VALID] != 0 and load8(column[VALID] + row) == np.uint64(0):
        return at
    if field[IS_LIST]:
        first = np.int64(load64(column[OFFSETS] + 8 * row))
        last = np.int64(load64(column[OFFSETS] + 8 * (row + 1)))
    tag = np.uint64(field[NUMBER]) << np.uint64(3)
    if field[IS_PACKED]:
        if first == last:
            return at
        size = np.int64(0)
        for item in range(first, last):
            size = _put_number(
                kind, np.int64(load64(column[COLUMN_VALUES] + 8 * item)), size, False
            )
        at = _put_varint(tag | np.uint64(SIZED), at, writes)
        at = _put_varint(np.uint64(size), at, writes)
        for item in range(first, last):
            at = _put_number(kind, np.int64(load64(column[COLUMN_VALUES] + 8 * item)), at, writes)
        return at
    for item in range(first, last):
        value = np.int64(load64(column[COLUMN_VALUES] + 8 * item))
        size = np.int64(load64(column[COLUMN_SIZES] + 8 * item)) if kind >= BYTES else value
        if size == 0 and not field[HAS_PRESENCE] and not field[IS_LIST]:
            continue
        at = _put_varint(tag | np.uint64(_wire_type(kind)), at, writes)
        if kind < BYTES:
            at = _put_number(kind, value, at, writes)
        else:
            at = _put_varint(np.uint64(size), at, writes)
            if writes:
                copy(at, value, size)
            at += size
    return at


@_kernel
def write_messages(fields, columns, prefix, offsets, out):  # type: ignore[no-untyped-def]
    """Write messages of a single type one after another, or only compute where each begins.

    Args:
        fields: a row per field, in the order to write them; see NUMBER.
        columns: a row per field; see COLUMN_VALUES.
        prefix: uint8, written before each message.
        offsets: where each message begins, and the end of the last: filled if `out` is 0, else
            kept to.
        out: the address to write to; 0: only fill `offsets`.
    """
    writes = out != 0
    at = np.int64(out)
    for row in range(len(offsets) - 1):
        if not writes:
            offsets[row] = at
        elif len(prefix):
            copy(at, prefix.ctypes.data, len(prefix))
        at += len(prefix)
        for index in range(len(fields)):
            at = _put_field(fields[index], columns[index], row, at, writes)
    if not writes:
        offsets[len(offsets) - 1] = at
