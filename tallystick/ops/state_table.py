"""`read_state`: the committed state of a step as a DataFrame."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from tallystick.arguments import Settings, checked, near
from tallystick.checkpoint.newest import Ask, newest_committed
from tallystick.checkpoint.state_files import chunks_of, contents_of
from tallystick.epoch import savepoint
from tallystick.errors import OptionError
from tallystick.ops import savepoints
from tallystick.ops.checkpoint_view import asking
from tallystick.options.table import client_config
from tallystick.ports import Storage
from tallystick.state.catalog import StateField, StepState
from tallystick.state.entries import (
    REST_AT,
    TIME_SIZE,
    TIMERS_BY_KEY,
    TIMERS_BY_TIME,
    ids_of,
    time_of,
    times_in,
)
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
from tallystick.state.functions.row_state import stored_fields, stored_rows
from tallystick.state.functions.vectorised import TIMER
from tallystick.state.functions.window_engine import OPEN
from tallystick.state.key_groups import KeyGroupRange, key_group_range
from tallystick.state.keys import KeyCodec, tails
from tallystick.state.pyspark.values import ValueCodec, struct_from_text
from tallystick.state.row_codec import ColumnsCodec
from tallystick.state.schema import schema_from_text
from tallystick.state.time_to_live import EXPIRY_SIZE, expiries_of
from tallystick.storage.file_storage import FileStorage
from tallystick.storage.places import Place


@checked
def read_state(
    spark: SparkSession,
    checkpoint: Place,
    step: str | None = None,
    *,
    bootstrap_servers: str | None = None,
    options: Settings | None = None,
) -> DataFrame:
    """Return the state of a keyed step, a row per key.

    Columns: those of the key, `key_group`, the states (see `schema_of`), and `timers` in
    milliseconds. The epoch is the newest committed one at the call. Files are read lazily, and a
    running pipeline may collect them after ten more epochs: read from a savepoint then.

    Args:
        spark: a session; its tasks read the files.
        checkpoint: of a pipeline, running or not; or a savepoint.
        step: the uid of the step; may be left out where there is one keyed step.
        bootstrap_servers: of the cluster that the pipeline writes to. Kafka is asked whether the
            newest epoch is decided where no file says so: of a pipeline that reads without a
            pause, or was killed.
        options: further options of the Kafka client, as for `KafkaSink(options=…)`.

    Raises:
        OptionError: there is no such step, or no committed epoch; or Kafka has to be asked.
        ManifestError: the manifest is missing or damaged.
        DataLossError: Kafka does not say what is decided last.
    """
    storage = FileStorage(checkpoint)
    ask = None
    if bootstrap_servers is not None:
        ask = asking(client_config(bootstrap_servers, options or {}))
    reading = _reading(storage, step, ask, spark.sparkContext.defaultParallelism)
    schema = from_arrow_schema(schema_of(reading.step))
    return spark.range(0, reading.count, 1, reading.count).mapInArrow(reading.read, schema)


def rows_in(storage: FileStorage, step: str | None, ask: Ask | None) -> pa.RecordBatchReader:
    """Return what `read_state` does, read in this process, some of the key groups at a time."""
    reading = _reading(storage, step, ask, 1)
    numbers = pa.record_batch({"number": list(range(reading.count))})
    return pa.RecordBatchReader.from_batches(schema_of(reading.step), reading.read([numbers]))


def _reading(storage: FileStorage, uid: str | None, ask: Ask | None, tasks: int) -> "_ReadPlan":
    step = _step(storage, uid, ask)
    return _ReadPlan(storage.uri, step, min(step.max_parallelism, max(step.parallelism, tasks)))


@dataclass(frozen=True)
class _ReadPlan:
    """A plan to read a step's state in `count` tasks."""

    checkpoint: str = field(repr=False)  # credentials may stand in it
    step: StepState
    count: int

    def read(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the tasks with the given numbers."""
        storage = FileStorage(self.checkpoint)
        for batch in numbers:
            for index in batch.column(0).to_pylist():
                groups = key_group_range(self.step.max_parallelism, self.count, index)
                yield from self._rows(groups, storage)

    def _rows(self, groups: KeyGroupRange, storage: Storage) -> Iterator[pa.RecordBatch]:
        for part in chunks_of(self.step, groups):
            entries = contents_of(self.step, part, storage)
            if entries.num_rows:
                yield table_of(self.step, entries)


def _step(storage: Storage, uid: str | None, ask: Ask | None) -> StepState:
    if storage.get(savepoint.FILE) is not None:
        state = savepoints.read(storage).manifest.state
    else:
        state = newest_committed(storage, ask).manifest.state
    steps = [step for step in state if uid in (None, step.uid)]
    if len(steps) != 1:
        names = ", ".join(repr(step.uid) for step in state) or "none"
        wanted = "name the step" if uid is None else f"there is no step {uid!r}"
        hint = near(uid or "", [step.uid for step in state])
        raise OptionError(f"{storage.location}: {wanted}; its keyed steps are: {names}.{hint}")
    return steps[0]


KEY_GROUP, TIMERS = "key_group", "timers"
EXPIRY = pa.field("$expiry", pa.int64())
"""The moment from which an entry with a time to live is gone, in ms; beside the entry's columns."""
PANE_START, PANE_TIMER = pa.field("start", pa.int64()), pa.field(TIMER, pa.int64())

Int64Array = NDArray[np.int64]


class _Entries(NamedTuple):
    """The entries of one state, in the order of their keys.

    Args:
        keys: the step's key of each entry, as bytes.
        groups: the key group of each entry.
        after_id: the bytes of the key and those after it.
        rest: the bytes after the key.
        values: the values without the expiry.
        expiries: of each value; None: the state has no time to live.
    """

    keys: pa.BinaryArray
    groups: NDArray[np.int32]
    after_id: pa.BinaryArray
    rest: list[bytes]
    values: pa.BinaryArray
    expiries: Int64Array | None


def schema_of(step: StepState) -> pa.Schema:
    """Return the columns of a step's table; a name that is taken gets an underscore."""
    fields = list(KeyCodec.from_text(step.key_schema).schema)
    fields.append(pa.field(KEY_GROUP, pa.int32()))
    for state in step.fields:
        fields += _columns_of(state)
    fields.append(pa.field(TIMERS, pa.list_(pa.int64())))
    names: set[str] = set()
    unique = []
    for column in fields:
        name = column.name
        while name in names:
            name += "_"
        names.add(name)
        unique.append(column.with_name(name))
    return pa.schema(unique)


def table_of(step: StepState, entries: pa.RecordBatch) -> pa.RecordBatch:
    """Return a row per key of a step's entries, in no particular order.

    Args:
        step: the state of the step.
        entries: `ENTRIES`, sorted by key: all of some key groups.

    Raises:
        ManifestError: an entry is not what the step's schemas say.
    """
    codec = KeyCodec.from_text(step.key_schema)
    ids = ids_of(entries.column(0))
    by_state = {
        state_id: _entries_of(codec, entries.filter(pa.array(ids == state_id)), ttl_ms)
        for state_id, ttl_ms in _readable(step)
    }
    keys = pa.concat_arrays([decoded.keys for decoded in by_state.values()]).dictionary_encode()
    groups = np.zeros(len(keys.dictionary), np.int32)
    at = 0
    codes = {}
    for state_id, state_entries in by_state.items():
        codes[state_id] = (
            keys.indices[at : at + len(state_entries.keys)].to_numpy().astype(np.int64)
        )
        groups[codes[state_id]] = state_entries.groups
        at += len(state_entries.keys)
    columns = [*codec.decode(keys.dictionary).columns, pa.array(groups)]
    keys_by_time = entries.column(0).filter(pa.array(ids == TIMERS_BY_TIME))
    for state in step.fields:
        state_entries = by_state[state.state_id]
        if state.kind == PANES:
            panes = _panes(state, state_entries, keys_by_time)
            columns.append(_lists(panes, codes[state.state_id], len(groups)))
        else:
            columns += _read(state, state_entries, codes[state.state_id], len(groups))
    timers = by_state[TIMERS_BY_KEY]
    times = pa.array([*map(time_of, timers.rest)], pa.int64())
    columns.append(_lists(times, codes[TIMERS_BY_KEY], len(groups)))
    return pa.RecordBatch.from_arrays(columns, schema=schema_of(step))


def _readable(step: StepState) -> Iterator[tuple[int, int]]:
    """Yield the states with times to live; other entries are of dropped states, or indexes."""
    for state in step.fields:
        yield state.state_id, 0 if state.kind == COLUMNS else state.ttl_ms
    yield TIMERS_BY_KEY, 0


def _columns_of(state: StateField) -> list[pa.Field]:
    if state.kind in (COLUMNS, TABLE, ELEMENTS):
        return list(schema_from_text(state.value_schema))
    if state.kind == PANES:
        return [pa.field(state.kind, pa.list_(pane_type(state)))]
    if state.kind == ROWS:
        rows = stored_fields(schema_from_text(state.value_schema))
        return [pa.field(state.name, pa.list_(rows))]
    value = _struct(state.value_schema)
    if state.ttl_ms:
        value = pa.struct([*value, EXPIRY])
    if state.kind == LIST:
        return [pa.field(state.name, pa.list_(value))]
    if state.kind == MAP:
        return [pa.field(state.name, pa.map_(_struct(state.key_schema), value))]
    return [pa.field(state.name, value)]


def pane_type(state: StateField) -> pa.StructType:
    """Return the type of a pane of windows: start in microseconds, timer in ms, and accumulators.

    Sessions have their timer among the accumulators, windows of a number of rows have none.
    """
    stored = schema_from_text(state.value_schema)
    timer = [PANE_TIMER] if OPEN.name in stored.names else []
    return pa.struct([PANE_START, *timer, *stored])


def _struct(text: str) -> pa.StructType:
    return pa.struct(list(to_arrow_schema(struct_from_text(text), timezone="UTC")))


def _entries_of(codec: KeyCodec, entries: pa.RecordBatch, ttl_ms: int) -> _Entries:
    after_id = tails(entries.column(0), REST_AT)
    rows, sizes = codec.decode_start(after_id)
    values = entries.column(1)
    return _Entries(
        keys=codec.encode(rows),
        groups=_groups(entries.column(0)),
        after_id=after_id,
        rest=[data[size:] for data, size in zip(after_id.to_pylist(), sizes.tolist(), strict=True)],
        values=tails(values, EXPIRY_SIZE) if ttl_ms else values,
        expiries=expiries_of(values) if ttl_ms else None,
    )


def _groups(keys: pa.BinaryArray) -> NDArray[np.int32]:
    return np.array([int.from_bytes(key[:2], "big") for key in keys.to_pylist()], np.int32)


def _read(
    state: StateField, state_entries: _Entries, codes: Int64Array, count: int
) -> list[pa.Array]:
    """Return the columns of one state, a value for each of `count` keys."""
    if state.kind in (COLUMNS, TABLE, ELEMENTS):
        rows = ColumnsCodec(schema_from_text(state.value_schema)).decode(state_entries.values)
        return [column.take(_positions(codes, count)) for column in rows.columns]
    # A family has an entry under its own name, which counts the elements of a list.
    is_part = np.array([len(rest) > 0 for rest in state_entries.rest], np.bool_)
    if state.kind == ROWS:
        columns = schema_from_text(state.value_schema)
        owners, stored = stored_rows(columns, state_entries.values, is_part, codes)
        return [_lists(stored, owners, count)]
    if state.kind == VALUE:
        is_part = np.ones(len(codes), np.bool_)
    kept = pa.array(is_part)
    values = _structs(state.value_schema, state_entries.values.filter(kept))
    if state_entries.expiries is not None:
        expiries = pa.array(state_entries.expiries[is_part])
        fields = [*values.type, EXPIRY]
        values = pa.StructArray.from_arrays([*values.flatten(), expiries], fields=fields)
    if state.kind == VALUE:
        return [values.take(_positions(codes, count))]
    if state.kind == LIST:
        return [_lists(values, codes[is_part], count)]
    assert state.kind == MAP, state
    packed = pa.array([rest for rest in state_entries.rest if rest], pa.binary())
    keys = _structs(state.key_schema, packed)
    return [_maps(keys, values, codes[is_part], count)]


def _panes(state: StateField, entries: _Entries, by_time: pa.BinaryArray) -> pa.StructArray:
    """Return panes as values of `pane_type`.

    Args:
        state: of the panes.
        entries: of the panes.
        by_time: the keys of all entries of the step's index of timers.
    """
    rows = ColumnsCodec(schema_from_text(state.value_schema)).decode(entries.values)
    # As a column of a key: a byte that says that there is one, and its order as unsigned.
    starts = [time_of(rest[1:]) for rest in entries.rest]
    columns, fields = [pa.array(starts, pa.int64())], list(pane_type(state))
    if len(fields) > 1 + len(rows.schema):
        places = pc.index_in(entries.after_id, value_set=tails(by_time, REST_AT + TIME_SIZE))
        columns.append(pa.array(times_in(by_time, REST_AT)).take(places))
    return pa.StructArray.from_arrays([*columns, *rows.columns], fields=fields)


def _structs(schema_text: str, data: pa.BinaryArray) -> pa.StructArray:
    kind = _struct(schema_text)
    codec = ValueCodec("state", struct_from_text(schema_text), as_stored=True)
    names = kind.names
    values: list[Any] = [
        dict(zip(names, codec.decode(encoded), strict=True)) for encoded in data.to_pylist()
    ]
    return pa.array(values, kind)


def _positions(codes: Int64Array, count: int) -> pa.Array:
    """Return the position of each key's only value; null for a key without a value."""
    positions = np.full(count, -1, np.int64)
    positions[codes] = np.arange(len(codes))
    return pa.array(positions, mask=positions < 0)


def _runs(codes: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the runs of equal codes: the code of each run, the starts, and the end of the last."""
    starts = np.flatnonzero(np.diff(codes, prepend=-1)) if len(codes) else np.empty(0, np.int64)
    return codes[starts], np.append(starts, len(codes))


def _lists(values: pa.Array, codes: Int64Array, count: int) -> pa.Array:
    whose, offsets = _runs(codes)
    lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)
    return lists.take(_positions(whose, count))


def _maps(keys: pa.Array, values: pa.Array, codes: Int64Array, count: int) -> pa.Array:
    whose, offsets = _runs(codes)
    maps = pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), keys, values)
    return maps.take(_positions(whose, count))
