"""A mistake in a step ends `start`, before Kafka is asked and before any task runs.

Each error names the thing, what was found, what is expected, and what to change.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import tallystick as ts
from tallystick.errors import OptionError
from tallystick.spark.cluster import Cluster

LOCK = threading.Lock()
OUTPUT = "user string, n bigint"


@pytest.fixture(autouse=True)
def a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark is there, and is not asked for anything."""
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    conf = SimpleNamespace(getAll=list)
    context = SimpleNamespace(
        master="local[2]", pythonExec="python3", defaultParallelism=2, getConf=lambda: conf
    )
    cluster = Cluster(lambda: context)  # type: ignore[arg-type,return-value]
    monkeypatch.setattr(Cluster, "of", lambda *_, **__: cluster)


def read() -> ts.Pipeline:
    value = ts.Json("user string, n bigint")
    return ts.Pipeline("p").read(ts.KafkaSource("localhost:1", topics=["events"], value=value))


def refused(pipeline: ts.Pipeline, tmp_path: Path, **sink: Any) -> str:
    """What `start` says; it gets nowhere near the broker, which is not there."""
    to = ts.KafkaSink("localhost:1", topic="out", **(sink or {"key": "user", "value": ts.Json()}))
    with pytest.raises(OptionError) as raised:
        pipeline.write(to).start(checkpoint=str(tmp_path))
    assert not list(tmp_path.iterdir())
    return str(raised.value)


class Counting(StatefulProcessor):
    """Counts; what it does in `init` is given."""

    def __init__(self, init: Callable[[Any], object]) -> None:
        self._init = init

    def init(self, handle: Any) -> None:
        self._init(handle)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        yield from ()

    def close(self) -> None:
        pass


def by_hand(init: Callable[[Any], object], output: str = OUTPUT) -> ts.Pipeline:
    return read().key_by("user").process(Counting(init), output=output, uid="mine")


def locks(*_: object) -> None:
    """Stands for a function of a script: one of `__main__` travels as it is."""


def with_lock() -> Callable[..., Any]:
    lock = LOCK

    def clean(*given: Any) -> Any:
        with lock:
            return given[0]

    return clean


def test_functions_that_cannot_travel_to_tasks_are_named_with_what_is_in_the_way(tmp_path: Path):
    keyed = read().key_by("user")
    vectorised = ts.vectorised(with_lock(), state="n bigint")
    for pipeline, named in (
        (read().map_batches(with_lock()), "step 1, map_batches clean:"),
        (
            keyed.process(vectorised, output=OUTPUT).map_batches(with_lock()),
            "step 1, process after key_by('user'):",
        ),
        (
            keyed.process(ts.deduplicate()).map_batches(with_lock()),
            "step 2, map_batches clean:",
        ),
        (by_hand(with_lock()), "step 1, process after key_by('user'):"),
    ):
        message = refused(pipeline, tmp_path)
        assert named in message
        assert "cannot pickle '_thread.lock' object" in message
        assert "init()" in message


def test_a_state_that_cannot_be_read_is_named_with_its_step(tmp_path: Path):
    message = refused(by_hand(lambda handle: handle.getValueState("x", "n bigit")), tmp_path)
    assert message.startswith("step mine: state 'x': ")
    assert "'bigit' is not a type that Spark has. Did you mean 'bigint'? Write it as" in message

    message = refused(by_hand(lambda handle: handle.getValueState("x", "n int", 1000)), tmp_path)
    assert message.startswith("step mine: state 'x' has a TTL")


def test_columns_that_cannot_be_read_are_named_with_their_step(tmp_path: Path):
    message = refused(by_hand(lambda _: None, output="user strng"), tmp_path)
    assert message.startswith("step mine: output=: 'user strng' cannot be read")

    mapped = read().map_batches(locks, schema="user strin")
    message = refused(mapped.key_by("user").process(ts.deduplicate(), uid="once"), tmp_path)
    assert message.startswith("map_batches locks, schema=: 'user strin' cannot be read")


def test_what_init_raises_keeps_its_class_and_says_which_step(tmp_path: Path):
    sink = ts.KafkaSink("localhost:1", topic="out", value=ts.Json())
    with pytest.raises(ZeroDivisionError) as raised:
        by_hand(lambda _: 1 / 0).write(sink).start(checkpoint=str(tmp_path))
    assert "in step mine: init() of its function" in raised.value.__notes__[0]


def test_what_is_no_function_is_refused_where_it_is_written():
    for function in (None, "clean", locks()):
        with pytest.raises(OptionError, match="expected a function, by its name alone"):
            read().map_batches(function)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="expected a function, by its name alone"):
            read().transform(function)  # type: ignore[arg-type]


def test_output_that_the_sink_cannot_write_is_told_with_the_columns_there_are(tmp_path: Path):
    counted = read().key_by("user").process(ts.aggregate({"n": ts.count()}))
    message = refused(counted, tmp_path, key="usr", value=ts.Json())
    assert message == (
        "KafkaSink(topic='out'): key='usr': there is no column 'usr'. Did you mean 'user'? The "
        "rows have user, n"
    )

    message = refused(counted, tmp_path, compression="none")
    assert "no column 'value', only ['user', 'n']" in message
    assert "set value=Json()" in message

    assert "no column 'value'" in refused(read(), tmp_path, transactions="task")
    summed = ts.aggregate({"value": ts.count()})
    message = refused(read().key_by("user").process(summed), tmp_path, compression="none")
    assert "column 'value' to write is of type int64: expected string or binary" in message


def test_what_only_rows_can_tell_is_left_to_them():
    """Columns after a map_batches are not known; a function with all it needs travels."""
    sink = ts.KafkaSink("localhost:1", topic="out")

    def shout(rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows

    assert read().map_batches(shout).write(sink).explain()
    keyed = read().key_by("user").process(ts.deduplicate())
    assert keyed.map_batches(shout).write(sink).explain()
