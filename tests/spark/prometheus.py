"""A real Prometheus with the package's alert rules in shorter windows: no test has ten minutes."""

import json
import re
import shutil
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tallystick.ops import metrics
from tallystick.testing.process import ProcessGroup, free_ports

HOST = "127.0.0.1"
MARKS = [
    pytest.mark.broker,
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="apt-get install prometheus: prometheus is not found",
    ),
]
SHORTER = {
    "[10m]": "[60s]",
    "[15m]": "[1m]",
    "for: 10m": "for: 2s",
    "for: 1m": "for: 1s",
    "> 300": "> 8",
}
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
