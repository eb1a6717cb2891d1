"""Two drivers of one pipeline: the newer wins, the older does no harm, and one alone may sleep."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tallystick.testing import EmbeddedKafka
from tests.spark.driver_process import Drivers
from tests.spark.flow import Flow
from tests.spark.topics import wait_until_nothing_is_pending

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.chaos, pytest.mark.timeout(900)]


def test_a_driver_paused_before_its_commit_is_fenced_by_the_one_that_took_over(
    flow: Flow, drivers: Drivers
) -> None:
    flow.feed(200)
    zombie = drivers.take()
    zombie.run(flow.spec(block_at="OutputCounted", occurrence=2, epoch_records=50))
    zombie.wait_until_blocked()
    zombie.pause()

    flow.feed(50)
    flow.run()
    zombie.resume()
    zombie.go_on()

    assert "FencedError: " in (zombie.wait_for_end() or "")
    flow.assert_exact()
    drivers.give_back(zombie)


def test_tasks_of_a_fenced_driver_that_write_late_write_nothing_that_counts(
    flow: Flow, drivers: Drivers, tmp_path: Path
) -> None:
    """The driver is frozen, its workers are not: they go on once the other driver is done."""
    flow.feed(100)
    gate = tmp_path / "gate"
    zombie = drivers.take()
    zombie.run(flow.spec(map_waits_for=str(gate), block_at="CommittedRead", occurrence=2))
    zombie.wait_until_blocked()
    zombie.go_on()  # into the epoch, whose tasks now wait for the gate

    flow.run()
    gate.touch()

    assert "FencedError: " in (zombie.wait_for_end() or "")
    flow.assert_exact()
    drivers.give_back(zombie)


@pytest.fixture(scope="module")
def impatient_kafka() -> Iterator[EmbeddedKafka]:
    """Aborts what has timed out within a second; by default it looks every ten."""
    often = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000"}
    with EmbeddedKafka(properties=often) as kafka:
        yield kafka


def test_a_driver_that_slept_past_its_transaction_timeout_runs_the_epoch_again(
    impatient_kafka: EmbeddedKafka, spark: SparkSession, drivers: Drivers, tmp_path: Path
) -> None:
    """Flink loses the epoch here: its transaction is gone, and its checkpoint says it is done."""
    flow = Flow(impatient_kafka, spark, tmp_path)
    flow.feed(200)
    sleeper = drivers.take()
    quick = {"kafka.request.timeout.ms": "3000", "kafka.delivery.timeout.ms": "6000"}
    sleeper.run(
        flow.spec(
            kafka={**impatient_kafka.kafka_options, **quick},
            transaction_timeout_ms=7_000,
            block_at="OutputCounted",
            occurrence=2,
            epoch_records=50,
        )
    )
    sleeper.wait_until_blocked()
    sleeper.pause()
    wait_until_nothing_is_pending(flow.confluent, flow.topic_out)  # Kafka has given it up
    sleeper.resume()
    sleeper.go_on()

    assert sleeper.wait_for_end() is None
    assert "ActionFailed" in sleeper.facts
    flow.assert_exact()
    drivers.give_back(sleeper)
