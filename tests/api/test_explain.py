"""`Pipeline.explain`: what would run, told without Kafka, and without Spark where there is none."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import tallystick as ts
from tallystick.epoch import manifest as m
from tallystick.errors import DataLossError, OptionError
from tallystick.spark.cluster import JOBS, RESIDENT, Cluster, Execution, execution_of, tasks_at_once
from tallystick.state.catalog import StepState
from tallystick.storage.file_storage import FileStorage
from tallystick.values import Producer

NOWHERE = "localhost:1"


@pytest.fixture(autouse=True)
def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test of this process may have left a context."""
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)


def source(**settings: object) -> ts.KafkaSource:
    value = ts.Json("user string, n bigint, secret string")
    return ts.KafkaSource(NOWHERE, topics=["events"], value=value, **settings)


def sink(**settings: object) -> ts.KafkaSink:
    return ts.KafkaSink(NOWHERE, topic="out", key="user", value=ts.Json(), **settings)


def late_only(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows


def counting(
    *sinks: object, uid: str = "per-user", read: object = None, **settings: object
) -> ts.Pipeline:
    count = ts.aggregate({"n": ts.count()})
    return (
        ts.Pipeline("counts")
        .read(read or source())
        .map_batches(late_only, schema="user string, n bigint")
        .key_by("user")
        .process(count, uid=uid, **settings)
        .write(*(sinks or (sink(),)))
    )


def facts(text: str) -> dict[str, list[str]]:
    """Name -> its lines; those without a name belong to the one before."""
    lines_by_name: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        name = line[:16].strip() or name
        lines_by_name.setdefault(name, []).append(line[17:])
    return lines_by_name


def cluster(
    slots: int, master: str = "spark://host:7077", conf: Mapping[str, str] = {}
) -> SimpleNamespace:
    """A context as far as `explain` needs one."""
    given = SimpleNamespace(getAll=lambda: list(conf.items()))
    return SimpleNamespace(
        master=master, defaultParallelism=slots, getConf=lambda: given, pythonExec="python3"
    )


def on(monkeypatch: pytest.MonkeyPatch, context: SimpleNamespace) -> None:
    at_hand = Cluster(lambda: context)  # type: ignore[arg-type,return-value]
    monkeypatch.setattr(Cluster, "at_hand", lambda spark: at_hand)


def test_it_says_what_is_read_done_and_written_and_touches_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    files = ts.FileSink(str(tmp_path / "files"))

    lines = facts(counting(sink(), files).explain(checkpoint=str(folder)))

    assert lines["pipeline"] == ["counts"]
    assert "topic events" in lines["source"][0]
    assert NOWHERE in lines["source"][0]
    assert "Json, mode failfast, user string, n bigint" in lines["source"][1]
    assert "group tallystick-counts" in lines["source"][1]
    assert lines["step 1"] == ["map_batches late_only"]
    assert lines["step 2"][0] == "process, uid per-user, key_by user"
    assert lines["step 2"][1].startswith("state: state columns")
    assert lines["step 2"][2] == "puts out: user string, n bigint"
    assert "topic out" in lines["sink kafka-1"][0]
    assert "exactly_once, transactions='epoch'" in lines["sink kafka-1"][0]
    assert "FileSink" in lines["sink files-1"][0]
    assert "the transaction of kafka-1" in lines["decision"][0]
    assert lines["checkpoint"] == [f"{FileStorage(str(folder)).location}: new"]
    assert not list(tmp_path.iterdir()), "nothing is made"


@pytest.mark.parametrize(
    ("timing", "late", "end"),
    [
        ({"watermark_delay": 7}, "7 ms late at most", "idle after 3000 ms"),
        ({"watermark_column": "n"}, "watermarks in n", "idle after 3000 ms"),
        ({"idle_advance": True}, "0 ms late at most", "the watermark goes on with the clock"),
    ],
)
def test_it_says_when_a_partition_is_idle(timing: dict[str, Any], late: str, end: str) -> None:
    timing = {"idle_after": "3 seconds", **timing}
    pipeline = (
        ts.Pipeline("visits")
        .read(source())
        .map_batches(late_only, schema="user string, n bigint")
        .key_by("user")
        .process(ts.sessions(gap_ms=5, time_column="n"), event_time="n", **timing)
        .write(sink())
    )
    state = facts(pipeline.explain())["step 2"][1]
    assert f"time mode EventTime by n, {late}" in state
    assert "partitions that are read to their ends are idle after 3000 ms" in state
    assert state.endswith(end)


def moved(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows


@pytest.mark.parametrize(
    ("event_time", "schema", "reason"),
    [
        ("window_start", None, "window_start is up to 59999 ms behind it, so no row is late"),
        ("window_end", None, "window_end is up to 0 ms behind it, so no row is late"),
        (
            "made",
            "user string, made timestamp",
            "made is made by a function of yours after step minutes, and taken to be up to 59999 "
            "ms behind it: where it may be earlier, watermark_delay= has to say by how much, or "
            "such rows are late",
        ),
    ],
)
def test_it_says_where_a_later_step_has_its_watermark_from(
    event_time: str, schema: str | None, reason: str
) -> None:
    minutes = (
        ts.Pipeline("hours")
        .read(source())
        .key_by("user")
        .process(
            ts.windowed(ts.tumbling("1 minute"), {"n": ts.count()}), event_time="n", uid="minutes"
        )
    )
    through = minutes if schema is None else minutes.map_batches(moved, schema=schema)
    pipeline = (
        through.key_by("user")
        .process(
            ts.windowed(ts.tumbling("1 hour"), {"n": ts.count()}),
            event_time=event_time,
            uid="hours",
        )
        .write(sink())
    )
    lines = facts(pipeline.explain())
    assert (
        f"watermark: that of step minutes, handed on; {reason}"
        in lines[f"step {len(pipeline.steps)}"]
    )
    assert not [line for line in lines["step 1"] if line.startswith("watermark")]


def test_it_says_that_times_are_those_of_the_rows_before_an_earlier_step() -> None:
    pipeline = (
        ts.Pipeline("minutes")
        .read(source())
        .key_by("user")
        .process(ts.deduplicate(), uid="first")
        .key_by("user")
        .process(ts.windowed(ts.tumbling("1 hour"), {"c": ts.count()}), event_time="n", uid="hours")
        .write(sink())
    )
    assert (
        "watermark: by partition, of n as it is before step first, which must not make it earlier"
        in facts(pipeline.explain())["step 2"]
    )


def test_without_a_transaction_of_the_epoch_the_checkpoint_decides() -> None:
    lines = facts(counting(sink(transactions="task")).explain())
    assert "a transaction per task" in lines["sink kafka-1"][0]
    assert "the checkpoint's own log" in lines["decision"][0]


def test_without_spark_what_hangs_on_it_is_left_open() -> None:
    lines = facts(counting().explain())
    assert "as many tasks as run at a time" in lines["step 2"][3]
    assert lines["execution"][0].startswith("resident")
    assert "not known without Spark" in lines["slots"][0]
    assert "4 tasks (parallelism=)" in facts(counting(parallelism=4).explain())["step 2"][3]


def test_a_cluster_has_a_slot_left_free_and_keyed_steps_as_many_tasks_as_there_are_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for slots, members in ((3, 3), (4, 3), (8, 7)):
        on(monkeypatch, cluster(slots))
        lines = facts(counting().explain())
        assert f"{members} tasks (as many as run at a time)" in lines["step 2"][3]
        assert lines["slots"] == [f"{slots} there; {members} needed as long as the pipeline runs"]
        lines = facts(counting().explain(execution="jobs"))
        assert f"{slots} tasks" in lines["step 2"][3]
        assert lines["slots"][0].startswith(f"{slots} there; taken by each epoch's job")
    on(monkeypatch, cluster(8, master="local[8]"))
    lines = facts(counting().explain())
    assert "8 tasks" in lines["step 2"][3]
    assert "8 there; 1 needed" in lines["slots"][0]


def test_what_keeps_tasks_from_staying_is_named_and_refused_where_they_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on(monkeypatch, cluster(4, conf={"spark.io.encryption.enabled": "true"}))
    lines = facts(counting().explain())
    assert lines["execution"][0].startswith("jobs")
    assert "spark.io.encryption.enabled=true" in lines["execution"][0]
    with pytest.raises(OptionError, match="execution='resident' does not work here"):
        counting().explain(execution="resident")
    framed = ts.Pipeline("framed").read(source()).transform(lambda rows: rows).write(sink())
    assert "transform" in facts(framed.explain())["execution"][0]
    with pytest.raises(OptionError, match=r"execution='always'\): expected 'resident'"):
        counting().explain(execution="always")  # type: ignore[arg-type]


def test_the_choice_is_that_of_a_start() -> None:
    assert execution_of("p", None, {}, has_transform=False) == Execution(RESIDENT, "")
    assert execution_of("p", JOBS, {}, has_transform=False) == Execution(JOBS, "execution='jobs'")
    big_cluster = Cluster(lambda: cluster(4))  # type: ignore[arg-type,return-value]
    assert tasks_at_once(big_cluster, Execution(RESIDENT, "")) == 3
    assert tasks_at_once(big_cluster, Execution(JOBS, "wanted")) == 4


def test_what_is_exchanged_is_said_with_its_tasks_and_the_way_that_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = facts(counting(parallelism=4).explain())
    assert (
        lines["step 2"][4] == "exchange: rows come by key (user) to 4 tasks, over own connections"
    )
    assert lines["exchange"] == [
        "to kafka-1: rows go to the task that writes their partition of out, over own connections"
    ]
    on(monkeypatch, cluster(8))
    lines = facts(counting().explain(execution="jobs"))
    assert "by key (user) to 8 tasks, over the shuffle of Spark" in lines["step 2"][4]
    assert "over the shuffle of Spark" in lines["exchange"][0]


def test_what_may_stay_in_place_is_said_where_readers_write() -> None:
    """As the engine decides it: one topic, and no step that moves rows."""
    direct = ts.Pipeline("p").read(source()).map_batches(late_only, schema="user string")
    stays = "co-partitioned ones, to a partition of the number they came from, stay in place"
    two = ts.KafkaSource(NOWHERE, topics=["a", "b"], value=ts.Json("user string"))
    from_two = ts.Pipeline("p").read(two).map_batches(late_only, schema="user string")
    assert stays in facts(direct.write(sink()).explain())["exchange"][0]
    assert stays not in facts(from_two.write(sink()).explain())["exchange"][0]
    assert stays not in facts(counting().explain())["exchange"][0]
    framed = direct.transform(lambda rows: rows).write(sink())
    assert stays not in facts(framed.explain())["exchange"][0]


def test_sinks_whose_tasks_write_what_they_have_need_no_exchange(tmp_path: Path) -> None:
    files = ts.FileSink(str(tmp_path))
    lines = facts(counting(files, sink(transactions="task")).explain())
    assert lines["exchange"] == ["to files-1, kafka-1: none, each task writes the rows that it has"]
    both = facts(counting(files, sink()).explain())["exchange"]
    assert [line.partition(":")[0] for line in both] == ["to files-1", "to kafka-1"]


def test_the_place_of_each_steps_state_is_said_and_that_of_its_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TALLYSTICK_STATE_DIR", "/fast/here")
    lines = facts(counting().explain())["step 2"][5]
    assert lines == (
        "state lies in keyed-state/per-user of the checkpoint; copies on each host in /fast/here"
    )
    conf = {"spark.executorEnv.TALLYSTICK_STATE_DIR": "/fast/there"}
    on(monkeypatch, cluster(4, conf=conf))
    assert "copies on each host in /fast/there" in facts(counting().explain())["step 2"][5]


def test_all_timeouts_are_those_that_are_set(tmp_path: Path) -> None:
    calls = {"kafka.request.timeout.ms": "1500", "kafka.delivery.timeout.ms": "40000"}
    task = sink(
        transactions="task", transaction_timeout_ms=60_000, max_recovery_ms=50_000, uid="late"
    )
    weak = sink(guarantee="at_least_once", uid="weak")
    first = sink(transaction_timeout_ms=70_000, timeout_warning_share=0.5)
    slow = source(options=calls)
    pipeline = counting(first, task, weak, ts.FileSink(str(tmp_path)), read=slow)
    lines = facts(pipeline.explain())["timeouts"]

    assert lines[0] == "source: a request 1500 ms, a call with all its tries 40000 ms"
    assert lines[1].startswith(
        "sink kafka-1: a request 8000 ms, a call with all its tries 56000 ms"
    )
    assert "; a transaction 70000 ms, warned about from 50 % of it on; recovery at any" in lines[1]
    assert lines[2].startswith("sink late: a request 8000 ms")
    assert "; a transaction 60000 ms" in lines[2]
    assert lines[2].endswith("recovery within 50000 ms")
    assert "transaction" not in lines[3]
    assert lines[4] == "sink files-1: those of its own system"
    unchecked = facts(counting(sink(transactions="task")).explain())["timeouts"][1]
    assert unchecked.endswith("recovery not checked")


def write_state(folder: Path, uid: str, pipeline: str = "counts") -> None:
    """A checkpoint with one epoch, and one step's state."""
    state = (StepState(uid, 64, 2, '[["user","string"]]', 1),)
    producer = Producer("t", 1, 0)
    manifest = m.Manifest(12, pipeline, "l", (), (), producer, state)
    FileStorage(str(folder)).put(m.manifest_path(manifest, "aa"), manifest.encode())


def test_a_checkpoint_says_how_far_it_is_and_its_state_is_compared(tmp_path: Path) -> None:
    write_state(tmp_path, "per-user")

    lines = facts(counting().explain(checkpoint=str(tmp_path)))
    assert "up to epoch 12" in lines["checkpoint"][0]
    assert "State of per-user" in lines["checkpoint"][0]
    assert "64 key groups" in lines["step 2"][3], "those of the state"
    assert "state" not in lines

    lines = facts(counting(uid="another").explain(checkpoint=str(tmp_path)))
    assert "does not fit: " in lines["state"][0]
    assert "per-user" in lines["state"][0]

    other = replace(counting(), name="other")
    with pytest.raises(DataLossError, match="belongs to pipeline 'counts'"):
        other.explain(checkpoint=str(tmp_path))


def test_mistakes_are_those_that_a_start_finds() -> None:
    with pytest.raises(OptionError, match=r"call read\(\) and write\(\)"):
        ts.Pipeline("p").explain()
    with pytest.raises(OptionError, match=r"key_by\(.*: there is no column"):
        ts.Pipeline("p").read(source()).key_by("usr").process(
            ts.aggregate({"n": ts.count()})
        ).write(sink()).explain()


def test_nothing_secret_is_told() -> None:
    login = {"kafka.sasl.username": "alice", "kafka.sasl.password": "hunter2"}
    secure = {"kafka.security.protocol": "SASL_SSL", "kafka.sasl.mechanism": "PLAIN", **login}
    pipeline = ts.Pipeline("p").read(source(options=secure)).write(sink(options=secure))
    assert "hunter2" not in pipeline.explain()


def test_a_pipeline_shows_itself_as_explain_does_and_an_unfinished_one_what_it_has() -> None:
    assert repr(counting()) == counting().explain()
    assert counting()._repr_html_().startswith("<pre>")
    begun = repr(ts.Pipeline("counts").read(source()))
    assert begun.startswith(
        "<Pipeline counts: 1 sources, 0 steps, 0 sinks; pipeline 'counts': write(sink) is missing"
    )
