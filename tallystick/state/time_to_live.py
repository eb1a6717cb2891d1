"""A time to live that comes to state, or goes from it: entries of before get an expiry, or lose it.

An entry of a `StatefulProcessor` has its expiry in 8 bytes before its value; a key that
`deduplicate` forgets has it in the column `TIMER`. Either has an entry of an index by time, by
which it is removed in the end.

Invariant: the expiry of an entry from before follows from the change alone (`TtlChange.at_ms`), and
so does its place in the index. So a file needs no other file to be converted: an entry that it
overwrites or deletes has the same place, and a later program finds it there.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.codec.spans import Int64Array
from tallystick.state.catalog import FormerState, StateField, TtlChange
from tallystick.state.entries import (
    ID_AT,
    KEY_AT,
    REST_AT,
    TIME_SIZE,
    TIMERS_BY_TIME,
    TTL_INDEX,
    ids_of,
    time_bytes,
)
from tallystick.state.functions.processing import COLUMNS, StateDeclaration
from tallystick.state.functions.vectorised import TIMER
from tallystick.state.keys import tails
from tallystick.state.meaning import FUNCTION, OWN_FUNCTION
from tallystick.state.overlay import ENTRIES
from tallystick.state.row_codec import BoolArray, ColumnsCodec
from tallystick.state.schema import schema_from_text

EXPIRY_SIZE = 8
"""The bytes of the expiry before the value of a `StatefulProcessor`'s state with a TTL."""


def has_ttl(state: StateField | StateDeclaration) -> bool:
    """True if entries of a state end some time after they were written."""
    if state.kind != COLUMNS:
        return bool(state.ttl_ms)
    is_own = dict(state.meaning).get(FUNCTION) == OWN_FUNCTION
    return not is_own and TIMER in schema_from_text(state.value_schema).names


def ttl_change(before: StateField, now: StateField, timestamp_ms: int) -> TtlChange | None:
    """Return the change of a state's time to live in an epoch; None: there is none.

    Args:
        before: as committed.
        now: as the program declares it.
        timestamp_ms: the clock of the epoch.
    """
    if has_ttl(before) == has_ttl(now):
        return None
    is_added = has_ttl(now)
    return TtlChange(is_added, timestamp_ms + (now.ttl_ms if is_added else 0))


def with_ttl(
    values: pa.BinaryArray, before: FormerState, kind: str, change: TtlChange
) -> pa.BinaryArray:
    """Return values with an expiry, or those without that had not expired.

    Columns get and lose theirs where their schema is converted.
    """
    if kind == COLUMNS:
        return values if change.is_added else _alive_columns(values, before, change.at_ms)
    if change.is_added:
        return pc.binary_join_element_wise(_expiry(change.at_ms), values, b"")
    is_held = values.is_valid()
    stored = values.filter(is_held)
    is_alive = pa.array(expiries_of(stored) > change.at_ms)
    alive = pc.if_else(is_alive, tails(stored, EXPIRY_SIZE), None)
    return pc.replace_with_mask(values, is_held, alive)


def expiries_of(values: pa.BinaryArray) -> Int64Array:
    """Return the expiry before each value; none of the values is null."""
    heads = pc.binary_slice(values, 0, EXPIRY_SIZE).cast(pa.binary(EXPIRY_SIZE))
    data = heads.buffers()[1] or b""
    expiries = np.frombuffer(data, ">i8", len(heads), heads.offset * EXPIRY_SIZE)
    return expiries.astype(np.int64)


def with_expiry(key: bytes, value: bytes, at_ms: int) -> tuple[bytes, bytes]:
    """Return the value of an entry that ends at a moment, and the key of the entry's index."""
    index = key[:ID_AT] + bytes([TTL_INDEX]) + time_bytes(at_ms) + key[ID_AT:]
    return _expiry(at_ms) + value, index


def _expiry(at_ms: int) -> bytes:
    return at_ms.to_bytes(EXPIRY_SIZE, "big", signed=True)


def _alive_columns(values: pa.BinaryArray, before: FormerState, at_ms: int) -> pa.BinaryArray:
    timers = ColumnsCodec(schema_from_text(before.value_schema)).decode(values).column(TIMER)
    is_gone = pc.fill_null(pc.less_equal(timers, at_ms), False)
    return pc.if_else(is_gone, pa.scalar(None, pa.binary()), values)


def with_expiries(
    entries: pa.RecordBatch, of_state: pa.RecordBatch, field: StateField, change: TtlChange
) -> pa.RecordBatch:
    """Return entries of a file with those of the index by time, or without, in no order.

    Args:
        entries: `ENTRIES`, converted but for the index.
        of_state: those of the state, as they were: the same have a value.
        field: of the state, after the change.
        change: of its time to live.
    """
    index = TIMERS_BY_TIME if field.kind == COLUMNS else TTL_INDEX
    if not change.is_added:
        is_index = _of_index(entries, index, field.state_id)
        return entries.filter(pa.array(~is_index)) if is_index.any() else entries
    keys, values = of_state.columns
    # The index of expiries is of all states, so the id is part of what it holds.
    what = tails(keys, REST_AT if field.kind == COLUMNS else ID_AT)
    head = bytes([index]) + time_bytes(change.at_ms)
    group = pc.binary_slice(keys, 0, ID_AT)
    expiries = pc.binary_join_element_wise(group, head, what, b"")
    marks = pc.if_else(values.is_valid(), pa.scalar(b"", pa.binary()), None)
    more = pa.RecordBatch.from_arrays([expiries, marks], schema=ENTRIES)
    together = pa.Table.from_batches([entries, more]).combine_chunks()
    return together.to_batches()[0] if together.num_rows else entries


def _of_index(entries: pa.RecordBatch, index: int, state_id: int) -> BoolArray:
    """Return a mask of a state's entries of an index by time."""
    is_index: BoolArray = ids_of(entries.column(0)) == index
    if index == TTL_INDEX:
        where = np.flatnonzero(is_index)
        keys = entries.column(0).take(pa.array(where))
        ids = pc.binary_slice(keys, REST_AT + TIME_SIZE, KEY_AT[index]).cast(pa.binary(1))
        is_index[where] = np.array(ids.to_pylist(), "S1") == bytes([state_id])
    return is_index
