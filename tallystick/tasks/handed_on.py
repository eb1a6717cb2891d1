"""The watermarks of the keyed steps behind the first one that has event time.

The first step's watermark follows from the partitions (see `event_times`). Each later step gets a
watermark from the step before, never from the rows that come to it: rows of slow keys, and of
partitions that lag, would be late.

    epoch N      the step judges rows, and fires timers, by the watermark W that epochs before left
    at its end   it hands W on, less what the times in its output may be behind it

What the step puts out later is of timers after W, or of rows after W. So the later step, which
goes by W from epoch N + 1 on, has all that W closed, and no row of it is late. A step without
timers that has event time hands W on in the same way: the watermark that it leaves may still be
lowered, for partitions whose records come next (`event_times.in_use`), and W never is.

By how much times are behind is known of the functions of this package (`PutsOutTimes`): the start
of a window by its size. A column that a function of the user's made is taken to be no further
behind; any further lag is for `watermark_delay=` of the later step.

Source: Flink's AbstractStreamOperator.processWatermark, which fires timers and then emits the
watermark behind what they put out, and KeyedCoProcessOperatorWithWatermarkDelay, which delays it
for joins whose rows come out with older times.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from tallystick.state.catalog import StepState
from tallystick.state.functions.processing import PROCESSING_TIME, PutsOutTimes
from tallystick.state.overlay import FINAL_WATERMARK_MS, is_final
from tallystick.tasks.event_times import InputState, advanced, is_time_column
from tallystick.tasks.keyed import KeyedStep, ProcessPlan
from tallystick.values import TopicPartition


@dataclass(frozen=True, slots=True)
class HandedOn:
    """The watermark that a step is handed.

    Args:
        giver: the place of the step that hands it on.
        lag_ms: by how much the times of the giver's rows may be behind its watermark.
        is_known: whether the lag is sure; else it depends on functions of the user's.
        may_go_on: whether rows may still come when the giver is at the end of all event times.
    """

    giver: int
    lag_ms: int
    is_known: bool
    may_go_on: bool = False

    def watermark_ms(self, given: int | None, delay_ms: int) -> int | None:
        """Return the step's watermark, or None while the giver has none.

        Args:
            given: the watermark of the giver.
            delay_ms: how much later than the giver's rows the step's may be.
        """
        if is_final(given):
            return None if self.may_go_on else given
        return None if given is None else given - self.lag_ms - delay_ms


@dataclass(frozen=True, slots=True)
class _Times:
    """The columns of some rows that hold event times, and by how much they may be behind.

    Args:
        lags_ms: by column.
        most_ms: that of a column that is not known.
        is_known: the columns are those that a function of this package put out.
    """

    lags_ms: Mapping[str, int] = field(default_factory=dict)
    most_ms: int = 0
    is_known: bool = True

    def among(self, step: KeyedStep, functions: Collection[object]) -> "_Times":
        """Return the times in the rows that come to a step, through functions of the user's."""
        there = {name: ms for name, ms in self.lags_ms.items() if name in step.columns.names}
        return _Times(there, self.most_ms, self.is_known and not functions)

    def put_out_by(self, step: KeyedStep) -> "_Times":
        """Return the event times in a step's output, from the times in the rows that come to it.

        Lags count from the step's own watermark, if it has event time.
        """
        processor, given = step.processor, self
        if step.event_time is not None:
            columns = [f"{name}.{column}" for name, column in step.input_times.items()]
            given = _Times(dict.fromkeys(columns or [step.event_time], 0), 0)
        lags_ms = None
        if isinstance(processor, PutsOutTimes):
            lags_ms = processor.lags_ms(step.key.names, given.lags_ms)
        if lags_ms is None:
            there = {name: ms for name, ms in given.lags_ms.items() if name in step.output.names}
            return _Times(there, given.most_ms, is_known=False)
        most_ms = max(lags_ms.values(), default=given.most_ms)
        return _Times(lags_ms, most_ms, given.is_known)


def first_timed(steps: Sequence[KeyedStep]) -> int | None:
    """Return the index of the first step with event time, which has a watermark rule of its own."""
    return next((at for at, step in enumerate(steps) if step.event_time is not None), None)


def makes_rows_later(step: KeyedStep) -> bool:
    """True if timers of the clock may make rows of what came long before.

    Not those of a function that knows how far its rows are behind the ones that come: it puts them
    out with these.
    """
    processor = step.processor
    if not processor.has_timers or processor.time_mode != PROCESSING_TIME:
        return False
    if not isinstance(processor, PutsOutTimes):
        return True
    return processor.lags_ms(step.key.names, {}) is None


def noted_column(first: KeyedStep, timed: KeyedStep) -> pa.Field | None:
    """Return the column of times that readers note, or None if rows as read have no such column.

    Args:
        first: the first keyed step.
        timed: the first keyed step with event time. If it is a later step, readers note the column
            of that name in the rows of the first.
    """
    name = timed.watermark_column or timed.event_time
    assert name is not None, "it has event time"
    if timed is first:
        return first.columns.field(name)
    if name not in first.routed.names:
        return None
    column = first.columns.field(name)
    return column if is_time_column(column) else None


def handed_on(steps: Sequence[KeyedStep]) -> tuple[HandedOn | None, ...]:
    """Return the watermark handed to each step; None: a rule of its own, or no event time."""
    watermarks: list[HandedOn | None] = [None] * len(steps)
    first = first_timed(steps)
    if first is None:
        return tuple(watermarks)
    giver, times, may_go_on = first, _Times(), False
    for place in range(first, len(steps)):
        step = steps[place]
        times = times.among(step, steps[place - 1].functions if place > first else ())
        if place > first and step.event_time is not None:
            lag_ms = times.lags_ms.get(step.event_time, times.most_ms)
            is_known = times.is_known and step.event_time in times.lags_ms
            watermarks[place], giver = HandedOn(giver, lag_ms, is_known, may_go_on), place
            may_go_on = False
        times, may_go_on = times.put_out_by(step), may_go_on or makes_rows_later(step)
    return tuple(watermarks)


def with_watermarks(
    plans: Sequence[ProcessPlan],
    states: Sequence[StepState],
    source: InputState | None,
    read_ms: Mapping[TopicPartition, int | None],
    own_ms: Sequence[Sequence[int | None]],
    final_stage: int = 0,
) -> list[StepState]:
    """Return the states after an epoch, with the watermarks for the next epoch.

    Args:
        plans: of the keyed steps, in this epoch.
        states: after the epoch, with the watermarks from before.
        source: the state of the input; None: readers noted no times.
        read_ms: the latest time of each partition, as they noted it.
        own_ms: for each step, the latest times that its tasks met.
        final_stage: the number of the step at the end of all event times, from 1; 0: no step is.
    """
    states_after: list[StepState] = []
    all_given = handed_on([plan.step for plan in plans])
    for plan, state, given, times in zip(plans, states, all_given, own_ms, strict=True):
        step, is_final = plan.step, plan.stage == final_stage
        if given is None and step.event_time is not None and source is not None:
            now_ms, rule = plan.time.timestamp_ms, step.watermark_rule
            now_over = replace(source, is_over=is_final)
            states_after.append(advanced(state, read_ms, now_over, now_ms, rule))
            continue
        watermark_ms = None
        if given is not None:
            # What the giver leaves may still be lowered for partitions whose records come next
            # (`event_times.in_use`); what it went by never is.
            of_giver = plans[given.giver].base.watermark_ms
            watermark_ms = given.watermark_ms(of_giver, step.watermark_delay_ms)
        elif is_final:
            watermark_ms = FINAL_WATERMARK_MS
        elif known := [ms for ms in times if ms is not None]:
            watermark_ms = max(known) - step.watermark_delay_ms
        moments = [ms for ms in (watermark_ms, state.watermark_ms) if ms is not None]
        # Partitions' times are of an earlier pipeline, where there are any.
        watermark_ms = max(moments, default=None)
        after = replace(state, watermark_ms=watermark_ms, partition_times=(), times_of="")
        states_after.append(after)
    return states_after
