"""Savepoints on a real S3 server, whose settings stand in the URIs."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tallystick.epoch import manifest as m
from tallystick.errors import OptionError, StorageError
from tallystick.ops import savepoints
from tallystick.ops.inspection import inspect
from tallystick.storage.file_storage import FileStorage
from tests.checkpoint_on_disk import ALL, Job, entries_of
from tests.storage.test_storage_s3 import Server


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def test_a_savepoint_on_s3_lives_as_one_on_a_disk(s3, tmp_path: Path):
    bucket = "savepoints"
    s3.create_bucket(bucket)

    def place(name: str) -> FileStorage:
        return FileStorage(f"s3://{bucket}/{name}?{s3.query}")

    job = Job(tmp_path, f"s3://{bucket}/job?{s3.query}")
    job.run(3)
    entries = job.entries()
    savepoints.create(job.storage, place("all/saved"))
    job.run()

    ((where, saved),) = savepoints.find(f"s3://{bucket}/all?{s3.query}")
    savepoints.restore(place("all/saved"), place("new"))

    assert where == f"s3://{bucket}/all/saved"
    assert saved.checkpoint == f"s3://{bucket}/job"
    (name,) = place("new").names(m.FOLDER)
    seed = m.decode(place("new").get(name) or b"", name)
    assert seed.lineage == json.loads(place("new").get("metadata") or b"")["id"]
    assert entries_of(seed.state[0], ALL, place("new")) == entries
    assert inspect(place("new"), verify=True).is_whole
    savepoints.delete(place("all/saved"))
    assert inspect(place("new"), verify=True).is_whole
    assert savepoints.find(f"s3://{bucket}/all?{s3.query}") == []


def test_of_two_commands_with_one_folder_the_second_is_refused(s3, tmp_path: Path):
    """The one that fails would remove what the other one has just called saved."""
    s3.create_bucket("at-once")
    uri = f"s3://at-once/saved?{s3.query}"
    job = Job(tmp_path)
    job.run(2)

    class Full(FileStorage):
        def put(self, path: str, data: bytes) -> None:
            with pytest.raises(OptionError, match="is being filled by savepoint create"):
                savepoints.create(job.storage, FileStorage(uri))
            raise StorageError("disk full")

    with pytest.raises(StorageError, match="disk full"):
        savepoints.create(job.storage, Full(uri))

    assert FileStorage(uri).names("") == []
    savepoints.create(job.storage, FileStorage(uri))
    assert FileStorage(uri).names("") == ["keyed-state", "savepoint.json"]
