"""Event times by partition, and the watermark derived from event times.

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
`onEvent`), and the final watermark at the end of all inputs (Watermark.MAX_WATERMARK). From Kafka
Streams (KIP-695) comes that a partition with unread records is never idle, and one without need
not be waited for: Flink goes by pauses alone.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Self, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from tallystick.arguments import missing_column
from tallystick.errors import OptionError
from tallystick.state.catalog import PartitionTime, StepState
from tallystick.state.functions.processing import check_event_times
from tallystick.state.overlay import FINAL_WATERMARK_MS
from tallystick.tasks.frames import Note, NoteKind, conform
from tallystick.values import TopicPartition

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
        raise missing_column(f"step {uid}: {argument}={name!r}", name, columns.names)
    kind = columns.field(name).type
    if not is_time_column(columns.field(name)):
        raise OptionError(
            f"step {uid}: {argument}={name!r} is of type {kind}: expected timestamp, or bigint in "
            f"milliseconds since 1970"
        )


def not_after(times: pa.Array, limit_ms: int | None) -> tuple[pa.Array, pa.Array | None]:
    """Return event times with null for those after a limit, and a mask of these rows or None.

    Args:
        times: timestamps, or milliseconds since 1970 as whole numbers.
        limit_ms: the latest event time that is believed; None: any is.
    """
    if limit_ms is None:
        return times, None
    per_ms = {"us": 1000, "ns": 1_000_000}.get(getattr(times.type, "unit", "ms"), 1)
    is_seconds = pa.types.is_timestamp(times.type) and times.type.unit == "s"
    limit = min(limit_ms // 1000 if is_seconds else limit_ms * per_ms, (1 << 63) - 1)
    after = pc.greater(times.cast(pa.int64()), limit).fill_null(False)
    if not pc.any(after).as_py():
        return times, None
    return pc.if_else(after, pa.scalar(None, times.type), times), after


class TimesRead:
    """The latest event time of each partition that a task has read.

    Args:
        column: of event times, as the keyed step has it; None: no step asks for event times.
        limit_ms: the latest event time that is believed; None: any is. Later ones count as none.
    """

    def __init__(self, column: pa.Field | None, limit_ms: int | None = None) -> None:
        self._columns = pa.schema([] if column is None else [column])
        self._limit_ms = limit_ms
        self._latest_ms: dict[TopicPartition, int | None] = {}

    def note(self, partition: TopicPartition, rows: pa.RecordBatch) -> None:
        """Take a batch of rows in.

        Raises:
            RecordError: its times are not of the type that the step has, or not within the years
                1 to 9999.
        """
        for name in self._columns.names:
            if rows.schema.names.count(name) != 1:
                return  # refused where the rows go to their keys, which need other columns too
            column = conform(rows.select([name]), self._columns, WHAT).column(0)
            column, _ = not_after(column, self._limit_ms)
            check_event_times(column, f"partition {partition}, column {name!r}")
            times, per_ms = in_units(column)
            latest, before = pc.max(times).as_py(), self._latest_ms.get(partition)
            if latest is not None:
                latest_ms = latest // per_ms
                self._latest_ms[partition] = max(latest_ms, latest_ms if before is None else before)
            elif len(times):
                self._latest_ms[partition] = before  # it is not idle

    def notes(self) -> list[Note]:
        """Return the note for the driver; none if there were no rows."""
        if not self._latest_ms:
            return []
        latest = [[*partition, ms] for partition, ms in self._latest_ms.items()]
        return [Note(NoteKind.EVENT_TIMES, latest)]


LatestTimes: TypeAlias = list[tuple[str, int, int | None]]
"""Topic, partition, and the latest event time that a reader saw in it, in ms."""


def latest_of(notes: Iterable[LatestTimes]) -> dict[TopicPartition, int | None]:
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
        column: the times are of this one.
    """

    delay_ms: int = 0
    idle_after_ms: int = 0
    is_promised: bool = False
    idle_advance: bool = False
    column: str = ""

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

    Inputs whose rows have no event times are left out: nobody waits for them.

    Args:
        partitions: that have a position; of several inputs, as `offsets.of_input` names them.
        unfinished: the partitions with more records than the epoch reads.
        begun: the partitions that the epoch begins to read, perhaps again: records of an earlier
            topic of the same name say nothing of the new topic.
        ended: the partitions that the epoch reads to where reading ends for good.
        arrived: the partitions with records in the epoch, whose earlier records had event times.
        is_over: all inputs are at such an end, also inputs without event times that have an end.
        clock_ms: the time by which pauses are measured; None: the epoch's own clock. No jump of the
            driver's clock moves it.
    """

    partitions: frozenset[TopicPartition]
    unfinished: frozenset[TopicPartition]
    begun: frozenset[TopicPartition] = frozenset()
    ended: frozenset[TopicPartition] = frozenset()
    is_over: bool = False
    clock_ms: int | None = None
    arrived: frozenset[TopicPartition] = frozenset()


IN_USE = TopicPartition("", 0)
"""The name of no partition, under which a step's state keeps the watermark that its newest epoch
went by, where the next one may have to go by an earlier one than that epoch left."""


def in_use(base: StepState, source: InputState, rule: WatermarkRule) -> StepState:
    """Return a step's state with the watermark that an epoch goes by.

    An epoch leaves a watermark that does not wait for partitions which were read to their ends.
    Where these have records by the next epoch, they have unread records after all, and are waited
    for as all such partitions are. The watermark that was in use already never goes back.

    Args:
        base: the committed state.
        source: the state of the input, as the epoch is planned.
        rule: of the step.
    """
    left_ms = base.watermark_ms
    used = [time.latest_ms for time in base.partition_times if time[:2] == IN_USE]
    if not used or left_ms is None:
        return base
    times = tuple(time for time in base.partition_times if time[:2] != IN_USE)
    base = replace(base, partition_times=times)
    latest = {TopicPartition(*time[:2]): time.latest_ms for time in times}
    arrived = [
        None if at in source.begun else latest.get(at) for at in source.arrived & source.partitions
    ]
    if not arrived:
        return base
    known = [ms for ms in arrived if ms is not None]
    if len(known) < len(arrived):  # nobody knows yet what the others may bring
        return replace(base, watermark_ms=used[0])
    waiting_ms = min(left_ms, min(known) - rule.delay_ms - 1)
    return replace(base, watermark_ms=max(waiting_ms, waiting_ms if used[0] is None else used[0]))


def advanced(
    base: StepState,
    read_ms: Mapping[TopicPartition, int | None],
    source: InputState,
    timestamp_ms: int,
    rule: WatermarkRule,
) -> StepState:
    """Return a step's state with the watermark after an epoch.

    Args:
        base: its state, with the watermark that the epoch went by.
        read_ms: the latest event time of each partition that the epoch read rows of, if any.
        source: the state of the input when the epoch was planned.
        timestamp_ms: the epoch's clock.
        rule: of the step.
    """
    now_ms = timestamp_ms if source.clock_ms is None else source.clock_ms
    base = _of_column(base, rule.column)
    times = _times_after(base, read_ms, source, now_ms, is_waiting=rule.is_waiting)
    after = replace(base, partition_times=tuple(times[at] for at in sorted(times)))
    if source.is_over:
        return replace(after, watermark_ms=FINAL_WATERMARK_MS)
    latest = {at: time.latest_ms for at, time in times.items() if time.latest_ms is not None}
    waited_for = _waited_for(times, source, now_ms, rule)
    if not latest or waited_for - latest.keys():  # none of its event times is known yet
        return after
    if waited_for:  # their next rows may be of the same time; a row at the watermark is late
        watermark_ms = min(latest[at] for at in waited_for) - rule.delay_ms - 1
    else:
        watermark_ms = max(latest.values()) - rule.delay_ms - (1 if rule.is_promised else 0)
        if rule.idle_advance:
            watermark_ms += max(0, now_ms - max(times[at].seen_ms for at in latest))
    if base.watermark_ms is not None:
        watermark_ms = max(watermark_ms, base.watermark_ms)
    after = replace(after, watermark_ms=watermark_ms)
    known = [latest.get(at) for at in source.partitions - source.ended]
    may_be_behind = any(ms is None or ms - rule.delay_ms <= watermark_ms for ms in known)
    if watermark_ms == base.watermark_ms or not may_be_behind:
        return after
    before = PartitionTime(*IN_USE, base.watermark_ms, 0)
    return replace(after, partition_times=(before, *after.partition_times))


def _of_column(base: StepState, column: str) -> StepState:
    """Return a step's state with the times of a column; times of another column are not known.

    The latest event time of a partition is no promise, nor is a promise an event time.
    """
    if base.times_of in ("", column):
        return replace(base, times_of=column)
    times = tuple(
        time._replace(latest_ms=None) for time in base.partition_times if time[:2] != IN_USE
    )
    return replace(base, partition_times=times, times_of=column)


class EventTimesOfEpoch(NamedTuple):
    """The event times of partitions after an epoch, for the progress and the page.

    Args:
        watermark_ms: of the step; None: no watermark yet.
        timed: the partitions of which the epoch read rows with event times.
        waited_for: the partitions whose next rows the watermark waits for.
        ended: the partitions that are read to where reading ends for good.
        idle: the other partitions.
        slowest: the partition that holds the watermark back; None: no partition does.
    """

    watermark_ms: int | None
    timed: frozenset[TopicPartition]
    waited_for: frozenset[TopicPartition]
    ended: frozenset[TopicPartition]
    idle: frozenset[TopicPartition]
    slowest: TopicPartition | None

    @classmethod
    def of(
        cls,
        after: StepState,
        read_ms: Mapping[TopicPartition, int | None],
        source: InputState,
        timestamp_ms: int,
        rule: WatermarkRule,
    ) -> Self:
        """Return the event times of the epoch for which `advanced` was called.

        `after` is the state that `advanced` returned; the other arguments are the same.
        """
        now_ms = timestamp_ms if source.clock_ms is None else source.clock_ms
        times = {
            at: time
            for time in after.partition_times
            if (at := TopicPartition(*time[:2])) != IN_USE
        }
        waited_for = _waited_for(times, source, now_ms, rule)
        latest = {at: times[at].latest_ms if at in times else None for at in waited_for}
        slowest = min(
            waited_for, key=lambda at: (latest[at] is not None, latest[at] or 0, at), default=None
        )
        return cls(
            after.watermark_ms,
            frozenset(at for at, ms in read_ms.items() if ms is not None),
            waited_for,
            source.ended,
            source.partitions - waited_for - source.ended,
            slowest,
        )


def _waited_for(
    times: Mapping[TopicPartition, PartitionTime],
    source: InputState,
    now_ms: int,
    rule: WatermarkRule,
) -> frozenset[TopicPartition]:
    """Return the partitions whose next rows the watermark waits for."""
    paused = {at for at, time in times.items() if not rule.is_idle(now_ms - time.seen_ms)}
    return (source.unfinished | paused) - source.ended


def ahead(
    times: Iterable[PartitionTime],
    source: InputState,
    max_drift_ms: int,
    mute: frozenset[TopicPartition] = frozenset(),
) -> frozenset[TopicPartition]:
    """Return the partitions that are to wait, since they are far ahead of the slowest.

    Only those with unread records count, whose latest event time is known: others hold nobody up.

    Args:
        times: of a step, as committed.
        source: the state of the input, where the next epoch begins.
        max_drift_ms: how far a partition may be ahead.
        mute: partitions of which the newest epoch read records, and no event time came of them: how
            far they are is not known any more, so they hold nobody up either.
    """
    latest = {
        at: time.latest_ms
        for time in times
        if (at := TopicPartition(time.topic, time.partition)) in source.unfinished
        and time.latest_ms is not None
    }
    slowest_ms = min((ms for at, ms in latest.items() if at not in mute), default=None)
    if slowest_ms is None:
        return frozenset()
    return frozenset(at for at, ms in latest.items() if ms - slowest_ms > max_drift_ms)


def _times_after(
    base: StepState,
    read_ms: Mapping[TopicPartition, int | None],
    source: InputState,
    now_ms: int,
    *,
    is_waiting: bool,
) -> dict[TopicPartition, PartitionTime]:
    """Return the times of each partition after an epoch; if one is waited for, of all.

    None was seen later than now: an epoch that said so had a clock that was wrong.
    """
    times = {
        at: time if time.seen_ms <= now_ms else time._replace(seen_ms=now_ms)
        for time in base.partition_times
        if (at := TopicPartition(time.topic, time.partition)) in source.partitions - source.begun
    }
    for at, ms in read_ms.items():
        if at in source.partitions:
            known_ms = times[at].latest_ms if at in times else None
            times[at] = PartitionTime(*at, _later(ms, known_ms), now_ms)
    if is_waiting:
        for at in source.partitions - times.keys():
            times[at] = PartitionTime(*at, None, now_ms)
    return times
