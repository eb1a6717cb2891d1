"""Commands on savepoints that run at once, or end in the middle: who finished keeps what he has."""

import contextlib
import itertools
import logging
import re
from pathlib import Path

import pytest

from tallystick.checkpoint.savepoint_folder import MARKER
from tallystick.epoch import manifest as m
from tallystick.epoch import savepoint as s
from tallystick.errors import OptionError, StorageError, TallystickError
from tallystick.ops import savepoints
from tallystick.ops.inspection import inspect
from tallystick.ops.savepoints import migrate
from tallystick.storage.file_storage import FileStorage
from tests.checkpoint_on_disk import ALL, Job, entries_of, folder, job_with_savepoint


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return job_with_savepoint(tmp_path)


def content(path: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


def create(job: Job, target: FileStorage, scratch: Path) -> None:
    savepoints.create(job.storage, target)


def rewrite(job: Job, target: FileStorage, scratch: Path) -> None:
    migrate(folder(scratch / "saved"), target, {"counts": 7}, scratch)


def restore(job: Job, target: FileStorage, scratch: Path) -> None:
    savepoints.restore(folder(scratch / "saved"), target)


COMMANDS = (create, rewrite, restore)


class Meeting(FileStorage):
    """Something happens before the first file is put into it; then, it may be, its disk is full."""

    def meet(self, what, *, is_full: bool) -> "Meeting":
        self.what, self.is_full, self.refused = [what], is_full, []
        return self

    def put(self, path: str, data: bytes) -> None:
        with contextlib.suppress(IndexError):  # several threads put
            what = self.what.pop()
            try:
                what()
            except OptionError as error:
                self.refused.append(str(error))
        if self.is_full:
            raise StorageError("disk full")
        super().put(path, data)


@pytest.mark.parametrize("other", COMMANDS)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("is_full", [False, True])
def test_of_two_commands_with_one_folder_the_second_is_refused_and_loses_nothing(
    job, tmp_path, command, other, is_full
):
    """The one that fails would remove what the other one has just called saved."""
    target = tmp_path / "target"
    meeting = Meeting(str(target)).meet(
        lambda: other(job, folder(target), tmp_path), is_full=is_full
    )

    if is_full:
        with pytest.raises(StorageError, match="disk full"):
            command(job, meeting, tmp_path)
        assert content(target) == {}
        other(job, folder(target), tmp_path)
    else:
        command(job, meeting, tmp_path)

    (refused,) = meeting.refused  # at the marker, or at a file that threads copied meanwhile
    assert re.search("is being filled by savepoint|what .*savepoint.* writes, or left", refused)
    assert content(target)
    assert MARKER not in content(target)


def test_who_looked_before_the_other_was_done_is_refused_behind_it(job, tmp_path):
    """Between the first look and the marker the other one has come and gone."""

    class Late(FileStorage):
        def put_new(self, path: str, data: bytes) -> bool:
            savepoints.create(job.storage, folder(tmp_path / "target"))
            return super().put_new(path, data)

    with pytest.raises(OptionError, match="holds a savepoint already"):
        savepoints.create(job.storage, Late(str(tmp_path / "target")))

    assert savepoints.read(folder(tmp_path / "target"))
    assert MARKER not in content(tmp_path / "target")


def test_a_marker_that_a_killed_command_left_is_told_with_what_to_do(job, tmp_path):
    class Killed(FileStorage):
        def put(self, path: str, data: bytes) -> None:
            raise KeyboardInterrupt

        def delete(self, path: str) -> None:
            """It is dead."""

    target = tmp_path / "target"
    with pytest.raises(KeyboardInterrupt):
        savepoints.create(job.storage, Killed(str(target)))

    message = rf"filled by savepoint create \(process \d+ on .*remove the file {MARKER} there"
    with pytest.raises(OptionError, match=message):
        savepoints.create(job.storage, folder(target))
    (target / "offsets").mkdir()
    (target / "offsets/1").write_bytes(b"")
    with pytest.raises(OptionError, match=r"it has offsets: what savepoint create \(process"):
        savepoints.create(job.storage, folder(target))
    (target / "offsets/1").unlink()
    (target / MARKER).unlink()
    savepoints.create(job.storage, folder(target))


@pytest.mark.parametrize("is_created", [False, True])
def test_where_nothing_is_created_exclusively_the_look_must_do(job, tmp_path, caplog, is_created):
    """S3 without obstore; or the answer was lost, and nobody knows whether it was created."""

    class Plain(FileStorage):
        def put_new(self, path: str, data: bytes) -> bool:
            if is_created:
                super().put_new(path, data)
                raise StorageError("no answer")
            raise OptionError("no way to create one exclusively")

    savepoints.create(job.storage, Plain(str(tmp_path / "target")))

    assert savepoints.read(folder(tmp_path / "target"))
    assert MARKER not in content(tmp_path / "target")
    assert ("is not kept from other commands" in caplog.text) is not is_created
    with pytest.raises(OptionError, match="holds a savepoint already"):
        savepoints.create(job.storage, Plain(str(tmp_path / "target")))


@pytest.mark.parametrize("where", ["tallystick/", "offsets/", "commits/", "metadata"])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_restore_that_fails_leaves_nothing_and_can_be_made_again(job, tmp_path, where, is_there):
    class Full(FileStorage):
        def put(self, path: str, data: bytes) -> None:
            if not path.startswith(where) or is_there:
                super().put(path, data)
            if path.startswith(where):
                raise StorageError("disk full")

    before = content(tmp_path / "saved")
    with pytest.raises(StorageError, match="disk full"):
        savepoints.restore(folder(tmp_path / "saved"), Full(str(tmp_path / "target")))

    assert content(tmp_path / "target") == {}
    assert content(tmp_path / "saved") == before
    savepoints.restore(folder(tmp_path / "saved"), folder(tmp_path / "target"))


class Gone(FileStorage):
    """A disk that is unmounted in the middle."""

    def put(self, path: str, data: bytes) -> None:
        if path in (s.FILE, "metadata"):
            raise StorageError("target down")
        super().put(path, data)

    def delete(self, path: str) -> None:
        raise StorageError(f"cannot delete {path}")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_clean_up_that_fails_hides_no_error(job, tmp_path, caplog, command):
    target = tmp_path / "target"
    with caplog.at_level(logging.WARNING), pytest.raises(TallystickError, match="target down"):
        command(job, Gone(str(target)), tmp_path)

    remaining = content(target)
    assert MARKER in remaining
    assert all(
        f"{path} is left, remove it by hand: cannot delete" in caplog.text for path in remaining
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_what_may_be_whole_keeps_its_files(job, tmp_path, command):
    """The answer was lost, and nothing can be removed: it may be used, so it needs its files."""

    class Silent(Gone):
        def put(self, path: str, data: bytes) -> None:
            FileStorage.put(self, path, data)
            super().put(path, data)

        def delete(self, path: str) -> None:
            if path in (s.FILE, "metadata"):
                super().delete(path)
            FileStorage.delete(self, path)

    target = tmp_path / "target"
    with pytest.raises(StorageError, match="target down"):
        command(job, Silent(str(target)), tmp_path)

    if command is restore:
        state = inspect(folder(target), verify=True)
        assert state.is_whole
    else:
        savepoints.restore(folder(target), folder(tmp_path / "new"))


def test_a_pipeline_that_is_quick_is_not_taken_for_one_without_sparks_log(job, tmp_path):
    """What has happened between two looks at a checkpoint says nothing of it."""

    class Quick(FileStorage):
        def names(self, path: str) -> list[str]:
            job.run(5)
            return super().names(path)

    saved = savepoints.create(Quick(str(job.folder)), folder(tmp_path / "new"), pause_s=0)

    assert saved.manifest.checkpoint_id <= job.epoch


class Busy(FileStorage):
    """Something is told of each operation before it is done."""

    def telling(self, tell) -> "Busy":
        self.tell = tell
        return self

    def put(self, path: str, data: bytes) -> None:
        self.tell()
        super().put(path, data)

    def get(self, path: str) -> bytes | None:
        self.tell()
        return super().get(path)

    def get_range(self, path: str, offset: int, length: int) -> bytes | None:
        self.tell()
        return super().get_range(path, offset, length)

    def names(self, path: str) -> list[str]:
        self.tell()
        return super().names(path)

    def delete(self, path: str) -> None:
        self.tell()
        super().delete(path)


@pytest.mark.parametrize("at", range(1, 16))
@pytest.mark.parametrize("within", ["delete", "restore"])
def test_a_savepoint_that_is_deleted_meanwhile_is_restored_as_a_whole_or_not_at_all(
    job, tmp_path, within, at
):
    saved, new = tmp_path / "saved", tmp_path / "new"
    operations, ran, done, failed = itertools.count(1), [], [], []

    def run(name: str, where: FileStorage) -> None:
        try:
            if name == "delete":
                savepoints.delete(where)
            else:
                savepoints.restore(where, folder(new))
        except TallystickError:
            failed.append(name)
        else:
            done.append(name)

    def tell() -> None:
        if next(operations) == at:  # files are looked at by several threads
            ran.append(at)
            run("restore" if within == "delete" else "delete", folder(saved))

    run(within, Busy(str(saved)).telling(tell))

    if not ran:
        return  # the whole command has fewer
    assert "delete" in done, "a restore keeps nobody from deleting"
    assert content(saved) == {}
    if "restore" in done:
        (name,) = folder(new).names(m.FOLDER)
        seed = m.decode((new / name).read_bytes(), name)
        assert entries_of(seed.state[0], ALL, folder(new)) == job.entries()
    else:
        assert failed == ["restore"]
        assert content(new) == {}


@pytest.mark.parametrize("at", range(20))
def test_a_deletion_that_was_cut_off_is_told_and_can_be_finished(job, tmp_path, at):
    place, operations = tmp_path / "saved", []

    def tell() -> None:
        operations.append(at)
        if len(operations) > at:
            raise KeyboardInterrupt  # for good: nor is anything brought back

    with contextlib.suppress(KeyboardInterrupt):
        savepoints.delete(Busy(str(place)).telling(tell))
    if s.FILE not in content(place) and content(place):
        ((_, error),) = savepoints.find(str(place))
        for action in (
            lambda: savepoints.restore(folder(place), folder(tmp_path / "new")),
            lambda: savepoints.create(job.storage, folder(place)),
        ):
            with pytest.raises(OptionError, match=r"deletion was cut off.*Delete it once more"):
                action()
        assert "deletion was cut off" in str(error)
    if MARKER in content(place):
        with pytest.raises(OptionError, match=rf"was killed, remove the file {MARKER}"):
            savepoints.delete(folder(place))
        (place / MARKER).unlink()
    if content(place):
        savepoints.delete(folder(place))
    assert content(place) == {}
    savepoints.create(job.storage, folder(place))
