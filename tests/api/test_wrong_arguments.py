"""Arguments of wrong types and values, for every public function and class: made, not listed.

Whatever a user writes, the answer is ours, and names the argument.
"""

import inspect
import pathlib
import re
import sys
from datetime import date, timedelta
from enum import Enum
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StructField, StructType

import tallystick as ts
from tallystick import arguments

SOURCE = ts.KafkaSource("nowhere:9092", topics=["in"], value="id bigint, user string, at timestamp")
SINK = ts.KafkaSink("nowhere:9092", topic="out", value=ts.Json())
PIPELINE = ts.Pipeline("p").read(SOURCE)
WHOLE = PIPELINE.write(SINK)
TABLE = ts.broadcast(SOURCE, key="id", uid="table")
NO_SESSION = object.__new__(SparkSession)
WINDOWS = ts.tumbling("1 minute")
COUNTS = {"n": ts.count()}


def rows(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


# What each call needs, beside the one argument that is wrong.
CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "KafkaSource": (ts.KafkaSource, {"bootstrap_servers": "nowhere:9092", "topics": ["in"]}),
    "KafkaSink": (ts.KafkaSink, {"bootstrap_servers": "nowhere:9092", "topic": "out"}),
    "RowsSource": (ts.RowsSource, {"rows": [{"n": 1}]}),
    "ConsoleSink": (ts.ConsoleSink, {}),
    "FileSink": (ts.FileSink, {"path": "/tmp/files"}),
    "DeltaSink": (ts.DeltaSink, {"table": "/tmp/table"}),
    "IcebergSink": (ts.IcebergSink, {"catalog": {"type": "sql"}, "table": "sales.orders"}),
    "PostgresSink": (ts.PostgresSink, {"dsn": "host=nowhere", "table": "orders"}),
    "Json": (ts.Json, {}),
    "Text": (ts.Text, {}),
    "Avro": (ts.Avro, {"registry": "http://nowhere:8081"}),
    "JsonSchema": (ts.JsonSchema, {"registry": "http://nowhere:8081"}),
    "Protobuf": (ts.Protobuf, {"registry": "http://nowhere:8081"}),
    "LossPolicy": (ts.LossPolicy, {}),
    "Rows": (ts.Rows, {}),
    "Stream": (ts.Stream, {"source": SOURCE}),
    "stream": (ts.stream, {"source": SOURCE}),
    "Stream.map_batches": (ts.stream(SOURCE).map_batches, {"function": rows}),
    "Stream.filter": (ts.stream(SOURCE).filter, {"predicate": rows}),
    "BroadcastTable": (ts.BroadcastTable, {"stream": TABLE.stream, "key": ("id",), "uid": "t"}),
    "broadcast": (ts.broadcast, {"source": SOURCE, "key": "id", "uid": "t"}),
    "ListState": (ts.ListState, {"columns": "id bigint", "uid": "l"}),
    "list_state": (ts.list_state, {"columns": "id bigint", "uid": "l"}),
    "enrich": (ts.enrich, {"table": TABLE, "on": "id"}),
    "mapped": (ts.mapped, {"sink": SINK, "function": rows}),
    "when": (ts.when, {"sink": SINK, "predicate": rows}),
    "Pipeline": (ts.Pipeline, {"name": "p"}),
    "Pipeline.map_batches": (PIPELINE.map_batches, {"function": rows}),
    "Pipeline.filter": (PIPELINE.filter, {"predicate": rows}),
    "Pipeline.select": (PIPELINE.select, {}),
    "Pipeline.with_columns": (PIPELINE.with_columns, {}),
    "Pipeline.drop": (PIPELINE.drop, {}),
    "Pipeline.rename": (PIPELINE.rename, {"columns": {"user": "name"}}),
    "sql": (partial(ts.sql, "SELECT user FROM orders"), {"orders": SOURCE}),
    "Pipeline.transform": (PIPELINE.transform, {"function": rows}),
    "Pipeline.key_by": (partial(PIPELINE.key_by, "user"), {}),
    "Pipeline.start": (WHOLE.start, {"checkpoint": "cp"}),
    "Pipeline.recover": (WHOLE.recover, {"checkpoint": "/proc/none"}),
    "Pipeline.explain": (WHOLE.explain, {}),
    "KeyedPipeline.process": (PIPELINE.key_by("user").process, {"function": ts.deduplicate()}),
    "read_state": (ts.read_state, {"spark": NO_SESSION, "checkpoint": "/proc/none"}),
    "write_state": (
        ts.write_state,
        {"rows": pa.table({"n": [1]}), "savepoint": "/proc/none", "step": "s", "to": "/proc/no"},
    ),
    "source_progress": (ts.source_progress, {"query": {}}),
    "configure": (ts.configure, {"builder": None}),
    "register": (ts.register, {"spark": None}),
    "spark_session": (ts.spark_session, {}),
    "count": (ts.count, {}),
    "quantiles": (ts.quantiles, {"column": "n", "at": [0.5]}),
    **{
        name: (getattr(ts, name), {"column": "n"})
        for name in (
            *("sum", "minimum", "maximum", "average", "first_value", "last_value", "collect"),
            *("approximate_distinct_count", "min", "max", "avg", "first", "last"),
        )
    },
    "vectorised_aggregate": (
        ts.vectorised_aggregate,
        {
            **dict.fromkeys(("add", "merge", "result"), rows),
            **{"accumulators": "n bigint", "type": "bigint", "reads": ["n"]},
        },
    ),
    "vectorised": (ts.vectorised, {"function": rows, "state": "n bigint"}),
    "co_process": (ts.co_process, {"function": rows, "state": "n bigint"}),
    "aggregate": (ts.aggregate, {"columns": COUNTS}),
    "deduplicate": (ts.deduplicate, {}),
    "sessions": (ts.sessions, {"gap_ms": 5, "time_column": "at"}),
    "top_n": (ts.top_n, {"n": 3, "column": "n"}),
    "windowed": (ts.windowed, {"windows": WINDOWS, "aggregates": COUNTS}),
    "tumbling": (ts.tumbling, {"size": 5}),
    "hopping": (ts.hopping, {"size": 10, "every": 5}),
    "cumulative": (ts.cumulative, {"size": 10, "step": 5}),
    "session": (ts.session, {"gap": 5}),
    "count_window": (ts.count_window, {"size": 5}),
    "interval_join": (
        ts.interval_join,
        {"left": "a", "right": "b", "lower": 0, "upper": 5},
    ),
    "window_join": (ts.window_join, {"left": "a", "right": "b", "size": 5}),
    "temporal_join": (ts.temporal_join, {"left": "a", "right": "b"}),
    "upsert_join": (ts.upsert_join, {"left": "a", "right": "b"}),
}
MADE_BY_US = {
    *("CoKeyedBatch", "Committable", "KeyedBatch", "Outcome", "Owner", "Place", "Query"),
    *("Recovery", "RunFacts", "SourceProgress", "Timeout", "Update"),
    *("Sink", "Transaction", "TwoPhaseCommitSink"),  # protocols
}
"""Public classes whose instances a run hands to users, or asks of sinks."""
NOT_OF_USERS = {"Pipeline": {"inputs", "steps", "sinks", "selections", "dropped"}}
"""Fields that other calls fill."""


class Odd(Enum):
    ONE = 1


WRONG: dict[str, Any] = {
    "None": None,
    "an empty text": "",
    "a text": "no such word",
    "a blank": " ",
    "a null byte": "a\0b",
    "zero": 0,
    "minus": -1,
    "a large number": 1 << 70,
    "a fraction": 1.5,
    "nan": float("nan"),
    "a flag": True,
    "bytes": b"bytes",
    "an empty list": [],
    "numbers": [1, 2],
    "texts": ["a", "a"],
    "a list of None": [None],
    "an empty dict": {},
    "a dict": {"a": 1},
    "a dict of a dict": {"a": {"b": None}},
    "a dict of numbers": {1: 2},
    "a set": {"x"},
    "a function": lambda: None,
    "a function of two": lambda one, two: two,
    "a class": int,
    "an object": object(),
    "a path": pathlib.Path("somewhere"),
    "a span": timedelta(seconds=-1),
    "a date": date(2026, 1, 1),
    "an enum": Odd.ONE,
    "a schema": pa.schema([("n", pa.int64())]),
    "a type of Spark's": StructType([StructField("n", LongType())]),
    "a pattern": re.compile(b"a"),
    "a module": sys,
    "a source": SOURCE,
    "an aggregate": ts.count(),
    "a function of ours": ts.count,
    "a class of ours": ts.Json,
}
CASES = [
    (name, parameter.name)
    for name, (call, _) in CALLS.items()
    for parameter in inspect.signature(call).parameters.values()
    if parameter.name not in NOT_OF_USERS.get(name, ())
]


def is_an_error(name: str) -> bool:
    public = getattr(ts, name)
    return isinstance(public, type) and issubclass(public, BaseException)


def test_every_public_function_and_class_is_called_here():
    public = {name for name in ts.__all__ if not is_an_error(name) and name != "__version__"}

    assert public - MADE_BY_US <= CALLS.keys()
    steps = {
        f"Pipeline.{name}"
        for name, method in vars(ts.Pipeline).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }
    without_names, of_rows = {"Pipeline.read", "Pipeline.write"}, {"Pipeline.preview"}
    assert steps - without_names - of_rows <= CALLS.keys()


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch, tmp_path):
    """No Spark and no files for what is accepted: it would have to get that far."""
    monkeypatch.chdir(tmp_path)

    class Started(ts.TallystickError):
        """All checks are passed."""

    def started(*_: object, **__: object) -> None:
        raise Started

    monkeypatch.setattr("tallystick.api.pipeline.Cluster.of", started)
    monkeypatch.setattr("tallystick.api.pipeline.recover", started)
    monkeypatch.setattr("tallystick.api.pipeline.opened", lambda *_: None)
    monkeypatch.setattr("tallystick.api.pipeline.check_first_start", lambda *_: None)
    monkeypatch.setattr("tallystick.ops.state_table.FileStorage", started)
    monkeypatch.setattr("tallystick.ops.state_writing.FileStorage", started)
    monkeypatch.setattr("tallystick.spark.context.spark_java_home", started)
    return Started


@pytest.mark.parametrize(("name", "argument"), CASES)
def test_a_wrong_argument_is_refused_by_its_name_or_taken(name, argument, nothing_starts):
    call, needed = CALLS[name]
    kind = inspect.signature(call).parameters[argument].kind
    # An argument without a name is the function's.
    named = name.rpartition(".")[2] if "VAR" in kind.name else argument
    messages = {}
    for what, wrong in WRONG.items():
        try:
            if kind is inspect.Parameter.VAR_POSITIONAL:
                call(wrong)
            elif kind is inspect.Parameter.VAR_KEYWORD:
                call(some=wrong)
            else:
                call(**{**needed, argument: wrong})
        except nothing_starts:
            continue
        except ts.TallystickError as error:
            messages[what] = str(error)
        except Exception as error:
            error.add_note(f"{name}({argument}={what})")
            raise
    assert messages
    for what, message in messages.items():
        assert named in re.split(r"[^A-Za-z_]+", message), f"{name}({argument}={what}): {message}"
        assert len(message) < 1500, what


@pytest.mark.parametrize("name", CALLS)
def test_an_unknown_a_missing_and_one_argument_too_many_are_named(name):
    call, needed = CALLS[name]
    parameters = inspect.signature(call).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        with pytest.raises(ts.OptionError, match=r"nonsense_argument"):
            call(**needed, nonsense_argument=1)
    if not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        with pytest.raises(ts.OptionError, match=r"too many arguments|no arguments"):
            call(*range(30))
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name in needed:
            others = {key: value for key, value in needed.items() if key != parameter.name}
            with pytest.raises(ts.OptionError, match=rf"{parameter.name}= is missing"):
                call(**others)


def test_no_message_shows_a_secret():
    for call in (
        lambda: ts.KafkaSource("k:1", topics=["t"], options={"kafka.sasl.password": ["hunter2"]}),
        lambda: ts.Avro(registry=["https://user:hunter2@host"]),
        lambda: ts.PostgresSink(["password=hunter2"], table="t"),
        lambda: ts.spark_session(config=["hunter2"]),
    ):
        with pytest.raises(ts.OptionError) as refused:
            call()
        assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "known", "nearest"),
    [
        ("dep_dely", ["id", "dep_delay"], "dep_delay"),
        ("startingOffsets", ["starting_offsets", "starting_time"], "starting_offsets"),
        ("JSON", ["Json", "Avro"], "Json"),
    ],
)
def test_the_nearest_name_is_named(given, known, nearest):
    assert arguments.near(given, known) == f" Did you mean {nearest!r}?"
    assert not arguments.near("xyz", known)
