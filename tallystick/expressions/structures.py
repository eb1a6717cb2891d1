"""Structs, arrays and maps: made, and asked for an element."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.expressions.casts import cast, common_type
from tallystick.expressions.nodes import Bound, ExpressionError, Value
from tallystick.expressions.operators import Binder, check_count, column_of, shown_or
from tallystick.expressions.patterns import constant

T = pa.types


def named_struct(args: Sequence[Bound], what: str) -> Bound:
    """Return a struct of fields; a name stands before each value."""
    names = [constant(one, what) for one in args[::2]]
    values = args[1::2]
    if len(names) != len(values) or not names:
        raise ExpressionError(f"{what}: expected a name and a value for each field")
    fields = [pa.field(name, one.kind) for name, one in zip(names, values, strict=True)]

    def run(rows: pa.RecordBatch) -> Value:
        columns = [column_of(one.run(rows), rows) for one in values]
        return pa.StructArray.from_arrays(columns, fields=fields)

    return Bound(pa.struct(fields), run, any(one.may_fail for one in values))


def element(*, first: int | None, is_checked: bool) -> Binder:
    """Return the binder of an element of an array, or of the value of a key of a map.

    Args:
        first: the number of an array's first element; 1 counts from the end below 0.
        is_checked: another number than those of elements is an error; else null.
    """

    def bind(args: Sequence[Bound], what: str) -> Bound:
        check_count(args, (2,), what)
        one, place = args
        if T.is_map(one.kind) and is_checked:
            return _of_map(one, place, what)
        if T.is_struct(one.kind) and first == 0 and is_checked:
            return _of_struct(one, constant(place, what), what)
        if not T.is_list(one.kind) or not T.is_integer(place.kind):
            raise ExpressionError(
                f"{what}: expected an array and a whole number, or a map and a literal key, not "
                f"{shown_or(one.kind)} and {shown_or(place.kind)}"
            )

        def run(rows: pa.RecordBatch) -> Value:
            lists = column_of(one.run(rows), rows)
            numbers = column_of(place.run(rows), rows)
            there = pc.and_(lists.is_valid(), numbers.is_valid()).to_numpy(zero_copy_only=False)
            at = pc.fill_null(numbers, 0).to_numpy().astype(np.int64) - first
            offsets = lists.offsets.to_numpy().astype(np.int64)
            counts = np.diff(offsets)
            if first == 1:
                at = np.where(at < -1, at + 1 + counts, at)
            inside = (at >= 0) & (at < counts)
            if is_checked and (there & ~inside).any():
                row = int(np.flatnonzero(there & ~inside)[0])
                raise ValueError(
                    f"{what}: element {numbers[row].as_py()} of an array of {counts[row]} is "
                    f"beyond it: get(array, n) gives null"
                )
            places = pa.array(offsets[:-1] + at, mask=~(there & inside))
            return lists.values.take(places)

        return Bound(one.kind.value_type, run, True)

    return bind


def _of_map(one: Bound, key: Bound, what: str) -> Bound:
    if not key.is_literal or key.kind != one.kind.key_type:
        raise ExpressionError(f"{what}: expected a literal key of type {one.kind.key_type}")
    return Bound(
        one.kind.item_type,
        lambda rows: pc.map_lookup(one.run(rows), pa.scalar(key.literal, key.kind), "last"),
        one.may_fail,
    )


def _of_struct(one: Bound, name: str, what: str) -> Bound:
    at = one.kind.get_field_index(name)
    if at < 0:
        raise ExpressionError(f"{what}: {shown_or(one.kind)} has no field {name!r}")
    return Bound(
        one.kind.field(at).type, lambda rows: pc.struct_field(one.run(rows), [at]), one.may_fail
    )


def array_contains(args: Sequence[Bound], what: str) -> Bound:
    """True if an array has a value; null if it has not, and has a null."""
    check_count(args, (2,), what)
    one, wanted = args
    kind = one.kind.value_type if T.is_list(one.kind) else None
    if kind is None or T.is_floating(kind) or T.is_nested(kind) or T.is_null(wanted.kind):
        raise ExpressionError(f"{what}: expected an array of texts, whole numbers or the like")
    if common_type(kind, wanted.kind, what) != kind:
        raise ExpressionError(f"{what}: CAST the value to {shown_or(kind)}")
    wanted = cast(wanted, kind, what)

    def run(rows: pa.RecordBatch) -> Value:
        lists, values = column_of(one.run(rows), rows), column_of(wanted.run(rows), rows)
        row_of = pc.list_parent_indices(lists)
        same = pc.equal(pc.list_flatten(lists), values.take(row_of))
        has, has_null = np.zeros(len(rows), np.bool_), np.zeros(len(rows), np.bool_)
        numbers = row_of.to_numpy()
        has[numbers[pc.fill_null(same, False).to_numpy(zero_copy_only=False)]] = True
        has_null[numbers[same.is_null().to_numpy(zero_copy_only=False)]] = True
        known = pc.and_(lists.is_valid(), values.is_valid()).to_numpy(zero_copy_only=False)
        return pa.array(has, mask=~known | (has_null & ~has))

    return Bound(pa.bool_(), run, one.may_fail or wanted.may_fail)
