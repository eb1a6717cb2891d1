"""A `StatefulProcessor` as the function of a keyed step.

Order of an epoch, as in Spark: initial state and rows key by key, then all timers that are due,
then what has expired is removed. Source: PySpark's stateful_processor_util.py, and what Spark does.
"""

import copy
from collections.abc import Iterator
from functools import cached_property
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from tallystick.errors import OptionError
from tallystick.processors.handle import Declaring, Handle
from tallystick.processors.place import Place
from tallystick.processors.row_task import RowTask
from tallystick.processors.schemas import arrow_schema_of
from tallystick.state.key_bytes import KeyCodec
from tallystick.state.key_groups import key_groups_of
from tallystick.state.processing import NO_TIME, TIME_MODES, Declared, Work
from tallystick.state.view import one_batch

TIME_ZONE = "spark.sql.session.timeZone"
ROW, PANDAS = "row", "pandas"

InitialState: TypeAlias = DataFrame | pa.Table | pa.RecordBatch


class RowProcessor:
    """A `Processor` (state/processing.py) that calls a `StatefulProcessor`; see `row_processor`."""

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
        """All columns: its function sees whole rows."""
        return

    @property
    def has_timers(self) -> bool:
        """Whether epochs without rows may have something to do: timers, or state that expires."""
        return self._time_mode != NO_TIME

    @cached_property
    def output_schema(self) -> pa.Schema:
        """The columns that `run` yields; nested DDL needs the driver's Spark session."""
        return arrow_schema_of(self._output)

    def declared(self, key: KeyCodec) -> tuple[Declared, ...]:
        """Run `init` once, on a copy, as Spark does on its driver, and note what it declares.

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
        declaring = Declaring()
        processor = _copy_of(self._processor)
        processor.init(Handle(declaring, Place(None, 0), None, self._time_mode))
        processor.close()
        return tuple(declaring.declared)

    def output(self, key: pa.Schema, rows: pa.Schema) -> None:
        """Nobody knows what a `StatefulProcessor` returns before it does: `process` is told."""
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
        """The same without the initial state, which was put in by the first epoch."""
        if self._initial_state is None:
            return self
        later = copy.copy(self)
        later._initial_state = None
        return later

    def _initial_rows(self, work: Work) -> pa.RecordBatch | None:
        """The initial state of this task's key groups, if this is the epoch that puts it in."""
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
    """The rows of a task's key groups."""
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
        output: the columns of the rows that it returns.
        rows: what it takes and returns: `row` as for `transformWithState`, `pandas` as for
            `transformWithStateInPandas`.
        time_mode: one of `TIME_MODES`; for `EventTime`, rows that are too late have been dropped.
        initial_state: rows for `handleInitialState`, with the key's columns; they travel with the
            processor. A DataFrame is collected now.
        timezone: of moments in rows; by default the session's, or what it would be in one.

    Raises:
        OptionError: an argument cannot be.
    """
    if rows not in (ROW, PANDAS):
        raise OptionError(f"rows={rows!r}: expected {ROW!r} or {PANDAS!r}")
    modes = {mode.lower(): mode for mode in TIME_MODES}  # Spark does not mind the case either
    if time_mode.lower() not in modes:
        raise OptionError(f"time_mode={time_mode!r}: expected one of {', '.join(TIME_MODES)}")
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
    """The time zone of the session; that of one made now, if there is only a context."""
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
    found = initial_state.toArrow()
    assert isinstance(found, pa.Table), type(found)
    return found
