"""Deleting savepoints, while other commands run or after they were killed."""

import subprocess
import sys
from pathlib import Path

import pytest

from tallystick.checkpoint.savepoint_folder import MARKER
from tallystick.epoch import savepoint as s
from tallystick.errors import ManifestError, OptionError, StorageError
from tallystick.ops import savepoints
from tallystick.storage.file_storage import FileStorage
from tests.checkpoint_on_disk import Job, folder, job_with_savepoint


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return job_with_savepoint(tmp_path)


def files(path: Path) -> list[str]:
    return [str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()]


def deleting(place: Path, at_first_file) -> FileStorage:
    """A savepoint where something happens before the first file of state is removed."""
    waiting = [at_first_file]

    class Slow(FileStorage):
        def delete(self, path: str) -> None:
            if path.startswith("keyed-state/") and waiting:
                waiting.pop()()
            super().delete(path)

    return Slow(str(place))


def test_a_slow_deletion_removes_nothing_of_the_next_savepoint_there(job, tmp_path):
    saved = tmp_path / "saved"

    def others() -> None:
        with pytest.raises(OptionError, match=r"being emptied by savepoint delete \(process"):
            savepoints.delete(folder(saved))
        with pytest.raises(OptionError, match="being deleted"):
            savepoints.create(job.storage, folder(saved))

    savepoints.delete(deleting(saved, others))

    assert files(saved) == []
    savepoints.create(job.storage, folder(saved))
    savepoints.restore(folder(saved), folder(tmp_path / "new"))


def test_a_deletion_that_failed_at_its_end_brings_nothing_back_that_has_no_files(job, tmp_path):
    """It would be listed as a savepoint."""
    place = tmp_path / "saved"

    with pytest.raises(StorageError, match="the disk does not answer"):
        savepoints.delete(failing_at_the_end(place))

    ((_, error),) = savepoints.find(str(place))
    assert "Delete it once more" in str(error)
    savepoints.delete(folder(place))
    assert files(place) == []


def failing_at_the_end(place: Path) -> FileStorage:
    """All of a savepoint but its tombstone can be removed."""

    class Failing(FileStorage):
        def delete(self, path: str) -> None:
            if path == s.TOMBSTONE:
                raise StorageError("the disk does not answer")
            super().delete(path)

    return Failing(str(place))


def test_a_deletion_that_was_killed_can_be_finished(job, tmp_path):
    saved = tmp_path / "saved"
    script = (
        "import os, sys\n"
        "from tallystick.ops import savepoints\n"
        "from tallystick.storage.file_storage import FileStorage\n"
        "class Killed(FileStorage):\n"
        "    def delete(self, path): os._exit(9)\n"
        "savepoints.delete(Killed(sys.argv[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(saved)], check=False).returncode == 9
    with pytest.raises(OptionError, match=rf"was killed, remove the file {MARKER}"):
        savepoints.delete(folder(saved))
    assert s.TOMBSTONE in files(saved)
    (saved / MARKER).unlink()

    savepoints.delete(folder(saved))

    assert files(saved) == []


def test_where_there_is_no_savepoint_a_deletion_makes_no_mark(tmp_path):
    with pytest.raises(OptionError, match="holds no savepoint"):
        savepoints.delete(folder(tmp_path / "mistyped"))

    assert not (tmp_path / "mistyped").exists()


def test_a_damaged_savepoint_is_left_for_its_owner_to_remove(job, tmp_path):
    """Which of the files are its own, nobody knows."""
    saved = tmp_path / "saved"
    (saved / s.FILE).write_text("broken")
    before = files(saved)

    with pytest.raises(ManifestError, match="remove its folder by hand"):
        savepoints.delete(folder(saved))

    assert files(saved) == before
