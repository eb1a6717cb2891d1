"""`KafkaSink.write`: one Kafka transaction for all rows of a DataFrame, or none of them."""

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import tallystick as ts
from tallystick.epoch.transactional_ids import is_batch_name
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.client import Client
from tallystick.kafka.transactions import list_open_ids
from tallystick.testing import EmbeddedKafka
from tallystick.testing.process import ProcessGroup
from tests.spark import topics
from tests.spark.forked_driver import environment_of_a_jvm
from tests.spark.topics import by_key, numbered, pending, produce, read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(600)]

JOB = Path(__file__).with_name("batch_job.py")
WAIT_S = 150.0
PARTITIONS = 3
_numbers = count()


@pytest.fixture
def topic(kafka: EmbeddedKafka) -> str:
    """A topic of three partitions."""
    name = f"batch-{next(_numbers)}"
    kafka.create_topic(name, PARTITIONS)
    return name


def sink_of(kafka: EmbeddedKafka, topic: str | None, **settings: Any) -> ts.KafkaSink:
    """A sink for a topic."""
    return ts.KafkaSink(kafka.bootstrap_servers, topic=topic, **settings)


def save(rows: DataFrame, kafka: EmbeddedKafka, topic: str, **settings: Any) -> None:
    """Write rows to a topic."""
    sink_of(kafka, topic, **settings).write(rows)


def keys_and_values(spark: SparkSession, record_count: int, tasks: int = 1) -> DataFrame:
    """Numbered records, in some tasks."""
    rows = spark.createDataFrame(numbered(record_count), "key string, value string")
    return rows.coalesce(1) if tasks == 1 else rows.repartition(tasks)


def open_ids(kafka: EmbeddedKafka) -> set[str]:
    """The transactional ids of batches that have a transaction open."""
    client = Client(sink_of(kafka, "any").output.config)
    try:
        return {ident for ident in list_open_ids(client) if "batch-" in ident}
    finally:
        client.close()


def assert_nothing_came(kafka: EmbeddedKafka, topic: str) -> None:
    """No row is visible, readers do not wait, and no transaction is open."""
    options = kafka.confluent_options()
    topics.wait_until_nothing_is_pending(options, topic)
    assert read_committed(options, topic) == []
    assert open_ids(kafka) == set()


def test_a_consumer_reads_the_rows_where_kafkas_partitioner_puts_them(
    spark, kafka, topic, tmp_path, monkeypatch
):
    kafka.create_topic(f"{topic}-other", PARTITIONS)
    produce(kafka.confluent_options(), f"{topic}-other", numbered(500, keys=40))
    rows = spark.createDataFrame(numbered(500, keys=40), "key string, value string").coalesce(1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # of this process alone

    save(rows, kafka, topic)

    written = read_committed(kafka.confluent_options(), topic)
    assert by_key((r.key, r.value) for r in written) == by_key(numbered(500, keys=40))
    others = read_committed(kafka.confluent_options(), f"{topic}-other")
    assert {(r.key, r.partition) for r in written} == {(r.key, r.partition) for r in others}
    assert len({r.partition for r in written}) == PARTITIONS
    assert open_ids(kafka) == set()
    assert list(tmp_path.iterdir()) == [], "the checkpoint of the write is deleted"


def test_two_writes_append_what_they_have_if_anything(spark, kafka, topic):
    sink = sink_of(kafka, topic)
    for record_count in (100, 0, 100):
        sink.write(keys_and_values(spark, record_count))

    written = read_committed(kafka.confluent_options(), topic)

    assert sorted(r.value for r in written) == sorted([v for _, v in numbered(100)] * 2)
    assert open_ids(kafka) == set()


def test_json_values_headers_and_topics_are_as_in_a_stream(spark, kafka, topic):
    flights = spark.createDataFrame([("AUS", 5), (None, 7)], "dest string, n int").coalesce(1)
    save(flights, kafka, topic, value=ts.Json(), key="dest")
    raw = flights.select(
        f.lit(topic).alias("topic"),
        f.lit(1).alias("partition"),
        f.col("dest").alias("value"),
        f.expr("array(struct('h' AS key, encode('x', 'utf-8') AS value))").alias("headers"),
    )
    sink_of(kafka, None, token_topic=topic).write(raw)

    written = read_committed(kafka.confluent_options(), topic)

    values = {(r.key, r.value) for r in written if r.value and r.value.startswith("{")}
    assert {(key, json.loads(value)["n"]) for key, value in values} == {("AUS", 5), (None, 7)}
    assert {(r.partition, r.value) for r in written if r.headers == (("h", b"x"),)} == {
        (1, "AUS"),
        (1, None),
    }


def test_rows_of_many_tasks_need_no_order_of_the_users(spark, kafka, topic):
    kafka.create_topic(f"{topic}-other", PARTITIONS)
    produce(kafka.confluent_options(), f"{topic}-other", numbered(900, keys=40))
    records = [*numbered(900, keys=40), *((None, f"without key {n}") for n in range(50))]
    rows = spark.createDataFrame(records, "key string, value string").repartition(4)

    save(rows, kafka, topic)

    written = read_committed(kafka.confluent_options(), topic)
    assert Counter((r.key, r.value) for r in written) == Counter(records)
    others = read_committed(kafka.confluent_options(), f"{topic}-other")
    assert {(r.key, r.partition) for r in written if r.key} == {
        (r.key, r.partition) for r in others
    }


def test_a_task_that_fails_leaves_nothing_visible_and_nothing_open(spark, kafka, topic):
    failing = keys_and_values(spark, 100).withColumn("value", f.expr("raise_error('no weather')"))

    with pytest.raises(Exception, match="no weather"):
        save(failing, kafka, topic)

    assert_nothing_came(kafka, topic)


def test_what_timed_out_before_the_commit_is_written_again(spark, kafka, topic, monkeypatch):
    waits, count_rows = [True], KafkaBroker.last_sequences

    def late(*arguments: Any) -> Any:
        if waits:
            waits.clear()
            topics.wait_until_nothing_is_pending(kafka.confluent_options(), topic)
        return count_rows(*arguments)

    monkeypatch.setattr(KafkaBroker, "last_sequences", late)

    save(keys_and_values(spark, 100), kafka, topic, transaction_timeout_ms=4000)

    assert waits == []
    topics.assert_exact(kafka.confluent_options(), topic, numbered(100))


def job(
    group: ProcessGroup, environment: dict[str, str], kafka: EmbeddedKafka, log: Path, topic: str
) -> subprocess.Popen[str]:
    """Start a process that writes, and does not come to an end."""
    spec = {"servers": kafka.bootstrap_servers, "topic": topic}
    with log.open("w") as stderr:
        return group.start(
            [sys.executable, str(JOB), json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
        )


class Writer:
    """A process with some rows in an open transaction, as soon as it has written them."""

    def __init__(
        self,
        group: ProcessGroup,
        environment: dict[str, str],
        kafka: EmbeddedKafka,
        log: Path,
        topic: str,
    ) -> None:
        self._kafka, self._log, self._topic = kafka, log, topic
        self.process = job(group, environment, kafka, log, topic)

    def wait_until_written(self) -> None:
        """Wait until its transaction is open and has rows."""
        deadline = time.monotonic() + WAIT_S
        while not pending(self._kafka.confluent_options(), self._topic):
            assert self.process.poll() is None, self._log.read_text()[-4000:]
            assert time.monotonic() < deadline, "the process wrote nothing"
            time.sleep(0.1)


@pytest.fixture
def writer(kafka: EmbeddedKafka, topic: str, tmp_path: Path) -> Iterator[Writer]:
    """A process that starts."""
    with environment_of_a_jvm(tmp_path) as environment, closing(ProcessGroup()) as group:
        yield Writer(group, environment, kafka, tmp_path / "log", topic)


def test_a_driver_that_is_interrupted_or_killed_leaves_nothing_visible_and_fences_nobody(
    spark, kafka, topic, writer
):
    """An interrupted one aborts, and so holds no reader up; Kafka aborts for a killed one."""
    process = writer.process
    writer.wait_until_written()
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "interrupted\n"
    assert_nothing_came(kafka, topic)

    process.stdin.write("\n")
    process.stdin.flush()
    writer.wait_until_written()
    process.kill()
    process.wait()
    options = kafka.confluent_options()
    assert pending(options, topic)  # it has hit in the middle
    (open_id,) = open_ids(kafka)
    assert is_batch_name(open_id.removeprefix("tallystick-"))
    assert read_committed(options, topic) == []

    save(keys_and_values(spark, 50), kafka, topic)

    assert open_ids(kafka) == {open_id}
    abort(kafka, open_id)
    topics.assert_exact(options, topic, numbered(50))


def abort(kafka: EmbeddedKafka, transactional_id: str) -> None:
    """Do what Kafka does at the timeout."""
    stranger = Producer({**kafka.confluent_options(), "transactional.id": transactional_id})
    stranger.init_transactions(WAIT_S)


def test_what_cannot_be_a_batch_is_refused(spark, kafka, topic):
    rows = keys_and_values(spark, 1)

    with pytest.raises(ts.OptionError, match="a batch is one transaction"):
        save(rows, kafka, topic, transactions="task")
    with pytest.raises(ts.OptionError, match="a batch is one transaction"):
        save(rows, kafka, topic, guarantee="at_least_once")
    with pytest.raises(ts.OptionError, match="works in a Pipeline only"):
        save(rows, kafka, topic, dead_letter_topic="letters")
    with pytest.raises(ts.TallystickError, match="to write have no column 'value'"):
        save(rows.select("key"), kafka, topic)
    with pytest.raises(ts.OptionError, match="'no-such-topic'"):
        save(rows, kafka, "no-such-topic")

    assert_nothing_came(kafka, topic)


def test_sparks_own_ways_to_write_show_what_replaces_them(spark, kafka, tmp_path):
    """Spark looks a format up in the session that is active, which other tests may have changed."""
    rows = keys_and_values(spark, 1)
    ts.register(spark)
    sink = re.escape("sink = ts.KafkaSink('host:9092', topic='counts')")
    options = {"kafka.bootstrap.servers": "host:9092", "topic": "counts"}

    with pytest.raises(Exception, match=rf"{sink}\s+sink\.write\(df\)"):
        rows.write.format("tallystick").options(**options).mode("append").save()

    stream = spark.readStream.format("rate").load().selectExpr("string(value) AS value")
    started = stream.writeStream.format("tallystick").options(**options)
    with pytest.raises(Exception, match=rf"{sink}\s+df\.writeStream\.foreachBatch\(sink\)"):
        started.option("checkpointLocation", str(tmp_path)).start().awaitTermination(WAIT_S)
