"""`df.write.format("tallystick")`: one Kafka transaction for all rows, or none of them."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import tallystick as ts
from tallystick.kafka.client import Client
from tallystick.kafka.transactions import list_open_ids
from tallystick.options.sink import parse_batch_write_options
from tallystick.testing import EmbeddedKafka
from tallystick.testing.process import ProcessGroup
from tests.spark import faulty_rows, topics
from tests.spark.faulty_rows import FAULTY, HAS_HIT
from tests.spark.topics import by_key, numbered, pending, produce, read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(600)]

JOB = Path(__file__).with_name("batch_job.py")
WAIT_S = 150.0
PARTITIONS = 3
_numbers = count()


@pytest.fixture(autouse=True)
def active(spark: SparkSession) -> None:
    """Spark looks a format up in the session that is active, which other tests may have changed."""
    spark.createDataFrame([], "a int")
    ts.register(spark)


@pytest.fixture
def topic(kafka: EmbeddedKafka) -> str:
    """A topic of three partitions."""
    name = f"batch-{next(_numbers)}"
    kafka.create_topic(name, PARTITIONS)
    return name


@pytest.fixture(scope="module", autouse=True)
def _by_value() -> Iterator[None]:
    """Workers need no tests."""
    cloudpickle.register_pickle_by_value(faulty_rows)
    yield
    cloudpickle.unregister_pickle_by_value(faulty_rows)


def save(rows: DataFrame, kafka: EmbeddedKafka, topic: str, **options: str) -> None:
    """Write rows to a topic."""
    settings = {**kafka.kafka_options, "topic": topic, **options}
    rows.write.format("tallystick").options(**settings).mode("append").save()


def keys_and_values(spark: SparkSession, record_count: int, tasks: int = 1) -> DataFrame:
    """Numbered records, in some tasks."""
    rows = spark.createDataFrame(numbered(record_count), "key string, value string")
    return rows.coalesce(1) if tasks == 1 else rows.repartition(tasks)


def faulty(spark: SparkSession, kafka: EmbeddedKafka, topic: str, fault: str) -> DataFrame:
    """Rows that come to a fault when some are in an open transaction."""
    rows = faulty_rows.faulty_rows(fault, kafka.confluent_options(), topic)
    return spark.range(0, 1, 1, 1).mapInArrow(rows, FAULTY)


def open_ids(kafka: EmbeddedKafka) -> set[str]:
    """The transactional ids of batches that have a transaction open."""
    options = parse_batch_write_options({**kafka.kafka_options, "topic": "any"})
    client = Client(options.output.config)
    try:
        return {each for each in list_open_ids(client) if "batch" in each}
    finally:
        client.close()


def assert_nothing_came(kafka: EmbeddedKafka, topic: str) -> None:
    """No row is visible, readers do not wait, and no transaction is open."""
    options = kafka.confluent_options()
    topics.wait_until_nothing_is_pending(options, topic)
    assert read_committed(options, topic) == []
    assert open_ids(kafka) == set()


def test_a_consumer_reads_the_rows_where_kafkas_partitioner_puts_them(spark, kafka, topic):
    kafka.create_topic(f"{topic}-other", PARTITIONS)
    produce(kafka.confluent_options(), f"{topic}-other", numbered(500, keys=40))
    rows = spark.createDataFrame(numbered(500, keys=40), "key string, value string").coalesce(1)

    save(rows, kafka, topic)

    found = read_committed(kafka.confluent_options(), topic)
    assert by_key((r.key, r.value) for r in found) == by_key(numbered(500, keys=40))
    others = read_committed(kafka.confluent_options(), f"{topic}-other")
    assert {(r.key, r.partition) for r in found} == {(r.key, r.partition) for r in others}
    assert len({r.partition for r in found}) == PARTITIONS
    assert open_ids(kafka) == set()


def test_two_writes_append_and_no_rows_are_no_transaction(spark, kafka, topic):
    prefix = {"transactional.id.prefix": topic}
    save(keys_and_values(spark, 100), kafka, topic, **prefix)
    save(keys_and_values(spark, 0), kafka, topic, **prefix)
    save(keys_and_values(spark, 100), kafka, topic, **prefix)

    found = read_committed(kafka.confluent_options(), topic)

    assert sorted(r.value for r in found) == sorted([v for _, v in numbered(100)] * 2)
    assert open_ids(kafka) == set()


def test_json_values_headers_and_topics_are_as_in_a_stream(spark, kafka, topic):
    flights = spark.createDataFrame([("AUS", 5), (None, 7)], "dest string, n int").coalesce(1)
    save(flights, kafka, topic, **{"value.format": "json", "key.field": "dest"})
    raw = flights.select(
        f.lit(topic).alias("topic"),
        f.lit(1).alias("partition"),
        f.col("dest").alias("value"),
        f.expr("array(struct('h' AS key, encode('x', 'utf-8') AS value))").alias("headers"),
    )
    named = {**kafka.kafka_options}
    raw.write.format("tallystick").options(**named).mode("append").save()

    found = read_committed(kafka.confluent_options(), topic)

    values = {(r.key, r.value) for r in found if r.value and r.value.startswith("{")}
    assert {(key, json.loads(value)["n"]) for key, value in values} == {("AUS", 5), (None, 7)}
    assert {(r.partition, r.value) for r in found if r.headers == (("h", b"x"),)} == {
        (1, "AUS"),
        (1, None),
    }


def test_tasks_with_partitions_of_their_own_write_side_by_side(spark, kafka, topic):
    kafka.create_topic(f"{topic}-other", PARTITIONS)
    produce(kafka.confluent_options(), f"{topic}-other", numbered(900, keys=40))
    records = [*numbered(900, keys=40), *((None, f"without key {n}") for n in range(50))]
    rows = spark.createDataFrame(records, "key string, value string").repartition(4)
    chosen = rows.withColumn("partition", ts.kafka_partition("key", PARTITIONS))

    save(chosen.repartitionById(PARTITIONS, "partition"), kafka, topic)

    found = read_committed(kafka.confluent_options(), topic)
    assert Counter((r.key, r.value) for r in found) == Counter(records)
    others = read_committed(kafka.confluent_options(), f"{topic}-other")
    assert {(r.key, r.partition) for r in found if r.key} == {(r.key, r.partition) for r in others}


def test_keys_of_any_type_are_divided_as_they_are_written(spark, kafka, topic):
    """No column tells the writer: it chooses the same partitions by itself."""
    rows = spark.range(0, 300, 1, 4).selectExpr("id % 50 AS k", "id AS n")
    divided = rows.repartitionById(PARTITIONS, ts.kafka_partition(f.col("k"), PARTITIONS))

    save(divided, kafka, topic, **{"value.format": "json", "key.field": "k"})

    found = read_committed(kafka.confluent_options(), topic)
    assert sorted(json.loads(r.value)["n"] for r in found) == list(range(300))
    assert len({r.partition for r in found}) == PARTITIONS
    with pytest.raises(ts.OptionError, match="topic's number of partitions"):
        ts.kafka_partition("k", 0)


def test_tasks_that_share_a_partition_are_refused_with_the_remedy(spark, kafka, topic):
    with pytest.raises(Exception, match=r"df\.repartition\(1\)\.write"):
        save(keys_and_values(spark, 1000, tasks=4), kafka, topic)

    assert_nothing_came(kafka, topic)


def test_a_task_that_fails_leaves_nothing_visible_and_nothing_open(spark, kafka, topic):
    with pytest.raises(Exception, match=HAS_HIT):
        save(faulty(spark, kafka, topic, "raise"), kafka, topic)

    assert_nothing_came(kafka, topic)


def test_a_write_that_takes_longer_than_its_transaction_may_says_so(spark, kafka, topic):
    rows = faulty(spark, kafka, topic, "outlive")
    with pytest.raises(Exception, match=r"transaction\.timeout\.ms=4000"):
        save(rows, kafka, topic, **{"transaction.timeout.ms": "4000"})

    assert_nothing_came(kafka, topic)


def job(group: ProcessGroup, kafka: EmbeddedKafka, log: Path, **spec: Any) -> subprocess.Popen[str]:
    """Start a process that writes."""
    settings: Mapping[str, Any] = {
        **spec,
        "options": {**kafka.kafka_options, **spec["options"]},
        "confluent": kafka.confluent_options(),
    }
    with log.open("w") as stderr:
        return group.start(
            [sys.executable, str(JOB), json.dumps(settings)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )


def test_a_second_attempt_of_a_task_never_repeats_rows(kafka, topic, tmp_path):
    group, log = ProcessGroup(), tmp_path / "log"
    try:
        spec = {"master": "local[2,3]", "fault": "raise once", "options": {"topic": topic}}
        process = job(group, kafka, log, **spec)
        said, _ = process.communicate(timeout=WAIT_S)
    finally:
        group.close()

    error = json.loads(said.splitlines()[-1])["error"]
    assert "failed 3 times; aborting job" in log.read_text()
    assert "attempt 2 of task 0: an earlier attempt may have written" in error
    assert HAS_HIT in log.read_text()  # it was the first attempt's error, and rows were in Kafka
    assert_nothing_came(kafka, topic)


def test_a_killed_driver_leaves_nothing_visible_and_does_not_block_the_next_write(
    spark, kafka, topic, tmp_path
):
    group, log = ProcessGroup(), tmp_path / "log"
    prefix = {"transactional.id.prefix": topic}
    options = kafka.confluent_options()
    try:
        spec = {"master": "local[2]", "fault": "stay", "options": {"topic": topic, **prefix}}
        process = job(group, kafka, log, **spec)
        deadline = time.monotonic() + WAIT_S
        while not pending(options, topic):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, "the process wrote nothing"
            time.sleep(0.1)
        group.send_signal(signal.SIGKILL)
        process.wait()
    finally:
        group.close()
    assert pending(options, topic)  # it has hit in the middle
    assert open_ids(kafka) == {f"{topic}-batch"}
    assert read_committed(options, topic) == []

    save(keys_and_values(spark, 50), kafka, topic, **prefix)

    topics.assert_exact(options, topic, [(k, v) for k, v in numbered(50)])
    assert open_ids(kafka) == set()


def test_overwrite_and_what_is_for_streams_are_refused(spark, kafka, topic):
    rows = keys_and_values(spark, 1)
    settings = {**kafka.kafka_options, "topic": topic}
    writer = rows.write.format("tallystick").options(**settings)

    with pytest.raises(Exception, match=r'mode\("overwrite"\): a topic is a log'):
        writer.mode("overwrite").save()
    with pytest.raises(Exception, match=r"did you mean 'compression'\?"):
        save(rows, kafka, topic, compresion="lz4")
    with pytest.raises(Exception, match=r"guarantee means nothing for df\.write"):
        save(rows, kafka, topic, guarantee="at_least_once")
    with pytest.raises(Exception, match="to write have no column 'value'"):
        save(rows.select("key"), kafka, topic)

    assert_nothing_came(kafka, topic)
