"""Checkpoints that decide their epochs themselves, as `savepoint create` and `inspect` see them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tallystick.__main__ import app
from tallystick.checkpoint.newest import TokenAnswer, ask_nobody, newest_committed
from tallystick.epoch import manifest as m
from tallystick.epoch.manifest import KAFKA
from tallystick.epoch.micro_batches import OWN_LOOP
from tallystick.epoch.tokens import Token
from tallystick.epoch.two_phase import Committable
from tallystick.errors import DataLossError, OptionError
from tallystick.ops import savepoints
from tallystick.ops.checkpoint_view import look
from tallystick.ops.inspection import DECIDED, FAILED, KAFKA_KNOWS, SETTLED, UNDECIDED, inspect
from tallystick.storage.file_storage import FileStorage
from tests.lingering_job import LingeringJob

THREE = tuple(
    Committable(sink, 0, task, f"{sink}-{task}", 10, 1)
    for sink, task in (("files-1", 0), ("files-1", 1), ("postgres-1", 0))
)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def job(tmp_path: Path) -> LingeringJob:
    return LingeringJob(tmp_path / "checkpoint", "job", "L")


def decided(job: LingeringJob, epoch: int, nonce: str = "aa") -> str:
    """Plan, prepare and decide an epoch that leaves committables."""
    job.plan(epoch)
    path = job.prepare(epoch, THREE, nonce)
    job.decide(epoch, path)
    return path


def test_the_log_of_decisions_tells_which_attempt_counts(job, tmp_path):
    """Where only Kafka knew, once; also of epochs before the newest one."""
    job.run(1)
    paths = {}
    for epoch in (1, 2):
        job.plan(epoch)
        for nonce in ("before", "zz"):
            job.prepare(epoch, THREE, nonce)
        paths[epoch] = decided(job, epoch, "counts")
        job.finish(epoch)

    for epoch in (1, 2):
        saved = savepoints.create(
            job.storage, FileStorage(str(tmp_path / f"s{epoch}")), epoch=epoch
        )
        assert saved.manifest_path == paths[epoch]
    report = inspect(job.storage)
    assert "which counts" in report.notes[0]
    assert [output.standing for output in report.outputs if output.epoch == 2].count(FAILED) == 2


def test_the_next_attempts_tell_it_where_the_log_was_lost(job):
    """What the next epoch went on from is in its manifest."""
    job.run(1)
    job.plan(1)
    job.prepare(1, THREE, "left")
    right = decided(job, 1, "right")
    job.finish(1)
    job.plan(2)
    job.prepare(2, THREE)
    for slot in job.folder.glob("tallystick/decisions/*"):
        slot.unlink()

    assert newest_committed(job.storage).manifest_path == right


def test_an_epoch_that_is_decided_and_not_settled_is_not_saved(job, tmp_path):
    job.run(2)
    decided(job, 2)

    refused = call("savepoint", "create", job.folder, tmp_path / "s", "--epoch", 2)
    saved = call("savepoint", "create", job.folder, tmp_path / "s")
    report = inspect(job.storage)

    assert refused.exit_code == 1
    assert "Epoch 2 is decided, and not settled" in refused.output
    assert "Start the pipeline once, which settles it" in refused.output
    assert "Saved epoch 1" in saved.output
    assert "Epoch 2 is decided too" in saved.output
    assert report.epoch == 1
    assert "epoch 2 is decided, and nothing says yet that it is settled" in report.notes[0]


def test_the_first_epoch_that_is_not_settled_is_told_too(job, tmp_path):
    decided(job, 0)

    for arguments in (("savepoint", "create", job.folder, tmp_path / "s"), ("inspect", job.folder)):
        result = call(*arguments)
        assert result.exit_code == 1
        assert "Epoch 0 is decided, and not settled" in result.output


def test_inspect_shows_who_decided_and_what_sinks_hold(job):
    job.run(1)
    decided(job, 1)
    job.finish(1)
    kafkas = job.prepare(2, THREE[:1], "kafkas", decided_by=KAFKA)
    paths = {SETTLED: "", UNDECIDED: job.prepare(2, THREE, "left"), DECIDED: decided(job, 2)}

    report = json.loads(call("inspect", job.folder, "--json").output)
    shown = call("inspect", job.folder).output

    by_path = {output["manifest_path"]: output for output in report["outputs"]}
    assert by_path[paths[UNDECIDED]]["standing"] == UNDECIDED
    assert by_path[paths[DECIDED]]["standing"] == DECIDED
    assert by_path[kafkas]["standing"] == KAFKA_KNOWS
    assert [output["standing"] for output in report["outputs"] if output["epoch"] < 2] == [
        SETTLED
    ] * 2
    assert by_path[paths[DECIDED]]["decided_by"] == "checkpoint"
    assert by_path[paths[DECIDED]]["sinks"] == [
        {"uid": "files-1", "transactions": 2, "records": 20},
        {"uid": "postgres-1", "transactions": 1, "records": 10},
    ]
    for words in ("the checkpoint", "files-1: 20 rows in 2 transactions", DECIDED):
        assert words in shown


def test_a_restored_checkpoint_has_nothing_to_commit(job, tmp_path):
    """What its epoch prepared is the original's, which has committed it."""
    decided(job, 0)
    job.finish(0)
    savepoints.create(job.storage, FileStorage(str(tmp_path / "s")))
    new = FileStorage(str(tmp_path / "new"))
    savepoints.restore(FileStorage(str(tmp_path / "s")), new)

    (path,) = m.manifests(new.names(m.FOLDER))
    seed = m.decode(new.get(path) or b"", path)

    assert m.is_seed(path)
    assert (seed.committables, seed.base_path, seed.decided_by) == ((), "", KAFKA)
    assert inspect(new).outputs[0].standing == SETTLED
    assert new.names("tallystick/decisions") == []


def test_a_damaged_log_of_decisions_is_told(job, tmp_path):
    """Nobody goes on as if nothing were decided."""
    job.run(1)
    for nonce in ("left", "other"):
        job.prepare(0, (), nonce)
    newest = max(job.folder.glob("tallystick/decisions/*"))
    newest.write_bytes(b"torn")

    for arguments in (("savepoint", "create", job.folder, tmp_path / "s"), ("inspect", job.folder)):
        result = call(*arguments)
        assert result.exit_code == 1
        assert "Which epoch is decided last is unknown" in result.output


class TestOfALoop:
    """No log of Spark's: manifests, notes of runs, and who decides."""

    @pytest.fixture
    def job(self, tmp_path: Path) -> LingeringJob:
        job = LingeringJob(tmp_path / "checkpoint", "job", "L", is_loops=True)
        job.run(2)
        return job

    def test_a_later_manifest_proves_the_one_that_it_goes_on_from(self, job, tmp_path):
        for slot in job.folder.glob("tallystick/decisions/*"):
            slot.unlink()
        for note in job.folder.glob("tallystick/settled-*"):
            note.unlink()
        undecided = job.prepare(1, THREE, "left")

        committed = newest_committed(job.storage, wanted=0)

        assert (committed.epoch, m.epoch_of(committed.manifest_path)) == (0, 0)
        assert inspect(job.storage).epoch == 0
        with pytest.raises(OptionError, match=r"the log of decisions .* says nothing"):
            newest_committed(job.storage)
        job.prepare(2, (), "next")
        committed = newest_committed(job.storage, wanted=1)
        assert committed.manifest_path != undecided

    def test_what_the_log_of_decisions_does_not_name_is_not_decided(self, job, tmp_path):
        undecided = job.prepare(2, THREE, "left")

        assert newest_committed(job.storage).epoch == 1
        standing = {
            output.manifest_path: output.standing for output in inspect(job.storage).outputs
        }
        assert standing[undecided] == UNDECIDED

    def test_a_decision_counts_once_other_sinks_hold_nothing_of_it(self, job, tmp_path):
        decided(job, 2)
        assert newest_committed(job.storage).epoch == 1
        assert inspect(job.storage).outputs[-1].standing == DECIDED
        shown = call("savepoint", "create", job.folder, tmp_path / "s")
        assert "Saved epoch 1" in shown.output
        assert "Epoch 2 is decided too" in shown.output

        job.finish(2)
        assert newest_committed(job.storage).epoch == 2
        job.decide(3, job.prepare(3))
        assert newest_committed(job.storage).epoch == 3

    def test_a_decider_that_knows_less_than_the_manifests_is_not_believed(self, job):
        """It was set back, or is another cluster."""
        old = job.prepare(0, (), "old", decided_by=KAFKA)
        job.prepare(2, (), "new", decided_by=KAFKA)
        for slot in job.folder.glob("tallystick/decisions/*"):
            slot.unlink()
        for token in (Token(0, "L", "c", old), Token(7, "M", "c", "of another"), None):
            with pytest.raises(DataLossError, match="what is decided last is unknown"):
                newest_committed(job.storage, lambda _, __, token=token: TokenAnswer(token))
            report = inspect(job.storage, ask=lambda _, __, token=token: TokenAnswer(token))
            assert report.epoch == 1
            assert "is not known" in report.notes[-1]

    def test_what_ran_since_the_folder_was_listed_is_found_by_its_token(self, job):
        """The pipeline runs: Kafka names a manifest that is newer than the question."""
        job.prepare(2, (), "kafkas", decided_by=KAFKA)

        def ask(_: str, lineage: str) -> TokenAnswer:
            job._decided[2] = "of 2"
            return TokenAnswer(Token(3, lineage, "c", job.prepare(3, (), "n", decided_by=KAFKA)))

        assert newest_committed(job.storage, ask).epoch == 3

    def test_a_loop_that_took_over_is_told_from_its_first_start_on(self, tmp_path):
        """Spark's log stands still."""
        sparks = LingeringJob(tmp_path / "sparks", "job", "L")
        sparks.run(2)
        assert not look(sparks.storage, ask_nobody).is_loops

        sparks.storage.put(OWN_LOOP, b"")

        assert look(sparks.storage, ask_nobody).is_loops
        sparks.decide(2, sparks.prepare(2))
        assert newest_committed(sparks.storage).epoch == 2
