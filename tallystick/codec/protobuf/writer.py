"""Typed columns to Protobuf messages in Confluent's wire format, whole batches at a time.

Columns find their fields by name, and each must fit its field: a misfit that would lose data is
refused. Messages inside of a message are written first, all of one field at once, and are bytes to
the message that holds them. A field at its default is left out unless it has presence, as
Protobuf's own writers do.

Source: https://protobuf.dev/programming-guides/encoding/
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tallystick.codec.protobuf import kernels
from tallystick.codec.protobuf.plan import Field, FieldPlan, MessagePlan, make_plan, unfit
from tallystick.codec.protobuf.schema import Message, indexes_as_bytes, message_at, path_of
from tallystick.codec.spans import Int64Array, binary_array, spans_of
from tallystick.codec.wire_format import SchemaError, SchemaTexts
from tallystick.errors import OptionError, RecordError

PLANS_KEPT_MAX = 64
_RANGES = {
    kernels.INT32: (-(2**31), 2**31 - 1),
    kernels.SINT32: (-(2**31), 2**31 - 1),
    kernels.SFIXED32: (-(2**31), 2**31 - 1),
    kernels.ENUM: (-(2**31), 2**31 - 1),
    kernels.UINT32: (0, 2**32 - 1),
    kernels.FIXED32: (0, 2**32 - 1),
    kernels.UINT64: (0, 2**63 - 1),
    kernels.FIXED64: (0, 2**63 - 1),
}
"""The least and the most of an int64 in a field; others take any."""


@dataclass(frozen=True, slots=True)
class ProtobufWriter:
    """A `ValueWriter` for Protobuf.

    Args:
        schema_id: the id that the registry gave the schema.
        texts: the schema, see `schema`.
        message: the type of the rows; None: the file's first type.
    """

    schema_id: int
    texts: SchemaTexts
    message: str | None = None

    def check(self, columns: pa.Schema) -> None:
        """See `ValueWriter.check`."""
        _plan(self.texts, self.message, columns)

    def write(self, columns: pa.RecordBatch) -> pa.Array:
        """See `ValueWriter.write`."""
        fitted, plan = _plan(self.texts, self.message, columns.schema)
        indexes = indexes_as_bytes(path_of(self.texts, self.message))
        prefix = b"\0" + self.schema_id.to_bytes(4, "big") + indexes
        arrays = [
            _cast(column, kind, name)
            for column, kind, name in zip(
                columns.columns, fitted, columns.schema.names, strict=True
            )
        ]
        return write_columns(plan, arrays, prefix, columns.num_rows)


@lru_cache(maxsize=PLANS_KEPT_MAX)
def _plan(
    texts: SchemaTexts, name: str | None, columns: pa.Schema
) -> tuple[list[pa.DataType], MessagePlan]:
    try:
        message = message_at(texts, path_of(texts, name))
        fields = _fitted(message, list(columns), "")
        plan = _with_required(message, make_plan(message, fields, ""))
        return [field.type for field in fields], plan
    except SchemaError as error:  # here it is no record that is wrong
        raise OptionError(f"the columns do not fit the Protobuf schema: {error}") from error


def _with_required(message: Message, plan: MessagePlan) -> MessagePlan:
    """Return the plan in which no field that `proto2` requires may be null.

    A required field has presence, so it is written at its default too: that is in the plan's table,
    which stays.
    """

    def required(one: FieldPlan) -> FieldPlan:
        descriptor = message.fields_by_number[one.number]
        inner, entry = one.message, one.entry
        if inner is not None:
            inner = _with_required(descriptor.message_type, inner)
        if entry is not None:
            entry = _with_required(descriptor.message_type, entry)
        has_presence = one.has_presence and not descriptor.is_required
        return replace(one, has_presence=has_presence, message=inner, entry=entry)

    columns = [required(one) if isinstance(one, FieldPlan) else one for one in plan.columns]
    fields = [required(one) for one in plan.fields]
    return replace(plan, columns=columns, fields=fields)


def _fitted(message: Message, columns: Sequence[pa.Field], path: str) -> list[pa.Field]:
    """Return the columns with the types to write.

    Raises:
        SchemaError: a column comes twice, or has no field; or a required field has no column.
    """
    known = message.fields_by_name
    fitted = list[pa.Field]()
    for column in columns:
        inner = f"{path}.{column.name}" if path else column.name
        if column.name not in known:
            raise SchemaError(
                f"column {inner!r} would be lost, message {message.full_name} has no such field, "
                f"only {list(known)}. Leave the column out, or add it to the schema"
            )
        if any(column.name == other.name for other in fitted):
            raise SchemaError(f"column {inner!r} is there twice: rename one")
        fitted.append(column.with_type(_type(known[column.name], column.type, inner)))
    for one in message.fields:
        if one.is_required and all(one.name != column.name for column in columns):
            raise SchemaError(
                f"there is no column for field {one.name!r}, which message {message.full_name} "
                f"requires"
            )
    return fitted


def _type(one: Field, kind: pa.DataType, path: str) -> pa.DataType:
    """Return the plain form of a column's type; `make_plan` judges whether it fits."""
    types = pa.types
    if types.is_map(kind):
        if one.message_type is None or not one.message_type.GetOptions().map_entry:
            return kind
        key, value = one.message_type.fields
        return pa.map_(_type(key, kind.key_type, path), _type(value, kind.item_type, path))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pa.list_(_type(one, kind.value_type, path))
    if types.is_struct(kind) and one.message_type is not None:
        return pa.struct(_fitted(one.message_type, list(kind), path))
    if types.is_dictionary(kind):
        return _type(one, kind.value_type, path)
    if types.is_integer(kind):
        return pa.int64()
    if types.is_float32(kind) and one.type == _DOUBLE:
        return pa.float64()
    if types.is_float64(kind) and one.type == _FLOAT:
        raise unfit(one, kind, path)
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    if (
        types.is_large_binary(kind)
        or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
    ):
        return pa.binary()
    if types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz and "UTC")
    return kind


_DOUBLE, _FLOAT = 1, 2
"""Two of FieldDescriptorProto.Type."""


def _cast(column: pa.Array, kind: pa.DataType, name: str) -> pa.Array:
    if column.type == kind:
        return column
    try:
        return column.cast(kind)
    except pa.ArrowInvalid as error:
        raise RecordError(
            f"column {name!r} of type {column.type} holds what cannot be written as {kind}: "
            f"{error}. Round it in a map_batches",
            without_values=f"column {name!r} of type {column.type} cannot be written as {kind}",
        ) from error


def write_columns(
    plan: MessagePlan, columns: Sequence[pa.Array], prefix: bytes, row_count: int
) -> pa.Array:
    """Write one message per row.

    Args:
        plan: the way to write the columns, of their own types.
        columns: in the order of the plan's columns.
        prefix: the bytes before each message.
        row_count: how many rows there are.

    Raises:
        RecordError: a row holds a value that its field cannot hold.
    """
    parts = _Parts()
    of_field = [
        (one, column)
        for one, column in zip(plan.columns, columns, strict=True)
        if isinstance(one, FieldPlan)
    ]
    assert len(of_field) == len(columns), "each column has a field"
    of_field.sort(key=lambda pair: pair[0].number)
    _check_oneofs(plan, {one.index: column for one, column in of_field})
    addresses = np.array([parts.column(*pair) for pair in of_field], np.int64)
    table = plan.table[[one.index for one, _ in of_field]]
    before = np.frombuffer(prefix, np.uint8)
    offsets = np.zeros(row_count + 1, np.int64)
    kernels.write_messages(table, addresses.reshape(len(of_field), 4), before, offsets, 0)
    out = np.empty(int(offsets[-1]) + 1, np.uint8)
    kernels.write_messages(
        table, addresses.reshape(len(of_field), 4), before, offsets, out.ctypes.data
    )
    return binary_array(pa.py_buffer(out[: int(offsets[-1])]), offsets)


def _check_oneofs(plan: MessagePlan, columns: dict[int, pa.Array]) -> None:
    for members in plan.oneofs:
        there = sum(columns[index].is_valid().cast(pa.int64()).to_numpy() for index in members)
        rows = np.flatnonzero(np.asarray(there) > 1)
        if rows.size:
            names = [plan.fields[index].path for index in members]
            raise RecordError(
                f"row {rows[0]} of a batch has several of {names}, which are one oneof of the "
                f"Protobuf schema: leave all but one null"
            )


@dataclass(eq=False)
class _Parts:
    """The columns of a message type as addresses, and references that keep them in memory."""

    _kept: list[object] = field(default_factory=list)

    def column(self, one: FieldPlan, column: pa.Array) -> tuple[int, int, int, int]:
        """Return the addresses of a column; see `writer_kernels.VALUES`."""
        if column.null_count and not one.has_presence:
            raise RecordError(
                f"column {one.path!r} holds null, and the Protobuf schema has a field there that "
                f"is never null: filter such rows, fill them in a map_batches, or make the field "
                f"optional"
            )
        if one.is_list:
            return self._list(one, column)
        valid = 0
        if column.null_count:
            valid = self._address(column.is_valid().to_numpy(zero_copy_only=False).astype(np.uint8))
        return (*self._values(one, column), valid, 0)

    def _list(self, one: FieldPlan, column: pa.Array) -> tuple[int, int, int, int]:
        offsets = column.offsets.to_numpy().astype(np.int64)
        first, last = int(offsets[0]), int(offsets[-1])
        where = self._address(offsets - first)
        if one.entry is not None:
            entries = [part.slice(first, last - first) for part in (column.keys, column.items)]
            written = write_columns(one.entry, entries, b"", last - first)
            return (*self._spans(written), 0, where)
        items = column.values.slice(first, last - first)
        if items.null_count:
            raise RecordError(
                f"a list in column {one.path!r} holds null, and Protobuf has no null in a list: "
                f"filter it in a map_batches"
            )
        return (*self._values(one, items), 0, where)

    def _values(self, one: FieldPlan, column: pa.Array) -> tuple[int, int]:
        if one.message is not None:
            return self._messages(one.message, column)
        if one.wire_kind >= kernels.BYTES:
            return self._spans(column)
        return self._address(_numbers(one, column)), 0

    def _messages(self, plan: MessagePlan, column: pa.Array) -> tuple[int, int]:
        there = column.drop_null() if column.null_count else column
        if pa.types.is_struct(column.type):
            parts = there.flatten()
        elif pa.types.is_timestamp(column.type):
            micros = there.cast(pa.int64()).to_numpy()
            seconds = micros // 10**6
            parts = [pa.array(seconds), pa.array((micros - seconds * 10**6) * 1000)]
        else:
            parts = [there]
        starts, sizes = _places(write_columns(plan, parts, b"", len(there)), self._kept)
        if column.null_count:
            rows = column.is_valid().to_numpy(zero_copy_only=False)
            of_rows = np.zeros((2, len(column)), np.int64)
            of_rows[0, rows], of_rows[1, rows] = starts, sizes
            starts, sizes = of_rows
        return self._address(starts), self._address(sizes)

    def _spans(self, column: pa.Array) -> tuple[int, int]:
        starts, sizes = _places(column, self._kept)
        return self._address(starts), self._address(sizes)

    def _address(self, values: NDArray[np.generic]) -> int:
        values = np.ascontiguousarray(values)
        self._kept.append(values)
        return int(values.ctypes.data)


def _places(column: pa.Array, kept: list[object]) -> tuple[Int64Array, Int64Array]:
    """Return the address and size of each value."""
    spans = spans_of(column, "value")
    kept.append(spans)
    return spans.starts + spans.address, spans.lengths


def _numbers(one: FieldPlan, column: pa.Array) -> Int64Array:
    """Return the numbers of a column as int64, floats as their bits.

    Raises:
        RecordError: a number is beyond the range of the field.
    """
    if pa.types.is_string(column.type):
        return _of_symbols(one, column)
    if pa.types.is_decimal(column.type):
        try:
            column = column.cast(pa.uint64())
        except pa.ArrowInvalid as error:
            raise _beyond(one, "a number that is not from 0 to 2^64 - 1") from error
    if column.null_count:
        column = column.fill_null(pa.scalar(0, pa.int64()).cast(column.type))
    numbers: NDArray[Any] = column.to_numpy(zero_copy_only=False)
    if one.wire_kind == kernels.FLOAT:
        return numbers.view(np.uint32).astype(np.int64)
    if one.wire_kind == kernels.DOUBLE or numbers.dtype == np.uint64:
        bits: Int64Array = numbers.view(np.int64)
        return bits
    whole: Int64Array = numbers.astype(np.int64, copy=False)
    least, most = _RANGES.get(one.wire_kind, (-(2**63), 2**63 - 1))
    beyond = np.flatnonzero((whole < least) | (whole > most))
    if beyond.size:
        raise _beyond(one, f"{whole[beyond[0]]}")
    return whole


def _of_symbols(one: FieldPlan, column: pa.Array) -> Int64Array:
    assert one.enum is not None, one
    places = pc.index_in(column, one.enum.symbols)
    unknown = pc.and_(column.is_valid(), pc.is_null(places))
    if pc.any(unknown).as_py():
        raise _beyond(one, f"{column.filter(unknown)[0].as_py()!r}")
    numbers: Int64Array = one.enum.numbers[places.fill_null(0).to_numpy()]
    return numbers


def _beyond(one: FieldPlan, value: str) -> RecordError:
    says = f"column {one.path!r} holds what its field in the Protobuf schema cannot"
    return RecordError(f"{says}: {value}", without_values=says)
