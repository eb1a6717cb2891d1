"""Entries of a step's state from a table of `state_table`: of each kind as the step writes them."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tallystick.codec.spans import Int64Array
from tallystick.errors import OptionError, StateError
from tallystick.ops.state_table import EXPIRY, PANE_START, pane_type
from tallystick.state.catalog import StateField, StepState
from tallystick.state.entries import (
    TIMERS_BY_KEY,
    TIMERS_BY_TIME,
    time_bytes,
    time_keys,
)
from tallystick.state.functions.count_windows import CountWindows
from tallystick.state.functions.join_columns import NEVER
from tallystick.state.functions.processing import (
    COLUMNS,
    ELEMENTS,
    LIST,
    MAP,
    PANES,
    ROWS,
    TABLE,
    VALUE,
)
from tallystick.state.functions.row_state import rows_to_store
from tallystick.state.functions.session_windows import BOUNDS, SESSION_END, closes_ms
from tallystick.state.functions.vectorised import TIMER
from tallystick.state.functions.window_engine import OPEN, pane_key
from tallystick.state.functions.windows import US_PER_MS
from tallystick.state.key_groups import key_groups_of
from tallystick.state.keys import KeyCodec, entry_keys
from tallystick.state.numpy_columns import explode, lists_of, places_in
from tallystick.state.overlay import ENTRIES, one_batch
from tallystick.state.pyspark.values import ValueCodec, struct_from_text
from tallystick.state.row_codec import ColumnsCodec
from tallystick.state.schema import schema_from_text
from tallystick.state.time_to_live import with_expiry

_DAY_MS = 86_400_000
_GRID = re.compile(r"\w+ windows of (\d+) us every (\d+) us from (\d+) us.*")
_GAP = re.compile(r"session windows with a gap of (\d+) us")
_COUNT = re.compile(r"count windows of (\d+) rows every (\d+)")


def computed_columns(step: StepState) -> frozenset[str]:
    """Return the columns of state that a table may lack, since they follow from others of it."""
    if not _is_of_sessions(step):
        return frozenset()
    (bounds,) = (state for state in step.fields if state.kind == COLUMNS)
    return frozenset(schema_from_text(bounds.value_schema).names)


def _is_of_sessions(step: StepState) -> bool:
    panes = [state for state in step.fields if state.kind == PANES]
    return any(_GAP.fullmatch(state.key_schema) for state in panes)


class _Keys(NamedTuple):
    """The keys of some rows.

    Args:
        columns: of the key.
        data: each key as bytes.
        groups: the key group of each.
    """

    columns: pa.RecordBatch
    data: pa.BinaryArray
    groups: NDArray[np.int32]

    def entries(self, state_id: int) -> pa.BinaryArray:
        """Return the entry of each key in a state."""
        return entry_keys(self.groups, state_id, self.data)


_Part = tuple[pa.BinaryArray, pa.BinaryArray]
"""Keys of entries, and values; in no order."""


def entries_from(step: StepState, rows: pa.RecordBatch, now_ms: int) -> pa.RecordBatch:
    """Return the entries of some keys' state: the inverse of `table_of`.

    Args:
        step: the state that the rows are to be.
        rows: a row per key, with the columns of `schema_of`.
        now_ms: from when a time to live counts where a row does not say when it ends.

    Returns:
        `ENTRIES`, sorted by key.

    Raises:
        OptionError: a value cannot be stored, or an entry is there twice.
    """
    keys = _keys_of(step, rows)
    parts: list[_Part] = []
    due = np.full(rows.num_rows, NEVER)
    at = len(keys.columns.schema) + 1
    for state in step.fields:
        if state.kind in (COLUMNS, TABLE, ELEMENTS):
            schema = schema_from_text(state.value_schema)
            stored = pa.RecordBatch.from_arrays(rows.columns[at : at + len(schema)], schema=schema)
            at += len(schema)
            if not (state.name == BOUNDS and _is_of_sessions(step)):  # follow from the panes
                parts += _of_columns(state, stored, keys)
            continue
        column, at = rows.columns[at], at + 1
        if state.kind == PANES:
            parts += _of_panes(step, state, column, keys)
        elif state.kind == ROWS:
            part, dues = _of_rows(step, state, column, keys)
            parts.append(part)
            due = np.minimum(due, dues)
        else:
            parts.append(_of_values(step, state, column, keys, now_ms))
    has_due = due < NEVER
    owners = keys.data.filter(pa.array(has_due))
    own = entry_keys(keys.groups[has_due], TIMERS_BY_TIME, owners)
    parts.append(_marks(time_keys(own, pa.array(due[has_due]), TIMERS_BY_TIME)))
    parts += _of_timers(rows.columns[at], keys)
    return _sorted(step, parts)


def _keys_of(step: StepState, rows: pa.RecordBatch) -> _Keys:
    codec = KeyCodec.from_text(step.key_schema)
    columns = rows.select(codec.names)
    kinds = {state.kind for state in step.fields}
    if kinds & {TABLE, ELEMENTS}:  # no key groups: a table has one place, a list one for each task
        groups = np.zeros(rows.num_rows, np.int32)
        if ELEMENTS in kinds:
            groups = columns.column(0).to_numpy()
    else:
        groups = key_groups_of(codec.hash_codes(columns), step.max_parallelism)
    return _Keys(columns, codec.encode(columns), groups)


def _marks(keys: pa.BinaryArray) -> _Part:
    return keys, pa.array([b""] * len(keys), pa.binary())


def _of_columns(state: StateField, stored: pa.RecordBatch, keys: _Keys) -> Iterator[_Part]:
    codec = ColumnsCodec(stored.schema)
    values, own = codec.encode(stored), keys.entries(state.state_id)
    if state.kind != COLUMNS:  # the row of a table, and an element, is there without a value too
        yield own, values.fill_null(codec.all_null)
        return
    yield own.filter(values.is_valid()), values.filter(values.is_valid())
    if TIMER in stored.schema.names:  # the function finds keys that are due by this index alone
        timers = stored.column(TIMER)
        due = time_keys(own.filter(timers.is_valid()), timers.drop_null(), TIMERS_BY_TIME)
        yield _marks(due)


def _of_timers(column: pa.ListArray, keys: _Keys) -> Iterator[_Part]:
    """Yield the timers of a processor, by key and by time."""
    codes, (times,) = explode([column])
    own = keys.entries(TIMERS_BY_KEY).take(pa.array(codes))
    rest = pa.array([time_bytes(time_ms) for time_ms in times.to_pylist()], pa.binary())
    yield _marks(pc.binary_join_element_wise(own, rest, b""))
    yield _marks(time_keys(own, times, TIMERS_BY_TIME))


def _sorted(step: StepState, parts: list[_Part]) -> pa.RecordBatch:
    batches = [pa.RecordBatch.from_arrays(list(part), schema=ENTRIES) for part in parts]
    together = pa.Table.from_batches(batches, ENTRIES)
    if pc.count_distinct(together.column("key")).as_py() < together.num_rows:
        raise OptionError(
            f"step {step.uid}: a map, the windows or the timers of a key have an entry twice: "
            f"expected one."
        )
    ordered = together.take(pc.sort_indices(together, sort_keys=[("key", "ascending")]))
    return one_batch(ordered, f"the state of step {step.uid}", "write rows with smaller values")


def _flat(
    step: StepState, name: str, column: pa.ListArray, needed: tuple[pa.Field, ...]
) -> tuple[Int64Array, dict[str, pa.Array], pa.StructArray]:
    """Return the number of each element's row, the first columns by name, and the elements.

    Raises:
        OptionError: an element is null, or null in a column that each needs.
    """
    codes, (elements,) = explode([column])
    if elements.null_count:
        raise OptionError(f"step {step.uid}: column {name!r} has a null in a list: expected none")
    columns = dict(zip(elements.type.names, elements.flatten(), strict=True))
    for field in needed:
        if columns[field.name].null_count:
            raise OptionError(
                f"step {step.uid}: column {name!r} is null in {field.name!r}: expected {field.type}"
            )
    return codes, columns, elements


# ---- windows -------------------------------------------------------------------------------------


def _of_panes(
    step: StepState, state: StateField, column: pa.ListArray, keys: _Keys
) -> Iterator[_Part]:
    """Yield panes, their timers, and the bounds of sessions."""
    words, kinds = state.key_schema, pane_type(state)
    gap = _GAP.fullmatch(words)
    needed = (PANE_START, SESSION_END) if gap else (PANE_START,)
    codes, columns, _ = _flat(step, state.kind, column, needed)
    starts = columns[PANE_START.name].to_numpy()
    if OPEN.name in kinds.names:
        _check_grid(step, words, starts)
        columns[OPEN.name] = columns[OPEN.name].fill_null(True)
        # Without a timer no window of the pane has come out yet; a zone is a day off at most.
        before = pa.array(starts // US_PER_MS - _DAY_MS)
        columns[TIMER] = pc.coalesce(columns[TIMER], before)
    if gap:
        ends = columns[SESSION_END.name].to_numpy()
        closes = closes_ms(ends + int(gap[1]))
        columns[TIMER] = pc.coalesce(columns[TIMER], pa.array(closes))
        yield from _bounds(step, keys, (codes, starts, ends), int(gap[1]))
    if of_count := _COUNT.fullmatch(words):
        rows = columns[schema_from_text(state.value_schema).names[0]]
        _check_counted(step, CountWindows(int(of_count[1]), int(of_count[2])), codes, starts, rows)
    schema = schema_from_text(state.value_schema)
    stored = [columns[name] for name in schema.names]
    values = ColumnsCodec(schema).encode(pa.RecordBatch.from_arrays(stored, schema=schema))
    owners = pa.array(codes)
    pane_columns = [*keys.columns.take(owners).columns, pa.array(starts)]
    codec = pane_key(KeyCodec(keys.columns.schema))
    data = codec.encode(pa.RecordBatch.from_arrays(pane_columns, schema=codec.schema))
    own = entry_keys(keys.groups[codes], state.state_id, data)
    yield own, values
    if TIMER in columns:
        yield _marks(time_keys(own, columns[TIMER], TIMERS_BY_TIME))


def _check_grid(step: StepState, words: str, starts: Int64Array) -> None:
    """Raise OptionError if a pane does not begin where panes of such windows do."""
    grid = _GRID.fullmatch(words)
    assert grid, words
    size, every, offset = map(int, grid.groups())
    pane = int(np.gcd(size, every))
    strays = starts[(starts - offset) % pane != 0]
    if len(strays):
        raise OptionError(
            f"step {step.uid}: a pane starts at {strays[0]} us: expected whole steps of {pane} us "
            f"from {offset % pane} us, as its windows have ({words})"
        )


def _bounds(
    step: StepState, keys: _Keys, sessions: tuple[Int64Array, Int64Array, Int64Array], gap: int
) -> Iterator[_Part]:
    """Return the bounds of each key's sessions, which follow from the sessions.

    Raises:
        OptionError: a session ends before it starts, or sessions of a key are one.
    """
    codes, starts, ends = sessions
    order = np.lexsort((starts, codes))
    codes, starts, ends = codes[order], starts[order], ends[order]
    is_next = codes[1:] == codes[:-1]
    if (ends < starts).any() or (is_next & (starts[1:] - ends[:-1] <= gap)).any():
        raise OptionError(
            f"step {step.uid}: a session ends before it starts, or no more than the gap of "
            f"{gap} us before the next one of its key: expected sessions that are apart"
        )
    (state,) = (state for state in step.fields if state.kind == COLUMNS)
    counts = np.bincount(codes, minlength=len(keys.data))
    lists = [lists_of(counts, pa.array(moments)) for moments in (starts, ends)]
    schema = schema_from_text(state.value_schema)
    return _of_columns(state, pa.RecordBatch.from_arrays(lists, schema=schema), keys)


def _check_counted(
    step: StepState, windows: CountWindows, codes: Int64Array, starts: Int64Array, rows: pa.Array
) -> None:
    """Raise OptionError unless each key has the panes that its number of rows says.

    A key's first pane, 0, has the number of its rows so far; whole panes are counted from 1.
    """
    order = np.lexsort((starts, codes))
    codes, starts = codes[order], starts[order]
    rows_so_far = rows.fill_null(0).to_numpy()[order][starts == 0]
    first = np.zeros(len(rows_so_far), np.int64)
    count = np.ones(len(rows_so_far), np.int64)
    if not windows.is_single:
        first = windows.first_pane(windows.next_end(rows_so_far))
        count += rows_so_far // windows.pane_rows - first
    places = places_in(count)
    wanted = np.where(places > 0, np.repeat(first, count) + places, 0)
    whose = np.repeat(codes[starts == 0], count)
    is_whole = (rows_so_far > 0).all() and not (
        windows.is_single and (rows_so_far >= windows.size).any()
    )
    if not (is_whole and np.array_equal(wanted, starts) and np.array_equal(whose, codes)):
        raise OptionError(
            f"step {step.uid}: the panes of a key are not those of {windows.text}, by its number "
            f"of rows in the pane with start 0: expected them as read_state has them"
        )


# ---- rows of joins -------------------------------------------------------------------------------


def _of_rows(
    step: StepState, state: StateField, column: pa.ListArray, keys: _Keys
) -> tuple[_Part, Int64Array]:
    """Return the rows of one side of a join, and when each key is due."""
    codes, _, stored = _flat(step, state.name, column, (column.type.value_type.field(0),))
    schema = schema_from_text(state.value_schema)
    entries = keys.entries(state.state_id)
    changes, due = rows_to_store(schema, entries, codes, stored)
    whole = one_batch(changes, f"the rows of step {step.uid}", "write fewer rows for a key")
    return (whole.column(0), whole.column(1)), due


# ---- states of a processor -----------------------------------------------------------------------


def _of_values(
    step: StepState, state: StateField, column: pa.Array, keys: _Keys, now_ms: int
) -> _Part:
    """Return the entries of a processor's state, and those of the index of expiries."""
    names: list[bytes] = []
    values: list[bytes] = []
    otherwise = now_ms + state.ttl_ms
    own = keys.entries(state.state_id).to_pylist()
    for number, rest, value, expiry_ms in _entries(step, state, column, otherwise):
        key = own[number] + rest
        if state.ttl_ms:
            value, index = with_expiry(key, value, expiry_ms)
            names.append(index)
            values.append(b"")
        names.append(key)
        values.append(value)
    return pa.array(names, pa.binary()), pa.array(values, pa.binary())


_Entry = tuple[int, bytes, bytes, int]
"""A row's number, the bytes after the step's key, the value, and when it ends, if it does."""


def _entries(
    step: StepState, state: StateField, column: pa.Array, otherwise_ms: int
) -> list[_Entry]:
    name = f"step {step.uid}, state {state.name!r}"
    codec = ValueCodec(name, struct_from_text(state.value_schema))
    value_kind = _value_kind(state, column.type)

    def stored(value: Mapping[str, Any] | None) -> tuple[bytes, int]:
        expiry_ms = None if value is None else value.get(EXPIRY.name)
        data = codec.encode(_python(value, value_kind))
        return data, otherwise_ms if expiry_ms is None or not state.ttl_ms else expiry_ms

    entries: list[_Entry] = []
    try:
        for number, value in enumerate(column.to_pylist()):
            if value is None:
                continue
            if state.kind == VALUE:
                entries.append((number, b"", *stored(value)))
            elif state.kind == LIST:
                elements = [stored(element) for element in value]
                if elements:
                    last_ms = max(expiry_ms for _, expiry_ms in elements)
                    entries.append((number, b"", _position(len(value)), last_ms))
                for position, element in enumerate(elements):
                    entries.append((number, _position(position), *element))
            else:
                assert state.kind == MAP, state
                keys = struct_from_text(state.key_schema)
                key_codec = ValueCodec(f"{name}, the key", keys, is_key=True)
                for key, element in value:
                    rest = key_codec.encode(_python(key, column.type.key_type))
                    entries.append((number, rest, *stored(element)))
    except StateError as error:
        raise OptionError(str(error)) from None
    return entries


def _value_kind(state: StateField, kind: pa.DataType) -> pa.StructType:
    """Return the type of a value of a state's column, without its expiry."""
    if state.kind == LIST:
        kind = kind.value_type
    elif state.kind == MAP:
        kind = kind.item_type
    return pa.struct(list(kind)[:-1]) if state.ttl_ms else kind


def _position(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _python(value: Any, kind: pa.DataType) -> Any:
    """Return a value of Arrow's `to_pylist` as a processor gives it to its state."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return tuple(_python(value[field.name], field.type) for field in kind)
    if pa.types.is_map(kind):
        return {_python(k, kind.key_type): _python(v, kind.item_type) for k, v in value}
    if pa.types.is_list(kind):
        return [_python(part, kind.value_type) for part in value]
    return value
