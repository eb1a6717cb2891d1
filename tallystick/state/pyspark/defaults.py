"""Defaults that a program declares for new columns of its state, for entries from before."""

from collections.abc import Collection, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql.types import DataType, StructField, StructType

from tallystick.arguments import near
from tallystick.errors import OptionError, StateError
from tallystick.state.functions.processing import OWN_KINDS, StateDeclaration
from tallystick.state.pyspark.values import ValueCodec, struct_from_text
from tallystick.state.row_codec import ColumnsCodec
from tallystick.state.schema import schema_from_text

Stored = Mapping[str, str]
"""Values as they are stored, in hexadecimal digits, by the name of their column."""


def stored_defaults(
    uid: str, declared: Collection[StateDeclaration], defaults: Mapping[str, Any]
) -> Mapping[str, Stored]:
    """Return the values of a step's new columns as they are stored, by the name of the state.

    Args:
        uid: of the step, for messages.
        declared: the states of the step.
        defaults: by column; one within a struct has the names of the structs before it.

    Raises:
        OptionError: no state has such a column, or its type does not hold the value.
    """
    by_state: dict[str, dict[str, str]] = {state.name: {} for state in declared}
    for column, value in defaults.items():
        known: list[str] = []
        for state in declared:
            if not state.value_schema:
                continue
            columns = _columns(state)
            known += columns
            if column in columns:
                by_state[state.name][column] = _stored(uid, state, column, columns[column], value)
        if column not in known:
            raise OptionError(
                f"step {uid}: defaults={{{column!r}: …}}: its state has the columns "
                f"{', '.join(known)}.{near(column, known)}"
            )
    return by_state


def _columns(state: StateDeclaration) -> Mapping[str, pa.DataType | DataType]:
    """Return the types of a state's columns, and of the fields of its structs."""
    if state.kind in OWN_KINDS:
        return _fields(struct_from_text(state.value_schema), "")
    return {field.name: field.type for field in schema_from_text(state.value_schema)}


def _fields(struct: StructType, path: str) -> dict[str, DataType]:
    types: dict[str, DataType] = {}
    for field in struct.fields:
        types[f"{path}{field.name}"] = field.dataType
        if isinstance(field.dataType, StructType):
            types |= _fields(field.dataType, f"{path}{field.name}.")
    return types


def _stored(
    uid: str, state: StateDeclaration, column: str, kind: pa.DataType | DataType, value: Any
) -> str:
    try:
        if value is None:
            raise ValueError("null is what it is without a default: leave it out")
        if isinstance(kind, DataType):
            schema = StructType([StructField(column, kind)])
            return ValueCodec(f"state {state.name!r}", schema).encode((value,)).hex()
        rows = pa.record_batch([pa.array([value], kind)], [column])
        (data,) = ColumnsCodec(rows.schema).encode(rows).to_pylist()
        return str(data.hex())
    except (pa.ArrowException, StateError, TypeError, ValueError, OverflowError) as error:
        text = kind.simpleString() if isinstance(kind, DataType) else kind
        raise OptionError(
            f"step {uid}: defaults={{{column!r}: {value!r}}}: expected a value of {text}: {error}"
        ) from error
