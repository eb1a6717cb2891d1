"""Where an epoch's time goes: what the progress says, and the table that `Query.profile` makes."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tallystick.epoch import protocol as c
from tallystick.host.stopwatch import (
    EXCHANGE,
    FUNCTIONS,
    LIVE_ENTRIES,
    READ,
    READ_RECORDS,
    REBUILT_COPIES,
    REUSED_COPIES,
    ROWS_IN,
    ROWS_OUT,
    WAIT,
    TaskTimes,
    count,
    counted_as,
    stopwatch,
    timed,
)
from tallystick.run import part_times
from tallystick.run.part_times import PartTimes, profile_text
from tallystick.tasks.frames import Note, NoteKind
from tallystick.tasks.write import split_notes

RAN = c.EpochRan((), ())
FACTS: list[tuple[float, c.Event]] = [
    (0.0, c.EpochWanted()),
    (0.003, c.EpochPlanned(("end",), ())),
    (0.500, RAN),
    (0.010, c.ManifestWritten("path")),
    (0.020, c.OutputCounted(None)),
    (0.030, c.OutputConfirmed({})),
]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(part_times, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


def tell(parts: PartTimes, clock: SimpleNamespace, facts: list[tuple[float, c.Event]]) -> None:
    for took_s, event in facts:
        clock.s += took_s
        parts(event)


def test_each_part_is_the_time_up_to_the_fact_that_ends_it_and_the_rest_is_cleaning_up(clock):
    facts: list[c.Event] = []
    parts = PartTimes(facts.append)
    tell(parts, clock, FACTS)

    assert parts.duration_ms(0.600) == {
        "triggerExecution": 600,
        "plan": 3,
        "tasks": 500,
        "manifest": 10,
        "count": 20,
        "confirm": 30,
        "cleanUp": 37,
    }
    assert facts == [event for _, event in FACTS], "the user's listener is told all of it"


def test_an_epoch_that_ran_twice_is_told_with_both_tries_and_the_next_begins_at_nothing(clock):
    parts = PartTimes(lambda _: None)
    again = [(0.2, c.ActionFailed(ValueError())), (0.1, c.TransactionAborted()), (0.4, RAN)]
    tell(parts, clock, FACTS[:3] + again)
    times = parts.duration_ms(2.0)
    assert (times["tasks"], times["recover"]) == (900, 300)

    tell(parts, clock, FACTS)
    assert parts.duration_ms(0.6)["tasks"] == 500


def test_of_each_step_the_task_that_worked_longest_is_told_not_the_one_that_waited(clock):
    parts = PartTimes(lambda _: None)
    busiest = {REBUILT_COPIES: 2, REUSED_COPIES: 4, ROWS_IN: 30}
    parts.note_tasks(
        [
            TaskTimes(0, {READ: 5.0}, {READ_RECORDS: 40, ROWS_OUT: 30}),
            TaskTimes(1, {WAIT: 900.0, FUNCTIONS: 1.0}, {REBUILT_COPIES: 1}),
            TaskTimes(1, {WAIT: 10.0, FUNCTIONS: 80.0}, busiest),
            TaskTimes(2, {WAIT: 7.0}),
        ]
    )

    assert parts.tasks(["count"]) == [
        {
            "step": "read",
            "tasks": 1,
            "busiestMs": {READ: 5.0},
            "busyMs": 5.0,
            "waitMs": 0.0,
            "rowsIn": 40,
            "rowsOut": 30,
        },
        {
            "step": "count",
            "tasks": 2,
            "busiestMs": {WAIT: 10.0, FUNCTIONS: 80.0},
            "busyMs": 81.0,
            "waitMs": 910.0,
            "rowsIn": 30,
            "rowsOut": 0,
            "reusedCopies": 4,
            "rebuiltCopies": 3,
        },
        {
            "step": "write",
            "tasks": 1,
            "busiestMs": {WAIT: 7.0},
            "busyMs": 0.0,
            "waitMs": 7.0,
            "rowsIn": 0,
            "rowsOut": 0,
        },
    ]


@pytest.mark.parametrize(("counted", "live"), [([5, 0, 7], 12), ([5, None, 7], None)])
def test_the_entries_of_a_step_are_known_if_each_task_has_looked_into_its_copy(
    counted: list[int | None], live: int | None
):
    parts = PartTimes(lambda _: None)
    counts = [{} if tally is None else {LIVE_ENTRIES: tally} for tally in counted]
    parts.note_tasks([TaskTimes(1, {}, counters) for counters in counts])

    (step,) = parts.tasks(["count"])
    assert step.get("liveEntries") == live


def test_the_table_has_each_part_its_quantiles_and_its_share():
    def epoch(number: int, took: int) -> dict[str, Any]:
        return {
            "batchId": number,
            "execution": "resident",
            "durationMs": {"triggerExecution": took, "plan": took // 10, "tasks": took // 2},
            "tasks": [{"step": "read", "tasks": 2, "busiestMs": {FUNCTIONS: took / 4}}],
        }

    lines = profile_text("late", [epoch(7, 100), epoch(8, 100), epoch(9, 800)]).splitlines()

    assert lines[0] == "pipeline late, epochs 7 to 9, resident"
    cells = {line[:26].strip(): line[26:].split() for line in lines[1:]}
    assert cells["the whole epoch"] == ["100", "800", "100%"]
    assert cells["plan"] == ["10", "80", "10%"]
    assert cells["tasks"] == ["50", "400", "50%"]
    assert cells["functions"] == ["25", "200", "25%"]
    assert any("read: 2 tasks" in line for line in lines)
    assert profile_text("late", []) == "pipeline late: no epoch has ended yet"


def test_time_counts_for_the_innermost_part_and_that_of_who_takes_the_items_for_nobody_here():
    def read_items() -> Any:
        for number in range(2):
            time.sleep(0.02)
            with counted_as(FUNCTIONS):
                time.sleep(0.04)
            yield number

    with stopwatch() as watch:
        for _ in timed(READ, read_items()):
            with counted_as(EXCHANGE):
                time.sleep(0.06)
        ms = watch.times(0).ms

    assert 40 <= ms[READ] < ms[FUNCTIONS] < ms[EXCHANGE]
    assert ms[FUNCTIONS] >= 80
    assert ms[EXCHANGE] >= 120
    assert ms.get("other", 0.0) < 20


def test_outside_of_a_task_nothing_is_counted_and_threads_have_tasks_of_their_own():
    assert list(timed(READ, [1, 2])) == [1, 2]
    with stopwatch() as watch:
        other = threading.Thread(target=lambda: list(timed(READ, (time.sleep(0.01) for _ in "a"))))
        other.start()
        other.join()
        assert READ not in watch.times(0).ms


def test_what_is_left_in_the_middle_is_closed_and_the_part_before_goes_on():
    closed: list[bool] = []

    def read_items() -> Any:
        try:
            yield from range(10)
        finally:
            closed.append(True)

    with stopwatch() as watch, counted_as(FUNCTIONS):
        items = timed(READ, read_items())
        assert next(items) == 0
        items.close()
        assert watch.switch(FUNCTIONS) == FUNCTIONS
    assert closed == [True]


def test_a_note_of_times_travels_among_others():
    with stopwatch() as watch:
        count(READ_RECORDS, 5)
        count(READ_RECORDS, 2)
    count(READ_RECORDS, 100)  # outside of a task
    times = watch.times(3)
    assert times.counts == {READ_RECORDS: 7}
    notes = [Note(NoteKind.LIST, {}), Note(NoteKind.TIMES, times.to_fields())]
    assert split_notes(Note.decode(note.encode()) for note in notes).times == [times]
