"""Typed columns to JSON records: one object per row, all columns in their order.

Every column first becomes texts (`_Texts`: spans of bytes, mostly the column's own buffer or one
that Arrow's cast made), then one kernel per column copies the texts into the rows. Structs, lists
and maps are texts made of their children's texts.

Invariant: the output is valid JSON for any content. A null is written as `null`, the field
stays. NaN and infinities are `null`, as JSON has no number for them. Timestamps are ISO-8601 in
UTC with a `Z` (without, where the type has no time zone), with all digits of their unit. Binary is
base64 text. Decimals are numbers with all their digits; an exponent is possible (1E-7).

A double becomes text exactly as by Arrow's cast, in a third of the time (`double_texts`). A kernel
writes a double only when it is surely the number of its text: with at most six digits after the
point, and fifteen in all. Any two decimals of fifteen digits are different doubles, so no shorter
text stands for it. All other doubles are left to Arrow.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numba
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tallystick.codec.json.kernels import (
    add_sizes,
    encode_base64,
    escape_growth,
    escape_strings,
    has_escapes,
    write_column,
)
from tallystick.codec.spans import Int64Array, Spans, binary_array, spans_of
from tallystick.errors import BrokenInvariantError, OptionError, RecordError

_DAY_RANGE = (-719162, 2932896)
"""0001-01-01 to 9999-12-31 in days since 1970: the years that ISO-8601 writes with four digits."""
_UNITS_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, slots=True)
class _Texts:
    """The JSON text of each value; a length of -1 is `null`, quotes are added when written."""

    spans: Spans
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class JsonWriter:
    """One JSON object per row; a `ValueWriter`."""

    def check(self, columns: pa.Schema) -> None:
        """See `ValueWriter.check`."""
        check_schema(columns)

    def write(self, columns: pa.RecordBatch) -> pa.Array:
        """See `ValueWriter.write`."""
        return write_json(columns)


def check_schema(schema: pa.Schema) -> None:
    """Check that rows of a schema can be written as JSON.

    Raises:
        OptionError: no column, a column named twice, or a type that JSON has no form for.
    """
    _check_fields(list(schema), "the rows to write")


def write_json(columns: pa.RecordBatch, *, header: bytes = b"") -> pa.Array:
    """Write one JSON object per row.

    Args:
        columns: all are written, under their names; `check_schema` has passed them.
        header: bytes to write before each object.

    Returns:
        binary, never null; large_binary where it is more than 2 GiB.

    Raises:
        OptionError: `check_schema` was not asked, and would have raised it.
        RecordError: a date or timestamp lies outside the years 1 to 9999.
    """
    check_schema(columns.schema)
    if not columns.num_rows:  # a check of the columns at the start need not wait for the kernels
        return pa.nulls(0, pa.binary())  # pa.array would import pandas
    texts = [
        _texts(column, f"column {name!r}")
        for name, column in zip(columns.schema.names, columns.columns, strict=True)
    ]
    objects = _objects(columns.schema.names, texts, columns.num_rows, header)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(objects.lengths)])
    return binary_array(pa.py_buffer(objects.data), offsets)


def warm_up() -> None:
    """Compile the kernels, or load them from the cache."""
    lists = pa.array([[b"x"], None], pa.list_(pa.binary()))
    columns = [lists, pa.array(['"', None]), pa.array([1.5, 2.5])]
    write_json(pa.record_batch(columns, names=["a", "b", "c"]))


def _texts(array: pa.Array, name: str) -> _Texts:
    """Return the texts of any type that `check_schema` passes."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _texts(array.dictionary_decode(), name)
    if _is_string(kind):
        return _escaped(spans_of(array, name))
    if _is_bytes(kind):
        return _base64(spans_of(array, name))
    if pa.types.is_timestamp(kind):
        return _timestamps(array, name)
    if pa.types.is_date32(kind):
        _check_range(array, name)
        return _Texts(spans_of(array.cast(pa.string()), name), quoted=True)
    if pa.types.is_struct(kind):
        return _structs(array, name)
    if pa.types.is_map(kind):
        return _maps(array, name)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        items = _texts(_elements(array, array.values), f"the element of {name}")
        return _lists(array, b"[]", items)
    if pa.types.is_float64(kind):
        return _Texts(double_texts(array, name))
    if pa.types.is_floating(kind):
        array = pc.if_else(pc.is_finite(array), array, pa.scalar(None, kind))
    return _Texts(spans_of(array.cast(pa.string()), name))


def _escaped(spans: Spans) -> _Texts:
    ends = spans.starts + spans.lengths
    begin, end = spans.starts.min(initial=len(spans.data)), ends.max(initial=0)
    if not has_escapes(spans.data[begin:end]):
        return _Texts(spans, quoted=True)
    growth = escape_growth(spans.data, spans.starts, spans.lengths)
    _expect_written(growth)
    out = np.empty(int(np.maximum(spans.lengths, 0).sum()) + growth, np.uint8)
    starts, lengths = np.empty_like(spans.starts), np.empty_like(spans.lengths)
    _expect_written(escape_strings(spans.data, spans.starts, spans.lengths, out, starts, lengths))
    return _Texts(_spans(out, starts, lengths), quoted=True)


def _base64(spans: Spans) -> _Texts:
    lengths = np.where(spans.lengths < 0, -1, (spans.lengths + 2) // 3 * 4)
    out = np.empty(int(np.maximum(lengths, 0).sum()), np.uint8)
    starts = np.empty_like(spans.starts)
    _expect_written(encode_base64(spans.data, spans.starts, spans.lengths, out, starts))
    return _Texts(_spans(out, starts, lengths), quoted=True)


def _timestamps(array: pa.Array, name: str) -> _Texts:
    """Make Arrow's `2024-01-01 00:00:00.000000`, all of one width, ISO-8601: a T, and a Z."""
    kind = array.type
    _check_range(array, name)
    # In UTC and without a zone: formatting a zone takes Arrow thirty times as long.
    bare = array.view(pa.int64()).view(pa.timestamp(kind.unit))
    spans = spans_of(bare.cast(pa.string()), name)
    count, width = len(array) - array.null_count, int(spans.lengths.max(initial=0))
    if count == 0:
        return _Texts(spans)
    wider = width + (kind.tz is not None)
    out = np.full((count, wider), ord("Z"), np.uint8)
    out[:, :width] = spans.data[: count * width].reshape(count, width)
    out[:, len("2024-01-01")] = ord("T")
    lengths = np.where(spans.lengths < 0, -1, wider)
    return _Texts(_spans(out.ravel(), spans.starts // width * wider, lengths), quoted=True)


def _check_range(array: pa.Array, name: str) -> None:
    first, last = _DAY_RANGE
    storage = array.view(pa.int32() if pa.types.is_date32(array.type) else pa.int64())
    if pa.types.is_timestamp(array.type):
        per_day = _SECONDS_PER_DAY * _UNITS_PER_SECOND[array.type.unit]
        first, last = first * per_day, (last + 1) * per_day - 1
    extremes = pc.min_max(storage)
    for value in (extremes["min"].as_py(), extremes["max"].as_py()):
        if value is not None and not first <= value <= last:
            raise RecordError(
                f"{name} of type {array.type} holds {value}, which lies outside the years 1 to "
                f"9999 that ISO-8601 can write: filter such rows, or write the column as bigint"
            )


def _structs(array: pa.Array, name: str) -> _Texts:
    fields = list(array.type)
    children = [  # flattened: the values under a null struct may be anything
        _texts(child, f"field {field.name!r} of {name}")
        for field, child in zip(fields, array.flatten(), strict=True)
    ]
    objects = _objects([field.name for field in fields], children, len(array))
    if array.null_count:
        objects.lengths[array.is_null().to_numpy(zero_copy_only=False)] = -1
    return _Texts(objects)


def _maps(array: pa.Array, name: str) -> _Texts:
    keys = _elements(array, array.keys)
    values = _elements(array, array.items)
    columns = [_texts(keys, f"the key of {name}"), _texts(values, f"the value of {name}")]
    return _lists(array, b"{}", _Texts(_rows([b"", b":"], columns, len(keys))))


def _elements(array: pa.Array, child: pa.Array) -> pa.Array:
    """Return the elements of lists or maps, in order, without the elements under a null list."""
    offsets = array.offsets.to_numpy()
    elements = child[offsets[0] : offsets[-1]]
    if array.null_count == 0:
        return elements
    present = array.is_valid().to_numpy(zero_copy_only=False)
    return elements.filter(pa.array(np.repeat(present, np.diff(offsets))))


def _objects(
    names: Iterable[str], columns: Sequence[_Texts], row_count: int, header: bytes = b""
) -> Spans:
    """Return one JSON object per row, with a field per column, after the header."""
    prefixes = [
        b"%b%b:" % (b"," if index else header + b"{", json.dumps(name, ensure_ascii=False).encode())
        for index, name in enumerate(names)
    ]
    return _rows(prefixes, columns, row_count, ending=b"}")


def _rows(
    prefixes: Sequence[bytes], columns: Sequence[_Texts], row_count: int, *, ending: bytes = b""
) -> Spans:
    """Return per row each column's prefix and text, then the ending, which is one byte or none."""
    lengths = np.full(row_count, len(ending), np.int64)
    for prefix, column in zip(prefixes, columns, strict=True):
        overhead = len(prefix) + 2 * column.quoted
        add_sizes(column.spans.lengths, overhead, len(prefix), lengths)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    out = np.empty(int(lengths.sum()), np.uint8)
    cursors = starts.copy()
    for prefix, column in zip(prefixes, columns, strict=True):
        _write(prefix, column, out, cursors)
    if ending:
        out[ends - 1] = ord(ending)
    return _spans(out, starts, lengths)


def _lists(array: pa.Array, brackets: bytes, items: _Texts) -> _Texts:
    """Return the texts of lists or maps, made of the texts of their elements.

    Every element is written with a comma before it; the first comma becomes the bracket.
    """
    present = array.is_valid().to_numpy(zero_copy_only=False)
    counts = np.where(present, np.diff(array.offsets.to_numpy()), 0).astype(np.int64)
    spans = items.spans
    sizes = np.zeros(len(spans.lengths), np.int64)
    add_sizes(spans.lengths, 1 + 2 * items.quoted, 1, sizes)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    stops = np.cumsum(counts)
    lengths = np.where(present, np.maximum(1 + ends[stops] - ends[stops - counts], 2), 0)
    starts = np.cumsum(lengths) - lengths
    cursors = np.repeat(starts - ends[stops - counts], counts) + ends[:-1]
    out = np.empty(int(lengths.sum()), np.uint8)
    _write(b",", items, out, cursors)
    out[starts[present]] = brackets[0]
    out[(starts + lengths)[present] - 1] = brackets[1]
    lengths[~present] = -1
    return _Texts(_spans(out, starts, lengths))


def _write(prefix: bytes, column: _Texts, out: NDArray[np.uint8], cursors: Int64Array) -> None:
    """Write the prefix and the column's text at each cursor, and move the cursors."""
    spans = column.spans
    text = np.frombuffer(prefix, np.uint8)
    _expect_written(
        write_column(text, spans.data, spans.starts, spans.lengths, column.quoted, out, cursors)
    )


def _spans(data: NDArray[np.uint8], starts: Int64Array, lengths: Int64Array) -> Spans:
    data.flags.writeable = False
    return Spans(data, starts, lengths)


def _expect_written(result: int) -> None:
    if result < 0:
        raise BrokenInvariantError("a JSON text left the space that was counted for it")


def _check_fields(fields: Sequence[pa.Field], path: str) -> None:
    names = [field.name for field in fields]
    if not names:
        raise OptionError(f"{path} have no columns: select at least one")
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"{path} have two columns {name!r}: rename one, JSON needs one")
    for field in fields:
        _check_type(field.type, f"column {field.name!r} of {path}")


def _check_type(kind: pa.DataType, path: str) -> None:
    if pa.types.is_struct(kind):
        _check_fields(list(kind), path)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        _check_type(kind.value_type, f"the element of {path}")
    elif pa.types.is_map(kind) and _is_string(kind.key_type):
        _check_type(kind.item_type, f"the value of {path}")
    elif pa.types.is_dictionary(kind):
        _check_type(kind.value_type, path)
    elif not any(is_type(kind) for is_type in _SCALAR_TYPES):
        raise OptionError(
            f"{path} has type {kind}, which has no JSON form here: cast it to string, to a number, "
            f"a timestamp, or a struct, list or map (with string keys) of such"
        )


def _is_string(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


_SCALAR_TYPES = (
    _is_string,
    _is_bytes,
    pa.types.is_null,
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_float32,
    pa.types.is_float64,
    pa.types.is_decimal,
    pa.types.is_date32,
    pa.types.is_timestamp,
)


# ---- texts of doubles ----------------------------------------------------------------------------

_CHARS_MAX = 17
"""A sign, nine digits, a point, six digits."""
_WHOLE_MAX = 1e9
_FRACTION_DIGITS = 6
_SCALE = 10.0**_FRACTION_DIGITS
_UNSURE = -2
_TEN = np.uint64(10)


def double_texts(column: pa.Array, name: str) -> Spans:
    """Return the texts of finite doubles; null, NaN and the infinities have none.

    Args:
        column: of type float64.
        name: the column's name in errors.
    """
    column = pc.if_else(pc.is_finite(column), column, pa.scalar(None, column.type))
    values = column.fill_null(0.5).to_numpy()  # any double whose text is short
    out = np.empty(len(values) * _CHARS_MAX, np.uint8)
    starts, lengths = np.empty(len(values), np.int64), np.empty(len(values), np.int64)
    size = _write_doubles(values, out, starts, lengths)
    unsure = np.flatnonzero(lengths == _UNSURE)
    if 2 * len(unsure) > len(values):
        return spans_of(column.cast(pa.string()), name)
    if len(unsure):
        texts = spans_of(column.take(pa.array(unsure)).cast(pa.string()), name)
        starts[unsure], lengths[unsure] = texts.starts + size, texts.lengths
        out = np.concatenate((out[:size], texts.data))
    if column.null_count:
        lengths[column.is_null().to_numpy(zero_copy_only=False)] = -1
    out.flags.writeable = False
    return Spans(out, starts, lengths)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _write_doubles(values, out, starts, lengths):  # type: ignore[no-untyped-def]
    """Write the texts of doubles that are sure; return the bytes written."""
    position = 0
    for row in range(len(values)):
        value = values[row]
        size = abs(value)
        starts[row] = position
        lengths[row] = _UNSURE
        if not 0.0 < size < _WHOLE_MAX:
            continue
        number = np.uint64(np.int64(size * _SCALE + 0.5))
        if np.float64(np.int64(number)) / _SCALE != size:  # both exact: the decimal's double
            continue
        digits = _FRACTION_DIGITS
        while digits:
            rest = number // _TEN
            if rest * _TEN != number:
                break
            number = rest
            digits -= 1
        end = position + _CHARS_MAX  # written from the end, then moved to the front
        at = end
        for _ in range(digits):
            rest = number // _TEN
            at -= 1
            out[at] = np.uint8(48) + np.uint8(number - rest * _TEN)
            number = rest
        if digits:
            at -= 1
            out[at] = np.uint8(46)
        while True:
            rest = number // _TEN
            at -= 1
            out[at] = np.uint8(48) + np.uint8(number - rest * _TEN)
            number = rest
            if number == 0:
                break
        if value < 0:
            at -= 1
            out[at] = np.uint8(45)
        lengths[row] = end - at
        for index in range(end - at):
            out[position + index] = out[at + index]
        position += end - at
    return position
