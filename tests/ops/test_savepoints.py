"""Savepoints of checkpoints on disk: what a restored one holds, and what is refused."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tallystick.checkpoint import savepoint_folder
from tallystick.checkpoint.newest import TokenAnswer
from tallystick.epoch import manifest as m
from tallystick.epoch import savepoint as s
from tallystick.epoch.manifest import Manifest
from tallystick.epoch.micro_batches import OWN_LOOP
from tallystick.epoch.tokens import Token
from tallystick.errors import (
    DataLossError,
    ManifestError,
    OptionError,
    StateFileError,
    StorageError,
    TallystickError,
)
from tallystick.ops import savepoints
from tallystick.ops.savepoints import migrate
from tallystick.state.catalog import Version
from tallystick.storage.file_storage import FileStorage
from tests.checkpoint_on_disk import ALL, Job, entries_of, folder


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(tmp_path / "checkpoint")
    job.run(3)
    return job


def content(path: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


def seed_in(path: Path) -> Manifest:
    (name,) = folder(path).names(m.FOLDER)
    assert m.is_seed(name)
    return m.decode((path / name).read_bytes(), name)


def test_a_restored_checkpoint_has_what_spark_and_the_epochs_need(job, tmp_path):
    savepoints.create(job.storage, folder(tmp_path / "saved"))
    entries, saved_epoch = job.entries(), job.epoch
    job.run(2)
    new = tmp_path / "new"

    savepoints.restore(folder(tmp_path / "saved"), folder(new))

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
    """An attempt of the newest epoch failed after its manifest."""

    @pytest.fixture
    def right(self, job) -> str:
        prepared = job.manifest()
        job.storage.put(m.manifest_path(prepared, "left"), prepared.encode())
        return next(name for name in job.storage.names(m.FOLDER) if name.endswith("n2.json"))

    def test_kafka_tells_which_counts(self, job, tmp_path, right):
        token = Token(2, "first-lineage", "s3://c", right)
        saved = savepoints.create(
            job.storage,
            folder(tmp_path / "saved"),
            ask_kafka=lambda *of: {("t", "first-lineage"): TokenAnswer(token)}[of],
        )

        assert saved.manifest_path == right

    def test_nobody_guesses(self, job, tmp_path, right):
        with pytest.raises(OptionError, match=r"2 manifests of epoch 2.*--bootstrap-servers"):
            savepoints.create(job.storage, folder(tmp_path / "saved"))
        for token in (None, Token(3, "first-lineage", "s3://c", "tallystick/3-x.json")):
            with pytest.raises(DataLossError, match="which one counts is unknown"):
                savepoints.create(
                    job.storage,
                    folder(tmp_path / "saved"),
                    ask_kafka=lambda _, __, t=token: TokenAnswer(t),
                )


@pytest.mark.parametrize("comes_late", [False, True])
def test_the_next_epoch_tells_which_attempt_it_went_on_from(job, tmp_path, comes_late):
    """Where the newest one is damaged, the one before it may have two manifests."""
    state = job.state
    job.state = replace(state, trail=(*state.trail[:-1], Version(2, "failed")))
    for nonce in ("left", "a0", "zz"):
        job.storage.put(job.manifest_path(nonce), job.manifest().encode())
    job.state = state

    def ask(_: str, lineage: str) -> TokenAnswer:
        job.run()
        os.unlink(job.folder / "commits/3")
        return TokenAnswer(Token(3, lineage, "s3://c", "tallystick/000000000003-3-n3.json"))

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
    savepoints.create(job.storage, folder(tmp_path / "saved"))
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


def test_a_copy_may_last_longer_than_spark_keeps_its_log(job, tmp_path):
    class Purging(FileStorage):
        def get(self, path: str) -> bytes | None:
            if path.startswith("keyed-state/"):
                for folder in ("offsets", "commits"):
                    job.storage.delete(f"{folder}/2")
            return super().get(path)

    saved = savepoints.create(Purging(str(job.folder)), folder(tmp_path / "saved"), pause_s=0)

    assert set(saved.spark) == {"offsets/1", "offsets/2", "commits/2"}


def test_nothing_is_written_to_the_checkpoint_that_is_saved(job, tmp_path):
    before = content(job.folder)

    class ReadOnly(FileStorage):
        def put(self, path: str, data: bytes) -> None:
            raise StorageError("no right")

        def put_new(self, path: str, data: bytes) -> bool:
            raise StorageError("no right")

        def delete(self, path: str) -> None:
            raise StorageError("no right")

    saved = savepoints.create(ReadOnly(str(job.folder)), folder(tmp_path / "saved"))

    assert saved.manifest.checkpoint_id == 2
    assert content(job.folder) == before


def test_what_ends_a_command_leaves_no_files(job, tmp_path):
    class Stopped(FileStorage):
        def put(self, path: str, data: bytes) -> None:
            if path == s.FILE:
                raise KeyboardInterrupt
            super().put(path, data)

    with pytest.raises(KeyboardInterrupt):
        savepoints.create(job.storage, Stopped(str(tmp_path / "saved")))

    assert content(tmp_path / "saved") == {}


class Meanwhile(FileStorage):
    """A checkpoint whose pipeline goes on: something happens before some operations."""

    happens: Callable[[str], None]

    def get(self, path: str) -> bytes | None:
        self.happens(path)
        return super().get(path)

    def names(self, path: str) -> list[str]:
        self.happens(path)
        return super().names(path)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One file at a time, so that a run repeats; durability is not what it is about."""
    monkeypatch.setattr(savepoint_folder, "FILES_AT_A_TIME", 1)
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.usefixtures("quick")
def test_a_savepoint_of_a_running_pipeline_is_one_whole_epoch(tmp_path):
    """Its collector knows nothing of the copy: epochs, merges and collections come in between."""
    retried = sum(save_while_it_runs(seed, tmp_path / str(seed)) for seed in range(20))
    assert retried >= 5, "else the collector was never faster, and the test shows nothing"


def save_while_it_runs(seed: int, place: Path) -> bool:
    """Save a pipeline that runs by chance; return whether the first try came too late."""
    random, job, saved_entries = Random(seed), Job(place / "checkpoint"), {}
    likelihood, epochs_max = random.choice([(0.02, 30), (0.05, 15), (0.1, 8)])

    def run(epochs: int) -> None:
        for _ in range(epochs):
            job.run(files_min=2)
            saved_entries[job.epoch] = job.entries()
        job.clear_up()

    def happens(path: str) -> None:
        if random.random() < likelihood:
            run(random.randint(1, epochs_max))

    run(random.randint(1, 40))
    newest = job.epoch
    checkpoint = Meanwhile(str(job.folder))
    checkpoint.happens = happens

    saved = savepoints.create(checkpoint, folder(place / "saved"), pause_s=0)

    (step,) = saved.manifest.state
    assert (
        entries_of(step, ALL, folder(place / "saved"))
        == saved_entries[saved.manifest.checkpoint_id]
    )
    copies = {path for path in content(place / "saved") if path.startswith("keyed-state/")}
    assert copies == {file.path for file in step.files}, "nothing of earlier tries is left"
    return saved.manifest.checkpoint_id > newest


@pytest.mark.usefixtures("quick")
def test_another_try_copies_only_what_is_new(job, tmp_path):
    """So the tries get shorter, and a large state can be saved though its pipeline runs."""
    job.run(5)
    first, last = job.state.files[0], job.state.files[-1]
    read = []

    def happens(path: str) -> None:
        read.append(path)
        if path == last.path and job.epoch == 7:
            job.state = replace(job.state, files=job.state.files[1:-1])
            job.run()
            os.unlink(job.folder / last.path)
            os.unlink(job.folder / first.path)

    checkpoint = Meanwhile(str(job.folder))
    checkpoint.happens = happens
    saved = savepoints.create(checkpoint, folder(tmp_path / "saved"), pause_s=0)

    assert saved.manifest.checkpoint_id == 8
    fetched = [path for path in read if path.startswith("keyed-state/")]
    assert len(fetched) == len(set(fetched)) == 9, "eight of epoch 7, and that of epoch 8"
    assert not (tmp_path / "saved" / first.path).exists(), "superseded, although it was copied"


@pytest.mark.usefixtures("quick")
def test_a_pipeline_that_is_always_faster_is_told_so(tmp_path):
    job, tried = Job(tmp_path / "checkpoint"), []
    job.run(20, files_min=2)

    def happens(path: str) -> None:
        if path == job.state.files[-1].path:
            tried.append(job.epoch)
            job.run(30, files_min=2)
            job.clear_up()

    checkpoint = Meanwhile(str(job.folder))
    checkpoint.happens = happens

    with pytest.raises(
        StateFileError, match=r"in 5 tries.*is missing.*Stop the pipeline meanwhile"
    ):
        savepoints.create(checkpoint, folder(tmp_path / "saved"), pause_s=0)
    assert tried == [19, 49, 79, 109, 139]
    assert content(tmp_path / "saved") == {}


@pytest.mark.parametrize("wrong", [b"", b"torn", None])
@pytest.mark.parametrize("is_migrated", [False, True])
def test_what_the_storage_did_not_keep_is_no_savepoint(job, tmp_path, wrong, is_migrated):
    savepoints.create(job.storage, folder(tmp_path / "good"))
    hit = []

    class Forgetful(FileStorage):
        def put(self, path: str, data: bytes) -> None:
            if path.startswith("keyed-state/") and not hit:
                hit.append(path)
                if wrong is None:
                    return
                data = data[:-8] if wrong else wrong
            super().put(path, data)

    target = Forgetful(str(tmp_path / "saved"))

    def command() -> None:
        if is_migrated:
            migrate(folder(tmp_path / "good"), target, {"counts": 7}, tmp_path)
        else:
            savepoints.create(job.storage, target)

    with pytest.raises(StateFileError, match="not as it was just written"):
        command()
    assert hit
    assert content(tmp_path / "saved") == {}


def test_a_copy_that_was_killed_is_no_savepoint(job, tmp_path):
    class Killed(FileStorage):
        def put(self, path: str, data: bytes) -> None:
            if path == s.FILE:
                raise KeyboardInterrupt
            super().put(path, data)

        def delete(self, path: str) -> None:
            """It is dead."""

    with pytest.raises(KeyboardInterrupt):
        savepoints.create(job.storage, Killed(str(tmp_path / "all/saved")))

    assert len(content(tmp_path / "all/saved")) > 1
    assert savepoints.find(str(tmp_path / "all")) == []
    for command in (
        lambda: savepoints.restore(folder(tmp_path / "all/saved"), folder(tmp_path / "new")),
        lambda: savepoints.delete(folder(tmp_path / "all/saved")),
    ):
        with pytest.raises(OptionError, match="holds no savepoint"):
            command()


@pytest.mark.parametrize("name", ["C:\\saved", "a\nb", "50%"])
def test_a_savepoint_may_have_any_name(job, tmp_path, name):
    savepoints.create(job.storage, folder(tmp_path / name))

    savepoints.restore(folder(tmp_path / name), folder(tmp_path / "new"))
    savepoints.delete(folder(tmp_path / name))

    assert entries_of(seed_in(tmp_path / "new").state[0], ALL, folder(tmp_path / "new"))


def test_a_query_with_state_of_sparks_own_is_not_saved(job, tmp_path):
    job.storage.put("state/0/0/3.delta", b"x")

    with pytest.raises(OptionError, match="state of Spark's own"):
        savepoints.create(job.storage, folder(tmp_path / "saved"))
    assert content(tmp_path / "saved") == {}


@pytest.mark.parametrize("damage", ["missing", "torn", "longer"])
def test_a_savepoint_with_a_damaged_file_is_not_restored(job, tmp_path, damage):
    savepoints.create(job.storage, folder(tmp_path / "saved"))
    path = tmp_path / "saved" / job.state.files[1].path
    data = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(data[:-7] if damage == "torn" else data + b"x")

    with pytest.raises(StateFileError, match=rf"{job.state.files[1].path}.*(missing|damaged)"):
        savepoints.restore(folder(tmp_path / "saved"), folder(tmp_path / "new"))
    assert content(tmp_path / "new") == {}


def test_a_damaged_description_is_refused(job, tmp_path):
    savepoints.create(job.storage, folder(tmp_path / "saved"))
    path = tmp_path / "saved" / s.FILE
    path.write_bytes(path.read_bytes().replace(b"counts", b"countz"))

    with pytest.raises(ManifestError, match="fail their checksum"):
        savepoints.restore(folder(tmp_path / "saved"), folder(tmp_path / "new"))


def test_the_savepoints_of_a_folder_are_found(job, tmp_path):
    for name in ("b", "a"):
        savepoints.create(job.storage, folder(tmp_path / "all" / name))

    found_savepoints = savepoints.find(str(tmp_path / "all"))

    assert [saved.name for _, saved in found_savepoints] == ["a", "b"]
    assert [savepoints.read(FileStorage(where)) for where, _ in found_savepoints] == [
        s for _, s in found_savepoints
    ]


def test_a_neighbour_that_cannot_be_read_is_told_and_hides_no_savepoint(job, tmp_path):
    savepoints.create(job.storage, folder(tmp_path / "all" / "good"))
    (tmp_path / "all" / "file:").mkdir()
    (tmp_path / "all" / "circle").symlink_to("circle")
    (tmp_path / "all" / "strange" / s.FILE).mkdir(parents=True)

    found_savepoints = dict(savepoints.find(str(tmp_path / "all")))

    names = {where.rpartition("/")[2]: saved for where, saved in found_savepoints.items()}
    assert names.keys() == {"good", "file%3A", "circle", "strange"}
    assert names.pop("good") == savepoints.read(folder(tmp_path / "all" / "good"))
    for name, error in names.items():
        assert isinstance(error, TallystickError)
        assert name.replace("%3A", ":") in str(error)
