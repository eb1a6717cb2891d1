"""Deleting savepoints and ending claims, while other commands run or after they were killed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tallystick import savepoints
from tallystick.checkpoint import savepoint as s
from tallystick.errors import OptionError, StorageError
from tallystick.inspection import inspect
from tallystick.savepoint_target import MARKER
from tallystick.storage import FileStorage
from tests.checkpoint_on_disk import Job, folder, job_with_savepoint


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return job_with_savepoint(tmp_path)


def files(path: Path) -> list[str]:
    return [str(each.relative_to(path)) for each in path.rglob("*") if each.is_file()]


def refer(job: Job, target: FileStorage, saved: Path) -> None:
    savepoints.create(job.storage, target, reference=True)


def restore_with_claim(job: Job, target: FileStorage, saved: Path) -> None:
    savepoints.restore(folder(saved), target, claim=True)


@pytest.mark.parametrize("command", [refer, restore_with_claim])
def test_the_claim_of_a_command_that_is_still_running_is_not_ended(job, tmp_path, command):
    """What makes its folder whole is written last, and its files would be removed under it."""
    target = tmp_path / "target"
    claimed = job.storage if command is refer else folder(tmp_path / "saved")
    told = []

    class Released(FileStorage):
        def put(self, path: str, data: bytes) -> None:
            if path in (s.FILE, "metadata"):
                with pytest.raises(OptionError, match=r"at work.*was killed, remove the file") as e:
                    savepoints.release(claimed, str(target))
                told.append(e)
            super().put(path, data)

    command(job, Released(str(target)), tmp_path / "saved")

    assert told
    assert [path for path in claimed.names(s.CLAIMS) if not s.is_try(path)]


def test_the_claim_of_a_savepoint_whose_deletion_was_cut_off_is_ended_by_deleting_it(job, tmp_path):
    place = tmp_path / "referring"
    refer(job, folder(place), tmp_path)
    (place / s.FILE).rename(place / s.TOMBSTONE)

    with pytest.raises(OptionError, match="Delete it once more"):
        savepoints.release(job.storage, str(place))

    savepoints.delete(folder(place))
    assert job.storage.names(s.CLAIMS) == []


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
    """It would be listed as a savepoint; a reference would have no claim that keeps its files."""
    place = tmp_path / "referring"
    refer(job, folder(place), tmp_path)

    class Failing(FileStorage):
        def names(self, path: str) -> list[str]:
            if path == s.CLAIMS:
                raise StorageError("nor now")
            return super().names(path)

    with pytest.raises(StorageError, match="the disk does not answer"):
        savepoints.delete(failing_at_the_end(place))
    assert job.storage.names(s.CLAIMS) == []
    with pytest.raises(StorageError, match="nor now"):
        savepoints.delete(Failing(str(place)))

    ((_, found),) = savepoints.find(str(place))
    assert "Delete it once more" in str(found)
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


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_the_mark_of_a_killed_deletion_stands_only_where_nobody_sees_it_is_dead(
    job, tmp_path, where
):
    saved = tmp_path / "saved"
    script = (
        "import os, sys\n"
        "from tallystick import savepoints\n"
        "from tallystick.storage import FileStorage\n"
        "class Killed(FileStorage):\n"
        "    def delete(self, path): os._exit(9)\n"
        "savepoints.delete(Killed(sys.argv[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(saved)], check=False).returncode == 9
    mark = (saved / MARKER).read_bytes()
    if where == "elsewhere":
        (saved / MARKER).write_bytes(mark.replace(mark.splitlines()[-1], b"another machine"))
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


def test_what_is_no_claim_stops_no_command_and_is_named(job, tmp_path, caplog):
    (job.folder / s.CLAIMS / "try-old").mkdir(parents=True)
    (job.folder / s.CLAIMS / "lost+found").mkdir()
    place = tmp_path / "referring"

    refer(job, folder(place), tmp_path)
    shutil.rmtree(place)
    savepoints.release(job.storage, str(place))

    assert job.storage.names(s.CLAIMS) == [f"{s.CLAIMS}/lost+found", f"{s.CLAIMS}/try-old"]
    assert f"{s.CLAIMS}/lost+found is passed over" in caplog.text
    assert all(
        any(path in note for note in inspect(job.storage).notes)
        for path in job.storage.names(s.CLAIMS)
    )


def test_a_claim_that_ends_while_it_is_looked_at_is_not_told_as_damaged(job, tmp_path, caplog):
    class Ended(FileStorage):
        def names(self, path: str) -> list[str]:
            more = [s.claim_path("try-ended")] if path == s.CLAIMS else []
            return [*super().names(path), *more]

    checkpoint = Ended(str(job.folder))

    assert inspect(checkpoint).notes == ()
    savepoints.create(checkpoint, folder(tmp_path / "referring"), reference=True)
    assert caplog.text == ""


def test_a_forced_deletion_passes_over_what_is_no_file(job, tmp_path, caplog):
    saved = tmp_path / "saved"
    (saved / s.FILE).write_text("broken")
    (saved / "keyed-state/counts/sub").mkdir()

    assert savepoints.delete(folder(saved), force=True) is None

    assert files(saved) == []
    assert "keyed-state/counts/sub is left: it is no file" in caplog.text


def test_a_reference_to_a_checkpoint_out_of_reach_is_deleted_by_force(job, tmp_path, caplog):
    """A bucket that is gone, or a kind of storage that this machine cannot read."""
    place = tmp_path / "referring"
    refer(job, folder(place), tmp_path)

    class Alone(FileStorage):
        def at(self, location: str) -> FileStorage:
            raise OptionError(f"{location} cannot be read")

    with pytest.raises(OptionError, match="checkpoint cannot be read"):
        savepoints.delete(Alone(str(place)))
    assert savepoints.read(folder(place))

    savepoints.delete(Alone(str(place)), force=True)

    assert files(place) == []
    assert "its claim is left: " in caplog.text
