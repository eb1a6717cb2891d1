"""Types of expressions: the common type of two, and casts. Source: Spark's ANSI mode."""

import datetime
import re
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.codec.ddl import ddl_of_type
from tallystick.expressions.nodes import Bound, ExpressionError, Value
from tallystick.state.schema import type_of

T = pa.types
TIMESTAMP = pa.timestamp("us", "UTC")
INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
_DIGITS = {pa.int8(): 3, pa.int16(): 5, pa.int32(): 10, pa.int64(): 20}
"""The digits of the decimals that whole numbers become."""
DECIMAL_DIGITS_MAX = 38
EXACT_DIGITS = 15
"""Decimals of so many digits are doubles by one division."""


def is_decimal(kind: pa.DataType) -> bool:
    """True for a decimal of up to 38 digits."""
    return bool(T.is_decimal128(kind))


def is_number(kind: pa.DataType) -> bool:
    """True for whole numbers, floats and decimals."""
    return bool(T.is_signed_integer(kind) or T.is_floating(kind) or is_decimal(kind))


def as_decimal(kind: pa.DataType) -> pa.DataType:
    """Return the decimal type that holds all values of a number's type."""
    return kind if is_decimal(kind) else pa.decimal128(_DIGITS[kind], 0)


def common_type(one: pa.DataType, other: pa.DataType, what: str) -> pa.DataType:
    """Return the type to which both sides of a comparison or two branches are cast.

    Raises:
        ExpressionError: there is none.
    """
    if one == other:
        return one
    if T.is_null(one) or T.is_null(other):
        return other if T.is_null(one) else one
    if is_number(one) and is_number(other):
        return _common_number(one, other, what)
    if {one, other} == {pa.date32(), TIMESTAMP}:
        return TIMESTAMP
    raise ExpressionError(
        f"{what}: {shown(one)} and {shown(other)} have no common type: CAST one of them"
    )


def _common_number(one: pa.DataType, other: pa.DataType, what: str) -> pa.DataType:
    if T.is_signed_integer(one) and T.is_signed_integer(other):
        return max(one, other, key=lambda kind: kind.bit_width)
    if T.is_floating(one) or T.is_floating(other):
        return pa.float64()  # a float beside a whole number too
    one, other = as_decimal(one), as_decimal(other)
    scale = max(one.scale, other.scale)
    whole = max(one.precision - one.scale, other.precision - other.scale)
    if whole + scale > DECIMAL_DIGITS_MAX:
        raise ExpressionError(
            f"{what}: {shown(one)} and {shown(other)} have no decimal of {DECIMAL_DIGITS_MAX} "
            f"digits in common: CAST one of them"
        )
    return pa.decimal128(whole + scale, scale)


def shown(kind: pa.DataType) -> str:
    """Return a type as DDL names it."""
    return ddl_of_type(kind)


def cast(bound: Bound, kind: pa.DataType, what: str) -> Bound:
    """Return a node as another type.

    Args:
        bound: the node.
        kind: the type.
        what: its text, for messages.

    Raises:
        ExpressionError: there is no such cast here, though Spark may have one.
    """
    if bound.kind == kind:
        return bound
    if T.is_null(bound.kind):
        return Bound(kind, lambda _: pa.scalar(None, kind), is_literal=True)
    if bound.is_literal and T.is_string(bound.kind) and (T.is_date(kind) or T.is_timestamp(kind)):
        return _moment(bound.literal, kind, what)
    if bound.is_literal and is_decimal(kind) and T.is_integer(bound.kind):
        exact = pa.scalar(None if bound.literal is None else Decimal(bound.literal), kind)
        return Bound(kind, lambda _: exact, literal=bound.literal, is_literal=True)
    convert = _conversion(bound.kind, kind, what)
    run = bound.run
    fails = bound.may_fail or _may_fail(bound.kind, kind)
    return Bound(kind, lambda rows: convert(run(rows)), fails)


def _may_fail(one: pa.DataType, other: pa.DataType) -> bool:
    if T.is_boolean(one) or T.is_string(other) or T.is_date(one):
        return False
    is_wider = (
        T.is_signed_integer(one) and T.is_signed_integer(other) and other.bit_width >= one.bit_width
    )
    return not (is_wider or (T.is_float64(other) and not T.is_string(one)))


_MOMENT = re.compile(
    r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d:\d\d)?)?", re.ASCII
)


def _moment(text: str, kind: pa.DataType, what: str) -> Bound:
    """Return the moment that a literal names.

    Raises:
        ExpressionError: it names none, in the form that is read here.
    """
    try:
        if not _MOMENT.fullmatch(text.strip()):  # Python reads more forms than Spark
            raise ValueError(text)
        moment = datetime.datetime.fromisoformat(text.strip())
    except ValueError:
        raise ExpressionError(
            f"{what}: expected a date or time such as '2026-11-27' or '2026-11-27 14:03:00'"
        ) from None
    if T.is_date(kind):
        value: object = moment.date()
    else:
        value = moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
    scalar = pa.scalar(value, kind)
    return Bound(kind, lambda _: scalar, literal=value, is_literal=True)


def _conversion(one: pa.DataType, other: pa.DataType, what: str):  # type: ignore[no-untyped-def]
    if T.is_string(one):
        return _of_text(other, what)
    if is_decimal(other) and (T.is_signed_integer(one) or is_decimal(one)):
        return lambda value: _to_decimal(value, other, what)
    if is_decimal(one) and T.is_float64(other):
        return _decimal_to_double
    if T.is_boolean(one) and is_number(other) and not is_decimal(other):
        return lambda value: pc.cast(value, other)
    if T.is_floating(one) and T.is_signed_integer(other):
        return lambda value: _truncated(value, other, what)
    if is_decimal(one) and T.is_signed_integer(other):
        return lambda value: checked(
            lambda: pc.cast(pc.round(value, 0, "towards_zero"), other),
            what,
            f"beyond {shown(other)}",
        )
    is_plain = (
        (T.is_signed_integer(one) and (is_number(other) or T.is_string(other)))
        or (T.is_floating(one) and T.is_floating(other))
        or (T.is_boolean(one) and T.is_string(other))
        or (T.is_date(one) and (T.is_string(other) or other == TIMESTAMP))
        or (one == TIMESTAMP and T.is_date(other))
    )
    if is_plain:
        safe = not (T.is_floating(other) or T.is_date(other))  # a double of a bigint is rounded
        return lambda value: checked(
            lambda: pc.cast(value, other, safe=safe), what, f"beyond {shown(other)}"
        )
    raise ExpressionError(
        f"{what}: no cast from {shown(one)} to {shown(other)} here that is certain to be Spark's: "
        f"use a function of map_batches"
    )


def checked(run, what: str, reason: str) -> Value:  # type: ignore[no-untyped-def]
    """Call Arrow, and put its error into words of the expression."""
    try:
        return run()
    except pa.ArrowInvalid:
        raise ValueError(f"{what}: a value is {reason}") from None


def _to_decimal(value: Value, kind: pa.DataType, what: str) -> Value:
    if is_decimal(value.type) and value.type.scale > kind.scale:
        value = pc.round(value, kind.scale, "half_towards_infinity")
    if T.is_integer(value.type):  # Arrow wants room for every int, and Spark for these
        value = pc.cast(value, as_decimal(value.type))
    return checked(lambda: pc.cast(value, kind), what, f"beyond {shown(kind)}")


def _decimal_to_double(value: Value) -> Value:
    if value.type.precision <= EXACT_DIGITS:
        return pc.divide(pc.cast(_units(value), pa.float64()), float(10**value.type.scale))
    if isinstance(value, pa.Scalar):
        number = value.as_py()
        return pa.scalar(None if number is None else float(number), pa.float64())
    return pa.array(
        [None if one is None else float(one) for one in value.to_pylist()], pa.float64()
    )


def _units(value: Value) -> Value:
    """Return a decimal of few digits as whole numbers of its last digit."""
    if isinstance(value, pa.Scalar):
        number = value.as_py()
        units = None if number is None else int(number.scaleb(value.type.scale))
        return pa.scalar(units, pa.int64())
    words = np.frombuffer(value.buffers()[1], np.int64)[2 * value.offset :: 2][: len(value)]
    return pa.array(words, pa.int64(), mask=value.is_null().to_numpy(zero_copy_only=False))


def _truncated(value: Value, kind: pa.DataType, what: str) -> Value:
    whole = pc.trunc(value)
    low, high = -(2.0 ** (kind.bit_width - 1)), 2.0 ** (kind.bit_width - 1)
    fits = pc.and_(pc.greater_equal(whole, low), pc.less(whole, high))
    if pc.any(pc.invert(fits)).as_py() if isinstance(fits, pa.Array) else fits.as_py() is False:
        raise ValueError(f"{what}: a value is beyond {shown(kind)}")
    return pc.cast(whole, kind)


_SPACE = "".join(map(chr, range(0x21)))
_WHOLE = r"^[+-]?[0-9]+$"


def _of_text(kind: pa.DataType, what: str):  # type: ignore[no-untyped-def]
    if T.is_signed_integer(kind):  # doubles have forms that Arrow does not read, such as 1d

        def number(value: Value) -> Value:
            text = pc.utf8_trim(value, _SPACE)
            fits = pc.match_substring_regex(text, _WHOLE)
            wrong = pc.filter(text, pc.invert(fits)) if isinstance(fits, pa.Array) else None
            if wrong is not None and len(wrong) - wrong.null_count:
                first = wrong.drop_null()[0].as_py()
                raise ValueError(f"{what}: {first!r} is no {shown(kind)}")
            if wrong is None and fits.as_py() is False:
                raise ValueError(f"{what}: {text.as_py()!r} is no {shown(kind)}")
            plain = pc.replace_substring_regex(text, r"^\+", "")
            return checked(lambda: pc.cast(plain, kind), what, f"beyond {shown(kind)}")

        return number
    if T.is_boolean(kind):
        return lambda value: _truth(value, what)
    raise ExpressionError(
        f"{what}: no cast from string to {shown(kind)} here that is certain to be Spark's: use a "
        f"function of map_batches"
    )


_TRUE, _FALSE = ("t", "true", "y", "yes", "1"), ("f", "false", "n", "no", "0")


def _truth(value: Value, what: str) -> Value:
    text = pc.ascii_lower(pc.utf8_trim(value, _SPACE))
    is_true = pc.is_in(text, pa.array(_TRUE))
    known = pc.or_(is_true, pc.is_in(text, pa.array(_FALSE)))
    wrong = pc.and_(pc.invert(known), pc.is_valid(text))
    if (pc.any(wrong) if isinstance(wrong, pa.Array) else wrong).as_py():
        raise ValueError(f"{what}: a text is no boolean")
    return pc.if_else(pc.is_valid(text), is_true, pa.scalar(None, pa.bool_()))


def type_named(text: str, what: str) -> pa.DataType:
    """Return the type of a CAST.

    Raises:
        ExpressionError: there is no such type here.
    """
    return type_of(text.strip().lower(), what)
