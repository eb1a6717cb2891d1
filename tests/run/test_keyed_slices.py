"""A keyed task whose rows do not fit into its memory works in slices, and nobody can tell."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from tallystick.state.functions.aggregates import collect, count, sum
from tallystick.state.functions.keyed_batch import KeyedBatch, Update
from tallystick.state.functions.processing import EVENT_TIME, PROCESSING_TIME
from tallystick.state.functions.ready_made import (
    aggregate,
    deduplicate,
    sessions,
    top_n,
)
from tallystick.state.functions.vectorised import vectorised
from tallystick.state.functions.windowed import windowed
from tallystick.state.functions.windows import hopping, session
from tallystick.state.key_groups import KeyGroupRange, key_groups_of
from tallystick.state.keys import KeyCodec
from tallystick.state.pyspark.processor import row_processor
from tallystick.tasks import keyed
from tallystick.tasks.keyed import Slices
from tests.examples import drawn
from tests.keyed_job import EVENTS, Job, events, step

KEY = KeyCodec(pa.schema([EVENTS.field("user")]))


def taken(
    batches: list[pa.RecordBatch], groups: KeyGroupRange, bytes_max: int
) -> tuple[list[tuple[KeyGroupRange, pa.RecordBatch]], bool]:
    """The slices, and whether they had been in memory."""
    with Slices(EVENTS, KEY, 128, groups, bytes_max, "rows") as slices:
        for batch in batches:
            slices.add(batch)
        parts = [(part.groups, part.rows) for part in slices]
        return parts, slices._file is None


@drawn(60)
@given(
    st.lists(st.lists(st.integers(0, 200), max_size=60), max_size=12),
    st.integers(1, 4000),
    st.integers(0, 127),
    st.integers(0, 127),
)
def test_every_row_is_in_the_slice_of_its_key_group_in_order(batches, bytes_max, one, two):
    groups = KeyGroupRange(min(one, two), max(one, two))
    rows = [events(*((f"u{u}", n) for n, u in enumerate(us))) for us in batches if us]
    rows = [
        batch.filter(pa.array((key_groups >= groups.first) & (key_groups <= groups.last)))
        for batch in rows
        for key_groups in [key_groups_of(KEY.hash_codes(batch), 128)]
    ]

    slices, _ = taken(rows, groups, bytes_max)

    assert [
        number
        for part_groups, _ in slices
        for number in range(part_groups.first, part_groups.last + 1)
    ] == list(range(groups.first, groups.last + 1))
    per_user: dict[str, list[int]] = {}
    for slice_groups, part in slices:
        of_rows = key_groups_of(KEY.hash_codes(part), 128)
        assert ((of_rows >= slice_groups.first) & (of_rows <= slice_groups.last)).all()
        for row in part.to_pylist():
            per_user.setdefault(row["user"], []).append(row["n"])
    expected: dict[str, list[int]] = {}
    for row in (row for batch in rows for row in batch.to_pylist()):
        expected.setdefault(row["user"], []).append(row["n"])
    assert per_user == expected


def test_slices_are_as_large_as_they_may_be_and_rows_that_fit_stay_in_memory():
    batches = [events(*((f"user-{n}-{at}", n, at) for at in range(1000))) for n in range(20)]
    everything = int(np.sum([batch.nbytes for batch in batches]))
    groups = KeyGroupRange(0, 127)

    whole, was_in_memory = taken(batches, groups, everything)
    assert was_in_memory
    assert len(whole) == 1

    slices, was_in_memory = taken(batches, groups, everything // 5)
    assert not was_in_memory
    assert 5 <= len(slices) <= 7
    assert max(part.nbytes for _, part in slices) <= everything // 5


def test_a_key_that_has_most_rows_is_one_slice_all_the_same():
    batches = [events(*(("hot" if at % 10 else f"u{at}", at) for at in range(1000)))] * 10

    slices, _ = taken(batches, KeyGroupRange(0, 127), 10_000)

    hot = [part for _, part in slices if "hot" in part["user"].to_pylist()]
    assert len(hot) == 1
    assert hot[0].nbytes > 10_000


def test_nothing_is_left_in_the_folder_that_spark_names(tmp_path, monkeypatch):
    monkeypatch.setenv(keyed.FOLDERS_VARIABLE, f"{tmp_path},/nowhere")
    with Slices(EVENTS, KEY, 128, KeyGroupRange(0, 127), 1, "rows") as slices:
        for at in range(3):
            slices.add(events(("a", at)))
        assert slices._file is not None
        assert not list(tmp_path.iterdir()), "the file has no name"


# --- whole steps ----------------------------------------------------------------------------------


def reminding(batch: KeyedBatch) -> Update:
    """Count rows; tell of it when the timer of the last row is due, and forget the key."""
    if batch.is_due:
        columns = {"user": batch.keys["user"], "n": batch.held("n"), "at": batch.held("n")}
        return Update(
            pa.record_batch(columns, schema=EVENTS), {"n": pa.nulls(len(batch), pa.int64())}
        )
    counts = batch.count(start=batch.held("n"))
    return Update(None, {"n": counts}, batch.max("at"))


class Remembering(StatefulProcessor):
    """Counts a user's rows, from what the initial state says."""

    def init(self, handle) -> None:
        self.count = handle.getValueState("count", "n bigint")

    def handleInitialState(self, key, initial, timers) -> None:
        self.count.update((initial.n,))

    def handleInputRows(self, key, rows, timers):
        before = self.count.get()[0] if self.count.exists() else 0
        numbers = [row.n for row in rows]
        self.count.update((before + len(numbers),))
        yield Row(user=key[0], n=numbers[-1], at=before + len(numbers))

    def close(self) -> None:
        pass


INITIAL = pa.table({"user": [f"u{n}" for n in range(0, 40, 3)], "n": list(range(0, 40, 3))})


def counted(emit: str):
    columns = {"n": count(), "at": sum("n", "bigint")}
    return step(aggregate(columns, each=emit))


def windows(kind, **settings):
    columns = {"count": count(), "total": sum("n"), "all": collect("n")}
    function = windowed(kind, columns, **settings).make(EVENTS)
    return step(function, event_time="at", output=function.output(KEY.schema, EVENTS))


STEPS = {
    "an aggregate per epoch": (counted("epoch"),),
    "an aggregate per record": (counted("record"),),
    "distinct rows": (step(deduplicate()),),
    "distinct rows for a while": (step(deduplicate(forget_after_ms=3)),),
    "the best two": (
        step(
            top_n(2, "n", "bigint"),
            output=pa.schema([("user", pa.string()), ("n", pa.list_(pa.int64()))]),
        ),
    ),
    "sessions": (
        step(
            sessions(5, "at"),
            event_time="at",
            output=sessions(5, "at").output(KEY.schema, EVENTS),
        ),
    ),
    "windows": (windows(hopping(10, every=5), allowed_lateness=3),),
    "windows of sessions": (windows(session(5), emit="update"),),
    "timers of event time": (
        step(vectorised(reminding, state="n bigint", time_mode=EVENT_TIME), event_time="at"),
    ),
    "timers of the clock": (
        step(vectorised(reminding, state="n bigint", time_mode=PROCESSING_TIME)),
    ),
    "a processor of rows": (step(row_processor(Remembering(), output=EVENTS)),),
    "a processor of rows with initial state": (
        step(row_processor(Remembering(), output=EVENTS, initial_state=INITIAL)),
    ),
    "two steps": (counted("record"), replace(counted("epoch"), uid="again")),
}


@pytest.mark.parametrize("name", STEPS)
@drawn(8)
@given(
    epochs=st.lists(
        st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=30), max_size=4),
        min_size=1,
        max_size=5,
    ),
    parallelism=st.integers(1, 3),
    slice_bytes=st.integers(1, 600),
)
def test_a_step_in_slices_says_and_keeps_what_it_does_in_one_piece(
    name, epochs, parallelism, slice_bytes
):
    whole, sliced = Job(STEPS[name]), Job(STEPS[name], slice_bytes=slice_bytes)
    at = 0
    for epoch, sources in enumerate(epochs):
        batches = []
        for users in sources:
            rows = [(f"u{user}", at + n, 2 * epoch + user % 3) for n, user in enumerate(users)]
            batches.append(events(*rows))
            at += len(users)
        outputs = [
            job.run(batches, parallelism=parallelism, at_ms=2 * epoch) for job in (whole, sliced)
        ]

        per_user = [by_user(rows) for rows in outputs]
        assert per_user[0] == per_user[1], "in the order of each key"
        assert contents(whole) == contents(sliced)
        assert whole.late == sliced.late
        assert whole.state[0].watermark_ms == sliced.state[0].watermark_ms
        assert whole.shares[-1] == sliced.shares[-1]


def by_user(rows: list[dict]) -> dict[str, list[dict]]:
    rows_by_user: dict[str, list[dict]] = {}
    for row in rows:
        rows_by_user.setdefault(row["user"], []).append(row)
    return rows_by_user


def contents(job: Job) -> list[tuple[int, int, str, int, bytes]]:
    """The files of state; only their names differ."""
    return sorted(
        (file.first, file.last, file.kind, file.epoch, job.worker_host.files.files[file.path])
        for step_state in job.state
        for file in step_state.files
    )


def test_an_aggregate_per_epoch_emits_once_per_key_though_its_rows_were_put_away():
    job = Job((counted("epoch"),), slice_bytes=2_000)
    batches = [events(*((f"u{n % 50}", n) for n in range(500))) for _ in range(4)]

    rows = job.run(batches)

    assert sorted(row["user"] for row in rows) == sorted(f"u{n}" for n in range(50))
    assert {row["n"] for row in rows} == {40}
    assert job.shares[0] > 10_000
