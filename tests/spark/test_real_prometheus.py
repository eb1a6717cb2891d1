"""A real Prometheus with the package's alert rules scrapes a real pipeline that goes wrong.

The rules are those of the package with shorter windows: the test has no ten minutes.
"""

import json
import re
import shutil
import signal
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tallystick.ops import metrics
from tallystick.testing.process import ProcessGroup, free_ports
from tests.spark.flow import Flow
from tests.spark.topics import pending, read_committed
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.broker,
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="apt-get install prometheus: prometheus is not found",
    ),
]
HOST = "127.0.0.1"
WAIT_S = 90.0
TIMEOUT_MS = 15_000
DEATHS = 5
"""Prometheus does not count the first failure of a kind, with which its series begins."""
SHORTER = {"[10m]": "[60s]", "[15m]": "[1m]", "for: 10m": "for: 2s", "for: 1m": "for: 1s"}
CONFIG = """
global: {{scrape_interval: 500ms, scrape_timeout: 400ms, evaluation_interval: 500ms}}
rule_files: [alerts.yml]
scrape_configs:
  - job_name: pipelines
    static_configs: [{{targets: ["{host}:{port}"]}}]
"""


class Prometheus:
    """A server that scrapes one port, in a folder of its own."""

    def __init__(self, folder: Path, scraped: int) -> None:
        rules = Path(metrics.__file__).with_name("alerts.yml").read_text()
        for long, short in SHORTER.items():
            assert long in rules, long
            rules = rules.replace(long, short)
        assert not re.search(r"\b\d+m\b", rules.replace("[1m]", "")), "a window is still long"
        (folder / "alerts.yml").write_text(rules)
        (folder / "prometheus.yml").write_text(CONFIG.format(host=HOST, port=scraped))
        (port,) = free_ports(1, HOST)
        self._address = f"http://{HOST}:{port}"
        self._group = ProcessGroup()
        self._log = (folder / "log").open("w")
        self._group.start(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={HOST}:{port}",
            ],
            stdout=self._log,
            stderr=self._log,
        )

    def close(self) -> None:
        """End it."""
        self._group.close()
        self._log.close()

    def ask(self, path: str, **words: str) -> Any:
        """Return what its HTTP interface answers."""
        query = urllib.parse.urlencode(words)
        with urllib.request.urlopen(f"{self._address}/api/v1/{path}?{query}", timeout=10) as answer:
            return json.loads(answer.read())["data"]

    def value(self, expression: str) -> float | None:
        """Return the sum of what an expression gives now; None: there is no such series."""
        try:
            samples = self.ask("query", query=f"sum({expression})")["result"]
        except OSError:  # it is not up yet
            return None
        return float(samples[0]["value"][1]) if samples else None

    def firing(self) -> set[str]:
        """Return the alerts that fire now."""
        alerts = self.ask("alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


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

    assert "TallystickTransactionNearlyTimedOut" not in prometheus.firing()
    watched.hold()
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
