"""Topics of other formats that one pipeline reads, and what they were fed."""

import json
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import tallystick as ts
from tallystick.epoch import manifest as m
from tests.spark.flow import Flow, finish
from tests.spark.topics import produce, read_committed

ROWS = "k string, n bigint"


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

    def pipeline(
        self, *streams: ts.Stream, parallelism: int | None = 2, **sink: Any
    ) -> ts.Pipeline:
        """The pipeline that sums up each key's numbers."""
        return (
            ts.Pipeline(self.flow.name)
            .read(*streams)
            .key_by("k")
            .process(
                ts.aggregate({"count": ts.count(), "sum": ts.sum("n")}, each="record", keep=["n"]),
                uid="sums",
                parallelism=parallelism,
            )
            .write(self.flow.sink(key="k", value=ts.Json(), **sink))
        )

    def start(self, pipeline: ts.Pipeline, **settings: Any) -> Any:
        """Start it, to stop at the end of what there is unless another trigger is given."""
        return pipeline.start(
            self.flow.spark,
            checkpoint=str(self.flow.checkpoint),
            execution=self.flow.execution,
            **{"trigger": {"availableNow": True}, **settings},
        )

    def run(self, *streams: ts.Stream, parallelism: int = 2, **settings: Any) -> Any:
        """Run a pipeline of these inputs to its end."""
        pipeline = self.pipeline(*streams, parallelism=parallelism)
        return finish(lambda: self.start(pipeline, **settings))

    def assert_exact(self) -> None:
        """Each row came once; and the counts and sums of a key go up by its rows, one by one."""
        rows_out = [
            json.loads(record.value or "")
            for record in read_committed(self.flow.confluent, self.flow.topic_out)
        ]
        assert sorted((row["k"], row["n"]) for row in rows_out) == sorted(self.fed)
        for key in {row["k"] for row in rows_out}:
            total = 0
            for number, row in enumerate(
                (row_out for row_out in rows_out if row_out["k"] == key), start=1
            ):
                total += row["n"]
                assert (row["count"], row["sum"]) == (number, total)

    def manifest(self) -> m.Manifest:
        path = sorted((self.flow.checkpoint / m.FOLDER).glob("0*.json"))[-1]
        return m.decode(path.read_bytes(), str(path))


def only_rows() -> Any:
    def select(rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows.select(["k", "n"])

    return select
