"""A function of columns as a `Processor`: it is called once per epoch, with all keys at once.

A key's state is one entry: its columns, and the key's timer as one more where the function has
timers. A timer has a second entry, by time: `key group | 0xFC | time | key`.

Invariant: each key is written at most once in an epoch, after its last call; what did not change
is not written.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tallystick.arguments import checked, not_one_of
from tallystick.errors import BrokenInvariantError, OptionError
from tallystick.state.entries import (
    TIMERS_BY_TIME,
    Keys,
    distinct_keys,
    due_keys,
    keys_of,
    time_keys,
)
from tallystick.state.functions.inputs import CarriedColumns
from tallystick.state.functions.keyed_batch import KeyedBatch, OwnUpdates, PerKey, Update
from tallystick.state.functions.processing import (
    COLUMNS,
    EVENT_TIME,
    NO_TIME,
    PROCESSING_TIME,
    TIME_MODES,
    Processor,
    SideRows,
    StateDeclaration,
    Work,
)
from tallystick.state.keys import KeyCodec
from tallystick.state.meaning import OWN_FUNCTION, Meaning, meaning_of
from tallystick.state.row_codec import ColumnsCodec, changed_rows
from tallystick.state.schema import schema_of, text_of

STATE = "state"
TIMER = "$timer"
"""The column with a key's timer, after the columns of the function."""
_OWN = meaning_of(OWN_FUNCTION)

Function = Callable[[KeyedBatch], Update]
Output = Callable[[pa.Schema, pa.Schema], pa.Schema]
"""Maps the columns of the key and of the rows to the columns of the output."""

Lags = Callable[[Collection[str], Mapping[str, int]], Mapping[str, int]]
"""See `PutsOutTimes.lags_ms`."""


@checked
def vectorised(
    function: Function,
    *,
    state: str | pa.Schema,
    time_mode: str = NO_TIME,
    reads: Collection[str] | None = None,
    output: Output | None = None,
    outputs: Mapping[str, str | pa.Schema] | None = None,
) -> "VectorisedFunction":
    """Process all keys of an epoch with one call.

    Args:
        function: gets a `KeyedBatch`, returns an `Update`. With timers it is called a second time
            for the keys that are due, without rows.
        state: its columns, as DDL or as a schema; "" if there are none.
        time_mode: with `ProcessingTime` or `EventTime` the function has timers, one per key.
        reads: the columns of the rows that the function reads besides the key's; no others travel
            to the step. None: all columns.
        output: from the schemas of the key and of the rows to the schema of the output. None:
            `process` needs `output=`.
        outputs: the columns of each side output by name, as DDL or as a schema. The name is that of
            a sink in `Pipeline.write`, and of rows in `Update.outputs`.

    Raises:
        OptionError: the state cannot be stored, or there is no such time mode.
    """
    schema = schema_of(state, "state")
    return VectorisedFunction(
        OwnUpdates(function), schema, time_mode, reads, output, outputs=outputs
    )


def beside_key(key: pa.Schema, kept: Iterable[pa.Field], values: Iterable[pa.Field]) -> pa.Schema:
    """Return the columns of a function's output: the key's, some of the rows', and its own.

    Raises:
        OptionError: one of the function's own columns has the name of another column.
    """
    columns = {field.name: field.type for field in (*key, *kept)}
    for field in values:
        if field.name in columns:
            whose = "the key has" if field.name in key.names else "the rows' columns to keep have"
            raise OptionError(
                f"the function puts out a column {field.name!r}, and {whose} one of this name too: "
                f"give one of them another name"
            )
        columns[field.name] = field.type
    return pa.schema(columns)


class VectorisedFunction:
    """The processor of `vectorised`.

    Args:
        event_time: the column whose times the function uses: the step's event time, no other.
            None: the function uses no times.
        meaning: of the state; the meaning of a user's function is in the user's code.
        lags: see `PutsOutTimes.lags_ms`; None: nobody knows.
        ttl_ms: the time after which the function forgets a key, by the key's timer; 0: it does not.
    """

    def __init__(
        self,
        function: Function,
        schema: pa.Schema,
        time_mode: str,
        reads: Collection[str] | None = None,
        output: Output | None = None,
        event_time: str | None = None,
        outputs: Mapping[str, str | pa.Schema] | None = None,
        meaning: Meaning = _OWN,
        lags: Lags | None = None,
        ttl_ms: int = 0,
    ) -> None:
        if time_mode not in TIME_MODES:
            raise not_one_of("time_mode", time_mode, TIME_MODES, of="vectorised")
        if TIMER in schema.names:
            raise OptionError(f"state: the name {TIMER!r} is taken by the step itself; rename it")
        self._function = function
        self._output = output
        if not isinstance(outputs, Mapping | None):
            raise OptionError(
                f"vectorised(outputs={outputs!r}): expected columns by the name of their output, "
                f"{{'alerts': 'user string, why string'}}"
            )
        self._outputs = outputs or {}
        self._meaning = meaning
        self._lags = lags
        self._ttl_ms = ttl_ms
        self.event_time = event_time
        self._reads = None if reads is None else frozenset(reads)
        self._time_mode = time_mode
        self._schema = pa.schema([pa.field(field.name, field.type) for field in schema])
        stored = [*self._schema, pa.field(TIMER, pa.int64())] if self.has_timers else self._schema
        self._codec = ColumnsCodec(pa.schema(stored)) if len(stored) else None

    @property
    def time_mode(self) -> str:
        """The time mode as given."""
        return self._time_mode

    @property
    def has_timers(self) -> bool:
        """True if epochs without rows may have something to do."""
        return self._time_mode != NO_TIME

    @property
    def reads(self) -> frozenset[str] | None:
        """The columns to read, as given."""
        return self._reads

    def declared(self, key: KeyCodec) -> tuple[StateDeclaration, ...]:
        """Return one state of kind `columns`; none for a function without."""
        if self._codec is None:
            return ()
        columns = text_of(self._codec.schema)
        return (StateDeclaration(STATE, COLUMNS, "", columns, self._ttl_ms, self._meaning),)

    def output(self, key: pa.Schema, rows: pa.Schema) -> pa.Schema | None:
        """Return the output's schema as given."""
        return None if self._output is None else self._output(key, rows)

    def outputs(self, key: pa.Schema, rows: pa.Schema) -> Mapping[str, str | pa.Schema]:
        """Return the side outputs as given."""
        return self._outputs

    def lags_ms(self, key: Collection[str], times: Mapping[str, int]) -> Mapping[str, int] | None:
        """See `PutsOutTimes`."""
        return None if self._lags is None else self._lags(key, times)

    def run(self, work: Work) -> Iterator[pa.RecordBatch | SideRows]:
        """Call the function for the rows, then for the due keys; write the changed state."""
        states = None
        if work.rows.num_rows:
            codes, keys = distinct_keys(work.rows, work.key, work.max_parallelism, self._id(work))
            states = self._read(work, keys)
            states, output = self._call(work, states, work.rows, codes, is_due=False)
            yield from output
        until_ms = self._until_ms(work)
        if until_ms is not None:
            states, due = self._split_due(work, states, until_ms)
            if due is not None:
                nobody = np.zeros(0, np.int32)
                due, output = self._call(work, due, work.rows[:0], nobody, is_due=True)
                yield from output
                self._write(work, due)
        if states is not None:
            self._write(work, states)

    def _id(self, work: Work) -> int:
        return work.fields[STATE].state_id if self._codec else 0

    def _until_ms(self, work: Work) -> int | None:
        """Return the moment up to which timers are due; None: no timer can be due."""
        if self._time_mode == PROCESSING_TIME:
            return work.time.timestamp_ms
        return work.time.event_timers_until_ms if self._time_mode == EVENT_TIME else None

    def _read(self, work: Work, keys: Keys) -> "_KeyStates":
        if self._codec is None:
            empty = pa.nulls(len(keys.entries), pa.binary())
            none = pa.RecordBatch.from_struct_array(
                pa.array([{}] * len(keys.entries), pa.struct([]))
            )
            return _KeyStates(keys, empty, none, np.zeros(len(keys.entries), np.bool_), None, None)
        values = work.overlay.get_many(keys.entries)
        stored = self._codec.decode(values)
        known = values.is_valid().to_numpy(zero_copy_only=False)
        if not self.has_timers:
            return _KeyStates(keys, values, stored, known, None, None)
        timers = stored.column(TIMER)
        return _KeyStates(keys, values, stored.select(self._schema.names), known, timers, timers)

    def _call(
        self,
        work: Work,
        states: "_KeyStates",
        rows: pa.RecordBatch,
        codes: NDArray[np.int32],
        *,
        is_due: bool,
    ) -> tuple["_KeyStates", Iterator[pa.RecordBatch | SideRows]]:
        """Call the function for keys; return the keys' new state, and the output."""
        batch = KeyedBatch(
            rows,
            codes,
            states.keys.columns,
            states.state,
            states.known,
            work.time,
            states.timers,
            is_due,
        )
        update = self._function(batch)
        if not isinstance(update, Update):
            raise _no_update(self._function, update)
        state = states.state if update.state is None else self._checked(update.state, len(batch))
        timers = pa.nulls(len(batch), pa.int64()) if is_due else states.timers
        if update.timers is not None:
            timers = self._checked_timers(update.timers, len(batch))
        return replace(states, state=state, timers=timers), _put_out(update)

    def _checked(self, state: pa.RecordBatch | Mapping[str, PerKey], count: int) -> pa.RecordBatch:
        """Check the state of an update, and cast the columns to the declared types."""
        names = state.schema.names if isinstance(state, pa.RecordBatch) else list(state)
        if sorted(names) != sorted(self._schema.names):
            raise OptionError(
                f"Update.state has the columns {sorted(names)}: the function's state was declared "
                f"with {sorted(self._schema.names)}. Return all of them; what stays as it is, "
                f"from batch.state."
            )
        columns = [as_column(state[field.name], field, count) for field in self._schema]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _checked_timers(self, timers: PerKey, count: int) -> pa.Array:
        if not self.has_timers:
            raise OptionError(
                "Update.timers is set, but the step was made without timers: give vectorised() a "
                "time_mode of 'ProcessingTime' or 'EventTime'."
            )
        return as_column(timers, pa.field("timers", pa.int64()), count)

    def _split_due(
        self, work: Work, states: "_KeyStates | None", until_ms: int
    ) -> tuple["_KeyStates | None", "_KeyStates | None"]:
        """Return the keys of the rows without due timers, and all keys with due timers."""
        entries = due_keys(work.overlay, work.groups, until_ms, self._id(work))
        if states is None:
            return None, self._read(work, keys_of(entries, work.key)) if len(entries) else None
        # A key with rows may have another timer by now than the committed one.
        if len(entries):
            entries = entries.filter(pc.invert(pc.is_in(entries, states.keys.entries)))
        is_due = pc.fill_null(pc.less_equal(states.timers, until_ms), False)
        due = replace(states.filter(is_due), known=np.ones(pc.sum(is_due).as_py() or 0, np.bool_))
        if len(entries):
            due = due.merged_with(self._read(work, keys_of(entries, work.key)))
        return states.filter(pc.invert(is_due)), due if len(due.keys.entries) else None

    def _write(self, work: Work, states: "_KeyStates") -> None:
        if self._codec is None:
            return
        stored = states.state
        if states.timers is not None:
            arrays = [*stored.columns, states.timers]
            stored = pa.RecordBatch.from_arrays(arrays, schema=self._codec.schema)
        after = self._codec.encode(stored)
        changed = pa.array(changed_rows(states.before, after))
        work.overlay.put_many(states.keys.entries.filter(changed), after.filter(changed))
        if states.timers is None or states.timers_before is None:
            return
        gone = pc.and_not_kleene(states.timers_before.is_valid(), _same(states))
        new = pc.and_not_kleene(states.timers.is_valid(), _same(states))
        for which, timers, value in ((gone, states.timers_before, None), (new, states.timers, b"")):
            entries = time_keys(
                states.keys.entries.filter(which), timers.filter(which), TIMERS_BY_TIME
            )
            values = pa.array([value], pa.binary()).take(pa.array(np.zeros(len(entries), np.int8)))
            work.overlay.put_many(entries, values)


def _no_update(function: object, returned: object) -> OptionError:
    function = getattr(function, "function", function)  # as the user wrote it
    name = getattr(function, "__name__", type(function).__name__)
    what = "None" if returned is None else f"a {type(returned).__name__}"
    return OptionError(
        f"{name} returned {what}: expected ts.Update(rows to put out, new state); both may "
        f"be left out{'. Has it no return?' * (returned is None)}"
    )


def _put_out(update: Update) -> Iterator[pa.RecordBatch | SideRows]:
    """Return the rows of an update: of the main output, then of the side outputs."""
    if not isinstance(update.outputs, Mapping):
        raise OptionError(
            f"Update.outputs is {type(update.outputs).__name__}: expected rows by the name of "
            f"their output"
        )
    given = {"output": update.output} | {
        f"outputs[{name!r}]": rows for name, rows in update.outputs.items()
    }
    for name, rows in given.items():
        if not isinstance(rows, pa.RecordBatch) and (rows is not None or name != "output"):
            raise OptionError(
                f"Update.{name} is a {type(rows).__name__}: expected a pyarrow.RecordBatch, as "
                f"pa.RecordBatch.from_pandas(frame, preserve_index=False) makes of pandas'"
            )
    main = [] if update.output is None or not update.output.num_rows else [update.output]
    return iter([*main, *(SideRows(name, rows) for name, rows in update.outputs.items())])


@dataclass(frozen=True)
class _KeyStates:
    """Some keys with their committed and their present state and timers.

    Args:
        keys: the distinct keys.
        before: the committed values.
        state, timers: as they are now.
        known: whether a key has state.
        timers_before: the committed timers.
    """

    keys: Keys
    before: pa.BinaryArray
    state: pa.RecordBatch
    known: NDArray[np.bool_]
    timers: pa.Int64Array | None
    timers_before: pa.Int64Array | None

    def filter(self, mask: pa.BooleanArray) -> "_KeyStates":
        """Return some of the keys."""
        assert self.timers is not None
        assert self.timers_before is not None
        return _KeyStates(
            Keys(self.keys.columns.filter(mask), self.keys.entries.filter(mask)),
            self.before.filter(mask),
            self.state.filter(mask),
            self.known[mask.to_numpy(zero_copy_only=False)],
            self.timers.filter(mask),
            self.timers_before.filter(mask),
        )

    def merged_with(self, other: "_KeyStates") -> "_KeyStates":
        """Return these keys and others, in the order of their entries."""
        entries = pa.concat_arrays([self.keys.entries, other.keys.entries])
        order = pc.sort_indices(entries)
        known = np.concatenate([self.known, other.known])
        return _KeyStates(
            Keys(_together(self.keys.columns, other.keys.columns, order), entries.take(order)),
            pa.concat_arrays([self.before, other.before]).take(order),
            _together(self.state, other.state, order),
            known[order.to_numpy()],
            pa.concat_arrays([self.timers, other.timers]).take(order),
            pa.concat_arrays([self.timers_before, other.timers_before]).take(order),
        )


def _same(states: _KeyStates) -> pa.BooleanArray:
    """Return a mask of the timers that equal the committed timers."""
    return pc.fill_null(pc.equal(states.timers, states.timers_before), False)


def _together(one: pa.RecordBatch, two: pa.RecordBatch, order: pa.Array) -> pa.RecordBatch:
    pairs = zip(one.columns, two.columns, strict=True)
    columns = [pa.concat_arrays(pair).take(order) for pair in pairs]
    return pa.RecordBatch.from_arrays(columns, schema=one.schema)


def as_column(values: Any, field: pa.Field, count: int) -> pa.Array:
    """Convert values to a column of the declared type.

    Raises:
        OptionError: there are not `count` values, or the type does not hold them.
    """
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    try:
        column = values if isinstance(values, pa.Array) else pa.array(values, from_pandas=False)
        column = column if column.type == field.type else column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, TypeError) as error:
        raise OptionError(
            f"Update: column {field.name!r} does not fit its type {field.type}: expected one value "
            f"per key, null for a key that is to have none, and found {type(values).__name__}: "
            f"{error}"
        ) from error
    if len(column) != count:
        raise OptionError(
            f"Update: column {field.name!r} has {len(column)} values, but the batch has {count} "
            f"keys: return one per key, in the order of batch.keys."
        )
    return column


@dataclass(frozen=True)
class ByColumns:
    """A function that is made once the types of the rows' columns are known.

    Args:
        make: from the columns of the rows to the function.
        reads: as `Processor.reads`.
        carried: the columns that the function needs of named inputs; None: all columns.
        aggregated: the columns of its aggregates, where it reads all columns.
    """

    make: Callable[[pa.Schema], Processor]
    reads: frozenset[str] | None
    time_mode: str = NO_TIME
    has_timers: bool = False
    carried: CarriedColumns | None = None
    aggregated: frozenset[str] = frozenset()

    def declared(self, key: KeyCodec) -> tuple[StateDeclaration, ...]:
        """Raise: the states are not known yet."""
        raise BrokenInvariantError("a function by columns was not made before it was asked")

    def output(self, key: pa.Schema, rows: pa.Schema) -> pa.Schema | None:
        """See `Processor.output`."""
        return self.make(rows).output(key, rows)

    def run(self, work: Work) -> Iterator[pa.RecordBatch | SideRows]:
        """See `Processor.run`."""
        return self.make(work.rows.schema).run(work)
