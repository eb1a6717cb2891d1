"""Protobuf messages to typed columns, field by field and message type by message type.

All messages of one type in a batch are read by one call of a kernel, which leaves the messages
inside them as spans: those of one field are then read in the same way. Columns find their fields by
name. A field that is absent is its default, as Protobuf says, unless it has presence (`optional`,
a message, a member of a oneof, proto2): then it is null.

Source: https://protobuf.dev/programming-guides/encoding/ and
https://protobuf.dev/programming-guides/field_presence/
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tallystick.codec.bytes_kernels import copy_spans
from tallystick.codec.protobuf import kernels
from tallystick.codec.protobuf.plan import EnumColumn, FieldPlan, MessagePlan, make_plan
from tallystick.codec.protobuf.schema import message_at
from tallystick.codec.spans import Int64Array, last_of_each_key, text_array, validity
from tallystick.codec.values import ParsedValues, Where, check_names
from tallystick.codec.wire_format import DecodedBodies, SchemaSource, SchemaTexts, parse_bodies
from tallystick.errors import OptionError

PLANS_KEPT_MAX = 256
SECONDS_MAX = 253_402_300_799
"""The end of the year 9999: the range of a Timestamp."""
SECONDS_MIN = -62_135_596_800

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ProtobufReader:
    """A `ValueReader` for Protobuf; a plain value, pickled to tasks.

    Args:
        schema: the columns asked for, found by name in the writer's message; a field that it lacks
            is null.
        schemas: where a schema id is looked up.

    Raises:
        OptionError: no column, one named twice, or NOT NULL.
    """

    schema: pa.Schema
    schemas: SchemaSource

    name: ClassVar[str] = "Protobuf"

    def __post_init__(self) -> None:
        check_names(list(self.schema), "the Protobuf schema", "Protobuf")
        for field in self.schema:
            if not field.nullable:
                raise OptionError(
                    f"field {field.name!r} of the Protobuf schema is NOT NULL, but a writer's "
                    f"schema may lack it: declare it nullable and filter"
                )

    def parse(self, values: pa.Array, mode: str, where: Where) -> ParsedValues:
        """See `ValueReader.parse` and `wire_format.parse_bodies`."""
        return parse_bodies(self, values, mode, where)

    def decode(self, texts: SchemaTexts, schema_id: int, bodies: Int64Array) -> DecodedBodies:
        """See `wire_format.BodyFormat.decode`."""
        count = bodies.shape[1]
        reasons = dict[int, str]()
        parts, order = [], []
        starts = np.empty(count, np.int64)
        for path, rows in _by_message(bodies, starts, reasons):
            message = message_at(texts, path)
            if message is None:
                why = f"its message indexes {list(path)} name no message of schema {schema_id}"
                reasons |= dict.fromkeys(rows.tolist(), why)
                continue
            spans = np.stack([starts[rows], bodies[1, rows]])
            decoder = _Decoder()
            plan = _plan(texts, path, self.schema)
            arrays = decoder.columns(plan, spans, np.arange(len(rows)))
            reasons |= {int(rows[index]): why for index, why in decoder.reasons.items()}
            parts.append(pa.RecordBatch.from_arrays(arrays, schema=self.schema))
            order.append(rows)
        if not reasons and len(order) == 1:
            return DecodedBodies(parts[0].columns, reasons)
        absent = np.ones(count, np.bool_)
        places = np.zeros(count, np.int64)
        if order:
            rows = np.concatenate(order)
            places[rows], absent[rows] = np.arange(len(rows)), False
        absent[list(reasons)] = True
        if absent.all():
            return DecodedBodies([pa.nulls(count, field.type) for field in self.schema], reasons)
        whole = pa.concat_batches(parts).take(pa.array(places, mask=absent))
        return DecodedBodies(whole.columns, reasons)


@lru_cache(maxsize=PLANS_KEPT_MAX)
def _plan(texts: SchemaTexts, path: tuple[int, ...], schema: pa.Schema) -> MessagePlan:
    return make_plan(message_at(texts, path), list(schema), "")


def _by_message(
    bodies: Int64Array, starts: Int64Array, reasons: dict[int, str]
) -> list[tuple[tuple[int, ...], Int64Array]]:
    """Return the rows of each type of message, by its indexes.

    Args:
        bodies: see `wire_format.BodyFormat.decode`.
        starts: gets the address where each message begins, behind its indexes.
        reasons: gets why a row has none.
    """
    indexes = np.zeros((kernels.INDEXES_MAX, bodies.shape[1]), np.int64)
    if kernels.read_indexes(bodies, starts, indexes):
        return [((0,), np.arange(bodies.shape[1]))]
    by_type = []
    if (indexes == indexes[:, :1]).all():
        kinds, of_row = indexes[:, :1], np.zeros(indexes.shape[1], np.int64)
    else:
        kinds, of_row = np.unique(indexes, axis=1, return_inverse=True)
    for number, kind in enumerate(kinds.T.tolist()):
        rows = np.flatnonzero(of_row.reshape(-1) == number)
        if kind[0] < 0:
            why = "its message indexes are cut short, or more than can be"
            reasons |= dict.fromkeys(rows.tolist(), why)
        else:
            by_type.append((tuple(kind[1 : 1 + kind[0]]), rows))
    return by_type


class _Decoder:
    """The columns of one type of message, and what is wrong with the records.

    A message that turns out malformed is read as an empty one: its record is given up later.
    """

    def __init__(self) -> None:
        self.reasons: dict[int, str] = {}

    def columns(self, plan: MessagePlan, spans: Int64Array, records: Int64Array) -> list[pa.Array]:
        """Read messages of one type.

        Args:
            plan: of that type.
            spans: rows 0 and 1: the addresses where each begins and ends.
            records: of each, the record that it is in.
        """
        return self._arrays(plan, self._read(plan, spans, records), records)

    def _read(self, plan: MessagePlan, spans: Int64Array, records: Int64Array) -> "_Slots":
        slots = _Slots(plan, spans.shape[1])
        while (wrong := slots.read(spans)).size:
            for index in wrong.tolist():
                code, at = slots.problems[:, index].tolist()
                field = f"field {plan.fields[at].path!r}: " if at >= 0 else ""
                self._wrong(records, index, field + _REASONS[code])
            spans = spans.copy()
            spans[1, wrong] = spans[0, wrong]
        slots.read_items(spans)
        return slots

    def _arrays(self, plan: MessagePlan, slots: "_Slots", records: Int64Array) -> list[pa.Array]:
        return [
            pa.nulls(len(records), column)
            if isinstance(column, pa.DataType)
            else self._field(column, slots, records)
            for column in plan.columns
        ]

    def _wrong(self, records: Int64Array, index: int, why: str) -> None:
        self.reasons.setdefault(int(records[index]), why)

    def _refuse(self, mask: Bools, records: Int64Array, why: Callable[[int], str]) -> None:
        for index in np.flatnonzero(mask).tolist():
            self._wrong(records, index, why(index))

    def _field(self, field: FieldPlan, slots: "_Slots", records: Int64Array) -> pa.Array:
        if not field.is_list:
            values, sizes, valid = slots.single(field)
            return self._values(field, values, sizes, valid, records)
        counts = slots.counts[field.index]
        values, sizes = slots.items[field.index]
        owners = np.repeat(records, counts)
        valid = np.ones(len(values), np.bool_)
        kind = field.kind
        if field.entry is None:
            item = self._values(field, values, sizes, valid, owners)
            buffers = [None, pa.py_buffer(_offsets(counts))]
            return pa.Array.from_buffers(kind, len(counts), buffers, children=[item])
        slots = self._read(field.entry, np.stack([values, values + sizes]), owners)
        keys, items = self._arrays(field.entry, slots, owners)
        if slots.strays.any():  # such an entry is an unknown field as a whole
            known = ~slots.strays
            keys, items = keys.filter(pa.array(known)), items.filter(pa.array(known))
            counts = _sums(known, counts)
        keys, items, counts = last_of_each_key(keys, items, counts)
        entries = pa.StructArray.from_arrays(
            [keys, items], fields=[kind.key_field, kind.item_field]
        )
        buffers = [None, pa.py_buffer(_offsets(counts))]
        return pa.Array.from_buffers(kind, len(counts), buffers, children=[entries])

    def _values(
        self,
        field: FieldPlan,
        values: Int64Array,
        sizes: Int64Array,
        valid: Bools,
        records: Int64Array,
    ) -> pa.Array:
        kind = field.item_kind
        if field.message is not None:
            # Nobody reads what another member of a oneof has replaced: nothing is wrong with it.
            spans = np.stack([values, values + np.where(valid, sizes, 0)])
            parts = self.columns(field.message, spans, records)
            if pa.types.is_timestamp(kind):
                return self._times(kind, parts, valid, records, field.path)
            if not pa.types.is_struct(kind):
                part = parts[0]  # a wrapper: what it wraps, where it is there
                return (
                    part if valid.all() else part.take(pa.array(np.arange(len(part)), mask=~valid))
                )
            bitmap = validity(valid.astype(np.uint8))
            return pa.Array.from_buffers(kind, len(valid), [bitmap], children=parts)
        if field.wire_kind >= kernels.BYTES:
            return text_array(kind, values, sizes, valid.astype(np.uint8))
        if field.enum is not None and field.enum.is_text:
            return self._symbols(field.enum, values, valid, records, field.path)
        if field.wire_kind in (kernels.UINT64, kernels.FIXED64):
            return self._unsigned(kind, values, valid, records, field.path)
        return _numbers(field.wire_kind, kind, values, valid)

    def _symbols(
        self, enum: EnumColumn, values: Int64Array, valid: Bools, records: Int64Array, path: str
    ) -> pa.Array:
        places = np.minimum(np.searchsorted(enum.numbers, values), len(enum.numbers) - 1)
        known = enum.numbers[places] == values
        self._refuse(
            valid & ~known,
            records,
            lambda index: (
                f"field {path!r}: {values[index]} is no value of the enum in its schema (ask for "
                f"an int to read such)"
            ),
        )
        return enum.symbols.take(pa.array(places, mask=~(valid & known)))

    def _unsigned(
        self, kind: pa.DataType, values: Int64Array, valid: Bools, records: Int64Array, path: str
    ) -> pa.Array:
        mask = None if valid.all() else ~valid
        if pa.types.is_decimal(kind):
            return pa.array(values.view(np.uint64), mask=mask).cast(kind)
        self._refuse(
            valid & (values < 0),
            records,
            lambda index: (
                f"field {path!r}: {values.view(np.uint64)[index]} is above what a bigint holds "
                f"(ask for decimal(20,0))"
            ),
        )
        return pa.array(values, mask=mask)

    def _times(
        self,
        kind: pa.DataType,
        parts: Sequence[pa.Array],
        valid: Bools,
        records: Int64Array,
        path: str,
    ) -> pa.Array:
        seconds, nanos = (part.to_numpy(zero_copy_only=False).astype(np.int64) for part in parts)
        fits = (seconds >= SECONDS_MIN) & (seconds <= SECONDS_MAX)
        fits &= (nanos >= 0) & (nanos < 10**9) & (nanos % 1000 == 0)
        self._refuse(
            valid & ~fits,
            records,
            lambda index: (
                f"field {path!r}: {seconds[index]} s and {nanos[index]} ns are no timestamp in "
                f"microseconds of the years 1 to 9999 (ask for struct<seconds bigint, nanos int>)"
            ),
        )
        micros = np.where(fits, seconds, 0) * 10**6 + np.where(fits, nanos, 0) // 1000
        return pa.array(micros, mask=None if valid.all() else ~valid).cast(kind)


class _Slots:
    """Room for the fields of many messages of one type; see `kernels.read_messages`."""

    def __init__(self, plan: MessagePlan, count: int) -> None:
        self._plan = plan
        shape = (len(plan.fields), count)
        self._values = np.zeros(shape, np.int64)
        self._sizes = np.zeros(shape, np.int64)
        self._order = np.zeros(shape, np.int64)
        self.counts = np.zeros(shape, np.int64)
        self.problems = np.zeros((2, count), np.int64)
        self.strays = np.zeros(count, np.bool_)
        self.items: list[tuple[Int64Array, Int64Array]] = []
        self._merged: list[NDArray[np.uint8]] = []
        self._table = plan.table.copy()
        for slots, word in (
            (self._values, kernels.VALUES),
            (self._sizes, kernels.SIZES),
            (self._order, kernels.ORDER),
            (self.counts, kernels.COUNTS),
        ):
            self._table[: len(slots), word] = slots.ctypes.data + 8 * count * np.arange(len(slots))

    def read(self, spans: Int64Array) -> Int64Array:
        """Read what is there once, and count the rest; return the malformed messages."""
        for array in (self._values, self._sizes, self._order, self.problems, self.strays):
            array[:] = 0
        self._run(spans)
        return np.flatnonzero(self.problems[0])

    def read_items(self, spans: Int64Array) -> None:
        """Read again, if a list is asked for, or a message stands there in pieces."""
        fields = self._plan.fields
        totals = [
            int(counts.sum())
            if field.is_list or (field.message is not None and counts.max(initial=0) > 1)
            else 0
            for field, counts in zip(fields, self.counts, strict=True)
        ]
        # While they are read, those that another member of a oneof replaces later take room too.
        rooms = [
            int(room) if total else 0
            for room, total in zip(self._table[:, kernels.CURSOR], totals, strict=False)
        ]
        self.items = [(np.zeros(n, np.int64), np.zeros(n, np.int64)) for n in rooms]
        if not any(totals):
            return
        for row, total, (values, sizes) in zip(self._table, totals, self.items, strict=False):
            if total:
                row[[kernels.ITEMS, kernels.ITEM_SIZES]] = values.ctypes.data, sizes.ctypes.data
        self._run(spans)
        self.items = [
            (values[:n], sizes[:n]) for n, (values, sizes) in zip(totals, self.items, strict=True)
        ]
        for field, total in zip(fields, totals, strict=True):
            if total and not field.is_list:
                self._merge(field.index)

    def _run(self, spans: Int64Array) -> None:
        self._table[:, kernels.CURSOR] = 0
        holders = np.zeros(len(self._plan.oneofs), np.int64)
        wanted = len(self._plan.fields)
        kernels.read_messages(spans, self._table, wanted, holders, self.problems, self.strays)

    def _merge(self, index: int) -> None:
        """Join the pieces of messages: their bytes one after another are the merged message."""
        starts, sizes = self.items[index]
        offsets = _offsets(sizes)
        data = np.empty(int(offsets[-1]) + 1, np.uint8)
        copy_spans(starts, offsets, data.ctypes.data)
        self._merged.append(data)
        ends = offsets[_offsets(self.counts[index])].astype(np.int64)
        self._values[index] = data.ctypes.data + ends[:-1]
        self._sizes[index] = np.diff(ends)

    def single(self, field: FieldPlan) -> tuple[Int64Array, Int64Array, Bools]:
        """Return a singular field's values, their sizes, and the messages that have the field."""
        valid = self._order[field.index] > 0
        if not field.has_presence:
            valid = np.ones(len(valid), np.bool_)
        return self._values[field.index], self._sizes[field.index], valid


def _sums(flags: Bools, counts: Int64Array) -> Int64Array:
    """Return how many of each run are set."""
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(flags)])
    return np.diff(before[_offsets(counts)])


def _offsets(lengths: Int64Array) -> NDArray[np.int32]:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    assert offsets[-1] < 2**31, "too much in one batch"
    return offsets.astype(np.int32)


def _numbers(wire_kind: int, kind: pa.DataType, values: Int64Array, valid: Bools) -> pa.Array:
    mask = None if valid.all() else ~valid
    if wire_kind == kernels.DOUBLE:
        return pa.array(values.view(np.float64), mask=mask)
    if wire_kind == kernels.FLOAT:
        return pa.array(values.astype(np.uint32).view(np.float32), mask=mask).cast(kind)
    if pa.types.is_boolean(kind):
        return pa.array(values != 0, mask=mask)
    return pa.array(values, mask=mask).cast(kind)


_REASONS = {
    kernels.TRUNCATED: "the value ends inside of it",
    kernels.VARINT_TOO_LONG: "a number goes on beyond 64 bits",
    kernels.NO_FIELD: "a tag names no field that there can be",
    kernels.WIRE_TYPE: "a tag has a wire type that Protobuf does not know",
    kernels.GROUP_OPEN: "groups do not end where they should",
    kernels.NOT_UTF8: "the string is not valid UTF-8",
    kernels.TAG_TOO_LONG: "a tag takes more than five bytes",
    kernels.PACKED_SIZE: "a packed list ends inside of a number",
}


def warm_up() -> None:
    """Compile the kernels, or load them from the cache."""
    from tallystick.codec.protobuf.writer import write_columns

    plan = MessagePlan.of_one_string()
    body = np.frombuffer(b"\0\x0a\x01a", np.uint8)
    bodies = np.array([[body.ctypes.data + 1], [body.ctypes.data + len(body)]], np.int64)
    starts = np.zeros(1, np.int64)
    _by_message(bodies - np.array([[1], [0]]), starts, {})
    _Decoder().columns(plan, bodies, starts)
    write_columns(plan, [pa.array(["a"])], b"", 1)
