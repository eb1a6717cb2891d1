"""The interface of a keyed step's function to the task, however the user wrote the function."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tallystick.errors import OptionError, RecordError
from tallystick.state.catalog import StateField
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.keys import KeyCodec
from tallystick.state.meaning import Meaning
from tallystick.state.overlay import EpochTime, Overlay

NO_TIME = "None"
PROCESSING_TIME = "ProcessingTime"
EVENT_TIME = "EventTime"
TIME_MODES = (NO_TIME, PROCESSING_TIME, EVENT_TIME)
"""Spark's names (`transformWithState`, timeMode)."""


COLUMNS = "columns"
"""The kind of the one state of a vectorised function: columns per key."""
PANES = "panes"
"""The kind of a state of windows: columns per key and pane, whose start follows the key. The
declaration's key schema is the panes in words: with other panes, the state would mean nothing."""
ROWS = "rows"
"""The kind of a state of rows, several per key; its schema is that of their columns."""
TABLE = "table"
"""The kind of the one state of a broadcast table: the columns beside its key."""
ELEMENTS = "elements"
"""The kind of a list state: the columns of its elements, which lie by task and place."""
VALUE, LIST, MAP = OWN_KINDS = ("value", "list", "map")
"""The kinds of states that only functions of a user's own have; see `pyspark.values`."""
DELETED = "deleted"
"""The kind of a declaration that a state, should it be held, is to be dropped."""


@dataclass(frozen=True, slots=True)
class StateDeclaration:
    """A state as a function declares it: a `StateField` that has no id yet."""

    name: str
    kind: str
    key_schema: str
    value_schema: str
    ttl_ms: int = 0
    meaning: Meaning = ()


@dataclass(frozen=True)
class Work:
    """The work of a task in an epoch: rows, key groups, and access to state.

    Args:
        rows: all rows of the task's key groups, in order of arrival, with the key's columns.
        key: of the step.
        max_parallelism: of the step.
        groups: the key groups of the task.
        fields: the states of `Processor.declared` by name, with ids.
        overlay: for reading and writing state.
        time: of the epoch.
        is_first: the step has no committed state yet: the initial state is to be put in.
        event_time: the column of the rows with their event time; None: the rows have none.
        late: counts of the rows that a processor with `JudgesLateness` drops as late, to be summed.
    """

    rows: pa.RecordBatch
    key: KeyCodec
    max_parallelism: int
    groups: KeyGroupRange
    fields: Mapping[str, StateField]
    overlay: Overlay
    time: EpochTime
    is_first: bool = False
    event_time: str | None = None
    late: list[int] = field(default_factory=list)


class Processor(Protocol):
    """The function of a keyed step; made by the driver, sent to each task."""

    @property
    def time_mode(self) -> str:
        """One of `TIME_MODES`."""
        ...

    @property
    def has_timers(self) -> bool:
        """True if epochs without rows may have something to do."""
        ...

    @property
    def reads(self) -> frozenset[str] | None:
        """The columns to read besides the key's; no others travel to the step; None: all do."""
        ...

    def declared(self, key: KeyCodec) -> tuple[StateDeclaration, ...]:
        """Return the states that the function uses; called on the driver, before anything starts.

        Raises:
            OptionError: a state cannot be as declared.
        """
        ...

    def output(self, key: pa.Schema, rows: pa.Schema) -> pa.Schema | None:
        """Return the columns of the output; None: unknown, so the user of the function states them.

        Args:
            key: the key's columns.
            rows: all columns of the rows that come to the step.
        """
        ...

    def run(self, work: Work) -> "Iterator[pa.RecordBatch | SideRows]":
        """Process the rows, then the timers that are due; state goes into the overlay.

        The overlay is complete when the iterator is exhausted.
        """
        ...


@runtime_checkable
class HasOutputs(Protocol):
    """A processor with side outputs, whose rows are `SideRows`."""

    def outputs(self, key: pa.Schema, rows: pa.Schema) -> Mapping[str, str | pa.Schema]:
        """Return the columns of each side output, as DDL or as a schema.

        Args:
            key: the key's columns.
            rows: all columns of the rows that come to the step.
        """
        ...


@runtime_checkable
class HasInitialState(Protocol):
    """A processor that carries the initial state of a step."""

    def started(self) -> Processor:
        """Return the processor for later epochs, without the initial state for tasks to carry."""
        ...


@runtime_checkable
class JudgesLateness(Protocol):
    """A processor that also gets rows behind the watermark, and judges their lateness itself.

    Other processors with time mode `EventTime` never see a row at or before the watermark.
    """

    judges_lateness: bool


@runtime_checkable
class PutsOutTimes(Protocol):
    """A processor that bounds the lag of event times in the output behind the watermark."""

    def lags_ms(self, key: Collection[str], times: Mapping[str, int]) -> Mapping[str, int] | None:
        """Return the greatest lag of each time column of the output, in ms; None: nobody knows.

        The lag is behind the watermark at which the step's timers fire; for a step without event
        time, behind the watermark that its rows are ahead of. A column without a lag may hold any
        time.

        Args:
            key: the key's columns.
            times: the greatest lag of each time column of the step's rows; columns of named inputs
                are `input.column`.
        """
        ...


def late_output(processor: Processor) -> str | None:
    """Return the name of a processor's output for late rows; None: late rows are dropped."""
    clock = getattr(processor, "clock", None)
    name = getattr(clock, "late", DROP)
    return None if name == DROP else str(name)


DROP = "drop"
"""The fate of late rows, where they have no output."""
YEARS_US = (-62_135_510_400_000_000, 253_402_128_000_000_000)
"""The event times that there may be, of rows and of producers' promises: a day within the years
1 to 9999, beyond which time zones and Python's dates know nothing."""
_US_PER_MS = 1000
_PER_SECOND = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}


def check_event_times(column: pa.Array, what: str) -> None:
    """Refuse event times that no event can have had.

    Args:
        column: timestamps, or milliseconds since 1970 as whole numbers.
        what: the name of the column, for the message.

    Raises:
        RecordError: a time is not within the years 1 to 9999: the watermark would stay there, and
            every later row would be late.
    """
    unit = column.type.unit if pa.types.is_timestamp(column.type) else "ms"
    first, last = (bound * _PER_SECOND[unit] // 1_000_000 for bound in YEARS_US)
    ends = pc.min_max(column.cast(pa.int64())).as_py()
    for time in ends.values():
        if time is not None and not first <= time <= last:
            hint = "" if pa.types.is_timestamp(column.type) else "Is it in micro- or nanoseconds? "
            raise RecordError(
                f"{what}: {time} {unit} since 1970 is not within the years 1 to 9999, and no event "
                f"time. {hint}Correct it in a map_batches before, make it null, or filter it out "
                f"there; process(event_time_max_ahead=…) leaves out rows from the future."
            )


def event_times(column: pa.Array, what: str) -> NDArray[np.int64]:
    """Return event times in microseconds, rounded down.

    Args:
        column: timestamps, or milliseconds since 1970 as whole numbers.
        what: the name of the column, for messages.

    Raises:
        RecordError: a row has none, or one that no event can have had.
        OptionError: the column is of another type.
    """
    if column.null_count:
        raise RecordError(
            f"{what}: {column.null_count} rows have no time: give them one, or filter them out in "
            f"a map_batches before."
        )
    is_timestamp = pa.types.is_timestamp(column.type)
    if not (is_timestamp or pa.types.is_signed_integer(column.type)):
        raise OptionError(f"{what} is {column.type}, expected timestamps or milliseconds as bigint")
    check_event_times(column, what)
    if is_timestamp:
        if column.type.unit == "ns":
            column = pc.floor_temporal(column, unit="microsecond")
        micros = column.cast(pa.timestamp("us", tz=column.type.tz)).cast(pa.int64())
        times: NDArray[np.int64] = micros.to_numpy()
        return times
    millis: NDArray[np.int64] = column.cast(pa.int64()).to_numpy()
    return millis * _US_PER_MS


@dataclass(frozen=True)
class SideRows:
    """Rows of a processor for a side output.

    Args:
        output: the name of the output, as `write` has it.
        rows: with the columns of the output.
    """

    output: str
    rows: pa.RecordBatch
