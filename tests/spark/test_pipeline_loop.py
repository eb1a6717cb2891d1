"""A pipeline in a loop of our own: no query of Spark's, and nothing but our manifests."""

import json
import time
from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.checkpoint import protocol as c
from tallystick.errors import OptionError
from tallystick.run.query import Query
from tallystick.spark.progress import parse_source
from tallystick.testing import EmbeddedKafka
from tests.spark.flow import Flow
from tests.spark.topics import read_committed, wait_until_nothing_is_pending

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
    left = {path.name for path in flow.checkpoint.iterdir()}
    assert left == {"metadata", "tallystick"}, "no log of Spark's"
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

    found = [record.value for record in read_committed(flow.confluent, flow.topic_out)]
    assert sorted(found, key=int) == [value for _, value in flow.input[before:]]


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

    found = read_committed(flow.confluent, flow.topic_out)
    counts = {record.key: json.loads(record.value or "")["value"] for record in found}
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
    deadline = time.monotonic() + 60
    while not began:
        assert time.monotonic() < deadline
        time.sleep(0.05)
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
    flow.run(flow.pipeline(max_offsets_per_trigger=40))
    flow.feed(50)
    run(flow, flow.pipeline(max_offsets_per_trigger=20))
    flow.assert_exact()

    flow.feed(10)
    with pytest.raises(Exception, match="the checkpoint was set back"):
        flow.run()
    run(flow)
    flow.assert_exact()


def test_another_word_for_the_execution_is_refused(flow: Flow) -> None:
    with pytest.raises(OptionError, match="expected 'resident', 'jobs'"):
        flow.pipeline().start(flow.spark, checkpoint=str(flow.checkpoint), execution="threads")  # type: ignore[call-overload]
