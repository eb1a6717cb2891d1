"""Several inputs in one pipeline, on Spark and a real broker: exact, whatever is changed."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from confluent_kafka import Consumer, TopicPartition
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.epoch import manifest as m
from tallystick.errors import OptionError
from tallystick.source.offsets import parse_source
from tallystick.testing import EmbeddedKafka
from tests.spark.flow import Flow, finish
from tests.spark.topics import produce, read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark]

ROWS = "k string, n bigint"


@pytest.fixture(params=["resident", "jobs"])
def flow(
    request: pytest.FixtureRequest,
    tallystick_kafka: EmbeddedKafka,
    spark: SparkSession,
    tmp_path: Path,
) -> Flow:
    return Flow(tallystick_kafka, spark, tmp_path, execution=request.param)


def from_text() -> Any:
    """Made here, so that workers need no tests."""

    def split(rows: pa.RecordBatch) -> pa.RecordBatch:
        parts = pc.split_pattern(rows["value"], ";")
        return pa.record_batch(
            {"n": pc.list_element(parts, 1).cast(pa.int64()), "k": pc.list_element(parts, 0)}
        )

    return split


class Sources:
    """Two topics of other formats, and what they were fed."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.fed: list[tuple[str, int]] = []
        self.text_topic, self.third_topic = f"{flow.name}-text", f"{flow.name}-third"
        for topic in (self.text_topic, self.third_topic):
            flow.kafka.create_topic(topic, 2)

    def feed(self, json_count: int = 0, text_count: int = 0, third_count: int = 0) -> None:
        """Append as many rows to each, whose numbers never repeat."""
        flow = self.flow
        for topic, count in (
            (flow.topic_in, json_count),
            (self.text_topic, text_count),
            (self.third_topic, third_count),
        ):
            first = len(self.fed)
            rows = [(f"k{n % 7}", n) for n in range(first, first + count)]
            self.fed += rows
            as_text = topic == self.text_topic
            values = [(k, f"{k};{n}" if as_text else json.dumps({"k": k, "n": n})) for k, n in rows]
            produce(flow.confluent, topic, values)

    def numbers(self, uid: str | None = "numbers") -> ts.Stream:
        source = self.flow.source(value=ts.Json(ROWS), max_offsets_per_trigger=40)
        return ts.stream(source, uid=uid).map_batches(only_rows(), schema=ROWS)

    def texts(self) -> ts.Stream:
        source = self.flow.source(topics=[self.text_topic], value=ts.Text())
        return ts.stream(source, uid="texts").map_batches(from_text(), schema="n bigint, k string")

    def third(self) -> ts.Stream:
        source = self.flow.source(topics=[self.third_topic], value=ts.Json(ROWS))
        return ts.stream(source, uid="third").map_batches(only_rows(), schema=ROWS)

    def run(self, *streams: ts.Stream, parallelism: int = 2, **settings: Any) -> Any:
        flow = self.flow
        pipeline = (
            ts.Pipeline(flow.name)
            .read(*streams)
            .key_by("k")
            .process(
                ts.aggregate({"count": ts.count(), "sum": ts.sum("n")}, each="record", keep=["n"]),
                uid="sums",
                parallelism=parallelism,
            )
            .write(flow.sink(key="k", value=ts.Json()))
        )
        return finish(
            lambda: pipeline.start(
                flow.spark,
                checkpoint=str(flow.checkpoint),
                trigger={"availableNow": True},
                execution=flow.execution,
                **settings,
            )
        )

    def assert_exact(self) -> None:
        """Each row came once; and the counts and sums of a key go up by its rows, one by one."""
        found = [
            json.loads(each.value or "")
            for each in read_committed(self.flow.confluent, self.flow.topic_out)
        ]
        assert sorted((row["k"], row["n"]) for row in found) == sorted(self.fed)
        for key in {row["k"] for row in found}:
            total = 0
            for number, row in enumerate((each for each in found if each["k"] == key), start=1):
                total += row["n"]
                assert (row["count"], row["sum"]) == (number, total)

    def manifest(self) -> m.Manifest:
        path = sorted((self.flow.checkpoint / m.FOLDER).glob("0*.json"))[-1]
        return m.decode(path.read_bytes(), str(path))


def only_rows() -> Any:
    def select(rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows.select(["k", "n"])

    return select


def test_a_union_is_exact_whatever_joins_goes_or_changes_places(flow: Flow) -> None:
    """Over restarts at other parallelisms: one input first, then two, three, and two again."""
    its = Sources(flow)
    its.feed(100)
    its.run(its.numbers(None))  # the only one, without a name: as of a release before
    its.assert_exact()
    assert parse_source(its.manifest().sources[0]).input == "input-1"

    its.feed(60, 90)
    query = its.run(its.numbers("input-1"), its.texts(), parallelism=3)
    its.assert_exact()
    progress = query.lastProgress
    assert [each["input"] for each in progress["sources"]] == ["input-1", "texts"]
    assert sum(each["numInputRows"] for each in query.recentProgress) == 150
    positions = [sum(each.positions.values()) for each in ts.source_progress(query)]
    assert positions == [160, 90]
    assert [each.lag_total for each in ts.source_progress(query)] == [0, 0]

    its.feed(10, 10, 50)
    its.run(its.third(), its.texts(), its.numbers("input-1"), parallelism=1)
    its.assert_exact()

    its.feed(10, 0, 10)
    with pytest.raises(OptionError, match="dropped-input-texts"):
        its.run(its.numbers("input-1"), its.third())
    its.run(its.numbers("input-1"), its.third(), accept=["dropped-input-texts"])
    its.assert_exact()
    assert {parse_source(each).input for each in its.manifest().sources} == {"input-1", "third"}
    its.feed(5, 0, 5)
    its.run(its.third(), its.numbers("input-1"))
    its.assert_exact()


def test_each_group_shows_how_far_its_input_is_read(flow: Flow) -> None:
    its = Sources(flow)
    its.feed(30, 20)
    its.run(its.numbers("input-1"), its.texts())

    def shown(group: str, topic: str, partitions: int) -> int:
        witness = Consumer({**flow.confluent, "group.id": group})
        asked = [TopicPartition(topic, number) for number in range(partitions)]
        found = sum(max(0, each.offset) for each in witness.committed(asked, timeout=30))
        witness.close()
        return found

    group = f"tallystick-{flow.name}"
    assert shown(group, flow.topic_in, 3) == 30
    assert shown(f"{group}/texts", its.text_topic, 2) == 20
    assert shown(group, its.text_topic, 2) == 0
