"""The functions and operators of expressions: types and Arrow calls, each as Spark's ANSI mode.

`FUNCTIONS` has a binder for each name: given its bound arguments, the function's type and its run.
A function is here only where Arrow gives what Spark gives; `tests/differential` compares them.
"""

import datetime
import re
from collections.abc import Callable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.expressions import patterns, structures
from tallystick.expressions.casts import (
    DECIMAL_DIGITS_MAX,
    TIMESTAMP,
    cast,
    checked,
    common_type,
    is_decimal,
    is_number,
)
from tallystick.expressions.nodes import Bound, ExpressionError, Value
from tallystick.expressions.operators import (
    OPERATORS,
    Binder,
    check_count,
    column_of,
    of,
    shown_or,
    simple,
)

T = pa.types

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
    check_count(args, (2, 3), what)
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
        check_count(args, (2,), what)
        _check_text(args, what)
        text, pattern = args[0], _constant(args[1], what)
        return Bound(kind, lambda rows: make(text.run(rows), pattern), text.may_fail)

    return bind


def _like(args: Sequence[Bound], what: str) -> Bound:
    matches = _with_literal(pc.match_like, pa.bool_())(args, what)
    if not re.fullmatch(r"([^\\]|\\[\\%_])*", args[1].literal, re.DOTALL):
        raise ExpressionError(f"{what}: a backslash in a pattern stands before %, _ or another one")
    return matches


def _replace(args: Sequence[Bound], what: str) -> Bound:
    check_count(args, (2, 3), what)
    _check_text(args, what)
    old, new = _constant(args[1], what), _constant(args[2], what) if len(args) == 3 else ""
    if not old:
        return args[0]
    return _of_text(args[0], lambda value: pc.replace_substring(value, old, new))


def _count(bound: Bound, what: str) -> int:
    """Return a literal count; 0 for one below."""
    if not isinstance(count := _constant(bound, what), int):
        raise ExpressionError(f"{what}: {count!r}: expected a whole number")
    return max(count, 0)


def _part(is_left: bool) -> Binder:
    def bind(args: Sequence[Bound], what: str) -> Bound:
        check_count(args, (2,), what)
        _check_text(args[:1], what)
        count = _count(args[1], what)
        start, stop = (0, count) if is_left or not count else (-count, None)
        return _of_text(args[0], lambda value: pc.utf8_slice_codeunits(value, start, stop))

    return bind


def _repeat(args: Sequence[Bound], what: str) -> Bound:
    check_count(args, (2,), what)
    _check_text(args[:1], what)
    count = _count(args[1], what)
    return _of_text(args[0], lambda value: pc.binary_repeat(value, count))


def _pad(call: Callable[..., Value]) -> Binder:
    def bind(args: Sequence[Bound], what: str) -> Bound:
        check_count(args, (3,), what)
        _check_text(args[:1], what)
        width, sign = _count(args[1], what), _constant(args[2], what)
        if len(str(sign)) != 1:
            raise ExpressionError(f"{what}: expected one sign to fill up with")
        return _of_text(
            args[0],
            lambda value: pc.utf8_slice_codeunits(call(value, width, padding=sign), 0, width),
        )

    return bind


def _concat_ws(args: Sequence[Bound], what: str) -> Bound:
    check_count(args, range(2, 100), what)
    separator = _constant(args[0], what)
    texts = [
        cast(one, pa.string(), what) if T.is_integer(one.kind) or T.is_null(one.kind) else one
        for one in args[1:]
    ]
    _check_text(texts, what)

    def run(rows: pa.RecordBatch) -> Value:
        columns = [column_of(text.run(rows), rows) for text in texts]
        # Arrow leaves out rows whose texts are all null: one text is always there.
        first = pa.repeat("", rows.num_rows)
        joined = pc.binary_join_element_wise(first, *columns, separator, null_handling="skip")
        return pc.utf8_slice_codeunits(joined, len(separator))

    return Bound(pa.string(), run, any(text.may_fail for text in texts))


def _instr(value: Value, text: str) -> Value:
    """Return the place of a text's first appearance in code points, from 1; 0: none."""
    column = pa.array([value.as_py()], pa.string()) if isinstance(value, pa.Scalar) else value
    if pc.all(pc.string_is_ascii(column), min_count=0).as_py() is False:
        texts = column.to_pylist()
        places = pa.array(
            [None if one is None else one.find(text) + 1 for one in texts], pa.int32()
        )
    else:
        places = pc.add(pc.find_substring(column, text), pa.scalar(1, pa.int32()))
    return places[0] if isinstance(value, pa.Scalar) else places


# Numbers.


def _bits(call: Callable[[Value, Value], Value]) -> Binder:
    def bind(args: Sequence[Bound], what: str) -> Bound:
        check_count(args, (2,), what)
        if not all(T.is_signed_integer(one.kind) for one in args):
            raise ExpressionError(f"{what}: expected whole numbers")
        kind = common_type(args[0].kind, args[1].kind, what)
        one, other = (cast(arg, kind, what) for arg in args)
        fails = one.may_fail or other.may_fail
        return Bound(kind, lambda rows: call(one.run(rows), other.run(rows)), fails)

    return bind


def _round(args: Sequence[Bound], what: str) -> Bound:
    check_count(args, (1, 2), what)
    one, digits = args[0], _constant(args[1], what) if len(args) == 2 else 0
    if digits < 0 or not is_number(one.kind):
        raise ExpressionError(f"{what}: expected a number, and digits from 0")
    if T.is_integer(one.kind):
        return one
    if is_decimal(one.kind):
        scale = min(digits, one.kind.scale)
        precision = one.kind.precision - one.kind.scale + scale + 1  # even if nothing is cut
        return cast(one, pa.decimal128(min(precision, DECIMAL_DIGITS_MAX), scale), what)
    if one.kind != pa.float64():
        raise ExpressionError(f"{what}: a float: CAST it to double")
    return Bound(
        one.kind, lambda rows: _rounded(column_of(one.run(rows), rows), digits), one.may_fail
    )


def _rounded(values: pa.Array, digits: int) -> pa.Array:
    """Round doubles as their shortest decimal text, halves away from zero, as Spark does."""
    numbers = values.to_numpy(zero_copy_only=False)
    with np.errstate(all="ignore"):
        scaled = numbers * 10.0**digits
        parts = np.abs(scaled) - np.floor(np.abs(scaled))
        whole = np.floor(np.abs(scaled)) + (parts >= 0.5)
        result = np.copysign(whole / 10.0**digits, numbers)
        is_large = ~(np.abs(scaled) < 2.0**54)  # neighbours are further apart than digits
        result[is_large] = numbers[is_large]
        # Is the text's digit a five? Beyond 2**40 the product is too coarse to tell.
        is_near = (np.abs(parts - 0.5) < 1e-3) | (np.abs(scaled) > 2.0**40)
        is_near &= ~is_large
    step = Decimal(1).scaleb(-digits)
    for at in np.flatnonzero(is_near):
        exact = Decimal(repr(float(numbers[at]))).quantize(step, ROUND_HALF_UP)
        result[at] = float(exact)
    result = result + 0.0  # BigDecimal knows no -0.0
    return pa.array(result, pa.float64(), mask=values.is_null().to_numpy(zero_copy_only=False))


def _to_whole(call: Callable[[Value], Value], name: str) -> Binder:
    def bind(args: Sequence[Bound], what: str) -> Bound:
        check_count(args, (1,), what)
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
        check_count(args, (1,), what)
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
    check_count(args, (2,), what)
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
        check_count(args, (2,), what)
        day, count = args
        if day.kind == TIMESTAMP:
            day = cast(day, pa.date32(), what)
        if not T.is_date(day.kind) or not T.is_integer(count.kind) or count.kind == pa.int64():
            raise ExpressionError(f"{what}: expected a date and an int")

        def run(rows: pa.RecordBatch) -> Value:
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
    check_count(args, (2,), what)
    days = [cast(arg, pa.date32(), what) if arg.kind == TIMESTAMP else arg for arg in args]
    if not all(T.is_date(day.kind) for day in days):
        raise ExpressionError(f"{what}: expected two dates")
    end, start = days

    def run(rows: pa.RecordBatch) -> Value:
        return pc.subtract(*(pc.cast(day.run(rows), pa.int32()) for day in (end, start)))

    return Bound(pa.int32(), run, end.may_fail or start.may_fail)


def _last_day(args: Sequence[Bound], what: str) -> Bound:
    check_count(args, (1,), what)
    day = cast(args[0], pa.date32(), what) if args[0].kind == TIMESTAMP else args[0]
    if not T.is_date(day.kind):
        raise ExpressionError(f"{what}: expected a date")

    def run(rows: pa.RecordBatch) -> Value:
        following = pc.ceil_temporal(day.run(rows), unit="month", ceil_is_strictly_greater=True)
        return pc.cast(
            pc.subtract(pc.cast(following, pa.int32()), pa.scalar(1, pa.int32())), pa.date32()
        )

    return Bound(pa.date32(), run, day.may_fail)


def _of_zone(call: Callable[[Value, str], Value]) -> Binder:
    def bind(args: Sequence[Bound], what: str) -> Bound:
        check_count(args, (2,), what)
        one, zone = args[0], _constant(args[1], what)
        if one.kind != TIMESTAMP:
            raise ExpressionError(f"{what}: expected a timestamp, not {shown_or(one.kind)}")
        try:
            call(pa.scalar(0, TIMESTAMP), zone)
        except pa.ArrowInvalid:
            raise ExpressionError(
                f"{what}: there is no time zone {zone!r}: expected a name such as 'Europe/Berlin'"
            ) from None

        def run(rows: pa.RecordBatch) -> Value:
            moments = one.run(rows)
            latest = moments if isinstance(moments, pa.Scalar) else pc.max(moments)
            if latest.is_valid and latest.as_py() >= _ZONES_END:
                raise ValueError(
                    f"{what}: {latest.as_py()} is beyond 2036, up to which Arrow knows when clocks "
                    f"change"
                )
            return call(moments, zone)

        return Bound(TIMESTAMP, run, True)

    return bind


_ZONES_END = datetime.datetime(2037, 1, 1, tzinfo=datetime.UTC)


def _shown_in(value: Value, zone: str) -> Value:
    """Return what the clocks of a zone show at moments, as if these were in UTC."""
    local = pc.local_timestamp(pc.cast(value, pa.timestamp("us", zone)))
    return pc.cast(pc.cast(local, pa.int64()), TIMESTAMP)


def _moment_in(value: Value, zone: str) -> Value:
    """Return the moments at which the clocks of a zone show times.

    What they show twice is the first moment; times that are left out count on from before.
    """
    wall = pc.cast(pc.cast(value, pa.int64()), pa.timestamp("us"))
    way = {"timezone": zone, "ambiguous": "earliest"}
    known = pc.assume_timezone(wall, **way, nonexistent="earliest")
    gap = pc.not_equal(pc.local_timestamp(known), wall)
    known_us, wall_us = (pc.cast(one, pa.int64()) for one in (known, wall))
    offset = pc.subtract(pc.cast(pc.local_timestamp(known), pa.int64()), known_us)
    return pc.cast(pc.if_else(gap, pc.subtract(wall_us, offset), known_us), TIMESTAMP)


def _to_date(args: Sequence[Bound], what: str) -> Bound:
    check_count(args, (1,), what)
    return cast(args[0], pa.date32(), what)


def _size(args: Sequence[Bound], what: str) -> Bound:
    check_count(args, (1,), what)
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
    **OPERATORS,
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
    "like": _like,
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
    "last_day": _last_day,
    "weekday": _field(lambda value: pc.day_of_week(value, count_from_zero=True, week_start=1)),
    "unix_date": simple(of(pa.int32(), T.is_date), lambda value: pc.cast(value, pa.int32())),
    "date_format": patterns.date_format,
    "from_utc_timestamp": _of_zone(_shown_in),
    "to_utc_timestamp": _of_zone(_moment_in),
    "left": _part(is_left=True),
    "right": _part(is_left=False),
    "repeat": _repeat,
    "lpad": _pad(pc.utf8_lpad),
    "rpad": _pad(pc.utf8_rpad),
    "concat_ws": _concat_ws,
    "instr": _with_literal(_instr, pa.int32()),
    "rlike": patterns.rlike,
    "regexp_extract": patterns.regexp_extract,
    "regexp_replace": patterns.regexp_replace,
    "split": patterns.split,
    "&": _bits(pc.bit_wise_and),
    "|": _bits(pc.bit_wise_or),
    "^": _bits(pc.bit_wise_xor),
    "named_struct": structures.named_struct,
    "[]": structures.element(first=0, is_checked=True),
    "element_at": structures.element(first=1, is_checked=True),
    "get": structures.element(first=0, is_checked=False),
    "array_contains": structures.array_contains,
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
    "btrim": "trim",
    "regexp_like": "rlike",
    "regexp": "rlike",
    "!=": "<>",
    "==": "=",
}
"""Other names that Spark has for the same functions."""
