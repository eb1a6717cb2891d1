"""The rows of an epoch in the form for processors, and processors' output as Arrow columns.

A processor gets rows by key, as Spark's sorted shuffle hands them over: keys in ascending order,
nulls first; the rows of a key in the order of their arrival.
"""

import decimal
import difflib
from collections import namedtuple
from collections.abc import Collection, Iterable, Iterator, Sequence
from copy import deepcopy
from functools import lru_cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql import Row

from tallystick.errors import StateError
from tallystick.state.key_groups import key_groups_of
from tallystick.state.keys import KeyCodec


class RowMaker(Protocol):
    """A function that makes a `Row` of values in the order of the columns."""

    def __call__(self, values: Iterable[Any], /) -> Row:
        """Return a `Row` with the maker's column names."""
        ...


def row_maker(names: Sequence[str]) -> RowMaker:
    """Return a maker of rows with given column names.

    A `Row` finds `row.x` by searching its list of names after all else failed; the maker's rows
    have a descriptor per column. Attributes of `Row` itself, `count` or `index`, stay as they are,
    as in PySpark.
    """
    return _maker(tuple(names))


@lru_cache(maxsize=256)
def _maker(names: tuple[str, ...]) -> RowMaker:
    # A named tuple's descriptors are in C; those of a property would ask `Row.__getitem__`.
    # The class has to be held: one that is collected empties its dictionary.
    getters = namedtuple("Getters", [f"c{at}" for at in range(len(names))])  # type: ignore[misc]
    columns: dict[str, Any] = {
        name: vars(getters)[f"c{at}"] for at, name in enumerate(names) if not hasattr(Row, name)
    }
    # As an attribute of the class, so that none has to be set per row.
    row_class = type(
        "Row", (Row,), {"__module__": Row.__module__, "__fields__": list(names)} | columns
    )
    return cast(RowMaker, partial(tuple.__new__, row_class))


if TYPE_CHECKING:
    import pandas as pd

CHUNK_ROWS = 1 << 16
"""About how many rows are Python objects at a time."""

Int64Array = NDArray[np.int64]


class KeyedRows(NamedTuple):
    """Rows sorted by key, with the start of each key.

    Args:
        rows: of all keys.
        keys: the distinct keys, as bytes.
        groups: the key group of each.
        starts: of each key, the first row; and the row count at the end.
    """

    rows: pa.RecordBatch
    keys: pa.BinaryArray
    groups: NDArray[np.int32]
    starts: Int64Array

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of keys with about `CHUNK_ROWS` rows."""
        first = 0
        while first < len(self.keys):
            enough = int(self.starts[first]) + CHUNK_ROWS
            stop = int(np.searchsorted(self.starts, enough, "right")) - 1
            stop = min(max(stop, first + 1), len(self.keys))
            yield first, stop
            first = stop


def sort_by_key(rows: pa.RecordBatch, codec: KeyCodec, max_parallelism: int) -> KeyedRows:
    """Put rows in the order of their keys."""
    numbered = codec.encode(rows).dictionary_encode()
    by_rank = pc.sort_indices(numbered.dictionary)
    keys = numbered.dictionary.take(by_rank)
    ranks = np.empty(len(keys), np.int64)
    ranks[by_rank.to_numpy()] = np.arange(len(keys))
    codes = ranks[numbered.indices.to_numpy()]
    order = np.argsort(codes, kind="stable")
    starts = np.zeros(len(keys) + 1, np.int64)
    np.cumsum(np.bincount(codes, minlength=len(keys)), out=starts[1:])
    is_sorted = len(order) == 0 or bool((order[:-1] < order[1:]).all())
    sorted_rows = rows if is_sorted else rows.take(pa.array(order))
    first_rows = sorted_rows.select(codec.names).take(pa.array(starts[:-1]))
    groups = key_groups_of(codec.hash_codes(first_rows), max_parallelism)
    return KeyedRows(sorted_rows, keys, groups, starts)


def key_tuples(keys: pa.BinaryArray, codec: KeyCodec, timezone: str) -> list[tuple[Any, ...]]:
    """Decode keys to the tuples for processors."""
    columns = in_timezone(codec.decode(keys), timezone).columns
    return list(zip(*map(python_values, columns), strict=True))


def as_rows(batch: pa.RecordBatch) -> list[Row]:
    """Return each row as a `Row`, with Spark's Python types."""
    columns = zip(*map(python_values, batch.columns), strict=True)
    return list(map(row_maker(batch.schema.names), columns))


def as_frames(batch: pa.RecordBatch, spans: Sequence[tuple[int, int]]) -> "Iterator[pd.DataFrame]":
    """Yield a frame per span of rows, with the dtypes that Spark's frames have.

    A null makes floats of a column's integers in its own frame alone; in Spark it does so in all
    frames of an Arrow batch, whose integers then lose digits by a null in another key's rows.
    """
    import pandas as pd

    # Spark builds each frame of Python objects, so numbers get Python's width.
    widest = pa.schema([pa.field(field.name, _wide(field.type)) for field in batch.schema])
    table = pa.Table.from_batches([batch]).cast(widest)
    frame = table.to_pandas(coerce_temporal_nanoseconds=True)
    beside_nulls = [
        (at, column.fill_null(pa.scalar(0).cast(column.type)).to_numpy(), _nulls_before(column))
        for at, column in enumerate(table.columns)
        if column.null_count and (pa.types.is_integer(column.type) or column.type == pa.bool_())
    ]
    for name in frame.columns:
        if isinstance(frame[name].dtype, pd.DatetimeTZDtype):
            frame[name] = frame[name].dt.tz_localize(None)
    for start, stop in spans:
        piece = frame.iloc[start:stop].reset_index(drop=True)
        for at, values, nulls_before in beside_nulls:
            if nulls_before[start] == nulls_before[stop]:
                piece.isetitem(at, values[start:stop].copy())
        yield piece


def _nulls_before(column: pa.ChunkedArray) -> Int64Array:
    """Return the number of nulls before each row, and at the end the number of all nulls."""
    counts = np.zeros(len(column) + 1, np.int64)
    np.cumsum(column.is_null().to_numpy(), out=counts[1:])
    return counts


def in_timezone(batch: pa.RecordBatch, timezone: str) -> pa.RecordBatch:
    """Return the same moments, shown in another time zone."""
    columns = [
        column.cast(pa.timestamp(column.type.unit, tz=timezone))
        if pa.types.is_timestamp(column.type) and column.type.tz is not None
        else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def python_values(column: pa.Array) -> list[Any]:
    """Return the values of `to_pylist`, by numpy where the result is the same."""
    kind = column.type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if is_text or (is_number and not column.null_count):
        from_numpy: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
        return from_numpy
    values: list[Any] = column.to_pylist()
    return values


def _wide(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_signed_integer(kind):
        return pa.int64()
    return pa.float64() if pa.types.is_floating(kind) else kind


if TYPE_CHECKING:  # a fifth of what a pipeline imports, and few need it
    import pandas as pd

_FRACTIONAL = (float, np.floating, decimal.Decimal)


def are_mutable(schema: pa.Schema) -> bool:
    """True if a processor may still change values of such columns after a yield."""
    return any(pa.types.is_nested(kind) or pa.types.is_binary(kind) for kind in schema.types)


def own_row(row: Any) -> Any:
    """Return a Row with copies of its lists and the like: it waits for later rows.

    Source: Spark's TransformWithStateInPySparkRowSerializer takes each Row apart as it is yielded.
    """
    if not isinstance(row, Row):
        return row  # refused where it is looked at
    own = Row(*map(_own_value, row))
    if hasattr(row, "__fields__"):
        own.__fields__ = row.__fields__
    return own


def _own_value(value: Any) -> Any:
    match value:
        case str() | bytes():
            return value
        case Row():
            return own_row(value)
        case list():
            return [_own_value(part) for part in value]
        case tuple() if type(value) is tuple:
            return tuple(map(_own_value, value))
        case dict():
            return {key: _own_value(part) for key, part in value.items()}
        case bytearray() | memoryview():
            return bytes(value)
        case Collection():  # numpy's arrays, Python's, deques: Arrow takes any
            return deepcopy(value)
    return value


def rows_to_batch(rows: list[Row], schema: pa.Schema) -> pa.RecordBatch:
    """Convert returned rows to a batch, by the names of their columns in any order.

    Raises:
        StateError: something else than a Row was returned, its fields are not those of the output,
            or a value has another type.
    """
    try:
        return pa.RecordBatch.from_arrays(_columns_of(rows, schema), schema=schema)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise _misfit(schema, error) from error


def frame_to_batch(frame: "pd.DataFrame", schema: pa.Schema, timezone: str) -> pa.RecordBatch:
    """Convert a returned frame to a batch, columns by name, or by position if they have no names.

    Args:
        frame: moments without a time zone are in `timezone`.
        schema: of the output.
        timezone: of the session.

    Raises:
        StateError: something else than a frame was returned, or its columns do not fit.
    """
    import pandas as pd

    if not isinstance(frame, pd.DataFrame):
        raise StateError(f"a processor returned a {type(frame).__name__}: expected pandas frames")
    by_name = any(isinstance(name, str) for name in frame.columns)
    missing = set(schema.names) - set(frame.columns) if by_name else ()
    if missing or len(frame.columns) != len(schema):
        raise StateError(
            f"a processor returned a frame with columns {list(frame.columns)}: expected those of "
            f"the output, {schema.names}"
        )
    columns = [
        _series_column(frame[field.name] if by_name else frame.iloc[:, at], field.type, timezone)
        for at, field in enumerate(schema)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _columns_of(rows: list[Row], schema: pa.Schema) -> list[pa.Array]:
    columns: Iterable[Any]
    if all(getattr(row, "__fields__", None) == schema.names for row in rows):
        columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    else:
        for wrong in (row for row in rows if not isinstance(row, Row)):
            raise TypeError(f"{wrong!r} is a {type(wrong).__name__}, expected a Row")
        _check_names("a Row", rows, schema.names)
        dicts = [row.asDict() for row in rows]
        columns = [[row[name] for row in dicts] for name in schema.names]
    arrays = []
    for values, field in zip(columns, schema, strict=True):
        if pa.types.is_nested(field.type):
            values = list(map(_by_name, values))
        _check_fields(field.name, values, field.type)
        _check_whole(field.name, values, field.type)
        arrays.append(pa.array(values, field.type))
    return arrays


def _by_name(value: Any) -> Any:
    """Return a nested value with dicts in place of Rows and named tuples, at every depth."""
    if isinstance(value, dict):
        return {key: _by_name(part) for key, part in value.items()}
    if isinstance(value, list):
        return list(map(_by_name, value))
    if not isinstance(value, tuple):
        return value
    names, parts = names_in(value), tuple(map(_by_name, value))
    if names is None:
        return parts
    # One that names a field twice is refused as it is.
    return dict(zip(names, parts, strict=True)) if len({*names}) == len(parts) else value


def _check_whole(name: str, values: Iterable[Any], kind: pa.DataType) -> None:
    """Refuse fractions where Arrow would cut them off without a word."""
    if pa.types.is_nested(kind):
        for part in _parts_of(name, values, kind):
            _check_whole(*part)
    elif (pa.types.is_integer(kind) or pa.types.is_temporal(kind)) and any(
        issubclass(value_type, _FRACTIONAL) for value_type in set(map(type, values))
    ):
        value = next(value for value in values if isinstance(value, _FRACTIONAL))
        raise TypeError(f"{name}: {value!r} is a {type(value).__name__}, expected {kind}")


def _parts_of(
    name: str, values: Iterable[Any], kind: pa.DataType
) -> Iterator[tuple[str, list[Any], pa.DataType]]:
    """Yield the parts of nested values: the name for messages, the values, and the type."""
    if pa.types.is_struct(kind):
        # Arrow takes pairs of a name and a value, too.
        values = [dict(value) if isinstance(value, list) else value for value in values]
        for at, field in enumerate(kind):
            parts = [
                value.get(field.name) if isinstance(value, dict) else value[at]
                for value in values
                if isinstance(value, dict) or (isinstance(value, tuple) and at < len(value))
            ]
            yield f"{name}.{field.name}", parts, field.type
    elif pa.types.is_map(kind):
        maps = [
            value.items() if isinstance(value, dict) else value
            for value in values
            if isinstance(value, Iterable)  # a null is None, and in frames NaN, too
        ]
        items = list(chain.from_iterable(maps))
        yield f"{name}, a key", [key for key, _ in items], kind.key_type
        yield f"{name}, a value", [part for _, part in items], kind.item_type
    elif pa.types.is_list(kind):
        lists = [value for value in values if isinstance(value, Iterable)]
        yield f"{name}, an element", list(chain.from_iterable(lists)), kind.value_type


def _check_fields(name: str, values: Iterable[Any], kind: pa.DataType) -> None:
    """Refuse structs with other fields: Arrow leaves them out, and makes missing fields null."""
    if not pa.types.is_nested(kind):
        return
    if pa.types.is_struct(kind):
        names = [field.name for field in kind]
        _check_names(f"{name}: a struct", values, names)
        for misfit in filter(None, (order_misfit(value, names) for value in values)):
            raise TypeError(f"{name}: a struct {misfit}")
    for part in _parts_of(name, values, kind):
        _check_fields(*part)


def _check_names(what: str, values: Iterable[Any], expected: Sequence[str]) -> None:
    """Refuse rows and dicts with other fields than are expected."""
    for names in dict.fromkeys(map(_names_of, values)):
        if names is not None and (misfit := field_misfit(names, expected)):
            raise TypeError(f"{what} {misfit}")


def _names_of(value: Any) -> tuple[Any, ...] | None:
    """Return the names of a value's fields; None for a value without names."""
    if isinstance(value, tuple):
        return names_in(value)
    if isinstance(value, list):  # Arrow takes pairs of a name and a value, too
        value = dict(value)
    return tuple(value) if isinstance(value, dict) else None


def names_in(value: Any) -> tuple[Any, ...] | None:
    """Return the field names of a Row or a named tuple; None for a value without them."""
    names = getattr(value, "__fields__" if isinstance(value, Row) else "_fields", None)
    return None if names is None else tuple(names)


def field_misfit(names: Sequence[Any], expected: Sequence[str]) -> str:
    """Return the misfit between field names and the expected names; "" if none, in any order."""
    unknown = [name for name in names if name not in expected]
    missing = [name for name in expected if name not in names]
    if unknown:
        others = missing or expected or ["none at all"]
        (nearest,) = difflib.get_close_matches(str(unknown[0]), others, 1, cutoff=0)
        return f"has a field {unknown[0]!r}, which is none; the nearest one is {nearest!r}"
    if missing:
        return f"has no field {missing[0]!r}: give it None where it is to be null"
    return "" if len(names) == len(expected) else f"has a field twice: {', '.join(names)}"


def order_misfit(value: Any, names: Sequence[str]) -> str:
    """Return the misfit of a Row that has some of a struct's fields at other places; "" if none.

    A named tuple is looked at like a Row. Where a Row counts by position, as in Spark, a Row with
    other names may do so: a value of one state goes into another.
    """
    own = names_in(value) or ()
    if all(name not in names or names[at] == name for at, name in enumerate(own[: len(names)])):
        return ""
    return f"has its fields in another order than {', '.join(names)}, and counts by position"


def _series_column(values: "pd.Series[Any]", kind: pa.DataType, timezone: str) -> pa.Array:
    import pandas as pd

    try:
        _check_fields(str(values.name), values, kind)
    except (TypeError, ValueError) as error:
        raise _misfit(pa.schema([pa.field(str(values.name), kind)]), error) from error
    is_moment = isinstance(values.dtype, pd.DatetimeTZDtype) or values.dtype.kind == "M"
    if is_moment and pa.types.is_timestamp(kind):
        if kind.tz is not None and values.dt.tz is None:
            values = values.dt.tz_localize(timezone, ambiguous=False, nonexistent="shift_forward")
        elif kind.tz is None and values.dt.tz is not None:
            values = values.dt.tz_convert(timezone).dt.tz_localize(None)
    try:
        try:
            return pa.Array.from_pandas(values, type=kind, safe=True)
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            return pa.Array.from_pandas(values).cast(kind)  # e.g. numbers to text, as Spark does
    except pa.ArrowException as error:
        raise _misfit(pa.schema([pa.field(str(values.name), kind)]), error) from error


def _misfit(schema: pa.Schema, error: Exception) -> StateError:
    columns = ", ".join(f"{field.name} {field.type}" for field in schema)
    return StateError(
        f"a processor returned rows that do not fit its output ({columns}): {error}. Return "
        f"Row(name=value, ...) with these types, or change output="
    )
