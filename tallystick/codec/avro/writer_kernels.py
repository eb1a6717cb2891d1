"""The loop that writes Avro records: columns in, bodies one after another out, compiled by numba.

The machine of `kernels`, the other way round: a program, made from the schema and the columns by
`writer`, runs once per record and writes its bytes.

Invariants
    Every write is checked against the end of the room; a record without room is begun again.
    A position below 0 is a problem's code, negated; nothing is written after it.
    Slots come from the columns' own lengths and offsets, which `writer` has checked.

Source of the format: https://avro.apache.org/docs/1.12.0/specification/#binary-encoding
"""

import numba
import numpy as np

from tallystick.codec.bytes_kernels import (
    copy,
    inner_kernel,
    load8,
    put_word,
    put_zigzag,
    store8,
    store32,
    store64,
    word_at,
)

(NEEDS_ROOM, NULL_VALUE, NO_SYMBOL, WRONG_SIZE, DECIMAL_TOO_LARGE) = range(1, 6)
"""Problems of a record; the first only asks for more room, to write the record again."""

(NUMBER, ENUM, PLAIN, BYTES, FIXED, DECIMAL, ABSENT, NULLABLE, REPEAT, NEXT, END) = range(11)
"""Operations, in the order in which `_encode` checks for them."""

(OPERATION, VALUES, SECOND, VALID_BYTES, A, B, TARGET) = range(7)
"""The numbers of an instruction.

VALUES and SECOND are addresses of int64 per slot: numbers, or starts and lengths of bytes; of
DECIMAL 16 bytes per slot; of REPEAT the offsets of the items. VALID_BYTES: a byte per slot; 0: none
is null. A is PLAIN's size in bytes, FIXED's and DECIMAL's size or -1; of NULLABLE the branch of a
value or -1, B that of a null or -1. TARGET is where a null goes on, and REPEAT after its last item.
"""
INSTRUCTION_SIZE = 64
FRAME_SIZE = 32
VARINT_SIZE_MAX = 10
_DECIMAL_SIZE = 16

_kernel = numba.njit(cache=True, nogil=True, error_model="numpy")


@inner_kernel
def _put_bytes(instruction, slot, at, end):  # type: ignore[no-untyped-def]
    """Write bytes, a string or a fixed; return the address after the value."""
    start = word_at(word_at(instruction, VALUES), slot)
    size = word_at(word_at(instruction, SECOND), slot)
    if word_at(instruction, OPERATION) == FIXED:
        if size != word_at(instruction, A):
            return np.int64(-WRONG_SIZE)
        if size > end - at:
            return np.int64(-NEEDS_ROOM)
    else:
        if size + VARINT_SIZE_MAX > end - at:
            return np.int64(-NEEDS_ROOM)
        at = put_zigzag(at, size)
    copy(at, start, size)
    return at + size


@inner_kernel
def _put_decimal(instruction, slot, at, end):  # type: ignore[no-untyped-def]
    """Write a number of 128 bits, big-endian, in the fewest bytes or in a given number of bytes."""
    number = word_at(instruction, VALUES) + _DECIMAL_SIZE * slot
    negative = load8(number + _DECIMAL_SIZE - 1) >= np.uint64(0x80)
    sign = np.uint64(0xFF if negative else 0)
    least = np.int64(_DECIMAL_SIZE)
    while least > 1 and load8(number + least - 1) == sign:
        if (load8(number + least - 2) >= np.uint64(0x80)) != negative:
            break
        least -= 1
    size = word_at(instruction, A)
    if size >= 0 and size < least:
        return np.int64(-DECIMAL_TOO_LARGE)
    if max(size, _DECIMAL_SIZE) + VARINT_SIZE_MAX > end - at:
        return np.int64(-NEEDS_ROOM)
    if size < 0:
        size = least
        at = put_zigzag(at, size)
    for index in range(size):
        place = size - 1 - index
        store8(at + index, load8(number + place) if place < _DECIMAL_SIZE else sign)
    return at + size


@inner_kernel
def _put_plain(size, value, at):  # type: ignore[no-untyped-def]
    """Write a boolean, float or double; return the address after the value."""
    if size == 1:
        store8(at, np.uint64(value))
    elif size == 4:
        store32(at, np.uint64(value))
    else:
        store64(at, np.uint64(value))
    return at + size


@inner_kernel
def _put_scalar(instruction, slot, at, end):  # type: ignore[no-untyped-def]
    """Write a value without parts; return the address after the value."""
    operation = word_at(instruction, OPERATION)
    if operation in (BYTES, FIXED):
        return _put_bytes(instruction, slot, at, end)
    if operation == DECIMAL:
        return _put_decimal(instruction, slot, at, end)
    if operation == ABSENT:
        return put_zigzag(at, word_at(instruction, B))
    value = word_at(word_at(instruction, VALUES), slot)
    if operation == PLAIN:
        return _put_plain(word_at(instruction, A), value, at)
    if operation == ENUM and value < 0:
        return np.int64(-NO_SYMBOL)
    return put_zigzag(at, value)


@inner_kernel
def _encode(program, slot, at, end, stack, report):  # type: ignore[no-untyped-def]  # noqa: PLR0912  the machine: one loop, a branch per operation
    """Run the program on a record; return the address after the record's bytes."""
    pc = np.int64(0)
    depth = np.int64(0)
    while at >= 0:
        instruction = program + INSTRUCTION_SIZE * pc
        operation = word_at(instruction, OPERATION)
        put_word(report, 0, pc)
        pc += 1
        if operation == END:
            return at
        if operation != BYTES and operation != FIXED and end - at < VARINT_SIZE_MAX:
            return np.int64(-NEEDS_ROOM)
        if operation <= ABSENT:
            at = _put_scalar(instruction, slot, at, end)
        elif operation == NULLABLE:
            valid = word_at(instruction, VALID_BYTES)
            if valid == 0 or load8(valid + slot) != np.uint64(0):
                if word_at(instruction, A) >= 0:
                    at = put_zigzag(at, word_at(instruction, A))
            else:
                if word_at(instruction, B) < 0:
                    return np.int64(-NULL_VALUE)
                at = put_zigzag(at, word_at(instruction, B))
                pc = word_at(instruction, TARGET)
        elif operation == REPEAT:
            first = word_at(word_at(instruction, VALUES), slot)
            stop = word_at(word_at(instruction, VALUES), slot + 1)
            if stop > first:
                at = put_zigzag(at, stop - first)
                frame = stack + FRAME_SIZE * depth
                put_word(frame, 0, pc)
                put_word(frame, 1, slot)
                put_word(frame, 2, stop)
                depth += 1
                slot = first
            else:
                store8(at, np.uint64(0))
                at += 1
                pc = word_at(instruction, TARGET)
        else:
            frame = stack + FRAME_SIZE * (depth - 1)
            slot += 1
            if slot < word_at(frame, 2):
                pc = word_at(frame, 0)
            else:
                store8(at, np.uint64(0))
                at += 1
                slot = word_at(frame, 1)
                depth -= 1
    return at


@_kernel
def encode_records(program, first, prefix, out, size, stack, offsets, report):  # type: ignore[no-untyped-def]
    """Write records to the last, to the end of the room, or to a record that cannot be written.

    Args:
        program: int64, the instructions.
        first: the record to begin with.
        prefix: uint8, written before each record.
        out: the address of the room.
        size: bytes of the room.
        stack: int64, a frame for each level of arrays and maps.
        offsets: where each record begins, and the end of the last; known up to `first`.
        report: gets the instruction of a record that cannot be written.

    Returns:
        (the first record not written, its problem).
    """
    end = out + size
    for row in range(first, len(offsets) - 1):
        at = out + offsets[row]
        if len(prefix) > end - at:
            return row, NEEDS_ROOM
        copy(at, prefix.ctypes.data, len(prefix))
        at = _encode(
            program.ctypes.data,
            row,
            at + len(prefix),
            end,
            stack.ctypes.data,
            report.ctypes.data,
        )
        if at < 0:
            return row, -at
        offsets[row + 1] = at - out
    return len(offsets) - 1, 0
