"""The reading task: from splits of partitions to frames on their way."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.codec.formats import DEADLETTER, DROPMALFORMED, PERMISSIVE
from tallystick.codec.layout import Layout, LayoutRows, dead_letters
from tallystick.host import stopwatch as clock
from tallystick.host.origin import ALL_ROWS, Place, place_to_be_set
from tallystick.ports import Fetch
from tallystick.source.offsets import ONLY_INPUT, of_input
from tallystick.source.subscription import LossPolicy
from tallystick.tasks.event_times import TimesRead, not_after
from tallystick.tasks.frames import Frame, Note
from tallystick.tasks.outputs import DeadLetters
from tallystick.tasks.read import BatchFunction, Outlet, Sent, apply, send
from tallystick.values import SplitRange, TopicPartition

logger = logging.getLogger(__name__)

STRICT = LossPolicy()


@dataclass(frozen=True)
class ReadPlan:
    """The reading of splits by a task, and the functions that it applies in place.

    Args:
        fetch: reads them from Kafka.
        layout: makes rows of records.
        policy: for records that are gone.
        functions: what rows pass through.
        event_time: the column whose latest value of each partition the driver is told, as the
            keyed step has it; None: nobody asks.
        event_time_limit_ms: the latest event time that is believed in this epoch; None: any is.
        source_time: the column of the layout that is the event time as it is, where records beyond
            that limit are to be dead letters; None: they are not.
        input: the id of the pipeline's input.
    """

    fetch: Fetch
    layout: Layout
    policy: LossPolicy = STRICT
    functions: tuple[BatchFunction, ...] = ()
    event_time: pa.Field | None = None
    input: str = ONLY_INPUT
    event_time_limit_ms: int | None = None
    source_time: str | None = None

    def read(self, splits: Iterable[SplitRange]) -> Iterator[pa.RecordBatch]:
        """The well-formed rows of all splits, in order within each; the functions have no others.

        Raises:
            DataLossError: records are gone before they were read, and that is not accepted.
            RecordError: a value is malformed, in mode failfast.
        """
        return (rows for _, rows in self.read_by_partition(splits))

    def read_by_partition(
        self, splits: Iterable[SplitRange]
    ) -> Iterator[tuple[TopicPartition, pa.RecordBatch]]:
        """Yield the batches of `read`, each with its partition."""
        for partition, built in self._built(splits):
            for rows in apply(self.functions, built.rows):
                assert isinstance(rows, pa.RecordBatch), "refused where nobody takes side outputs"
                yield partition, rows

    def read_dead_letters(self, splits: Iterable[SplitRange]) -> Iterator[DeadLetters]:
        """The malformed records of all splits, in order within each."""
        for _, built in self._built(splits):
            if built.dead_letters is not None:
                yield DeadLetters(built.dead_letters)

    def until(self, timestamp_ms: int, most_ms: int | None) -> "ReadPlan":
        """Return the plan for an epoch, with the latest event time that is believed.

        Args:
            timestamp_ms: the epoch's clock.
            most_ms: how far a row's event time may be ahead of it; None: as far as it says.
        """
        if most_ms is None:
            return self
        return replace(self, event_time_limit_ms=timestamp_ms + most_ms)

    def send(
        self,
        splits: Iterable[SplitRange],
        outlet: Outlet,
        source: int,
        attempt_number: int = 0,
    ) -> Iterator[Frame]:
        """Yield the frames of a reader that reads nothing else; see `send_read`."""
        return send_read([(self, splits)], outlet, source, attempt_number)

    def read_both(self, splits: Iterable[SplitRange], times: TimesRead) -> Iterator[Sent]:
        """Yield what `read` and `read_dead_letters` do, and tell `times` the event times."""
        with place_to_be_set() as rows_come_from:
            for partition, built in self._built(splits):
                rows_come_from(Origin(self.layout, partition, built, self.functions).place)
                for rows in apply(self.functions, built.rows):
                    if isinstance(rows, pa.RecordBatch):
                        times.note(of_input(self.input, partition), rows)
                    yield rows
                rows_come_from(None)  # a dead letter says itself where it is from
                if built.dead_letters is not None:
                    yield DeadLetters(built.dead_letters)

    def _built(self, splits: Iterable[SplitRange]) -> Iterator[tuple[TopicPartition, LayoutRows]]:
        left_out = _LeftOut(self.layout.mode)
        try:
            fetched = self.fetch.read(
                splits, headers=self.layout.fetches_headers, policy=self.policy
            )
            for split, records in clock.timed(clock.READ, fetched):
                clock.count(clock.READ_RECORDS, records.num_rows)
                with clock.counted_as(clock.DECODE):
                    built = self.layout.build(records, split.topic_partition)
                    built = self._believed(built, records, split.topic_partition)
                left_out.note(split.topic_partition, built.reasons)
                yield split.topic_partition, built
        finally:
            left_out.tell()

    def _believed(
        self, built: LayoutRows, records: pa.RecordBatch, partition: TopicPartition
    ) -> LayoutRows:
        """Return what was built without records whose event time is too far ahead of the clock."""
        if self.source_time is None or self.layout.mode != DEADLETTER:
            return built
        times = built.rows.column(self.source_time)
        _, after = not_after(times, self.event_time_limit_ms)
        if after is None:
            return built
        # By row and not by offset: a faulty producer may give several records the same one.
        whole = [row for row in range(records.num_rows) if row not in built.problems]
        early = {
            whole[row]: f"its event time, {times[row]}, is further ahead of the clock than "
            f"event_time_max_ahead: later than {self.event_time_limit_ms} ms since 1970"
            for row in np.flatnonzero(after.to_numpy(zero_copy_only=False)).tolist()
        }
        problems = dict(sorted({**built.problems, **early}.items()))
        offsets = records.column("offset")
        return replace(
            built,
            rows=built.rows.filter(pc.invert(after)),
            reasons={offsets[row].as_py(): reason for row, reason in problems.items()},
            dead_letters=dead_letters(records, problems, partition),
            problems=problems,
        )


def send_read(
    parts: Sequence[tuple[ReadPlan, Iterable[SplitRange]]],
    outlet: Outlet,
    source: int,
    attempt_number: int = 0,
    notes: Callable[[], Iterable[Note]] = tuple,
) -> Iterator[Frame]:
    """Yield all frames of a reader's attempt, input after input.

    Args:
        parts: the plan and the splits of each input; event times are in the same column of all.
        outlet: where the frames go.
        source: the task's index.
        attempt_number: Spark's number of the attempt.
        notes: called when all is read; returns further notes for the driver.
    """
    first = parts[0][0]
    times = TimesRead(first.event_time, first.event_time_limit_ms)
    read = (batch for plan, splits in parts for batch in plan.read_both(splits, times))
    return send(outlet, read, source, lambda: [*times.notes(), *notes()], attempt_number)


@dataclass(frozen=True)
class Origin:
    """The records of a piece of a partition, to find the record of a row in errors.

    Args:
        layout: made rows of the records.
        partition: of the records.
        built: the rows, and what was malformed.
        functions: what the rows pass through.
    """

    layout: Layout
    partition: TopicPartition
    built: LayoutRows
    functions: tuple[BatchFunction, ...]

    def place(self, rows: pa.RecordBatch, row: int) -> Place:
        """Return the record that a row was made of; if it is not certain, the offsets around it.

        The record is certain where no function has seen the rows, here or on the way to the sink.
        """
        topic, partition = self.partition
        offsets = self._offsets()
        if row == ALL_ROWS:
            first, last = pc.min(offsets).as_py(), pc.max(offsets).as_py()
            words = f"{topic}-{partition} offsets {first} to {last}"
            return Place(words, topic, partition, first)
        where = f"topic {topic}, partition {partition}"
        is_same = rows is self.built.rows
        if len(offsets) == 1 or is_same or self._is_made_of(rows, row):
            offset = offsets[row if len(offsets) > 1 else 0].as_py()
            return Place(f"{where}, offset {offset}", topic, partition, offset)
        first, last = pc.min(offsets).as_py(), pc.max(offsets).as_py()
        words = f"one of {where}, offsets {first} to {last}"
        return Place(words, topic, partition, first)

    def _offsets(self) -> pa.Array:
        """Return the offset of the record that each row is made of."""
        assert self.built.source is not None, "the layout was built of records"
        offsets = self.built.source.column("offset")
        if self.layout.mode == PERMISSIVE or not self.built.problems:
            return offsets
        good = np.ones(len(offsets), np.bool_)
        good[list(self.built.problems)] = False
        return offsets.filter(pa.array(good))

    def _is_made_of(self, rows: pa.RecordBatch, row: int) -> bool:
        """True if the functions make this row of the record in the same place, and nothing else.

        A function that keeps state is not called once more.
        """
        plain = all(isinstance(function, FunctionType) for function in self.functions)
        if not plain or rows.num_rows != self.built.rows.num_rows:
            return False
        try:
            outputs = list(apply(self.functions, self.built.rows.slice(row, 1)))
        except Exception:  # it is the user's, and was called to find a record only
            return False
        return len(outputs) == 1 and bool(outputs[0] == rows.slice(row, 1))


class _LeftOut:
    """Counts the malformed records that a task leaves out, and tells of them once."""

    def __init__(self, mode: str) -> None:
        self._fate = {
            DROPMALFORMED: "dropped, as asked",
            DEADLETTER: "left to the dead-letter topic",
        }.get(mode)
        self._count = 0
        self._first = ""

    def note(self, partition: TopicPartition, reasons: Mapping[int, str]) -> None:
        """Take in the malformed records of a batch: offset → reason."""
        if reasons and not self._count:
            offset, reason = next(iter(reasons.items()))
            self._first = (
                f"topic {partition.topic}, partition {partition.partition}, offset {offset}: "
                f"{reason}"
            )
        self._count += len(reasons)

    def tell(self) -> None:
        """Log one warning about the malformed records left out, if any."""
        if self._count and self._fate:
            logger.warning(
                "%d malformed values %s; the first: %s", self._count, self._fate, self._first
            )
