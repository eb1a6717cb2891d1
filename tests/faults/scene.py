"""A pipeline that is fed and goes wrong, and what its operator sees of that."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from tallystick.__main__ import app
from tallystick.testing.process import ProcessGroup, free_ports
from tests.spark.flow import Flow
from tests.spark.prometheus import HOST, Prometheus
from tests.waiting import wait_until

FEED_S = 0.5
ROWS = 25
"""The rows of each feed."""
START_S = 150.0
"""A JVM, a Spark, and the first epochs, on a busy machine."""
DOCTOR = """
import sys
from tests.faults.job import set_clock
set_clock(float(sys.argv.pop(1)))
from tallystick.__main__ import app
app()
"""


@dataclass(frozen=True)
class Seen:
    """The words of the operator's tools about a fault; N stands for a number.

    Args:
        exit_code: of the doctor.
        doctor: the checks with findings, and what each found.
        page: the page's answer, and its findings and errors.
        metrics: what is unusual.
        alerts: those that fire.
        log: the newest line of the driver that tells of it; "": none does.
    """

    exit_code: int
    doctor: tuple[str, ...]
    page: tuple[str, ...]
    metrics: tuple[str, ...]
    alerts: tuple[str, ...]
    log: str


class Scene:
    """The pipeline in processes of its own, who feeds it, and who watches.

    Args:
        flow: its topics and checkpoint.
        folder: for logs and commands.
        ahead_s: how far the clock of its machine, and of the operator, is ahead.
    """

    def __init__(self, flow: Flow, folder: Path, ahead_s: float = 0.0) -> None:
        self.flow, self.folder, self.ahead_s = flow, folder, ahead_s
        self.metrics_port, self.ui_port = free_ports(2, HOST)
        self.prometheus = Prometheus(folder, self.metrics_port)
        self.checkpoint = folder / "checkpoint"
        self.log = folder / "driver.log"
        self._feeding = threading.Event()
        self._feeder = threading.Thread(target=self._feed)
        self._groups: list[ProcessGroup] = []
        self.at_end = ExitStack()
        """The callbacks that end the fault."""
        self.process = self.start(self.log, self.metrics_port, self.ui_port)
        self.marked = 0

    def start(self, log: Path, metrics_port: int, ui_port: int) -> subprocess.Popen[bytes]:
        """Start a driver."""
        spec = {
            "name": self.flow.name,
            "folder": str(self.folder),
            "servers": self.flow.kafka.bootstrap_servers,
            "topic_in": self.flow.topic_in,
            "topic_out": self.flow.topic_out,
            "checkpoint": str(self.checkpoint),
            "metrics_port": metrics_port,
            "ui_port": ui_port,
            "ahead_s": self.ahead_s,
        }
        self._groups.append(group := ProcessGroup())
        command = [sys.executable, "-m", "tests.faults.job", json.dumps(spec)]
        return group.spawn(command, log, env={**os.environ, "PYSPARK_PYTHON": sys.executable})

    def run(self) -> None:
        """Feed it, and wait until it works."""
        self._feeder.start()
        wait_until(
            lambda: self.committed() >= 8,
            lambda: f"no epochs: {self.log_text()[-2000:]}",
            timeout_s=START_S,
        )
        wait_until(lambda: self.prometheus.value("tallystick_running") == 1, "it is scraped")
        self.marked = len(self.log_text())

    def close(self) -> None:
        """End all."""
        self.at_end.close()
        self._feeding.set()
        for group in self._groups:
            group.close()
        self.process.wait()
        if self._feeder.is_alive():
            self._feeder.join()
        self.prometheus.close()

    def command(self, name: str) -> None:
        """Give the job a command."""
        (self.folder / name).touch()

    def take_back(self, name: str) -> None:
        """End what a command has brought about, and wait until the pipeline works again."""
        (self.folder / name).unlink()
        before = self.committed()
        wait_until(lambda: self.committed() > before + 2, "epochs go on")
        wait_until(lambda: not self.prometheus.firing(), "an alert stays")
        self.marked = len(self.log_text())

    def kill(self) -> None:
        """Kill the driver, its JVM and its tasks."""
        self._groups[0].send_signal(signal.SIGKILL)
        self.process.wait()

    def member(self) -> int:
        """The process id of a task."""
        return int((self.folder / "member").read_text())

    def jvm(self) -> int:
        """The process id of the driver's JVM, which the driver's process starts by a script."""
        table = subprocess.check_output(["ps", "-eo", "pid=,ppid=,comm="], text=True)
        rows = [line.split(maxsplit=2) for line in table.splitlines()]
        family = {str(self.process.pid)}
        for _ in range(3):
            family |= {pid for pid, parent, _ in rows if parent in family}
        (jvm,) = (pid for pid, _, name in rows if pid in family and name == "java")
        return int(jvm)

    def committed(self) -> float:
        """The number of epochs that the driver says it committed."""
        return sum(self.samples().get("tallystick_epochs_total", {}).values())

    def log_text(self) -> str:
        """The driver's log."""
        return self.log.read_text() if self.log.exists() else ""

    def samples(self) -> dict[str, dict[str, float]]:
        """The driver's metrics now, by name and labels; empty: nobody answers."""
        by_name: dict[str, dict[str, float]] = {}
        try:
            with urllib.request.urlopen(
                f"http://{HOST}:{self.metrics_port}/metrics", timeout=5
            ) as answer:
                text = answer.read().decode()
        except OSError:
            return by_name
        for name, labels, value in re.findall(r"(?m)^(tallystick_\w+)\{(.*)\} (\S+)$", text):
            by_name.setdefault(name, {})[labels] = float(value)
        return by_name

    def look(self, seconds: float) -> Seen:
        """Wait so long after a fault, then ask all that an operator can ask."""
        before = self.samples()
        time.sleep(seconds)
        exit_code, doctor = self._doctor()
        return Seen(
            exit_code=exit_code,
            doctor=doctor,
            page=self._page(),
            metrics=tuple(unusual(before, self.samples())),
            alerts=tuple(sorted(self.prometheus.firing())),
            log=self._log_line(),
        )

    def _feed(self) -> None:
        while not self._feeding.wait(FEED_S):
            try:
                self.flow.feed(ROWS)
            except AssertionError:  # the broker is away
                return

    def _doctor(self) -> tuple[int, tuple[str, ...]]:
        words = [
            "doctor", str(self.checkpoint), "--bootstrap-servers",
            self.flow.kafka.bootstrap_servers, "--json",
        ]  # fmt: skip
        if self.ahead_s:
            done = subprocess.run(
                [sys.executable, "-c", DOCTOR, str(self.ahead_s), *words],
                capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
            exit_code, output = done.returncode, done.stdout
        else:  # with the clock of this process
            result = CliRunner().invoke(app, words)
            exit_code, output = result.exit_code, result.stdout
        return exit_code, findings_of(json.loads(output)["findings"], ("warning", "error"))

    def _page(self) -> tuple[str, ...]:
        """Return the words of the run's page, or of `tallystick ui` where that page is gone."""
        try:
            return self._page_at(self.ui_port, "")
        except OSError:
            pass
        (port,) = free_ports(1, HOST)
        servers = self.flow.kafka.bootstrap_servers
        words = ["ui", str(self.checkpoint), "--bootstrap-servers", servers, "--port", str(port)]
        with subprocess.Popen(
            [sys.executable, "-c", DOCTOR, str(self.ahead_s), *words], stdout=subprocess.PIPE
        ) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()
                return self._page_at(port, "of `tallystick ui`, that of the run is gone: ")
            finally:
                process.kill()

    def _page_at(self, port: int, whose: str) -> tuple[str, ...]:
        for wait_s in (11.0, 0.0):  # what was looked at is up to 10 s old
            with urllib.request.urlopen(f"http://{HOST}:{port}/", timeout=60) as answer:
                html = answer.read().decode()
            if not whose:
                time.sleep(wait_s)
        with urllib.request.urlopen(f"http://{HOST}:{port}/facts.json", timeout=60) as answer:
            facts = json.loads(answer.read())
        (said,) = re.findall(r'<p class="answer[^>]*>(.*?)</p>', html)
        lag = re.findall(r'id="lag">(.*?)<', html)[0]
        status = re.findall(r'id="status">(.*?)<', html)[0]
        errors = {error["kind"] for error in facts["errors"]}
        return (
            f"{whose}“{said}”",
            f"status {status}, lag {'known' if lag != 'not known' else lag}",
            *findings_of(facts["findings"], (1, 2)),
            *(f"error {kind}" for kind in sorted(errors)),
        )

    def _log_line(self) -> str:
        """The newest line of ours since the fault, which may be the error that ended the run."""
        lines = self.log_text()[self.marked :].splitlines()
        ours = [line for line in lines if re.match(r"((WARNING|ERROR) )?tallystick", line)]
        return without_numbers(ours[-1])[:300] if ours else ""


def findings_of(findings: Sequence[dict[str, Any]], severities: Sequence[Any]) -> tuple[str, ...]:
    """Return what was found, by check."""
    return tuple(
        without_numbers(f"{finding['check']}: {finding['found']}")
        for finding in findings
        if finding["severity"] in severities
    )


def without_numbers(text: str) -> str:
    """Return a text in which nothing is of one run only."""
    text = re.sub(r"/tmp/\S+|[0-9a-f]{8}-[0-9a-f-]{27}", "…", text)
    text = re.sub(r"flow-\d+", "NAME", text)
    return re.sub(r"\d[\d.,]*(?=\D|$)", "N", text)


def unusual(
    before: dict[str, dict[str, float]], after: dict[str, dict[str, float]]
) -> Iterator[str]:
    """Yield what the driver's metrics say that they do not say of a healthy run."""
    if not after:
        yield "nobody answers: `up` is 0"
        return

    def total(of: dict[str, dict[str, float]], name: str) -> float | None:
        values = of.get(f"tallystick_{name}", {}).values()
        return sum(values) if values else None

    if total(after, "running") == 0:
        yield "`running` is 0"
    lags = total(before, "source_lag_offsets"), total(after, "source_lag_offsets")
    if lags[1] is None:
        yield "no `source_lag_offsets`"
    elif lags[1] > (lags[0] or 0) + ROWS / FEED_S:
        yield "`source_lag_offsets` grows"
    if total(after, "epochs_total") == total(before, "epochs_total"):
        yield "`epochs_total` and `last_commit_timestamp_seconds` stand"
    if (total(after, "epoch_open_seconds") or 0) > 5:
        yield "`epoch_open_seconds` grows"
    for name in ("epoch_failures_total", "aborted_epochs_total"):
        for labels in sorted(after.get(f"tallystick_{name}", {})):
            error = re.findall(r'error="(\w+)"', labels)[0]
            yield f'`{name}{{error="{error}"}}`'


@contextmanager
def scene_of(flow: Flow, folder: Path, ahead_s: float = 0.0) -> Iterator[Scene]:
    """A pipeline that works."""
    scene = Scene(flow, folder, ahead_s)
    try:
        scene.run()
        yield scene
    finally:
        scene.close()


def as_json(seen: Seen) -> dict[str, Any]:
    """Return JSON types."""
    return {name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(seen).items()}  # fmt: skip
