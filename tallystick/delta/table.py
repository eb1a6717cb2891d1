"""A Delta table as delta-rs reads it: its columns for Arrow, and the features that are refused.

What this sink writes are plain files with plain columns. A table that asks its writers for more is
refused by the feature's name: delta-rs commits `AddAction`s without looking at the files.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from tallystick.errors import OptionError, RecordError
from tallystick.files.writing import bare, bare_field, is_possible

if TYPE_CHECKING:
    from deltalake import DeltaTable

WRITER_FEATURES = {
    "appendOnly",
    "changeDataFeed",  # a commit that only adds files needs no files of changes
    "checkConstraints",
    "columnMapping",
    "deletionVectors",
    "generatedColumns",
    "identityColumns",
    "invariants",
    "timestampNtz",
    "variantType",
}
"""The features that this sink keeps, or whose use in the table is refused by name."""
_COLUMN_RULES = {
    "delta.generationExpression": "a generated column",
    "delta.identity.start": "an identity column",
    "delta.invariants": "a column with an invariant",
    "CURRENT_DEFAULT": "a column with a default",
}
_CONSTRAINT = "delta.constraints."
_LEGACY_VERSION_MAX = 6
"""Up to this writer version, features follow from the version and are in use by settings only."""


def table_problems(table: "DeltaTable") -> Iterator[str]:
    """Yield the features of a table that the sink cannot keep, by name."""
    protocol, metadata = table.protocol(), table.metadata()
    settings = metadata.configuration
    if protocol.min_writer_version > _LEGACY_VERSION_MAX:
        for feature in sorted({*(protocol.writer_features or ())} - WRITER_FEATURES):
            yield f"it has the writer feature {feature!r}"
    mapping = settings.get("delta.columnMapping.mode", "none")
    if mapping != "none":
        yield f"it has column mapping (delta.columnMapping.mode={mapping})"
    for name, value in settings.items():
        if name.startswith(_CONSTRAINT):
            yield f"it has the CHECK constraint {name.removeprefix(_CONSTRAINT)!r} ({value})"
    if "delta.setTransactionRetentionDuration" in settings:
        yield (
            "it forgets application transactions (delta.setTransactionRetentionDuration), by which "
            "a commit is known to have happened"
        )
    for field in table.schema().fields:
        for rule, meaning in _COLUMN_RULES.items():
            if rule in field.metadata:
                yield f"{field.name!r} is {meaning} ({field.metadata[rule]})"
    for name in metadata.partition_columns:
        kind = columns_of(table).field(name).type
        if not is_possible(kind):
            yield f"partition column {name!r} is {kind}: expected text, integers, booleans or dates"
    if len(metadata.partition_columns) == len(table.schema().fields):
        yield "all its columns are partition columns"


def columns_of(table: "DeltaTable") -> pa.Schema:
    """Return the columns of a table as Arrow has them."""
    return pa.schema(table.schema().to_arrow())


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


def conformed(rows: pa.RecordBatch, wanted: pa.Schema, location: str) -> pa.RecordBatch:
    """Return the rows with the columns of the table, in its order; a missing one is null.

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
            f"Delta table {location}: {'; '.join(problems)}. Change the rows before the sink "
            f"(select, cast), or the table: DeltaSink(schema=…, evolve=True) adds columns."
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


def add_columns(table: "DeltaTable", columns: pa.Schema) -> None:
    """Add the columns that a table does not have, as columns that may be null."""
    from deltalake import Field, Schema

    missing = [bare_field(field) for field in columns if field.name not in columns_of(table).names]
    if missing:
        fields: list[Any] = [
            Field(field.name, field.type, nullable=True)
            for field in Schema.from_arrow(pa.schema(missing)).fields
        ]
        table.alter.add_columns(fields)
        table.update_incremental()


def refuse(location: str, problems: list[str]) -> None:
    """Raise if there are problems with a table.

    Raises:
        OptionError: there are.
    """
    if problems:
        raise OptionError(
            f"Delta table {location} cannot be written to: {'; '.join(problems)}. Drop or change "
            f"that in the table, or write to another table"
        )
