"""Instructions for kernels that numba has no name for: words of bits, memory by address.

Access by address counts no references of arrays and needs a single compiled version. No invariant
is kept here: a kernel checks every range itself before it reads or writes.
"""

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

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
