"""Keyed state on a cluster: hosts have copies of their own, and come and go with them."""

from pathlib import Path

import pytest

from tallystick_tools.demo.flights import load
from tests.spark.driver_process import DriverProcess
from tests.spark.flow import Flow
from tests.spark.forked_driver import take_jvm
from tests.spark.keyed_flights import JOB, Flights
from tests.spark.standalone_cluster import Cluster

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.chaos, pytest.mark.timeout(900)]


@pytest.mark.parametrize("execution", ["jobs", "resident"])
def test_counts_survive_executors_copies_and_hosts(
    flow: Flow, tmp_path: Path, execution: str
) -> None:
    """With the last host, resident tasks are one where they were two."""
    flights = Flights(flow, load(3500))
    flights.feed(1500)
    log = tmp_path / "driver.log"
    with (
        Cluster(tmp_path / "cluster", 2) as cluster,
        DriverProcess(log, cluster.settings, JOB, kept_jvm=take_jvm(tmp_path)) as driver,
    ):
        first, second = cluster.hosts
        # An executor dies within its keyed task: tried again, or the whole epoch is.
        marker = tmp_path / "executor"
        dies = {"dies": "executor", "marker": str(marker)}
        driver.run(flights.spec(2, epoch_records=600, execution=execution, **dies))
        assert driver.wait_for_end() is None
        assert marker.exists()
        flights.assert_exact()
        assert first.ranges | second.ranges >= {"0-15", "16-31"}

        # One host's copies are gone, and other ranges are asked for.
        first.lose_copies()
        flights.feed(500)
        driver.run(flights.spec(3, epoch_records=400, execution=execution))
        assert driver.wait_for_end() is None
        flights.assert_exact()

        # A host is gone in the middle of an epoch: the other has to have everything.
        flights.feed(1500)
        driver.run(flights.spec(3, epoch_records=400, execution=execution))
        driver.wait_for_fact("ManifestWritten", 1)
        second.kill()
        assert driver.wait_for_end() is None
        flights.assert_exact()
        assert first.ranges >= {"0-10", "11-21", "22-31"}
