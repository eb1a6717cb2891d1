"""`tallystick.testing.Driver`: what a test can give, do and see, without Kafka, Spark and a JVM."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest

import tallystick as ts
from tallystick.errors import RetriableError
from tallystick.testing import Driver, run
from tallystick.testing.driver import BEGIN
from tests.test_doc_examples import examples_of

ORDERS = "user string, n bigint, at bigint"
NOBODY = "localhost:1"


def source(topic: str = "orders", columns: str = ORDERS, **settings: Any) -> ts.KafkaSource:
    value = settings.pop("value", ts.Json(columns))
    return ts.KafkaSource(NOBODY, topics=[topic], value=value, **settings)


def sink(topic: str = "out", **settings: Any) -> ts.KafkaSink:
    return ts.KafkaSink(NOBODY, **{"topic": topic, "value": ts.Json(), **settings})


def order(user: str, n: int, at: int = 0) -> dict[str, Any]:
    return {"user": user, "n": n, "at": at}


def large(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows.filter(pc.greater(rows["n"], 1)).select(["user", "n"])


LARGE = ts.Pipeline("large").read(source()).map_batches(large, schema="user string, n bigint")
SUMS = (
    ts.Pipeline("sums")
    .read(source())
    .key_by("user")
    .process(ts.aggregate({"n": ts.sum("n")}), uid="sums")
    .write(sink("sums", key="user"))
)
WINDOWS = (
    ts.Pipeline("windows")
    .read(source())
    .key_by("user")
    .process(
        ts.windowed(ts.tumbling("10 seconds"), {"n": ts.sum("n")}, late="late"),
        event_time="at",
        watermark_delay="2 seconds",
    )
    .write(sink("windows"), late=sink("late"))
)


def test_a_first_program_needs_no_broker_and_no_jvm() -> None:
    """Nor does it need a `java` on the PATH, which a process of its own has not."""
    program = (
        "import tallystick as ts\n"
        "from tallystick.testing import run\n"
        f"pipeline = ts.Pipeline('p').read(ts.KafkaSource('{NOBODY}', topics=['a'], "
        "value='n bigint')).write(ts.KafkaSink('x:1', topic='b', value=ts.Json()))\n"
        "print(run(pipeline, [{'n': 1}]).output().select(['n']).to_pylist())\n"
        "from pyspark import SparkContext\n"
        "assert SparkContext._gateway is None and SparkContext._active_spark_context is None\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path), "HOME": str(Path.home())},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.stdout.strip() == "[{'n': 1}]", done.stderr


def test_the_package_stays_light() -> None:
    program = (
        "import sys, tallystick.testing, tallystick.testing.pytest_plugin\n"
        "heavy = {'pyarrow', 'pyspark', 'numba', 'numpy', 'kafka'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    "rows",
    [
        [order("a", 1), order("b", 2)],
        pa.table({"user": ["a", "b"], "n": [1, 2]}),
        pa.record_batch({"n": pa.array([1, 2], pa.int8()), "user": ["a", "b"]}),
        pd.DataFrame({"user": ["a", "b"], "n": [1, 2]}),
        pa.table({"user": ["a", "b"], "n": [1, 2]}).to_reader(),  # as Polars hands rows on
        ['{"user": "a", "n": 1}', b'{"user": "b", "n": 2}'],
        [{"value": b'{"user":"a","n":1}'}, {"value": b'{"user":"b","n":2}', "key": b"k"}],
    ],
    ids=["dicts", "table", "batch", "pandas", "stream", "values", "records"],
)
def test_rows_may_be_given_in_each_usual_form(rows: Any) -> None:
    result = run(LARGE.write(sink()), {"orders": rows})

    assert result.output().to_pylist() == [{"user": "b", "n": 2}]
    assert result.output().schema.field("n").type == pa.int64()


def test_what_the_sink_writes_is_there_as_records_too() -> None:
    moment = datetime(2026, 3, 1, tzinfo=UTC)
    result = run(LARGE.write(sink(key="user")), [order("b", 2)], now=moment)

    (record,) = result.records("out").to_pylist()
    assert (record["key"], record["value"]) == (b"b", b'{"user":"b","n":2}')
    assert record["timestamp"] == moment.timestamp() * 1000


def test_keys_headers_and_timestamps_reach_the_pipeline() -> None:
    read = source(
        key=ts.Json("id bigint"), headers=True, metadata_prefix="kafka_", columns="user string"
    )
    test = Driver(ts.Pipeline("all").read(read).write(sink(topic="copied")))
    test.feed(
        "orders",
        [
            {"user": "a", "key_id": 7, "kafka_timestamp": datetime(2026, 2, 1, tzinfo=UTC)},
            {"user": "b", "key_id": 8, "kafka_headers": [{"key": "h", "value": b"x"}]},
        ],
        partition=2,
        at=5,
    )
    test.epoch()

    first, second = test.output().to_pylist()
    assert (first["user"], first["key_id"], first["kafka_partition"]) == ("a", 7, 2)
    assert first["kafka_timestamp"] == datetime(2026, 2, 1, tzinfo=UTC)
    assert second["kafka_headers"] == [{"key": "h", "value": b"x"}]
    assert second["kafka_offset"] == 1
    assert second["kafka_timestamp"].timestamp() == 0.005


def test_an_input_may_be_named_by_topic_name_or_uid() -> None:
    several = ts.Pipeline("several").read(
        ts.stream(source("old-orders"), uid="old"), ts.stream(source("new-orders"), uid="new")
    )
    test = Driver(several.write(sink()))
    test.feed("old", [order("a", 1)])
    test.feed("new-orders", [order("b", 2)])

    assert sorted(test.drain().output()["user"].to_pylist()) == ["a", "b"]
    with pytest.raises(ts.OptionError, match=r"no such topic.*Did you mean 'new-orders'"):
        test.feed("new-order", [])
    with pytest.raises(ts.OptionError, match=r"which rows are whose.*old-orders, new-orders"):
        run(several.write(sink()), [order("a", 1)])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"usr": "a"}], "feed('orders'): the source has no column 'usr'.* Did you mean 'user'?"),
        ([{"user": "a", "n": "many"}], "feed('orders'): column 'n'"),
        ([3], "expected rows as dicts, found int"),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_name(rows: Any, message: str) -> None:
    with pytest.raises(ts.OptionError) as refused:
        Driver(SUMS).feed("orders", rows)
    parts = message.split(".*")
    assert all(part in str(refused.value) for part in parts), str(refused.value)


def test_a_format_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "1.avsc").write_text('{"type": "record", "name": "R", "fields": []}')
    read = source(value=ts.Avro("user string", schemas=str(tmp_path)))
    with pytest.raises(ts.OptionError, match=r"Avro\(\) without a registry= .* raw records"):
        run(ts.Pipeline("avro").read(read).write(sink()), [{"user": "a"}])


def test_malformed_records_become_dead_letters() -> None:
    read = source(value=ts.Json(ORDERS, mode="deadletter"))
    pipeline = (
        ts.Pipeline("letters")
        .read(read)
        .key_by("user")
        .process(ts.aggregate({"n": ts.sum("n")}))
        .write(sink(dead_letter_topic="dead"))
    )
    test = Driver(pipeline, parallelism=2)
    test.feed("orders", [b'{"user":"a","n":1}', b"{no"], partition=1)
    test.epoch()

    (letter,) = test.dead_letters().to_pylist()
    assert letter["value"] == b"{no"
    assert (letter["topic"], letter["partition"], letter["offset"]) == ("orders", 1, 1)
    assert "not one JSON object" in letter["error"]
    assert test.output().to_pylist() == [{"user": "a", "n": 1}]


def test_windows_end_with_the_watermark_and_late_rows_have_their_output() -> None:
    test = Driver(WINDOWS, parallelism=2)
    test.feed("orders", [order("a", 1, 1000), order("a", 2, 2000), order("b", 2, 25_000)])

    assert test.epoch()
    assert test.output().num_rows == 0, "the watermark moves at the end of the epoch"
    assert test.epoch(), "the one in which timers fire"
    assert not test.epoch()
    assert test.output().select(["user", "n"]).to_pylist() == [{"user": "a", "n": 3}]
    test.feed("orders", [order("a", 9, 3000)])
    assert test.drain().output("late").select(["n"]).to_pylist() == [{"n": 9}]


def test_late_rows_without_an_output_are_counted() -> None:
    windows = ts.windowed(ts.tumbling(1000), {"n": ts.sum("n")})
    timed = ts.Pipeline("late").read(source()).key_by("user")
    test = Driver(timed.process(windows, event_time="at", uid="w").write(sink()))
    test.feed("orders", [order("a", 1, 50_000)])
    test.drain().feed("orders", [order("a", 1, 1), order("b", 2, 2)])

    assert test.drain().late_count("w") == test.late_count() == 2


def test_the_clock_is_the_tests() -> None:
    windows = ts.windowed(ts.tumbling("1 minute"), {"n": ts.sum("n")}, time="processing")
    timed = ts.Pipeline("clock").read(source()).key_by("user").process(windows).write(sink())
    test = Driver(timed, now=datetime(2026, 5, 1, tzinfo=UTC))
    test.feed("orders", [order("a", 1)])
    test.drain()
    assert test.output().num_rows == 0
    test.advance_clock("59 seconds")
    assert test.drain().output().num_rows == 0
    test.advance_clock("1 second")

    (window,) = test.drain().output().to_pylist()
    assert window["window_start"] == datetime(2026, 5, 1, tzinfo=UTC)


def test_an_idle_partition_is_no_longer_waited_for_once_the_clock_says_so() -> None:
    windows = ts.windowed(ts.tumbling(1000), {"n": ts.sum("n")})
    keyed = ts.Pipeline("idle").read(source()).key_by("user")
    timed = keyed.process(windows, event_time="at", idle_after="1 minute").write(sink())
    test = Driver(timed, partitions={"orders": 2})
    test.feed("orders", [order("a", 1, 0), order("a", 1, 9000)], partition=0)
    test.feed("orders", [order("b", 1, 10)], partition=1)
    assert test.drain().output().num_rows == 0
    test.advance_clock("2 minutes")

    assert {"a", "b"} == set(test.drain().output()["user"].to_pylist())


def test_state_is_shown_and_moves_with_the_parallelism() -> None:
    test = Driver(SUMS, parallelism=1)
    test.feed("orders", [order(user, 1) for user in "abcdefgh"])
    test.epoch()
    before = sorted(test.state("sums").select(["user", "n"]).to_pylist(), key=str)
    test.restart(parallelism=3)
    test.feed("orders", [order("a", 1)])
    test.epoch()

    after = {row["user"]: row["n"] for row in test.state().to_pylist()}
    assert len(before) == 8
    assert after == {row["user"]: row["n"] for row in before} | {"a": 2}
    assert test.output().to_pylist()[-1] == {"user": "a", "n": 2}
    with pytest.raises(ts.OptionError, match=r"state\(sum\).*Did you mean 'sums'"):
        test.state("sum")


class LedgerSink:
    """A user's own two-phase sink: its rows, and what was aborted."""

    kind, uid, timeout = "ledger", "ledger", None

    def __init__(self) -> None:
        self.prepared: dict[str, tuple[ts.Committable, list[Any]]] = {}
        self.rows: list[Any] = []
        self.aborted: list[str] = []

    def open(self, owner: ts.Owner, facts: ts.RunFacts) -> "LedgerSink":
        return self

    def plan(self) -> "LedgerSink":
        return self

    def begin(self, place: ts.Place) -> "LedgerTransaction":
        return LedgerTransaction(self, place)

    def commit(self, committable: ts.Committable) -> ts.Outcome:
        if committable.name in self.prepared:
            self.rows += self.prepared.pop(committable.name)[1]
        return ts.Outcome.COMMITTED

    def abort(self, committable: ts.Committable) -> None:
        if self.prepared.pop(committable.name, None):
            self.aborted.append(committable.name)

    def lingering(self, owner: ts.Owner) -> Sequence[ts.Committable]:
        return [committable for committable, _ in self.prepared.values()]

    def describe(self, committable: ts.Committable) -> str:
        return committable.name

    def close(self) -> None: ...


class LedgerTransaction:
    def __init__(self, ledger: LedgerSink, place: ts.Place) -> None:
        self._ledger, self._place, self._rows = ledger, place, list[Any]()

    def write(self, rows: pa.RecordBatch) -> None:
        self._rows += rows.to_pylist()

    def prepare(self) -> Sequence[ts.Committable]:
        at = self._place
        name = f"{at.checkpoint_id}-{at.nonce}"
        committable = ts.Committable(at.owner.sink, at.checkpoint_id, at.task, name, 1, 0)
        self._ledger.prepared[name] = (committable, self._rows)
        return [committable]

    def abort(self) -> None: ...


def test_a_crash_between_prepare_and_decision_has_no_effect() -> None:
    """All sinks have prepared by then; the next run aborts that, and runs the epoch again."""
    ledger = LedgerSink()
    keyed = ts.Pipeline("crash").read(source()).key_by("user")
    test = Driver(keyed.process(ts.aggregate({"n": ts.sum("n")})).write(sink(), ledger))
    test.feed("orders", [order("a", 1)])
    test.epoch()
    test.feed("orders", [order("a", 10)])
    test.crash()

    assert len(ledger.prepared) == 1, "it crashed after the tasks, and before the decision"
    assert test.output("out").to_pylist() == ledger.rows == [{"user": "a", "n": 1}]
    assert test.epoch()
    assert len(ledger.aborted) == 1
    expected = [{"user": "a", "n": 1}, {"user": "a", "n": 11}]
    assert ledger.rows == test.output("out").to_pylist() == expected
    assert test.output("ledger").to_pylist() == expected
    assert test.records("out").num_rows == 2
    with pytest.raises(ts.OptionError, match=r"crash\(\): there is nothing to do"):
        test.crash()


def test_files_are_written_for_real(tmp_path: Path) -> None:
    files = ts.FileSink(tmp_path / "rows")
    test = Driver(LARGE.write(files))
    test.feed("orders", [order("a", 5)])
    test.crash()
    assert not list((tmp_path / "rows").glob("*.parquet"))
    test.epoch()

    rows = ds.dataset(tmp_path / "rows").to_table().to_pylist()
    assert rows == test.output().to_pylist() == [{"user": "a", "n": 5}]


def test_several_sinks_get_their_rows() -> None:
    few = ts.when(sink("few"), lambda rows: pc.less(rows["n"], 5))
    test = run(LARGE.write(sink("all"), few), [order("a", 2), order("b", 9)])

    assert test.output("few").to_pylist() == [{"user": "a", "n": 2}]
    assert test.output("all").num_rows == 2
    with pytest.raises(ts.OptionError, match="get rows of it: name one"):
        test.output()
    with pytest.raises(ts.OptionError, match="Did you mean 'few'"):
        test.output("fwe")


def test_an_epoch_that_fails_has_no_effect_and_runs_again() -> None:
    fails = [True]

    def whim(rows: pa.RecordBatch) -> pa.RecordBatch:
        if fails:
            raise ValueError("not today")
        return rows.select(["user"])

    test = Driver(ts.Pipeline("whim").read(source()).map_batches(whim).write(sink()))
    test.feed("orders", [order("a", 1), order("b", 1)], partition=1)
    with pytest.raises(ValueError, match="map_batches whim, orders-1 offsets 0 to 1: ") as raised:
        test.epoch()
    assert "not today" in str(raised.value)
    assert test.output().num_rows == 0
    fails.clear()

    assert test.drain().output()["user"].to_pylist() == ["a", "b"]


class BusySink(LedgerSink):
    """Its system takes nothing at the first try."""

    tries = 0

    def begin(self, place: ts.Place) -> LedgerTransaction:
        self.tries += 1
        if self.tries == 1:
            raise RetriableError("the ledger is busy")
        return super().begin(place)


def test_the_pause_before_another_try_is_one_of_the_tests_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So a test of a system that is away takes no longer than others."""

    def sleep(seconds: float) -> None:
        raise AssertionError("a test waits in real time")

    monkeypatch.setattr("time.sleep", sleep)
    busy = BusySink()
    test = Driver(LARGE.write(sink(), busy))
    test.feed("orders", [order("a", 5)])
    test.drain()

    assert busy.tries == 2, "the first try failed"
    assert busy.rows == [{"user": "a", "n": 5}]
    (written,) = test.records("out")["timestamp"].to_pylist()
    assert written == round(BEGIN.timestamp() * 1000) + 500


def test_steps_of_spark_are_refused_by_name() -> None:
    def summarised(rows: Any) -> Any:
        return rows

    pipeline = ts.Pipeline("frames").read(source()).transform(summarised).write(sink())
    with pytest.raises(ts.OptionError, match=r"step 1, transform summarised: .* no Spark"):
        Driver(pipeline)


def test_a_topic_that_a_pattern_matches_is_read_once_it_is_there() -> None:
    import re

    read = ts.KafkaSource(NOBODY, topics=re.compile("orders-.*"), value=ts.Json(ORDERS))
    test = Driver(ts.Pipeline("pattern").read(read).write(sink()))
    test.feed("orders-1", [order("a", 1)])
    test.drain().feed("orders-2", [order("b", 1)], partition=1)

    assert test.drain().output()["user"].to_pylist() == ["a", "b"]


def test_the_end_of_a_bounded_source_ends_windows() -> None:
    windows = ts.windowed(ts.tumbling(1000), {"n": ts.sum("n")})
    keyed = ts.Pipeline("end").read(source(ending_offsets="latest")).key_by("user")
    test = run(keyed.process(windows, event_time="at").write(sink()), [order("a", 1, 5)])

    assert test.output()["n"].to_pylist() == [1]


def test_tables_and_lists_are_there() -> None:
    rules = ts.broadcast(source("rules", "user string, factor bigint"), key="user", uid="rules")
    seen = ts.list_state(uid="seen", columns="n bigint")

    def times(rows: pa.RecordBatch, table: pa.Table) -> pa.RecordBatch:
        factors = dict(zip(table["user"].to_pylist(), table["factor"].to_pylist(), strict=True))
        pairs = zip(rows["user"].to_pylist(), rows["n"].to_pylist(), strict=True)
        return pa.record_batch({"n": [n * factors.get(user, 0) for user, n in pairs]})

    def counted(
        rows: pa.RecordBatch, elements: pa.RecordBatch
    ) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        together = pa.record_batch({"n": [*elements["n"].to_pylist(), *rows["n"].to_pylist()]})
        return pa.record_batch({"n": [sum(together["n"].to_pylist())]}), together

    pipeline = ts.Pipeline("state").read(source())
    pipeline = pipeline.map_batches(times, state=rules).map_batches(counted, state=seen)
    test = Driver(pipeline.write(sink()))
    test.feed("rules", [{"user": "a", "factor": 10}])
    test.feed("orders", [order("a", 1)])
    test.drain().restart()
    test.feed("rules", [{"user": "a", "factor": 100}])
    test.feed("orders", [order("a", 2)])

    assert test.drain().output()["n"].to_pylist() == [10, 210]
    assert test.state("rules").select(["user", "factor"]).to_pylist() == [
        {"user": "a", "factor": 100}
    ]


def test_bounds_of_a_source_cut_epochs() -> None:
    bounded = ts.Pipeline("bounded").read(source(max_offsets_per_trigger=2)).write(sink())
    test = Driver(bounded)
    test.feed("orders", [order("a", n) for n in range(5)])
    sizes = []
    while test.epoch():
        sizes.append(test.output().num_rows)

    assert sizes == [2, 4, 5]


def test_a_preview_shows_rows_with_their_types_and_writes_nothing(tmp_path: Path) -> None:
    read = source(value=ts.Json(ORDERS, mode="deadletter"))
    unfinished = (
        ts.Pipeline("look")
        .read(read)
        .map_batches(large, schema="user string, n bigint", outputs={"others": ORDERS})
    )
    seen = unfinished.preview(['{"user": "a", "n": 1}', '{"user": "bob", "n": 2}', "{no"])

    assert seen.table.to_pylist() == [{"user": "bob", "n": 2}]
    lines = repr(seen).splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["user", "n"],
        ["string", "bigint"],
        ["bob", "2"],
    ]
    assert lines[3] == "1 row; 1 malformed"
    assert "<th>n<br><small>bigint</small></th>" in seen._repr_html_()
    keyed = LARGE.key_by("user").process(ts.aggregate({"n": ts.sum("n")}))
    written = keyed.write(ts.FileSink(tmp_path / "rows")).preview([order("a", 5), order("a", 6)])
    assert written.table.to_pylist() == [{"user": "a", "n": 11}]
    assert not (tmp_path / "rows").exists()


def test_the_page_does_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    examples = list(examples_of("testing.md"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for example in examples:
        exec(compile(example.text, example.place, "exec"), namespace)

    assert len(examples) == 3
    assert "double" in capsys.readouterr().out, "the preview names types"


def test_a_row_is_what_it_was_when_the_iterator_gave_it(tmp_path: Path) -> None:
    """A generator may use its dict, and a list in it, again."""

    def reused() -> Iterator[dict[str, Any]]:
        row: dict[str, Any] = {"n": 0, "tags": [0]}
        for n in range(5):
            row["n"], row["tags"][0] = n, n
            yield row

    pipeline = (
        ts.Pipeline("reused")
        .read(ts.RowsSource(reused()))
        .write(ts.FileSink(str(tmp_path / "out")))
    )

    assert pipeline.start().awaitTermination(60)
    rows = ds.dataset(tmp_path / "out", format="parquet").to_table().to_pylist()
    assert [(row["n"], row["tags"]) for row in rows] == [(n, [n]) for n in range(5)]
