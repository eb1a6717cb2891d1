"""Which folder a row goes to: `col=value/…`, as Hive and Spark name them."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.errors import RecordError

NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"
"""Of null; also of the empty text, which Hive and Spark cannot tell from it."""
NAME_BYTES_MAX = 255
"""The longest name of a file or folder on the usual file systems."""

_ESCAPED = {chr(code) for code in range(0x20)} | set("\x7f\"#%'*/:=?\\{[]^")
"""Source: Spark's ExternalCatalogUtils.escapePathName."""


def escape(text: str) -> str:
    """A name of a column, or a value, as a part of a path."""
    return "".join(f"%{ord(char):02X}" if char in _ESCAPED else char for char in text)


def is_possible(kind: pa.DataType) -> bool:
    """Whether a column's values have one text that every reader takes for the same value."""
    if pa.types.is_dictionary(kind):
        return is_possible(kind.value_type)
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_date32(kind)
        or pa.types.is_null(kind)
    )


def split(rows: pa.RecordBatch, by: Sequence[str]) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The rows of each folder, in their order, without the columns that its name tells.

    Raises:
        RecordError: a column is missing, or a value cannot be part of a path.
    """
    columns = [_as_text(rows, name) for name in by]
    rest = rows.drop_columns(list(by))
    groups, index = _numbered(columns)
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    for start, stop in zip(starts, [*starts[1:], len(order)], strict=True):
        picked = order[start:stop]
        values = [column.dictionary[int(codes[picked[0]])] for column, codes in index]
        yield _folder(by, values), rest if len(picked) == len(order) else rest.take(picked)


def _as_text(rows: pa.RecordBatch, name: str) -> Any:
    place = rows.schema.get_field_index(name)
    if place < 0:
        raise RecordError(
            f"file sink: partition_by names column {name!r}, and the rows have "
            f"{', '.join(rows.schema.names)}"
        )
    column = rows.column(place)
    if not is_possible(column.type):
        raise RecordError(
            f"file sink: partition_by column {name!r} is {column.type}: expected text, integers, "
            f"booleans or dates. Partition by a column made of it, such as its date."
        )
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(pa.string()).dictionary_encode(null_encoding="encode")


def _numbered(columns: list[Any]) -> tuple[np.ndarray, list[tuple[Any, np.ndarray]]]:
    """A number per row, equal where all columns are; and each column with its codes."""
    index = [(column, column.indices.to_numpy(zero_copy_only=False)) for column in columns]
    groups = np.zeros(len(columns[0]), np.int64)
    for column, codes in index:
        _, groups = np.unique(groups * (len(column.dictionary) + 1) + codes, return_inverse=True)
    return groups, index


def _folder(by: Sequence[str], values: list[Any]) -> str:
    texts = [value.as_py() for value in values]
    names = [
        f"{escape(name)}={escape(text) if text else NULL_FOLDER}"
        for name, text in zip(by, texts, strict=True)
    ]
    for name in names:
        if len(name.encode()) > NAME_BYTES_MAX:
            raise RecordError(
                f"file sink: a value of partition_by column {name.partition('=')[0]!r} is too long "
                f"for a folder's name: {len(name.encode())} bytes of at most {NAME_BYTES_MAX}: "
                f"{name[:80]}…"
            )
    return "/".join(names)


def bare(kind: pa.DataType) -> pa.DataType:
    """A type whose every field may be null."""
    if pa.types.is_struct(kind):
        return pa.struct([bare_field(kind.field(place)) for place in range(kind.num_fields)])
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, bare_field(kind.item_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(bare_field(kind.value_field), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(bare_field(kind.value_field))
    if pa.types.is_list(kind):
        return pa.list_(bare_field(kind.value_field))
    return kind


def bare_field(field: pa.Field) -> pa.Field:
    """A field that may be null, and whatever it holds."""
    return pa.field(field.name, bare(field.type), nullable=True)


def bare_schema(schema: pa.Schema) -> pa.Schema:
    """A schema whose every field may be null, without metadata."""
    return pa.schema([bare_field(field) for field in schema])


def conformed(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The rows with a schema whose every field may be null.

    Raises:
        RecordError: they differ in more than that.
    """
    if rows.schema.equals(schema):
        return rows
    found = bare_schema(rows.schema)
    if not found.equals(schema):
        raise RecordError(
            f"file sink: one file has one schema: expected {_shown(schema)}; found "
            f"{_shown(found)}. Cast the rows before the sink, or state the columns by schema=."
        )
    return pa.RecordBatch.from_arrays(
        [pc.cast(column, field.type) for column, field in zip(rows.columns, schema, strict=True)],
        schema=schema,
    )


def _shown(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
