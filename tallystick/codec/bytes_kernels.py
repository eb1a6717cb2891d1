"""Parts of all formats' kernels, compiled by numba: memory by address, UTF-8, varints, spans.

Access by address counts no references of arrays and needs a single compiled version. No invariant
is kept here: a kernel checks every range itself before it reads or writes.
"""

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_kernel = numba.njit(cache=True, nogil=True, error_model="numpy")
inner_kernel = numba.njit(
    nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
)
"""Compiles a function that only kernels call: as a part of them, and sooner."""
inlined_kernel = numba.njit(
    nogil=True,
    error_model="numpy",
    forceinline=True,
    no_cpython_wrapper=True,
    no_cfunc_wrapper=True,
)
"""Compiles alike, and inlines: on the path of a usual record, calls would be half of the time."""
ENVELOPE_SIZE = 5
"""The magic byte 0 and the big-endian schema id."""

GOOD, TOMBSTONE, TOO_SHORT, WRONG_MAGIC = range(4)
"""The verdicts of `read_envelopes` on a value."""

PAIRED_MAX = 32
"""Keys of maps up to this size are compared each with each."""

_TOP_BITS = np.uint64(0x8080808080808080)


@intrinsic
def trailing_zeros(typing_context, word):  # type: ignore[no-untyped-def]
    """Return how many low bits are 0; the word is not 0."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@intrinsic
def leading_zeros(typing_context, word):  # type: ignore[no-untyped-def]
    """Return how many high bits are 0; the word is not 0."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@intrinsic
def multiply_high(typing_context, multiplicand, multiplier):  # type: ignore[no-untyped-def]
    """Return the high 64 bits of the product of 128."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(argument, wide) for argument in arguments))
        high = builder.lshr(product, ir.Constant(wide, 64))
        return builder.trunc(high, ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), generate


def _load(bits):  # type: ignore[no-untyped-def]
    """Return an intrinsic that reads `bits` bits at an address into the low end of a uint64."""

    @intrinsic
    def load(typing_context, address):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            pointer = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
            value = builder.load(pointer)
            value.align = 1
            return value if bits == 64 else builder.zext(value, ir.IntType(64))

        return types.uint64(types.int64), generate

    return load


def _store(bits):  # type: ignore[no-untyped-def]
    """Return an intrinsic that writes the low `bits` bits of a uint64 to an address."""

    @intrinsic
    def store(typing_context, address, value):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            pointer = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
            low = arguments[1] if bits == 64 else builder.trunc(arguments[1], ir.IntType(bits))
            builder.store(low, pointer).align = 1
            return context.get_dummy_value()

        return types.void(types.int64, types.uint64), generate

    return store


@intrinsic
def _pointer(typing_context, address):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.CPointer(types.uint8)(types.int64), generate


load8, load32, load64 = _load(8), _load(32), _load(64)  # type: ignore[no-untyped-call]
store8, store16 = _store(8), _store(16)  # type: ignore[no-untyped-call]
store32, store64 = _store(32), _store(64)  # type: ignore[no-untyped-call]


@intrinsic
def word_at(typing_context, address, index):  # type: ignore[no-untyped-def]
    """Return the index-th int64 from an address on."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        value = builder.load(_place(builder, *arguments))  # type: ignore[no-untyped-call]
        value.align = 1
        return value

    return types.int64(types.int64, types.int64), generate


@intrinsic
def put_word(typing_context, address, index, value):  # type: ignore[no-untyped-def]
    """Write the index-th int64 from an address on."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        place = _place(builder, *arguments[:2])  # type: ignore[no-untyped-call]
        builder.store(arguments[2], place).align = 1
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _place(builder, address, index):  # type: ignore[no-untyped-def]
    pointer = builder.inttoptr(address, ir.IntType(64).as_pointer())
    return builder.gep(pointer, [index])


@inner_kernel
def bytes_at(address, size):  # type: ignore[no-untyped-def]
    """Return the memory as an array of uint8, which owns nothing."""
    return numba.carray(_pointer(address), (size,))


@inner_kernel
def copy(target, source, size):  # type: ignore[no-untyped-def]
    """Copy by words, the last one overlapping: no byte outside the two ranges is touched."""
    if size >= 8:
        last = size - 8
        at = 0
        while at < last:
            store64(target + at, load64(source + at))
            at += 8
        store64(target + last, load64(source + last))
    elif size >= 4:
        store32(target, load32(source))
        store32(target + size - 4, load32(source + size - 4))
    else:
        for at in range(size):
            store8(target + at, load8(source + at))


@inner_kernel
def is_utf8(data, at, end):  # type: ignore[no-untyped-def]
    """Return True if data[at:end] is UTF-8: no overlong form, no surrogate."""
    while at < end:
        byte = data[at]
        at += 1
        if byte < 0x80:
            continue
        low, high = 0x80, 0xBF
        if 0xC2 <= byte <= 0xDF:
            more = 1
        elif 0xE0 <= byte <= 0xEF:
            more = 2
            low = 0xA0 if byte == 0xE0 else low
            high = 0x9F if byte == 0xED else high
        elif 0xF0 <= byte <= 0xF4:
            more = 3
            low = 0x90 if byte == 0xF0 else low
            high = 0x8F if byte == 0xF4 else high
        else:
            return False
        if at + more > end:
            return False
        for _ in range(more):
            if data[at] < low or data[at] > high:
                return False
            low, high = 0x80, 0xBF
            at += 1
    return True


@inner_kernel
def is_text(at, size):  # type: ignore[no-untyped-def]
    """Return True if bytes are UTF-8: ASCII by words, the last one overlapping, else by bytes."""
    high = np.uint64(0)
    if size >= 8:
        last = size - 8
        place = 0
        while place < last:
            high |= load64(at + place)
            place += 8
        high |= load64(at + last)
    else:
        for place in range(size):
            high |= load8(at + place)
    return high & _TOP_BITS == np.uint64(0) or is_utf8(bytes_at(at, size), 0, size)


@inner_kernel
def zigzag(number):  # type: ignore[no-untyped-def]
    """Return a signed number in zigzag: 0, -1, 1, -2, … become 0, 1, 2, 3 and so on."""
    return np.uint64((number << 1) ^ (number >> 63))


@inner_kernel
def put_zigzag(at, number):  # type: ignore[no-untyped-def]
    """Write a number in zigzag, in at most ten bytes; return the address after the number."""
    remaining = zigzag(number)
    while remaining >= np.uint64(0x80):
        store8(at, (remaining & np.uint64(0x7F)) | np.uint64(0x80))
        remaining >>= np.uint64(7)
        at += 1
    store8(at, remaining)
    return at + 1


@_kernel
def copy_spans(starts, offsets, target):  # type: ignore[no-untyped-def]
    """Copy bytes one after another.

    Args:
        starts: their addresses.
        offsets: where each goes in the target, one more than there are starts; so its length.
        target: an address with room for the last offset.
    """
    for row in range(len(starts)):
        begin = np.int64(offsets[row])
        copy(target + begin, starts[row], np.int64(offsets[row + 1]) - begin)


@inner_kernel
def _is_same(one, other, size):  # type: ignore[no-untyped-def]
    """True for the same bytes; from their end, as keys of a map more often begin alike."""
    for place in range(size - 1, -1, -1):  # noqa: SIM110  numba has no all()
        if load8(one + place) != load8(other + place):
            return False
    return True


@_kernel
def may_repeat(starts, sizes, counts):  # type: ignore[no-untyped-def]
    """Return whether a map has a key twice, or so many keys that another way finds it sooner.

    Args:
        starts: the address of each key, one map after another.
        sizes: the bytes of each key.
        counts: how many keys each map has.
    """
    first = np.int64(0)
    for row in range(len(counts)):
        after = first + counts[row]
        if counts[row] > PAIRED_MAX:
            return True
        for one in range(first, after):
            for other in range(one + 1, after):
                if sizes[one] == sizes[other] and _is_same(starts[one], starts[other], sizes[one]):
                    return True
        first = after
    return False


@_kernel
def read_envelopes(address, starts, lengths, ids, verdicts):  # type: ignore[no-untyped-def]
    """Read the schema id of each value; return True if all values have the same schema.

    Args:
        address: the start of the data, from which `starts` count.
        starts: where each value begins.
        lengths: bytes, -1 for null.
        ids: gets the ids, 0 where there is none.
        verdicts: gets GOOD, TOMBSTONE, TOO_SHORT or WRONG_MAGIC.
    """
    is_same = len(starts) > 0
    for row in range(len(starts)):
        at = address + starts[row]
        verdict = GOOD
        if lengths[row] < 0:
            verdict = TOMBSTONE
        elif lengths[row] < ENVELOPE_SIZE:
            verdict = TOO_SHORT
        elif load8(at) != np.uint64(0):
            verdict = WRONG_MAGIC
        value = np.uint64(0)
        if verdict == GOOD:
            for index in range(1, ENVELOPE_SIZE):
                value = (value << np.uint64(8)) | load8(at + index)
        ids[row] = np.int32(np.int64(value))
        verdicts[row] = verdict
        is_same = is_same and verdict == GOOD and ids[row] == ids[0]
    return is_same
