"""`tallystick doctor --pipeline`: what a start would refuse or warn of, before there is one."""

import itertools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import confluent_kafka.admin
import pytest
from typer.testing import CliRunner, Result

from tallystick.__main__ import app
from tallystick.epoch import manifest as m
from tallystick.storage.file_storage import FileStorage
from tallystick.testing.kafka import EmbeddedKafka
from tallystick.values import Producer

_numbers = itertools.count()
MODULE = """
    import tallystick as ts

    source = ts.KafkaSource({servers!r}, topics=[{source!r}])
    sinks = {sinks}
    pipeline = ts.Pipeline({name!r}).read(source).write(*sinks)
"""


class Case:
    """A pipeline in a module of its own, that never has run."""

    def __init__(self, kafka: EmbeddedKafka, folder: Path) -> None:
        self.kafka, self.folder = kafka, folder
        self.number = next(_numbers)
        self.name = f"declared-{self.number}"
        self.checkpoint = folder / "checkpoint"
        for topic in (self.source, self.output):
            kafka.create_topic(topic, 1)

    @property
    def source(self) -> str:
        return f"{self.name}-in"

    @property
    def output(self) -> str:
        return f"{self.name}-out"

    def sink(self, **settings: Any) -> str:
        given = {"topic": self.output, **settings}
        words = ", ".join(f"{name}={value!r}" for name, value in given.items())
        return f"ts.KafkaSink({self.kafka.bootstrap_servers!r}, {words})"

    def call(self, *words: str, sinks: str = "", source: str = "") -> Result:
        module = f"declared_{self.number}_{next(_numbers)}"
        text = dedent(MODULE).format(
            servers=self.kafka.bootstrap_servers,
            source=source or self.source,
            sinks=f"[{sinks or self.sink()}]",
            name=self.name,
        )
        (self.folder / f"{module}.py").write_text(text)
        where = ["doctor", str(self.checkpoint), "--pipeline", f"{module}:pipeline"]
        return CliRunner().invoke(app, [*where, *words])

    def findings(self, *words: str, exit_code: int, **how: str) -> list[Mapping[str, str]]:
        """All but information."""
        result = self.call("--json", *words, **how)
        assert result.exit_code == exit_code, result.output
        return [finding for finding in json.loads(result.stdout)["findings"]
                if finding["severity"] != "info"]  # fmt: skip


@pytest.fixture
def case(tallystick_kafka: EmbeddedKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    return Case(tallystick_kafka, tmp_path)


@pytest.mark.broker
@pytest.mark.timeout(120)
class TestOnKafka:
    def test_a_pipeline_that_may_start_is_called_healthy_before_it_has_run(
        self, case: Case
    ) -> None:
        """Its Kafka is that of its sink, and nothing is made."""
        result = case.call("--json")

        report = json.loads(result.stdout)
        assert result.exit_code == 0, result.output
        assert {"pipeline", "source", "rights", "settings"} <= set(report["checks"])
        assert "is new: no run has begun there" in result.stdout
        assert not case.checkpoint.exists()

    def test_the_trigger_is_compared_with_the_timeout(self, case: Case) -> None:
        sinks = case.sink(transaction_timeout_ms=20_000)
        (finding,) = case.findings("--trigger", "30 seconds", sinks=sinks, exit_code=1)

        assert (finding["check"], finding["severity"]) == ("settings", "warning")
        assert (
            "trigger interval (30000 ms) is longer than transaction_timeout_ms" in finding["found"]
        )
        assert case.findings("--trigger", "10 seconds", sinks=sinks, exit_code=0) == []

    def test_the_timeout_must_outlive_trigger_and_down_time(self, case: Case) -> None:
        sinks = case.sink(
            transactions="task", transaction_timeout_ms=60_000, max_recovery_ms=50_000
        )
        (finding,) = case.findings("--trigger", "20 seconds", sinks=sinks, exit_code=2)

        assert (finding["check"], finding["severity"]) == ("settings", "error")
        assert "sink kafka-1: transaction_timeout_ms is 60000" in finding["found"]
        assert "max_recovery_ms 50000 ms" in finding["found"]
        assert "must be more than 70000" in finding["found"]
        assert case.findings("--trigger", "1 second", sinks=sinks, exit_code=0) == []

    def test_a_timeout_that_the_brokers_do_not_allow(self, case: Case) -> None:
        sinks = case.sink(transaction_timeout_ms=1_000_000)
        (finding,) = case.findings(sinks=sinks, exit_code=2)

        assert "transaction_timeout_ms is 1000000, the brokers allow 900000" in finding["found"]
        assert finding["meaning"] == "The next start is refused."

    def test_topics_that_are_not_there_are_named_with_the_sink(self, case: Case) -> None:
        task = case.sink(transactions="task", topic="declared-nowhere", uid="second")
        sinks = f"{case.sink()}, {task}"
        findings = case.findings(sinks=sinks, source="declared-unwritten", exit_code=2)

        texts = [finding["found"] for finding in findings]
        assert {finding["check"] for finding in findings} == {"topics"}
        assert any("topic 'declared-unwritten' does not exist" in text for text in texts)
        assert "sink second: topic 'declared-nowhere' does not exist" in texts
        assert len(texts) == 2

    def test_a_sink_that_shares_the_transaction_is_asked_for_what_it_needs(
        self, case: Case
    ) -> None:
        """Its topic and the timeout of the one transaction; no recovery within a time."""
        shared = case.sink(topic="shared-nowhere", transaction_timeout_ms=60_000)
        sinks = f"{case.sink(transaction_timeout_ms=60_000)}, {shared}"
        (finding,) = case.findings("--trigger", "20 seconds", sinks=sinks, exit_code=2)
        assert finding["found"].startswith("sink kafka-2: topic 'shared-nowhere' does not exist")
        case.kafka.create_topic("shared-nowhere", 1)
        assert case.findings("--trigger", "20 seconds", sinks=sinks, exit_code=0) == []

    def test_a_checkpoint_of_another_pipeline_is_refused(self, case: Case) -> None:
        storage = FileStorage(str(case.checkpoint))
        manifest = m.Manifest(3, "somebody-else", "l", (), (), Producer("t", 1, 0), ())
        storage.put(m.manifest_path(manifest, "aa"), manifest.encode())

        findings = case.findings(exit_code=2)

        refused = [finding["found"] for finding in findings if finding["check"] == "pipeline"]
        assert len(refused) == 1
        assert "belongs to pipeline 'somebody-else'" in refused[0]

    def test_sinks_that_are_not_kafkas_are_left_to_the_start(self, case: Case) -> None:
        path = case.folder / "files"
        result = case.call(sinks=f"{case.sink()}, ts.FileSink({str(path)!r})")

        assert result.exit_code == 0, result.output
        assert "only a start looks at sinks that are not Kafka's: files-1" in result.output
        assert not path.exists()

    def test_few_copies_are_found_before_a_row_is_written(self, case: Case) -> None:
        admin = confluent_kafka.admin.AdminClient(case.kafka.confluent_options())
        config = confluent_kafka.admin.ConfigResource("TOPIC", case.output)
        config.set_config("min.insync.replicas", "1")
        admin.alter_configs([config])[config].result(20)

        result = case.call()

        assert result.exit_code == 0, "there is one broker only: it is information"
        text = f"output topic '{case.output}' has replication factor 1 and min.insync.replicas 1"
        assert result.output.count(text) == 1

    def test_a_trigger_counts_without_the_pipeline_too(self, case: Case) -> None:
        words = ["--bootstrap-servers", case.kafka.bootstrap_servers, "--trigger", "never"]
        result = CliRunner().invoke(app, ["doctor", str(case.checkpoint), *words])

        assert result.exit_code == 2
        assert "'never' is no interval" in result.output


def test_without_servers_or_a_pipeline_there_is_nobody_to_ask(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", str(tmp_path)])

    assert result.exit_code == 2
    assert "--bootstrap-servers" in result.output
    assert "--pipeline MODULE:PIPELINE" in result.output


def test_a_pipeline_that_cannot_be_found_is_an_error_that_says_why(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", str(tmp_path), "--pipeline", "nowhere_7:p"])

    assert result.exit_code == 2
    assert "there is no module 'nowhere_7'" in result.output
