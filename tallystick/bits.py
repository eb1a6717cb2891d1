"""Words of 64 bits, for kernels: single instructions that numba has no name for."""

from tallystick import kernel_cache  # noqa: I001  it must come before numba

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

assert kernel_cache  # imported for its effect


@intrinsic
def trailing_zeros(typing_context, word):  # type: ignore[no-untyped-def]
    """How many low bits are 0; the word is not 0."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@intrinsic
def leading_zeros(typing_context, word):  # type: ignore[no-untyped-def]
    """How many high bits are 0; the word is not 0."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@intrinsic
def multiply_high(typing_context, left, right):  # type: ignore[no-untyped-def]
    """The high 64 bits of the product of 128."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(each, wide) for each in arguments))
        high = builder.lshr(product, ir.Constant(wide, 64))
        return builder.trunc(high, ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), generate
