"""The tasks of a keyed step, from frames to frames: rows meet their state, whoever holds it."""

import logging
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.errors import BrokenInvariantError, EpochAbortedError, OptionError, RecordError
from tallystick.state import file_sets
from tallystick.state.catalog import SNAPSHOT, StepState
from tallystick.state.functions.aggregates import count
from tallystick.state.functions.keyed_batch import KeyedBatch, Update
from tallystick.state.functions.processing import EVENT_TIME, PROCESSING_TIME
from tallystick.state.functions.vectorised import vectorised
from tallystick.state.functions.windowed import windowed
from tallystick.state.functions.windows import tumbling
from tallystick.state.keys import KeyCodec
from tallystick.tasks import epoch_plan, keyed
from tallystick.tasks.epoch_plan import PipelinePlan
from tallystick.tasks.frames import from_ipc, to_ipc
from tallystick.tasks.keyed import _TaskResult
from tallystick.tasks.outputs import DeadLetters
from tests.examples import drawn
from tests.keyed_job import (
    EVENTS,
    Job,
    MemoryHost,
    MemoryStore,
    by_user,
    events,
    finish,
    routed,
    step,
)


def numbering(batch: KeyedBatch) -> Update:
    """Each row with its number among the rows of its key, over all epochs."""
    numbers, totals = batch.running_count(start=batch.held("n"))
    columns = {"user": batch.rows["user"], "n": batch.rows["n"], "at": numbers}
    return Update(pa.record_batch(columns, schema=EVENTS), {"n": totals})


NUMBERING = step(vectorised(numbering, state="n bigint"))


@drawn(25)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 5),
            st.booleans(),
            st.lists(st.lists(st.integers(0, 12), max_size=8), min_size=1, max_size=3),
        ),
        max_size=6,
    )
)
def test_every_row_of_a_key_is_counted_once_in_order_whatever_the_parallelism(epochs):
    """Parallelism changes between any two epochs, and hosts lose their copies."""
    job, seen, fed = Job((NUMBERING,)), [], []
    for parallelism, is_lost, sources in epochs:
        if is_lost:
            job.worker_host.stores.clear()
        batches = [
            [events(*((f"u{u}", len(fed) + at) for at, u in enumerate(us)))] for us in sources
        ]
        seen += job.run(*batches, parallelism=parallelism)
        fed += [(f"u{u}", len(fed) + at) for us in sources for at, u in enumerate(us)]

    numbers = by_user(seen, "at")
    assert sum(map(len, numbers.values())) == sum(len(us) for _, _, ss in epochs for us in ss)
    assert all(
        user_numbers == list(range(1, len(user_numbers) + 1)) for user_numbers in numbers.values()
    )


def test_rows_of_a_key_come_in_order_of_source_and_sequence():
    job = Job((NUMBERING,))

    rows = job.run(
        [events(("a", 1), ("b", 2)), events(("a", 3))], [events(("a", 4)), events(("b", 5))]
    )

    assert by_user(rows) == {"a": [1, 3, 4], "b": [2, 5]}


def test_dead_letters_pass_by_in_order_and_as_they_were():
    letters = [DeadLetters(pa.record_batch({"value": [b"x%d" % n]})) for n in range(4)]
    job = Job((NUMBERING, replace(NUMBERING, uid="again")))

    rows = job.run([letters[0], events(("a", 1)), letters[1]], letters[2:])

    assert by_user(row for row in rows if "user" in row) == {"a": [1]}
    assert [row["dead"] for row in rows if "dead" in row] == ["x0", "x1", "x2", "x3"]


def test_a_step_gets_what_the_one_before_put_out_and_its_functions_made_of_it():
    def doubled(rows: pa.RecordBatch) -> pa.RecordBatch:
        return pa.concat_batches([rows, rows])

    job = Job((replace(NUMBERING, functions=(doubled,)), replace(NUMBERING, uid="again")))

    for _ in range(2):
        rows = job.run([events(("a", 1), ("b", 2))], parallelism=3)

    assert {user: sorted(times) for user, times in by_user(rows, "at").items()} == {
        "a": [3, 4],
        "b": [3, 4],
    }
    assert [state.uid for state in job.state] == ["count", "again"]


def test_a_row_that_cannot_be_written_is_named_with_its_key_where_values_may_stand():
    """A page shows the message without them."""
    place = keyed.ProcessPlan._place(SimpleNamespace(step=NUMBERING), events(("secret", 1)), 0)

    assert place.values == " for user='secret'"
    assert place.words == "a row of keyed step 'count'"


def test_a_task_without_rows_touches_no_store_and_leaves_no_file():
    job = Job((NUMBERING,))
    job.run([events(("a", 1))], parallelism=4)
    before = job.state
    job.worker_host.opened.clear()
    job.epoch = 1  # none of these epochs is one in which quiet copies are brought forward
    job.run([events()], parallelism=4)

    assert job.worker_host.opened == []
    assert job.state == before


def test_a_quiet_tasks_copy_does_not_fall_behind_for_good(monkeypatch):
    """What is too far behind has to be made anew: as dear as a restore."""
    monkeypatch.setattr(file_sets, "TRAIL_LENGTH", 64)
    monkeypatch.setattr(keyed, "KEEP_UP_EPOCHS", 16)
    job = Job((NUMBERING,))
    job.run([events(*((f"u{n}", n) for n in range(40)))], parallelism=2)
    job.run([events(*((f"u{n}", n) for n in range(40)))], parallelism=2)
    quiet = next(u for u in range(40) if target(job, f"u{u}") == 1)
    busy = next(u for u in range(40) if target(job, f"u{u}") == 0)
    for _ in range(150):
        job.run([events((f"u{busy}", 0))], parallelism=2)

    cleared = []
    apply = MemoryStore.apply

    def watched(self, expected, version, steps):
        steps = list(steps)
        cleared.extend(
            processed for processed in steps if not isinstance(processed, pa.RecordBatch)
        )
        return apply(self, expected, version, steps)

    monkeypatch.setattr(MemoryStore, "apply", watched)
    (row,) = job.run([events((f"u{quiet}", 0))], parallelism=2)

    assert row["at"] == 3
    assert not cleared


def target(job: Job, user: str) -> int:
    """The task of two that owns a user."""
    first = job.plan(parallelism=2).first
    (frame,) = first.frames(events((user, 0)), 0, 0, 0)
    return frame.target


def test_snapshots_and_merges_that_are_due_are_written_and_old_files_left_behind(monkeypatch):
    snapshots = partial(file_sets.due_snapshots, changed_bytes_min=1000)
    merges = partial(file_sets.due_merges, files_min=3)
    monkeypatch.setattr(epoch_plan, "due_snapshots", snapshots)
    monkeypatch.setattr(epoch_plan, "due_merges", merges)
    job = Job((NUMBERING,))
    for n in range(12):
        rows = job.run([events(*((f"u{u}", n) for u in range(30)))], parallelism=2)
        assert {row["at"] for row in rows} == {n + 1}
    job.worker_host.stores.clear()

    rows = job.run([events(*((f"u{u}", 0) for u in range(30)))], parallelism=3)

    files = job.state[0].files
    assert any(file.kind == SNAPSHOT for file in files), job.worker_host.files.files.keys()
    assert any(".changelog" in path and "-merged" in path for path in job.worker_host.files.files)
    assert len(files) < 12
    assert [row["at"] for row in rows] == [13] * 30


def test_what_is_written_anew_bears_the_epoch_that_writes_it(monkeypatch):
    """By an older one it would look like rubbish to a driver that was replaced meanwhile."""
    snapshots = partial(file_sets.due_snapshots, changed_bytes_min=1)
    monkeypatch.setattr(epoch_plan, "due_snapshots", snapshots)
    job = Job((NUMBERING,))
    job.run([events(("a", 1))])
    job.epoch = 6  # what was in between changed nothing
    job.run([events(("a", 1))])

    (path,) = [name for name in job.worker_host.files.files if name.endswith(SNAPSHOT)]
    assert file_sets.epoch_of(path) == 7


@dataclass
class Beginning:
    """A function that carries rows which its state is to start with."""

    function: Any
    rows: Any

    def __getattr__(self, name):
        return getattr(self.function, name)

    def started(self):
        return self.function


def test_what_state_starts_with_travels_with_the_first_epoch_only():
    function = vectorised(numbering, state="n bigint")
    job = Job((step(Beginning(function, ["rows"])), replace(NUMBERING, uid="after")))
    first = job.plan()
    assert first.plans[0].step.processor.rows == ["rows"]
    assert first.first.step.processor.rows == ["rows"]

    job.run([events(("u", 1))])
    later = job.plan()
    assert later.plans[0].step.processor is function
    assert later.first.step.processor is function
    (row,) = job.run([events(("u", 1))])
    assert row["at"] == 2


def test_rows_of_two_attempts_of_a_task_do_not_count():
    job = Job((NUMBERING,))
    planned = job.plan(parallelism=2)
    frames = list(keyed.send(planned.first, [events(("a", 1), ("b", 2))], 0))
    again = list(keyed.send(planned.first, [events(("a", 1), ("b", 2))], 0))
    (plan,) = planned.plans
    mixed = [*plan.run(routed(frames, 2)[0], 0), *plan.run(routed(again, 2)[1], 1)]

    with pytest.raises(EpochAbortedError, match="task 0 of stage 0 ran a second time"):
        finish(planned, routed(mixed, 2))


def test_a_task_that_was_not_heard_of_is_not_forgotten():
    job = Job((NUMBERING,))
    planned = job.plan(parallelism=2)
    written = job.written(planned, [[events(("a", 1))]])
    without = [[f for f in frames if f.source != 1] for frames in written]

    with pytest.raises(BrokenInvariantError, match="notes of the keyed tasks"):
        finish(planned, without)


def test_late_rows_are_dropped_and_told_and_the_watermark_is_that_of_earlier_epochs(caplog):
    timed = vectorised(numbering, state="n bigint", time_mode=EVENT_TIME)
    job = Job((step(timed, event_time="at", watermark_delay_ms=10),))
    job.run([events(("a", 1, 100), ("b", 2, 50))])
    assert job.state[0].watermark_ms == 90

    with caplog.at_level(logging.WARNING, logger="tallystick"):
        rows = job.run([events(("a", 3, 90), ("a", 4, 91), ("b", 5, 80), ("b", 6, 200))])

    assert by_user(rows) == {"a": [4], "b": [6]}
    assert job.state[0].watermark_ms == 190
    assert "epoch 1: 2 rows came later than the watermark (90 ms)" in caplog.text
    assert job.late == (("count", 2),)
    job.run([events(("a", 7, 195))])
    assert job.state[0].watermark_ms == 190, "it never goes back"
    assert job.late == ()


@pytest.mark.parametrize("unit", ["bigint in ms", "s", "ms", "us"])
def test_a_time_that_cannot_be_moves_no_watermark(unit):
    """Today in microseconds, in a column of milliseconds, is the year 57,868."""
    per_second = {"s": 1, "us": 1_000_000}.get(unit, 1000)
    kind = pa.int64() if unit == "bigint in ms" else pa.timestamp(unit)
    columns = EVENTS.set(EVENTS.get_field_index("at"), pa.field("at", kind))
    timed = vectorised(lambda _: Update(), state="", time_mode=EVENT_TIME)
    job = Job((step(timed, columns=columns, event_time="at"),))
    far = 253_402_128_000 * per_second

    def at(time):
        return pa.record_batch([["a"], [1], pa.array([time]).cast(kind)], schema=columns)

    job.run([at(far)])
    kept = job.state
    with pytest.raises(RecordError, match=r"step count: event_time='at': \d+ m?u?s since 1970"):
        job.run([at(far + per_second)])
    with pytest.raises(RecordError, match="is not within the years 1 to 9999"):
        job.run([at(-(1 << 63) + 1)])
    with pytest.raises(RecordError, match="is not within the years 1 to 9999"):
        job.run([at(1_764_000_000_000 * per_second)])
    assert job.state == kept


def test_without_event_time_mode_nothing_is_late():
    job = Job((replace(NUMBERING, event_time="at"),))
    job.run([events(("a", 1, 100))])

    assert by_user(job.run([events(("a", 2, 5))])) == {"a": [2]}


def test_timers_are_looked_for_without_rows():
    def remind(batch: KeyedBatch) -> Update:
        if batch.is_due:
            zeros = pa.array([-1] * len(batch), pa.int64())
            return Update(pa.record_batch([batch.keys["user"], zeros, zeros], schema=EVENTS))
        return Update(timers=pa.array([batch.time.timestamp_ms + 10] * len(batch)))

    job = Job((step(vectorised(remind, state="", time_mode=PROCESSING_TIME)),))
    job.run([events(("a", 1))], at_ms=100)

    assert job.run([], at_ms=109) == []
    assert by_user(job.run([], at_ms=110)) == {"a": [-1]}
    assert job.run([], at_ms=500) == []
    # They are due by the clock: by event time they would be at the wrong moment.
    kept = tuple(StepState.from_json(step_state.to_json()) for step_state in job.state)
    with pytest.raises(OptionError, match=r"now 'EventTime', but .* by 'ProcessingTime'"):
        PipelinePlan((step(vectorised(remind, state="", time_mode=EVENT_TIME)),)).check(kept)


def wrong(output: pa.RecordBatch) -> Job:
    return Job((step(vectorised(lambda batch: Update(output), state="n bigint")),))


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        (
            {"user": ["a"], "n": [1]},
            OptionError,
            r"step count: the output: column 'at' is not ther",
        ),
        ({"user": ["a"], "n": [1], "at": [1], "x": [1]}, OptionError, "column 'x' is not declared"),
        ({"user": ["a"], "n": [1.5], "at": [1]}, RecordError, "column 'n' is double, and was decl"),
        ({"user": ["a"], "n": ["x"], "at": [1]}, RecordError, "column 'n' is string, and was decl"),
    ],
)
def test_output_that_is_not_as_declared_is_refused_by_name(output, error, message):
    with pytest.raises(error, match=message):
        wrong(pa.record_batch(output)).run([events(("a", 1))])


def test_output_of_another_type_that_fits_is_cast():
    narrow = pa.record_batch({"user": ["a"], "n": pa.array([7], pa.int8()), "at": [None]})

    assert by_user(wrong(narrow).run([events(("a", 1))])) == {"a": [7]}


def test_rows_without_the_keys_column_are_refused_by_name():
    rows = events(("a", 1)).select(["n", "at"])

    with pytest.raises(OptionError, match=r"rows that come to it: column 'user' is not there"):
        Job((NUMBERING,)).run([rows])


def test_a_copy_that_others_keep_moving_ends_the_epoch():
    class Restless(MemoryHost):
        def store(self, uid, groups):
            class Moved(MemoryStore):
                def version(self):
                    return job.state[0].version

            return Moved()

    job = Job((NUMBERING,))
    job.run([events(("a", 1))])
    job.worker_host = Restless(job.worker_host.files)

    with pytest.raises(EpochAbortedError, match="another run uses it"):
        job.run([events(("a", 1))])


def test_batches_travel_as_they_are():
    rows = events(*((f"u{n}", n) for n in range(3000))).slice(7, 2000)

    assert from_ipc(to_ipc(rows)).equals(rows)
    assert len(to_ipc(rows)) < rows.nbytes


def test_only_columns_that_are_read_travel():
    job = Job((step(vectorised(numbering, state="n bigint", reads=["n"])),))

    assert job.steps[0].routed.names == [name for name in EVENTS.names if name in ("user", "n")]


def test_rows_too_far_ahead_of_the_clock_are_left_out_and_move_no_watermark(caplog):
    timed = vectorised(numbering, state="n bigint", time_mode=EVENT_TIME)
    job = Job((step(timed, event_time="at", event_time_max_ahead_ms=1000),))
    now_ms = job.plan().plans[0].time.timestamp_ms
    far_ms = now_ms + 1001

    with caplog.at_level(logging.WARNING, logger="tallystick"):
        rows = job.run([events(("a", 1, now_ms + 1000), ("b", 2, far_ms), ("c", 3, far_ms * 1000))])

    assert by_user(rows) == {"a": [1]}
    assert job.late == (("count", 2),)
    assert job.state[0].watermark_ms == now_ms + 1000
    assert (
        "2 rows were further ahead of the clock than event_time_max_ahead (1000 ms)" in caplog.text
    )
    assert "later than the watermark" not in caplog.text


def test_rows_too_far_ahead_go_to_the_output_of_late_rows_if_there_is_one():
    function = windowed(tumbling(10), {"n": count()}, late="late").make(EVENTS)
    key = KeyCodec(pa.schema([EVENTS.field("user")]))
    windows = replace(
        step(NUMBERING.processor, event_time="at", event_time_max_ahead_ms=1000),
        processor=function,
        declared=function.declared(key),
        output=function.output(key.schema, EVENTS),
        outputs=function.outputs(key.schema, EVENTS),
    )
    (plan,) = Job((windows,)).plan().plans
    far = events(("a", 1, plan.time.timestamp_ms + 1001), ("a", 2, 5))
    result = _TaskResult()
    believed, early = plan._believed(far, result)
    assert believed.column("n").to_pylist() == [2]
    assert (early.output, early.rows.column("n").to_pylist()) == ("late", [1])
    assert (result.late, result.early) == (0, 0)
