"""The functions and operators of expressions: types and Arrow calls, each as Spark's ANSI mode.

`FUNCTIONS` has a binder for each name: given its bound arguments, the function's type and its run.
A function is here only where Arrow gives what Spark gives; `tests/differential` compares them.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.expressions.casts import (
    DECIMAL_DIGITS_MAX,
    TIMESTAMP,
    as_decimal,
    cast,
    checked,
    common_type,
    is_decimal,
    is_number,
    shown,
)
from tallystick.expressions.nodes import Bound, ExpressionError, Value

T = pa.types
Binder = Callable[[Sequence[Bound], str], Bound]
Rows = pa.RecordBatch


def column_of(value: Value, rows: Rows) -> pa.Array:
    """Return a value as a column of all rows."""
    if isinstance(value, pa.Scalar):
        if T.is_null(value.type) or not value.is_valid:
            return pa.nulls(rows.num_rows, value.type)
        return pa.repeat(value, rows.num_rows)
    return value.combine_chunks() if isinstance(value, pa.ChunkedArray) else value


def where_needed(bound: Bound, rows: Rows, needed: Value) -> Value:
    """Compute a value for the rows that need it alone; it is null for the others.

    Args:
        bound: the node.
        rows: all of them.
        needed: true for rows that need the value; null is false.
    """
    if not bound.may_fail:
        return bound.run(rows)
    mask = pc.fill_null(column_of(needed, rows), False)
    if mask.true_count == rows.num_rows:
        return bound.run(rows)
    chosen = rows.filter(mask)
    values = column_of(bound.run(chosen), chosen)
    places = np.cumsum(mask.to_numpy(zero_copy_only=False), dtype=np.int64) - 1
    return values.take(pa.array(places, pa.int64(), mask=~mask.to_numpy(zero_copy_only=False)))


def simple(
    kinds: Callable[[Sequence[pa.DataType]], pa.DataType | None],
    call: Callable[..., Value],
    *,
    may_fail: bool = False,
    counts: Sequence[int] = (1,),
) -> Binder:
    """Return the binder of a function whose values follow from its arguments row by row.

    Args:
        kinds: the type of the result, from those of the arguments; None: it takes no such ones.
        call: computes values.
        may_fail: some values raise an error.
        counts: how many arguments there may be.
    """

    def bind(args: Sequence[Bound], what: str) -> Bound:
        _check_count(args, counts, what)
        kind = kinds([one.kind for one in args])
        if kind is None:
            given = ", ".join(shown(one.kind) for one in args)
            raise ExpressionError(f"{what}: it does not take {given}")
        fails = may_fail or any(one.may_fail for one in args)

        def run(rows: Rows) -> Value:
            values = [one.run(rows) for one in args]
            if may_fail:
                return checked(lambda: call(*values), what, f"beyond {shown(kind)}")
            return call(*values)

        return Bound(kind, run, fails)

    return bind


def _check_count(args: Sequence[Bound], counts: Sequence[int], what: str) -> None:
    if len(args) not in counts:
        raise ExpressionError(
            f"{what}: {len(args)} arguments, expected {' or '.join(map(str, counts))}"
        )


def of(kind: pa.DataType, *tests: Callable[[pa.DataType], bool]):  # type: ignore[no-untyped-def]
    """Return a rule of types: arguments that pass the tests give a value of a type."""

    def rule(kinds: Sequence[pa.DataType]) -> pa.DataType | None:
        fits = all(test(one) or T.is_null(one) for test, one in zip(tests, kinds, strict=False))
        return kind if fits else None

    return rule


# Arithmetic.


def arithmetic(call: Callable[[Value, Value], Value], sign: str) -> Binder:
    """Return the binder of +, - or *."""

    def bind(args: Sequence[Bound], what: str) -> Bound:
        one, other = args
        if not all(is_number(arg.kind) or T.is_null(arg.kind) for arg in args):
            return _moved(args, sign, what)
        if is_decimal(one.kind) or is_decimal(other.kind):
            if not any(T.is_floating(arg.kind) for arg in args):
                return _decimals(args, call, sign, what)
        kind = common_type(one.kind, other.kind, what)
        if T.is_null(kind):
            raise ExpressionError(f"{what}: both sides are NULL: CAST one to its type")
        left, right = cast(one, kind, what), cast(other, kind, what)
        may_fail = T.is_integer(kind)
        return Bound(
            kind,
            lambda rows: checked(
                lambda: call(left.run(rows), right.run(rows)), what, f"beyond {shown(kind)}"
            ),
            may_fail or left.may_fail or right.may_fail,
        )

    return bind


def _decimal_of(bound: Bound, what: str) -> Bound:
    """Return a number as a decimal; a literal has as many digits as it is written with."""
    if bound.is_literal and T.is_integer(bound.kind) and bound.literal is not None:
        digits = len(str(abs(bound.literal)))
        return cast(bound, pa.decimal128(digits, 0), what)
    return cast(bound, as_decimal(bound.kind), what) if is_number(bound.kind) else bound


def _decimals(
    args: Sequence[Bound], call: Callable[[Value, Value], Value], sign: str, what: str
) -> Bound:
    left, right = (_decimal_of(arg, what) for arg in args)
    if T.is_null(left.kind) or T.is_null(right.kind):
        raise ExpressionError(f"{what}: NULL beside a decimal: CAST it to its type")
    (p1, s1), (p2, s2) = ((one.kind.precision, one.kind.scale) for one in (left, right))
    if sign == "*":
        precision, scale = p1 + p2 + 1, s1 + s2
    else:
        scale = max(s1, s2)
        precision = max(p1 - s1, p2 - s2) + scale + 1
    if precision > DECIMAL_DIGITS_MAX:
        raise ExpressionError(
            f"{what}: {shown(left.kind)} {sign} {shown(right.kind)} needs {precision} digits, and "
            f"there are {DECIMAL_DIGITS_MAX}: CAST to fewer"
        )
    kind = pa.decimal128(precision, scale)
    return Bound(
        kind,
        lambda rows: pc.cast(call(left.run(rows), right.run(rows)), kind),
        left.may_fail or right.may_fail,
    )


def _moved(args: Sequence[Bound], sign: str, what: str) -> Bound:
    """Bind a date or timestamp plus or minus an INTERVAL."""
    one, other = args
    if T.is_duration(one.kind) and sign == "+":
        one, other = other, one
    if T.is_duration(other.kind) and sign in "+-":
        if T.is_date(one.kind):
            one = cast(one, TIMESTAMP, what)
        if one.kind == TIMESTAMP:
            call = pc.add_checked if sign == "+" else pc.subtract_checked
            return Bound(
                TIMESTAMP,
                lambda rows: checked(
                    lambda: call(one.run(rows), other.run(rows)), what, "beyond timestamp"
                ),
                True,
            )
    given = f"{shown_or(one.kind)} {sign} {shown_or(other.kind)}"
    raise ExpressionError(f"{what}: there is no {given}")


def shown_or(kind: pa.DataType) -> str:
    """Return a type as DDL names it; "interval" for a length of time."""
    return "interval" if T.is_duration(kind) else "NULL" if T.is_null(kind) else shown(kind)


def _refuse_zero(divisor: Value, dividend: Value, what: str) -> None:
    zero = pc.and_(pc.equal(divisor, pa.scalar(0, divisor.type)), pc.is_valid(dividend))
    if (pc.any(zero) if isinstance(zero, pa.Array) else zero).as_py():
        raise ValueError(f"{what}: division by zero: write nullif(…, 0) for a null")


def _divide(args: Sequence[Bound], what: str) -> Bound:
    for arg in args:
        if is_decimal(arg.kind) and not any(T.is_floating(other.kind) for other in args):
            raise ExpressionError(f"{what}: division of decimals: CAST one side to double")
        if not (is_number(arg.kind) or T.is_null(arg.kind)):
            raise ExpressionError(f"{what}: there is no division of {shown(arg.kind)}")
    left, right = (cast(arg, pa.float64(), what) for arg in args)

    def run(rows: Rows) -> Value:
        dividend, divisor = left.run(rows), right.run(rows)
        _refuse_zero(divisor, dividend, what)
        return pc.divide(dividend, divisor)

    return Bound(pa.float64(), run, True)


def _whole(remainder: bool) -> Binder:
    def bind(args: Sequence[Bound], what: str) -> Bound:
        if not all(T.is_signed_integer(arg.kind) for arg in args):
            given = ", ".join(shown_or(arg.kind) for arg in args)
            raise ExpressionError(f"{what}: only whole numbers have it here, not {given}")
        kind = common_type(args[0].kind, args[1].kind, what) if remainder else pa.int64()
        left, right = (cast(arg, kind, what) for arg in args)

        def run(rows: Rows) -> Value:
            dividend, divisor = left.run(rows), right.run(rows)
            _refuse_zero(divisor, dividend, what)
            if not remainder:
                return checked(lambda: pc.divide_checked(dividend, divisor), what, "beyond bigint")
            is_minus_one = pc.equal(divisor, pa.scalar(-1, kind))
            divisor = pc.if_else(is_minus_one, pa.scalar(1, kind), divisor)  # no overflow
            whole = pc.multiply(pc.divide(dividend, divisor), divisor)
            return pc.subtract(dividend, whole)

        return Bound(kind, run, True)

    return bind


def _negate(args: Sequence[Bound], what: str) -> Bound:
    (one,) = args
    if not is_number(one.kind):
        raise ExpressionError(f"{what}: there is no minus of {shown_or(one.kind)}")
    if one.is_literal and one.literal is not None:
        return literal(-one.literal, one.kind)
    return Bound(
        one.kind,
        lambda rows: checked(
            lambda: pc.negate_checked(one.run(rows)), what, f"beyond {shown(one.kind)}"
        ),
        True,
    )


def literal(value: Any, kind: pa.DataType) -> Bound:
    """Return a value of all rows."""
    scalar = pa.scalar(value, kind)
    return Bound(kind, lambda _: scalar, literal=value, is_literal=True)


# Comparisons: NaN equals NaN, and is above all numbers.


def compare(sign: str) -> Binder:
    """Return the binder of a comparison."""

    def bind(args: Sequence[Bound], what: str) -> Bound:
        left, right = _alike(args, what)
        kind = left.kind
        if T.is_nested(kind) or T.is_duration(kind):
            raise ExpressionError(f"{what}: values of {shown_or(kind)} are not compared here")
        call = _COMPARED_FLOATS[sign] if T.is_floating(kind) else _COMPARED[sign]
        fails = left.may_fail or right.may_fail
        return Bound(pa.bool_(), lambda rows: call(left.run(rows), right.run(rows)), fails)

    return bind


def _alike(args: Sequence[Bound], what: str) -> list[Bound]:
    """Return arguments cast to their common type; a text beside a moment is a moment."""
    kinds = [arg.kind for arg in args]
    moments = [kind for kind in kinds if T.is_date(kind) or T.is_timestamp(kind)]
    if moments:
        best = TIMESTAMP if TIMESTAMP in moments else moments[0]
        args = [
            cast(arg, best, what) if arg.is_literal and T.is_string(arg.kind) else arg
            for arg in args
        ]
    kind = reduce(lambda one, other: common_type(one, other, what), (arg.kind for arg in args))
    return [cast(arg, kind, what) for arg in args]


def _same(one: Value, other: Value) -> Value:
    return pc.or_(pc.equal(one, other), pc.and_(pc.is_nan(one), pc.is_nan(other)))


def _above(one: Value, other: Value) -> Value:
    return pc.or_(pc.greater(one, other), pc.and_(pc.is_nan(one), pc.invert(pc.is_nan(other))))


_COMPARED: dict[str, Callable[[Value, Value], Value]] = {
    "=": pc.equal,
    "<>": pc.not_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
    "<": pc.less,
    "<=": pc.less_equal,
}
_COMPARED_FLOATS: dict[str, Callable[[Value, Value], Value]] = {
    "=": _same,
    "<>": lambda one, other: pc.invert(_same(one, other)),
    ">": _above,
    ">=": lambda one, other: pc.or_(_same(one, other), _above(one, other)),
    "<": lambda one, other: _above(other, one),
    "<=": lambda one, other: pc.or_(_same(one, other), _above(other, one)),
}


def _null_safe(args: Sequence[Bound], what: str) -> Bound:
    left, right = _alike(args, what)
    equal = compare("=")([left, right], what)

    def run(rows: Rows) -> Value:
        one, other = left.run(rows), right.run(rows)
        both_null = pc.and_(pc.is_null(one), pc.is_null(other))
        return pc.or_kleene(both_null, pc.fill_null(equal.run(rows), False))

    return Bound(pa.bool_(), run, equal.may_fail)


# Logic: the right side runs only for the rows that the left one leaves open.


def _truth(args: Sequence[Bound], what: str) -> list[Bound]:
    for arg in args:
        if not (T.is_boolean(arg.kind) or T.is_null(arg.kind)):
            raise ExpressionError(f"{what}: expected a boolean, not {shown_or(arg.kind)}")
    return [cast(arg, pa.bool_(), what) for arg in args]


def _logic(call: Callable[[Value, Value], Value], decided: bool) -> Binder:
    def bind(args: Sequence[Bound], what: str) -> Bound:
        left, right = _truth(args, what)

        def run(rows: Rows) -> Value:
            one = left.run(rows)
            is_open = pc.invert(pc.fill_null(pc.equal(one, pa.scalar(decided)), False))
            return call(one, where_needed(right, rows, is_open))

        return Bound(pa.bool_(), run, left.may_fail or right.may_fail)

    return bind


def _not(args: Sequence[Bound], what: str) -> Bound:
    (one,) = _truth(args, what)
    return Bound(pa.bool_(), lambda rows: pc.invert(one.run(rows)), one.may_fail)


def _is(value: bool | None) -> Binder:
    def bind(args: Sequence[Bound], what: str) -> Bound:
        (one,) = args if value is None else _truth(args, what)
        if value is None:
            return Bound(pa.bool_(), lambda rows: pc.is_null(one.run(rows)), one.may_fail)
        wanted = pa.scalar(value)
        return Bound(
            pa.bool_(),
            lambda rows: pc.fill_null(pc.equal(one.run(rows), wanted), False),
            one.may_fail,
        )

    return bind


def _in(args: Sequence[Bound], what: str) -> Bound:
    args = _alike(args, what)
    equal = [compare("=")([args[0], other], what) for other in args[1:]]
    return reduce(lambda one, other: _logic(pc.or_kleene, True)([one, other], what), equal)


# Conditions: a branch runs only for its rows.


def _case(args: Sequence[Bound], what: str) -> Bound:
    """Bind `when, then, when, then, …, else`."""
    conditions = _truth(args[:-1:2], what)
    results = _alike([*args[1:-1:2], args[-1]], what)
    kind = results[0].kind
    if T.is_null(kind):
        raise ExpressionError(f"{what}: all branches are NULL: CAST one to its type")

    def run(rows: Rows) -> Value:
        is_open: pa.Array = pa.repeat(pa.scalar(True), rows.num_rows)
        number = np.full(rows.num_rows, len(conditions), np.int32)
        values = []
        for at, (condition, result) in enumerate(zip(conditions, results, strict=False)):
            holds = pc.and_(
                pc.fill_null(column_of(where_needed(condition, rows, is_open), rows), False),
                is_open,
            )
            number[holds.to_numpy(zero_copy_only=False)] = at
            is_open = pc.and_(is_open, pc.invert(holds))
            values.append(column_of(where_needed(result, rows, holds), rows))
        values.append(column_of(where_needed(results[-1], rows, is_open), rows))
        places = number.astype(np.int64) * rows.num_rows + np.arange(rows.num_rows)
        return pa.concat_arrays(values).take(pa.array(places))

    return Bound(kind, run, any(arg.may_fail for arg in args))


def _if(args: Sequence[Bound], what: str) -> Bound:
    _check_count(args, (3,), what)
    return _case(args, what)


def _coalesce(args: Sequence[Bound], what: str) -> Bound:
    args = _alike(args, what)

    def run(rows: Rows) -> Value:
        value = column_of(args[0].run(rows), rows)
        for arg in args[1:]:
            missing = pc.is_null(value)
            if not missing.true_count:
                break
            value = pc.if_else(missing, where_needed(arg, rows, missing), value)
        return value

    return Bound(args[0].kind, run, any(arg.may_fail for arg in args))


def _nullif(args: Sequence[Bound], what: str) -> Bound:
    _check_count(args, (2,), what)
    equal, one = compare("=")(args, what), args[0]
    null = pa.scalar(None, one.kind)
    return Bound(
        one.kind,
        lambda rows: pc.if_else(pc.fill_null(equal.run(rows), False), null, one.run(rows)),
        equal.may_fail,
    )


def _extreme(sign: str) -> Binder:
    def bind(args: Sequence[Bound], what: str) -> Bound:
        if len(args) < 2:
            raise ExpressionError(f"{what}: expected two arguments at least")
        args = _alike(args, what)
        kind = args[0].kind
        call = _COMPARED_FLOATS[sign] if T.is_floating(kind) else _COMPARED[sign]

        def better(one: Value, other: Value) -> Value:
            takes_other = pc.or_kleene(pc.is_null(one), call(other, one))
            return pc.if_else(pc.fill_null(takes_other, False), other, one)

        return Bound(
            kind,
            lambda rows: reduce(better, (column_of(arg.run(rows), rows) for arg in args)),
            any(arg.may_fail for arg in args),
        )

    return bind


# Texts.


def _full_case(quick: Callable[[Value], Value], slow: Callable[[str], str]):  # type: ignore[no-untyped-def]
    """Return a change of case: Arrow's for ASCII, Unicode's full mapping for all else."""

    def call(value: Value) -> Value:
        if isinstance(value, pa.Scalar):
            text = value.as_py()
            return pa.scalar(None if text is None else slow(text), pa.string())
        is_ascii = pc.string_is_ascii(value)
        if pc.all(is_ascii, min_count=0).as_py() is not False:
            return quick(value)
        return pa.array(
            [None if text is None else slow(text) for text in value.to_pylist()], pa.string()
        )

    return call


def _constant(bound: Bound, what: str) -> Any:
    if not bound.is_literal or bound.literal is None:
        raise ExpressionError(f"{what}: this argument has to be a literal here")
    return bound.literal


def _substring(args: Sequence[Bound], what: str) -> Bound:
    _check_count(args, (2, 3), what)
    _check_text(args[:1], what)
    at = _constant(args[1], what)
    count = _constant(args[2], what) if len(args) == 3 else None
    start = at - 1 if at > 0 else at
    stop = None if count is None else start + max(count, 0)
    if start < 0 and stop is not None and stop >= 0:
        stop = None
    text = args[0]
    if count is not None and count <= 0:
        return _of_text(text, lambda value: pc.utf8_slice_codeunits(value, 0, 0))
    return _of_text(text, lambda value: pc.utf8_slice_codeunits(value, start, stop))


def _of_text(text: Bound, call: Callable[[Value], Value]) -> Bound:
    return Bound(pa.string(), lambda rows: call(text.run(rows)), text.may_fail)


def _check_text(args: Sequence[Bound], what: str) -> None:
    for arg in args:
        if not (T.is_string(arg.kind) or T.is_null(arg.kind)):
            raise ExpressionError(f"{what}: expected a string, not {shown_or(arg.kind)}")


def _concat(args: Sequence[Bound], what: str) -> Bound:
    texts = [
        cast(arg, pa.string(), what) if T.is_integer(arg.kind) or T.is_boolean(arg.kind) else arg
        for arg in args
    ]
    texts = [cast(text, pa.string(), what) if T.is_null(text.kind) else text for text in texts]
    _check_text(texts, what)
    fails = any(text.may_fail for text in texts)
    return Bound(
        pa.string(),
        lambda rows: pc.binary_join_element_wise(
            *(column_of(text.run(rows), rows) for text in texts), ""
        ),
        fails,
    )


def _with_literal(make: Callable[[Value, str], Value], kind: pa.DataType) -> Binder:
    def bind(args: Sequence[Bound], what: str) -> Bound:
        _check_count(args, (2,), what)
        _check_text(args, what)
        text, pattern = args[0], _constant(args[1], what)
        return Bound(kind, lambda rows: make(text.run(rows), pattern), text.may_fail)

    return bind


def _replace(args: Sequence[Bound], what: str) -> Bound:
    _check_count(args, (2, 3), what)
    _check_text(args, what)
    old, new = _constant(args[1], what), _constant(args[2], what) if len(args) == 3 else ""
    if not old:
        return args[0]
    return _of_text(args[0], lambda value: pc.replace_substring(value, old, new))


# Numbers.


def _round(args: Sequence[Bound], what: str) -> Bound:
    _check_count(args, (1, 2), what)
    one, digits = args[0], _constant(args[1], what) if len(args) == 2 else 0
    if digits < 0 or not is_number(one.kind):
        raise ExpressionError(f"{what}: expected a number, and digits from 0")
    if T.is_integer(one.kind):
        return one
    if is_decimal(one.kind):
        scale = min(digits, one.kind.scale)
        precision = one.kind.precision - one.kind.scale + scale + (one.kind.scale > scale)
        return cast(one, pa.decimal128(min(precision, DECIMAL_DIGITS_MAX), scale), what)
    if one.kind != pa.float64():
        raise ExpressionError(f"{what}: a float: CAST it to double")
    return Bound(
        one.kind, lambda rows: _rounded(column_of(one.run(rows), rows), digits), one.may_fail
    )


def _rounded(values: pa.Array, digits: int) -> pa.Array:
    """Round doubles as their shortest decimal text, halves away from zero, as Spark does."""
    from decimal import ROUND_HALF_UP, Decimal

    numbers = values.to_numpy(zero_copy_only=False)
    with np.errstate(all="ignore"):
        scaled = numbers * 10.0**digits
        parts = np.abs(scaled) - np.floor(np.abs(scaled))
        whole = np.floor(np.abs(scaled)) + (parts >= 0.5)
        result = np.copysign(whole / 10.0**digits, numbers)
        is_large = ~(np.abs(scaled) < 2.0**52)
        result[is_large] = numbers[is_large]
        is_near = (np.abs(parts - 0.5) < 1e-3) & ~is_large  # is the text's digit a five?
    step = Decimal(1).scaleb(-digits)
    for at in np.flatnonzero(is_near):
        exact = Decimal(repr(float(numbers[at]))).quantize(step, ROUND_HALF_UP)
        result[at] = float(exact)
    result = result + 0.0  # BigDecimal knows no -0.0
    return pa.array(result, pa.float64(), mask=values.is_null().to_numpy(zero_copy_only=False))


def _to_whole(call: Callable[[Value], Value], name: str) -> Binder:
    def bind(args: Sequence[Bound], what: str) -> Bound:
        _check_count(args, (1,), what)
        (one,) = args
        if T.is_integer(one.kind):
            return cast(one, pa.int64(), what)
        if not T.is_float64(one.kind):
            raise ExpressionError(f"{what}: expected a whole number or a double: CAST it")
        return cast(
            Bound(one.kind, lambda rows: call(one.run(rows)), one.may_fail), pa.int64(), what
        )

    return bind


def _same_kind(test: Callable[[pa.DataType], bool]):  # type: ignore[no-untyped-def]
    return lambda kinds: kinds[0] if test(kinds[0]) else None


# Moments, in UTC.


def _field(call: Callable[[Value], Value], *, dates: bool = True) -> Binder:
    def bind(args: Sequence[Bound], what: str) -> Bound:
        _check_count(args, (1,), what)
        (one,) = args
        if not (one.kind == TIMESTAMP or (dates and T.is_date(one.kind))):
            raise ExpressionError(
                f"{what}: expected a date or a timestamp, not {shown_or(one.kind)}"
            )
        return Bound(
            pa.int32(), lambda rows: pc.cast(call(one.run(rows)), pa.int32()), one.may_fail
        )

    return bind


_UNITS = ("year", "quarter", "month", "week", "day", "hour", "minute", "second")


def _date_trunc(args: Sequence[Bound], what: str) -> Bound:
    _check_count(args, (2,), what)
    unit, one = str(_constant(args[0], what)).lower(), args[1]
    if unit not in _UNITS:
        raise ExpressionError(f"{what}: unit {unit!r}: expected one of {', '.join(_UNITS)}")
    if T.is_date(one.kind):
        one = cast(one, TIMESTAMP, what)
    if one.kind != TIMESTAMP:
        raise ExpressionError(f"{what}: expected a timestamp, not {shown_or(one.kind)}")
    return Bound(TIMESTAMP, lambda rows: pc.floor_temporal(one.run(rows), unit=unit), one.may_fail)


def _unix(divisor: int) -> Callable[[Value], Value]:
    def call(value: Value) -> Value:
        units = pc.cast(value, pa.int64())
        if divisor == 1:
            return units
        whole = pc.divide(units, divisor)  # towards zero; Spark's goes down
        rest = pc.subtract(units, pc.multiply(whole, divisor))
        return pc.subtract(whole, pc.cast(pc.less(rest, 0), pa.int64()))

    return call


def _moment_of(factor: int) -> Callable[[Value], Value]:
    return lambda value: pc.cast(
        pc.multiply_checked(pc.cast(value, pa.int64()), pa.scalar(factor, pa.int64())), TIMESTAMP
    )


def _date_add(sign: int) -> Binder:
    def bind(args: Sequence[Bound], what: str) -> Bound:
        _check_count(args, (2,), what)
        day, count = args
        if day.kind == TIMESTAMP:
            day = cast(day, pa.date32(), what)
        if not T.is_date(day.kind) or not T.is_integer(count.kind) or count.kind == pa.int64():
            raise ExpressionError(f"{what}: expected a date and an int")

        def run(rows: Rows) -> Value:
            days = pc.cast(day.run(rows), pa.int32())
            more = pc.multiply_checked(
                pc.cast(count.run(rows), pa.int32()), pa.scalar(sign, pa.int32())
            )
            return checked(
                lambda: pc.cast(pc.add_checked(days, more), pa.date32()), what, "beyond date"
            )

        return Bound(pa.date32(), run, True)

    return bind


def _datediff(args: Sequence[Bound], what: str) -> Bound:
    _check_count(args, (2,), what)
    days = [cast(arg, pa.date32(), what) if arg.kind == TIMESTAMP else arg for arg in args]
    if not all(T.is_date(day.kind) for day in days):
        raise ExpressionError(f"{what}: expected two dates")
    end, start = days

    def run(rows: Rows) -> Value:
        return pc.subtract(*(pc.cast(day.run(rows), pa.int32()) for day in (end, start)))

    return Bound(pa.int32(), run, end.may_fail or start.may_fail)


def _to_date(args: Sequence[Bound], what: str) -> Bound:
    _check_count(args, (1,), what)
    return cast(args[0], pa.date32(), what)


def _size(args: Sequence[Bound], what: str) -> Bound:
    _check_count(args, (1,), what)
    (one,) = args
    if not T.is_list(one.kind):
        raise ExpressionError(f"{what}: expected an array, not {shown_or(one.kind)}")
    return Bound(
        pa.int32(),
        lambda rows: pc.cast(pc.list_value_length(one.run(rows)), pa.int32()),
        one.may_fail,
    )


_TEXT = of(pa.string(), T.is_string)
_LENGTH = of(pa.int32(), T.is_string)

FUNCTIONS: dict[str, Binder] = {
    "+": arithmetic(pc.add_checked, "+"),
    "-": arithmetic(pc.subtract_checked, "-"),
    "*": arithmetic(pc.multiply_checked, "*"),
    "/": _divide,
    "div": _whole(remainder=False),
    "%": _whole(remainder=True),
    "negative": _negate,
    **{sign: compare(sign) for sign in _COMPARED},
    "<=>": _null_safe,
    "and": _logic(pc.and_kleene, decided=False),
    "or": _logic(pc.or_kleene, decided=True),
    "not": _not,
    "isnull": _is(None),
    "istrue": _is(True),
    "isfalse": _is(False),
    "in": _in,
    "case": _case,
    "if": _if,
    "coalesce": _coalesce,
    "nullif": _nullif,
    "greatest": _extreme(">"),
    "least": _extreme("<"),
    "lower": simple(_TEXT, _full_case(pc.ascii_lower, str.lower)),
    "upper": simple(_TEXT, _full_case(pc.ascii_upper, str.upper)),
    "length": simple(_LENGTH, pc.utf8_length),
    "octet_length": simple(_LENGTH, pc.binary_length),
    "substring": _substring,
    "trim": simple(_TEXT, lambda value: pc.utf8_trim(value, " ")),
    "ltrim": simple(_TEXT, lambda value: pc.utf8_ltrim(value, " ")),
    "rtrim": simple(_TEXT, lambda value: pc.utf8_rtrim(value, " ")),
    "reverse": simple(_TEXT, pc.utf8_reverse),
    "concat": _concat,
    "replace": _replace,
    "like": _with_literal(lambda value, pattern: pc.match_like(value, pattern), pa.bool_()),
    "startswith": _with_literal(lambda value, text: pc.starts_with(value, text), pa.bool_()),
    "endswith": _with_literal(lambda value, text: pc.ends_with(value, text), pa.bool_()),
    "contains": _with_literal(lambda value, text: pc.match_substring(value, text), pa.bool_()),
    "abs": simple(_same_kind(is_number), pc.abs_checked, may_fail=True),
    "sqrt": simple(of(pa.float64(), T.is_float64), pc.sqrt),
    "isnan": simple(
        of(pa.bool_(), T.is_floating), lambda value: pc.fill_null(pc.is_nan(value), False)
    ),
    "round": _round,
    "floor": _to_whole(pc.floor, "floor"),
    "ceil": _to_whole(pc.ceil, "ceil"),
    "year": _field(pc.year),
    "quarter": _field(pc.quarter),
    "month": _field(pc.month),
    "day": _field(pc.day),
    "dayofyear": _field(pc.day_of_year),
    "weekofyear": _field(pc.iso_week),
    "dayofweek": _field(lambda value: pc.day_of_week(value, count_from_zero=False, week_start=7)),
    "hour": _field(pc.hour, dates=False),
    "minute": _field(pc.minute, dates=False),
    "second": _field(pc.second, dates=False),
    "date_trunc": _date_trunc,
    "to_date": _to_date,
    "date_add": _date_add(1),
    "date_sub": _date_add(-1),
    "datediff": _datediff,
    "unix_micros": simple(of(pa.int64(), T.is_timestamp), _unix(1)),
    "unix_millis": simple(of(pa.int64(), T.is_timestamp), _unix(1_000)),
    "unix_seconds": simple(of(pa.int64(), T.is_timestamp), _unix(1_000_000)),
    "timestamp_micros": simple(of(TIMESTAMP, T.is_integer), _moment_of(1), may_fail=True),
    "timestamp_millis": simple(of(TIMESTAMP, T.is_integer), _moment_of(1_000), may_fail=True),
    "timestamp_seconds": simple(of(TIMESTAMP, T.is_integer), _moment_of(1_000_000), may_fail=True),
    "size": _size,
}
ALIASES = {
    "ifnull": "coalesce",
    "nvl": "coalesce",
    "lcase": "lower",
    "ucase": "upper",
    "char_length": "length",
    "character_length": "length",
    "len": "length",
    "substr": "substring",
    "ceiling": "ceil",
    "mod": "%",
    "dayofmonth": "day",
    "cardinality": "size",
    "!=": "<>",
    "==": "=",
}
"""Other names that Spark has for the same functions."""
