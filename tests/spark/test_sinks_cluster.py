"""Transactions of tasks on several hosts: attempts beside each other, and executors that die."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.postgres.real_postgres import PostgresServer
from tests.spark.driver_process import DriverProcess
from tests.spark.flow import Flow
from tests.spark.standalone_cluster import Cluster
from tests.spark.sunk import Sunk

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.chaos, pytest.mark.timeout(900)]

SPECULATIVE = {
    "spark.speculation": "true",
    "spark.speculation.interval": "50ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.minTaskRuntime": "100ms",
}


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    """A server."""
    server = PostgresServer()
    yield server
    server.stop()


def test_what_a_retried_stage_left_prepared_does_not_wait_for_a_later_epoch(
    flow: Flow, postgres: PostgresServer, tmp_path: Path
) -> None:
    """In a session that lets Spark retry stages: all attempts have the number 0 then."""
    sunk = Sunk(flow, postgres).kafka().prepared()
    local, marker = tmp_path / "local", tmp_path / "marker"
    settings = {"spark.local.dir": str(local), "spark.stage.maxConsecutiveAttempts": "4"}
    flow.feed(300)
    with DriverProcess(tmp_path / "driver.log", settings) as driver:
        lost = {"marker": str(marker), "local": str(local)}
        spec = sunk.spec(epoch_records=100, shuffle_is_lost_once=lost)
        driver.run({**spec, "master": "local[1,4]", "execution": "jobs"})
        assert driver.wait_for_end() is None
        assert int(marker.read_text()) > 0
        assert driver.facts.count("ActionFailed") == 0, "the stage was retried, not the epoch"
        sunk.assert_exact()


def test_attempts_beside_each_other_and_executors_that_die_count_once(
    flow: Flow, postgres: PostgresServer, tmp_path: Path
) -> None:
    sunk = Sunk(flow, postgres).kafka(transactions="task").prepared().staged().files()
    decided_by_kafka = Sunk(flow, None).kafka()
    flow.feed(300)
    with (
        Cluster(tmp_path / "cluster", 2) as cluster,
        DriverProcess(tmp_path / "driver.log", {**cluster.settings, **SPECULATIVE}) as driver,
    ):
        # What one transaction of the driver's holds, two attempts of a task would write twice.
        driver.run(decided_by_kafka.spec())
        assert "spark.speculation" in (driver.wait_for_end() or "")

        # A task hangs when it has written something; another attempt does its work meanwhile.
        slow = tmp_path / "slow"
        sleeps = {"one_attempt_sleeps_s": 300, "marker": str(slow), "execution": "jobs"}
        driver.run(sunk.spec(epoch_records=100, **sleeps))
        assert driver.wait_for_end() is None
        assert slow.exists()
        sunk.assert_exact()

        # A worker daemon dies; Spark has other workers of it, which are dead, in its pool.
        # An executor dies with all its workers, one of them in the middle of its transactions.
        for execution, dies in product(("jobs", "resident"), ("daemon", "executor")):
            flow.feed(300)
            dead = tmp_path / f"{execution}-{dies}"
            settings = {"dies": dies, "marker": str(dead), "execution": execution}
            driver.run(sunk.spec(epoch_records=100, **settings))
            assert driver.wait_for_end() is None
            assert dead.exists()
            sunk.assert_exact()
