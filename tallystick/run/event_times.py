"""Event times by partition, and the watermark that follows from them.

Readers note the latest event time of each partition that they read, of the rows that they send on.
The watermark is the earliest of these, over the partitions that are not idle, less the delay: what
waits in a partition that lags is not late. A partition is idle when it is read to its end and has
had no rows for some time, by the clock of the epochs. Where all are idle the latest event time
counts.

Source: a watermark per split is Flink's (FLIP-27), as is the latest where all are idle
(StatusWatermarkValve), and the millisecond below the latest time of a partition that goes on
(BoundedOutOfOrdernessWatermarks). That a partition with unread records is never idle, and one
without need not be waited for, is Kafka Streams' (KIP-695): Flink goes by pauses alone.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

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


class TimesRead:
    """The latest event time of each partition that a task has read.

    Args:
        column: that holds them, as the keyed step has it; None: nobody asks for them.
    """

    def __init__(self, column: pa.Field | None) -> None:
        self._columns = pa.schema([] if column is None else [column])
        self._latest_ms: dict[TopicPartition, int] = {}

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
            latest = pc.max(times).as_py()
            if latest is not None:
                before = self._latest_ms.get(partition, latest // per_ms)
                self._latest_ms[partition] = max(before, latest // per_ms)

    def notes(self) -> list[str]:
        """Return the note for the driver; none if there were no times."""
        if not self._latest_ms:
            return []
        return [json.dumps({NOTE: [[*each, ms] for each, ms in self._latest_ms.items()]})]


def latest_of(notes: Iterable[list[tuple[str, int, int]]]) -> dict[TopicPartition, int]:
    """Return the latest event time of each partition, in ms, from the notes of all readers."""
    latest: dict[TopicPartition, int] = {}
    for note in notes:
        for topic, partition, ms in note:
            at = TopicPartition(topic, partition)
            latest[at] = max(ms, latest.get(at, ms))
    return latest


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
    read_ms: Mapping[TopicPartition, int],
    source: InputState,
    timestamp_ms: int,
    delay_ms: int,
    idle_after_ms: int,
) -> StepState:
    """Return a step's state with the watermark after an epoch.

    Args:
        base: its state.
        read_ms: the latest event time of each partition that the epoch read rows of.
        source: what was planned, and what is left.
        timestamp_ms: the epoch's clock.
        delay_ms: how much later than the latest row of its partition another one may come.
        idle_after_ms: how long a partition that is read to its end is waited for.
    """
    times = _times_after(base, read_ms, source, timestamp_ms, is_waiting=idle_after_ms > 0)
    after = replace(base, partition_times=tuple(times[at] for at in sorted(times)))
    latest = {at: each.latest_ms for at, each in times.items() if each.latest_ms is not None}
    waited_for = source.unfinished | {
        at for at, each in times.items() if timestamp_ms - each.seen_ms < idle_after_ms
    }
    if not latest or waited_for - latest.keys():  # none of its event times is known yet
        return after
    if waited_for:  # their next rows may be of the same time; a row at the watermark is late
        watermark_ms = min(latest[at] for at in waited_for) - delay_ms - 1
    else:
        watermark_ms = max(latest.values()) - delay_ms
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
    read_ms: Mapping[TopicPartition, int],
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
        latest_ms = ms if known_ms is None else max(ms, known_ms)
        times[at] = PartitionTime(*at, latest_ms, timestamp_ms)
    if is_waiting:
        for at in source.partitions - times.keys():
            times[at] = PartitionTime(*at, None, timestamp_ms)
    return times
