"""Spark as a user with the least rights, over TLS, with the options of Spark's own connector.

And the page of a pipeline with a login, and of a login that is refused: no password is on either.
"""

import json
import urllib.request
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.errors import AuthorizationError
from tallystick.ops.ui import rendering
from tallystick.ops.ui.page import CheckpointReader
from tallystick.testing import EmbeddedKafka
from tallystick.testing.process import free_ports
from tests.failover.evidence import read_committed
from tests.security.people import PASSWORDS, options_of
from tests.spark.numbering import picked

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(300)]

ROWS = [str(number) for number in range(300)]


@pytest.fixture(scope="module")
def spark(shared_spark: SparkSession) -> SparkSession:
    return shared_spark


@pytest.fixture(scope="module")
def options(guarded: EmbeddedKafka) -> dict[str, str]:
    """What a user of Spark's connector would write, and the input in place."""
    producer = Producer(guarded.confluent_options())
    for number, row in enumerate(ROWS):
        producer.produce("guarded-in", row, partition=number % 2)
    producer.flush()
    options = guarded.kafka_options_for("alice")
    assert sorted(options) == [
        "kafka.bootstrap.servers",
        "kafka.sasl.jaas.config",
        "kafka.sasl.mechanism",
        "kafka.security.protocol",
        "kafka.ssl.truststore.location",
        "kafka.ssl.truststore.type",
    ]
    return options


def without_servers(options: dict[str, str]) -> tuple[str, dict[str, str]]:
    rest = dict(options)
    return rest.pop("kafka.bootstrap.servers"), rest


def written(guarded: EmbeddedKafka) -> list[str]:
    rows_by_partition = read_committed(guarded.confluent_options(), "guarded-out", 2)
    return sorted((row for rows in rows_by_partition.values() for row in rows), key=int)


def assert_no_secret(*texts: str) -> None:
    for text in texts:
        assert [user for user, password in PASSWORDS.items() if password in text] == []


def stored(folder: Path) -> list[str]:
    return [path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()]


def test_a_pipeline_and_a_query_of_the_users_own_run_and_show_no_secret(
    spark: SparkSession,
    options: dict[str, str],
    guarded: EmbeddedKafka,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    servers, security = without_servers(options)
    source = ts.KafkaSource(
        servers, topics=["guarded-in"], starting_offsets="earliest", options=security
    )
    sink = ts.KafkaSink(servers, topic="guarded-out", options=security)

    def values(rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows.select(["value"])

    pipeline = ts.Pipeline("alice-pipeline").read(source).map_batches(values).write(sink)
    query = pipeline.start(
        spark, checkpoint=str(tmp_path / "pipeline"), trigger={"availableNow": True}
    )
    query.awaitTermination(120)
    once = written(guarded)
    rows = (
        spark.readStream.format("tallystick")
        .options(**options, subscribe="guarded-in", startingOffsets="earliest")
        .load()
    )
    rows.explain(extended=True)
    own = (
        rows.select("value")
        .writeStream.queryName("alice-query")
        .option("checkpointLocation", str(tmp_path / "query"))
        .trigger(availableNow=True)
        .foreachBatch(sink)
        .start()
    )
    own.awaitTermination(120)

    assert once == ROWS
    assert written(guarded) == sorted(ROWS * 2, key=int)
    progress = [json.dumps(progress_entry, default=str) for progress_entry in own.recentProgress]
    shown = capfd.readouterr()
    assert_no_secret(repr(pipeline), repr(sink), repr(source), shown.out, shown.err, caplog.text)
    assert_no_secret(*progress, *stored(tmp_path))


@pytest.mark.parametrize(
    ("user", "name", "group", "lacking"),
    [
        (
            "no-topic-read",
            "no-topic-read",
            "no-topic-read",
            ["READ on topic 'guarded-in'. ", "READ on topic 'guarded-in', READ on topic '"],
        ),
        ("alice", "alice", "billing", ["READ on group 'billing'. "]),
        (
            "alice",
            "stranger",
            "alice",
            ["READ on group 'tallystick-stranger-token', WRITE on transactional id 'tallystick-"],
        ),
    ],
)
def test_rights_that_are_missing_on_either_side_are_told_at_once_and_nothing_starts(
    user: str,
    name: str,
    group: str,
    lacking: list[str],
    spark: SparkSession,
    guarded: EmbeddedKafka,
    tmp_path: Path,
) -> None:
    servers, security = without_servers(guarded.kafka_options_for(user))
    source = ts.KafkaSource(servers, topics=["guarded-in"], group_id=group, options=security)
    sink = ts.KafkaSink(servers, topic="guarded-out", options=security)
    pipeline = ts.Pipeline(name).read(source).write(sink)

    with pytest.raises(AuthorizationError) as raised:
        pipeline.start(spark, checkpoint=str(tmp_path / "never"))

    assert [f"user {user!r} lacks {words}" in str(raised.value) for words in lacking] == [
        True for _ in lacking
    ]
    assert str(raised.value).count("lacks") == len(lacking)
    assert not (tmp_path / "never").exists()


def test_a_wrong_password_ends_the_query_at_once_and_is_not_shown(
    spark: SparkSession, options: dict[str, str], tmp_path: Path
) -> None:
    jaas = options["kafka.sasl.jaas.config"].replace(PASSWORDS["alice"], "gu3ss")
    rows = (
        spark.readStream.format("tallystick")
        .options(**{**options, "kafka.sasl.jaas.config": jaas})
        .options(subscribe="guarded-in", startingOffsets="earliest")
        .load()
    )
    query = (
        rows.writeStream.option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .foreachBatch(lambda rows, batch_id: None)
        .start()
    )

    with pytest.raises(StreamingQueryException, match="login of 'alice'") as raised:
        query.awaitTermination(120)
    assert "gu3ss" not in str(raised.value)
    assert "gu3ss" not in "".join(stored(tmp_path))


# --- the page ------------------------------------------------------------------------------------


def test_neither_a_record_nor_a_password_is_on_the_page_of_a_run(
    spark: SparkSession, guarded: EmbeddedKafka, tmp_path: Path
) -> None:
    topic = guarded.create_topic("guarded-page")
    producer = Producer(guarded.confluent_options())
    producer.produce(topic, "S3CR3T is no JSON", partition=0)
    assert producer.flush(60) == 0
    login = dict(guarded.kafka_options_for("alice"))
    servers = login.pop("kafka.bootstrap.servers")
    (port,) = free_ports(1, "127.0.0.1")
    query = (
        ts.Pipeline("alice-page")
        .read(
            ts.KafkaSource(
                servers,
                topics=[topic],
                value=ts.Json("k string, n bigint", mode="failfast"),
                starting_offsets="earliest",
                options=login,
            )
        )
        .map_batches(picked())
        .write(ts.KafkaSink(servers, topic="guarded-out", value=ts.Json(), options=login))
        .start(spark, checkpoint=str(tmp_path / "checkpoint"), ui_port=port)
    )
    with pytest.raises(ts.RecordError, match="S3CR3T is no JSON"):
        query.awaitTermination(120)

    for path in ("", "facts.json"):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}") as answer:
            text = answer.read().decode()
        assert "RecordError" in text
        assert f"topic {topic}, partition 0, offset 0" in text
        assert "S3CR3T" not in text
        assert "jaas" not in text
        assert_no_secret(text)


@pytest.mark.parametrize("user", ["nobody", "alice"])
def test_a_login_that_is_refused_is_told_without_its_password(
    user: str, guarded: EmbeddedKafka, tmp_path: Path
) -> None:
    """Nobody lacks all rights; with the password of another, alice is not let in at all."""
    (tmp_path / "metadata").write_text('{"id": "somebody-s"}')
    options = options_of(guarded, user)
    if user == "alice":
        login = options["sasl.jaas.config"]
        options["sasl.jaas.config"] = login.replace(PASSWORDS["alice"], PASSWORDS["observer"])
        assert options["sasl.jaas.config"] != login

    facts = CheckpointReader(str(tmp_path), options).read()

    assert facts.kafka == (user == "nobody")
    assert any(finding.severity > 0 for finding in facts.findings)
    assert_no_secret(rendering.page(facts), json.dumps(asdict(facts)))
