"""A Kafka that cannot be reached ends the first start, before any JVM and in one error."""

import socket
from pathlib import Path

import pytest
from pyspark import SparkContext

import tallystick as ts
from tallystick.errors import OptionError
from tallystick.kafka.config import KafkaConfig
from tallystick.pipeline import first_start
from tallystick.pipeline.first_start import check_first_start
from tallystick.spark.cluster import Cluster


@pytest.fixture
def servers() -> str:
    """Of a port that refuses connections."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{bound.getsockname()[1]}"


def test_the_first_start_is_refused_before_spark(
    servers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    monkeypatch.setattr(Cluster, "of", lambda *_, **__: pytest.fail("Spark is asked for"))
    source = ts.KafkaSource(servers, topics=["in"], value=ts.Json("n bigint"))
    pipeline = (
        ts.Pipeline("p").read(source).write(ts.KafkaSink(servers, topic="out", value=ts.Json()))
    )

    with pytest.raises(OptionError) as raised:
        pipeline.start(checkpoint=tmp_path / "new")

    assert str(raised.value).startswith(f"Kafka at {servers} cannot be reached: {servers}: ")
    assert not any((tmp_path / "new").iterdir())


def test_a_pipeline_that_ran_before_waits_for_kafka(
    servers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = KafkaConfig.from_options({"bootstrap.servers": servers})
    with pytest.raises(OptionError):
        check_first_start(str(tmp_path), [config])
    manifest = tmp_path / "tallystick" / f"{7:012d}-1-ab.json"
    manifest.parent.mkdir()
    manifest.write_text("")
    monkeypatch.setattr(first_start, "check_reachable", lambda _: pytest.fail("it is asked"))
    check_first_start(str(tmp_path), [config])
