"""Mistakes in what a user writes, refused without Kafka and Spark, with the name that is meant."""

import logging
import subprocess
import sys
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import tallystick as ts
from tallystick.run.epoch_loop import trigger_arguments
from tallystick.run.query import Query
from tallystick.tasks.hints import SILENT_BATCHES_MAX
from tallystick.tasks.read import apply

VALUE = "id bigint, dest string, dep_delay double"
ROWS = pa.record_batch({"id": [1, 2], "dest": ["JFK", "LAX"], "dep_delay": [3.0, 20.0]})
SINK = ts.KafkaSink("nowhere:9092", topic="late", key="dest", value=ts.Json())


def read() -> ts.Pipeline:
    return ts.Pipeline("late").read(ts.KafkaSource("nowhere:9092", topics=["f"], value=VALUE))


def late(rows: pa.RecordBatch) -> Any:
    return pc.greater(rows["dep_delay"], 15.0)


def forgotten(rows: pa.RecordBatch) -> Any:
    rows.filter(late(rows))


@pytest.fixture(autouse=True)
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides a context that an earlier test left running in this process."""
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)


COUNTS = {"n": ts.count()}
TYPO = ts.aggregate({"n": ts.sum("dep_dely")})


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (lambda: read().key_by("dset").process(TYPO).write(SINK), "Did you mean 'dest'"),
        (lambda: read().key_by("dest").process(TYPO).write(SINK), "Did you mean 'dep_delay'"),
        (
            lambda: read().write(ts.KafkaSink("nowhere:9092", topic="l", key="dset", value="json")),
            "key='dset'.*Did you mean 'dest'",
        ),
        (
            lambda: read().filter(late).write(ts.KafkaSink("k:1", topic="l")),
            "no column 'value'",
        ),
        (
            lambda: read().map_batches(forgotten, schema="a int").write(SINK),
            "key='dest': there is no column 'dest'. The rows have a",
        ),
        (
            lambda: read().write(SINK, ts.FileSink("files", partition_by=["dst"])),
            "partition_by.*Did you mean 'dest'",
        ),
    ],
)
def test_columns_are_checked_before_spark_is_started(pipeline, message, monkeypatch, tmp_path):
    def started(*_: object, **__: object) -> None:
        raise AssertionError("Spark was started")

    monkeypatch.setattr("tallystick.api.pipeline.Cluster.of", started)
    with pytest.raises(ts.OptionError, match=message):
        pipeline().start(checkpoint=tmp_path / "cp")


def test_columns_that_only_spark_knows_are_left_to_it(monkeypatch, tmp_path):
    """A start without a context would make one, and ask it; the check before it cannot."""

    class StartedError(Exception):
        """Spark would be started now."""

    def started(*_: object, **__: object) -> None:
        raise StartedError

    monkeypatch.setattr("tallystick.api.pipeline.check_first_start", lambda *_: None)
    monkeypatch.setattr("tallystick.api.pipeline.Cluster.of", started)
    collated = ts.KafkaSource("k:1", topics=["f"], value="dest string collate utf8_lcase")
    keyed = read().transform(lambda rows: rows).key_by("dest").process(ts.aggregate(COUNTS))
    for pipeline in (ts.Pipeline("p").read(collated), keyed):
        with pytest.raises(StartedError):
            pipeline.write(ts.KafkaSink("k:1", topic="l", value=ts.Json())).start(
                checkpoint=tmp_path / "cp"
            )


def test_a_filter_keeps_the_columns_that_are_known():
    pipeline = read().filter(late).key_by("dest").process(ts.aggregate(COUNTS)).write(SINK)
    (step, _) = pipeline.steps
    (kept,) = apply([step.function], ROWS)

    assert kept.to_pydict() == {"id": [2], "dest": ["LAX"], "dep_delay": [20.0]}
    assert "dest string, n bigint" in pipeline.explain()
    stream = ts.stream(pipeline.inputs.sources[0]).filter(late)
    assert (
        "n bigint"
        in (
            ts.Pipeline("p").read(stream).key_by("dest").process(ts.aggregate(COUNTS)).write(SINK)
        ).explain()
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda rows: rows["dep_delay"] > 15, "pyarrow.compute reckons with as a whole"),
        (lambda rows: rows["dep_dely"], "Did you mean 'dep_delay'"),
        (lambda rows: rows.assign(x=1), "rows.to_pandas"),
        (lambda rows: pc.greater(rows["dest"], 15), "cast one"),
        (lambda rows: rows.to_pandas(), "from_pandas"),
        (lambda rows: rows.to_pylist(), "from_pylist"),
        (late, "return rows.filter"),
    ],
)
def test_words_of_others_in_a_function_have_a_hint(wrong, message):
    refused = (TypeError, KeyError, AttributeError, pa.ArrowNotImplementedError, ts.OptionError)
    with pytest.raises(refused) as raised:
        list(apply([wrong], ROWS))
    assert message in raised.value.args[0]


def test_a_function_that_never_returns_rows_is_warned_about_once(caplog):
    def nothing(rows: pa.RecordBatch) -> Any:
        return rows if rows.num_rows > 100 else None

    for _ in range(3 * SILENT_BATCHES_MAX):
        assert list(apply([nothing], ROWS)) == []
    read().map_batches(forgotten).map_batches(nothing)._warn_of_silence()

    first, second = (record.getMessage() for record in caplog.records)
    assert "map_batches nothing (test_mistakes.py:" in first
    assert "map_batches forgotten (test_mistakes.py:" in second
    assert "Has it no return" in second


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: read().transform(forgotten), "Has it no return"),
        (lambda: read().map_batches(lambda: None), "is called with 1, the rows"),
        (lambda: read().map_batches(lambda rows: (yield rows)), "has yield or async"),
        (lambda: ts.KafkaSink("k:1", topic="__consumer_offsets"), "Kafka's own"),
        (lambda: ts.Json({"id": "bigint"}), "expected the columns as a text, 'id bigint'"),
        (lambda: read().write(SINK).start(checkpoint=None), r"start\(\): checkpoint= is missing"),
        (lambda: read().write(SINK).start(checkpoint="/dev/null/x"), "folder cannot be made"),
        (lambda: read().write(SINK).start(), r"start\(\): checkpoint= is missing"),
        (lambda: ts.KafkaSource("k:1", topic="f"), "Did you mean 'topics'"),
        (lambda: ts.KafkaSource("k:1", topics=["f"], startingOffsets="x"), "'starting_offsets'"),
        (
            lambda: (
                ts.Pipeline("p")
                .read(ts.KafkaSource("k:1", topics=["f"], value="id bigit"))
                .write(SINK)
                .explain()
            ),
            "Did you mean 'bigint'",
        ),
        (lambda: ts.aggregate({"n": "count"}), "expected ts.count"),
    ],
)
def test_what_is_written_wrongly_is_refused_where_it_is_written(wrong, message):
    with pytest.raises(ts.OptionError, match=message):
        wrong()


@pytest.mark.parametrize(
    ("owner", "name", "meant"),
    [
        (ts, "JSON", "Json"),
        (ts, "mean", "ts.avg"),
        (read(), "where", "filter"),
        (read(), "groupBy", "key_by"),
        (read(), "run", "start"),
        (read().key_by("dest"), "agg", "aggregate"),
        (object.__new__(Query), "await_termination", "awaitTermination"),
        (object.__new__(Query), "shutdown", "stop"),
    ],
)
def test_words_of_other_systems_name_ours(owner, name, meant):
    with pytest.raises(AttributeError, match=meant):
        getattr(owner, name)
    assert not hasattr(owner, "_nothing_of_this_name")


def test_an_interval_or_a_name_alone_is_a_trigger():
    assert trigger_arguments("5 seconds") == {"processingTime": "5 seconds"}
    assert trigger_arguments("availableNow") == {"availableNow": True}
    assert trigger_arguments(None) is None


def test_a_program_that_ends_while_a_query_runs_says_so(caplog, monkeypatch):
    query = object.__new__(Query)
    query.name = "late"
    monkeypatch.setattr(Query, "isActive", True)
    with caplog.at_level(logging.WARNING):
        query._note_exit()
    assert "query.awaitTermination()" in caplog.text


def test_python_without_asserts_is_refused_at_import():
    done = subprocess.run(
        [sys.executable, "-O", "-c", "import tallystick"], capture_output=True, text=True
    )
    assert done.stderr.splitlines()[-1].startswith("ImportError: Tallystick does not run")


def test_a_function_made_by_exec_without_a_module_is_refused_by_name_where_none_fits():
    names = {"__name__": None}
    exec("def made(): pass", names)

    with pytest.raises(ts.OptionError, match=r"KafkaSource\(topics=.*expected"):
        ts.KafkaSource("k:1", topics=names["made"])
