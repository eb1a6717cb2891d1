"""Event times by partition, and the watermark that follows from them."""

import json
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.errors import EpochAbortedError, RecordError
from tallystick.state.catalog import PartitionTime, StepState
from tallystick.state.functions.aggregates import count
from tallystick.state.functions.keyed_batch import Update
from tallystick.state.functions.processing import EVENT_TIME
from tallystick.state.functions.ready_made import aggregate
from tallystick.state.functions.vectorised import vectorised
from tallystick.state.overlay import FINAL_WATERMARK_MS, EpochTime, is_final
from tallystick.tasks.epoch_plan import PipelinePlan
from tallystick.tasks.event_times import (
    InputState,
    TimesRead,
    WatermarkRule,
    advanced,
    ahead,
    in_use,
    latest_of,
    not_after,
)
from tallystick.tasks.read import send
from tallystick.tasks.write import split_notes
from tallystick.values import TopicPartition
from tests.keyed_job import EVENTS, Job, by_user, events, finish, routed, step

A, B, C = (TopicPartition("t", index) for index in range(3))
STATE = StepState("step", max_parallelism=128, parallelism=2, key_schema="k", hash_version=1)
NOW = 1_000_000
AT = pa.field("at", pa.int64())


def after(
    base: StepState,
    read: dict[TopicPartition, int | None],
    unfinished: set[TopicPartition] = frozenset(),
    *,
    partitions: set[TopicPartition] = frozenset({A, B, C}),
    begun: set[TopicPartition] = frozenset(),
    at: int = NOW,
    delay: int = 0,
    idle_after: int = 0,
    promised: bool = False,
    advance: bool = False,
    column: str = "",
) -> StepState:
    source = InputState(frozenset(partitions), frozenset(unfinished), frozenset(begun))
    rule = WatermarkRule(
        delay, idle_after, is_promised=promised, idle_advance=advance, column=column
    )
    return advanced(base, read, source, at, rule)


def test_the_watermark_is_below_the_earliest_of_the_partitions_that_have_more_to_read():
    state = after(STATE, {A: 100, B: 500, C: 900}, {A, B}, delay=10)
    assert state.watermark_ms == 89, "a row at 90 is late by 10 at most, and may come"
    state = after(state, {A: 700}, {A, B}, delay=10)
    assert state.watermark_ms == 489, "B has not been read since, and has more"
    state = after(state, {B: 800}, {A}, delay=10)
    assert state.watermark_ms == 689, "A has: its times are of an earlier epoch"


def test_partitions_read_to_their_ends_are_not_waited_for_and_the_latest_counts():
    state = after(STATE, {A: 100, B: 900})
    assert state.watermark_ms == 900
    state = after(state, {A: 200})
    assert state.watermark_ms == 900, "it never goes back"


def test_where_a_partitions_times_are_not_known_yet_the_watermark_waits():
    state = after(STATE, {B: 900}, {A})
    assert state.watermark_ms is None
    state = after(state, {A: 50}, {A})
    assert state.watermark_ms == 49
    state = after(state, {B: 950}, {A, C})
    assert state.watermark_ms == 49, "C is new"


def test_a_partition_without_records_is_waited_for_until_it_is_idle():
    both = {"partitions": {A, B}, "idle_after": 1000}
    state = after(STATE, {A: 100, B: 900}, **both)
    assert state.watermark_ms == 99
    state = after(state, {B: 950}, at=NOW + 999, **both)
    assert state.watermark_ms == 99
    state = after(state, {}, at=NOW + 1000, **both)
    assert state.watermark_ms == 949, "A is idle"
    state = after(state, {}, at=NOW + 5000, **both)
    assert state.watermark_ms == 950, "all are: the latest counts"


def test_a_partition_that_never_had_a_record_is_waited_for_as_well_from_when_it_was_found():
    state = after(STATE, {A: 100}, idle_after=1000)
    assert state.watermark_ms is None
    assert PartitionTime(*B, None, NOW) in state.partition_times
    state = after(state, {A: 500, B: 70}, at=NOW + 999, idle_after=1000)
    assert state.watermark_ms is None, "C may have earlier ones yet"
    state = after(state, {}, at=NOW + 1000, idle_after=1000)
    assert state.watermark_ms == 69, "C is idle"


def test_a_partition_that_is_gone_is_forgotten():
    state = after(STATE, {A: 100, B: 900}, idle_after=1000)
    state = after(state, {}, partitions={B}, idle_after=1000)
    assert state.watermark_ms == 899
    assert state.partition_times == (PartitionTime(*B, 900, NOW),)


def test_the_times_of_a_topic_that_was_created_again_are_those_of_its_own_records():
    state = after(STATE, {A: 900, B: 50}, {A, B})
    state = after(state, {B: 800}, {A}, begun={A})
    assert state.watermark_ms == 49, "what A holds now may be earlier than what it held"
    state = after(state, {A: 60}, {A})
    assert state.watermark_ms == 59


def test_earlier_rows_leave_a_partitions_latest_time_as_it_was():
    state = after(STATE, {A: 500}, {A})
    state = after(state, {A: 300}, {A}, at=NOW + 7)
    assert state.partition_times == (PartitionTime(*A, 500, NOW + 7),)
    assert state.watermark_ms == 499


def test_a_checkpoint_without_partition_times_keeps_its_watermark_until_all_are_known():
    old = replace(STATE, watermark_ms=400)
    state = after(old, {B: 900}, {A, B})
    assert state.watermark_ms == 400
    state = after(state, {A: 300}, {A, B})
    assert state.watermark_ms == 400, "it never goes back"
    state = after(state, {A: 600}, {A, B})
    assert state.watermark_ms == 599


def test_without_rows_there_is_no_watermark():
    assert after(STATE, {}) == STATE
    assert after(STATE, {}, {A}) == STATE


def test_where_all_are_idle_the_watermark_may_go_on_with_the_clock():
    settings = {"partitions": {A, B}, "idle_after": 1000, "delay": 10, "advance": True}
    state = after(STATE, {A: 100, B: 900}, **settings)
    state = after(state, {B: 950}, at=NOW + 400, **settings)
    state = after(state, {}, at=NOW + 1399, **settings)
    assert state.watermark_ms == 939, "A is idle, B not yet"
    state = after(state, {}, at=NOW + 1400, **settings)
    assert state.watermark_ms == 950 - 10 + 1000, "since the newest rows"
    back = after(state, {}, at=NOW + 1401, **settings)
    assert back.watermark_ms == state.watermark_ms + 1
    again = after(back, {}, at=NOW + 1350, **settings)
    assert again.watermark_ms == back.watermark_ms, "the clock was put back"
    state = after(back, {A: 1900}, at=NOW + 9000, **settings)
    assert state.watermark_ms == back.watermark_ms, "A is waited for, and is behind"
    late = after(state, {}, {B}, at=NOW + 99_000, **settings)
    assert late.watermark_ms == state.watermark_ms, "B has unread records"


def test_promised_watermarks_wait_for_all_partitions_as_long_as_it_takes():
    settings = {"partitions": {A, B}, "promised": True}
    state = after(STATE, {A: 100}, **settings)
    assert state.watermark_ms is None, "B has promised nothing yet"
    state = after(state, {B: 900}, at=NOW + 99_999, **settings)
    assert state.watermark_ms == 99, "a row at 100 may come"
    state = after(state, {A: None, B: 950}, at=NOW + 99_999, **settings)
    assert state.watermark_ms == 99, "A had rows without promises"
    assert after(state, {A: 2000}, **settings).watermark_ms == 949


def test_a_partition_that_promises_nothing_but_has_rows_is_not_idle():
    settings = {"partitions": {A, B}, "promised": True, "idle_after": 1000}
    state = after(STATE, {A: 100, B: 900}, **settings)
    state = after(state, {A: None, B: 920}, at=NOW + 900, **settings)
    state = after(state, {B: 950}, at=NOW + 1500, **settings)
    assert state.watermark_ms == 99
    state = after(state, {}, at=NOW + 1900, **settings)
    assert state.watermark_ms == 949, "A is idle"
    state = after(state, {}, at=NOW + 2500, **settings)
    assert state.watermark_ms == 949, "all are; a row at the latest promise may come"


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=12), min_size=1, max_size=3
    ),
    st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3)),
)
def test_no_row_is_late_whose_producer_kept_its_promise(logs, epochs):
    """A row in any order; every few rows carry the least time of those that follow, at most."""
    names = [TopicPartition("t", index) for index in range(len(logs))]
    rows = [
        [
            (at, min([t for t, _ in log[index + 1 :]], default=at) if tells else None)
            for index, (at, tells) in enumerate(log)
        ]
        for log in logs
    ]
    positions, state = [0] * len(logs), STATE
    for counts in [*epochs, [99] * 3]:
        read = [log[at : at + n] for log, at, n in zip(rows, positions, counts, strict=False)]
        late = [row for part in read for row in part if row[0] <= _mark(state)]
        assert not late, (late, state)
        positions = [at + len(part) for at, part in zip(positions, read, strict=True)]
        latest_ms = {
            name: max((mark for _, mark in part if mark is not None), default=None)
            for name, part in zip(names, read, strict=True)
            if part
        }
        behind = {n for n, at, log in zip(names, positions, rows, strict=True) if at < len(log)}
        state = after(state, latest_ms, behind, partitions=set(names), promised=True)
    marks = [[mark for _, mark in log if mark is not None] for log in rows]
    expected = min(map(max, marks)) - 1 if all(marks) else None
    assert state.watermark_ms == expected


PARTITIONS = st.lists(st.lists(st.integers(0, 30), max_size=12), min_size=1, max_size=3)


@given(
    PARTITIONS,
    st.integers(0, 5),
    st.lists(st.tuples(st.lists(st.integers(0, 4), min_size=3, max_size=3), st.booleans())),
)
def test_no_row_of_a_backlog_is_late_however_it_is_cut_into_epochs_and_runs(logs, delay, epochs):
    """Each partition is in order but for the delay, equal times included; all of it is there.

    Between any two epochs the job may be restored from what was written down.
    """
    times = [_nearly_in_order(log, delay) for log in logs]
    names = [TopicPartition("t", index) for index in range(len(times))]
    positions = [0] * len(times)
    state, marks = STATE, []
    for counts, is_restored in [*epochs, ([99] * 3, False)]:
        read = [log[at : at + n] for log, at, n in zip(times, positions, counts, strict=False)]
        late = [t for rows in read for t in rows if t <= _mark(state)]
        assert not late, (late, state)
        positions = [at + len(rows) for at, rows in zip(positions, read, strict=True)]
        latest = {name: max(rows) for name, rows in zip(names, read, strict=True) if rows}
        behind = {n for n, at, log in zip(names, positions, times, strict=True) if at < len(log)}
        state = after(state, latest, behind, partitions=set(names), delay=delay)
        if is_restored:
            state = StepState.from_json(json.loads(json.dumps(state.to_json())))
        marks.append(_mark(state))
    assert marks == sorted(marks), "it never goes back"
    if any(times):
        assert state.watermark_ms == max(map(max, filter(None, times))) - delay, "nothing is left"


def _nearly_in_order(log: list[int], delay: int) -> list[int]:
    """The times of a partition, none of which is later than one before it by more than delay."""
    return [max(at, *log[: index + 1]) - at % (delay + 1) for index, at in enumerate(log)]


def _mark(state: StepState) -> int:
    return -(10**9) if state.watermark_ms is None else state.watermark_ms


def test_the_latest_event_time_of_a_partition_is_no_promise():
    """A start with `watermark_column=` where none was, or with another: rows may come before it."""
    by_events = {"column": "at", "delay": 600}
    by_promises = {"column": "mark", "promised": True, "partitions": {A, B}}
    state = after(STATE, {A: 5000, B: 6000}, {A, B}, partitions={A, B}, **by_events)
    assert state.watermark_ms == 4399
    state = after(state, {}, {A, B}, **by_promises)
    assert state.watermark_ms == 4399, "nobody has promised anything yet"
    state = after(state, {A: 4500}, {A, B}, **by_promises)
    assert state.watermark_ms == 4399, "B has not"
    state = after(state, {B: 4700}, {A, B}, **by_promises)
    assert state.watermark_ms == 4499
    assert StepState.from_json(json.loads(json.dumps(state.to_json()))) == state
    state = after(state, {B: 9000}, {A, B}, partitions={A, B}, **by_events)
    assert state.watermark_ms == 4499, "and promises of A are no event times"


def test_times_of_a_column_that_no_release_named_are_believed_once():
    state = after(STATE, {A: 5000, B: 6000}, {A, B}, partitions={A, B})
    assert "times_of" not in state.to_json()
    state = after(state, {}, {A, B}, partitions={A, B}, column="at")
    assert state.watermark_ms == 4999
    assert state.to_json()["times_of"] == "at"


def test_it_is_written_down_and_read_back():
    state = after(STATE, {A: 100, B: 900}, {A}, idle_after=5)
    assert {time.latest_ms for time in state.partition_times} == {100, 900, None}
    assert StepState.from_json(json.loads(json.dumps(state.to_json()))) == state
    assert "partition_times" not in STATE.to_json()


@pytest.mark.parametrize(
    "entry",
    [
        *(["t", 0, 1], ["t", 0, 1, 2, 3], ["t", "0", 1, 2], [1, 0, 1, 2], ["t", 0, 1.5, 2], 7),
        *(["t", 0, True, 2], ["t", 0, 1, None], ["t", None, 1, 2]),
    ],
)
def test_a_foreign_one_is_refused(entry):
    with pytest.raises((ValueError, TypeError)):
        StepState.from_json({**STATE.to_json(), "partition_times": [entry]})


# --- what readers say ---------------------------------------------------------------------------

KINDS = {
    "bigint in ms": pa.int64(),
    "double in ms": pa.float64(),
    **{unit: pa.timestamp(unit, tz="UTC") for unit in ("s", "ms", "us", "ns")},
    "us, of no zone": pa.timestamp("us"),
    "us, in Tokyo": pa.timestamp("us", tz="Asia/Tokyo"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_readers_tell_the_latest_time_of_each_partition(kind):
    """In the type that the step has, whatever of that kind a function returned."""
    of_rows = KINDS[kind]
    in_ms = not pa.types.is_timestamp(of_rows)
    declared = pa.field("at", pa.int64() if in_ms else pa.timestamp("us", tz="UTC"))

    def rows(*seconds: int | None) -> pa.RecordBatch:
        moments = [None if s is None else datetime.fromtimestamp(s, UTC) for s in seconds]
        whole = [None if s is None else s * 1000 for s in seconds]
        column = pa.array(whole if in_ms else moments, of_rows)
        return pa.record_batch({"k": pa.nulls(len(seconds)), "at": column})

    first, second = TimesRead(declared), TimesRead(declared)
    first.note(A, rows(5, 9, None))
    first.note(A, rows(7))
    first.note(B, rows(None))
    first.note(C, rows(None, None))
    second.note(A, rows(8))
    second.note(B, rows(-3))

    notes = split_notes([*first.notes(), *second.notes()])
    assert latest_of(notes.event_times) == {A: 9000, B: -3000, C: None}
    assert (notes.keyed, notes.sinks, notes.times) == ([], [], [])


def test_readers_are_asked_for_the_column_of_the_first_step_with_event_time():
    timed, other = step(TIMED, event_time="at"), step(TIMED, uid="other", event_time="n")
    assert PipelinePlan((timed, other)).event_time.equals(AT)
    assert PipelinePlan((step(TIMED), timed)).event_time.equals(AT), "rows have it from the start"
    retimed = replace(timed, event_time="made")
    assert PipelinePlan((step(TIMED), retimed)).event_time is None
    unread = step(aggregate({"at": count()}), output=EVENTS)
    assert PipelinePlan((unread, timed)).event_time is None, "that column is another one"
    assert PipelinePlan((timed,), is_noted=False).event_time is None
    promised = step(TIMED, event_time="at", watermark_column="n")
    assert PipelinePlan((promised,)).event_time.name == "n"
    assert PipelinePlan().event_time is None


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_a_limit_beyond_what_a_column_holds_is_none(unit):
    times = pa.array([0, 2**62], pa.timestamp(unit))
    for limit_ms in (1 << 61, 1 << 64, 10**30):
        is_within = limit_ms > 2**62 * (1000 if unit == "s" else 1) or unit in ("us", "ns")
        assert (not_after(times, limit_ms)[1] is None) == is_within


def test_a_reader_that_is_not_asked_says_nothing():
    times = TimesRead(None)
    times.note(A, pa.record_batch({"at": pa.array([1])}))
    assert times.notes() == []


def test_a_column_of_another_kind_is_an_error_and_not_a_partition_without_times():
    """Such a partition would be waited for, and hold up all others."""
    with pytest.raises(RecordError, match="column 'at' is string, and was declared int64"):
        TimesRead(AT).note(A, pa.record_batch({"at": pa.array(["never"])}))


# --- through the tasks of a keyed step ----------------------------------------------------------

TIMED = vectorised(
    lambda batch: Update(batch.rows),
    state="n bigint",
    time_mode=EVENT_TIME,
    output=lambda *_: EVENTS,
)


@dataclass
class Input:
    """A keyed job whose readers each read a partition, and note its times."""

    job: Job
    state: InputState
    attempts: dict[int, int] = field(default_factory=dict)

    def run(self, *sources: pa.RecordBatch, again: int | None = None, **settings) -> list[dict]:
        """Run an epoch; a reader may be run again after the first task of the step had its rows."""
        planned = replace(self.job.plan(**settings), source=self.state)

        def frames_of(index: int) -> list:
            times = TimesRead(AT)
            times.note(TopicPartition("t", index), sources[index])
            return list(send(planned.first, [sources[index]], index, times.notes))

        frames = [frame for index in range(len(sources)) for frame in frames_of(index)]
        (plan,) = planned.plans
        shares = routed(frames, plan.base.parallelism)
        if again is not None:
            others = [frame for frame in frames if frame.source != again]
            shares[1:] = routed([*others, *frames_of(again)], plan.base.parallelism)[1:]
        out = [frame for index, mine in enumerate(shares) for frame in plan.run(mine, index)]
        prepared, rows = finish(planned, routed(out, planned.writer_count))
        self.job.state, self.job.late = prepared.state, prepared.late
        return rows


def timed_input(unfinished: set[TopicPartition]) -> Input:
    job = Job((step(TIMED, event_time="at", watermark_delay_ms=10),))
    return Input(job, InputState(frozenset({A, B}), frozenset(unfinished)))


def test_a_step_takes_its_watermark_from_the_readers_notes_whatever_its_parallelism():
    read = timed_input({A})
    read.run(events(("a", 1, 100)), events(("b", 1, 900)), parallelism=3)
    assert read.job.state[0].watermark_ms == 89
    rows = read.run(events(("c", 2, 95)), events(("d", 2, 80)), parallelism=2)
    assert by_user(rows) == {"c": [2]}
    assert read.job.late == (("count", 1),)
    read.state = InputState(frozenset({A, B}), frozenset())
    read.run(events(("a", 3, 120)), events(), parallelism=1)
    assert read.job.state[0].watermark_ms == 890


def test_an_epoch_whose_tasks_saw_two_attempts_of_a_reader_leaves_no_times():
    """The second attempt may have other rows, and so other times."""
    read = timed_input({A, B})
    read.run(events(("a", 1, 100)), events(("b", 1, 900)), parallelism=2)
    before = read.job.state
    with pytest.raises(EpochAbortedError, match="task 1 of stage 0 ran a second time"):
        read.run(events(("a", 2, 200)), events(("b", 2, 950)), again=1, parallelism=2)
    assert read.job.state == before


def test_a_step_whose_rows_come_with_no_partition_any_more_forgets_their_times():
    """A `transform` was put before it: by stale times it would wait for partitions for good."""
    read = timed_input({A})
    read.run(events(("a", 1, 100)), events(("b", 1, 900)))
    assert read.job.state[0].partition_times
    read.job.run([events(("a", 1, 300))])
    assert read.job.state[0].partition_times == ()
    assert read.job.state[0].watermark_ms == 290


# --- the end of all inputs, and inputs of different paces ---------------------------------------


def test_a_partition_that_is_over_is_not_waited_for_not_even_for_its_promise():
    over = InputState(frozenset({A, B}), frozenset({B}), ended=frozenset({A}))
    state = advanced(STATE, {A: 100, B: 500}, over, NOW, WatermarkRule(is_promised=True))
    assert state.watermark_ms == 499
    state = advanced(STATE, {A: 100, B: 500}, over, NOW, WatermarkRule(idle_after_ms=60_000))
    assert state.watermark_ms == 499


@pytest.mark.parametrize("rule", [WatermarkRule(10), WatermarkRule(is_promised=True)])
@pytest.mark.parametrize("read", [{}, {A: 100}], ids=["nothing was read", "rows"])
def test_at_the_end_of_all_inputs_the_watermark_is_the_final_one_and_stays_it(rule, read):
    over = InputState(frozenset({A}), frozenset(), ended=frozenset({A}), is_over=True)
    state = advanced(STATE, read, over, NOW, rule)
    assert state.watermark_ms == FINAL_WATERMARK_MS
    again = StepState.from_json(json.loads(json.dumps(state.to_json())))
    assert advanced(again, {}, over, NOW + 1, rule).watermark_ms == FINAL_WATERMARK_MS
    assert is_final(state.watermark_ms)
    assert EpochTime(NOW, state.watermark_ms).event_timers_until_ms == (1 << 63) - 1


def paced(base: StepState, read: dict, **further) -> tuple[StepState, int | None]:
    """Run an epoch that reads these partitions to their ends; return what it went by too."""
    source = InputState(frozenset({A, B}), frozenset(), arrived=frozenset(read), **further)
    base = in_use(base, source, WatermarkRule())
    return advanced(base, read, source, NOW, WatermarkRule()), base.watermark_ms


def test_a_partition_whose_next_records_are_there_is_waited_for_though_it_was_read_to_its_end():
    """Two inputs, each read to its end in each epoch; one is behind by an hour."""
    state, went_by = paced(STATE, {A: 100, B: 3_600_100})
    assert state.watermark_ms == 3_600_100, "as long as nothing comes"
    for second in range(1000, 9000, 1000):
        state, went_by = paced(state, {A: second, B: 3_600_100 + second})
        assert went_by is None or went_by < second, "no row of A is late"
        state = StepState.from_json(json.loads(json.dumps(state.to_json())))
    state, went_by = paced(state, {B: 3_700_000})
    assert went_by == 3_608_099, "A brings nothing, and is not waited for"
    _, went_by = paced(state, {A: 9000})
    assert went_by == 3_608_099, "what was in use does not go back"
    _, went_by = paced(state, {})
    assert went_by == 3_700_000, "an epoch for timers"


def test_what_arrives_first_is_waited_for_and_what_is_ready_holds_nobody():
    state, _ = paced(STATE, {B: 500})
    _, went_by = paced(state, {A: 7})
    assert went_by is None, "nobody knows what A brings"
    _, went_by = paced(state, {B: 600})
    assert went_by == 499


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=12), min_size=2, max_size=3))
def test_no_row_is_late_while_each_look_finds_records_of_all(logs):
    """Each partition is in order, an epoch reads a record of each; they may lie apart."""
    rows = [sorted(log) for log in logs]
    names = [TopicPartition("t", index) for index in range(len(rows))]
    state = STATE
    for number in range(min(map(len, rows))):
        read = {name: log[number] for name, log in zip(names, rows, strict=True)}
        source = InputState(frozenset(names), frozenset(), arrived=frozenset(names))
        base = in_use(state, source, WatermarkRule())
        assert all(at > _mark(base) for at in read.values()), (read, base)
        state = advanced(base, read, source, NOW, WatermarkRule())


def test_rows_of_an_input_without_event_times_are_not_waited_for():
    """Its partitions are not among those of the state; readers note that they had rows."""
    source = InputState(frozenset({A}), frozenset())
    state = advanced(STATE, {A: 100, B: None}, source, NOW, WatermarkRule(idle_after_ms=1000))
    state = advanced(state, {B: None}, source, NOW + 1000, WatermarkRule(idle_after_ms=1000))
    assert state.watermark_ms == 100
    assert all(time[:2] != B for time in state.partition_times)


def test_a_clock_that_was_ahead_for_one_epoch_holds_nobody():
    day = 86_400_000
    for idle_after in (0, 1000):
        state = after(STATE, {A: 100, B: 100}, at=NOW + day, partitions={A, B})
        settings = {"partitions": {A, B}, "idle_after": idle_after}
        state = after(state, {A: 200}, at=NOW, **settings)
        state = after(state, {A: 300}, at=NOW + 1000, **settings)
        assert state.watermark_ms in (299, 300), "B is idle by then"


def test_partitions_whose_rows_do_not_come_through_hold_nobody_up():
    state = after(STATE, {A: 100, B: 3_600_000}, {A, B})
    source = InputState(frozenset({A, B}), frozenset({A, B}))
    times = state.partition_times
    assert ahead(times, source, 60_000) == {B}
    assert ahead(times, source, 60_000, mute=frozenset({A})) == frozenset()
    assert ahead(times, source, 60_000, mute=frozenset({A, B})) == frozenset()


@pytest.mark.parametrize("kind", [kind_name for kind_name in KINDS if kind_name != "double in ms"])
def test_readers_do_not_believe_times_that_are_too_far_ahead(kind):
    of_rows = KINDS[kind]
    times = pa.array([1_000, 61_000, 61_001, None]).cast(pa.int64())
    if pa.types.is_timestamp(of_rows):
        times = times.cast(pa.timestamp("ms")).cast(of_rows, safe=False)
        times = times.cast(pa.timestamp(of_rows.unit, of_rows.tz), safe=False)
    believed, early = not_after(times, 61_000)
    assert (
        early is None
        if of_rows == pa.timestamp("s", "UTC")
        else early.to_pylist() == [*(False, False, True, False)]
    )
    read = TimesRead(pa.field("at", of_rows), limit_ms=61_000)
    read.note(A, pa.record_batch({"at": times}))
    notes = split_notes(read.notes())
    assert latest_of(notes.event_times) == {A: 61_000}
    assert believed.null_count == (1 if early is None else 2)
