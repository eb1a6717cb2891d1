"""The alert rules of the package, judged by Prometheus' own tool, and its Grafana dashboard."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tallystick.ops import metrics

RULES = Path(metrics.__file__).with_name("alerts.yml")
CASES = Path(__file__).with_name("alerts_test.yml")
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="apt-get install prometheus: promtool is not found"
)


def promtool(*words: str, folder: Path) -> str:
    done = subprocess.run(
        ["promtool", *words], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_rules_name_only_metrics_that_there_are():
    named = set(re.findall(r"tallystick_\w+", RULES.read_text()))

    assert len(named) >= 3
    assert named <= {metric.name for metric in metrics.TABLE if not metric.new_name}


def test_each_alert_has_a_case():
    alerts = set(re.findall(r"- alert: (\w+)", RULES.read_text()))

    assert len(alerts) == 5
    assert alerts == set(re.findall(r"alertname: (\w+)", CASES.read_text()))


@needs_promtool
def test_rules_are_sound(tmp_path):
    shutil.copy(RULES, tmp_path / "alerts.yml")

    assert "5 rules found" in promtool("check", "rules", "alerts.yml", folder=tmp_path)


@needs_promtool
def test_alerts_fire_when_they_should_and_only_then(tmp_path):
    shutil.copy(RULES, tmp_path / "alerts.yml")
    shutil.copy(CASES, tmp_path / "cases.yml")

    assert "SUCCESS" in promtool("test", "rules", "cases.yml", folder=tmp_path)
    broken = RULES.read_text().replace(") > 0.8", ") > 8")
    assert broken != RULES.read_text()
    (tmp_path / "alerts.yml").write_text(broken)
    with pytest.raises(AssertionError, match="TallystickTransactionNearlyTimedOut"):
        promtool("test", "rules", "cases.yml", folder=tmp_path)


def test_the_dashboard_shows_every_metric_and_no_other():
    board = json.loads(Path(metrics.__file__).with_name("dashboard.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    named = set(re.findall(r"tallystick_\w+", " ".join(expressions)))

    shown = {re.sub("_(bucket|sum|count)$", "", name) for name in named}
    assert shown == {metric.name for metric in metrics.TABLE if not metric.new_name}
    for panel in board["panels"]:
        assert panel["title"], panel["id"]


@needs_promtool
def test_every_question_of_the_dashboard_is_one(tmp_path):
    """Prometheus takes each as a rule; Grafana puts values in the place of its variables."""
    board = json.loads(Path(metrics.__file__).with_name("dashboard.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    plain = [
        expression.replace("$__rate_interval", "1m").replace("$query", ".*")
        for expression in expressions
    ]
    rules = [
        {"record": f"asked:{number}", "expr": expression} for number, expression in enumerate(plain)
    ]
    (tmp_path / "asked.yml").write_text(json.dumps({"groups": [{"name": "asked", "rules": rules}]}))

    assert f"{len(expressions)} rules found" in promtool(
        "check", "rules", "asked.yml", folder=tmp_path
    )
