"""Watermarks that follow from each partition's event times, on Spark and a real broker."""

import itertools
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark import cloudpickle
from typer.testing import CliRunner

import tallystick as ts
from tallystick.__main__ import app
from tallystick.epoch import manifest as m
from tallystick.state.functions.keyed_batch import KeyedBatch, Update
from tallystick.state.functions.processing import EVENT_TIME
from tallystick.state.functions.vectorised import vectorised
from tests.spark.flow import Flow
from tests.spark.topics import WAIT_S, produce, read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark]

COLUMNS = "k string, n bigint"
OLD = [1000 + number // 7 for number in range(120)]
"""Equal times lie on both sides of where epochs end."""
NEW = list(range(900_000, 900_010))


def reminder() -> Any:
    """Made here, so that workers need no tests."""

    def remind(batch: KeyedBatch) -> Update:
        """Each row as it is; and the watermark that passed the newest event time of a key by 50."""
        if batch.is_due:
            past = pa.array([-batch.time.watermark_ms] * len(batch), pa.int64())
            return Update(pa.record_batch({"k": batch.keys["k"], "n": past}), {"at": past})
        due = [None if n is None else n + 50 for n in batch.max("n").to_pylist()]
        return Update(batch.rows.select(["k", "n"]), timers=pa.array(due, pa.int64()))

    return remind


def without(dropped: str) -> Any:
    """Only the columns of the value, and no rows of this key."""

    def some(rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows.select(["k", "n"]).filter(pc.not_equal(rows["k"], dropped))

    return some


@dataclass
class Timed:
    """A pipeline with timers by event time, and what it is fed."""

    flow: Flow
    source: dict[str, Any] = field(default_factory=dict)
    dropped: str = "nobody"
    value: ts.Json = field(default_factory=lambda: ts.Json(COLUMNS))

    def pipeline(self, **settings: Any) -> ts.Pipeline:
        """Return it; settings are of its keyed step."""
        flow = self.flow
        return (
            ts.Pipeline(flow.name)
            .read(flow.source(value=self.value, **self.source))
            .map_batches(without(self.dropped), schema=COLUMNS)
            .key_by("k")
            .process(
                vectorised(reminder(), state="at bigint", time_mode=EVENT_TIME),
                output=COLUMNS,
                event_time="n",
                uid="reminders",
                **settings,
            )
            .write(flow.sink(key="k", value=ts.Json()))
        )

    def feed(self, partition: int, key: str, *times: int) -> None:
        """Append records to one partition."""
        records = [(key, json.dumps({"k": key, "n": at})) for at in times]
        produce(self.flow.confluent, self.flow.topic_in, records, partition=partition)

    def output(self) -> dict[str, list[int]]:
        """The rows of each key, in order, and behind a minus the watermarks of its timers."""
        numbers_by_key: dict[str, list[int]] = {}
        for record in read_committed(self.flow.confluent, self.flow.topic_out):
            row = json.loads(record.value or "")
            numbers_by_key.setdefault(row["k"], []).append(row["n"])
        return numbers_by_key

    def rows(self) -> dict[str, list[int]]:
        """The output without that of timers."""
        return {key: [n for n in ns if n > 0] for key, ns in self.output().items()}

    def epochs(self, checkpoint: Path | None = None) -> list[Any]:
        """The state of the step after each epoch; not those that a checkpoint begins with."""
        paths = sorted(((checkpoint or self.flow.checkpoint) / m.FOLDER).glob("0*.json"))
        manifests = [m.decode(path.read_bytes(), str(path)) for path in paths]
        return [
            manifest.state[0]
            for manifest in manifests
            if manifest.state and manifest.origin is None
        ]


def typed(*arguments: object) -> None:
    """`tallystick savepoint …`, which is done as asked."""
    result = CliRunner().invoke(app, ["savepoint", *map(str, arguments)])
    assert result.exit_code == 0, result.output


def latest(step: Any) -> dict[int, int | None]:
    return {
        partition_time.partition: partition_time.latest_ms
        for partition_time in step.partition_times
        if partition_time.topic
    }


@pytest.mark.parametrize("execution", ["jobs", "resident"])
@pytest.mark.parametrize("first", ["windows", "deduplicate"])
def test_no_row_of_a_backlog_is_late_in_a_second_step(
    flow: Flow, execution: Any, first: str
) -> None:
    """Two partitions of other paces, in small epochs, over two runs: all windows are whole."""
    times = {"slow": range(0, 60_000, 100), "fast": range(0, 3_600_000, 6_000)}
    for partition, (key, at) in enumerate(times.items()):
        records = [(key, json.dumps({"k": key, "n": n})) for n in at]
        produce(flow.confluent, flow.topic_in, records, partition=partition)
    steps = {
        "windows": ts.windowed(ts.tumbling("1 second"), {"rows": ts.count()}),
        "deduplicate": ts.deduplicate(),
    }
    column = "window_start" if first == "windows" else "n"
    timing = {"event_time": "n", "watermark_delay": 50} if first == "windows" else {}
    begun = (
        ts.Pipeline(flow.name)
        .read(flow.source(value=ts.Json(COLUMNS), max_offsets_per_trigger=100))
        .map_batches(without("nobody"), schema=COLUMNS)
        .key_by("k", *([] if first == "windows" else ["n"]))
        .process(steps[first], uid="first", **timing)
    )
    taken = ts.sum("rows") if first == "windows" else ts.count()
    pipeline = (
        begun.key_by("k")
        .process(
            ts.windowed(ts.tumbling("10 seconds"), {"taken": taken}),
            event_time=column,
            watermark_delay=0 if first == "windows" else 50,
            uid="second",
        )
        .write(flow.sink(key="k", value=ts.Json()))
    )

    flow.run(pipeline, execution=execution)
    far = [("far", json.dumps({"k": "far", "n": 9_000_000}))]
    for partition in range(2):
        produce(flow.confluent, flow.topic_in, far, partition=partition)
    flow.run(pipeline, execution=execution)

    taken_by_key: dict[str, int] = {}
    for record in read_committed(flow.confluent, flow.topic_out):
        row = json.loads(record.value or "")
        taken_by_key[row["k"]] = taken_by_key.get(row["k"], 0) + row["taken"]
    assert taken_by_key == {key: len(at) for key, at in times.items()}


@pytest.mark.parametrize(
    ("execution", "source"),
    [("jobs", {}), ("resident", {}), ("resident", {"min_partitions": 5})],
    ids=["jobs", "resident", "in pieces"],
)
def test_rows_of_a_partition_that_lags_are_not_late(
    flow: Flow, execution: Any, source: dict[str, Any]
) -> None:
    """One partition has old rows, another one, which is read at the same time, has new ones."""
    timed = Timed(flow, {"max_offsets_per_trigger": 30, **source})
    timed.feed(0, "old", *OLD)
    timed.feed(1, "new", *NEW)

    flow.run(timed.pipeline(), execution=execution)

    steps = timed.epochs()
    assert any(latest(step).get(1, 0) >= NEW[0] and latest(step)[0] < OLD[-1] for step in steps), (
        f"the other one was far ahead while this one was being read: {steps}"
    )
    assert timed.rows() == {"old": OLD, "new": NEW}
    assert steps[-1].watermark_ms == NEW[-1], "nothing is left to be waited for"
    marks = [step.watermark_ms or 0 for step in steps]
    assert marks == sorted(marks)
    assert any(OLD[0] <= mark < OLD[-1] for mark in marks), "it followed the partition that lags"

    timed.feed(0, "old", 2000)
    timed.feed(1, "new", NEW[-1] + 1)
    flow.run(timed.pipeline())
    assert timed.rows() == {"old": OLD, "new": [*NEW, NEW[-1] + 1]}, "what comes then is late"


def test_a_lag_is_known_after_a_stop_in_a_savepoint_and_with_other_key_groups(
    flow: Flow, tmp_path: Path
) -> None:
    """And with another parallelism, by the other engine."""
    timed = Timed(flow, {"max_offsets_per_trigger": 30})
    timed.feed(0, "old", *OLD)
    timed.feed(1, "new", *NEW)
    query = timed.pipeline(parallelism=2).start(
        flow.spark,
        checkpoint=str(flow.checkpoint),
        trigger={"processingTime": "10 minutes"},
        execution="resident",
    )
    try:
        deadline = time.monotonic() + WAIT_S
        while not timed.epochs():
            assert query.isActive, query.exception()
            assert time.monotonic() < deadline, "no epoch ended"
            time.sleep(0.1)
    finally:
        query.stop()
    (first,) = timed.epochs()
    assert set(latest(first)) == {0, 1}
    assert latest(first)[0] < OLD[-1], "the rest of it is still to be read"

    saved, moved, restored = (tmp_path / name for name in ("saved", "moved", "restored"))
    typed("create", flow.checkpoint, saved)
    typed("migrate", saved, moved, "--max-parallelism", "reminders=7", "--scratch", tmp_path)
    typed("restore", moved, restored)
    flow.run(timed.pipeline(parallelism=1), checkpoint=restored, execution="jobs")

    assert timed.rows() == {"old": OLD, "new": NEW}
    steps = timed.epochs(restored)
    assert steps[0].max_parallelism == 7
    assert latest(steps[-1]) == {0: OLD[-1], 1: NEW[-1]}


def test_rows_that_are_dropped_on_their_way_have_no_time(flow: Flow) -> None:
    """The watermark is about the rows that come to the step, whatever else a partition holds."""
    value = ts.Json(COLUMNS, mode="dropmalformed")
    timed = Timed(flow, {"max_offsets_per_trigger": 12}, dropped="noise", value=value)
    timed.feed(0, "noise", *range(5_000_000, 5_000_030))
    produce(flow.confluent, flow.topic_in, [("a", "poison")], partition=1)
    timed.feed(1, "a", *range(100, 130))

    flow.run(timed.pipeline())

    assert timed.output() == {"a": [*range(100, 130)]}
    assert latest(timed.epochs()[-1]) == {1: 129}
    assert timed.epochs()[-1].watermark_ms == 129


@pytest.mark.parametrize("execution", ["jobs", "resident"])
def test_a_watermark_waits_for_a_quiet_partition_and_moves_without_rows_when_it_is_idle(
    flow: Flow, execution: Any
) -> None:
    timed = Timed(flow)
    timed.feed(0, "a", 100)
    timed.feed(1, "b", 300)
    timed.feed(2, "c", 400)
    started = time.time()
    query = timed.pipeline(idle_after="4 seconds").start(
        flow.spark,
        checkpoint=str(flow.checkpoint),
        trigger={"processingTime": "0 seconds"},
        execution=execution,
    )
    try:
        deadline = time.monotonic() + WAIT_S
        while -400 not in timed.output().get("b", []):
            assert query.isActive, query.exception()
            assert time.monotonic() < deadline, timed.output()
            time.sleep(0.3)
        assert time.time() - started >= 4
        settled = len(timed.epochs())
        time.sleep(1.5)
    finally:
        query.stop()

    assert timed.output() == {"a": [100, -400], "b": [300, -400], "c": [400]}
    first, *_, last = timed.epochs()
    assert first.watermark_ms == 99
    assert last.watermark_ms == 400
    assert last.partition_times == first.partition_times, "there were no rows since"
    assert settled <= 5, "epochs without rows are run where the watermark moves only"
    assert len(timed.epochs()) == settled


def test_when_all_partitions_are_idle_the_watermark_may_go_on_with_the_clock(flow: Flow) -> None:
    """A timer beyond the newest event time comes due without another record, also after a stop."""
    timed = Timed(flow)
    timed.feed(0, "a", 100)
    timed.feed(1, "b", 300)
    settings = {"idle_after": "1 second", "idle_advance": True}
    for key, begun in (("b", 350), ("c", 10_050)):
        query = timed.pipeline(**settings).start(
            flow.spark,
            checkpoint=str(flow.checkpoint),
            trigger={"processingTime": "0 seconds"},
            execution="resident",
        )
        try:
            deadline = time.monotonic() + WAIT_S
            while not any(n <= -begun for n in timed.output().get(key, [])):
                assert query.isActive, query.exception()
                assert time.monotonic() < deadline, timed.output()
                time.sleep(0.3)
        finally:
            query.stop()
        if key == "b":
            timed.feed(2, "c", 10_000)

    steps = timed.epochs()
    marks = [step.watermark_ms or 0 for step in steps]
    assert marks == sorted(marks)
    assert marks[-1] >= 10_050, "further than any event time"
    for one, two in itertools.pairwise(steps):
        if one.partition_times == two.partition_times and two.watermark_ms != one.watermark_ms:
            newest = max(
                partition_time.latest_ms
                for partition_time in two.partition_times
                if partition_time.latest_ms
            )
            seen = max(
                partition_time.seen_ms
                for partition_time in two.partition_times
                if partition_time.latest_ms
            )
            assert two.watermark_ms <= newest + time.time() * 1000 - seen, "no faster than time"
    assert {key: len(rows) for key, rows in timed.rows().items()} == {"a": 1, "b": 1, "c": 1}


def marking(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Each tenth row promises that none before it comes later."""
    marks = [n if n % 10 == 0 else None for n in rows["n"].to_pylist()]
    return rows.select(["k", "n"]).append_column("mark", pa.array(marks, pa.int64()))


@pytest.mark.parametrize("execution", ["jobs", "resident"])
def test_watermarks_of_a_column_go_by_partition_and_over_a_restart(
    flow: Flow, execution: Any
) -> None:
    timed = Timed(flow, {"max_offsets_per_trigger": 8})

    def run() -> None:
        columns = f"{COLUMNS}, mark bigint"
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        pipeline = (
            ts.Pipeline(flow.name)
            .read(flow.source(value=timed.value, **timed.source))
            .map_batches(marking, schema=columns)
            .key_by("k")
            .process(
                vectorised(reminder(), state="at bigint", time_mode=EVENT_TIME),
                output=COLUMNS,
                event_time="n",
                watermark_column="mark",
                uid="reminders",
            )
            .write(flow.sink(key="k", value=ts.Json()))
        )
        flow.run(pipeline, execution=execution)

    timed.feed(0, "a", 5, 3, 10, 17, 12, 20)
    timed.feed(1, "b", 500, 510, 605, 501)
    run()
    assert timed.epochs()[-1].watermark_ms is None, "the third partition has promised nothing"
    timed.feed(2, "c", 30, 26)
    run()
    assert timed.epochs()[-1].watermark_ms == 19
    timed.feed(0, "a", 20, 19, 100)  # 19 is late: the watermark says so
    run()

    assert timed.epochs()[-1].watermark_ms == 29
    rows = {key: [n for n in ns if n > 0] for key, ns in timed.output().items()}
    assert rows == {
        "a": [5, 3, 10, 17, 12, 20, 20, 100],
        "b": [500, 510, 605, 501],
        "c": [30, 26],
    }
