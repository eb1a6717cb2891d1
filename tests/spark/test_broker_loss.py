"""The broker dies, and comes back or not: the pipeline waits, or says clearly what it missed."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.testing import EmbeddedKafka
from tallystick.testing.process import free_ports
from tests.spark.flow import Facts, Flow

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.chaos, pytest.mark.timeout(900)]

IMPATIENT = {"kafka.request.timeout.ms": "2000", "kafka.delivery.timeout.ms": "4000"}


@pytest.fixture(scope="module")
def mortal_kafka() -> Iterator[EmbeddedKafka]:
    """A broker of these tests' own."""
    with EmbeddedKafka() as kafka:
        yield kafka


def test_a_broker_killed_inside_an_open_transaction_and_restarted_loses_nothing(
    mortal_kafka: EmbeddedKafka, spark: SparkSession, tmp_path: Path
) -> None:
    flow = Flow(mortal_kafka, spark, tmp_path)
    flow.feed(200)
    restart = threading.Timer(2.0, mortal_kafka.restart, [1])

    def kill(_: object) -> None:
        mortal_kafka.kill(1)
        restart.start()

    flow.run(flow.pipeline(max_offsets_per_trigger=100), listener=Facts("EpochRan", kill))

    flow.assert_exact()


def test_a_broker_that_stays_away_fails_the_query_with_its_address_and_the_restart_is_exact(
    mortal_kafka: EmbeddedKafka, spark: SparkSession, tmp_path: Path
) -> None:
    flow = Flow(mortal_kafka, spark, tmp_path)
    flow.feed(200)
    impatient = flow.pipeline(options=IMPATIENT, sink={"options": IMPATIENT})

    facts = Facts("EpochRan", lambda _: mortal_kafka.kill(1))
    with pytest.raises(ts.BrokerUnavailableError, match=mortal_kafka.bootstrap_servers):
        flow.run(impatient, listener=facts)
    mortal_kafka.restart(1)
    mortal_kafka.wait_until_ready()
    flow.feed(50)
    flow.run()

    flow.assert_exact()


def test_a_broker_that_is_not_there_at_the_start_is_named(
    spark: SparkSession, tmp_path: Path
) -> None:
    nobody = f"127.0.0.1:{free_ports(1, '127.0.0.1')[0]}"
    pipeline = (
        ts.Pipeline("no-broker")
        .read(ts.KafkaSource(nobody, topics=["any"], options=IMPATIENT))
        .write(ts.KafkaSink(nobody, topic="any", options=IMPATIENT))
    )

    with pytest.raises(ts.OptionError, match=f"Kafka at {nobody} cannot be reached"):
        pipeline.start(spark, checkpoint=str(tmp_path))
    options = {"kafka.bootstrap.servers": nobody, "subscribe": "any", **IMPATIENT}
    rows = spark.read.format("tallystick").options(**options).load()
    with pytest.raises(Exception, match=f"BrokerUnavailableError.*{nobody}"):
        rows.collect()
