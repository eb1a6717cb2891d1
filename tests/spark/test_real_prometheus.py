"""A real Prometheus with the package's alert rules scrapes a real pipeline that goes wrong.

The rules are those of the package with shorter windows: the test has no ten minutes.
"""

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tallystick.testing.process import ProcessGroup, free_ports
from tests.spark.flow import Flow
from tests.spark.prometheus import HOST, MARKS, Prometheus
from tests.spark.topics import pending, read_committed
from tests.waiting import wait_until

pytestmark = MARKS
WAIT_S = 90.0
TIMEOUT_MS = 15_000
DEATHS = 5
"""Prometheus does not count the first failure of a kind, with which its series begins."""


class Watched:
    """The pipeline in a process of its own, and who scrapes it."""

    def __init__(self, flow: Flow, folder: Path) -> None:
        self.flow, self.folder = flow, folder
        (port,) = free_ports(1, HOST)
        spec = {
            "name": flow.name,
            "folder": str(folder),
            "port": port,
            "servers": flow.kafka.bootstrap_servers,
            "topic_in": flow.topic_in,
            "topic_out": flow.topic_out,
            "transaction_timeout_ms": TIMEOUT_MS,
            "checkpoint": str(flow.checkpoint),
        }
        self._group = ProcessGroup()
        self._log = (folder / "job.log").open("w")
        job = Path(__file__).with_name("watched_job.py")
        self._process = self._group.start(
            [sys.executable, str(job), json.dumps(spec)], stdout=self._log, stderr=self._log
        )
        self.prometheus = Prometheus(folder, port)

    def log_tail(self) -> str:
        """Return the end of what it said."""
        return (self.folder / "job.log").read_text()[-2000:]

    def close(self) -> None:
        """End both."""
        self._group.close()
        self._process.wait()
        self._log.close()
        self.prometheus.close()

    def value(self, metric: str) -> float | None:
        """Return what Prometheus has of the pipeline now."""
        return self.prometheus.value(f'{metric}{{query="{self.flow.name}"}}')

    def wait_for_alert(self, name: str) -> None:
        """Wait until it fires."""
        wait_until(lambda: name in self.prometheus.firing(), f"{name} fires")

    def wait_until_read(self) -> None:
        """Wait until Prometheus knows that all input is committed."""
        fed, read = len(self.flow.input), "tallystick_read_records_total"
        try:
            wait_until(lambda: self.value(read) == fed, f"all {fed} are read")
        except AssertionError as error:
            error.add_note(f"{self.value(read)} are; the end of its log:\n{self.log_tail()}")
            raise

    def hold(self) -> None:
        """Keep the next epoch open, with rows in its transaction."""
        (self.folder / "hold").touch()
        self.flow.feed(5)
        wait_until(
            lambda: any(pending(self.flow.confluent, self.flow.topic_out).values()),
            "a transaction is open",
        )
        wait_until(
            lambda: (self.value("tallystick_epoch_open_seconds") or 0) > 0, "Prometheus knows it"
        )

    def let_go(self) -> None:
        """Let it be committed."""
        (self.folder / "hold").unlink()

    def kill(self) -> None:
        """Kill -9 the driver, its JVM and its workers."""
        self._group.send_signal(signal.SIGKILL)
        self._process.wait()


@pytest.fixture
def watched(flow: Flow, tmp_path: Path) -> Iterator[Watched]:
    watched_flow = Watched(flow, tmp_path)
    yield watched_flow
    watched_flow.close()


def feed_more_than_is_read(watched: Watched, until: Callable[[], bool]) -> None:
    """Write about twice as much per second as the pipeline reads."""
    done = threading.Event()

    def feed() -> None:
        while not done.wait(0.2):
            watched.flow.feed(20)

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        wait_until(until, "the alert for growing lag")
    finally:
        done.set()
        feeder.join()


def test_every_alert_fires_for_its_cause_and_the_series_are_true(watched: Watched) -> None:
    flow, prometheus = watched.flow, watched.prometheus
    flow.feed(40)
    watched.wait_until_read()
    assert prometheus.firing() == set()

    feed_more_than_is_read(watched, lambda: "TallystickLagGrows" in prometheus.firing())
    watched.wait_until_read()
    flow.assert_exact()
    written = len(read_committed(flow.confluent, flow.topic_out))
    wait_until(
        lambda: watched.value("tallystick_rows_written_total") == written == len(flow.input),
        "Prometheus has the rows",
    )
    assert watched.value("tallystick_source_lag_offsets") == 0
    assert watched.value("tallystick_starts_total") == 1
    assert watched.value("tallystick_transaction_timeout_seconds") == TIMEOUT_MS / 1000

    assert "TallystickEpochsFail" not in prometheus.firing()
    for _ in range(DEATHS):  # a task each, in epochs of their own
        (watched.folder / "die").touch()
        flow.feed(5)
        watched.wait_until_read()
        assert not (watched.folder / "die").exists(), "no task died"
    watched.wait_for_alert("TallystickEpochsFail")
    assert watched.value("tallystick_aborted_epochs_total") == DEATHS

    of_hold = {"TallystickTransactionNearlyTimedOut", "TallystickStandsStill"}
    assert not of_hold & prometheus.firing()
    watched.hold()
    watched.wait_for_alert("TallystickStandsStill")
    watched.wait_for_alert("TallystickTransactionNearlyTimedOut")
    watched.let_go()
    watched.wait_until_read()
    wait_until(
        lambda: "TallystickTransactionNearlyTimedOut" not in prometheus.firing(), "it is over"
    )

    watched.hold()
    watched.kill()
    assert any(pending(flow.confluent, flow.topic_out).values()), "it left nothing open"
    watched.wait_for_alert("TallystickGoneWithOpenTransaction")

    flow.run(execution="jobs")
    flow.assert_exact()
