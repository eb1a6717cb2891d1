"""`tallystick doctor` on a real Kafka: each thing is broken on purpose, and it is what is found."""

import itertools
import json
import os
import shutil
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import confluent_kafka
import confluent_kafka.admin
import pytest
from typer.testing import CliRunner, Result

from tallystick.__main__ import app
from tallystick.epoch.manifest import KAFKA, DeciderName, seal
from tallystick.epoch.protocol import OutputCounted
from tallystick.host import stopwatch
from tallystick.kafka import cluster
from tallystick.kafka.audit import transaction_state
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.source.offsets import SourceOffsets
from tallystick.testing.kafka import EmbeddedKafka
from tallystick.values import TopicPartition
from tests.checkpoint_on_disk import Job as KeyedJob
from tests.failover import job as failover_job
from tests.failover.job import Death, Job, token_group, transactional_id
from tests.failover.known_rows import Shape
from tests.ops.scene import Scene
from tests.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]
_numbers = itertools.count()
EVERY_CHECK = {
    "versions", "disk", "kafka", "checkpoint", "decision", "transactions", "progress", "settings",
    "topics", "rights", "clock",
}  # fmt: skip


class Ward:
    """A pipeline that has run, and its Kafka."""

    def __init__(
        self, kafka: EmbeddedKafka, folder: Path, replication_factor: int | None = None
    ) -> None:
        number = next(_numbers)
        self.kafka, self.pipeline, self.topic = kafka, f"ill-{number}", f"ill-{number}"
        kafka.create_topic(self.topic, 1, replication_factor)
        self.folder = folder / f"checkpoint-{number}"
        self.folder.mkdir()
        (self.folder / "metadata").write_text('{"id": "lineage-1"}')
        config = KafkaConfig(kafka.bootstrap_servers, client_id=self.pipeline)
        shape = Shape(self.pipeline, self.topic, (0,))
        self.job = Job(shape, config, self.folder, lineage="lineage-1", has_loop=True)
        self.admin = confluent_kafka.admin.AdminClient(kafka.confluent_options())

    def run(self) -> None:
        self.job.run_until(2)
        self.job.close()

    def call(self, *words: object, servers: str = "") -> Result:
        where = ("doctor", self.folder, "--bootstrap-servers",
                 servers or self.kafka.bootstrap_servers)  # fmt: skip
        return CliRunner().invoke(app, [str(word) for word in (*where, *words)])

    def findings(self, *words: object, exit_code: int, servers: str = "") -> list[dict[str, Any]]:
        """All but information."""
        result = self.call("--json", *words, servers=servers)
        assert result.exit_code == exit_code, result.output
        report = json.loads(result.stdout)
        assert report["exit_code"] == exit_code
        assert all(finding["found"] for finding in report["findings"])
        return [finding for finding in report["findings"] if finding["severity"] != "info"]

    def finding(self, check: str, severity: str, **how: Any) -> dict[str, Any]:
        """The one thing that is wrong."""
        findings = self.findings(exit_code={"warning": 1, "error": 2}[severity], **how)
        assert [(finding["check"], finding["severity"]) for finding in findings] == [
            (check, severity)
        ], findings
        return findings[0]

    def write(self, text: str, ago_s: float = 0.0) -> None:
        """Write a record that the pipeline has not read."""
        producer = confluent_kafka.Producer(self.kafka.confluent_options())
        written_ms = int((time.time() - ago_s) * 1000)
        producer.produce(self.job.token_topic, text.encode(), partition=0, timestamp=written_ms)
        assert producer.flush(20) == 0

    def files(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}


def dies_prepared(event: object) -> None:
    """A listener that ends the run, as a kill does, when an epoch waits for its commit."""
    if isinstance(event, OutputCounted):
        raise Death


@pytest.fixture
def ward(tallystick_kafka: EmbeddedKafka, tmp_path: Path) -> Iterator[Ward]:
    opened_ward = Ward(tallystick_kafka, tmp_path)
    yield opened_ward
    opened_ward.job.close()


def test_a_healthy_checkpoint_is_called_so_and_left_as_it_is(ward: Ward) -> None:
    ward.run()
    before = ward.files()

    result = ward.call("--json")
    shown = ward.call()

    assert (result.exit_code, shown.exit_code) == (0, 0), shown.output
    report = json.loads(result.stdout)
    assert {finding["severity"] for finding in report["findings"]} == {"info"}
    assert set(report["checks"]) == EVERY_CHECK
    assert "Nothing is wrong." in shown.output
    assert "transaction.version is 2" in shown.output
    assert f"the brokers are of Kafka {ward.kafka.version.rpartition('.')[0]}" in shown.output
    assert "pyspark" in shown.output
    assert ward.files() == before
    ward.job.run_until(3)


def test_a_pipeline_that_runs_is_healthy_too(ward: Ward) -> None:
    """Whatever its epoch is just doing; and it is not disturbed."""
    ward.job.run_until(1)
    stop = threading.Event()

    def go_on() -> None:
        while not stop.is_set():
            ward.job.run_next()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(go_on)
        try:
            before = ward.job.logged
            for _ in range(5):
                assert ward.findings(exit_code=0) == []
        finally:
            stop.set()
        running.result(60)

    assert ward.job.logged > before, "it ran meanwhile"


def test_a_damaged_manifest(ward: Ward) -> None:
    ward.run()
    (manifest,) = (ward.folder / "tallystick").glob("*2-*.json")
    manifest.write_bytes(manifest.read_bytes()[:-20])

    findings = ward.findings(exit_code=2)

    assert {finding["check"] for finding in findings} <= {"checkpoint", "decision"}
    assert manifest.name in findings[0]["found"]


def test_no_checkpoint_at_all(ward: Ward) -> None:
    shutil.rmtree(ward.folder)

    finding = ward.finding("checkpoint", "error")

    assert "holds no committed epoch" in finding["found"]


def test_a_checkpoint_whose_first_epoch_never_ended(ward: Ward) -> None:
    assert "no committed epoch" in ward.finding("checkpoint", "warning")["found"]


def test_a_token_that_is_gone(ward: Ward) -> None:
    ward.run()
    group = token_group(ward.pipeline)
    ward.admin.delete_consumer_groups([group])[group].result(20)

    finding = ward.finding("decision", "error")

    assert "no token" in finding["found"]
    assert group in finding["remedy"]


def test_servers_of_another_cluster(ward: Ward) -> None:
    ward.run()
    path = ward.folder / "tallystick/decider.json"
    path.write_bytes(
        seal(1, DeciderName(KAFKA, transactional_id(ward.pipeline), "elsewhere")._asdict())
    )

    assert "'elsewhere'" in ward.finding("decision", "error")["found"]


def test_an_open_transaction_is_news_at_first_and_a_warning_when_it_lingers(
    ward: Ward, monkeypatch: pytest.MonkeyPatch
) -> None:
    ward.run()
    driver = confluent_kafka.Producer(
        {**ward.kafka.confluent_options(), "transactional.id": transactional_id(ward.pipeline)}
    )
    driver.init_transactions(20)
    driver.begin_transaction()
    driver.produce(ward.topic, b"unfinished", partition=0)
    assert driver.flush(20) == 0
    ward.findings(exit_code=0)
    now_ms = stopwatch.now_ms
    monkeypatch.setattr(stopwatch, "now_ms", lambda: now_ms() + 120_000)
    monkeypatch.setattr(cluster, "clock_ms", lambda _: None)

    finding, standing = ward.findings(exit_code=1)
    driver.abort_transaction(20)

    assert standing["check"] == "progress", "two minutes without a decision are too long as well"

    assert transactional_id(ward.pipeline) in finding["found"]
    assert f"tallystick recover MODULE:PIPELINE --checkpoint {ward.folder}" in finding["remedy"]
    monkeypatch.undo()
    ward.findings(exit_code=0)


def test_an_epoch_left_prepared_by_a_kill_keeps_nobody_waiting(ward: Ward, tmp_path: Path) -> None:
    """Its transaction holds the group's offsets, so Kafka gives no stable answer for 15 min."""
    ward.run()
    ward.job.on_event = dies_prepared
    with pytest.raises(Death):
        ward.job.run_next()
    where = ("--bootstrap-servers", ward.kafka.bootstrap_servers)
    began_s = time.monotonic()

    saved = CliRunner().invoke(
        app, ["savepoint", "create", str(ward.folder), str(tmp_path / "s"), *where]
    )
    inspected = CliRunner().invoke(app, ["inspect", str(ward.folder), *where])

    assert time.monotonic() - began_s < 10
    with closing(Client(ward.job.config)) as client:
        held = transaction_state(client, transactional_id(ward.pipeline))
    assert held is not None
    assert held.transaction_state == "Ongoing", "it was open all the time"
    assert saved.exit_code == 0, saved.output
    assert f"Saved epoch 2 of pipeline '{ward.pipeline}'" in saved.output
    assert inspected.exit_code == 0, inspected.output
    assert "not decided" in inspected.output
    ward.job.on_event = lambda _: None
    ward.job.restart()
    ward.job.run_until(3)


def test_a_pipeline_that_stands_still(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that has nothing to read, nor one whose records came just now, or at its pace."""
    ward.job.token_topic = f"{ward.topic}-in"
    ward.kafka.create_topic(ward.job.token_topic, 1)
    for number in range(4):
        ward.write(f"read {number}", ago_s=20)
    ward.job.run_until(4)
    ward.job.close()
    for number, manifest in enumerate(sorted((ward.folder / "tallystick").glob("*.json"))):
        written_s = time.time() - 20 + number
        os.utime(manifest, (written_s, written_s))
    ward.findings(exit_code=0)
    ward.write("unread")
    ward.findings(exit_code=0)
    now_ms = stopwatch.now_ms
    monkeypatch.setattr(stopwatch, "now_ms", lambda: now_ms() + 15_000)
    monkeypatch.setattr(cluster, "clock_ms", lambda _: None)

    finding = ward.finding("progress", "warning")
    ward.findings("--trigger", "1 minute", exit_code=0)

    assert "the newest decision, of epoch 4, is 3" in finding["found"]
    assert "one came every 1.0 s; 1 offsets wait" in finding["found"]
    assert f"tallystick recover MODULE:PIPELINE --checkpoint {ward.folder}" in finding["remedy"]


def test_a_topic_that_is_gone(ward: Ward) -> None:
    ward.run()
    ward.admin.delete_topics([ward.topic])[ward.topic].result(20)
    wait_until(  # brokers lag
        lambda: ward.topic not in ward.admin.list_topics(timeout=20).topics,
        f"the deleted topic {ward.topic} is still listed",
    )

    findings = ward.findings(exit_code=2)

    texts = [finding["found"] for finding in findings if finding["check"] == "topics"]
    assert f"source topic '{ward.topic}' does not exist" in texts
    assert f"output topic '{ward.topic}' does not exist" in texts


def test_a_source_topic_that_was_created_again(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    def positions(offset: int, shape: Shape, cluster_id: str, _: str = "") -> tuple[str, ...]:
        offsets = SourceOffsets(
            cluster_id, "", {TopicPartition(shape.topic, 0): offset},
            topic_ids={shape.topic: "A" * 22},
        )  # fmt: skip
        return (json.dumps(offsets.to_json()),)

    monkeypatch.setattr(failover_job, "at_offset", positions)
    ward.run()

    assert "created again" in ward.finding("topics", "error")["found"]


def test_a_clock_that_is_wrong(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time comes from Kafka, and is that of this machine, on which it runs."""
    ward.run()
    now_ms = stopwatch.now_ms
    monkeypatch.setattr(stopwatch, "now_ms", lambda: now_ms() + 20_000)

    found = {finding["check"]: finding["found"] for finding in ward.findings(exit_code=1)}

    assert "ahead of" in found["clock"]
    assert found.keys() == {"clock"}


def test_a_full_disk(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    ward.run()
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100 << 30, 99 << 30, 1 << 20))

    findings = ward.findings(exit_code=1)

    assert {finding["check"] for finding in findings} == {"disk"}
    assert any(str(ward.folder) in finding["found"] for finding in findings)


def test_no_kafka(ward: Ward, tmp_path: Path) -> None:
    ward.run()
    options = tmp_path / "quick.properties"
    options.write_text("delivery.timeout.ms=2000\nrequest.timeout.ms=500\n")

    (finding,) = ward.findings("--kafka-options", options, servers="127.0.0.1:1", exit_code=2)

    assert finding["check"] == "kafka"


def test_options_that_cannot_be_read_are_an_error(ward: Ward, tmp_path: Path) -> None:
    result = ward.call("--kafka-options", tmp_path / "none")

    assert result.exit_code == 2
    assert "none" in result.output


def test_rows_of_a_decided_epoch_that_wait_for_their_commit(
    tallystick_kafka: EmbeddedKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tallystick_kafka, tmp_path)
    scene.job.decide(1, scene.job.prepare(1, [scene.written("one")]))
    now_ms = stopwatch.now_ms
    monkeypatch.setattr(stopwatch, "now_ms", lambda: now_ms() + 120_000)
    words = ["doctor", str(scene.job.folder), "--bootstrap-servers", scene.servers]

    result = CliRunner().invoke(app, words)
    scene.recover()
    after = CliRunner().invoke(app, words)

    assert result.exit_code == 2, result.output
    assert f"error transactions: {scene.id} is open for 2 min" in result.output
    assert "rows of a decided epoch are gone" in result.output
    assert "transactions:" not in after.output


def test_a_file_of_state_that_is_missing(tallystick_kafka: EmbeddedKafka, tmp_path: Path) -> None:
    job = KeyedJob(tmp_path / "checkpoint")
    job.run(3)
    missing = job.state.files[2].path
    (job.folder / missing).unlink()
    servers = tallystick_kafka.bootstrap_servers

    result = CliRunner().invoke(app, ["doctor", str(job.folder), "--bootstrap-servers", servers])

    assert result.exit_code == 2
    assert f"error checkpoint: state file {missing}" in result.output
    assert f"tallystick savepoint create {job.folder} SAVEPOINT --epoch 1" in result.output


def test_brokers_with_settings_that_do_not_fit(tmp_path: Path) -> None:
    """Also copies of which too few are asked for, and too few that are in sync."""
    settings = {
        "offsets.retention.minutes": "60",
        "transaction.partition.verification.enable": "false",
    }
    with EmbeddedKafka(3, properties=settings) as kafka:
        ward = Ward(kafka, tmp_path, replication_factor=1)
        ward.run()
        safe = Ward(kafka, tmp_path)
        safe.run()

        by_check = {finding["check"]: finding for finding in ward.findings(exit_code=2)}
        of_safe = {finding["check"] for finding in safe.findings(exit_code=2)}
        config = confluent_kafka.admin.ConfigResource("TOPIC", safe.topic)
        config.set_config("min.insync.replicas", "3")
        safe.admin.alter_configs([config])[config].result(20)
        kafka.kill(3)
        few: list[dict[str, Any]] = []
        while not few:  # Kafka counts the broker in for some seconds; the test has a timeout
            few = [
                finding for finding in safe.findings(exit_code=2) if finding["check"] == "topics"
            ]

    assert set(by_check) == {"retention", "settings", "topics"}
    assert "offsets.retention.minutes is 60" in by_check["retention"]["found"]
    assert "transaction.partition.verification.enable" in by_check["settings"]["found"]
    assert by_check["settings"]["severity"] == "error"
    assert by_check["topics"]["severity"] == "warning"
    assert "replication factor 1" in by_check["topics"]["found"]
    assert of_safe == {"retention", "settings"}
    assert [finding["severity"] for finding in few] == ["error"]
    assert "2 copies in sync, and min.insync.replicas is 3" in few[0]["found"]
