"""A start logs what `tallystick doctor` would warn of, a line for each; and starts."""

import logging
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.host import stopwatch
from tallystick.testing import EmbeddedKafka
from tests.spark.topics import produce, read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(300)]
LINES = ("disk: ", "retention: ", "topics: ", "clock: ")


def started(
    kafka: EmbeddedKafka, spark: SparkSession, folder: Path, name: str, transactions: str = "epoch"
) -> None:
    """Run a pipeline that copies one record; its topics are there."""
    servers = kafka.bootstrap_servers
    produce(kafka.confluent_options(), f"{name}-in", [("a", "1")])
    pipeline = (
        ts.Pipeline(name)
        .read(ts.KafkaSource(servers, topics=[f"{name}-in"], starting_offsets="earliest"))
        .write(ts.KafkaSink(servers, topic=f"{name}-out", transactions=transactions))
    )
    query = pipeline.start(spark, checkpoint=str(folder), trigger={"availableNow": True})
    assert query.awaitTermination(120)


class Lines(logging.Handler):
    """What is logged as a warning or worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def of(self, prefix: str) -> list[str]:
        return [text for text in self.texts if text.startswith(prefix)]


@pytest.fixture(scope="module", params=["epoch", "task"])
def ill(
    request: pytest.FixtureRequest, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Lines:
    """The log of a start that has everything against it, and of a run that works all the same."""
    lines, log = Lines(), logging.getLogger("tallystick")
    usage = namedtuple("usage", "total used free")
    now_ms = stopwatch.now_ms
    folder = tmp_path_factory.mktemp("checkpoint")
    with (
        EmbeddedKafka(3, properties={"offsets.retention.minutes": "60"}) as kafka,
        pytest.MonkeyPatch.context() as patched,
    ):
        for topic in ("ill-in", "ill-out"):
            kafka.create_topic(topic, 1, replication_factor=1)
        patched.setattr(shutil, "disk_usage", lambda _: usage(100 << 30, 99 << 30, 1 << 20))
        patched.setattr(stopwatch, "now_ms", lambda: now_ms() + 20_000)
        log.addHandler(lines)
        try:
            started(kafka, spark, folder, "ill", request.param)
        finally:
            log.removeHandler(lines)
        assert len(read_committed(kafka.confluent_options(), "ill-out")) == 1
    return lines


def test_a_full_disk(ill: Lines) -> None:
    for text in ill.of("disk: "):
        assert "0.0 GiB of 100.0 GiB are free" in text
        assert "df -h " in text
    assert len(ill.of("disk: ")) == 2, "of the checkpoint, and of copies of state"


def test_a_clock_that_is_wrong(ill: Lines) -> None:
    (text,) = ill.of("clock: ")

    assert "ahead of that of Kafka's controller" in text
    assert "timedatectl status" in text


def test_tokens_that_are_soon_forgotten(ill: Lines) -> None:
    (text,) = ill.of("retention: ")

    assert "offsets.retention.minutes is 60" in text
    assert "Set offsets.retention.minutes=1440" in text


def test_rows_that_have_one_copy(ill: Lines) -> None:
    (text,) = ill.of("topics: ")

    assert "output topic 'ill-out' has replication factor 1" in text
    assert "kafka-reassign-partitions" in text


def test_where_nothing_is_wrong_nothing_is_said(
    kafka: EmbeddedKafka, spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for topic in ("healthy-in", "healthy-out"):
        kafka.create_topic(topic, 1)
    started(kafka, spark, tmp_path / "checkpoint", "healthy")

    assert not [message for message in caplog.messages if message.startswith(LINES)]
