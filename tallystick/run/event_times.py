"""Event times by partition, and the watermark that follows from them.

Readers note the latest event time of each partition that they read, of the rows that they send on.
The watermark is the earliest of these, over the partitions that are not idle, less the delay: what
waits in a partition that lags is not late. A partition is idle when it is read to its end and has
had no rows for some time, by the clock of the epochs. Where all are idle the latest event time
counts, and may go on with that clock.

A column may hold watermarks of the producers' own: then they take the place of event times, and no
partition is read to its end before it is idle, for its watermark says what may still come.

Source: from Flink come a watermark per split (FLIP-27), the latest time where all are idle
(StatusWatermarkValve), the millisecond below the latest time of a partition that goes on
(BoundedOutOfOrdernessWatermarks), and watermarks in the records (a WatermarkGenerator with
`onEvent`). From Kafka Streams (KIP-695) comes that a partition with unread records is never idle,
and one without need not be waited for: Flink goes by pauses alone.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from tallystick.errors import OptionError
from tallystick.run.frames import conform
from tallystick.state.catalog import PartitionTime, StepState
from tallystick.values import TopicPartition

NOTE = "eventTimes"
"""The field that makes a task's note one of event times."""
WHAT = "the rows that come to the first keyed step"


def in_units(column: pa.Array) -> tuple[pa.Array, int]:
    """Return event times as whole numbers, and how many of their units are a millisecond."""
    if not pa.types.is_timestamp(column.type):
        return column, 1
    micros = column.cast(pa.timestamp("us", tz=column.type.tz), safe=False)
    return micros.cast(pa.int64()), 1000


def is_time_column(column: pa.Field) -> bool:
    """True if a column can hold event times: of type timestamp, or int64 in milliseconds."""
    return bool(pa.types.is_timestamp(column.type) or pa.types.is_int64(column.type))


def check_time_column(
    uid: str, columns: pa.Schema, name: str, argument: str = "event_time"
) -> None:
    """Refuse a column that cannot hold event times.

    Raises:
        OptionError: it is missing, or of another type than timestamp or int64 (milliseconds).
    """
    if name not in columns.names:
        raise OptionError(
            f"step {uid}: {argument}={name!r} is not among the columns {columns.names}"
        )
    kind = columns.field(name).type
    if not is_time_column(columns.field(name)):
        raise OptionError(
            f"step {uid}: {argument}={name!r} is of type {kind}: expected timestamp, or bigint in "
            f"milliseconds since 1970"
        )


class TimesRead:
    """The latest event time of each partition that a task has read.

    Args:
        column: that holds them, as the keyed step has it; None: nobody asks for them.
    """

    def __init__(self, column: pa.Field | None) -> None:
        self._columns = pa.schema([] if column is None else [column])
        self._latest_ms: dict[TopicPartition, int | None] = {}

    def note(self, partition: TopicPartition, rows: pa.RecordBatch) -> None:
        """Take a batch of rows in.

        Raises:
            RecordError: its times are not of the type that the step has.
        """
        for name in self._columns.names:
            if rows.schema.names.count(name) != 1:
                return  # refused where the rows go to their keys, which need other columns too
            column = conform(rows.select([name]), self._columns, WHAT).column(0)
            times, per_ms = in_units(column)
            latest, before = pc.max(times).as_py(), self._latest_ms.get(partition)
            if latest is not None:
                latest_ms = latest // per_ms
                self._latest_ms[partition] = max(latest_ms, latest_ms if before is None else before)
            elif len(times):
                self._latest_ms[partition] = before  # it is not idle

    def notes(self) -> list[str]:
        """Return the note for the driver; none if there were no rows."""
        if not self._latest_ms:
            return []
        return [json.dumps({NOTE: [[*each, ms] for each, ms in self._latest_ms.items()]})]


Note: TypeAlias = list[tuple[str, int, int | None]]


def latest_of(notes: Iterable[Note]) -> dict[TopicPartition, int | None]:
    """Return the latest event time of each partition, in ms, from the notes of all readers.

    None: it had rows, and none of them a time.
    """
    latest: dict[TopicPartition, int | None] = {}
    for note in notes:
        for topic, partition, ms in note:
            at = TopicPartition(topic, partition)
            latest[at] = _later(ms, latest.get(at))
    return latest


def _later(one: int | None, other: int | None) -> int | None:
    return one if other is None else other if one is None else max(one, other)


@dataclass(frozen=True, slots=True)
class WatermarkRule:
    """The way from partitions' times to a watermark.

    Args:
        delay_ms: how much later than the latest row of its partition another one may come.
        idle_after_ms: how long a partition that is read to its end is waited for.
        is_promised: the times are watermarks that producers promise: no row before them comes
            later in its partition. Then 0 of `idle_after_ms` is for as long as it takes.
        idle_advance: where all partitions are idle, the watermark goes on with the epochs' clock.
    """

    delay_ms: int = 0
    idle_after_ms: int = 0
    is_promised: bool = False
    idle_advance: bool = False

    @property
    def is_waiting(self) -> bool:
        """True if partitions that are read to their ends are waited for."""
        return self.is_promised or self.idle_after_ms > 0

    def is_idle(self, quiet_ms: int) -> bool:
        """True if a partition that is read to its end is, after so long without rows."""
        if self.is_promised and not self.idle_after_ms:
            return False
        return quiet_ms >= self.idle_after_ms


@dataclass(frozen=True, slots=True)
class InputState:
    """The state of a pipeline's input when an epoch was planned.

    Args:
        partitions: that have a position; of several inputs, as `offsets.of_input` names them.
        unfinished: those that had more than the epoch reads.
        begun: those that the epoch begins to read, perhaps again: what an earlier topic of the
            same name held says nothing of this one.
    """

    partitions: frozenset[TopicPartition]
    unfinished: frozenset[TopicPartition]
    begun: frozenset[TopicPartition] = frozenset()


def advanced(
    base: StepState,
    read_ms: Mapping[TopicPartition, int | None],
    source: InputState,
    timestamp_ms: int,
    rule: WatermarkRule,
) -> StepState:
    """Return a step's state with the watermark after an epoch.

    Args:
        base: its state.
        read_ms: the latest event time of each partition that the epoch read rows of, if any.
        source: what was planned, and what is left.
        timestamp_ms: the epoch's clock.
        rule: of the step.
    """
    times = _times_after(base, read_ms, source, timestamp_ms, is_waiting=rule.is_waiting)
    after = replace(base, partition_times=tuple(times[at] for at in sorted(times)))
    latest = {at: each.latest_ms for at, each in times.items() if each.latest_ms is not None}
    waited_for = source.unfinished | {
        at for at, each in times.items() if not rule.is_idle(timestamp_ms - each.seen_ms)
    }
    if not latest or waited_for - latest.keys():  # none of its event times is known yet
        return after
    if waited_for:  # their next rows may be of the same time; a row at the watermark is late
        watermark_ms = min(latest[at] for at in waited_for) - rule.delay_ms - 1
    else:
        watermark_ms = max(latest.values()) - rule.delay_ms - (1 if rule.is_promised else 0)
        if rule.idle_advance:
            watermark_ms += max(0, timestamp_ms - max(times[at].seen_ms for at in latest))
    if base.watermark_ms is not None:
        watermark_ms = max(watermark_ms, base.watermark_ms)
    return replace(after, watermark_ms=watermark_ms)


def ahead(
    times: Iterable[PartitionTime], source: InputState, max_drift_ms: int
) -> frozenset[TopicPartition]:
    """Return the partitions that are to wait, since they are far ahead of the slowest.

    Only those with unread records count, whose latest event time is known: others hold nobody up.

    Args:
        times: of a step, as committed.
        source: the state of the input, where the next epoch begins.
        max_drift_ms: how far a partition may be ahead.
    """
    latest = {
        at: each.latest_ms
        for each in times
        if (at := TopicPartition(each.topic, each.partition)) in source.unfinished
        and each.latest_ms is not None
    }
    slowest_ms = min(latest.values(), default=0)
    return frozenset(at for at, ms in latest.items() if ms - slowest_ms > max_drift_ms)


def _times_after(
    base: StepState,
    read_ms: Mapping[TopicPartition, int | None],
    source: InputState,
    timestamp_ms: int,
    *,
    is_waiting: bool,
) -> dict[TopicPartition, PartitionTime]:
    """Return the times of each partition after an epoch; if one is waited for, of all."""
    before = {TopicPartition(each.topic, each.partition): each for each in base.partition_times}
    times = {at: each for at, each in before.items() if at in source.partitions - source.begun}
    for at, ms in read_ms.items():
        known_ms = times[at].latest_ms if at in times else None
        times[at] = PartitionTime(*at, _later(ms, known_ms), timestamp_ms)
    if is_waiting:
        for at in source.partitions - times.keys():
            times[at] = PartitionTime(*at, None, timestamp_ms)
    return times
