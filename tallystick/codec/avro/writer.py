"""Typed columns to Avro records in Confluent's wire format, whole batches at a time.

Columns are found by name, and each must fit its field: an integer of 32 bits is written as int,
long or as what these carry, one of 64 as long; float as float or double; a timestamp as millis or
micros where it is a whole number of them. A field that may be null needs no column, any other does;
a column without a field in the schema is refused, for it would be lost.

Source: https://docs.confluent.io/platform/current/schema-registry/fundamentals/serdes-develop/
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tallystick.codec.avro import writer_kernels as kernels
from tallystick.codec.avro.plan import DECIMAL_DIGITS_MAX
from tallystick.codec.avro.schema import Node, parse_schema
from tallystick.codec.spans import binary_array, spans_of
from tallystick.codec.wire_format import SchemaTexts
from tallystick.errors import OptionError, RecordError

SCHEMAS_KEPT_MAX = 64
BYTES_PER_FIELD_FIRST = 8
"""The first guess of a record's size; the room is doubled as needed."""
_INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.uint8(), pa.uint16())
_LONGS = (*_INTEGERS, pa.int64(), pa.uint32())


@dataclass(frozen=True, slots=True)
class AvroWriter:
    """A `ValueWriter` for Avro.

    Args:
        schema_id: the id that the registry gave the schema.
        texts: the schema as JSON text, after the schemas that it refers to.
    """

    schema_id: int
    texts: SchemaTexts

    def check(self, columns: pa.Schema) -> None:
        """See `ValueWriter.check`."""
        self._program(pa.RecordBatch.from_pylist([], schema=columns))

    def write(self, columns: pa.RecordBatch) -> pa.Array:
        """See `ValueWriter.write`."""
        program = self._program(columns)
        _, branch = _record_of(self.texts)
        prefix = np.frombuffer(b"\0" + self.schema_id.to_bytes(4, "big") + branch, np.uint8)
        return _encoded(program, prefix, columns.num_rows, columns.nbytes)

    def _program(self, columns: pa.RecordBatch) -> "_Program":
        record, _ = _record_of(self.texts)
        program = _Program()
        program.record(record, columns.schema, columns.columns, "")
        program.emit(kernels.END, "")
        return program


@lru_cache(maxsize=SCHEMAS_KEPT_MAX)
def _record_of(texts: SchemaTexts) -> tuple[Node, bytes]:
    """Return the record that rows are written as, and the bytes of its branch in a union."""
    node = parse_schema(texts)
    kinds = [part.kind for part in node.parts]
    if node.kind == "record":
        return node, b""
    if node.kind == "union" and kinds in (["record"], ["null", "record"], ["record", "null"]):
        index = kinds.index("record")
        return node.parts[index], bytes([2 * index])
    if kinds.count("record") > 1:
        raise OptionError(
            f"the Avro schema is a {node}, and no column says which of its records a row is: "
            f"split the rows, and write each part with the schema of one record"
        )
    raise OptionError(
        f"the Avro schema is of type {node}, and rows need a record, or a union of null and one"
    )


@dataclass(eq=False)
class _Program:
    """The instructions for a batch, and references that keep the batch's columns in memory."""

    instructions: list[list[int]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    depth: int = 0
    _kept: list[object] = field(default_factory=list)

    def emit(
        self,
        operation: int,
        path: str,
        values: int = 0,
        second: int = 0,
        valid: int = 0,
        a: int = 0,
        b: int = 0,
    ) -> int:
        self.instructions.append([operation, values, second, valid, a, b, 0, 0])
        self.paths.append(path)
        return len(self.instructions) - 1

    def end_here(self, instruction: int) -> None:
        self.instructions[instruction][kernels.TARGET] = len(self.instructions)

    def record(
        self,
        node: Node,
        fields: Sequence[pa.Field],
        columns: Sequence[pa.Array],
        path: str,
        depth: int = 0,
    ) -> None:
        """Write the fields of a record in their order.

        Raises:
            OptionError: a column does not fit, comes twice, has no field, or is missing.
        """
        column_of: dict[str, pa.Array] = {}
        known = [name for name, _ in node.fields]
        for arrow_field, column in zip(fields, columns, strict=True):
            if arrow_field.name in column_of:
                raise OptionError(f"{_named(path, arrow_field.name)} is there twice: rename one")
            if arrow_field.name not in known:
                raise OptionError(
                    f"{_named(path, arrow_field.name)} would be lost: the Avro record {node.name} "
                    f"has no such field, only {known}. Leave the column out, or add it to the "
                    f"schema"
                )
            column_of[arrow_field.name] = column
        for name, part in node.fields:
            inner = f"{path}.{name}" if path else name
            if name in column_of:
                self._value(part, column_of[name], inner, depth)
            else:
                self._absent(part, inner)

    def _absent(self, node: Node, path: str) -> None:
        branches = [part.kind for part in node.parts] if node.kind == "union" else []
        if "null" in branches:
            self.emit(kernels.ABSENT, path, b=branches.index("null"))
        elif node.kind != "null":
            raise OptionError(
                f"there is no column {path!r}, and the Avro schema has it as {node}, which is never"
                f" null: add the column, or make the field a union of null and {node.kind}"
            )

    def _value(self, node: Node, column: pa.Array, path: str, depth: int) -> None:
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        value_branch, null_branch, inner = -1, -1, node
        if node.kind == "union":
            others = [part for part in node.parts if part.kind != "null"]
            if len(others) > 1:
                raise OptionError(
                    f"column {path!r} cannot be written: the Avro schema has it as a {node}, and "
                    f"only unions of null and one other type can be columns"
                )
            inner = others[0] if others else Node("null")
            value_branch = node.parts.index(others[0]) if others else -1
            kinds = [part.kind for part in node.parts]
            null_branch = kinds.index("null") if "null" in kinds else -1
        if inner.kind == "null" or pa.types.is_null(column.type):
            is_writable = inner.kind == "null" or null_branch >= 0
            if not (is_writable and pa.types.is_null(column.type)):
                raise _unfit(path, column.type, node)
            self._absent(node, path)
            return
        nullable = -1
        if column.null_count or value_branch >= 0:
            valid = self._valid(column) if column.null_count else 0
            nullable = self.emit(kernels.NULLABLE, path, valid=valid, a=value_branch, b=null_branch)
        self._present(inner, column, path, depth)
        if nullable >= 0:
            self.end_here(nullable)

    def _present(self, node: Node, column: pa.Array, path: str, depth: int) -> None:
        kind = column.type
        if node.kind in ("record", "error") and pa.types.is_struct(kind):
            self.record(node, list(kind), column.flatten(), path, depth)
        elif node.kind == "array" and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            self._repeated(column, [(node.parts[0], column.values)], path, depth)
        elif node.kind == "map" and pa.types.is_map(kind) and _is_text(kind.key_type):
            parts = [(Node("string"), column.keys), (node.parts[0], column.items)]
            self._repeated(column, parts, path, depth)
        else:
            self._scalar(node, column, path)

    def _repeated(
        self, column: pa.Array, parts: list[tuple[Node, pa.Array]], path: str, depth: int
    ) -> None:
        self.depth = max(self.depth, depth + 1)
        offsets = column.offsets.to_numpy().astype(np.int64)
        first, last = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
        repeat = self.emit(kernels.REPEAT, path, values=self._address(offsets - first))
        for node, items in parts:
            self._value(node, items.slice(first, last - first), f"{path}[]", depth + 1)
        self.emit(kernels.NEXT, path)
        self.end_here(repeat)

    def _scalar(self, node: Node, column: pa.Array, path: str) -> None:
        kind = column.type
        if node.kind == "boolean" and pa.types.is_boolean(kind):
            self._plain(column.cast(pa.int64()), 1, path)
        elif node.kind in ("int", "long") and (numbers := _numbers(node, column, path)) is not None:
            self.emit(kernels.NUMBER, path, values=self._int64(numbers))
        elif node.kind == "float" and pa.types.is_float32(kind):
            self._plain(_bits(column, np.float32, np.uint32), 4, path)
        elif node.kind == "double" and (pa.types.is_float32(kind) or pa.types.is_float64(kind)):
            self._plain(_bits(column.cast(pa.float64()), np.float64, np.int64), 8, path)
        elif node.kind == "enum" and _is_text(kind):
            symbols = pa.array(node.symbols, pa.string()).cast(kind)
            indices = pc.fill_null(pc.index_in(column, value_set=symbols), -1)
            self.emit(kernels.ENUM, path, values=self._int64(indices))
        elif _are_bytes(node, kind):
            self._spans(kernels.BYTES, column, path)
        elif node.kind == "fixed" and _is_binary(kind):
            self._spans(kernels.FIXED, column, path, node.size)
        elif node.logical == "decimal" and _fits(node, kind):
            number = column.cast(pa.decimal128(node.precision, node.scale))
            self._kept.append(number)
            size = node.size if node.kind == "fixed" else -1
            data = number.buffers()[1]
            at = data.address + 16 * number.offset if data is not None else 0
            self.emit(kernels.DECIMAL, path, values=at, a=size)
        else:
            raise _unfit(path, kind, node)

    def _plain(self, values: pa.Array | NDArray[np.int64], size: int, path: str) -> None:
        at = self._int64(values) if isinstance(values, pa.Array) else self._address(values)
        self.emit(kernels.PLAIN, path, values=at, a=size)

    def _spans(self, operation: int, column: pa.Array, path: str, size: int = 0) -> None:
        spans = spans_of(column, path)
        self._kept.append(spans)
        starts = self._address(spans.starts + spans.address)
        self.emit(operation, path, values=starts, second=self._address(spans.lengths), a=size)

    def _valid(self, column: pa.Array) -> int:
        valid = column.is_valid().to_numpy(zero_copy_only=False).astype(np.uint8)
        self._kept.append(valid)
        return int(valid.ctypes.data)

    def _int64(self, column: pa.Array) -> int:
        numbers = column.cast(pa.int64())
        numbers = numbers.fill_null(0) if numbers.null_count else numbers
        return self._address(numbers.to_numpy(zero_copy_only=False))

    def _address(self, values: NDArray[np.int64]) -> int:
        assert values.dtype == np.int64, values.dtype
        values = np.ascontiguousarray(values)
        self._kept.append(values)
        return int(values.ctypes.data)


def _numbers(node: Node, column: pa.Array, path: str) -> pa.Array | None:
    """Return the numbers that an int or long carries; None: the type does not fit."""
    kind = column.type
    if pa.types.is_date32(kind):
        return column.cast(pa.int32()) if node.logical == "date" else None
    if pa.types.is_timestamp(kind):
        local, _, unit = node.logical.rpartition("timestamp-")
        if unit not in _UNITS or local != ("local-" if kind.tz is None else ""):
            return None
        try:
            return column.cast(pa.timestamp(_UNITS[unit], tz=kind.tz)).cast(pa.int64())
        except pa.ArrowInvalid as error:
            raise RecordError(
                f"column {path!r} of type {kind} holds a time that the Avro schema's {node} "
                f"cannot: {error}. Round it in a map_batches, or write it with another unit"
            ) from error
    return column if kind in (_INTEGERS if node.kind == "int" else _LONGS) else None


_UNITS = {"millis": "ms", "micros": "us", "nanos": "ns"}


def _bits(column: pa.Array, kind: type, bits: type) -> NDArray[np.int64]:
    numbers = column.fill_null(0) if column.null_count else column
    plain = np.ascontiguousarray(numbers.to_numpy(zero_copy_only=False).astype(kind, copy=False))
    return plain.view(bits).astype(np.int64, copy=False)


def _fits(node: Node, kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_decimal128(kind)
        and node.precision <= DECIMAL_DIGITS_MAX
        and 0 <= kind.scale <= node.scale
        and kind.precision - kind.scale <= node.precision - node.scale
    )


def _are_bytes(node: Node, kind: pa.DataType) -> bool:
    return (node.kind == "string" and _is_text(kind)) or (node.kind == "bytes" and _is_binary(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _is_binary(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_binary_view(kind)
    )


def _named(path: str, name: str) -> str:
    return f"column {f'{path}.{name}' if path else name!r}"


def _unfit(path: str, kind: pa.DataType, node: Node) -> OptionError:
    return OptionError(
        f"column {path!r} is of type {kind}, and the Avro schema has it as {node}: cast it in a "
        f"map_batches to what that holds without loss, or change the schema"
    )


def _encoded(
    program: _Program, prefix: NDArray[np.uint8], row_count: int, size_hint: int
) -> pa.Array:
    """Run a program on all rows.

    Args:
        program: of this batch.
        prefix: written before each record.
        row_count: how many rows there are.
        size_hint: the bytes that the columns take.

    Raises:
        RecordError: a row holds a value that its field cannot hold.
    """
    instructions = np.array(program.instructions, np.int64)
    per_row = len(prefix) + kernels.VARINT_SIZE_MAX + BYTES_PER_FIELD_FIRST * len(instructions)
    out = np.empty(row_count * per_row + size_hint, np.uint8)
    offsets = np.zeros(row_count + 1, np.int64)
    stack = np.zeros(max(program.depth, 1) * kernels.FRAME_SIZE // 8, np.int64)
    report = np.zeros(1, np.int64)
    row = 0
    while row < row_count:
        row, problem = kernels.encode_records(
            instructions, row, prefix, out.ctypes.data, len(out), stack, offsets, report
        )
        if problem == kernels.NEEDS_ROOM:
            used, wider = int(offsets[row]), np.empty(2 * len(out), np.uint8)
            wider[:used] = out[:used]
            out = wider
        elif problem:
            path = program.paths[int(report[0])]
            raise RecordError(f"row {row} of a batch, column {path!r}: {_PROBLEMS[problem]}")
    return binary_array(pa.py_buffer(out[: int(offsets[-1])]), offsets)


_PROBLEMS = {
    kernels.NULL_VALUE: (
        "it is null, and the Avro schema has a field that is never null: filter such rows, fill "
        "them in a map_batches, or make the field a union with null"
    ),
    kernels.NO_SYMBOL: "its text is none of the symbols of the Avro schema's enum",
    kernels.WRONG_SIZE: "it has not as many bytes as the Avro schema's fixed",
    kernels.DECIMAL_TOO_LARGE: "the decimal needs more bytes than the Avro schema's fixed has",
}


def warm_up() -> None:
    """Compile the kernels, or load them from the cache."""
    text = '{"type":"record","name":"r","fields":[{"name":"s","type":"string"}]}'
    AvroWriter(1, (text,)).write(pa.record_batch([pa.array(["a"])], names=["s"]))
