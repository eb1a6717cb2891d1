"""The sort order of an Iceberg table, as the rows of each of its files keep it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from pyiceberg.schema import Schema
    from pyiceberg.table.sorting import SortField, SortOrder


def in_order(rows: pa.Table, order: "SortOrder", schema: "Schema") -> pa.Table:
    """Sort rows of an Iceberg table by its sort order; rows that are equal stay as they are.

    Args:
        rows: of the table.
        order: its sort order.
        schema: of the table.

    Raises:
        Exception: of any kind, where a field cannot be sorted by.
    """
    keys = [key for field in order.fields for key in _keys(rows, field, schema)]
    names = [str(place) for place in range(len(keys))]
    columns = pa.table([values for values, _ in keys], names)
    directions = [direction for _, direction in keys]
    indices = pc.sort_indices(columns, sort_keys=[*zip(names, directions, strict=True)])
    return rows.take(indices)


def _keys(rows: pa.Table, field: "SortField", schema: "Schema") -> Iterator[tuple[Any, str]]:
    """Yield the two columns that a field sorts by: whether there is a value, and which."""
    from pyiceberg.io.pyarrow import _get_field_from_arrow_table
    from pyiceberg.table.sorting import NullOrder, SortDirection

    name, kind = schema.find_column_name(field.source_id), schema.find_type(field.source_id)
    values = _get_field_from_arrow_table(rows, str(name))
    values = field.transform.pyarrow_transform(kind)(values)
    is_first = field.null_order is NullOrder.NULLS_FIRST
    yield values.is_null(), "descending" if is_first else "ascending"
    is_up = field.direction is SortDirection.ASC
    yield _comparable(values), "ascending" if is_up else "descending"


def _comparable(values: Any) -> Any:
    """Return values as Arrow sorts them in Iceberg's order.

    Of floats these are their bits: -NaN, -Infinity, …, -0, 0, …, Infinity, NaN.
    """
    if isinstance(values.type, pa.BaseExtensionType):
        return values.cast(values.type.storage_type)
    if pa.types.is_floating(values.type):
        bits = values.fill_null(0).to_numpy().view(f"i{values.type.bit_width // 8}")
        return pa.array(np.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits))
    return values
