"""What a loop knows of a pipeline's input when it plans an epoch, without Kafka and Spark."""

import json
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pyarrow as pa
import pytest

from tallystick.pipeline import loop as pipeline_loop
from tallystick.pipeline.input_planning import InputPlanner, InputPlanners, text_of
from tallystick.pipeline.loop import PipelinePlanner
from tallystick.run import epoch_clock
from tallystick.run.part_times import PartTimes
from tallystick.source.offsets import ONLY_INPUT, SourceOffsets, from_json, next_tick
from tallystick.state.catalog import PartitionTime, StepState
from tallystick.state.functions.keyed_batch import Update
from tallystick.state.functions.processing import EVENT_TIME, PROCESSING_TIME
from tallystick.state.functions.vectorised import vectorised
from tallystick.state.keys import KeyCodec
from tallystick.state.overlay import FINAL_WATERMARK_MS
from tallystick.tasks.epoch_plan import PipelinePlan
from tallystick.tasks.event_times import EventTimesOfEpoch, InputState
from tallystick.values import TopicPartition
from tests.keyed_job import EVENTS, step

A, B = TopicPartition("in", 0), TopicPartition("in", 1)
NOW_MS = 100_000
IDLE_MS = 1000


@dataclass
class Planner:
    """Ends of logs of which nothing is due to be read; epochs without records follow some."""

    ends: dict[TopicPartition, int] | None
    waiting: int = 0
    tick_count: int = 0

    def next(self, start: SourceOffsets, offset_count_max: int | None) -> SourceOffsets:
        return next_tick(start) if start.tick < self.tick_count else start

    def latest(self) -> SourceOffsets | None:
        return None if self.ends is None else SourceOffsets("cluster", "", self.ends)

    def stop_at_what_is_there(self) -> None:
        return


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(ms=NOW_MS, jump_ms=0)
    fake = SimpleNamespace(
        monotonic=lambda: now.ms / 1000, time_ns=lambda: (now.ms + now.jump_ms) * 1_000_000
    )
    fake.monotonic_ns = lambda: now.ms * 1_000_000
    monkeypatch.setattr(pipeline_loop, "time", fake)
    monkeypatch.setattr(epoch_clock, "time", fake)
    return now


def loop(
    planner: Planner, time_mode: str = EVENT_TIME, *, advance: bool = False
) -> tuple[PipelinePlanner, list[InputState]]:
    """Return a loop, and the states of the input with which epochs are run."""
    given: list[InputState] = []
    timed = vectorised(
        lambda batch: Update(), state="n bigint", time_mode=time_mode, output=lambda *_: EVENTS
    )
    timing = {"event_time": "at", "idle_after_ms": IDLE_MS, "idle_advance": advance}
    run = SimpleNamespace(
        name="loop",
        keyed=PipelinePlan((step(timed, **timing),)),
        parts=PartTimes(lambda _: None),
        check_tasks=lambda: None,
        cluster=SimpleNamespace(context=SimpleNamespace(_jsc=object())),
        make_engine=lambda batch, source: given.append(
            replace(source, clock_ms=None, arrived=frozenset())
        ),
    )
    return PipelinePlanner(run, InputPlanners([InputPlanner(ONLY_INPUT, planner)]), None), given


def at(positions: dict[TopicPartition, int], **further) -> tuple[str, ...]:
    return (text_of(SourceOffsets("cluster", "", positions, **further)),)


def state_with(
    state: dict[TopicPartition, tuple[int, int]], watermark_ms: int
) -> tuple[StepState, ...]:
    times = tuple(PartitionTime(*name, *value) for name, value in state.items())
    key = KeyCodec(pa.schema([EVENTS.field("user")])).schema_text
    empty_state = StepState("count", 128, 2, key, 1, time_mode=EVENT_TIME)
    return (replace(empty_state, partition_times=times, watermark_ms=watermark_ms),)


def test_partitions_with_more_than_the_epoch_reads_are_unfinished():
    source, given = loop(Planner({A: 10, B: 7}))
    source.engine(2, at({A: 4, B: 4}), at({A: 9, B: 7}))
    assert given == [InputState(frozenset({A, B}), frozenset({A}))]


def test_what_lies_beyond_the_end_of_a_stream_is_not_waited_for():
    """It is never read: its partition would hold up the watermark for good."""
    source, given = loop(Planner({A: 10, B: 7}))
    source.engine(2, at({A: 4, B: 4}), at({A: 9, B: 4}, stops={A: 9, B: 5}))
    assert given == [InputState(frozenset({A, B}), frozenset({B}), ended=frozenset({A}))]
    source.engine(3, at({A: 9, B: 4}), at({A: 9, B: 5}, stops={A: 9, B: 5}))
    assert given[1] == InputState(
        frozenset({A, B}), frozenset(), ended=frozenset({A, B}), is_over=True
    )


def test_a_partition_whose_topic_is_missed_has_nothing_more_to_read():
    source, given = loop(Planner({B: 7}))
    source.engine(2, at({A: 4, B: 4}), at({A: 4, B: 6}))
    assert given == [InputState(frozenset({A, B}), frozenset({B}))]


def test_an_epoch_that_begins_partitions_again_says_so():
    source, given = loop(Planner({A: 3, B: 7}))
    source.engine(2, at({A: 90, B: 4}), at({A: 3, B: 7}, starts={A: 0}))
    assert given == [InputState(frozenset({A, B}), frozenset(), frozenset({A}))]


def test_an_epoch_of_an_earlier_run_waits_for_all_partitions_since_nobody_has_looked():
    source, given = loop(Planner(None))
    source.engine(2, at({A: 4, B: 4}), at({A: 9, B: 7}))
    assert given == [InputState(frozenset({A, B}), frozenset({A, B}))]


def test_one_epoch_without_rows_is_planned_when_a_partition_has_become_idle(clock):
    planner = Planner({A: 9, B: 7})
    source, given = loop(planner)
    start = at({A: 9, B: 7}, tick=1)
    state = state_with({A: (100, NOW_MS - IDLE_MS + 1), B: (900, NOW_MS)}, watermark_ms=99)

    assert source.plan(2, start, state).sources is None
    clock.ms += 1
    planned = source.plan(2, start, state)
    assert planned.sources == at({A: 9, B: 7}), "timers get their epochs after it"
    source.engine(2, planned.start, planned.sources)
    assert given == [InputState(frozenset({A, B}), frozenset())]
    state = state_with({A: (100, 0), B: (900, NOW_MS)}, watermark_ms=899)
    assert source.plan(3, planned.sources, state).sources is None, "it has moved"


def test_the_epoch_after_records_that_finds_partitions_idle_is_followed_by_another(clock):
    """The watermark moves at its end only, so that it fires no timers itself."""
    source, _ = loop(Planner({A: 9, B: 7}, tick_count=1))
    start = at({A: 9, B: 7})
    state = state_with({A: (100, NOW_MS - IDLE_MS + 1), B: (900, NOW_MS)}, watermark_ms=99)

    assert source.plan(2, start, state).sources == at({A: 9, B: 7}, tick=1), "none is idle"
    clock.ms += 1
    assert source.plan(2, start, state).sources == at({A: 9, B: 7}), "A is"
    state = state_with({A: (100, 0), B: (900, NOW_MS)}, watermark_ms=899)
    assert source.plan(3, start, state).sources == at({A: 9, B: 7}, tick=1)


def test_an_epoch_a_second_is_planned_for_a_watermark_that_goes_on_with_the_clock(clock):
    source, _ = loop(Planner({A: 9}), advance=True)
    start = at({A: 9}, tick=1)
    state = state_with({A: (100, NOW_MS - IDLE_MS)}, watermark_ms=100 + IDLE_MS)
    assert source.plan(2, start, state).sources is None, "it has just moved"
    clock.ms += 999
    assert source.plan(2, start, state).sources is None
    clock.ms += 1
    assert source.plan(2, start, state).sources == at({A: 9})


@pytest.mark.parametrize("reason", ["there is more of it", "clock timers", "availableNow"])
def test_no_epoch_is_planned_for_a_partition(clock, reason):
    """One that has more is not idle; and a run that ends with its records ends with them."""
    planner = Planner({A: 10 if reason == "there is more of it" else 9, B: 7})
    clock_timers = reason == "clock timers"
    source, _ = loop(planner, PROCESSING_TIME if clock_timers else EVENT_TIME)
    if reason == "availableNow":
        source.stop_at_what_is_there()
    state = state_with({A: (100, 0), B: (900, NOW_MS)}, watermark_ms=99)
    if clock_timers:
        state = tuple(replace(step_state, time_mode=PROCESSING_TIME) for step_state in state)
    assert source.plan(2, at({A: 9, B: 7}, tick=1), state).sources is None


def test_an_idle_epoch_reads_nothing():
    planner = Planner({A: 9, B: 7})
    source, _ = loop(planner)
    state = state_with({A: (100, 0), B: (900, 0)}, watermark_ms=99)
    (stop,) = source.plan(2, at({A: 9, B: 7}, starts={A: 3}), state).sources
    assert from_json(json.loads(stop)).starts == {}


def test_partitions_of_which_an_epoch_reads_records_are_told_but_not_mute_ones(monkeypatch):
    """Of mute ones the newest records had no event times: nobody knows how far they are."""
    source, _ = loop(Planner({A: 10, B: 7}))
    seen: list[InputState] = []
    monkeypatch.setattr(source._run, "make_engine", lambda _, state: seen.append(state))
    source.engine(2, at({A: 4, B: 4}), at({A: 9, B: 4}))
    assert seen[-1].arrived == {A}
    source.engine(3, at({A: 9, B: 4}), at({A: 10, B: 7}))
    assert seen[-1].arrived == {A, B}
    note = EventTimesOfEpoch(99, frozenset({A}), frozenset(), frozenset(), frozenset(), None)
    source._run.keyed.on_event_times(note)
    source.engine(4, at({A: 10, B: 7}), at({A: 11, B: 8}))
    assert seen[-1].arrived == {A}, "no event time came of B"
    source._run.keyed.on_event_times(note._replace(timed=frozenset({B})))
    source.engine(5, at({A: 11, B: 8}), at({A: 12, B: 9}))
    assert seen[-1].arrived == {B}, "B speaks again, and A does not"


@pytest.mark.parametrize("is_last_run", [False, True], ids=["goes on", "availableNow"])
def test_one_epoch_is_planned_at_the_end_of_all_inputs_and_none_after_it(clock, is_last_run):
    """A checkpoint may be of a release that knew no end; and the last records may be gone."""
    source, given = loop(Planner({A: 9, B: 7}))
    if is_last_run:
        source.stop_at_what_is_there()
    start = at({A: 9, B: 7}, stops={A: 9, B: 7}, tick=1)
    state = state_with({A: (100, 0), B: (900, 0)}, watermark_ms=900)
    planned = source.plan(2, start, state)
    assert planned.sources == at({A: 9, B: 7}, stops={A: 9, B: 7}), "timers get their epochs"
    source.engine(2, planned.start, planned.sources)
    assert given[-1].is_over
    state = state_with({A: (100, 0), B: (900, 0)}, watermark_ms=FINAL_WATERMARK_MS)
    assert source.plan(3, start, state).sources is None


def test_an_input_is_over_where_all_its_partitions_are_and_all_others_that_have_an_end():
    def planners(*timed: bool) -> InputPlanners:
        return InputPlanners(
            [
                InputPlanner(f"i{at}", Planner({A: 9}), waits=is_timed)
                for at, is_timed in enumerate(timed)
            ]
        )

    def offsets(number: int, position: int, stop: int | None) -> SourceOffsets:
        stops = None if stop is None else {A: stop}
        return SourceOffsets("cluster", "", {A: position}, stops=stops, input=f"i{number}")

    ended, going, endless = (9, 9), (8, 9), (9, None)
    for first, second, timed, is_over in [
        (ended, ended, (True, True), True),
        (ended, going, (True, True), False),
        (ended, endless, (True, True), False),
        (ended, endless, (True, False), True),
        (ended, going, (True, False), False),
        (ended, ended, (True, False), True),
        (endless, ended, (True, False), False),
        (ended, ended, (False, False), False),
    ]:
        stops = (offsets(0, *first), offsets(1, *second))
        state = planners(*timed).state(stops)
        assert state.is_over == is_over, (first, second, timed)
        assert len(state.partitions) == sum(timed), "nobody waits for the others"


def test_a_clock_that_jumps_moves_neither_pauses_nor_the_epochs(clock):
    planner = Planner({A: 9, B: 7})
    source, _ = loop(planner)
    start = at({A: 9, B: 7}, tick=1)
    state = state_with({A: (100, NOW_MS), B: (900, NOW_MS)}, watermark_ms=99)
    for jump_ms in (86_400_000, -86_400_000):
        clock.jump_ms = jump_ms
        assert source.plan(2, start, state).sources is None, "A is waited for"
        assert source._planned_at_ms == source._paused_at_ms == NOW_MS
    clock.ms += IDLE_MS
    assert source.plan(2, start, state).sources is not None, "and idle after the pause"
