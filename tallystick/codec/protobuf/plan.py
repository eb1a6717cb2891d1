"""Plans: the columns of a Protobuf message's fields, with their types."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tallystick.codec.ddl import ddl_of_type
from tallystick.codec.protobuf import kernels
from tallystick.codec.protobuf.schema import Message
from tallystick.codec.wire_format import SchemaError

TIMESTAMP = "google.protobuf.Timestamp"
_WRAPPERS = "google.protobuf.{}Value"
WRAPPERS = frozenset(
    _WRAPPERS.format(name)
    for name in ("Bool", "Int32", "Int64", "UInt32", "UInt64", "Float", "Double", "String", "Bytes")
)
UNSIGNED_64 = pa.decimal128(20, 0)

Field = Any
"""`google.protobuf.descriptor.FieldDescriptor`."""

_ENUM_TYPE = 14
_WIRE_KINDS = {
    1: kernels.DOUBLE,
    2: kernels.FLOAT,
    3: kernels.INT64,
    4: kernels.UINT64,
    5: kernels.INT32,
    6: kernels.FIXED64,
    7: kernels.FIXED32,
    8: kernels.BOOL,
    9: kernels.STRING,
    11: kernels.MESSAGE,
    12: kernels.BYTES,
    13: kernels.UINT32,
    14: kernels.ENUM,
    15: kernels.SFIXED32,
    16: kernels.SFIXED64,
    17: kernels.SINT32,
    18: kernels.SINT64,
}
"""By FieldDescriptorProto.Type; a group, 10, is none of ours."""
_INT, _LONG = (pa.int32(), pa.int64()), (pa.int64(),)
_COLUMNS: dict[int, tuple[pa.DataType, ...]] = {
    kernels.BOOL: (pa.bool_(),),
    kernels.INT32: _INT,
    kernels.SINT32: _INT,
    kernels.SFIXED32: _INT,
    kernels.UINT32: _LONG,
    kernels.FIXED32: _LONG,
    kernels.INT64: _LONG,
    kernels.SINT64: _LONG,
    kernels.SFIXED64: _LONG,
    kernels.UINT64: (pa.int64(), UNSIGNED_64),
    kernels.FIXED64: (pa.int64(), UNSIGNED_64),
    kernels.FLOAT: (pa.float32(), pa.float64()),
    kernels.DOUBLE: (pa.float64(),),
    kernels.STRING: (pa.string(),),
    kernels.BYTES: (pa.binary(),),
    kernels.ENUM: (pa.string(), *_INT),
}
"""The types of columns that a field's values fit without loss, the usual one first."""
_TIMES = (pa.timestamp("us", "UTC"), pa.timestamp("us"))
_TYPE_NAMES = (
    *("", "double", "float", "int64", "uint64", "int32", "fixed64", "fixed32", "bool", "string"),
    *("group", "message", "bytes", "uint32", "enum", "sfixed32", "sfixed64", "sint32", "sint64"),
)


@dataclass(frozen=True, slots=True)
class EnumColumn:
    """The values of an enum.

    Args:
        numbers: int64, ascending.
        symbols: the name of each; of several names of one number the first in the schema.
        is_closed: whether another number is an unknown field, as in proto2.
        is_text: whether the column has the names.
    """

    numbers: NDArray[np.int64]
    symbols: pa.Array
    is_closed: bool
    is_text: bool


@dataclass(frozen=True, slots=True)
class FieldPlan:
    """A field that is a column.

    Args:
        index: its place among the fields of its message.
        path: as messages name it.
        number: as the schema numbers it.
        wire_kind: one of `kernels`.
        kind: the column's type.
        item_kind: the type of one value of it: of a list its item's; of a map of no matter.
        is_list: whether it may be there many times.
        has_presence: whether absent differs from the default.
        is_packed: whether a list's numbers are written without a tag for each.
        message: how the message in it is read.
        entry: how the entries of a map are read.
        enum: the values of an enum.
        oneof: the index of the oneof that it is a member of, among those of `MessagePlan`.
    """

    index: int
    path: str
    number: int
    wire_kind: int
    kind: pa.DataType
    item_kind: pa.DataType
    is_list: bool = False
    has_presence: bool = False
    is_packed: bool = False
    message: "MessagePlan | None" = None
    entry: "MessagePlan | None" = None
    enum: EnumColumn | None = None
    oneof: int = -1


@dataclass(frozen=True, slots=True)
class MessagePlan:
    """A type of message that becomes columns, or is made of them.

    Args:
        columns: the field of each column; a type: the message has no such field.
        fields: those that are there.
        table: as `kernels` take them; behind them, the other members of their oneofs.
        oneofs: of each oneof, the indexes of the fields that are there.
        others: the other members, whose enums' numbers the table points to.
    """

    columns: list[FieldPlan | pa.DataType]
    fields: list[FieldPlan]
    table: NDArray[np.int64]
    oneofs: list[tuple[int, ...]]
    others: list[FieldPlan]

    @classmethod
    def of(
        cls,
        columns: list[FieldPlan | pa.DataType],
        oneofs: list[tuple[int, ...]],
        others: list[FieldPlan],
    ) -> "MessagePlan":
        """Return the plan of columns."""
        fields = [column for column in columns if isinstance(column, FieldPlan)]
        table = _table([*fields, *others])
        return cls(columns, fields, table, oneofs, others)

    @classmethod
    def of_one_string(cls) -> "MessagePlan":
        """Return one to compile kernels with."""
        return cls.of([FieldPlan(0, "s", 1, kernels.STRING, pa.string(), pa.string())], [], [])


def make_plan(message: Message, columns: Sequence[pa.Field], path: str) -> MessagePlan:
    """Return how a message is read as columns, or written from them.

    Args:
        message: its descriptor.
        columns: name and type of each; of large and view types their plain form.
        path: of the field that holds it, "" for a record.

    Raises:
        SchemaError: a field cannot be a column of its type.
    """
    planned = list[FieldPlan | pa.DataType]()
    oneofs = dict[str, int]()
    members = list[list[int]]()
    count = 0
    for column in columns:
        field = message.fields_by_name.get(column.name)
        if field is None:
            planned.append(column.type)
            continue
        plan = _field(field, column.type, count, f"{path}.{column.name}" if path else column.name)
        one = field.containing_oneof
        if one is not None and len(one.fields) > 1:
            oneof = oneofs.setdefault(one.name, len(oneofs))
            members += [[]] if oneof == len(members) else []
            members[oneof].append(count)
            plan = replace(plan, oneof=oneof)
        count += 1
        planned.append(plan)
    names = {column.name for column in columns}
    others = [
        _other_member(member, oneofs[one.name])
        for one in message.oneofs
        if one.name in oneofs
        for member in one.fields
        if member.name not in names
    ]
    return MessagePlan.of(planned, [tuple(indexes) for indexes in members], others)


def _other_member(field: Field, oneof: int) -> FieldPlan:
    """Return a member of a oneof that is no column, but takes the value of one that is."""
    wire_kind = _WIRE_KINDS.get(field.type, kernels.GROUPED)
    kind = pa.null()
    enum = None if field.enum_type is None else _enum(field, is_text=False)
    return FieldPlan(-1, field.name, field.number, wire_kind, kind, kind, enum=enum, oneof=oneof)


def _table(fields: Sequence[FieldPlan]) -> NDArray[np.int64]:
    table = np.zeros((len(fields), kernels.FIELD_WORDS), np.int64)
    for row, field in zip(table, fields, strict=True):
        flags = (field.is_list, field.has_presence, field.is_packed)
        row[: kernels.SYMBOLS] = (field.number, field.wire_kind, *flags, field.oneof)
        if field.enum is not None and field.enum.is_closed:
            numbers = field.enum.numbers
            row[[kernels.SYMBOLS, kernels.SYMBOL_COUNT]] = numbers.ctypes.data, len(numbers)
    return table


def _field(field: Field, kind: pa.DataType, index: int, path: str) -> FieldPlan:
    message = field.message_type
    is_map = message is not None and message.GetOptions().map_entry
    wire_kind = _WIRE_KINDS.get(field.type)
    if wire_kind is None:
        raise SchemaError(f"field {path!r} is a group, which is not read: leave it out")
    shared = {"index": index, "path": path, "number": field.number, "wire_kind": wire_kind}
    if is_map:
        if not pa.types.is_map(kind):
            raise unfit(field, kind, path)
        parts = [kind.key_field.with_name("key"), kind.item_field.with_name("value")]
        plan = make_plan(message, parts, path)
        entry = MessagePlan.of([_always_there(column, path) for column in plan.columns], [], [])
        return FieldPlan(**shared, kind=kind, item_kind=kind, is_list=True, entry=entry)
    is_list = field.is_repeated
    if is_list and not pa.types.is_list(kind):
        raise unfit(field, kind, path)
    item = kind.value_type if is_list else kind
    return FieldPlan(
        **shared,
        kind=kind,
        item_kind=item,
        is_list=is_list,
        has_presence=field.has_presence and not is_list,
        is_packed=field.is_packed,
        message=None if message is None else _message(field, item, path),
        enum=_enum_column(field, item, path),
    )


def _always_there(field: "FieldPlan | pa.DataType", path: str) -> FieldPlan:
    """Return the key or value of a map's entry: absent it is its default, a message is empty."""
    if not isinstance(field, FieldPlan):
        raise SchemaError(f"the entries of map {path!r} are without a key or a value")
    return replace(field, has_presence=False)


def _message(field: Field, kind: pa.DataType, path: str) -> MessagePlan:
    message = field.message_type
    if pa.types.is_struct(kind):
        return make_plan(message, list(kind), path)
    if message.full_name == TIMESTAMP and kind in _TIMES:
        parts = [pa.field("seconds", pa.int64()), pa.field("nanos", pa.int64())]
        return make_plan(message, parts, path)
    if message.full_name in WRAPPERS:
        return make_plan(message, [pa.field("value", kind)], path)
    raise unfit(field, kind, path)


def _enum_column(field: Field, kind: pa.DataType, path: str) -> EnumColumn | None:
    """Check that a field without parts fits its column, and return the values of an enum."""
    if field.message_type is not None:
        return None
    if kind not in _COLUMNS[_WIRE_KINDS[field.type]]:
        raise unfit(field, kind, path)
    return _enum(field, is_text=pa.types.is_string(kind)) if field.type == _ENUM_TYPE else None


def _enum(field: Field, *, is_text: bool) -> EnumColumn:
    names = dict[int, str]()
    for value in field.enum_type.values:
        names.setdefault(value.number, value.name)
    numbers = sorted(names)
    return EnumColumn(
        np.array(numbers, np.int64),
        pa.array([names[n] for n in numbers]),
        is_closed=bool(field.enum_type.is_closed),
        is_text=is_text,
    )


def unfit(field: Field, kind: pa.DataType, path: str) -> SchemaError:
    """Return the error of a field that cannot be a column of a type."""
    return SchemaError(
        f"field {path!r} is {type_name(field)}, and its column is {kind}: {_usual(field)}"
    )


def type_name(field: Field) -> str:
    """Return a field's type as messages name it."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return "a map"
    name = _TYPE_NAMES[field.type]
    for part in (field.message_type, field.enum_type):
        name = name if part is None else part.full_name
    return f"repeated {name}" if field.is_repeated else name


def _usual(field: Field) -> str:
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        return "make it a map<…, …>"
    if message is None:
        kinds = " or ".join(map(ddl_of_type, _COLUMNS[_WIRE_KINDS[field.type]]))
    elif message.full_name == TIMESTAMP:
        kinds = "timestamp, or a struct<seconds bigint, nanos int>"
    elif message.full_name in WRAPPERS:
        kinds = "the type of what it wraps, or a struct<value …>"
    else:
        kinds = "a struct<…> of its fields"
    return f"make it an array of {kinds}" if field.is_repeated else f"make it {kinds}"
