"""The columns of rows and those of a table: what differs, and rows in the table's columns."""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from tallystick.errors import OptionError, RecordError
from tallystick.files.writing import bare, bare_field


def column_problems(columns: pa.Schema, wanted: pa.Schema) -> Iterator[str]:
    """Yield what rows with some columns lack, or have too much, for a table.

    Args:
        columns: of the rows.
        wanted: of the table.
    """
    for field in columns:
        if field.name not in wanted.names:
            yield f"the table has no column {field.name!r} ({field.type})"
        elif not _fits(field.type, wanted.field(field.name).type):
            kind = wanted.field(field.name).type
            yield f"column {field.name!r} is {field.type}: the table has {kind}"
    for field in wanted:
        if not field.nullable and field.name not in columns.names:
            yield f"column {field.name!r} is missing, and the table has it NOT NULL"


def conformed(rows: pa.RecordBatch, wanted: pa.Schema, table: str) -> pa.RecordBatch:
    """Return the rows with the columns of the table, in its order; a missing one is null.

    Args:
        rows: with columns of the same names.
        wanted: the table's columns.
        table: names it, for errors.

    Raises:
        RecordError: a column is unknown, missing, of another type, or null where it may not be.
    """
    problems = list(column_problems(rows.schema, wanted))
    arrays = []
    for field in wanted:
        place = rows.schema.get_field_index(field.name)
        if problems:
            continue
        if place < 0:
            arrays.append(pa.nulls(rows.num_rows, bare(field.type)))
            continue
        column = rows.column(place)
        if column.null_count and not field.nullable:
            problems.append(
                f"column {field.name!r} is null in {column.null_count} rows, and the table has it "
                f"NOT NULL"
            )
            continue
        arrays.append(pc.cast(column, bare(field.type)))
    if problems:
        raise RecordError(
            f"{table}: {'; '.join(problems)}. Change the rows before the sink (select, cast), or "
            f"the table."
        )
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([*map(bare_field, wanted)]))


def _fits(actual: pa.DataType, wanted: pa.DataType) -> bool:
    """True if a cast keeps every value: the same type, in another encoding or finer than needed."""
    if pa.types.is_dictionary(actual):
        return _fits(actual.value_type, wanted)
    if pa.types.is_null(actual):
        return True
    if pa.types.is_timestamp(actual) and pa.types.is_timestamp(wanted):
        return (actual.tz is None) == (wanted.tz is None) and actual.unit != "ns"
    for is_kind in (_is_text, _is_binary):
        if is_kind(actual) and is_kind(wanted):
            return True
    return bool(bare(actual).equals(bare(wanted)))


def _is_text(kind: pa.DataType) -> bool:
    is_large = pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    return bool(pa.types.is_string(kind) or is_large)


def _is_binary(kind: pa.DataType) -> bool:
    is_large = pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
    return bool(pa.types.is_binary(kind) or is_large)


def refuse(table: str, problems: list[str]) -> None:
    """Raise if there are problems with a table.

    Raises:
        OptionError: there are.
    """
    if problems:
        raise OptionError(
            f"{table} cannot be written to: {'; '.join(problems)}. Drop or change that in the "
            f"table, or write to another table"
        )
