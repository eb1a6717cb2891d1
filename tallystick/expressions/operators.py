"""Operators of expressions, as in Spark's ANSI mode: arithmetic, comparisons, conditions."""

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
DAY_US = 86_400_000_000


def column_of(value: Value, rows: pa.RecordBatch) -> pa.Array:
    """Return a value as a column of all rows."""
    if isinstance(value, pa.Scalar):
        if T.is_null(value.type) or not value.is_valid:
            return pa.nulls(rows.num_rows, value.type)
        return pa.repeat(value, rows.num_rows)
    return value.combine_chunks() if isinstance(value, pa.ChunkedArray) else value


def where_needed(bound: Bound, rows: pa.RecordBatch, needed: Value) -> Value:
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
        check_count(args, counts, what)
        kind = kinds([one.kind for one in args])
        if kind is None:
            given = ", ".join(shown(one.kind) for one in args)
            raise ExpressionError(f"{what}: it does not take {given}")
        fails = may_fail or any(one.may_fail for one in args)

        def run(rows: pa.RecordBatch) -> Value:
            values = [one.run(rows) for one in args]
            if may_fail:
                return checked(lambda: call(*values), what, f"beyond {shown(kind)}")
            return call(*values)

        return Bound(kind, run, fails)

    return bind


def check_count(args: Sequence[Bound], counts: Sequence[int], what: str) -> None:
    """Refuse another number of arguments.

    Raises:
        ExpressionError: there are too many, or too few.
    """
    if len(args) not in counts:
        raise ExpressionError(
            f"{what}: {len(args)} arguments, expected {' or '.join(map(str, counts))}"
        )


def of(kind: pa.DataType, *tests: Callable[[pa.DataType], bool]):  # type: ignore[no-untyped-def]
    """Return a rule of types: arguments that pass the tests give a value of a type."""

    def rule(kinds: Sequence[pa.DataType]) -> pa.DataType | None:
        fits = all(test(one) for test, one in zip(tests, kinds, strict=False))
        return kind if fits else None

    return rule


# Arithmetic.


def arithmetic(call: Callable[[Value, Value], Value], sign: str) -> Binder:
    """Return the binder of +, - or *."""

    def bind(args: Sequence[Bound], what: str) -> Bound:
        one, other = args
        if not all(is_number(arg.kind) or T.is_null(arg.kind) for arg in args):
            return _moved(args, sign, what)
        has_decimal = is_decimal(one.kind) or is_decimal(other.kind)
        if has_decimal and not any(T.is_floating(arg.kind) for arg in args):
            return _decimals(args, call, sign, what)
        kind = common_type(one.kind, other.kind, what)
        if T.is_null(kind):
            raise ExpressionError(f"{what}: both sides are NULL: CAST one to its type")
        first, second = cast(one, kind, what), cast(other, kind, what)
        may_fail = T.is_integer(kind)
        return Bound(
            kind,
            lambda rows: checked(
                lambda: call(first.run(rows), second.run(rows)), what, f"beyond {shown(kind)}"
            ),
            may_fail or first.may_fail or second.may_fail,
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
    first, second = (_decimal_of(arg, what) for arg in args)
    if T.is_null(first.kind) or T.is_null(second.kind):
        raise ExpressionError(f"{what}: NULL beside a decimal: CAST it to its type")
    (p1, s1), (p2, s2) = ((one.kind.precision, one.kind.scale) for one in (first, second))
    if sign == "*":
        precision, scale = p1 + p2 + 1, s1 + s2
    else:
        scale = max(s1, s2)
        precision = max(p1 - s1, p2 - s2) + scale + 1
    if precision > DECIMAL_DIGITS_MAX:
        raise ExpressionError(
            f"{what}: {shown(first.kind)} {sign} {shown(second.kind)} needs {precision} digits, "
            f"and there are {DECIMAL_DIGITS_MAX}: CAST to fewer"
        )
    kind = pa.decimal128(precision, scale)
    return Bound(
        kind,
        lambda rows: pc.cast(call(first.run(rows), second.run(rows)), kind),
        first.may_fail or second.may_fail,
    )


def _moved(args: Sequence[Bound], sign: str, what: str) -> Bound:
    """Bind a date or timestamp plus or minus an INTERVAL."""
    one, other = args
    if T.is_duration(one.kind) and sign == "+":
        one, other = other, one
    if T.is_duration(other.kind) and sign in "+-":
        if T.is_date(one.kind):
            if other.literal is None or other.literal % DAY_US == 0:  # INTERVAL 1 DAY keeps a date
                raise ExpressionError(f"{what}: whole days from a date: write date_add(…, n)")
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
    first, second = (cast(arg, pa.float64(), what) for arg in args)

    def run(rows: pa.RecordBatch) -> Value:
        dividend, divisor = first.run(rows), second.run(rows)
        _refuse_zero(divisor, dividend, what)
        return pc.divide(dividend, divisor)

    return Bound(pa.float64(), run, True)


def _whole(remainder: bool) -> Binder:
    def bind(args: Sequence[Bound], what: str) -> Bound:
        if not all(T.is_signed_integer(arg.kind) for arg in args):
            given = ", ".join(shown_or(arg.kind) for arg in args)
            raise ExpressionError(f"{what}: only whole numbers have it here, not {given}")
        kind = common_type(args[0].kind, args[1].kind, what) if remainder else pa.int64()
        first, second = (cast(arg, kind, what) for arg in args)

        def run(rows: pa.RecordBatch) -> Value:
            dividend, divisor = first.run(rows), second.run(rows)
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
        first, second = _alike(args, what)
        kind = first.kind
        if T.is_nested(kind) or T.is_duration(kind) or T.is_null(kind):
            raise ExpressionError(f"{what}: values of {shown_or(kind)} are not compared here")
        call = _COMPARED_FLOATS[sign] if T.is_floating(kind) else _COMPARED[sign]
        fails = first.may_fail or second.may_fail
        return Bound(pa.bool_(), lambda rows: call(first.run(rows), second.run(rows)), fails)

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
    first, second = _alike(args, what)
    equal = compare("=")([first, second], what)

    def run(rows: pa.RecordBatch) -> Value:
        one, other = first.run(rows), second.run(rows)
        both_null = pc.and_(pc.is_null(one), pc.is_null(other))
        return pc.or_kleene(both_null, pc.fill_null(equal.run(rows), False))

    return Bound(pa.bool_(), run, equal.may_fail)


# Logic: the second side runs only for the rows that the first one leaves open.


def _truth(args: Sequence[Bound], what: str) -> list[Bound]:
    for arg in args:
        if not (T.is_boolean(arg.kind) or T.is_null(arg.kind)):
            raise ExpressionError(f"{what}: expected a boolean, not {shown_or(arg.kind)}")
    return [cast(arg, pa.bool_(), what) for arg in args]


def _logic(call: Callable[[Value, Value], Value], decided: bool) -> Binder:
    def bind(args: Sequence[Bound], what: str) -> Bound:
        first, second = _truth(args, what)

        def run(rows: pa.RecordBatch) -> Value:
            one = first.run(rows)
            is_open = pc.invert(pc.fill_null(pc.equal(one, pa.scalar(decided)), False))
            return call(one, where_needed(second, rows, is_open))

        return Bound(pa.bool_(), run, first.may_fail or second.may_fail)

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

    def run(rows: pa.RecordBatch) -> Value:
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
    check_count(args, (3,), what)
    return _case(args, what)


def _coalesce(args: Sequence[Bound], what: str) -> Bound:
    args = _alike(args, what)

    def run(rows: pa.RecordBatch) -> Value:
        value = column_of(args[0].run(rows), rows)
        for arg in args[1:]:
            missing = pc.is_null(value)
            if not missing.true_count:
                break
            value = pc.if_else(missing, where_needed(arg, rows, missing), value)
        return value

    return Bound(args[0].kind, run, any(arg.may_fail for arg in args))


def _nullif(args: Sequence[Bound], what: str) -> Bound:
    check_count(args, (2,), what)
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


OPERATORS: dict[str, Binder] = {
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
}
