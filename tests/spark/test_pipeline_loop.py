"""A pipeline in a loop of our own: no query of Spark's, and nothing but our manifests."""

import json
import time
from collections import Counter, defaultdict
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.epoch import manifest as m
from tallystick.epoch import protocol as c
from tallystick.errors import OptionError, TallystickError
from tallystick.pipeline import sizing
from tallystick.pipeline.listeners import parse_source
from tallystick.pipeline.sizing import Reason
from tallystick.run.query import Query
from tallystick.testing import EmbeddedKafka
from tests.spark.flow import Flow
from tests.spark.streamed import streamed
from tests.spark.topics import read_committed, wait_until_nothing_is_pending
from tests.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.spark]


@pytest.fixture(params=["resident", "jobs"])
def flow(
    request: pytest.FixtureRequest,
    tallystick_kafka: EmbeddedKafka,
    spark: SparkSession,
    tmp_path: Path,
) -> Flow:
    flow = Flow(tallystick_kafka, spark, tmp_path)
    flow.execution = request.param
    return flow


def start(flow: Flow, pipeline: ts.Pipeline | None = None, **settings: object) -> Query:
    query = (pipeline or flow.pipeline()).start(
        flow.spark, checkpoint=str(flow.checkpoint), execution=flow.execution, **settings
    )
    assert isinstance(query, Query)
    return query


def run(flow: Flow, pipeline: ts.Pipeline | None = None, **settings: object) -> Query:
    query = start(flow, pipeline, trigger={"availableNow": True}, **settings)
    assert query.awaitTermination(120)
    return query


def test_everything_is_written_once_over_several_runs_with_an_end_each(flow: Flow) -> None:
    for count in (200, 0, 60):
        flow.feed(count)
        query = run(flow, flow.pipeline(max_offsets_per_trigger=50))
        wait_until_nothing_is_pending(flow.confluent, flow.topic_out)
        flow.assert_exact()
        assert not query.isActive
        assert query.exception() is None
        assert count // 50 <= len(query.recentProgress) <= count
    names = {path.name for path in flow.checkpoint.iterdir()}
    assert names == {"metadata", "tallystick"}, "no log of Spark's"
    last = query.lastProgress
    assert last is not None
    ends = parse_source(last["sources"][0]["endOffset"])
    assert ends is not None
    assert sum(ends.positions.values()) == 260


def test_a_running_query_reads_what_comes_and_ends_when_it_is_told_to(flow: Flow) -> None:
    query = start(flow, trigger={"processingTime": "50 milliseconds"})
    assert query.isActive
    for count in (30, 30):
        flow.feed(count)
        query.processAllAvailable()
        wait_until_nothing_is_pending(flow.confluent, flow.topic_out)
        flow.assert_exact()
    assert query.awaitTermination(0.1) is False
    query.stop()
    assert not query.isActive
    assert query.status["message"] == "Stopped"
    assert query.exception() is None
    query.stop()
    flow.feed(20)
    run(flow)
    flow.assert_exact()


def test_latest_is_where_the_first_start_was_whatever_comes_before_the_first_epoch(
    flow: Flow,
) -> None:
    """Decided with the first token: a run that finds nothing to read has settled it."""
    flow.feed(40)
    before = len(flow.input)
    latest = flow.pipeline(starting_offsets="latest")
    run(flow, latest)
    flow.feed(30)
    run(flow, latest)

    values = [record.value for record in read_committed(flow.confluent, flow.topic_out)]
    assert sorted(values, key=int) == [value for _, value in flow.input[before:]]


def test_a_keyed_step_goes_on_from_its_state(flow: Flow) -> None:
    counting = (
        ts.Pipeline(flow.name)
        .read(flow.source(max_offsets_per_trigger=40))
        .key_by("key")
        .process(ts.aggregate({"value": ts.count()}))
        .write(flow.sink(key="key", value=ts.Json()))
    )
    for count in (100, 60):
        flow.feed(count)
        run(flow, counting)

    records = read_committed(flow.confluent, flow.topic_out)
    counts = {record.key: json.loads(record.value or "")["value"] for record in records}
    assert counts == Counter(key for key, _ in flow.input), "the newest of each key"


def test_what_the_users_function_raises_ends_the_run_with_its_own_class(flow: Flow) -> None:
    flow.feed(30)

    def fails(table: object) -> object:
        raise ValueError("a pipeline's own mistake")

    failing = flow.pipeline(fails)

    query = start(flow, failing, trigger={"availableNow": True})
    with pytest.raises(Exception, match="a pipeline's own mistake"):
        query.awaitTermination(120)

    assert not query.isActive
    assert "a pipeline's own mistake" in str(query.exception())
    wait_until_nothing_is_pending(flow.confluent, flow.topic_out)
    assert read_committed(flow.confluent, flow.topic_out) == []
    run(flow)
    flow.assert_exact()


def test_a_query_that_is_stopped_in_an_epoch_leaves_nothing_open(flow: Flow) -> None:
    flow.feed(30)
    began = []

    def dawdle(table: object) -> object:
        time.sleep(20)
        return table

    slow = flow.pipeline(dawdle)
    query = start(
        flow, slow, listener=lambda event: began.append(event) if is_planned(event) else None
    )
    wait_until(lambda: bool(began), "no epoch is planned")
    time.sleep(1)
    query.stop()

    assert not query.isActive
    assert query.exception() is None
    wait_until_nothing_is_pending(flow.confluent, flow.topic_out)
    assert read_committed(flow.confluent, flow.topic_out) == []
    run(flow)
    flow.assert_exact()


def is_planned(event: c.Event) -> bool:
    return isinstance(event, c.EpochPlanned) and event.sources is not None


def test_a_checkpoint_of_structured_streaming_is_taken_over_and_does_not_go_back(
    flow: Flow,
) -> None:
    flow.feed(100)
    before = streamed(
        flow.pipeline(max_offsets_per_trigger=40), flow.spark, checkpoint=flow.checkpoint
    )
    assert before.awaitTermination(120)
    assert (flow.checkpoint / "commits" / "2").exists()
    flow.feed(50)
    run(flow, flow.pipeline(max_offsets_per_trigger=20))
    flow.assert_exact()

    flow.feed(10)
    with pytest.raises(Exception, match="the checkpoint was set back"):
        streamed(flow.pipeline(), flow.spark, checkpoint=flow.checkpoint).awaitTermination(120)
    run(flow)
    flow.assert_exact()


def test_another_word_for_the_execution_is_refused(flow: Flow) -> None:
    with pytest.raises(OptionError, match=r"execution='threads'.*expected 'resident'"):
        flow.pipeline().start(flow.spark, checkpoint=str(flow.checkpoint), execution="threads")  # type: ignore[call-overload]


def test_a_backlog_is_read_in_growing_epochs_and_the_progress_says_why(flow: Flow) -> None:
    """Nobody has named a bound, and a trigger that fires once a day holds nothing back."""
    flow.feed(12_000, keys=50)
    query = start(flow, trigger={"processingTime": "1 day"})
    wait_until_read(query, 12_000)

    sizes = [progress["epochSize"] for progress in query.recentProgress]
    assert [size["offsetsMax"] for size in sizes][:2] == [1000, 1000], "the first is a cold one"
    counts = [size["offsets"] for size in sizes]
    assert sum(counts) == 12_000
    assert max(counts) > 2_000
    assert sizes[0]["because"] == Reason.START.value
    assert any(size["because"] == Reason.GROWING.value for size in sizes)
    assert [size["isCut"] for size in sizes] == [True] * (len(sizes) - 1) + [False]
    query.stop()
    wait_until_nothing_is_pending(flow.confluent, flow.topic_out)
    flow.assert_exact()


def test_a_keyed_tasks_rows_stay_within_its_memory_however_much_waits(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each key's aggregate is put out once per epoch, though its task works in slices."""
    monkeypatch.setattr(sizing, "TARGET_S", 60.0)  # on a slow machine time would be the bound
    counting = (
        ts.Pipeline(flow.name)
        .read(flow.source(max_bytes_per_task=6_000))
        .key_by("key")
        .process(ts.aggregate({"value": ts.count()}))
        .write(flow.sink(key="key", value=ts.Json()))
    )
    flow.feed(9_000, keys=300)
    query = run(flow, counting)

    sizes = [progress["epochSize"] for progress in query.recentProgress]
    assert sizes[0]["bytesOfBusiestTask"] > 0
    assert all(size["bytesOfBusiestTask"] < 1.3 * 6_000 for size in sizes[1:]), sizes
    assert sizes[-2]["because"] == Reason.BYTES.value
    records = read_committed(flow.confluent, flow.topic_out)
    counts = {record.key: json.loads(record.value or "")["value"] for record in records}
    assert counts == Counter(key for key, _ in flow.input)
    assert len(records) <= len(sizes) * 300


def test_a_users_bound_is_one_per_trigger_and_all_is_one_epoch(flow: Flow) -> None:
    flow.feed(2_500)
    query = run(flow, flow.pipeline(max_offsets_per_trigger="all"))
    assert [progress["epochSize"]["offsets"] for progress in query.recentProgress] == [2_500]
    flow.feed(90)
    query = start(
        flow,
        flow.pipeline(max_offsets_per_trigger=30),
        trigger={"processingTime": "2 seconds"},
    )
    wait_until_read(query, 90)
    began = [datetime.fromisoformat(progress["timestamp"]) for progress in query.recentProgress]
    assert 3 <= len(began) <= 4, "a partition's share is rounded down"
    assert (began[2] - began[0]).total_seconds() > 3.5
    assert query.recentProgress[0]["epochSize"]["because"] == Reason.OPTION.value
    query.stop()
    wait_until_nothing_is_pending(flow.confluent, flow.topic_out)
    flow.assert_exact()


def wait_until_read(query: Query, count: int) -> None:
    def is_read() -> bool:
        assert query.exception() is None
        return sum(progress["epochSize"]["offsets"] for progress in query.recentProgress) >= count

    wait_until(is_read, lambda: f"{count} are to be read: {query.recentProgress}", timeout_s=120)


def test_the_parallelism_changes_while_the_pipeline_runs(flow: Flow) -> None:
    counting = (
        ts.Pipeline(flow.name)
        .read(flow.source())
        .key_by("key", max_parallelism=8)
        .process(ts.aggregate({"value": ts.count()}), parallelism=1)
        .write(flow.sink(key="key", value=ts.Json()))
    )
    query = start(flow, counting)
    with pytest.raises(OptionError, match="expected 1 or more"):
        query.rescale(parallelism=0)
    for parallelism in (2, 5, 1, 3):
        flow.feed(60)
        query.processAllAvailable()
        query.rescale(parallelism=parallelism)
        with pytest.raises(OptionError, match="parallelism"):
            query.rescale(parallelism=9)
    flow.feed(60)
    query.processAllAvailable()
    query.stop()
    with pytest.raises(TallystickError, match="has ended"):
        query.rescale(parallelism=2)

    paths = sorted((flow.checkpoint / m.FOLDER).glob("0*.json"))
    states = [m.decode(path.read_bytes(), str(path)).state for path in paths]
    assert [step.parallelism for (step,) in filter(None, states)][-1] == 3
    records = read_committed(flow.confluent, flow.topic_out)
    seen: dict[str, list[int]] = defaultdict(list)
    for record in records:
        seen[record.key or ""].append(json.loads(record.value or "")["value"])
    assert {key: counts[-1] for key, counts in seen.items()} == Counter(k for k, _ in flow.input)
    assert all(counts == sorted(set(counts)) for counts in seen.values()), "none goes back"


def test_the_progress_says_where_an_epochs_time_goes(flow: Flow) -> None:
    """A slow function shows in the part that is its own, and the parts are the whole."""

    def slowly(rows: pa.RecordBatch) -> pa.RecordBatch:
        time.sleep(0.3)
        return rows.select(["key", "value"])

    flow.feed(100)
    counting = (
        ts.Pipeline(flow.name)
        .read(flow.source())
        .map_batches(slowly, schema="key string, value string")
        .key_by("key")
        .process(ts.aggregate({"value": ts.count()}), uid="once")
        .write(flow.sink(key="key", value=ts.Json()))
    )
    query = run(flow, counting)
    progress = query.recentProgress[0]
    spent = dict(progress["durationMs"])

    whole = spent.pop("triggerExecution")
    assert abs(whole - sum(spent.values())) <= len(spent), "rounded each"
    assert {"plan", "tasks", "manifest", "count", "commit", "confirm"} <= set(spent)
    steps = {task["step"]: task["busiestMs"] for task in progress["tasks"]}
    assert list(steps) == ["read", "once", "write"]
    assert 300 <= steps["read"]["functions"] < spent["tasks"]
    assert {"read", "decode", "exchange"} <= set(steps["read"])
    assert {"wait", "functions", "state", "exchange"} <= set(steps["once"])
    assert {"wait", "write"} <= set(steps["write"])
    assert steps["once"]["functions"] < 300
    json.dumps(progress)
    assert "functions" in query.profile()
