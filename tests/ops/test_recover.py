"""A pipeline's recovery without Spark, on a real Kafka in which tasks and drivers have died."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import tallystick as ts
from tallystick.__main__ import app, find_pipeline
from tallystick.epoch.micro_batches import settled_path
from tallystick.epoch.two_phase import Committable, Owner, Place, RunFacts
from tallystick.pipeline.recovery import SinkRecovery
from tallystick.testing.kafka import EmbeddedKafka
from tests.kafka.task_sinks import taken_over
from tests.ops.scene import LINEAGE, Scene
from tests.spark.lines_sink import LinesSink


@pytest.fixture
def scene(tallystick_kafka: EmbeddedKafka, tmp_path: Path) -> Iterator[Scene]:
    opened_scene = Scene(tallystick_kafka, tmp_path)
    yield opened_scene
    opened_scene.clean_up()


def all_of(scene: Scene, rows: list[str]) -> list[str]:
    """The rows that are visible, once there are as many."""
    return scene.read(lambda texts: len(texts) >= len(rows))


@pytest.mark.broker
@pytest.mark.timeout(120)
class TestOnKafka:
    def test_what_is_decided_is_committed_and_the_rest_aborted(self, scene: Scene) -> None:
        """Exactly the decided rows are visible; a second recovery finds nothing to do."""
        undecided = scene.written("never decided", task=1, dies=True)
        due = scene.written("one", "two", dies=True)
        scene.job.decide(1, scene.job.prepare(1, [due]))
        scene.write_plainly("of another program")

        done = scene.recover()
        again = scene.recover()

        assert undecided.name != due.name
        assert (done.epoch, done.runs_again) == (1, None)
        assert done.sinks == (SinkRecovery("out", committed=1, aborted=1),)
        assert all_of(scene, ["", "", ""]) == ["one", "two", "of another program"]
        assert (again.epoch, again.sinks) == (1, (SinkRecovery("out"),))
        assert "sink out: nothing to do" in str(again)

    def test_what_is_not_decided_is_aborted_and_cannot_be_decided_any_more(
        self, scene: Scene
    ) -> None:
        """Also where the newest decided epoch is noted as settled, and beside a run at work."""
        scene.job.run(1, first=1)
        path = scene.job.prepare(2, [scene.written("never decided", epoch=2)])
        scene.write_plainly("of another program")

        done = scene.recover()

        assert (done.epoch, done.sinks) == (1, (SinkRecovery("out", aborted=1),))
        assert all_of(scene, [""]) == ["of another program"]
        with pytest.raises(ts.FencedError):
            scene.job.decide(2, path)

    def test_a_checkpoint_without_an_epoch_has_nothing_to_recover(self, scene: Scene) -> None:
        done = scene.recover()

        assert (done.epoch, done.sinks) == (None, (SinkRecovery("out"),))
        assert "no epoch is committed yet" in str(done)

    def test_where_no_pipeline_has_begun_nothing_is_made(
        self, scene: Scene, tmp_path: Path
    ) -> None:
        empty = tmp_path / "empty"

        with pytest.raises(ts.OptionError, match="is no checkpoint"):
            scene.pipeline().recover(checkpoint=str(empty))

        assert not empty.exists()

    def test_another_pipelines_checkpoint_is_refused_and_left_alone(self, scene: Scene) -> None:
        scene.job.run(1, first=1)
        other = scene.pipeline(name="another")

        with pytest.raises(ts.DataLossError, match=f"belongs to pipeline '{scene.pipeline_name}'"):
            other.recover(checkpoint=str(scene.job.folder))

        scene.job.run(1, first=2)  # nobody has fenced it

    def test_a_lost_cluster_ends_it_at_the_deadline(self, scene: Scene) -> None:
        """Before anything is fenced, as at a start."""
        scene.job.run(1, first=1)
        options = {"kafka.delivery.timeout.ms": "4000", "kafka.request.timeout.ms": "1000"}
        began = time.monotonic()

        for transactions in ("task", "epoch"):
            lost = scene.kafka_sink(
                servers="localhost:1", options=options, transactions=transactions
            )
            with pytest.raises(ts.BrokerUnavailableError, match="localhost:1"):
                scene.recover(lost)

        assert time.monotonic() - began < 40
        scene.job.run(1, first=2)

    def test_an_epoch_whose_output_is_lost_is_left_to_the_next_start(self, scene: Scene) -> None:
        scene.job.run(1, first=1)
        due = scene.written("lost", epoch=2)
        path = scene.job.prepare(2, [due])
        scene.job.decide(2, path)
        taken_over(scene.config, due)

        done = scene.recover()

        assert (done.epoch, done.runs_again) == (None, 2)
        assert done.sinks == (SinkRecovery("out", lost=1),)
        assert "start the pipeline, which runs it again" in str(done)
        assert scene.job.storage.get(settled_path(path)) is None

    def test_what_is_lost_in_part_is_refused_as_by_a_start(self, scene: Scene) -> None:
        """What is left of it is committed all the same, and the error says so."""
        scene.job.run(1, first=1)
        lost, kept = (scene.written(text, epoch=2, task=i) for i, text in enumerate(("x", "kept")))
        scene.job.decide(2, scene.job.prepare(2, [lost, kept]))
        taken_over(scene.config, lost)

        with pytest.raises(ts.DataLossError, match="accept='lost-output-of-epoch-2'") as caught:
            scene.recover()

        assert caught.value.__notes__ == ["sink out: 1 transaction committed; 1 transaction lost"]
        assert all_of(scene, [""]) == ["kept"]

    def test_a_sink_that_is_gone_is_refused_and_the_others_are_committed(
        self, scene: Scene, tmp_path: Path
    ) -> None:
        due, hidden = scene.written("one"), lines(scene, tmp_path / "lines", 1)
        scene.job.decide(1, scene.job.prepare(1, [due, hidden]))

        with pytest.raises(ts.OptionError, match="Add the sink again") as caught:
            scene.recover()

        notes = caught.value.__notes__
        assert "sink out: 1 transaction committed" in notes
        assert any(note.startswith("sink lines-1: not settled: ") for note in notes)
        assert all_of(scene, [""]) == ["one"]
        done = scene.recover(scene.kafka_sink(), LinesSink(str(tmp_path / "lines")))
        assert done.sinks == (
            SinkRecovery("out", committed=1),
            SinkRecovery("lines-1", committed=1),
        )

    def test_files_and_a_users_own_sink_beside_kafka(self, scene: Scene, tmp_path: Path) -> None:
        folders = {"files-1": tmp_path / "files", "lines-1": tmp_path / "lines"}
        sinks = [ts.FileSink(str(folders["files-1"])), LinesSink(str(folders["lines-1"]))]
        due = [scene.written("one")]
        for uid, sink in zip(folders, sinks, strict=True):
            due.append(prepared(scene, sink, uid, task=0))
            prepared(scene, sink, uid, task=1)
        scene.job.decide(1, scene.job.prepare(1, due))

        done = scene.recover(scene.kafka_sink(), *sinks)

        both = [SinkRecovery(uid, committed=1, aborted=1) for uid in folders]
        assert done.sinks == (SinkRecovery("out", committed=1), *both)
        assert len(list(folders["files-1"].glob("*.parquet"))) == 1
        assert [path.read_text() for path in folders["lines-1"].glob("*-*")] == ["k row-0\n"]

    def test_the_command_starts_no_jvm_and_calls_no_function(
        self, scene: Scene, tmp_path: Path
    ) -> None:
        """With a step whose declaration alone would call the user's code at a start."""
        due = scene.written("one")
        scene.job.decide(1, scene.job.prepare(1, [due]))
        (tmp_path / "flights.py").write_text(module_of(scene))
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("JAVA")
        } | {"PATH": "/nowhere", "JAVA_HOME": "/nowhere"}
        words = [sys.executable, "-m", "tallystick", "recover", "flights:pipeline"]

        done = subprocess.run(
            [*words, "--checkpoint", str(scene.job.folder)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=90,
        )

        assert done.returncode == 0, done.stderr
        assert "epoch 1 is committed, and nothing after it" in done.stdout
        assert "sink out: 1 transaction committed" in done.stdout
        assert all_of(scene, [""]) == ["one"]


def prepared(scene: Scene, sink: ts.Sink, uid: str, task: int) -> Committable:
    """What a task handed over for epoch 1, in a sink of another kind."""
    owner = Owner(scene.pipeline_name, uid, LINEAGE)
    opened = sink.open(owner, RunFacts())
    transaction = opened.plan().begin(Place(owner, 1, task, 0, f"ab{task}"))
    transaction.write(pa.record_batch({"key": [b"k"], "value": [f"row-{task}".encode()]}))
    (committable,) = transaction.prepare()
    opened.close()
    return committable


def lines(scene: Scene, folder: Path, task: int) -> Committable:
    return prepared(scene, LinesSink(str(folder)), "lines-1", task)


def module_of(scene: Scene) -> str:
    """A user's module."""
    return dedent(
        f"""
        import tallystick as ts
        from pyspark.sql.streaming.stateful_processor import StatefulProcessor

        def never(*_):
            raise AssertionError("called")

        class Never(StatefulProcessor):
            init = handleInputRows = close = never

        source = ts.KafkaSource({scene.servers!r}, topics=["t"], value=ts.Json("user string"))
        pipeline = (
            ts.Pipeline({scene.pipeline_name!r})
            .read(source)
            .map_batches(never, schema="user string")
            .key_by("user")
            .process(Never(), output="user string")
            .write(ts.KafkaSink({scene.servers!r}, topic={scene.topic!r}, transactions="task",
                                uid="out", value=ts.Json(), options={scene.options!r}))
        )
        """
    )


MODULE = """
import tallystick as ts
started = object()
one = ts.Pipeline("one")
needs = __import__("importlib")
"""


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("flights", "expected MODULE:PIPELINE"),
        (":pipeline", "expected MODULE:PIPELINE"),
        ("no_such_module:pipeline", "there is no module 'no_such_module'"),
        ("no_such.module:pipeline", "there is no module 'no_such.module'"),
        ("here_1:pipeline", "has no 'pipeline'. The module has one."),
        ("here_1:started", "is no Pipeline: it is a object"),
        ("here_2:pipeline", "module 'here_2' needs 'not_installed'"),
    ],
)
def test_a_pipeline_that_cannot_be_found_is_an_error_that_says_why(
    where: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "here_1.py").write_text(MODULE)
    (tmp_path / "here_2.py").write_text("import not_installed\n")

    result = CliRunner().invoke(app, ["recover", where, "--checkpoint", str(tmp_path)])

    assert (result.exit_code, says in result.output) == (1, True), result.output


def test_a_module_of_the_working_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "jobs").mkdir()
    # Without it any `jobs.py` later on the path wins, such as one of tests/tables.
    (tmp_path / "jobs" / "__init__.py").touch()
    (tmp_path / "jobs" / "here_3.py").write_text(MODULE)
    monkeypatch.delitem(sys.modules, "jobs", raising=False)  # of another test

    assert find_pipeline("jobs.here_3:one").name == "one"
