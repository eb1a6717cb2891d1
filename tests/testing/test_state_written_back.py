"""State that was read as a table and written back is state that a run goes on with."""

import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import Row as SparkRow
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import tallystick as ts
from tallystick.epoch.savepoint import FILE, Savepoint
from tallystick.errors import OptionError
from tallystick.ops import savepoints
from tallystick.storage.file_storage import FileStorage
from tallystick.testing import Driver
from tests.testing.compared import (
    CASES,
    COLUMNS,
    END,
    END_MS,
    Case,
    Kafka,
    Row,
    Sink,
    Source,
    all_of,
    joined,
    keyed,
    plain,
    rows_of,
    windowed,
)

PARTITIONS = 3
SEEDS = (1, 2)
TTL_MS = 5000


class Habits(StatefulProcessor):
    """Keeps state of each kind that expires, and timers."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.value = handle.getValueState("value", "n int", TTL_MS)
        self.list = handle.getListState("list", "n int", TTL_MS)
        self.map = handle.getMapState("map", "n int", "at bigint", TTL_MS)
        self.all = handle.getListState("all", "n int")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[SparkRow]:
        for row in rows:
            (before,) = self.value.get() or (0,)
            yield SparkRow(k=key[0], n=before, said=self._text())
            self.value.update((before + 1,))
            for state in (self.list, self.all):
                state.appendValue((row.n,))
            self.map.updateValue((row.n,), (row.at,))
            self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 3000 + row.n)

    def _text(self) -> str:
        lists = [[n for (n,) in state.get()] for state in (self.list, self.all)]
        return f"{lists} {sorted(self.map.iterator())}"

    def handleExpiredTimer(
        self, key: Any, timerValues: Any, expiredTimerInfo: Any
    ) -> Iterator[SparkRow]:
        yield SparkRow(
            k=key[0], n=-1, said=f"{expiredTimerInfo.getExpiryTimeInMs()} {self._text()}"
        )

    def close(self) -> None:
        pass


def late(windows: Any, **more: Any) -> Callable[[Source, Sink], ts.Pipeline]:
    """Windows that are put out again for late rows, until these are too late."""
    function = ts.windowed(
        windows, {"n": ts.sum("n"), "rows": ts.count()}, allowed_lateness=3000, **more
    )
    return keyed(function, event_time="at", watermark_delay=500)


def tabled(source: Source, sink: Sink) -> ts.Pipeline:
    """A pipeline with a broadcast table, and a list of each task."""
    others = ts.stream(source("others")).map_batches(
        lambda rows: rows.select(["k", "n"]).rename_columns({"n": "price"}),
        schema="k string, price bigint",
    )
    table = ts.broadcast(others, key="k", uid="table")

    def keep(rows: pa.RecordBatch, stored: pa.RecordBatch) -> Any:
        kept = pa.concat_batches([stored, rows.select(["n"])])
        seen = pa.array([str(sorted(stored["n"].to_pylist()))] * rows.num_rows)
        return rows.select(["k", "n", "at"]).append_column("seen", seen), kept

    return (
        ts.Pipeline("compared")
        .read(source("rows"))
        .map_batches(
            keep, state=ts.list_state("n bigint", uid="list"), schema=f"{COLUMNS}, seen string"
        )
        .map_batches(ts.enrich(table, on="k", how="left"))
        .write(sink("out"))
    )


TWO = ("rows", "others")
MORE: Mapping[str, Case] = {
    "cumulative": Case(windowed(ts.cumulative(12_000, step=3000, offset=1000))),
    "days of a zone": Case(
        late(ts.hopping("2 days", every="1 day", time_zone="Europe/Berlin"), emit="update")
    ),
    "hopping, late": Case(late(ts.hopping(6000, every=2000))),
    "sessions with updates, late": Case(late(ts.session(1500), emit="update")),
    "overlapping count windows": Case(
        keyed(
            ts.windowed(ts.count_window(6, every=2), {"n": ts.sum("n"), "last": ts.last_value("n")})
        )
    ),
    "upsert join": Case(
        joined(ts.upsert_join("left", "right", how="full"), is_timed=False), inputs=TWO
    ),
    "inner interval join": Case(
        joined(ts.interval_join("left", "right", lower=-5000, upper=-500)), inputs=TWO
    ),
    "processor": Case(
        keyed(Habits(), output="k string, n int, said string", time_mode="ProcessingTime")
    ),
    "duplicates of a while": Case(keyed(ts.deduplicate(4000))),
    "table and list": Case(tabled, inputs=TWO),
}
ALL = {name: case for name, case in (CASES | MORE).items() if name != "stateless"}
Change = Callable[[str, pa.Table], pa.Table]


def write_back(test: Driver, folder: Path, change: Change = lambda uid, rows: rows) -> int:
    """Take a savepoint, rewrite the state of each step, and continue the run from it.

    Returns:
        The number of rows of state that were written.
    """
    manifest = test._driver.coordinator.committed_manifest
    assert manifest is not None
    files, count = test._host.files, 0
    target = FileStorage(str(folder / "0"))
    for file in (file for step in manifest.state for file in step.files):
        data = files.get(file.path)
        assert data is not None
        target.put(file.path, data)
    saved = Savepoint("0", "2026-11-28T00:00:00+00:00", "file:///cp", "m/1", manifest)
    target.put(FILE, saved.encode())
    for number, step in enumerate(manifest.state):
        rows = change(step.uid, test.state(step.uid))
        count += rows.num_rows
        ts.write_state(rows, folder / str(number), step.uid, to=folder / str(number + 1))
    written = FileStorage(str(folder / str(len(manifest.state))))
    after = savepoints.read(written).manifest
    for file in (file for step in after.state for file in step.files):
        data = written.get(file.path)
        assert data is not None
        files.put(file.path, data)
    (place,) = (path for path, data in files._files.items() if data == manifest.encode())
    files.put(place, after.encode())
    return count


def run(
    case: Case, rows: Mapping[str, list[Row]], dice: random.Random, folder: Path | None
) -> tuple[Driver, int]:
    """Run a pipeline over pieces of its input; with a folder, state is written back meanwhile."""
    kafka, written = Kafka(), 0
    partitions = dict.fromkeys(case.inputs, PARTITIONS)
    test = Driver(case.make(kafka.source, kafka.sink), parallelism=2, partitions=partitions)
    remaining = {topic: list(of_topic) for topic, of_topic in rows.items()}
    while any(remaining.values()):
        count, ms = dice.randint(3, 15), dice.randint(0, 2000)
        tasks, is_now = dice.randint(1, 4), dice.random() < 0.5
        for topic, of_topic in remaining.items():
            for row in of_topic[:count]:
                test.feed(topic, [row], partition=ord(row["k"]) % PARTITIONS)
            del of_topic[:count]
        test.advance_clock(ms)
        test.drain()
        if is_now:
            if folder is not None:
                written += write_back(test, folder / str(len(list(folder.iterdir()))))
            # Tasks divide a list among them, so both runs have the same parallelism.
            test.restart(parallelism=tasks)
    for topic in case.inputs:
        for partition in range(PARTITIONS):
            test.feed(topic, [{"k": END, "n": 0, "at": END_MS}], partition=partition)
    test.advance_clock(1000)
    return test.drain(), written


def states(test: Driver) -> dict[str, list[Row]]:
    """Return all state by step, but for when joins look at a key again."""
    manifest = test._driver.coordinator.committed_manifest
    assert manifest is not None
    return {
        step.uid: all_of(map(_without_due, test.state(step.uid).to_pylist()))
        for step in manifest.state
    }


def _without_due(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_due(part) for name, part in value.items() if name != "$due"}
    return [*map(_without_due, value)] if isinstance(value, list) else value


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ALL)
def test_a_run_goes_on_as_if_its_state_had_not_been_written_back(
    name: str, seed: int, tmp_path: Path
) -> None:
    case = ALL[name]
    dice = random.Random(f"{name} {seed}")
    rows = {topic: rows_of(dice, 60) for topic in case.inputs}
    cuts = dice.random()
    plainly, _ = run(case, rows, random.Random(cuts), None)
    test, written = run(case, rows, random.Random(cuts), tmp_path)
    assert written, "state was written back"
    for output in case.outputs:
        wanted = plain(plainly.output(output).to_pylist())
        assert wanted, "there is something to compare"
        assert all_of(plain(test.output(output).to_pylist())) == all_of(wanted)
    assert states(test) == states(plainly)


# --- changes, which are seen in what comes out --------------------------------------------------


def fed(case: Case, *rows: Row) -> Driver:
    """A driver that has read rows of the first input."""
    test = Driver(case.make(Kafka().source, Kafka().sink))
    test.feed("rows", list(rows))
    return test.drain()


def changed(test: Driver, folder: Path, name: str, change: Callable[[Row], Row | None]) -> None:
    """Write back state whose elements in a column are changed, or left out for None."""

    def rows_with(uid: str, rows: pa.Table) -> pa.Table:
        lists = [
            None if value is None else [new for new in map(change, value) if new is not None]
            for value in rows[name].to_pylist()
        ]
        at = rows.column_names.index(name)
        return rows.set_column(at, name, pa.array(lists, rows.schema.field(at).type))

    assert write_back(test, folder, rows_with)
    test.restart()


def closed(test: Driver, *topics: str) -> list[Row]:
    """All rows that came out, once the watermark is beyond all others."""
    for topic in topics:
        test.feed(topic, [{"k": END, "n": 0, "at": END_MS}])
    return plain(test.drain().output().to_pylist())


@pytest.mark.parametrize("name", ["tumbling", "session windows"])
def test_windows_come_out_with_what_was_written(name: str, tmp_path: Path) -> None:
    """An amount is doubled, and a pane that has no timer any more gets the one of a new pane."""
    test = fed(ALL[name], {"k": "a", "n": 3, "at": 1000}, {"k": "b", "n": 4, "at": 1000})

    changed(test, tmp_path, "panes", lambda pane: pane | {"n": 2 * pane["n"], "$timer": None})

    assert sorted((row["k"], row["n"]) for row in closed(test, "rows")) == [("a", 6), ("b", 8)]


@pytest.mark.parametrize("is_due", [True, False])
def test_rows_of_a_join_come_out_as_they_were_written(is_due: bool, tmp_path: Path) -> None:
    """Without the moment at which it is due, a row without a partner comes out all the same."""
    case = ALL["interval join"]
    test = fed(case, *({"k": "a", "n": n, "at": 1000 + n} for n in range(200)))

    def change(row: Row) -> Row | None:
        due = row["$due"] if is_due else None
        return None if row["n"] % 2 else row | {"n": 10 * row["n"], "$due": due}

    changed(test, tmp_path, "left", change)
    test.feed("others", [{"k": "a", "n": 7, "at": 3150}])
    rows = closed(test, "rows", "others")

    out = {row["n"]: row["right_n"] for row in rows if row["n"] is not None}
    assert sorted(out) == [10 * n for n in range(200) if n % 2 == 0]
    assert {n for n, other in out.items() if other == 7} == {10 * n for n in range(150, 200, 2)}


def test_keys_that_are_left_out_begin_anew(tmp_path: Path) -> None:
    test = fed(ALL["first of each key"], {"k": "a", "n": 1, "at": 0}, {"k": "b", "n": 1, "at": 0})

    write_back(test, tmp_path, lambda uid, rows: rows.filter(pc.equal(rows["k"], "b")))
    test.restart()
    test.feed("rows", [{"k": "a", "n": 2, "at": 0}, {"k": "b", "n": 2, "at": 0}])

    out = test.drain().output().to_pylist()
    assert sorted((row["k"], row["n"]) for row in out) == [("a", 1), ("a", 2), ("b", 1)]


def test_values_end_when_they_are_written_to_end(tmp_path: Path) -> None:
    test = fed(ALL["processor"], *({"k": k, "n": 1, "at": 0} for k in "ab"))

    def change(uid: str, rows: pa.Table) -> pa.Table:
        now_ms = test._clock.now_ms
        ends = {"a": now_ms + 10 * TTL_MS, "b": now_ms + 1}
        values = [
            value | {"$expiry": ends[k]}
            for k, value in zip(rows["k"].to_pylist(), rows["value"].to_pylist(), strict=True)
        ]
        at = rows.column_names.index("value")
        return rows.set_column(at, "value", pa.array(values, rows.schema.field(at).type))

    write_back(test, tmp_path, change)
    test.restart()
    before = test.output().num_rows
    test.advance_clock(2 * TTL_MS)
    test.feed("rows", [{"k": k, "n": 2, "at": 0} for k in "ab"])

    rows = test.drain().output().slice(before).to_pylist()
    assert sorted((row["k"], row["n"]) for row in rows if row["n"] >= 0) == [("a", 1), ("b", 0)]


# --- what cannot be state -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "column", "change", "words"),
    [
        ("tumbling", "panes", {"start": 1}, "starts at 1 us: expected whole steps of 10000000 us"),
        ("tumbling", "panes", {"start": None}, "'panes' is null in 'start': expected int64"),
        ("session windows", "panes", {"$end": None}, r"'panes' is null in '\$end'"),
        ("session windows", "panes", {"$end": 0}, "a session ends before it starts"),
        ("overlapping count windows", "panes", {"start": 5}, "are not those of count windows of 6"),
        ("interval join", "left", {"$time": None}, r"'left' is null in '\$time'"),
        ("interval join", "left", None, "'left' has a null in a list"),
    ],
)  # fmt: skip
def test_elements_that_no_step_would_have_written_are_refused(
    name: str, column: str, change: Row | None, words: str, tmp_path: Path
) -> None:
    test = fed(ALL[name], {"k": "a", "n": 3, "at": 1000})

    def rows_with(uid: str, rows: pa.Table) -> pa.Table:
        (elements,) = rows[column].to_pylist()
        at = rows.column_names.index(column)
        new = [[None if change is None else element | change for element in elements]]
        return rows.set_column(at, column, pa.array(new, rows.schema.field(at).type))

    with pytest.raises(OptionError, match=words):
        write_back(test, tmp_path, rows_with)
    assert savepoints.find(str(tmp_path / "1")) == []


def test_elements_of_tasks_that_there_were_not_are_refused(tmp_path: Path) -> None:
    test = fed(ALL["table and list"], {"k": "a", "n": 3, "at": 1000})

    def beyond(uid: str, rows: pa.Table) -> pa.Table:
        if uid != "list":
            return rows
        at = rows.column_names.index("task")
        return rows.set_column(at, "task", pa.array([9], pa.int32()))

    with pytest.raises(OptionError, match="an element is of task 9: expected 0 to 0"):
        write_back(test, tmp_path, beyond)
