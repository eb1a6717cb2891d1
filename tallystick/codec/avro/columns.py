"""Arrow columns from Avro bodies: slots for the kernel to fill, then made into arrays."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tallystick.codec.avro import kernels
from tallystick.codec.avro.kernels import copy_spans, decode_records, may_repeat
from tallystick.codec.avro.plan import Output, Plan, SlotContent

Int64Array = NDArray[np.int64]
Bytes = NDArray[np.uint8]

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


def text_array(
    kind: pa.DataType, starts: Int64Array, lengths: NDArray[np.integer], valid: Bytes
) -> pa.Array:
    """Return a binary or string array with bytes from anywhere.

    Args:
        kind: binary or string.
        starts: the address of each value; the caller keeps that memory alive.
        lengths: bytes of each value; ignored for a null.
        valid: 0 for null.
    """
    offsets = _offsets(lengths, valid)
    text = np.empty(int(offsets[-1]), np.uint8)
    copy_spans(starts, offsets, text.ctypes.data)
    buffers = [validity(valid), pa.py_buffer(offsets), pa.py_buffer(text)]
    return pa.Array.from_buffers(kind, len(valid), buffers)


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
    buffers = [validity(valid), pa.py_buffer(_offsets(lengths, valid))]
    return pa.Array.from_buffers(output.kind, len(valid), buffers, children=parts)


def last_of_each_key(
    keys: pa.Array, items: pa.Array, counts: Int64Array
) -> tuple[pa.Array, pa.Array, Int64Array]:
    """Return the entries of maps, the last of each key in a map, and each map's number of entries.

    Args:
        keys: of all maps, one map after another; never null.
        items: the values of the keys.
        counts: how many entries each map has.
    """
    if counts.max(initial=0) < 2:
        return keys, items, counts
    codes = keys.dictionary_encode().indices.to_numpy(zero_copy_only=False).astype(np.int64)
    owners = np.repeat(np.arange(len(counts)), counts)
    pairs = owners * (int(codes.max()) + 1) + codes
    _, from_end = np.unique(pairs[::-1], return_index=True)
    if len(from_end) == len(pairs):
        return keys, items, counts
    kept = np.sort(len(pairs) - 1 - from_end)
    taken = pa.array(kept)
    kept_counts = np.bincount(owners[kept], minlength=len(counts)).astype(np.int64)
    return keys.take(taken), items.take(taken), kept_counts


def _offsets(lengths: NDArray[np.integer], valid: Bytes) -> NDArray[np.int32]:
    """Return the start of each value; nulls are empty. Callers bound a batch's bytes by 2^31."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths if valid.all() else np.where(valid, lengths, 0), out=offsets[1:])
    assert offsets[-1] < 2**31, "too many bytes in one batch"
    return offsets.astype(np.int32)


def validity(valid: Bytes) -> pa.Buffer | None:
    """Return bytes of validity as Arrow has them; None: all are valid."""
    return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
