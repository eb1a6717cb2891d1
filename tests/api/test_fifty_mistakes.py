"""Mistakes of new users with the docs at hand: each answer names what is wrong and what to do.

Those here need neither Kafka nor Spark; `tests.spark.mistaken` makes the others.
"""

import datetime
import re
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark import SparkContext

import tallystick as ts
from tallystick.errors import TallystickError
from tallystick.host.excepthook import lines_of
from tallystick.host.failure import Failure
from tallystick.host.installed import pip_install
from tallystick.host.user_code import calling_user, user_lines
from tallystick.spark import jvm
from tallystick.spark.cluster import Cluster
from tallystick.spark.early_daemon import _print_error
from tallystick.spark.failures import from_text, to_text
from tallystick.tasks.read import apply
from tests.waiting import wait_until

LINES_MAX = 10
REAL_CLUSTER_OF = Cluster.of
SERVERS = "nowhere:9092"
VALUE = "id bigint, dest string, dep_delay double, at bigint"
Make = Callable[[], Any]


def source(topic: str = "flights", **more: Any) -> ts.KafkaSource:
    return ts.KafkaSource(SERVERS, topics=[topic], **{"value": ts.Json(VALUE), **more})


def sink(topic: str = "late", **more: Any) -> ts.KafkaSink:
    return ts.KafkaSink(SERVERS, topic=topic, **{"key": "dest", "value": ts.Json(), **more})


def flights() -> ts.Pipeline:
    return ts.Pipeline("late").read(source())


def inputs() -> ts.Pipeline:
    return ts.Pipeline("joined").read(flights=source(), planes=source("planes"))


def joined(function: Any, planes: str = "dest") -> Any:
    keyed = inputs().key_by(flights="dest", planes=planes)
    return run(keyed.process(function, event_time={"flights": "at", "planes": "at"}))


def run(pipeline: Any, **more: Any) -> Any:
    """Start a pipeline as a program does, with a sink if it has none."""
    return (pipeline if pipeline.sinks else pipeline.write(sink())).start(
        **{"checkpoint": "cp", **more}
    )


def counted(function: Any, **more: Any) -> Any:
    return run(flights().key_by("dest").process(function, **more))


def windowed(windows: Any, columns: Any = None, **more: Any) -> Any:
    function = ts.windowed(windows, columns or {"n": ts.count()}, **more)
    return counted(function, event_time="at")


def same(rows: Any) -> Any:
    return rows


class NoProcessor:
    """Has the methods, but not the class of Spark's."""

    def init(self, handle: Any) -> None: ...

    def handleInputRows(self, key: Any, rows: Any, timers: Any) -> Any: ...


def a_udf() -> Any:
    """Return what `pyspark.sql.functions.udf` makes, which needs a running Spark."""

    def late(delay: Any) -> Any:
        return delay

    udf: Any = late
    udf.evalType = 200
    return udf


def other(value: Any) -> Any:
    """Return a value that type checkers would refuse where it stands."""
    return value


TS: Any = ts
COUNTS = {"n": ts.count()}
MINUTE = datetime.timedelta(minutes=1)
TABLE = ts.broadcast(source("planes"), key="id", uid="planes")

MISTAKES: dict[str, tuple[Make, str]] = {
    # A pipeline that is taken for a DataFrame.
    "a clause in a filter": (
        lambda: flights().filter("dep_delay > 15 LIMIT 3"),
        r"filter\(predicate='dep_delay > 15 LIMIT 3'\): expected one expression",
    ),
    "a udf as a function": (lambda: flights().map_batches(a_udf()), "a udf is for transform"),
    "a column of it": (lambda: other(flights())["dest"], r"rows\['column'\]"),
    "a loop over it": (lambda: list(other(flights())), "has no rows before it runs"),
    "show": (lambda: other(flights()).show(), r"What does that here: \.explain\(\)"),
    "writeStream": (lambda: other(flights()).writeStream, r"here: \.write\(sink\)"),
    "count right after key_by": (
        lambda: other(flights().key_by("dest")).count(),
        r"process\(ts\.aggregate\(",
    ),
    "a function's result": (
        lambda: flights().map_batches(same(flights())),
        r"by its name alone \(clean, not clean\(\)\)",
    ),
    "two arguments": (
        lambda: flights().map_batches(lambda rows, limit: rows),
        r"takes the arguments \(rows, limit\), and is called with 1",
    ),
    "no key": (lambda: flights().key_by(), r"expected names of columns, e\.g\. key_by\('user'\)"),
    "a function as key": (
        lambda: flights().key_by(other(lambda row: row["dest"])),
        r"key_by\(columns=.*expected a text",
    ),
    "an argument that no function has": (
        lambda: flights().map_batches(partial(same, limit=3)),
        r"function=same\): .*arguments that partial\(\) names",
    ),
    # Keyed functions.
    "aggregates by name": (
        lambda: TS.aggregate(n=ts.count()),
        r"aggregate\(n=…\): there is no such argument. Did you mean columns=\{'n': …\}\?",
    ),
    "aggregates in a list": (
        lambda: TS.aggregate([ts.count()]),
        r"columns=\[ts\.count\(\)\]\): expected a dict",
    ),
    "a value named as the key": (
        lambda: counted(ts.aggregate({"dest": ts.count()})),
        "another name",
    ),
    "an average of all rows": (
        lambda: ts.aggregate({"n": ts.average("dep_delay")}),
        r"of windows only: put it into windowed",
    ),
    "a sum as int": (lambda: ts.sum("dep_delay", "int"), "type 'int', expected 'bigint'"),
    "a plain function": (
        lambda: counted(lambda key, rows: rows, output="n int"),
        r"ts\.vectorised\(",
    ),
    "a class": (
        lambda: counted(NoProcessor, output="n int"),
        r"a class: write process\(NoProcessor\(\)",
    ),
    "no StatefulProcessor": (
        lambda: counted(NoProcessor(), output="n int"),
        r"class NoProcessor\(StatefulProcessor\)",
    ),
    "no output": (lambda: counted(ts.vectorised(same, state="n int")), r"needs output=, e\.g\."),
    "a map as state": (
        lambda: ts.vectorised(same, state="m map<string,int>"),
        "or a list of those",
    ),
    "two steps without uid": (
        lambda: run(
            flights()
            .key_by("dest")
            .process(ts.aggregate(COUNTS))
            .key_by("dest")
            .process(ts.deduplicate())
        ),
        "has no uid.*Give each uid=",
    ),
    "a transform behind it": (
        lambda: run(
            flights().key_by("dest").process(ts.aggregate(COUNTS)).transform(lambda frame: frame)
        ),
        "Put the DataFrame code before key_by",
    ),
    "no tasks": (lambda: counted(ts.aggregate(COUNTS), parallelism=0), "expected 1 to 32768"),
    "a time to forget in words": (
        lambda: ts.deduplicate(forget_after_ms=other("1 hour")),
        r"forget_after_ms='1 hour'\): expected a whole number",
    ),
    "sessions without event time": (lambda: counted(ts.sessions(5000, "at")), "needs event_time="),
    # Windows.
    "a size for windows": (lambda: windowed("1 minute"), r"expected ts\.tumbling\("),
    "rows between windows": (lambda: ts.hopping(MINUTE, every="5 minutes"), "rows between windows"),
    "a month": (lambda: ts.tumbling("1 month"), r"size='1 month'.*minutes, hours, days"),
    "a city as time zone": (lambda: ts.tumbling("1 day", time_zone="Berlin"), "time_zone='Berlin'"),
    "hours in a time zone": (
        lambda: ts.tumbling("1 hour", time_zone="Europe/Berlin"),
        "for windows of whole days",
    ),
    "a delay in words": (
        lambda: counted(ts.aggregate(COUNTS), event_time="at", watermark_delay="ten seconds"),
        "such as '10 seconds'",
    ),
    "a name that is taken": (
        lambda: windowed(ts.tumbling(MINUTE), {"window_start": ts.count()}),
        "Give it another",
    ),
    "percents": (lambda: ts.quantiles("dep_delay", at=[50, 99]), "numbers from 0 to 1"),
    "late rows without a sink": (
        lambda: windowed(ts.tumbling(MINUTE), late="late"),
        r"write\(\.\.\., late=sink\)",
    ),
    "late rows of a count window": (
        lambda: windowed(ts.count_window(5), allowed_lateness="1 minute"),
        "leave time=, emit=, allowed_lateness= and late= out",
    ),
    # Joins and inputs.
    "a join of one input": (
        lambda: counted(ts.interval_join("a", "b", lower=0, upper=1), event_time="at"),
        r"Name several, and the key of each: read\(",
    ),
    "one key for two inputs": (lambda: inputs().key_by("dest"), r"key_by\(flights=…, planes=…\)"),
    "keys of two types": (
        lambda: joined(ts.window_join("flights", "planes", size=5), "id"),
        "cast one",
    ),
    "another input": (
        lambda: joined(ts.window_join("flights", "plane", size=5)),
        "Did you mean 'planes'",
    ),
    "an interval that ends first": (
        lambda: ts.interval_join("flights", "planes", lower="1 minute", upper=0),
        "no row would match",
    ),
    "how of SQL": (lambda: ts.temporal_join("a", "b", how=other("outer")), "'inner' or 'left'"),
    "a function before the join": (
        lambda: run(inputs().map_batches(same)),
        "Give the function to its",
    ),
    "sources without uid": (
        lambda: ts.Pipeline("p").read(source(), source("b")),
        "Give each its own",
    ),
    "read twice": (lambda: flights().read(source("b")), r"read\(orders, returns\)"),
    "a table by another column": (
        lambda: ts.enrich(TABLE, on="dest"),
        "key of table 'planes' is id",
    ),
    # Sources and formats.
    "earliest, misspelt": (
        lambda: source(starting_offsets="earlyest"),
        'expected "earliest", "latest"',
    ),
    "a date without zone": (
        lambda: source(starting_time="2024-01-01"),
        "has no time zone: give it one",
    ),
    "settings of the client": (
        lambda: source(options={"bootstrap.servers": SERVERS}),
        "a setting of the Kafka client is 'kafka.bootstrap.servers' here",
    ),
    "half a login": (
        lambda: source(
            options={
                "kafka.security.protocol": "SASL_SSL",
                "kafka.sasl.mechanism": "PLAIN",
                "kafka.sasl.username": "me",
            }
        ),
        "needs a user name and a password: set",
    ),
    "names of librdkafka": (
        lambda: source(options={"kafka.ssl.ca.location": "/ca.pem"}),
        r"use kafka\.ssl\.truststore\.location",
    ),
    "a topic as text": (lambda: ts.KafkaSource(SERVERS, topics=other("f-.*")), r"re\.compile\("),
    "Avro without schemas": (
        lambda: ts.Avro("id bigint").check_for_writing(),
        "set either registry",
    ),
    "a registry without http": (
        lambda: source(value=ts.Avro("id bigint", registry="registry:8081")),
        "such as 'http://localhost:8081'",
    ),
    "drop": (lambda: ts.Json(VALUE, mode=other("drop")), "Did you mean 'dropmalformed'"),
    "a type of pandas": (
        lambda: run(ts.Pipeline("p").read(source(value=ts.Json("at datetime"))).write(sink())),
        "Did you mean 'timestamp'",
    ),
    "a varchar": (
        lambda: run(ts.Pipeline("p").read(source(value=ts.Json("dest varchar"))).write(sink())),
        "varchar",
    ),
    "dead letters without a topic": (
        lambda: run(ts.Pipeline("p").read(source(value=ts.Json(VALUE, mode="deadletter")))),
        r"KafkaSink\(dead_letter_topic=",
    ),
    # Sinks and the start.
    "a sink without a topic": (
        lambda: ts.KafkaSink(SERVERS, value=ts.Json()),
        r"KafkaSink\(\): topic= is missing",
    ),
    "two columns as key": (lambda: sink(key=["dest", "id"]), r"set key_format=Json\(\)"),
    "a table that is missing": (lambda: TS.PostgresSink("host=db"), "table= is missing"),
    "files as CSV": (lambda: TS.FileSink("out", format="csv"), "no such argument"),
    "an output that no step has": (
        lambda: run(flights().write(sink(), alerts=sink("alerts"))),
        r"no step has an output 'alerts'.*Declare it",
    ),
    "another cluster": (
        lambda: run(flights().write(sink(), ts.KafkaSink("b:1", topic="l", value=ts.Json()))),
        "bootstrap_servers differ.*make them the same",
    ),
    "no sink": (lambda: flights().start(checkpoint="cp"), r"write\(sink\) is missing"),
    "parallelism of a start": (lambda: run(flights(), parallelism=4), "no such argument"),
    "the checkpoint of Spark": (
        lambda: other(flights()).write(sink()).start(checkpoint_location="cp"),
        "Did you mean 'checkpoint'",
    ),
    "a master for a session": (lambda: run(flights(), spark="local[2]"), "expected a SparkSession"),
    "a number as interval": (
        lambda: run(flights(), trigger={"processingTime": 5}),
        "a number and a unit, such as",
    ),
    "a file as checkpoint": (
        lambda: run(flights(), checkpoint="file"),
        "is a file. Name another place",
    ),
}


class StartedError(Exception):
    """All checks are passed that need neither Kafka nor Spark."""


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def started(*_: object, **__: object) -> None:
        raise StartedError

    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    monkeypatch.setattr("tallystick.api.pipeline.check_first_start", started)
    monkeypatch.setattr("tallystick.api.pipeline.Cluster.of", started)


@pytest.mark.parametrize("name", MISTAKES)
def test_the_answer_to_a_mistake_begins_with_what_is_wrong(name: str) -> None:
    make, expected = MISTAKES[name]
    with pytest.raises(TallystickError) as raised:
        make()

    first, *others = lines_of(raised.value, raised.tb)
    assert re.search(expected, first), first
    assert len(others) < LINES_MAX, others
    assert "object at 0x" not in first, first


def test_fifty_mistakes_are_tried() -> None:
    assert len(MISTAKES) >= 50


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'tallystick[ui]'"),
        ('{"url": "file:///src/t", "dir_info": {"editable": true}}', "pip install -e '/src/t[ui]'"),
        (
            '{"url": "file:///d/tallystick-0.1.0-py3-none-any.whl", "archive_info": {}}',
            "pip install '/d/tallystick-0.1.0-py3-none-any.whl[ui]'",
        ),
    ],
)
def test_an_extra_is_installed_from_where_the_package_came(
    origin: str | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tallystick.host.installed.distribution",
        lambda _: SimpleNamespace(read_text=lambda _: origin),
    )
    assert pip_install("ui") == command


def sets_a_column(rows: Any) -> Any:
    rows["dep_delay"] = 5


def imports(rows: Any) -> Any:
    import no_such_library  # type: ignore[import-not-found]  # noqa: F401


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda rows: rows["n"][0] > 1, r"rows\['delay'\]\[0\]\.as_py\(\)"),
        (lambda rows: [row["n"] for row in rows], r"rows\.to_pylist\(\) makes dicts"),
        (sets_a_column, r"rows\.set_column\("),
        (imports, "the Python of the tasks, .*: install it there"),
        (lambda rows: sys.exit("enough"), r"SystemExit\('enough'\) ends a process of tasks"),
        (lambda rows: next(iter([])), r"StopIteration\(\) ends a process of tasks"),
    ],
)
def test_an_error_in_a_function_says_what_is_meant(wrong: Any, message: str) -> None:
    rows = pa.record_batch({"n": [1, 2]})
    with pytest.raises((TypeError, ImportError, RuntimeError), match=message) as raised:
        list(apply([wrong], rows))
    assert user_lines(raised.tb)


def test_an_error_of_ours_in_a_task_begins_with_its_step() -> None:
    with pytest.raises(ts.OptionError) as raised, calling_user("process 'counts'"):
        raise ts.OptionError("no column 'n'")
    failure = from_text(to_text(Failure.of(raised.value)))
    assert failure is not None

    assert str(failure.to_error()) == "process 'counts': no column 'n'"


def test_an_error_is_told_in_ten_lines() -> None:
    error = TallystickError("first\n" + "more\n" * 100)
    for number in range(20):
        error.add_note(f"note {number}")

    first, *others = lines_of(error, None)
    assert first == "TallystickError: first"
    assert len(others) < LINES_MAX
    assert "TALLYSTICK_TRACEBACKS" in others[-1]


def test_a_line_that_calls_itself_is_shown_once() -> None:
    def calls_itself(rows: int) -> int:
        return calls_itself(rows + 1)

    with pytest.raises(RecursionError) as raised:
        calls_itself(0)
    assert len(user_lines(raised.tb)) == 2


def test_a_function_of_a_sink_that_never_returns_rows_is_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    flights().write(ts.mapped(sink(), lambda rows: None))._warn_of_silence()

    assert "mapped <lambda> (test_fifty_mistakes.py:" in caplog.text


def test_a_session_that_was_stopped_is_refused() -> None:
    stopped: Any = object.__new__(SparkContext)
    stopped._jsc = None

    with pytest.raises(ts.OptionError, match=r"was stopped.*make a new session"):
        REAL_CLUSTER_OF(stopped)


def test_a_worker_whose_jvm_has_hung_up_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (BrokenPipeError(32, "Broken pipe"), ValueError("of a user")):
        try:
            raise error
        except Exception:
            _print_error()

    printed = capsys.readouterr().err
    assert "of a user" in printed
    assert "Broken pipe" not in printed


def test_tasks_of_a_failed_job_stay_quiet_until_they_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    levels: list[dict[str, Any]] = []
    monkeypatch.setattr(jvm, "_set_levels", lambda _, new: levels.append(new) or {"logger": 1})
    monkeypatch.setattr(jvm, "STRAGGLERS_S", 0.1)
    context: Any = NoProcessor()
    with pytest.raises(ValueError, match="of the job"), jvm.quiet_tasks(context):
        raise ValueError("of the job")

    assert len(levels) == 1
    with jvm.quiet_tasks(context):
        assert len(levels) == 1
    wait_until(lambda: len(levels) == 2, "the levels from before the job")
    assert levels[1] == {"logger": 1}
