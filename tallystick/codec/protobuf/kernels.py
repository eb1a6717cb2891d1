"""The loops over Protobuf messages: bytes in, field slots out, compiled by numba.

One call reads one type of message, many of them: the messages inside them are bytes to it, read by
a call of their own. So there is no stack, however deep a type is nested.

Invariants
    Every read is checked against the end of its message.
    A position below 0 is a problem's code, negated; nothing is read after it.

Source of the format: https://protobuf.dev/programming-guides/encoding/
"""

import numba
import numpy as np

from tallystick.codec.avro.kernels import _is_text
from tallystick.codec.memory import (
    inner_kernel,
    load8,
    load32,
    load64,
    store64,
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
FIELD_NUMBERS = 8

VARINT_SIZE_MAX = 10
TAG_SIZE_MAX = 5
"""The most bytes of a tag, in Google's readers too."""
GROUPS_MAX = 100
"""The depth of groups in groups; others' readers allow as much."""
INDEXES_MAX = 33
"""The most numbers that say which type a message is of, their count among them."""
_kernel = numba.njit(cache=True, nogil=True, error_model="numpy")


@inner_kernel
def _varint(at, end):  # type: ignore[no-untyped-def]
    """(value, address after it); instead of the address a negated problem when it is none."""
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


@inner_kernel
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


@inner_kernel
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
        if np.int64(load64(symbols + 8 * middle)) < value:
            low = middle + 1
        else:
            high = middle
    return low == count or np.int64(load64(symbols + 8 * low)) != value


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
            store64(target + 8 * (cursor + count), np.uint64(value))
        count += 1
    return count


@inner_kernel
def _known_field(fields, number, near):  # type: ignore[no-untyped-def]
    """Return the index of a field, -1 if nobody asked for it; they mostly come in their order."""
    count = len(fields)
    for step in range(count):
        index = near + step
        if index >= count:
            index -= count
        if fields[index, NUMBER] == number:
            return index
    return -1


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


@inner_kernel
def _value(kind, wire, at, end):  # type: ignore[no-untyped-def]
    """(number, or address of bytes, how many bytes, address after it) of a field's value."""
    if wire != SIZED:
        value, at = _scalar(kind, at, end)
        return value, np.int64(0), at
    length, begin = _varint(at, end)
    size = np.int64(length)
    if begin >= 0 and length > np.uint64(end - begin):
        begin = np.int64(-TRUNCATED)
    if begin >= 0 and kind == STRING and not _is_text(begin, size):
        begin = np.int64(-NOT_UTF8)
    return begin, size, begin if begin < 0 else begin + size


@inner_kernel
def _occurrences(  # type: ignore[no-untyped-def]
    kind, symbols, symbol_count, wire, value, size, items, item_sizes, cursor
):
    """Return how many values an occurrence of a field has, or a negated problem."""
    if wire == SIZED and kind < BYTES:
        return _packed(kind, symbols, symbol_count, value, value + size, items, cursor)
    if items != 0:
        store64(items + 8 * cursor, np.uint64(value))
        store64(item_sizes + 8 * cursor, np.uint64(size))
    return np.int64(1)


@inner_kernel
def _take_oneof(oneof, index, row, order, counts, items, cursors, holders):  # type: ignore[no-untyped-def]
    """Make a field the member of its oneof that has a value, and the one before it absent."""
    before = holders[oneof]
    if before >= 0 and before != index:
        if items[before] != 0:
            cursors[before] -= counts[before, row]
        counts[before, row] = 0
        order[before, row] = 0
    holders[oneof] = index if index < len(order) else -1


@inner_kernel
def _read_message(  # type: ignore[no-untyped-def]  # noqa: PLR0912  one loop, for speed
    row,
    at,
    end,
    fields,
    values,
    sizes,
    order,
    counts,
    items,
    item_sizes,
    cursors,
    holders,
    problems,
    strays,
):
    """Read one message; return its end, or a negated problem."""
    near, place = 0, 0
    while at < end and at >= 0:
        problems[1, row] = -1
        number, wire, at = _tag(at, end)
        if at >= 0 and wire == GROUP_END:
            at = np.int64(-GROUP_OPEN)
        if at < 0:
            break
        index = _known_field(fields, number, near)
        kind = fields[index, KIND] if index >= 0 else np.int64(-1)
        is_packed = wire == SIZED and 0 <= kind < BYTES and fields[index, IS_LIST]
        is_wanted = index >= 0 and (wire == _wire_type(kind) or is_packed)
        if wire == GROUP:
            at = _skip_group(number, at, end)
        elif not is_wanted or (index >= len(order) and kind != ENUM):
            at = _skip(wire, at, end)
        if not is_wanted:
            continue
        oneof = fields[index, ONEOF]
        if index >= len(order):  # not asked for, but a member of a oneof that is
            is_stray = False
            if kind == ENUM:
                value, at = _scalar(kind, at, end)
                is_stray = _is_stray(fields[index, SYMBOLS], fields[index, SYMBOL_COUNT], value)
            if at >= 0 and not is_stray:
                _take_oneof(oneof, index, row, order, counts, items, cursors, holders)
            continue
        problems[1, row] = index
        value, size, at = _value(kind, wire, at, end)
        if at < 0:
            break
        symbols, symbol_count = fields[index, SYMBOLS], fields[index, SYMBOL_COUNT]
        if symbol_count != 0 and not is_packed and _is_stray(symbols, symbol_count, value):
            strays[row] = True
            continue
        if oneof >= 0:
            _take_oneof(oneof, index, row, order, counts, items, cursors, holders)
        cursor = cursors[index]
        count = _occurrences(
            *(kind, symbols, symbol_count, wire, value, size),
            *(items[index], item_sizes[index], cursor),
        )
        if count < 0:
            return count
        cursors[index] += count
        place += 1
        near = index + 1
        counts[index, row] += count
        values[index, row] = value
        sizes[index, row] = size
        order[index, row] = place
    return at


@_kernel
def read_messages(  # type: ignore[no-untyped-def]
    spans,
    fields,
    values,
    sizes,
    order,
    counts,
    items,
    item_sizes,
    cursors,
    holders,
    problems,
    strays,
):
    """Read messages of one type; twice, if fields that may be there many times are: `items`.

    Args:
        spans: rows 0 and 1: addresses where each message begins and ends.
        fields: a row per field asked for, then one per other member of their oneofs; see NUMBER.
        values: per field and message: the number, a float's bits, or the address of its bytes.
        sizes: per field and message: how many bytes.
        order: per field and message: 0 absent, else the place of its last occurrence.
        counts: per field and message: how often it is there, since it last became absent.
        items: per field: the address to write the value of each occurrence to; 0: only count.
        item_sizes: the same, for the sizes.
        cursors: per field: how many occurrences were written; if they are only counted, how many
            there were, with those that another member of their oneof made absent.
        holders: per oneof, for the kernel alone: the field that has its value, -1: none asked for.
        problems: rows 0 and 1 get for each message: problem or 0, the index of the field or -1.
        strays: gets for each message whether it has a number that a closed enum has not.
    """
    for row in range(spans.shape[1]):
        for index in range(len(order)):
            counts[index, row] = 0
        for oneof in range(len(holders)):
            holders[oneof] = -1
        at = _read_message(
            *(row, spans[0, row], spans[1, row], fields, values, sizes, order, counts),
            *(items, item_sizes, cursors, holders, problems, strays),
        )
        if at < 0:
            problems[0, row] = -at
