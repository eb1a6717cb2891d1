"""The loops over Avro records: bodies in, column slots out, compiled by numba.

A small machine runs a program, made from the writer's schema by `plan`, once per record. A
column is a run of slots; the n-th item of its context (context 0: the records; each array and map
that is read has one of its own) stands in the n-th slot. A slot is null until its byte of validity
is set, so a null, or a record that turns out malformed, leaves nothing.

Inner functions take addresses, not arrays (see `bytes_kernels`): arrays made the loops several
times as slow.

Invariants
    Every read is checked against the end of its record, every slot against its context's capacity.
    A position below 0 is a problem's code, negated; nothing is read after it.
    Each item of an array takes a byte or more, or is not looked at (COUNTS): loops end.

Source of the format: https://avro.apache.org/docs/1.12.0/specification/#binary-encoding
"""

import numba
import numpy as np

from tallystick.codec.bytes_kernels import (
    inner_kernel,
    is_text,
    load8,
    load32,
    load64,
    put_word,
    store8,
    store64,
    word_at,
)

(TRUNCATED, LEFT_OVER, VARINT_TOO_LONG, INT_RANGE, NOT_BOOLEAN, NEGATIVE_LENGTH, NOT_UTF8) = range(
    1, 8
)
(ENUM_RANGE, UNION_RANGE, MILLIS_RANGE, DECIMAL_RANGE, DECIMAL_EMPTY, TOO_MANY_ITEMS) = range(8, 14)
(TOO_DEEP, NEEDS_SLOTS) = range(14, 16)
"""Problems of a record; the last only asks for a larger context, to read the record again."""

(BOOLEAN, FLOAT, DOUBLE, INT, LONG, MILLIS, ENUM, BYTES, STRING, FIXED, DECIMAL) = range(11)
(UNION, VALID, JUMP, REPEAT, NEXT, CALL, RETURN, END, COUNTS) = range(11, 20)
"""Operations, in the order in which `_decode` checks for them."""

(OPERATION, COLUMN, VALUES, VALID_BYTES, SECOND, A, B, TARGET) = range(8)
"""The numbers of an instruction.

VALUES, VALID_BYTES and SECOND are the addresses of a column's slots (int64), of its bytes of
validity, and of the next column's slots; 0: read and forget. A is FIXED's size, ENUM's number of
symbols, DECIMAL's precision with B its size or -1, the address of UNION's jumps with B their
number, REPEAT's context or -1. TARGET is where CALL and JUMP go, and REPEAT after its last item.
COUNTS skips an array whose items take no bytes.
"""
INSTRUCTION_SIZE = 64

FRAMES_MAX = 256
"""The maximum nesting depth of records that hold themselves."""
_FRAME_SIZE = 32

_DIGITS_MAX = 38
_POWERS = np.array([divmod(10**digits, 2**64) for digits in range(_DIGITS_MAX + 1)], np.uint64)
"""10 to the n-th: high and low 64 bits."""
_MILLIS_MAX = (2**63 - 1) // 1000
_ALL_ONES = np.uint64(2**64 - 1)

_kernel = numba.njit(cache=True, nogil=True, error_model="numpy")


@inner_kernel
def _varint(at, end):  # type: ignore[no-untyped-def]
    """(value, address after the varint; or a problem, negated, instead of the address)."""
    value = np.uint64(0)
    shift = np.uint64(0)
    problem = np.int64(-TRUNCATED)
    while at < end:
        byte = load8(at)
        at += 1
        if shift == np.uint64(63) and byte > np.uint64(1):
            problem = np.int64(-VARINT_TOO_LONG)
            break
        value |= (byte & np.uint64(0x7F)) << shift
        shift += np.uint64(7)
        if byte < np.uint64(0x80):
            problem = np.int64(at)
            break
    return np.int64(value >> np.uint64(1)) ^ -np.int64(value & np.uint64(1)), problem


@inner_kernel
def _decimal(at, size, precision, low_at, high_at):  # type: ignore[no-untyped-def]
    """Write a big-endian two's complement number of at most `precision` digits; 0 or a problem."""
    if size == 0:
        return DECIMAL_EMPTY
    negative = load8(at) >= np.uint64(0x80)
    low = _ALL_ONES if negative else np.uint64(0)
    high = low
    for index in range(size):
        # What leaves at the top must be copies of the sign, as the top itself must stay one.
        top = high >> np.uint64(55)
        if index >= 16 and top != np.uint64(0x1FF if negative else 0):
            return DECIMAL_RANGE
        high = (high << np.uint64(8)) | (low >> np.uint64(56))
        low = (low << np.uint64(8)) | load8(at + index)
    above = high
    below = low
    if negative:
        below = ~low + np.uint64(1)
        above = ~high + np.uint64(1 if below == np.uint64(0) else 0)
    most, least = _POWERS[precision, 0], _POWERS[precision, 1]
    if above > most or (above == most and below >= least):
        return DECIMAL_RANGE
    store64(low_at, low)
    store64(high_at, high)
    return 0


@inner_kernel
def _sized(operation, instruction, slot, at, end, report):  # type: ignore[no-untyped-def]
    """Read a string, bytes, fixed or decimal into its slot; return the address after the value."""
    size = np.int64(-1)
    if operation == FIXED:
        size = word_at(instruction, A)
    elif operation == DECIMAL:
        size = word_at(instruction, B)
    if size < 0:
        size, at = _varint(at, end)
        if at < 0:
            return at
    if size < 0 or size > end - at:
        put_word(report, 1, size)
        return np.int64(-NEGATIVE_LENGTH if size < 0 else -TRUNCATED)
    values = word_at(instruction, VALUES)
    if values == 0:
        return at + size
    place = values + 8 * slot
    second = word_at(instruction, SECOND) + 8 * slot
    if operation == DECIMAL:
        problem = _decimal(at, size, word_at(instruction, A), place, second)
        if problem != 0:
            return np.int64(-problem)
    else:
        if operation == STRING and not is_text(at, size):
            return np.int64(-NOT_UTF8)
        store64(place, np.uint64(at))
        store64(second, np.uint64(size))
    store8(word_at(instruction, VALID_BYTES) + slot, np.uint64(1))
    return at + size


@inner_kernel
def _fixed_width(operation, at, end, report):  # type: ignore[no-untyped-def]
    """(bits, address after the value) of a boolean, float or double."""
    size = 1 if operation == BOOLEAN else 4 if operation == FLOAT else 8
    if size > end - at:
        return np.int64(0), np.int64(-TRUNCATED)
    if operation == DOUBLE:
        return np.int64(load64(at)), at + 8
    if operation == FLOAT:
        return np.int64(load32(at)), at + 4
    value = np.int64(load8(at))
    put_word(report, 1, value)
    return value, at + 1 if value <= 1 else np.int64(-NOT_BOOLEAN)


@inner_kernel
def _number(operation, instruction, slot, at, end, report):  # type: ignore[no-untyped-def]
    """Read a boolean, number or enum into its slot; return the address after the value."""
    if operation < INT:
        value, at = _fixed_width(operation, at, end, report)
    else:
        value, at = _varint(at, end)
        if operation != LONG and at >= 0:
            put_word(report, 1, value)
            if operation == INT and (value < -(2**31) or value >= 2**31):
                at = np.int64(-INT_RANGE)
            elif operation == ENUM and (value < 0 or value >= word_at(instruction, A)):
                at = np.int64(-ENUM_RANGE)
            elif operation == MILLIS:
                if value < -_MILLIS_MAX or value > _MILLIS_MAX:
                    return np.int64(-MILLIS_RANGE)
                value *= 1000
    values = word_at(instruction, VALUES)
    if at >= 0 and values != 0:
        put_word(values, slot, value)
        store8(word_at(instruction, VALID_BYTES) + slot, np.uint64(1))
    return at


@inner_kernel
def _block(at, end, report):  # type: ignore[no-untyped-def]
    """(items in the next block of an array or map, address of the first)."""
    count, at = _varint(at, end)
    if at >= 0 and count < 0:
        count = -count
        size, at = _varint(at, end)
        if at >= 0 and (size < 0 or size > end - at):
            put_word(report, 1, size)
            return count, np.int64(-NEGATIVE_LENGTH if size < 0 else -TRUNCATED)
    if at >= 0 and (count < 0 or count > end - at):
        put_word(report, 1, count)
        return count, np.int64(-TOO_MANY_ITEMS)
    return count, at


@inner_kernel
def _counts(at, end, report):  # type: ignore[no-untyped-def]
    """Return the address after an array whose items take no bytes: its blocks are counts alone."""
    count = np.int64(1)
    while at >= 0 and count != 0:
        count, at = _varint(at, end)
        if at >= 0 and count < 0:
            size, at = _varint(at, end)
            if at >= 0 and (size < 0 or size > end - at):
                put_word(report, 1, size)
                return np.int64(-NEGATIVE_LENGTH if size < 0 else -TRUNCATED)
            if at >= 0:
                at += size
    return at


@inner_kernel
def _next_item(program, frame, slot, at, end, contexts, report):  # type: ignore[no-untyped-def]
    """Go to the next item of the array or map of a frame; (its slot or -1: no more, address)."""
    repeat = program + INSTRUCTION_SIZE * (word_at(frame, 0) - 1)
    context = contexts + 16 * word_at(repeat, A)
    is_read = word_at(repeat, VALUES) != 0
    remaining = word_at(frame, 3)
    if remaining == 0:
        remaining, at = _block(at, end, report)
        if at < 0:
            return slot, at
        if remaining == 0:
            if is_read:
                parent = word_at(frame, 1)
                put_word(word_at(repeat, VALUES), parent, word_at(context, 0) - word_at(frame, 2))
                store8(word_at(repeat, VALID_BYTES) + parent, np.uint64(1))
            return np.int64(-1), at
    put_word(frame, 3, remaining - 1)
    if is_read:
        slot = word_at(context, 0)
        if slot >= word_at(context, 1):
            put_word(report, 1, word_at(repeat, A))
            return slot, np.int64(-NEEDS_SLOTS)
        put_word(context, 0, slot + 1)
    return slot, at


@inner_kernel
def _decode(program, slot, at, end, contexts, stack, report):  # type: ignore[no-untyped-def]  # noqa: PLR0912  the machine: one loop, a branch per operation
    """Run the program on a record; return the address after the record."""
    pc = np.int64(0)
    depth = np.int64(0)
    while at >= 0:
        instruction = program + INSTRUCTION_SIZE * pc
        operation = word_at(instruction, OPERATION)
        put_word(report, 0, pc)
        pc += 1
        if operation < BYTES:
            at = _number(operation, instruction, slot, at, end, report)
        elif operation < UNION:
            at = _sized(operation, instruction, slot, at, end, report)
        elif operation == UNION:
            branch, at = _varint(at, end)
            if at >= 0:
                if branch < 0 or branch >= word_at(instruction, B):
                    put_word(report, 1, branch)
                    return np.int64(-UNION_RANGE)
                pc = word_at(word_at(instruction, A), branch)
        elif operation == VALID:
            store8(word_at(instruction, VALID_BYTES) + slot, np.uint64(1))
        elif operation == JUMP:
            pc = word_at(instruction, TARGET)
        elif operation == END:
            return at
        elif operation == COUNTS:
            at = _counts(at, end, report)
        elif operation == RETURN:
            depth -= 1
            pc = word_at(stack + _FRAME_SIZE * depth, 0)
        else:
            if operation != NEXT:
                if depth == FRAMES_MAX:
                    return np.int64(-TOO_DEEP)
                frame = stack + _FRAME_SIZE * depth
                put_word(frame, 0, pc)
                put_word(frame, 1, slot)
                if operation == REPEAT and word_at(instruction, VALUES) != 0:
                    put_word(frame, 2, word_at(contexts + 16 * word_at(instruction, A), 0))
                put_word(frame, 3, 0)
                depth += 1
            if operation == CALL:
                pc = word_at(instruction, TARGET)
                continue
            frame = stack + _FRAME_SIZE * (depth - 1)
            pc = word_at(frame, 0)
            slot, at = _next_item(program, frame, slot, at, end, contexts, report)
            if slot < 0:
                slot = word_at(frame, 1)
                pc = word_at(program + INSTRUCTION_SIZE * (pc - 1), TARGET)
                depth -= 1
    return at


@_kernel
def decode_records(  # type: ignore[no-untyped-def]
    program, spans, first, column_contexts, column_valid, contexts, problems
):
    """Read records into slots, until the end or until a context has too few slots.

    Args:
        program: int64, the instructions.
        spans: rows 0 and 1: addresses where each body begins and ends.
        first: the record to begin with.
        column_contexts: the context of each column.
        column_valid: the address of each column's bytes of validity.
        contexts: per context: used slots, capacity; the first is the records'.
        problems: rows 0 to 2 get for each record: problem or 0, instruction, what was found.

    Returns:
        (the first record not read, the context that has too few slots for it).
    """
    stack = np.zeros(FRAMES_MAX * _FRAME_SIZE // 8, np.int64)
    report = np.zeros(2, np.int64)
    before = contexts.copy()
    for row in range(first, spans.shape[1]):
        for context in range(1, len(contexts)):
            before[context, 0] = contexts[context, 0]
        end = spans[1, row]
        at = _decode(
            program.ctypes.data,
            row,
            spans[0, row],
            end,
            contexts.ctypes.data,
            stack.ctypes.data,
            report.ctypes.data,
        )
        if at == end:
            continue
        if at >= 0:
            report[1] = end - at
            at = np.int64(-LEFT_OVER)
        # Make null again what the record wrote before it turned out malformed.
        before[0, 0] = row
        contexts[0, 0] = row + 1
        for column in range(len(column_contexts)):
            context = column_contexts[column]
            for slot in range(before[context, 0], contexts[context, 0]):
                store8(column_valid[column] + slot, np.uint64(0))
        for context in range(len(contexts)):  # by hand: a slice compiles numba's broadcasts
            contexts[context, 0] = before[context, 0]
        if at == -NEEDS_SLOTS:
            return row, report[1]
        problems[0, row] = -at
        problems[1, row] = report[0]
        problems[2, row] = report[1]
    return spans.shape[1], np.int64(-1)


@_kernel
def read_branches(bodies, branch_count, branches, problems):  # type: ignore[no-untyped-def]
    """Read the branch that each value of a union at the top has; return True if all have the same.

    Args:
        bodies: rows 0 and 1: addresses where each value begins and ends; row 0 gets the address
            after the branch.
        branch_count: how many branches the union has.
        branches: gets the index of each value's branch, as it is written.
        problems: gets the problem of each value whose branch is none, else 0.
    """
    is_same = True
    for row in range(bodies.shape[1]):
        branch, at = _varint(bodies[0, row], bodies[1, row])
        branches[row] = branch
        if at < 0:
            problems[row] = -at
        elif branch < 0 or branch >= branch_count:
            problems[row] = UNION_RANGE
        else:
            problems[row] = 0
            bodies[0, row] = at
        is_same = is_same and problems[row] == 0 and branch == branches[0]
    return is_same
