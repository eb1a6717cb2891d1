"""`ConsoleSink` on Spark, beside a real Kafka: the driver prints what is committed."""

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import tallystick as ts
from tests.spark.flow import Flow, finish
from tests.spark.topics import produce, read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark]


def test_rows_of_committed_epochs_are_printed_once(
    flow: Flow,
    spark: SparkSession,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    produce(flow.confluent, flow.topic_in, [("k", json.dumps({"n": n})) for n in range(3)])
    read = ts.Pipeline(flow.name).read(flow.source(value="n bigint"))
    pipeline = read.write(ts.ConsoleSink(), flow.sink(value=ts.Json()))

    def start() -> ts.Query:
        return pipeline.start(spark, checkpoint=tmp_path / "cp", trigger="availableNow")

    finish(start)
    first = capsys.readouterr().out.splitlines()
    finish(start)

    assert sorted(json.loads(line)["n"] for line in first) == [0, 1, 2]
    assert capsys.readouterr().out == "", "a second start prints nothing again"
    assert len(read_committed(flow.confluent, flow.topic_out)) == 3
