"""Avro bodies to typed columns, by a program made for their writer's schema (`plan`).

The kernel runs the program and fills slots, which become arrays.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tallystick.codec.avro import kernels
from tallystick.codec.avro.kernels import decode_records, read_branches
from tallystick.codec.avro.plan import Branch, Output, Plan, SlotContent, make_branches
from tallystick.codec.avro.schema import parse_schema
from tallystick.codec.bytes_kernels import ENVELOPE_SIZE, may_repeat, read_envelopes
from tallystick.codec.spans import (
    Bytes,
    Int64Array,
    last_of_each_key,
    offsets_of,
    spans_of,
    text_array,
    validity,
)
from tallystick.codec.values import ParsedValues, Where, check_names
from tallystick.codec.wire_format import (
    DecodedBodies,
    SchemaSource,
    SchemaTexts,
    groups_of,
    in_order,
    parse_bodies,
)
from tallystick.errors import OptionError

PLANS_KEPT_MAX = 256

_SCALAR_TYPES = (
    pa.types.is_boolean,
    pa.types.is_int32,
    pa.types.is_int64,
    pa.types.is_float32,
    pa.types.is_float64,
    pa.types.is_string,
    pa.types.is_binary,
    pa.types.is_date32,
    pa.types.is_decimal128,
)


@dataclass(frozen=True, slots=True)
class AvroReader:
    """A `ValueReader` for Avro; a plain value, pickled to tasks.

    Args:
        schema: the columns asked for, found by name in the writer's record; a column without a
            field there is null.
        schemas: the registry of the schema ids.
        has_name: the last of the columns holds the full name of the record; False: none does.

    Raises:
        OptionError: no column, one named twice, a type that Avro has no form for, or NOT NULL.
    """

    schema: pa.Schema
    schemas: SchemaSource
    has_name: bool = False

    def __post_init__(self) -> None:
        _check_fields(list(self._fields), "the Avro schema")
        if self.has_name and self.schema.names[-1] in self._fields.names:
            name = self.schema.names[-1]
            raise OptionError(
                f"Avro(name_column={name!r}): the schema has a field of that name, too: choose "
                f"another name for the column"
            )

    @property
    def _fields(self) -> pa.Schema:
        return pa.schema(list(self.schema)[:-1]) if self.has_name else self.schema

    name: ClassVar[str] = "Avro"

    def parse(self, values: pa.Array, mode: str, where: Where) -> ParsedValues:
        """See `ValueReader.parse` and `wire_format.parse_bodies`."""
        return parse_bodies(self, values, mode, where)

    def decode(self, texts: SchemaTexts, schema_id: int, bodies: Int64Array) -> DecodedBodies:
        """See `wire_format.BodyFormat.decode`."""
        fields = self._fields
        branches, is_union = _branches(texts, fields, self.has_name)
        which = np.zeros(bodies.shape[1], np.int64)
        if is_union:
            decoded = _decoded_union(branches, schema_id, bodies, fields, which)
        else:
            decoded = _decoded(branches[0], f"schema {schema_id}", bodies)
        if not self.has_name:
            return decoded
        is_wrong = np.zeros(len(which), np.bool_)
        is_wrong[list(decoded.reasons)] = True
        names = pa.array([branch.name for branch in branches], pa.string())
        name = names.take(pa.array(which, mask=is_wrong))
        return DecodedBodies([*decoded.arrays, name], decoded.reasons)


@lru_cache(maxsize=PLANS_KEPT_MAX)
def _branches(
    texts: SchemaTexts, schema: pa.Schema, is_named: bool
) -> tuple[tuple[Branch, ...], bool]:
    """Return the ways to read values of a schema, and whether the schema is a union."""
    writer = parse_schema(texts)
    return make_branches(writer, schema, is_named=is_named), writer.kind == "union"


def _decoded_union(
    branches: Sequence[Branch],
    schema_id: int,
    bodies: Int64Array,
    schema: pa.Schema,
    which: Int64Array,
) -> DecodedBodies:
    """Decode values of a union, branch by branch, and put the rows back in their order.

    Args:
        branches: of the union.
        schema_id: for messages.
        bodies: the addresses where each value begins and ends.
        schema: the columns.
        which: gets the index of each value's branch.
    """
    after = bodies.copy()
    problems = np.zeros(len(which), np.int64)
    is_same = read_branches(after, len(branches), which, problems)
    union = f"schema {schema_id}"
    reasons = {
        row: f"the union of {union}: {_BODY_REASONS[int(problems[row])](int(which[row]))}"
        for row in np.flatnonzero(problems).tolist()
    }
    good = np.flatnonzero(problems == 0)
    parts, order = [], []
    for index, places in groups_of(which[good]):
        branch, rows = branches[index], good[places]
        if branch.plan is None:
            reasons |= dict.fromkeys(rows.tolist(), f"by {union} {branch.problem}")
            continue
        where = f"{branch.name} in {union}" if branch.name else union
        decoded = _decoded(branch, where, after if is_same else after[:, rows])
        parts.append(pa.RecordBatch.from_arrays(decoded.arrays, schema=schema))
        order.append(rows)
        reasons |= {int(rows[place]): why for place, why in decoded.reasons.items()}
    return DecodedBodies(in_order(parts, order, schema, len(which)).columns, reasons)


def _decoded(branch: Branch, where: str, bodies: Int64Array) -> DecodedBodies:
    """Decode records, or nulls, of one type; `where` is the type as messages name it."""
    assert branch.plan is not None, branch
    decoded = decode(branch.plan, bodies)
    reasons = {}
    for index in np.flatnonzero(decoded.problems[0]).tolist():
        code, pc, value = decoded.problems[:, index].tolist()
        if code == kernels.LEFT_OVER:
            end = "the last field" if branch.name else "the null"
            reasons[index] = f"{value} bytes are left over after {end} of {where}"
        else:
            path = branch.plan.paths[pc]
            reasons[index] = f"field {path!r} of {where}: {_BODY_REASONS[code](value)}"
    return DecodedBodies(decoded.arrays, reasons)


def warm_up() -> None:
    """Compile the kernels, or load them from the cache."""
    text = '{"type":"record","name":"r","fields":[{"name":"s","type":"string"}]}'
    (branch,), _ = _branches((text,), pa.schema([("s", pa.string())]), False)
    assert branch.plan is not None
    spans = spans_of(pa.array([b"\x00\x00\x00\x00\x01\x02a"], pa.binary()), "value")
    ids, verdicts = np.zeros(1, np.int32), np.zeros(1, np.uint8)
    which, problems = np.zeros((2, 1), np.int64)
    read_envelopes(spans.address, spans.starts, spans.lengths, ids, verdicts)
    body = spans.address + ENVELOPE_SIZE
    decode(branch.plan, np.array([[body], [body + 2]], np.int64))
    read_branches(np.array([[body], [body + 2]], np.int64), 2, which, problems)
    none = np.zeros(0, np.int64)
    may_repeat(none, none, none)


_BODY_REASONS: dict[int, Callable[[int], str]] = {
    kernels.TRUNCATED: lambda _: "the value ends inside of it",
    kernels.VARINT_TOO_LONG: lambda _: "a number goes on beyond 64 bits",
    kernels.INT_RANGE: lambda value: f"{value} is no 32-bit int",
    kernels.NOT_BOOLEAN: lambda value: f"byte {value} is no boolean, which is 0 or 1",
    kernels.NEGATIVE_LENGTH: lambda value: f"a length is {value}",
    kernels.NOT_UTF8: lambda _: "the string is not valid UTF-8",
    kernels.ENUM_RANGE: lambda value: f"the enum has no symbol of index {value}",
    kernels.UNION_RANGE: lambda value: f"the union has no branch of index {value}",
    kernels.MILLIS_RANGE: lambda value: f"{value} ms is beyond a timestamp in microseconds",
    kernels.DECIMAL_RANGE: lambda _: "the number has more digits than the decimal type",
    kernels.DECIMAL_EMPTY: lambda _: "a decimal of no bytes is no number",
    kernels.TOO_MANY_ITEMS: lambda value: (
        f"a block says it has {value} items, more than bytes are left"
    ),
    kernels.TOO_DEEP: lambda _: (
        f"records are nested in themselves more than {kernels.FRAMES_MAX} deep"
    ),
}


def _check_fields(fields: Sequence[pa.Field], path: str) -> None:
    check_names(fields, path, "Avro")
    for field in fields:
        _check_field(field, f"field {field.name!r} of {path}")


def _check_field(field: pa.Field, path: str) -> None:
    if not field.nullable:
        raise OptionError(
            f"{path} is NOT NULL, but a writer's schema may lack it, and a tombstone is a row of "
            f"nulls: declare it nullable and filter"
        )
    _check_type(field.type, path)


def _check_type(kind: pa.DataType, path: str) -> None:
    if pa.types.is_struct(kind):
        _check_fields(list(kind), path)
    elif pa.types.is_list(kind):
        _check_field(kind.value_field, f"the element of {path}")
    elif pa.types.is_map(kind):
        if not pa.types.is_string(kind.key_type):
            raise OptionError(f"the key of {path} is {kind.key_type}: Avro's maps have string keys")
        _check_field(kind.item_field, f"the value of {path}")
    elif not (
        (pa.types.is_timestamp(kind) and kind.unit == "us")
        or any(is_type(kind) for is_type in _SCALAR_TYPES)
    ):
        raise OptionError(
            f"{path} has type {kind}, which Avro has no form for: use boolean, int, bigint, float, "
            f"double, decimal, string, binary, date, timestamp, timestamp_ntz, struct, array or "
            f"map<string, ...>"
        )


ITEMS_FIRST = 1024
"""Slots for the items of an array or map at first, besides one per record; doubled as needed."""


@dataclass(frozen=True, slots=True)
class DecodedRecords:
    """Records as columns.

    Args:
        arrays: one per column asked for; a malformed record is a row of nulls.
        problems: rows 0 to 2, per record: problem or 0, instruction, what was found.
    """

    arrays: list[pa.Array]
    problems: Int64Array


def decode(plan: Plan, bodies: Int64Array) -> DecodedRecords:
    """Decode records of a single schema.

    Args:
        plan: the schema's plan.
        bodies: rows 0 and 1: the addresses where each body begins and ends; the caller keeps that
            memory alive.
    """
    count = bodies.shape[1]
    pool = _Pool(plan, count)
    problems = np.zeros((3, count), np.int64)
    row, context = 0, 0
    while context >= 0:
        row, context = decode_records(
            pool.program,
            bodies,
            row,
            plan.column_contexts,
            pool.valid_addresses,
            pool.contexts,
            problems,
        )
        if context >= 0:
            pool.grow(context)
    assert row == count, (row, count)
    pool.contexts[0, 0] = count
    return DecodedRecords([_array(output, pool) for output in plan.outputs], problems)


class _Pool:
    """The slots of all columns, and the program with their addresses; see `kernels`."""

    def __init__(self, plan: Plan, record_count: int) -> None:
        self._plan = plan
        self.contexts = np.zeros((plan.context_count, 2), np.int64)
        self.contexts[:, 1] = ITEMS_FIRST + record_count
        self.contexts[0, 1] = record_count
        self._lay_out()

    def _lay_out(self) -> None:
        sizes = self.contexts[self._plan.column_contexts, 1]
        # One unused slot at the end: column + 1 of the last column has an address too.
        self._base = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        self._values = np.zeros(int(self._base[-1]) + 1, np.int64)
        self._valid = np.zeros(int(self._base[-1]) + 1, np.uint8)
        value_addresses = self._values.ctypes.data + 8 * self._base
        valid_addresses = self._valid.ctypes.data + self._base
        self.valid_addresses = valid_addresses[:-1].copy()
        self.program = program = self._plan.program.copy()
        has_column = program[:, kernels.COLUMN] >= 0
        columns = program[has_column, kernels.COLUMN]
        program[has_column, kernels.VALUES] = value_addresses[columns]
        program[has_column, kernels.VALID_BYTES] = valid_addresses[columns]
        program[has_column, kernels.SECOND] = value_addresses[columns + 1]
        unions = program[:, kernels.OPERATION] == kernels.UNION
        program[unions, kernels.A] = self._plan.jumps.ctypes.data + 8 * program[unions, kernels.A]

    def grow(self, context: int) -> None:
        """Double the slots in one context, and keep their content."""
        old_base, old_values, old_valid = self._base, self._values, self._valid
        old_sizes = np.diff(old_base)
        self.contexts[context, 1] *= 2
        self._lay_out()
        for old, new, size in zip(old_base, self._base, old_sizes, strict=False):
            self._values[new : new + size] = old_values[old : old + size]
            self._valid[new : new + size] = old_valid[old : old + size]

    def slots(self, output: Output, offset: int = 0) -> tuple[Int64Array, Bytes]:
        """Return values and validity of a column; `offset` 1: the column after it."""
        begin = int(self._base[output.column + offset])
        end = begin + int(self.contexts[output.context, 0])
        return self._values[begin:end], self._valid[begin:end]


def _array(output: Output, pool: _Pool) -> pa.Array:
    if output.stored is SlotContent.NOTHING:
        return pa.nulls(int(pool.contexts[output.context, 0]), output.kind)
    values, valid = pool.slots(output)
    bitmap = validity(valid)
    if output.stored is SlotContent.SPAN:
        return text_array(output.kind, values, pool.slots(output, 1)[0], valid)
    if output.stored is SlotContent.ENUM:
        indices = pa.Array.from_buffers(pa.int64(), len(values), [bitmap, pa.py_buffer(values)])
        return pa.array(output.symbols, pa.string()).take(indices)
    if output.stored is SlotContent.DECIMAL:
        halves = np.stack([values, pool.slots(output, 1)[0]], axis=1)
        array = pa.Array.from_buffers(
            output.written, len(values), [bitmap, pa.py_buffer(np.ascontiguousarray(halves))]
        )
        return array.cast(output.kind)
    if output.stored is SlotContent.STRUCT:
        parts = [_array(part, pool) for part in output.parts]
        return pa.Array.from_buffers(output.kind, len(values), [bitmap], children=parts)
    if output.stored is SlotContent.REPEATED:
        return _repeated(output, pool)
    numbers = _numbers(output, values)
    return pa.Array.from_buffers(output.kind, len(values), [bitmap, pa.py_buffer(numbers)])


def _numbers(output: Output, values: Int64Array) -> NDArray[np.generic]:
    """Return the slots as the buffer of a fixed-width type."""
    kind = output.kind
    if pa.types.is_boolean(kind):
        return np.packbits(values.astype(np.uint8), bitorder="little")
    if output.stored is SlotContent.FLOAT:
        floats = values.astype(np.uint32).view(np.float32)
        return floats.astype(np.float64) if pa.types.is_float64(kind) else floats
    if output.stored is SlotContent.DOUBLE:
        return values.view(np.float64)
    if pa.types.is_floating(kind):
        return values.astype(kind.to_pandas_dtype())
    return values if kind.bit_width == 64 else values.astype(np.int32)


def _repeated(output: Output, pool: _Pool) -> pa.Array:
    """Return lists or maps; items stand in the order of their lists, so lengths are enough."""
    lengths, valid = pool.slots(output)
    parts = [_array(part, pool) for part in output.parts]
    if pa.types.is_map(output.kind):
        keys, items = parts
        assert keys.null_count == 0, "Arrow ends the process over a null key"
        counts = lengths if valid.all() else np.where(valid, lengths, 0)
        if may_repeat(*(pool.slots(output.parts[0], place)[0] for place in (0, 1)), counts):
            keys, items, lengths = last_of_each_key(keys, items, counts)
            parts = [keys, items]
        entries = [output.kind.key_field, output.kind.item_field]
        parts = [pa.StructArray.from_arrays(parts, fields=entries)]
    buffers = [validity(valid), pa.py_buffer(offsets_of(lengths, valid))]
    return pa.Array.from_buffers(output.kind, len(valid), buffers, children=parts)
