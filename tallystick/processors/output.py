"""What a processor returns, as Arrow columns of the declared output."""

import decimal
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql import Row

from tallystick.errors import StateError

if TYPE_CHECKING:  # a fifth of what a pipeline imports, and few need it
    import pandas as pd

_FRACTIONAL = (float, np.floating, decimal.Decimal)


def rows_to_batch(rows: list[Row], schema: pa.Schema) -> pa.RecordBatch:
    """Rows by the names of their columns: one that is missing is null, others are left out.

    Raises:
        StateError: something else than a Row was returned, or a value has another type.
    """
    try:
        return pa.RecordBatch.from_arrays(_columns(rows, schema), schema=schema)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise _misfit(schema, error) from error


def frame_to_batch(frame: "pd.DataFrame", schema: pa.Schema, timezone: str) -> pa.RecordBatch:
    """A frame's columns by name, or by position if they have no names.

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
        _column(frame[field.name] if by_name else frame.iloc[:, at], field.type, timezone)
        for at, field in enumerate(schema)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _columns(rows: list[Row], schema: pa.Schema) -> list[pa.Array]:
    is_nested = any(pa.types.is_nested(field.type) for field in schema)
    if not is_nested and all(getattr(row, "__fields__", None) == schema.names for row in rows):
        columns: Iterable[Any] = zip(*rows, strict=True) if rows else [()] * len(schema)
    else:
        for wrong in (row for row in rows if not isinstance(row, Row)):
            raise TypeError(f"{wrong!r} is a {type(wrong).__name__}, expected a Row")
        dicts = [row.asDict(True) for row in rows]
        columns = [[row.get(name) for row in dicts] for name in schema.names]
    arrays = []
    for values, field in zip(columns, schema, strict=True):
        _check_whole(field.name, values, field.type)
        arrays.append(pa.array(values, field.type))
    return arrays


def _check_whole(name: str, values: Iterable[Any], kind: pa.DataType) -> None:
    """Refuse fractions where Arrow would cut them off without a word."""
    if pa.types.is_struct(kind):
        for field in kind:
            parts = [value.get(field.name) for value in values if isinstance(value, dict)]
            _check_whole(f"{name}.{field.name}", parts, field.type)
    elif pa.types.is_map(kind):
        maps = [value.items() if isinstance(value, dict) else value or () for value in values]
        items = list(chain.from_iterable(maps))
        _check_whole(f"{name}, a key", [key for key, _ in items], kind.key_type)
        _check_whole(f"{name}, a value", [part for _, part in items], kind.item_type)
    elif pa.types.is_list(kind):
        lists = [value for value in values if isinstance(value, Iterable)]
        _check_whole(f"{name}, an element", list(chain.from_iterable(lists)), kind.value_type)
    elif (pa.types.is_integer(kind) or pa.types.is_temporal(kind)) and any(
        issubclass(each, _FRACTIONAL) for each in set(map(type, values))
    ):
        value = next(each for each in values if isinstance(each, _FRACTIONAL))
        raise TypeError(f"{name}: {value!r} is a {type(value).__name__}, expected {kind}")


def _column(values: "pd.Series[Any]", kind: pa.DataType, timezone: str) -> pa.Array:
    import pandas as pd

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
