"""The loops that write Protobuf messages: field slots in, bytes out, compiled by numba.

A call writes many messages of a single type: messages inside of them are bytes by then, written by
a call of their own before. Invariant: writes go where sizes were counted.

Source of the format: https://protobuf.dev/programming-guides/encoding/
"""

import numba
import numpy as np

from tallystick.codec.memory import copy, inner_kernel, load8, load64, store8, store32, store64
from tallystick.codec.protobuf.kernels import (
    BYTES,
    ENUM,
    FLOAT,
    HAS_PRESENCE,
    IS_LIST,
    IS_PACKED,
    KIND,
    NUMBER,
    SINT32,
    SINT64,
    SIZED,
    _wire_type,
)

_kernel = numba.njit(cache=True, nogil=True, error_model="numpy")

VALUES, SIZES, VALID, OFFSETS = range(4)
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
            size = _put_number(kind, np.int64(load64(column[VALUES] + 8 * item)), size, False)
        at = _put_varint(tag | np.uint64(SIZED), at, writes)
        at = _put_varint(np.uint64(size), at, writes)
        for item in range(first, last):
            at = _put_number(kind, np.int64(load64(column[VALUES] + 8 * item)), at, writes)
        return at
    for item in range(first, last):
        value = np.int64(load64(column[VALUES] + 8 * item))
        size = np.int64(load64(column[SIZES] + 8 * item)) if kind >= BYTES else value
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
        columns: a row per field; see VALUES.
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
