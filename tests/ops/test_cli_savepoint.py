"""The commands around savepoints, as a user calls them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from pyarrow import fs
from typer.testing import CliRunner, Result

import tallystick
from tallystick.__main__ import app
from tallystick.epoch import manifest as m
from tallystick.epoch import savepoint as s
from tallystick.ops import cli_savepoint, savepoints
from tallystick.storage import file_storage
from tallystick.storage.file_storage import FileStorage
from tests.checkpoint_on_disk import Job


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(tmp_path / "checkpoint")
    job.run(3)
    return job


def test_the_life_of_a_savepoint(job, tmp_path):
    saved = tmp_path / "saved" / "monday"

    assert (
        "Saved epoch 2 of pipeline 'job'" in call("savepoint", "create", job.folder, saved).output
    )
    assert "monday" in call("savepoint", "list", saved.parent).output
    (listed,) = json.loads(call("savepoint", "list", saved.parent, "--json").output)
    assert (listed["name"], listed["epoch"]) == ("monday", 2)
    described = json.loads(call("savepoint", "describe", saved, "--json").output)
    assert described["steps"][0]["uid"] == "counts"
    restored = call("savepoint", "restore", saved, tmp_path / "new")
    assert "goes on after epoch 2" in restored.output
    assert (tmp_path / "new" / "metadata").exists()
    assert call("savepoint", "delete", saved).exit_code == 0
    assert json.loads(call("savepoint", "list", saved.parent, "--json").output) == []


def test_a_savepoint_is_described_for_people(job, tmp_path):
    saved = tmp_path / "monday"
    call("savepoint", "create", job.folder, saved)
    described = call("savepoint", "describe", saved).output
    for words in ("pipeline", "job", "epoch", "goes on reading", "at offset", "user string"):
        assert words in described
    assert "{" not in described


def test_the_version_is_printed():
    printed = call("--version")
    assert (printed.exit_code, printed.output) == (0, f"tallystick {tallystick.__version__}\n")
    assert "Usage" in call().output


def test_a_savepoint_itself_and_a_file_beside_savepoints_can_be_listed(job, tmp_path):
    saved = tmp_path / "saved" / "monday"
    call("savepoint", "create", job.folder, saved)
    (saved.parent / "notes.txt").write_text("ours")

    for folder in (saved, saved.parent):
        (listed,) = json.loads(call("savepoint", "list", folder, "--json").output)
        assert (listed["name"], listed["location"]) == ("monday", saved.as_uri())


def test_migrate_takes_a_number_for_each_step(job, tmp_path):
    call("savepoint", "create", job.folder, tmp_path / "saved")

    wrong = call(
        "savepoint", "migrate", tmp_path / "saved", tmp_path / "new", "--max-parallelism", "counts"
    )
    assert wrong.exit_code == 1
    assert "expected STEP=NUMBER" in wrong.output
    right = call(
        "savepoint", "migrate", tmp_path / "saved", tmp_path / "new",
        "--max-parallelism", "counts=64", "--scratch", tmp_path,
    )  # fmt: skip
    assert right.exit_code == 0, right.output
    described = json.loads(call("savepoint", "describe", tmp_path / "new", "--json").output)
    assert described["steps"][0]["max_parallelism"] == 64


def test_migrate_takes_the_number_alone_where_there_is_one_step(job, tmp_path):
    saved = tmp_path / "saved"

    def migrate(number: str) -> Result:
        arguments = ("--max-parallelism", number, "--scratch", tmp_path)
        return call("savepoint", "migrate", saved, tmp_path / f"new{number}", *arguments)

    call("savepoint", "create", job.folder, saved)
    assert migrate("64").exit_code == 0
    described = json.loads(call("savepoint", "describe", tmp_path / "new64", "--json").output)
    assert described["steps"][0]["max_parallelism"] == 64
    assert "expected STEP=NUMBER, e.g." in migrate("=32").output

    savepoint = savepoints.read(FileStorage(str(saved)))
    steps = (job.state, replace(job.state, uid="sums", files=(), trail=()))
    two = replace(savepoint, manifest=replace(savepoint.manifest, state=steps))
    (saved / s.FILE).write_bytes(two.encode())
    refused = migrate("32")
    assert refused.exit_code == 1
    assert "2 keyed steps: counts, sums" in refused.output


def test_what_is_secret_in_a_location_is_not_printed(job, tmp_path, monkeypatch):
    """Any bucket is a local folder here."""
    real = file_storage._root
    monkeypatch.setattr(
        file_storage,
        "_root",
        lambda uri: (
            (fs.LocalFileSystem(), str(tmp_path / file_storage.shown(uri).removeprefix("s3://")))
            if uri.startswith("s3:")
            else real(uri)
        ),
    )
    query = "?endpoint_override=h&secret_key=HIDDEN"
    saved, new, more = (f"s3://KEY:HIDDEN@bucket/{name}{query}" for name in ("a", "b", "c"))
    for folder in ("a/keyed-state/counts", "b/offsets", "b/commits", "b/tallystick"):
        (tmp_path / "bucket" / folder).mkdir(parents=True)
    for folder in ("b/keyed-state/counts", "c/keyed-state/counts"):
        (tmp_path / "bucket" / folder).mkdir(parents=True)

    for arguments in (
        ("create", job.folder, saved),
        ("describe", saved),
        ("list", saved),
        ("restore", saved, new),
        ("migrate", saved, more, "--max-parallelism", "counts=64", "--scratch", tmp_path),
        ("delete", saved),
    ):
        result = call("savepoint", *arguments)
        assert result.exit_code == 0, result.output
        assert arguments[0] == "list" or "bucket/" in result.output
        assert "HIDDEN" not in result.output


def test_errors_are_messages(job, tmp_path):
    for result, words in (
        (call("savepoint", "create", tmp_path, tmp_path / "saved"), "no committed epoch"),
        (call("savepoint", "restore", tmp_path, tmp_path / "new"), "no savepoint"),
        (call("inspect", tmp_path), "no committed epoch"),
    ):
        assert result.exit_code == 1
        assert words in result.output
        assert "Traceback" not in result.output


def test_what_is_not_there_is_told_without_a_traceback(job, tmp_path):
    saved = tmp_path / "saved"
    call("savepoint", "create", job.folder, saved)
    kafka = ("--bootstrap-servers", "b:1", "--kafka-options", tmp_path / "no")

    for words, arguments in (
        ("--kafka-options", ("create", job.folder, tmp_path / "s", *kafka)),
        ("--kafka-options", ("create", job.folder, tmp_path / "s", *kafka[:-1], tmp_path)),
        ("--scratch", ("migrate", saved, tmp_path / "s", "--max-parallelism", "7",
                       "--scratch", tmp_path / "no")),
        ("holds no savepoint", ("list", tmp_path / "no")),
    ):  # fmt: skip
        result = call("savepoint", *arguments)
        assert result.exit_code == 1
        assert isinstance(result.exception, SystemExit)
        assert words in result.output


def test_a_damaged_savepoint_does_not_hide_the_others(job, tmp_path):
    folder = tmp_path / "saved"
    for name in ("one", "two"):
        call("savepoint", "create", job.folder, folder / name)
    (folder / "one" / "savepoint.json").write_bytes(b"x")

    listed = call("savepoint", "list", folder)
    assert listed.exit_code == 1
    assert "two" in listed.output
    assert "one/savepoint.json: 1 bytes that fail their checksum" in listed.output
    deleted = call("savepoint", "delete", folder / "one")
    assert deleted.exit_code == 1
    assert "remove its folder by hand" in deleted.output
    shutil.rmtree(folder / "one")
    assert call("savepoint", "list", folder).exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("create", "a", "b", "--reference"),
        ("restore", "a", "b", "--claim"),
        ("delete", "a", "--force"),
        ("release", "a", "b"),
    ],
)
def test_what_savepoints_by_reference_needed_is_refused(arguments):
    """Not passed over: who asks for a reference must not get a copy, or the other way round."""
    refused = call("savepoint", *arguments)
    assert refused.exit_code == 2
    assert "No such" in refused.output


def test_options_for_kafka_are_read_from_a_file_and_its_secrets_are_not_told(tmp_path):
    path = tmp_path / "client.properties"
    path.write_text("# ours\nsasl.mechanism = PLAIN\n\nsasl.password=a=b\n")
    assert cli_savepoint.options_in(path) == {"sasl.mechanism": "PLAIN", "sasl.password": "a=b"}

    path.write_text("sasl.password secret\n")
    with pytest.raises(cli_savepoint.OptionError, match="line 1: expected name=value") as refused:
        cli_savepoint.options_in(path)
    assert "secret" not in str(refused.value)


def test_inspect_shows_tables_and_json(job):
    shown = call("inspect", job.folder, "--verify")
    assert shown.exit_code == 0
    for words in ("step 'counts'", "in-0", "every byte compared", "0 to 63"):
        assert words in shown.output
    report = json.loads(call("inspect", job.folder, "--json").output)
    assert report["epoch"] == report["newest_whole"] == 2

    (job.folder / job.state.files[2].path).unlink()
    shown = call("inspect", job.folder)
    assert shown.exit_code == 1
    assert "missing or damaged:" in shown.output
    assert "newest whole epoch" in shown.output


def test_a_restored_checkpoint_can_be_inspected(job, tmp_path):
    call("savepoint", "create", job.folder, tmp_path / "saved")
    call("savepoint", "restore", tmp_path / "saved", tmp_path / "new")

    report = json.loads(call("inspect", tmp_path / "new", "--json", "--verify").output)

    assert report["origin"] == (tmp_path / "saved").as_uri()
    assert report["epoch"] == report["newest_whole"] == 2
    assert m.is_seed(report["epochs"][0]["manifest_path"])
