"""A program that reads a record byte by byte, from a writer's schema and the columns asked for.

Columns are found by name. The rules are those of Avro's schema resolution, with Arrow types in the
place of a reader's schema: int may become long, float, double; long float, double; float double;
string and bytes one another. A logical type may be read as its underlying type, never the reverse.

A union at the top has a plan per branch, all for the same columns. A struct with the name of a
record holds the fields of that record (docs/decisions/0064).

Source: https://avro.apache.org/docs/1.12.0/specification/#schema-resolution
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tallystick.codec.avro import kernels
from tallystick.codec.avro.schema import Node
from tallystick.codec.wire_format import SchemaError

DECIMAL_DIGITS_MAX = 38
INSTRUCTIONS_MAX = 1 << 16
FIELDS_SHOWN_MAX = 5
_PRIMITIVE_OPERATIONS = {
    "boolean": kernels.BOOLEAN,
    "int": kernels.INT,
    "long": kernels.LONG,
    "float": kernels.FLOAT,
    "double": kernels.DOUBLE,
    "bytes": kernels.BYTES,
    "string": kernels.STRING,
}


class SlotContent(Enum):
    """The content of a column's slots."""

    INTEGER = auto()
    FLOAT = auto()  # its bits
    DOUBLE = auto()  # its bits
    SPAN = auto()  # start; the next column: length
    ENUM = auto()  # index of the symbol
    DECIMAL = auto()  # low 64 bits; the next column: the high ones
    STRUCT = auto()
    REPEATED = auto()  # number of items
    NOTHING = auto()  # the writer has no such field: all null, no column


@dataclass(frozen=True, slots=True)
class Output:
    """The way to make an Arrow array of columns.

    Args:
        kind: the Arrow type asked for.
        stored: the content of the column's slots.
        column: the first of its columns.
        context: the context whose items are the slots.
        parts: the fields of a struct, the items of a list, the keys and values of a map.
        symbols: of an enum.
        written: the decimal type that was written.
    """

    kind: pa.DataType
    stored: SlotContent = SlotContent.NOTHING
    column: int = -1
    context: int = 0
    parts: tuple["Output", ...] = ()
    symbols: tuple[str, ...] = ()
    written: pa.DataType | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A program for `decode_records`, and the Arrow arrays to make of the program's columns.

    Args:
        program: the instructions, addresses still 0; UNION's A is an index of `jumps`.
        jumps: the jump table of unions.
        column_contexts: the context of each column.
        context_count: how many contexts there are, the one of the records included.
        outputs: one per column asked for.
        paths: the field that each instruction reads, for messages.
    """

    program: NDArray[np.int64]
    jumps: NDArray[np.int64]
    column_contexts: NDArray[np.int64]
    context_count: int
    outputs: tuple[Output, ...]
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """A branch of a union at the top of a schema, or the record that a schema is.

    Args:
        name: the full name of the record; None: the branch is no record.
        plan: the way to read values of the branch; None: they are malformed.
        problem: the reason why they are malformed; "": they are not.
    """

    name: str | None
    plan: Plan | None
    problem: str = ""


def make_branches(writer: Node, schema: pa.Schema, *, is_named: bool) -> tuple[Branch, ...]:
    """Return the ways to read values of a writer's schema, one per branch of a union.

    Args:
        writer: a record, or a union with a record.
        schema: the columns asked for.
        is_named: whether a column says the record's name: rows without other columns are told by
            the name, so no record is unknown.

    Raises:
        SchemaError: a type does not fit; field and both types are named.
    """
    parts = writer.parts if writer.kind == "union" else [writer]
    records = [part for part in parts if part.kind == "record"]
    if not records:
        raise SchemaError(f"it is of type {writer}, but the columns asked for need a record")
    knows_all = is_named or len(records) == 1
    return tuple(_branch(part, records, schema, knows_all=knows_all) for part in parts)


def _branch(part: Node, records: list[Node], schema: pa.Schema, *, knows_all: bool) -> Branch:
    if part.kind == "null":
        return Branch(None, _make_plan(Node("record"), schema))
    if part.kind != "record":
        return Branch(None, None, f"it is of type {part}, and only records become columns")
    known = [name for name, _ in part.fields]
    if not (knows_all or any(_is_whole(part, c) or c.name in known for c in schema)):
        return Branch(
            part.name,
            None,
            f"it is a record {part.name}, which has none of the fields in value.schema: name one "
            f"of {known[:FIELDS_SHOWN_MAX]} there, or have a row of every record by a name_column=",
        )
    try:
        return Branch(part.name, _make_plan(part, schema))
    except SchemaError as error:
        raise _conflict(records, schema) or error from None


def _conflict(records: list[Node], schema: pa.Schema) -> SchemaError | None:
    """Return an error about a field that records of a union have as types for different columns."""
    for column in schema:
        types = {
            record.name: dict(record.fields)[column.name]
            for record in records
            if column.name in dict(record.fields)
        }
        if len({str(node) for node in types.values()}) > 1 and not all(
            _can_read(node, column) for node in types.values()
        ):
            alone = (f"`{r.rpartition('.')[2]}` struct<`{column.name}`: ...>" for r in types)
            return SchemaError(
                f"field {column.name!r} was asked for as {column.type}, and records of the union "
                f"have it as different types: "
                + ", ".join(f"{node} in {record}" for record, node in types.items())
                + ". Declare a type in value.schema that all can be read as, or in place of that "
                "column take the field of each record by itself: " + ", ".join(alone)
            )
    return None


def _can_read(node: Node, column: pa.Field) -> bool:
    try:
        _make_plan(Node("record", fields=[(column.name, node)]), pa.schema([column]))
    except SchemaError:
        return False
    return True


def _is_whole(record: Node, column: pa.Field) -> bool:
    """Return whether a column is the record itself: a struct that is called as the record is."""
    named = column.name in (record.name, record.name.rpartition(".")[2])
    is_field = column.name in dict(record.fields)
    return named and bool(pa.types.is_struct(column.type)) and not is_field


def _make_plan(writer: Node, schema: pa.Schema) -> Plan:
    """Return the plan that reads a record as the columns asked for.

    Raises:
        SchemaError: a type does not fit; field and both types are named.
    """
    compiler = _Compiler()
    outputs = compiler.top(writer, schema)
    compiler.emit(kernels.END, "")
    compiler.finish()
    return Plan(
        program=np.array(compiler.program, np.int64).reshape(-1, 8),
        jumps=np.array(compiler.jumps or [0], np.int64),
        column_contexts=np.array(compiler.column_contexts, np.int64),
        context_count=compiler.context_count,
        outputs=outputs,
        paths=tuple(compiler.paths),
    )


@dataclass(eq=False)
class _Compiler:
    program: list[list[int]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    jumps: list[int] = field(default_factory=list)
    column_contexts: list[int] = field(default_factory=list)
    context_count: int = 1
    _skipped: dict[Node, int] = field(default_factory=dict)
    _calls: list[tuple[int, Node]] = field(default_factory=list)

    def emit(self, operation: int, path: str, column: int = -1, a: int = 0, b: int = 0) -> int:
        if len(self.program) == INSTRUCTIONS_MAX:
            raise SchemaError(f"it takes more than {INSTRUCTIONS_MAX} steps per record to read")
        self.program.append([operation, column, 0, 0, 0, a, b, 0])
        self.paths.append(path)
        return len(self.program) - 1

    def finish(self) -> None:
        """Write the routines that skip records: called, as records may hold themselves."""
        while unwritten := [node for _, node in self._calls if node not in self._skipped]:
            node = unwritten[0]
            self._skipped[node] = len(self.program)
            for name, part in node.fields:
                self._skip(part, f"{node.name}.{name}")
            self.emit(kernels.RETURN, node.name)
        for place, node in self._calls:
            self.program[place][kernels.TARGET] = self._skipped[node]

    def top(self, node: Node, schema: pa.Schema) -> tuple[Output, ...]:
        """Read a record's fields as columns, and as fields of a struct that is the record."""
        wholes = [column.name for column in schema if _is_whole(node, column)]
        fields: dict[str, pa.Field] = {}
        for column in schema:
            for part in list(column.type) if column.name in wholes else [column]:
                if fields.setdefault(part.name, part).type != part.type:
                    raise SchemaError(
                        f"field {part.name!r} of the record {node.name} is asked for as "
                        f"{fields[part.name].type} and as {part.type}: declare one type in "
                        f"value.schema"
                    )
        valid = {name: self._column(0) for name in wholes}
        for name, place in valid.items():
            self.emit(kernels.VALID, name, place)
        outputs = dict(zip(fields, self.record(node, list(fields.values()), 0, ""), strict=True))
        return tuple(
            Output(
                column.type,
                SlotContent.STRUCT,
                valid[column.name],
                parts=tuple(outputs[part.name] for part in column.type),
            )
            if column.name in wholes
            else outputs[column.name]
            for column in schema
        )

    def record(
        self, node: Node, fields: Sequence[pa.Field], context: int, path: str
    ) -> tuple[Output, ...]:
        wanted = {field.name: field.type for field in fields}
        outputs: dict[str, Output] = {}
        for name, part in node.fields:
            inner = f"{path}.{name}" if path else name
            if name in wanted:
                outputs[name] = self._value(part, wanted[name], context, inner)
            else:
                self._skip(part, inner)
        missing = (Output(field.type, context=context) for field in fields)
        return tuple(outputs.get(f.name, gone) for f, gone in zip(fields, missing, strict=True))

    def _value(self, node: Node, kind: pa.DataType, context: int, path: str) -> Output:
        if node.kind == "union":
            return self._union(node, kind, context, path)
        if node.kind == "null":
            return Output(kind, context=context)
        if node.kind == "record" and pa.types.is_struct(kind):
            column = self._column(context)
            self.emit(kernels.VALID, path, column)
            parts = self.record(node, list(kind), context, path)
            return Output(kind, SlotContent.STRUCT, column, context, parts)
        if node.kind == "array" and pa.types.is_list(kind):
            return self._repeated(node, kind, [(node.parts[0], kind.value_type)], context, path)
        if node.kind == "map" and pa.types.is_map(kind):
            entry = [(Node("string"), kind.key_type), (node.parts[0], kind.item_type)]
            return self._repeated(node, kind, entry, context, path)
        return self._scalar(node, kind, context, path)

    def _union(self, node: Node, kind: pa.DataType, context: int, path: str) -> Output:
        others = [part for part in node.parts if part.kind != "null"]
        if len(others) > 1:
            raise SchemaError(
                f"field {path!r} is a {node}, and only unions of null and one other type can be "
                f"columns: leave the field out of value.schema"
            )
        table = len(self.jumps)
        self.emit(kernels.UNION, path, -1, table, len(node.parts))
        self.jumps += [len(self.program)] * len(node.parts)
        output = self._value(others[0] if others else Node("null"), kind, context, path)
        for index, part in enumerate(node.parts):
            if part.kind == "null":
                self.jumps[table + index] = len(self.program)
        return output

    def _repeated(
        self,
        node: Node,
        kind: pa.DataType,
        parts: list[tuple[Node, pa.DataType]],
        context: int,
        path: str,
    ) -> Output:
        if _has_empty_items(node):
            raise SchemaError(
                f"field {path!r} is an {node}, whose items take no bytes: it cannot be a column, "
                f"for ten bytes could stand for 2^63 of them. Leave it out of value.schema"
            )
        column = self._column(context)
        inner = self.context_count
        self.context_count += 1
        repeat = self.emit(kernels.REPEAT, path, column, inner)
        outputs = tuple(
            self._value(part, part_kind, inner, f"{path}[]") for part, part_kind in parts
        )
        self.emit(kernels.NEXT, path)
        self.program[repeat][kernels.TARGET] = len(self.program)
        return Output(kind, SlotContent.REPEATED, column, context, outputs)

    def _scalar(self, node: Node, kind: pa.DataType, context: int, path: str) -> Output:
        stored = _stored(node, kind)
        if stored is None:
            raise SchemaError(
                f"field {path!r} was written as {node}, and was asked for as {kind}: "
                f"{_advice(node)}"
            )
        columns = 2 if stored in (SlotContent.SPAN, SlotContent.DECIMAL) else 1
        column = self._column(context)
        for _ in range(columns - 1):
            self._column(context)
        written = None
        if stored is SlotContent.DECIMAL:
            size = node.size if node.kind == "fixed" else -1
            self.emit(kernels.DECIMAL, path, column, node.precision, size)
            written = pa.decimal128(node.precision, node.scale)
        elif pa.types.is_timestamp(kind) and node.logical.endswith("millis"):
            self.emit(kernels.MILLIS, path, column)
        elif stored is SlotContent.SPAN and pa.types.is_string(kind) and node.kind == "bytes":
            self.emit(kernels.STRING, path, column)
        elif stored is SlotContent.SPAN and pa.types.is_binary(kind) and node.kind == "string":
            self.emit(kernels.BYTES, path, column)
        else:
            self._read(node, path, column)
        symbols = tuple(node.symbols)
        return Output(kind, stored, column, context, symbols=symbols, written=written)

    def _read(self, node: Node, path: str, column: int) -> None:
        """Read a type without parts as it was written."""
        if node.kind == "enum":
            self.emit(kernels.ENUM, path, column, len(node.symbols))
        elif node.kind == "fixed":
            self.emit(kernels.FIXED, path, column, node.size)
        else:
            self.emit(_PRIMITIVE_OPERATIONS[node.kind], path, column)

    def _skip(self, node: Node, path: str) -> None:
        if node.kind == "record":
            self._calls.append((self.emit(kernels.CALL, path), node))
        elif node.kind == "union":
            self._skip_union(node, path)
        elif _has_empty_items(node):
            self.emit(kernels.COUNTS, path)
        elif node.kind in ("array", "map"):
            repeat = self.emit(kernels.REPEAT, path, -1, -1)
            if node.kind == "map":
                self.emit(kernels.BYTES, f"{path}[]")
            self._skip(node.parts[0], f"{path}[]")
            self.emit(kernels.NEXT, path)
            self.program[repeat][kernels.TARGET] = len(self.program)
        elif node.kind == "string":
            self.emit(kernels.BYTES, path)  # the text is not used: not worth checking
        elif node.kind != "null":
            self._read(node, path, -1)

    def _skip_union(self, node: Node, path: str) -> None:
        table = len(self.jumps)
        self.jumps += [0] * len(node.parts)
        self.emit(kernels.UNION, path, -1, table, len(node.parts))
        leaves = []
        for index, part in enumerate(node.parts):
            self.jumps[table + index] = len(self.program)
            self._skip(part, path)
            leaves.append(self.emit(kernels.JUMP, path))
        for place in leaves:
            self.program[place][kernels.TARGET] = len(self.program)

    def _column(self, context: int) -> int:
        self.column_contexts.append(context)
        return len(self.column_contexts) - 1


def _stored(node: Node, kind: pa.DataType) -> SlotContent | None:
    """Return the slot content for reading a type without parts as an Arrow type; None: unfit."""
    is_type = pa.types
    carrier = node.kind
    if is_type.is_boolean(kind):
        return SlotContent.INTEGER if carrier == "boolean" else None
    if is_type.is_date32(kind):
        return SlotContent.INTEGER if node.logical == "date" else None
    if is_type.is_timestamp(kind):
        local = "local-" if kind.tz is None else ""
        fits = node.logical in (f"{local}timestamp-millis", f"{local}timestamp-micros")
        return SlotContent.INTEGER if fits else None
    if is_type.is_decimal128(kind):
        fits = node.logical == "decimal" and node.precision <= DECIMAL_DIGITS_MAX
        fits = fits and node.scale <= kind.scale
        fits = fits and node.precision - node.scale <= kind.precision - kind.scale
        return SlotContent.DECIMAL if fits else None
    if is_type.is_integer(kind):
        integers = ("int",) if is_type.is_int32(kind) else ("int", "long")
        return SlotContent.INTEGER if carrier in integers else None
    if is_type.is_floating(kind):
        if carrier in ("int", "long"):
            return SlotContent.INTEGER
        if carrier == "float":
            return SlotContent.FLOAT
        return SlotContent.DOUBLE if carrier == "double" and is_type.is_float64(kind) else None
    if is_type.is_string(kind):
        if carrier == "enum":
            return SlotContent.ENUM
        plain = carrier == "string" or (carrier == "bytes" and not node.logical)
        return SlotContent.SPAN if plain else None
    if is_type.is_binary(kind):
        return SlotContent.SPAN if carrier in ("bytes", "string", "fixed") else None
    return None


_ADVICE = {
    "boolean": "boolean",
    "int": "int, bigint, float or double",
    "long": "bigint, float or double",
    "float": "float or double",
    "double": "double",
    "bytes": "binary, or string if it holds UTF-8",
    "string": "string or binary",
    "enum": "string",
    "fixed": "binary",
    "record": "struct<...>",
    "array": "array<...>",
    "map": "map<string, ...>",
}
_LOGICAL_ADVICE = {
    "date": "date or int",
    "timestamp-millis": "timestamp or bigint",
    "timestamp-micros": "timestamp or bigint",
    "local-timestamp-millis": "timestamp_ntz or bigint",
    "local-timestamp-micros": "timestamp_ntz or bigint",
    "timestamp-nanos": "bigint (a timestamp has microseconds)",
    "local-timestamp-nanos": "bigint (a timestamp has microseconds)",
}


def _advice(node: Node) -> str:
    fitting = _LOGICAL_ADVICE.get(node.logical, _ADVICE[node.kind])
    if node.logical == "decimal":
        fitting = "binary" if node.precision > DECIMAL_DIGITS_MAX else str(node).partition(" ")[0]
        fitting += ", or a decimal with more digits before and after the point"
    return f"declare it as {fitting} in value.schema"


def _has_empty_items(node: Node) -> bool:
    return node.kind == "array" and _least_size(node.parts[0], frozenset()) == 0


def _least_size(node: Node, above: frozenset[Node]) -> int:
    """Return the least bytes that a value takes; a record inside itself counts as none."""
    if node.kind == "fixed":
        return node.size
    if node.kind != "record":
        return 0 if node.kind == "null" else 1
    if node in above:
        return 0
    return sum(_least_size(part, above | {node}) for _, part in node.fields)
