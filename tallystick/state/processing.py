"""What a keyed step's function is to the task that runs it, whichever way the user wrote it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import pyarrow as pa

from tallystick.state.handles import StateField
from tallystick.state.key_bytes import KeyCodec
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.view import EpochTime, Overlay

NO_TIME = "None"
PROCESSING_TIME = "ProcessingTime"
EVENT_TIME = "EventTime"
TIME_MODES = (NO_TIME, PROCESSING_TIME, EVENT_TIME)
"""Spark's names (`transformWithState`, timeMode)."""


COLUMNS = "columns"
"""The kind of the one state of a vectorised function: what it keeps per key, as columns."""
DELETED = "deleted"
"""The kind of a declaration that a state, should it be held, is to be dropped."""


@dataclass(frozen=True, slots=True)
class Declared:
    """A state that a function uses, as `StateField` has it, before it got an id."""

    name: str
    kind: str
    key_schema: str
    value_schema: str
    ttl_ms: int = 0


@dataclass(frozen=True)
class Work:
    """One task's part of one epoch.

    Args:
        rows: all rows of its key groups, in their order of arrival; the key's columns among them.
        key: of the step.
        max_parallelism: of the step.
        groups: those of this task.
        fields: by name; what `Processor.declared` named, with ids.
        overlay: where state is read and written.
        time: the epoch's.
        is_first: the step has no committed state yet: what it starts with is to be put in.
    """

    rows: pa.RecordBatch
    key: KeyCodec
    max_parallelism: int
    groups: KeyGroupRange
    fields: Mapping[str, StateField]
    overlay: Overlay
    time: EpochTime
    is_first: bool = False


class Processor(Protocol):
    """The function of a keyed step; made by the driver, sent to each task."""

    @property
    def time_mode(self) -> str:
        """One of `TIME_MODES`."""
        ...

    @property
    def has_timers(self) -> bool:
        """Whether epochs without rows may have something to do."""
        ...

    @property
    def reads(self) -> frozenset[str] | None:
        """The columns that it reads besides the key's: no others travel to it; None: all do."""
        ...

    def declared(self, key: KeyCodec) -> tuple[Declared, ...]:
        """The states that it uses; asked on the driver, before anything starts.

        Raises:
            OptionError: they cannot be as declared.
        """
        ...

    def output(self, key: pa.Schema, rows: pa.Schema) -> pa.Schema | None:
        """The columns that it puts out; None: it cannot tell, so its user has to.

        Args:
            key: the key's columns.
            rows: all columns of the rows that come to the step.
        """
        ...

    def run(self, work: Work) -> Iterator[pa.RecordBatch]:
        """Process the rows, then the timers that are due; state goes into the overlay.

        The overlay is complete when the iterator is exhausted.
        """
        ...


@runtime_checkable
class Starting(Protocol):
    """A processor that carries what its state is to start with."""

    def started(self) -> Processor:
        """The same for later epochs, without it: all of it would travel with each task."""
        ...
