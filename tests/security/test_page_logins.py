"""The page of a pipeline with a login, and of a login that is refused: no password is on either."""

import json
import urllib.request
from dataclasses import asdict
from pathlib import Path

import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.ops.ui import rendering
from tallystick.ops.ui.page import CheckpointReader
from tallystick.testing import EmbeddedKafka
from tallystick.testing.process import free_ports
from tests.security.people import PASSWORDS, options_of
from tests.security.test_rights import assert_no_secret
from tests.spark.numbering import picked

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(300)]


def test_neither_a_record_nor_a_password_is_on_the_page_of_a_run(
    shared_spark: SparkSession, guarded: EmbeddedKafka, tmp_path: Path
) -> None:
    producer = Producer(guarded.confluent_options())
    producer.produce("guarded-in", "S3CR3T is no JSON", partition=0)
    assert producer.flush(60) == 0
    login = dict(guarded.kafka_options_for("alice"))
    servers = login.pop("kafka.bootstrap.servers")
    (port,) = free_ports(1, "127.0.0.1")
    query = (
        ts.Pipeline("alice-page")
        .read(
            ts.KafkaSource(
                servers,
                topics=["guarded-in"],
                value=ts.Json("k string, n bigint", mode="failfast"),
                starting_offsets="earliest",
                options=login,
            )
        )
        .map_batches(picked())
        .write(ts.KafkaSink(servers, topic="guarded-out", value=ts.Json(), options=login))
        .start(shared_spark, checkpoint=str(tmp_path / "checkpoint"), ui_port=port)
    )
    with pytest.raises(ts.RecordError, match="S3CR3T is no JSON"):
        query.awaitTermination(120)

    for path in ("", "facts.json"):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}") as answer:
            text = answer.read().decode()
        assert "RecordError" in text
        assert "topic guarded-in, partition 0, offset 0" in text
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
