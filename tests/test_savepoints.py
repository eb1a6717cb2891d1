"""Savepoints of checkpoints on disk: what a restored one holds, and what is refused."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tallystick import savepoints
from tallystick.checkpoint import manifest as m
from tallystick.checkpoint import savepoint as s
from tallystick.checkpoint.manifest import Manifest
from tallystick.checkpoint.micro_batches import OWN_LOOP
from tallystick.errors import (
    DataLossError,
    ManifestError,
    OptionError,
    StateFileError,
    StorageError,
    TallystickError,
)
from tallystick.migration import migrate
from tallystick.newest_epoch import Heard
from tallystick.sink.transaction import Token
from tallystick.state.handles import StepState, Version
from tallystick.storage import FileStorage
from tests.checkpoint_on_disk import ALL, Job, entries_of, folder


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(tmp_path / "checkpoint")
    job.run(3)
    return job


def content(path: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {
        str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()
    }


def seed_in(path: Path) -> Manifest:
    (name,) = folder(path).names(m.FOLDER)
    assert m.is_seed(name)
    return m.decode((path / name).read_bytes(), name)


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("claim", [False, True])
def test_a_restored_checkpoint_has_what_spark_and_the_epochs_need(job, tmp_path, reference, claim):
    savepoints.create(job.storage, folder(tmp_path / "saved"), reference=reference)
    entries, saved_epoch = job.entries(), job.epoch
    job.run(2)
    new = tmp_path / "new"

    savepoints.restore(folder(tmp_path / "saved"), folder(new), claim=claim)

    seed = seed_in(new)
    lineage = json.loads((new / "metadata").read_text())["id"]
    assert seed.lineage == lineage != "first-lineage"
    assert (seed.checkpoint_id, seed.produced) == (saved_epoch, ())
    assert seed.origin is not None
    assert seed.origin.lineage == "first-lineage"
    assert seed.origin.manifest_path.endswith(f"{saved_epoch}-n{saved_epoch}.json")
    assert entries_of(seed.state[0], ALL, folder(new)) == entries
    for path in ("offsets/1", "offsets/2", "commits/2"):
        assert (new / path).read_bytes() == (job.folder / path).read_bytes()
    assert not (new / "offsets/0").exists()


def test_a_copy_outlives_its_checkpoint_and_a_restored_one_outlives_the_copy(job, tmp_path):
    savepoints.create(job.storage, folder(tmp_path / "saved"))
    entries = job.entries()
    job.folder.rename(tmp_path / "gone")
    savepoints.restore(folder(tmp_path / "saved"), folder(tmp_path / "new"))
    savepoints.delete(folder(tmp_path / "saved"))

    assert content(tmp_path / "saved") == {}
    assert entries_of(seed_in(tmp_path / "new").state[0], ALL, folder(tmp_path / "new")) == entries


def test_a_reference_copies_nothing_and_claims_what_it_names(job, tmp_path):
    savepoints.create(job.storage, folder(tmp_path / "saved"), reference=True)

    assert list(content(tmp_path / "saved")) == [s.FILE]
    (path,) = job.storage.names(s.CLAIMS)
    claim = s.decode_claim(job.storage.get(path) or b"", path)
    assert claim.state == (job.state,)
    assert claim.holder == (tmp_path / "saved").as_uri()

    savepoints.delete(folder(tmp_path / "saved"))

    assert job.storage.names(s.CLAIMS) == []
    assert job.entries(), "the checkpoint's own files are not the savepoint's to delete"


def test_a_savepoint_whose_files_are_in_use_is_not_deleted_until_they_are_not(job, tmp_path):
    savepoints.create(job.storage, folder(tmp_path / "saved"))
    savepoints.restore(folder(tmp_path / "saved"), folder(tmp_path / "new"), claim=True)
    before = content(tmp_path / "saved")

    with pytest.raises(OptionError, match=r"in use.*/new"):
        savepoints.delete(folder(tmp_path / "saved"))
    assert content(tmp_path / "saved") == before

    for path in (tmp_path / "new" / "tallystick").iterdir():
        path.unlink()
    savepoints.delete(folder(tmp_path / "saved"))
    assert content(tmp_path / "saved") == {}


def test_a_reference_to_a_checkpoint_that_borrows_files_copies_the_borrowed_ones(job, tmp_path):
    """Their owner knows nothing of the new savepoint."""
    savepoints.create(job.storage, folder(tmp_path / "first"))
    savepoints.restore(folder(tmp_path / "first"), folder(tmp_path / "new"), claim=True)
    second = savepoints.create(
        folder(tmp_path / "new"), folder(tmp_path / "second"), reference=True
    )

    assert all(file.path.startswith("keyed-state/") for file in second.manifest.state[0].files)
    savepoints.delete(folder(tmp_path / "first"), force=True)
    assert entries_of(second.manifest.state[0], ALL, folder(tmp_path / "second"))


@pytest.mark.parametrize("damage", ["missing", "torn", "flipped"])
def test_no_savepoint_is_made_of_damaged_state(job, tmp_path, damage):
    file = job.state.files[1]
    path = job.folder / file.path
    data = path.read_bytes()
    path.unlink()
    if damage == "torn":
        path.write_bytes(data[:-7])
    elif damage == "flipped":
        at = file.size - file.index_size - 20  # in the entries, not in the index
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])

    with pytest.raises(StateFileError, match=rf"{file.path}.*epoch 1, key groups 3 to 5"):
        savepoints.create(job.storage, folder(tmp_path / "saved"), pause_s=0)
    assert not (tmp_path / "saved" / s.FILE).exists()


def test_what_vanishes_while_a_running_pipeline_is_saved_is_taken_anew(job, tmp_path):
    """The job finishes an epoch whose snapshot supersedes a file, between manifest and copy."""

    class Racing(FileStorage):
        def get(self, path: str) -> bytes | None:
            if path == job.state.files[0].path and job.epoch == 2:
                os.unlink(job.folder / path)
                job.state = replace(job.state, files=job.state.files[1:])
                job.run()
            return super().get(path)

    saved = savepoints.create(Racing(str(job.folder)), folder(tmp_path / "saved"), pause_s=0)

    assert saved.manifest.checkpoint_id == 3
    assert entries_of(saved.manifest.state[0], ALL, folder(tmp_path / "saved")) == job.entries()


def test_of_a_checkpoint_that_a_loop_has_taken_over_no_older_epoch_is_saved_in_silence(
    job, tmp_path
):
    """Spark's log ends before the loop's epochs; whether the newest counts, Kafka knows."""
    job.run(2)
    for path in ("offsets/3", "commits/3", "offsets/4", "commits/4"):
        (job.folder / path).unlink()
    job.storage.put(OWN_LOOP, b"")

    with pytest.raises(OptionError, match=r"epoch 4 has left a manifest.*--epoch 3"):
        savepoints.create(job.storage, folder(tmp_path / "saved"))
    assert not (tmp_path / "saved" / s.FILE).exists()
    saved = savepoints.create(job.storage, folder(tmp_path / "saved"), epoch=3)
    assert saved.manifest.checkpoint_id == 3, "the next one goes on from it"


def test_what_a_power_cut_took_of_sparks_log_makes_no_other_checkpoint_of_it(job, tmp_path):
    """`offsets/N` is durable before the manifest; `commits/N` may go, of any number of epochs."""
    job.run(7)
    for epoch in range(3, 10):
        (job.folder / f"commits/{epoch}").unlink()

    assert savepoints.create(job.storage, folder(tmp_path / "saved")).manifest.checkpoint_id == 2


def test_an_epoch_that_spark_has_not_logged_is_not_saved(job, tmp_path):
    """Kafka may have committed it, or not."""
    os.unlink(job.folder / "commits/2")

    saved = savepoints.create(job.storage, folder(tmp_path / "saved"))

    assert saved.manifest.checkpoint_id == 1


class TestSeveralAttempts:
    """An attempt of the newest epoch failed behind its manifest."""

    @pytest.fixture
    def right(self, job) -> str:
        left = job.manifest()
        job.storage.put(m.manifest_path(left, "left"), left.encode())
        return next(each for each in job.storage.names(m.FOLDER) if each.endswith("n2.json"))

    def test_kafka_tells_which_counts(self, job, tmp_path, right):
        token = Token(2, "first-lineage", "s3://c", right)
        saved = savepoints.create(
            job.storage,
            folder(tmp_path / "saved"),
            ask_kafka=lambda *of: {("t", "first-lineage"): Heard(token)}[of],
        )

        assert saved.manifest_path == right

    def test_nobody_guesses(self, job, tmp_path, right):
        with pytest.raises(OptionError, match=r"2 manifests of epoch 2.*--bootstrap-servers"):
            savepoints.create(job.storage, folder(tmp_path / "saved"))
        for token in (None, Token(3, "first-lineage", "s3://c", "tallystick/3-x.json")):
            with pytest.raises(DataLossError, match="which one counts cannot be told"):
                savepoints.create(
                    job.storage,
                    folder(tmp_path / "saved"),
                    ask_kafka=lambda _, __, t=token: Heard(t),
                )


@pytest.mark.parametrize("comes_late", [False, True])
def test_the_next_epoch_tells_which_attempt_it_went_on_from(job, tmp_path, comes_late):
    """Where the newest one is damaged, the one before it may have two manifests."""
    state = job.state
    job.state = replace(state, trail=(*state.trail[:-1], Version(2, "failed")))
    for nonce in ("left", "a0", "zz"):
        job.storage.put(job.manifest_path(nonce), job.manifest().encode())
    job.state = state

    def ask(_: str, lineage: str) -> Heard:
        job.run()
        os.unlink(job.folder / "commits/3")
        return Heard(Token(3, lineage, "s3://c", "tallystick/000000000003-3-n3.json"))

    if comes_late:
        saved = savepoints.create(job.storage, folder(tmp_path / "saved"), ask_kafka=ask)
    else:
        job.run()
        saved = savepoints.create(job.storage, folder(tmp_path / "saved"), epoch=2)

    assert saved.manifest_path.endswith("2-n2.json")


def test_an_older_epoch_is_saved_where_the_newest_is_damaged(job, tmp_path):
    (job.folder / job.state.files[2].path).unlink()
    with pytest.raises(StateFileError):
        savepoints.create(job.storage, folder(tmp_path / "saved"), pause_s=0)

    saved = savepoints.create(job.storage, folder(tmp_path / "saved"), epoch=1)

    assert saved.manifest.checkpoint_id == 1
    assert set(saved.spark) == {"offsets/0", "offsets/1", "commits/1"}
    with pytest.raises(OptionError, match="no committed epoch 7; the newest is 2"):
        savepoints.create(job.storage, folder(tmp_path / "other"), epoch=7)


def test_a_reference_is_not_made_of_an_epoch_that_is_about_to_be_collected(job, tmp_path):
    class Overtaken(FileStorage):
        def put(self, path: str, data: bytes) -> None:
            if path.startswith(s.CLAIMS) and job.epoch == 2:
                job.run(10)
            super().put(path, data)

    saved = savepoints.create(
        Overtaken(str(job.folder)), folder(tmp_path / "saved"), reference=True, pause_s=0
    )

    assert saved.manifest.checkpoint_id == 12
    assert job.storage.names(s.CLAIMS) == [saved.claim]
    with pytest.raises(StateFileError, match=r"has reached epoch 12.*Copy them, without"):
        savepoints.create(job.storage, folder(tmp_path / "old"), reference=True, epoch=2, pause_s=0)
    oldest = savepoints.create(job.storage, folder(tmp_path / "old"), reference=True, epoch=3)
    assert oldest.manifest.checkpoint_id == 3


def test_folders_that_are_in_use_are_refused_and_left_as_they_are(job, tmp_path):
    savepoints.create(job.storage, folder(tmp_path / "saved"))
    before = content(tmp_path)

    with pytest.raises(OptionError, match="holds a savepoint already"):
        savepoints.create(job.storage, folder(tmp_path / "saved"))
    with pytest.raises(OptionError, match="is not empty"):
        savepoints.restore(folder(tmp_path / "saved"), job.storage)
    for strange in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(OptionError, match="no savepoint"):
            savepoints.restore(folder(strange), folder(tmp_path / "new"))
        with pytest.raises(OptionError, match="no committed epoch"):
            savepoints.create(folder(strange), folder(tmp_path / "other"))
    assert content(tmp_path) == before


def test_a_live_checkpoint_is_no_place_for_a_savepoint(job, tmp_path):
    """What is deleted with a savepoint would be its state."""
    other = Job(tmp_path / "other")
    other.run(2)
    savepoints.create(job.storage, folder(tmp_path / "saved"), reference=True)
    before = content(tmp_path)

    for used in (job.storage, other.storage):
        with pytest.raises(OptionError, match="is not empty, it has offsets, commits"):
            savepoints.create(job.storage, used)
        with pytest.raises(OptionError, match="is not empty"):
            migrate(folder(tmp_path / "saved"), used, {"counts": 7}, tmp_path)
    with pytest.raises(OptionError, match="holds a savepoint already"):
        savepoints.restore(folder(tmp_path / "saved"), folder(tmp_path / "saved"))
    assert content(tmp_path) == before


def test_only_what_a_savepoint_names_is_deleted_with_it(job, tmp_path):
    savepoints.create(job.storage, folder(tmp_path / "saved"))
    theirs = tmp_path / "saved" / "keyed-state" / "counts" / "of-somebody-else"
    theirs.write_bytes(b"x")
    (tmp_path / "saved" / "metadata").write_bytes(b"{}")
    with pytest.raises(OptionError, match="is a checkpoint too"):
        savepoints.delete(folder(tmp_path / "saved"))
    (tmp_path / "saved" / "metadata").unlink()

    savepoints.delete(folder(tmp_path / "saved"))

    assert content(tmp_path / "saved") == {"keyed-state/counts/of-somebody-else": b"x"}


def test_a_restore_that_was_killed_leaves_no_folder_that_counts_as_new(job, tmp_path):
    savepoints.create(job.storage, folder(tmp_path / "saved"))

    class Dying(FileStorage):
        puts = 0

        def put(self, path: str, data: bytes) -> None:
            Dying.puts += 1
            if Dying.puts > 2:
                raise KeyboardInterrupt
            super().put(path, data)

        def delete(self, path: str) -> None:
            """It is dead."""

    with pytest.raises(KeyboardInterrupt):
        savepoints.restore(folder(tmp_path / "saved"), Dying(str(tmp_path / "new")))

    assert seed_in(tmp_path / "new").origin is not None
    with pytest.raises(OptionError, match="is not empty, it has tallystick, keyed-state"):
        savepoints.restore(folder(tmp_path / "saved"), folder(tmp_path / "new"))


def test_what_a_copy_reads_is_claimed_meanwhile_and_no_longer(job, tmp_path):
    """Else the collector of a running pipeline would win over every slow copy."""

    class Watched(FileStorage):
        held: tuple[StepState, ...] = ()

        def get(self, path: str) -> bytes | None:
            if path.startswith("keyed-state/"):
                (claim,) = job.storage.names(s.CLAIMS)
                Watched.held = s.decode_claim(job.storage.get(claim) or b"", claim).state
            return super().get(path)

    savepoints.create(Watched(str(job.folder)), folder(tmp_path / "saved"))

    assert Watched.held == (job.state,)
    assert job.storage.names(s.CLAIMS) == []


def test_a_copy_may_last_longer_than_spark_keeps_its_log(job, tmp_path):
    class Purging(FileStorage):
        def get(self, path: str) -> bytes | None:
            if path.startswith("keyed-state/"):
                for folder in ("offsets", "commits"):
                    job.storage.delete(f"{folder}/2")
            return super().get(path)

    saved = savepoints.create(Purging(str(job.folder)), folder(tmp_path / "saved"), pause_s=0)

    assert set(saved.spark) == {"offsets/1", "offsets/2", "commits/2"}


def test_a_checkpoint_that_nobody_may_write_to_is_copied_without_a_claim(job, tmp_path):
    class ReadOnly(FileStorage):
        def put(self, path: str, data: bytes) -> None:
            raise StorageError("no right")

    saved = savepoints.create(ReadOnly(str(job.folder)), folder(tmp_path / "saved"))

    assert saved.manifest.checkpoint_id == 2


@pytest.mark.parametrize("reference", [False, True])
def test_what_ends_a_command_leaves_no_claim_and_no_files(job, tmp_path, reference):
    class Stopped(FileStorage):
        def put(self, path: str, data: bytes) -> None:
            if path == s.FILE:
                raise KeyboardInterrupt
            super().put(path, data)

    with pytest.raises(KeyboardInterrupt):
        savepoints.create(job.storage, Stopped(str(tmp_path / "saved")), reference=reference)

    assert job.storage.names(s.CLAIMS) == []
    assert content(tmp_path / "saved") == {}


def test_a_claim_that_a_killed_command_left_ends_with_the_next_try(job, tmp_path):
    left = s.Claim((tmp_path / "saved").as_uri(), "2026", (job.state,))
    others = s.claim_path("other"), s.claim_path(f"{s.TRY}other")
    job.storage.put(s.claim_path(f"{s.TRY}left"), left.encode())
    for path in others:
        job.storage.put(path, replace(left, holder="file:///other").encode())

    saved = savepoints.create(job.storage, folder(tmp_path / "saved"), reference=True)

    assert set(job.storage.names(s.CLAIMS)) == {saved.claim, *others}


def test_a_savepoint_that_is_whole_has_no_claim_of_the_command_that_made_it(job, tmp_path):
    """Nobody may end it as long as the savepoint is there, and its files are never collected."""
    saved = tmp_path / "saved"

    class Killed(FileStorage):
        def put(self, path: str, data: bytes) -> None:
            super().put(path, data)
            if path == s.FILE:
                raise KeyboardInterrupt

        def delete(self, path: str) -> None:
            if not (saved / s.FILE).exists():  # then it is dead
                super().delete(path)

    with pytest.raises(KeyboardInterrupt):
        savepoints.create(Killed(str(job.folder)), Killed(str(saved)))

    assert savepoints.read(folder(saved))
    assert job.storage.names(s.CLAIMS) == []


def test_who_may_write_to_a_checkpoint_and_not_delete_saves_it_all_the_same(job, tmp_path, caplog):
    class Kept(FileStorage):
        def delete(self, path: str) -> None:
            raise StorageError("no right to delete")

    savepoints.create(Kept(str(job.folder)), folder(tmp_path / "saved"))

    assert savepoints.read(folder(tmp_path / "saved"))
    assert "is left, remove it by hand: no right to delete" in caplog.text


def test_a_savepoint_that_was_moved_keeps_its_claim_when_another_takes_its_place(job, tmp_path):
    """Else its files would be collected, and nobody would hear of it before they are needed."""
    moved = savepoints.create(job.storage, folder(tmp_path / "saved"), reference=True)
    (tmp_path / "saved").rename(tmp_path / "moved")

    saved = savepoints.create(job.storage, folder(tmp_path / "saved"), reference=True)

    assert {*job.storage.names(s.CLAIMS)} == {moved.claim, saved.claim}


@pytest.mark.parametrize("name", ["C:\\saved", "a\nb"])
def test_a_folder_that_nothing_could_refer_to_is_refused_for_what_it_is(job, tmp_path, name):
    strange = folder(tmp_path / name)
    savepoints.create(job.storage, folder(tmp_path / "saved"))

    for command in (
        lambda: savepoints.create(job.storage, strange),
        lambda: savepoints.create(job.storage, strange, reference=True),
        lambda: savepoints.restore(folder(tmp_path / "saved"), strange, claim=True),
    ):
        with pytest.raises(OptionError, match="a backslash or a control character"):
            command()
    assert job.storage.names(s.CLAIMS) == []
    assert content(tmp_path / name) == {}


def test_a_query_with_state_of_sparks_own_is_not_saved(job, tmp_path):
    job.storage.put("state/0/0/3.delta", b"x")

    with pytest.raises(OptionError, match="state of Spark's own"):
        savepoints.create(job.storage, folder(tmp_path / "saved"))
    assert content(tmp_path / "saved") == {}


@pytest.mark.parametrize("damage", ["missing", "torn", "longer"])
def test_files_that_are_only_named_must_be_there_as_they_were_written(job, tmp_path, damage):
    savepoints.create(job.storage, folder(tmp_path / "saved"))
    savepoints.create(job.storage, folder(tmp_path / "named"), reference=True)
    before = content(tmp_path / "saved")
    file = job.state.files[1]
    for path in (job.folder / file.path, tmp_path / "saved" / file.path):
        data = path.read_bytes()
        path.unlink()
        if damage != "missing":
            path.write_bytes(data[:-7] if damage == "torn" else data + b"x")
    claims = job.storage.names(s.CLAIMS)

    with pytest.raises(StateFileError, match=rf"{file.path}.*(missing|damaged)"):
        savepoints.create(job.storage, folder(tmp_path / "new"), reference=True, pause_s=0)
    assert job.storage.names(s.CLAIMS) == claims
    for saved in ("saved", "named"):
        with pytest.raises(StateFileError, match=rf"{file.path}.*(missing|damaged)"):
            savepoints.restore(folder(tmp_path / saved), folder(tmp_path / "new"), claim=True)
        assert folder(tmp_path / saved).names(s.CLAIMS) == []
    assert content(tmp_path / "new") == {}
    assert before.keys() >= content(tmp_path / "saved").keys()


def test_a_savepoint_whose_user_cannot_be_asked_is_deleted_by_force_only(job, tmp_path):
    """Its folder may be on a disk that is not mounted here."""
    savepoints.create(job.storage, folder(tmp_path / "saved"))
    savepoints.restore(folder(tmp_path / "saved"), folder(tmp_path / "disk" / "new"), claim=True)
    (tmp_path / "disk").rename(tmp_path / "unmounted")

    with pytest.raises(OptionError, match=r"disk/new, which cannot be read from here"):
        savepoints.delete(folder(tmp_path / "saved"))
    savepoints.delete(folder(tmp_path / "saved"), force=True)
    assert content(tmp_path / "saved") == {}


def test_a_damaged_description_is_refused(job, tmp_path):
    savepoints.create(job.storage, folder(tmp_path / "saved"))
    path = tmp_path / "saved" / s.FILE
    path.write_bytes(path.read_bytes().replace(b"counts", b"countz"))

    with pytest.raises(ManifestError, match="fail their checksum"):
        savepoints.restore(folder(tmp_path / "saved"), folder(tmp_path / "new"))


def test_the_savepoints_of_a_folder_are_found(job, tmp_path):
    for name in ("b", "a"):
        savepoints.create(job.storage, folder(tmp_path / "all" / name))

    found = savepoints.find(str(tmp_path / "all"))

    assert [saved.name for _, saved in found] == ["a", "b"]
    assert [savepoints.read(FileStorage(where)) for where, _ in found] == [s for _, s in found]


def test_a_neighbour_that_cannot_be_read_is_told_and_hides_no_savepoint(job, tmp_path):
    savepoints.create(job.storage, folder(tmp_path / "all" / "good"))
    (tmp_path / "all" / "file:").mkdir()
    (tmp_path / "all" / "circle").symlink_to("circle")
    (tmp_path / "all" / "strange" / s.FILE).mkdir(parents=True)

    found = dict(savepoints.find(str(tmp_path / "all")))

    names = {where.rpartition("/")[2]: saved for where, saved in found.items()}
    assert names.keys() == {"good", "file%3A", "circle", "strange"}
    assert names.pop("good") == savepoints.read(folder(tmp_path / "all" / "good"))
    for name, error in names.items():
        assert isinstance(error, TallystickError)
        assert name.replace("%3A", ":") in str(error)
