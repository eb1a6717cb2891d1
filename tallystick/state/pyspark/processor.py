"""A `StatefulProcessor` as the function of a keyed step.

Order of an epoch, as in Spark: initial state and rows key by key, then all timers that are due,
then what has expired is removed. Source: PySpark's stateful_processor_util.py, and what Spark does.
"""

import copy
import heapq
import itertools
from collections.abc import Iterable, Iterator
from functools import cached_property
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from pyspark import SparkContext
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    TimerValues,
)
from pyspark.sql.types import StructType

from tallystick.arguments import not_one_of
from tallystick.codec.own_memory import own
from tallystick.errors import OptionError, StateError
from tallystick.state.functions.processing import (
    EVENT_TIME,
    LIST,
    NO_TIME,
    PROCESSING_TIME,
    TIME_MODES,
    VALUE,
    StateDeclaration,
    Work,
)
from tallystick.state.key_groups import key_groups_of
from tallystick.state.keys import KeyCodec, entry_keys
from tallystick.state.overlay import one_batch
from tallystick.state.pyspark.current_key import CurrentKey, Timers, expiry_of
from tallystick.state.pyspark.rows import (
    KeyedRows,
    are_mutable,
    as_frames,
    as_rows,
    frame_to_batch,
    in_timezone,
    key_tuples,
    own_row,
    row_maker,
    rows_to_batch,
    sort_by_key,
)
from tallystick.state.pyspark.states import DeclaredFields, FieldDeclarations, Handle
from tallystick.state.pyspark.values import arrow_schema_of

Visit = tuple[bytes, bytes, tuple[Any, ...], Iterator[Any]]
"""A key's bytes, its group's, the key as the user sees it, and its rows or frames."""
OUTPUT_ROWS = 1 << 14
TIMER_CHUNK = 1 << 14
EXPIRED_MAX = 100_000
"""At most so many entries of a task are removed in an epoch, more if it has many rows."""


class RowTask:
    """The run of a `StatefulProcessor` on a task's rows in an epoch.

    Args:
        processor: of this run alone.
        work: of the task.
        output: the columns of the returned rows.
        is_pandas: whether the processor takes and returns pandas frames.
        time_mode: one of `TIME_MODES`.
        timezone: of moments in rows.
    """

    def __init__(
        self,
        processor: StatefulProcessor,
        work: Work,
        output: pa.Schema,
        is_pandas: bool,
        time_mode: str,
        timezone: str,
    ) -> None:
        self._processor, self._work, self._output = processor, work, output
        self._is_pandas, self._time_mode, self._timezone = is_pandas, time_mode, timezone
        now, watermark = work.time.timestamp_ms, work.time.watermark_ms or 0
        self._times = {
            NO_TIME: TimerValues(-1, -1),
            PROCESSING_TIME: TimerValues(now, 0),
            EVENT_TIME: TimerValues(now, watermark),
        }[time_mode]
        self._due_until = (work.time.event_timers_until_ms or 0) if time_mode == EVENT_TIME else now
        self._current = CurrentKey(work.overlay, now)
        self._timers = Timers(work.overlay, self._current)
        self._single = [f for f in work.fields.values() if f.kind in (VALUE, LIST)]
        self._returned: list[Row] = []
        self._are_mutable = not is_pandas and are_mutable(output)

    def run(self, initial: pa.RecordBatch | None) -> Iterator[pa.RecordBatch]:
        """Run all keys in order; the overlay is complete at the end.

        Args:
            initial: the rows of the initial state, in the first epoch.
        """
        work = self._work
        handle = Handle(
            DeclaredFields(work.fields.get), self._current, self._timers, self._time_mode
        )
        self._processor.init(handle)
        handle.close_init()
        keyed = self._sorted(work.rows)
        if initial is None:
            yield from self._rows(keyed)
        else:
            yield from self._initial_and_rows(self._sorted(initial), keyed)
        if self._time_mode != NO_TIME:
            yield from self._fire()
        yield from self._batches_left()
        self._current.leave()
        if self._time_mode == PROCESSING_TIME:
            self._expire()
        self._processor.close()

    def _rows(self, keyed: KeyedRows) -> Iterator[pa.RecordBatch]:
        """Call `handleInputRows` for each key."""
        handle_rows, go_to, times = (
            self._processor.handleInputRows,
            self._current.go_to,
            self._times,
        )
        returned, is_pandas = self._returned, self._is_pandas
        for data, group, key, rows in self._visits(keyed):
            go_to(group, data)
            output = handle_rows(key, rows, times)
            if output is None:
                raise _returned_nothing()
            if is_pandas:
                yield from self._frames(output)
            else:
                returned.extend(map(own_row, output) if self._are_mutable else output)
                if len(returned) >= OUTPUT_ROWS:
                    yield from self._batches_left()

    def _initial_and_rows(self, initial: KeyedRows, keyed: KeyedRows) -> Iterator[pa.RecordBatch]:
        """Process each key's initial state before its rows."""
        both = heapq.merge(
            ((visit, False) for visit in self._visits(initial)),
            ((visit, True) for visit in self._visits(keyed)),
            key=lambda one: (one[0][0], one[1]),
        )
        for (data, group, key, rows), is_input in both:
            self._current.go_to(group, data)
            if is_input:
                yield from self._take(self._processor.handleInputRows(key, rows, self._times))
                continue
            for row in rows:
                self._processor.handleInitialState(key, row, self._times)

    def _visits(self, keyed: KeyedRows) -> Iterator[Visit]:
        """Yield each key with its rows, after reading the key's state ahead."""
        for first, stop in keyed.chunks():
            keys, groups = keyed.keys[first:stop], keyed.groups[first:stop]
            starts = keyed.starts[first : stop + 1]
            rows = keyed.rows.slice(int(starts[0]), int(starts[-1] - starts[0]))
            self._prefetch(keys, groups)
            yield from zip(
                keys.to_numpy(zero_copy_only=False).tolist(),
                np.ascontiguousarray(groups.astype(">u2")).view("V2").tolist(),
                key_tuples(keys, self._work.key, self._timezone),
                self._inputs(rows, (starts - starts[0]).tolist()),
                strict=True,
            )

    def _fire(self) -> Iterator[pa.RecordBatch]:
        """Call `handleExpiredTimer` for the timers due now; timers registered meanwhile wait."""
        due = self._timers.due(self._work.groups, self._due_until)
        make = row_maker(self._work.key.names)
        for start in range(0, len(due), TIMER_CHUNK):
            chunk = due[start : start + TIMER_CHUNK]
            data = pa.array([key for _, key, _ in chunk], pa.binary())
            groups = np.frombuffer(b"".join(group for *_, group in chunk), ">u2")
            self._prefetch(data, groups.astype(np.int32))
            # A Row here, a tuple elsewhere: as in Spark.
            keys = map(make, key_tuples(data, self._work.key, self._timezone))
            for key, (expiry, key_bytes, group) in zip(keys, chunk, strict=True):
                self._current.go_to(group, key_bytes)
                returned = self._processor.handleExpiredTimer(
                    key=key, timerValues=self._times, expiredTimerInfo=ExpiredTimerInfo(expiry)
                )
                yield from self._take(returned)
                # Also where the handler set it again: as in Spark.
                self._timers.delete(expiry)

    def _expire(self) -> None:
        """Remove expired entries; the index names candidates, an entry's own expiry decides.

        Entries from before a state had a time to live expire all at once: they are removed little
        by little, over the next epochs. Nobody reads them meanwhile.
        """
        assert self._current.expiries is not None, "an overlay has them"
        overlay, now = self._work.overlay, self._work.time.timestamp_ms
        most = max(EXPIRED_MAX, 4 * self._work.rows.num_rows)
        due = self._current.expiries.due(self._work.groups, now, most)
        for start in range(0, len(due), TIMER_CHUNK):
            chunk = due[start : start + TIMER_CHUNK]
            entries = [group + what for _, what, group in chunk]
            overlay.prefetch(pa.array(sorted(set(entries)), pa.binary()))
            for entry, (expiry, what, group) in zip(entries, chunk, strict=True):
                data = overlay.get(entry)
                if data is not None and expiry_of(data) <= now:
                    overlay.put(entry, None)
                self._current.expiries.remove(group, expiry, what)

    def _take(self, returned: Iterable[Any] | None) -> Iterator[pa.RecordBatch]:
        if returned is None:
            raise _returned_nothing()
        if self._is_pandas:
            yield from self._frames(returned)
        else:
            self._returned.extend(map(own_row, returned) if self._are_mutable else returned)
            if len(self._returned) >= OUTPUT_ROWS:
                yield from self._batches_left()

    def _frames(self, returned: Iterable[Any]) -> Iterator[pa.RecordBatch]:
        for frame in returned:
            if len(frame):
                yield own(frame_to_batch(frame, self._output, self._timezone))

    def _batches_left(self) -> Iterator[pa.RecordBatch]:
        if self._returned:
            yield rows_to_batch(self._returned, self._output)
            self._returned.clear()

    def _inputs(self, rows: pa.RecordBatch, starts: list[int]) -> Iterator[Iterator[Any]]:
        """Return an iterator per key: of the key's rows, or of a single frame with them."""
        rows = in_timezone(rows, self._timezone)
        spans = list(itertools.pairwise(starts))
        if self._is_pandas:
            return (iter([frame]) for frame in as_frames(rows, spans))
        python_rows = as_rows(rows)
        if len(python_rows) == len(spans):
            return (iter((row,)) for row in python_rows)
        return (iter(python_rows[start:stop]) for start, stop in spans)

    def _sorted(self, rows: pa.RecordBatch) -> KeyedRows:
        work = self._work
        return sort_by_key(rows, work.key, work.max_parallelism)

    def _prefetch(self, keys: pa.BinaryArray, groups: Any) -> None:
        """Read the entries that the processor will ask for, in the order of the store."""
        order = np.argsort(groups, kind="stable")
        sorted_keys, sorted_groups = keys.take(pa.array(order)), groups[order]
        wanted = [entry_keys(sorted_groups, field.state_id, sorted_keys) for field in self._single]
        self._work.overlay.prefetch(
            pa.concat_arrays(wanted) if wanted else pa.array([], pa.binary())
        )


def _returned_nothing() -> StateError:
    return StateError(
        "a processor returned None: expected an iterator of rows or frames. Use yield, or return "
        "iter([]) where there is nothing to put out"
    )


TIME_ZONE = "spark.sql.session.timeZone"
ROW, PANDAS = "row", "pandas"

InitialState: TypeAlias = DataFrame | pa.Table | pa.RecordBatch


class RowProcessor:
    """A `Processor` that calls a `StatefulProcessor`; see `row_processor`."""

    def __init__(
        self,
        processor: StatefulProcessor,
        output: StructType | pa.Schema | str,
        is_pandas: bool,
        time_mode: str,
        initial_state: pa.Table | None,
        timezone: str | None,
    ) -> None:
        self._processor = processor
        self._output = output
        self._is_pandas = is_pandas
        self._time_mode = time_mode
        self._initial_state = initial_state
        self._timezone = timezone

    @property
    def time_mode(self) -> str:
        """One of `TIME_MODES`."""
        return self._time_mode

    @property
    def reads(self) -> None:
        """None, for all columns: the processor sees whole rows."""
        return

    @property
    def has_timers(self) -> bool:
        """True if epochs without rows may have something to do: timers, or state that expires."""
        return self._time_mode != NO_TIME

    @cached_property
    def output_schema(self) -> pa.Schema:
        """The columns that `run` yields; nested DDL needs the driver's Spark session."""
        return arrow_schema_of(self._output)

    def declared(self, key: KeyCodec) -> tuple[StateDeclaration, ...]:
        """Run `init` once, on a copy, as Spark does on its driver; return the declared states.

        Also settles what only the driver knows: the output's columns, the session's time zone.

        Raises:
            OptionError: a state cannot be as declared, the processor cannot be copied, or the
                initial state lacks the key.
        """
        self._timezone = self._timezone or session_time_zone()
        assert self.output_schema is not None, "read here, where Spark is"
        if self._initial_state is not None:
            for batch in self._initial_state.slice(0, 1).to_batches():
                key.columns(batch)
        declaring = FieldDeclarations()
        processor = _copy_of(self._processor)
        processor.init(Handle(declaring, CurrentKey(None, 0), None, self._time_mode))
        processor.close()
        return tuple(declaring.declared)

    def output(self, key: pa.Schema, rows: pa.Schema) -> None:
        """Return None: a `StatefulProcessor`'s output columns are known to `process` alone."""
        return

    def run(self, work: Work) -> Iterator[pa.RecordBatch]:
        """Process the rows, then the timers that are due; state goes into the overlay."""
        # A copy: what a processor keeps in itself ends with the epoch, as in Spark's tasks, and
        # an epoch that runs again starts from the same.
        task = RowTask(
            _copy_of(self._processor),
            work,
            self.output_schema,
            self._is_pandas,
            self._time_mode,
            self._timezone or "UTC",
        )
        yield from task.run(self._initial_rows(work))

    def started(self) -> "RowProcessor":
        """Return the processor for later epochs, without the initial state."""
        if self._initial_state is None:
            return self
        later = copy.copy(self)
        later._initial_state = None
        return later

    def _initial_rows(self, work: Work) -> pa.RecordBatch | None:
        """Return the initial state of this task's key groups in the first epoch; None later."""
        if self._initial_state is None or not work.is_first:
            return None
        parts = [_within(work, batch) for batch in self._initial_state.to_batches()]
        rows = one_batch(
            pa.Table.from_batches(parts, self._initial_state.schema),
            f"initial state of key groups {work.groups.first} to {work.groups.last}",
            "start with a larger parallelism",
        )
        return rows if rows.num_rows else None


def _within(work: Work, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows of a task's key groups."""
    groups = key_groups_of(work.key.hash_codes(rows), work.max_parallelism)
    is_mine = (groups >= work.groups.first) & (groups <= work.groups.last)
    return rows.take(pa.array(np.flatnonzero(is_mine)))


def row_processor(
    processor: StatefulProcessor,
    *,
    output: StructType | pa.Schema | str,
    rows: str = ROW,
    time_mode: str = NO_TIME,
    initial_state: InitialState | None = None,
    timezone: str | None = None,
) -> RowProcessor:
    """Make a `StatefulProcessor` the function of a keyed step.

    Args:
        processor: as for `transformWithState`, unchanged.
        output: the columns of the rows that the processor returns.
        rows: the form of rows in and out: `row` as for `transformWithState`, `pandas` as for
            `transformWithStateInPandas`.
        time_mode: one of `TIME_MODES`; for `EventTime`, rows that are too late have been dropped.
        initial_state: rows for `handleInitialState`, with the key's columns; they travel with the
            processor. A DataFrame is collected now.
        timezone: of moments in rows; by default the time zone of the session, or of a new session.

    Raises:
        OptionError: an argument has a wrong type or value.
    """
    if rows not in (ROW, PANDAS):
        raise OptionError(f"rows={rows!r}: expected {ROW!r} or {PANDAS!r}")
    modes = {mode.lower(): mode for mode in TIME_MODES}  # Spark does not mind the case either
    if time_mode.lower() not in modes:
        raise not_one_of("time_mode", time_mode, TIME_MODES)
    return RowProcessor(
        processor,
        output,
        rows == PANDAS,
        modes[time_mode.lower()],
        None if initial_state is None else _collected(initial_state),
        timezone,
    )


def _copy_of(processor: StatefulProcessor) -> StatefulProcessor:
    modules = [one for one in vars(processor).values() if isinstance(one, ModuleType)]
    try:
        return copy.deepcopy(processor, {id(module): module for module in modules})
    except TypeError as error:  # what cannot be pickled cannot be copied either
        raise OptionError(
            f"a {type(processor).__name__} cannot be copied: {error}. Each epoch works on a copy "
            f"of the processor, which travels to its tasks: make locks, clients and the like in "
            f"init()"
        ) from error


def session_time_zone() -> str:
    """Return the time zone of the session, or, with a context alone, of a session made now."""
    context = SparkContext._active_spark_context
    if context is None:
        return "UTC"
    # Asking for the active session loads all of SQL: not where this process never made one.
    if SparkSession._instantiatedSession is not None:
        session = SparkSession.getActiveSession()
        return str(session.conf.get(TIME_ZONE)) if session else "UTC"
    jvm: Any = context._jvm
    return context.getConf().get(TIME_ZONE) or str(jvm.java.util.TimeZone.getDefault().getID())


def _collected(initial_state: Any) -> pa.Table:
    if isinstance(initial_state, pa.RecordBatch):
        return pa.Table.from_batches([initial_state])
    if isinstance(initial_state, pa.Table):
        return initial_state
    table = initial_state.toArrow()
    assert isinstance(table, pa.Table), type(table)
    return table
