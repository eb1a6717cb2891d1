"""Flat JSON records to Arrow columns, and JSON lines without undeclared fields, by kernels.

A flat record has scalars only: `flat_kernels` fills slots, which become arrays. A record that
Arrow's parser refuses for a field that the schema lacks is written again without such fields
(`pruned`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.codec.json import flat_kernels as kernels
from tallystick.codec.json import kernels as record_kernels
from tallystick.codec.json.token_kernels import UNSURE
from tallystick.codec.spans import Bytes, Int64Array, Spans, spans_of, text_array, validity
from tallystick.host import kernel_cache

_KINDS: dict[pa.DataType, tuple[int, type[np.generic]]] = {
    pa.bool_(): (kernels.BOOLEAN, np.uint8),
    pa.int8(): (kernels.INTEGER, np.int8),
    pa.int16(): (kernels.INTEGER, np.int16),
    pa.int32(): (kernels.INTEGER, np.int32),
    pa.int64(): (kernels.INTEGER, np.int64),
    pa.float32(): (kernels.FLOAT, np.float32),
    pa.float64(): (kernels.DOUBLE, np.float64),
    pa.string(): (kernels.STRING, np.int64),
    pa.date32(): (kernels.DATE, np.int32),
}
"""The kernel's kind of each type, and the type of a slot; strings have an address there."""


def warm_up() -> None:
    """Compile the kernels, or load them from the cache."""
    schema = pa.schema([("a", pa.string())])
    flat = flat_of(schema)
    assert flat is not None, "it is flat"
    FlatColumns(schema, flat, spans_of(pa.array([b"{}"], pa.binary()), "value"))
    pruned(np.frombuffer(b"{}\n", np.uint8), np.array([0, 3]), schema)


def is_kernel_ready() -> bool:
    """Return True if the kernel is compiled; if not, have a process compile all kernels."""
    return bool(kernels.parse_records.signatures) or kernel_cache.are_compiled()


@dataclass(frozen=True, slots=True, eq=False)
class FlatPlan:
    """A schema in the form for the kernel.

    Args:
        fields: as the kernel takes them, but numbers of fields instead of addresses, and no slots.
        heads: the first field of each name hash, by its number plus 1; 0: none.
        names: the memory that the addresses of names in `fields` point into.
        slot_types: per field.
    """

    fields: Int64Array
    heads: Int64Array
    names: Int64Array
    slot_types: list[type[np.generic]]


@lru_cache(maxsize=64)
def flat_of(schema: pa.Schema) -> FlatPlan | None:
    """Return a schema's plan; None: not flat, a type without a kernel, or a name with escapes."""
    kinds = [_kind(field.type) for field in schema]
    known = [kind for kind in kinds if kind]
    names = [field.name.encode() for field in schema]
    if len(known) < len(kinds) or any(byte < 0x20 or byte in b'"\\' for byte in b"".join(names)):
        return None
    fields = np.zeros((len(kinds) + 1, kernels.FIELD_SIZE // 8), np.int64)
    heads = np.zeros(kernels.HASHES, np.int64)
    words = [np.frombuffer(name + b'"' + bytes(7 - len(name) % 8), np.int64) for name in names]
    text = np.concatenate(words)
    place = text.ctypes.data
    for number, ((kind, slot), name, own) in enumerate(zip(known, names, words, strict=True)):
        field = fields[number]
        width = np.dtype(slot).itemsize
        field[[kernels.KIND, kernels.WIDTH, kernels.LIMIT]] = kind, width, 2 ** (8 * width - 1) - 1
        field[[kernels.NAME, kernels.WORDS, kernels.SIZE]] = place, len(own), len(name)
        field[kernels.MASK] = -1 if len(name) % 8 == 7 else 2 ** (8 * (len(name) % 8 + 1)) - 1
        chain = kernels.name_hash(name[0] if name else ord('"'), name[-1] if name else 0, len(name))
        field[kernels.CHAIN], heads[chain] = heads[chain], number + 1
        place += own.nbytes
    # At first each field is expected where the schema has it; after the last one, the first.
    fields[:-1, kernels.FOLLOWER] = np.arange(1, len(fields)) % len(kinds)
    return FlatPlan(fields, heads, text, [slot for _, slot in known])


class FlatColumns:
    """Slots for some records, filled by the kernel and, where the kernel is unsure, by the caller.

    Args:
        schema: the columns to read.
        flat: the schema's plan.
        spans: the records; a null has null slots.
    """

    def __init__(self, schema: pa.Schema, flat: FlatPlan, spans: Spans) -> None:
        count = len(spans.starts)
        self._schema = schema
        self._flat = flat
        self._values = [np.zeros(count, slot) for slot in flat.slot_types]
        self._valid = np.zeros((len(self._values), count), np.uint8)
        self._lengths = np.zeros((len(self._values), count), np.int32)
        size = int(np.maximum(spans.lengths, 0).sum())
        assert size < 2**31, "too many bytes in one batch"
        spare = np.empty(size, np.uint8)
        self._keep: list[object] = [spans, spare]
        self.verdicts = np.empty(count, np.uint8)
        self._parse(spans, spare)

    def _parse(self, spans: Spans, spare: Bytes) -> None:
        """Run the kernel on a copy of the fields with this batch's addresses."""
        fields = self._flat.fields.copy()
        place = fields.ctypes.data
        fields[:-1, kernels.VALUES] = [values.ctypes.data for values in self._values]
        fields[:-1, kernels.VALID] = [valid.ctypes.data for valid in self._valid]
        fields[:-1, kernels.LENGTHS] = [lengths.ctypes.data for lengths in self._lengths]
        fields[:, kernels.FOLLOWER] = place + kernels.FIELD_SIZE * fields[:, kernels.FOLLOWER]
        heads = np.concatenate([self._flat.heads, fields[:-1, kernels.CHAIN]])
        heads[heads > 0] = place + kernels.FIELD_SIZE * (heads[heads > 0] - 1)
        fields[:-1, kernels.CHAIN] = heads[kernels.HASHES :]
        state = np.zeros(kernels.HASHES + 2, np.int64)
        state[: kernels.HASHES] = heads[: kernels.HASHES]
        state[[kernels.SPARE, kernels.SPARE_END]] = (
            spare.ctypes.data,
            spare.ctypes.data + spare.size,
        )
        last = place + kernels.FIELD_SIZE * (len(fields) - 1)
        done = kernels.parse_records(
            spans.address,
            spans.data.size,
            spans.starts,
            spans.lengths,
            place,
            last,
            state.ctypes.data,
            self.verdicts,
        )
        assert done == 0, "a span leaves its data"

    @property
    def is_unsure(self) -> bool:
        """True if the kernel has read no record, so that the caller may as well do without."""
        return self.rows_of(UNSURE).size == self.verdicts.size

    def rows_of(self, verdict: int) -> Int64Array:
        """Return the numbers of the records with a verdict."""
        return np.flatnonzero(self.verdicts == verdict)

    def put(self, rows: Int64Array, batch: pa.RecordBatch) -> None:
        """Fill slots with rows that were read elsewhere.

        Args:
            rows: where each row of the batch goes.
            batch: of the flat schema.
        """
        self._keep.append(batch)
        for index, column in enumerate(batch.columns):
            if self._flat.fields[index, kernels.KIND] == kernels.STRING:
                spans = spans_of(column, batch.schema.names[index])
                self._valid[index, rows] = spans.lengths >= 0
                self._lengths[index, rows] = np.maximum(spans.lengths, 0)
                self._values[index][rows] = spans.address + spans.starts
                continue
            self._valid[index, rows] = column.is_valid().to_numpy(zero_copy_only=False)
            self._values[index][rows] = _slots(column).to_numpy()

    def batch(self) -> pa.RecordBatch:
        """Return all rows."""
        arrays = [self._array(index, field.type) for index, field in enumerate(self._schema)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _array(self, index: int, kind: pa.DataType) -> pa.Array:
        values, valid = self._values[index], self._valid[index]
        if pa.types.is_string(kind):
            return text_array(kind, values, self._lengths[index], valid)
        if pa.types.is_boolean(kind):
            values = np.packbits(values, bitorder="little")
        return pa.Array.from_buffers(kind, len(valid), [validity(valid), pa.py_buffer(values)])


def _kind(kind: pa.DataType) -> tuple[int, type[np.generic]] | None:
    if pa.types.is_timestamp(kind):
        return kernels.TIMESTAMP, np.int64
    return _KINDS.get(kind)


def _slots(column: pa.Array) -> pa.Array:
    """Return the numbers of a fixed-width column, 0 for null."""
    kind = column.type
    if pa.types.is_boolean(kind):
        column = column.cast(pa.uint8())
    elif pa.types.is_date32(kind):
        column = column.view(pa.int32())
    elif pa.types.is_timestamp(kind):
        column = column.view(pa.int64())
    return pc.fill_null(column, 0) if column.null_count else column


@dataclass(frozen=True, slots=True, eq=False)
class _Tree:
    """A schema's nodes, their depth, and the memory of the names that the nodes point to."""

    nodes: Int64Array
    depth: int
    names: Bytes


def pruned(
    text: Bytes, line_starts: Int64Array, schema: pa.Schema
) -> tuple[Bytes, Int64Array, Bytes]:
    """Return lines without the fields that a schema lacks, their starts, and the verdicts.

    Args:
        text: records, each with a line break behind it.
        line_starts: where each line begins, and the end of the last.
        schema: the fields that are kept.
    """
    tree = _tree(schema)
    out = np.empty(len(text), np.uint8)
    starts = np.zeros(len(line_starts), np.int64)
    verdicts = np.zeros(len(line_starts) - 1, np.uint8)
    record_kernels.prune_records(
        *(text.ctypes.data, line_starts, tree.nodes, tree.depth),
        *(out.ctypes.data, starts, verdicts),
    )
    return out[: starts[-1]], starts, verdicts


@lru_cache(maxsize=64)
def _tree(schema: pa.Schema) -> _Tree:
    rows = [[record_kernels.STRUCT, 0, 0, 0, 0]]
    names = bytearray()
    depth = _add_parts(0, pa.struct(list(schema)), rows, names)
    nodes, text = np.array(rows, np.int64), np.frombuffer(bytes(names) + b"\0", np.uint8)
    nodes[:, record_kernels.NAME] += text.ctypes.data
    return _Tree(nodes, depth, text)


def _add_parts(index: int, kind: pa.DataType, rows: list[list[int]], names: bytearray) -> int:
    """Add the parts of a node's type to `rows` and `names`; return the node's depth."""
    parts: Sequence[pa.Field] = ()
    if pa.types.is_struct(kind):
        parts = list(kind)
        rows[index][record_kernels.KIND] = record_kernels.STRUCT
    elif pa.types.is_list(kind):
        parts = [kind.value_field]
        rows[index][record_kernels.KIND] = record_kernels.LIST
    rows[index][record_kernels.FIRST : record_kernels.COUNT + 1] = len(rows), len(parts)
    first = len(rows)
    for part in parts:
        name = part.name.encode()
        rows.append([record_kernels.VALUE, 0, 0, len(names), len(name)])
        names += name
    depths = [_add_parts(first + place, part.type, rows, names) for place, part in enumerate(parts)]
    return 1 + max(depths, default=0)
