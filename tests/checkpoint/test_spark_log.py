"""Spark's log, kept in line with the manifests: what is synced, mended and put right."""

from dataclasses import replace
from pathlib import Path

import pytest

from tallystick.checkpoint.decision_log import DecisionLog
from tallystick.checkpoint.newest import Ask, Epochs, TokenAnswer, newest_committed
from tallystick.checkpoint.spark_log import (
    COMMITS,
    METADATA,
    OFFSETS,
    LoggedBatch,
    SparkLog,
    parse_entry,
)
from tallystick.epoch import manifest as m
from tallystick.epoch.manifest import CHECKPOINT, KAFKA, Manifest
from tallystick.epoch.micro_batches import failed_path, partial_path
from tallystick.epoch.tokens import Token
from tallystick.errors import (
    DataLossError,
    FencedError,
    ManifestError,
    OptionError,
    StateFileError,
)
from tallystick.ops import savepoints
from tallystick.ops.inspection import KAFKA_KNOWS, UNDECIDED, inspect
from tallystick.storage.file_storage import FileStorage, SystemClock
from tallystick.values import Producer

HEAD = '{"batchWatermarkMs":7,"batchTimestampMs":1795325666084,"conf":{"a":"b"}}'


class Checkpoint:
    """A checkpoint whose epochs each read one record more."""

    def __init__(self, folder: Path, epochs: int) -> None:
        self.folder = folder
        self.storage = FileStorage(str(folder))
        self.log = SparkLog(self.storage)
        for epoch in range(epochs):
            self.log_offsets(epoch, epoch + 1)
            (folder / f"offsets/.{epoch}.crc").write_bytes(b"of Hadoop")
            self.storage.put(f"commits/{epoch}", b'v1\n{"nextBatchWatermarkMs":0}')
            self.leave_manifest(epoch, epoch + 1)

    def log_offsets(self, epoch: int, end: int) -> None:
        self.storage.put(f"offsets/{epoch}", f"v1\n{HEAD}\n{self.text(end)}".encode())

    def leave_manifest(self, epoch: int, end: int, nonce: str = "ab") -> None:
        entry = Manifest(epoch, "p", "l", (self.text(end),), (), Producer("t", 1, epoch))
        self.storage.put(m.manifest_path(entry, nonce), entry.encode())

    @staticmethod
    def text(end: int) -> str:
        return f'{{"to": {end}}}'

    def ends(self) -> dict[int, str | None]:
        """What Spark would read."""
        names = (path.rpartition("/")[2] for path in self.storage.names("offsets"))
        entries = {int(n): parse_entry(self.storage.get(f"offsets/{n}")) for n in names}
        return {n: None if entry is None else entry.sources[0] for n, entry in entries.items()}

    def commits(self) -> list[str]:
        return self.storage.names("commits")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path, 4)


WHOLE = {epoch: Checkpoint.text(epoch + 1) for epoch in range(4)}
TORN = [b"", b"v1", bytes(200), f"v1\n{HEAD}\n".encode(), f"v1\n{HEAD[:20]}\n{{}}".encode()]


def test_a_whole_log_is_left_alone(checkpoint):
    before = {path: path.read_bytes() for path in checkpoint.folder.rglob("*") if path.is_file()}
    checkpoint.log.mend()

    after = {path: path.read_bytes() for path in checkpoint.folder.rglob("*") if path.is_file()}
    assert after == before


@pytest.mark.parametrize("data", [None, *TORN])
@pytest.mark.parametrize("epochs", [(3,), (2,), (2, 3)])
def test_lost_and_torn_entries_of_epochs_with_a_manifest_are_written_again(
    checkpoint, data, epochs
):
    for epoch in epochs:
        path = checkpoint.folder / f"offsets/{epoch}"
        path.unlink()
        if data is not None:
            path.write_bytes(data)
    checkpoint.log.mend()

    assert checkpoint.ends() == WHOLE
    assert checkpoint.log.batch(3) == LoggedBatch(("v1", HEAD), (WHOLE[3],))
    assert all(not (checkpoint.folder / f"offsets/.{epoch}.crc").exists() for epoch in epochs)


@pytest.mark.parametrize("data", TORN)
def test_torn_entries_of_epochs_that_nothing_is_decided_of_are_removed(checkpoint, data):
    checkpoint.storage.put("offsets/4", data)
    checkpoint.log_offsets(5, 6)  # Spark could not go on from it: it reads the one before
    checkpoint.storage.put("commits/4", b"v1\n{}")
    checkpoint.log.mend()

    assert checkpoint.ends() == WHOLE
    assert checkpoint.commits() == [f"commits/{epoch}" for epoch in range(4)]


@pytest.mark.parametrize("data", [b"", b"v1\n", bytes(40)])
def test_a_torn_commit_is_removed_so_that_spark_asks_again(checkpoint, data):
    checkpoint.storage.put("commits/2", data)
    checkpoint.storage.put("commits/3", data)
    checkpoint.log.mend()

    assert checkpoint.commits() == ["commits/0", "commits/1"]
    assert checkpoint.ends() == WHOLE


def test_what_cannot_be_told_or_was_set_back_further_is_left_to_the_verdict(checkpoint):
    checkpoint.leave_manifest(3, 9, nonce="cd")  # only Kafka knows which of the two counts
    checkpoint.storage.delete("offsets/3")
    checkpoint.log.mend()
    assert set(checkpoint.ends()) == {0, 1, 2}

    for epoch in (1, 2):
        checkpoint.storage.delete(f"offsets/{epoch}")
    checkpoint.log.mend()
    assert set(checkpoint.ends()) == {0}


def test_putting_right_forgets_what_was_planned_from_the_wrong_position(checkpoint):
    checkpoint.log_offsets(3, 77)
    checkpoint.log_offsets(4, 99)
    checkpoint.leave_manifest(4, 99)  # of an attempt that was never committed
    checkpoint.storage.put("commits/4", b"v1\n{}")
    checkpoint.log.put_right(3, (checkpoint.text(4),), lambda: None)

    assert checkpoint.ends() == WHOLE
    assert len(checkpoint.commits()) == 4
    checkpoint.log.mend()
    assert checkpoint.ends() == WHOLE


def test_who_was_replaced_puts_nothing_right(checkpoint):
    checkpoint.leave_manifest(4, 99)
    checkpoint.log_offsets(4, 99)
    before = {path: path.read_bytes() for path in checkpoint.folder.rglob("*") if path.is_file()}

    def refuse() -> None:
        raise FencedError("another run owns it")

    with pytest.raises(FencedError):
        checkpoint.log.put_right(3, (checkpoint.text(7),), refuse)
    after = {path: path.read_bytes() for path in checkpoint.folder.rglob("*") if path.is_file()}
    assert after == before


def test_what_comes_behind_the_proof_that_one_is_the_owner_is_another_runs(checkpoint):
    checkpoint.leave_manifest(4, 99)
    checkpoint.log_offsets(4, 99)

    def take_over() -> None:
        checkpoint.leave_manifest(4, 5, nonce="of-a-successor")
        checkpoint.log_offsets(5, 6)

    checkpoint.log.put_right(3, (checkpoint.text(4),), take_over)

    (path,) = [path for path in checkpoint.storage.names(m.FOLDER) if m.epoch_of(path) > 3]
    assert "of-a-successor" in path
    assert 5 in checkpoint.ends()


def test_an_empty_metadata_of_a_checkpoint_that_never_was_used_is_removed(tmp_path):
    used, new = Checkpoint(tmp_path / "used", 1), Checkpoint(tmp_path / "new", 0)
    for run in (used, new):
        run.storage.put("metadata", b"")
        run.log.mend()

    assert new.storage.get("metadata") is None
    assert used.storage.get("metadata") == b"", "the query's id is needed: a person must look"


def test_what_a_file_source_of_sparks_keeps_of_an_epoch_is_durable_before_the_entry(
    checkpoint, monkeypatch
):
    synced: list[str] = []
    monkeypatch.setattr(FileStorage, "sync", lambda _, path: synced.append(path))
    entry = f'v1\n{HEAD}\n{checkpoint.text(9)}\n{{"logOffset":19}}'
    checkpoint.storage.put("offsets/4", entry.encode())
    checkpoint.log.sync(4)

    assert synced == [
        *("metadata", "offsets/3", "sources/1/19", "sources/1/19.compact", "offsets/4"),
    ]


def test_each_entry_is_synced_once_in_a_run(checkpoint, monkeypatch):
    synced: list[str] = []
    monkeypatch.setattr(FileStorage, "sync", lambda _, path: synced.append(path))
    for epoch in (1, 2, 5):  # 3 and 4 were left out
        checkpoint.log.sync(epoch)

    assert synced == ["metadata", *(f"offsets/{epoch}" for epoch in (0, 1, 2, 4, 5))]


def files_of(storage: FileStorage) -> dict[str, bytes | None]:
    paths = [*storage.names(OFFSETS), *storage.names(COMMITS)]
    return {path: storage.get(path) for path in paths}


@pytest.mark.parametrize("first", [0, 201], ids=["all are there", "Spark has removed the oldest"])
def test_a_log_that_only_looks_damaged_is_left_alone(tmp_path: Path, first: int) -> None:
    """All micro-batches but one were left out by a user's function; a source names odd paths."""
    storage = FileStorage(str(tmp_path))
    odd = "".join(map(chr, (0x2028, 0x85, 0x1C, 0x0B)))
    source = f'{{"path":"{odd[:2]}"}}'
    committed = Manifest(0, "p", "l", (source,), (), Producer("t", 1, 1))
    storage.put(m.manifest_path(committed, "n"), committed.encode())
    for epoch in range(first, first + 3):
        storage.put(f"{OFFSETS}/{epoch}", f"v1\n{{}}\n{source}\n-{odd}".encode())
        storage.put(f"{COMMITS}/{epoch}", b"v1\n{}")
    before = files_of(storage)
    SparkLog(storage).mend()

    assert files_of(storage) == before
    assert SparkLog(storage).batch(first).sources == (source, f"-{odd}")


def test_lines_end_as_spark_reads_them() -> None:
    for end in ("\n", "\r\n", "\r"):
        entry = parse_entry(end.join(["v1", "{}", "-", "7", ""]).encode())
        assert entry is not None
        assert entry.sources == ("-", "7")


@pytest.mark.parametrize("remains", [b"", bytes(45)])
def test_metadata_that_a_power_cut_emptied_goes_while_nothing_is_decided(
    tmp_path: Path, remains: bytes
) -> None:
    storage = FileStorage(str(tmp_path))
    storage.put(METADATA, remains)
    SparkLog(storage).mend()

    assert storage.get(METADATA) is None


def test_what_was_planned_behind_a_hole_is_planned_again(checkpoint):
    """A query whose function catches our error goes on, though its log was put right."""
    for epoch in (5, 6):
        checkpoint.log_offsets(epoch, 40 + epoch)
        checkpoint.storage.put(f"commits/{epoch}", b'v1\n{"nextBatchWatermarkMs":0}')

    checkpoint.log.mend()

    assert checkpoint.ends() == WHOLE
    assert checkpoint.commits() == [f"commits/{epoch}" for epoch in range(4)]


def test_an_entry_of_another_format_is_refused_with_the_setting_that_makes_it(checkpoint):
    checkpoint.storage.put("offsets/4", f"v2\n{HEAD}\n0:{checkpoint.text(5)}".encode())

    with pytest.raises(OptionError, match=r"offsetLog.formatVersion=2"):
        checkpoint.log.batch(4)


@pytest.mark.parametrize("note", [failed_path, lambda _, path: partial_path(path)])
def test_an_epoch_whose_call_failed_is_no_savepoint_though_spark_has_logged_it(checkpoint, note):
    newest = newest_committed(checkpoint.storage)
    checkpoint.storage.put(note(newest.epoch, newest.manifest_path), b"")

    with pytest.raises(DataLossError, match="epoch 3 as done, but a call of its sink failed"):
        newest_committed(checkpoint.storage)
    assert newest_committed(checkpoint.storage, wanted=2).epoch == 2


@pytest.mark.parametrize("has_another", [False, True], ids=["no manifest", "another manifest"])
def test_nor_is_one_whose_manifest_is_of_an_earlier_attempt_than_the_one_that_failed(
    checkpoint, has_another
):
    """The first died before its commit; the function caught what the second one raised."""
    checkpoint.leave_manifest(4, 5)
    (first,) = Epochs(checkpoint.storage).of(4)
    if has_another:
        checkpoint.leave_manifest(4, 5, nonce="cd")
    last = Epochs(checkpoint.storage).of(4)[-1] if has_another else ""
    checkpoint.storage.put(failed_path(4, last), b"")
    checkpoint.log_offsets(4, 5)
    checkpoint.storage.put("commits/4", b"v1\n{}")

    def says(_: str, lineage: str) -> TokenAnswer:
        return TokenAnswer(Token(4, lineage, checkpoint.storage.location, first))

    with pytest.raises(DataLossError, match="epoch 4 as done, but a call of its sink failed"):
        newest_committed(checkpoint.storage, says)
    report = inspect(checkpoint.storage)
    assert {output.standing for output in report.outputs if output.epoch == 4} == {KAFKA_KNOWS}
    assert any("epoch 4 as done, but a call of its sink failed" in note for note in report.notes)
    assert newest_committed(checkpoint.storage, wanted=3).epoch == 3

    later = Manifest(5, "p", "l", ("6",), (), Producer("t", 1, 5), base_path=first)
    checkpoint.storage.put(m.manifest_path(later, "ef"), later.encode())
    assert newest_committed(checkpoint.storage, wanted=4).manifest_path == first


def test_behind_micro_batches_that_were_left_out_the_newest_written_one_is_saved_and_shown(
    checkpoint, tmp_path
):
    for epoch in (4, 5):
        checkpoint.log_offsets(epoch, epoch + 1)
        checkpoint.storage.put(f"commits/{epoch}", b'v1\n{"nextBatchWatermarkMs":0}')
    checkpoint.storage.put("metadata", b'{"id":"l"}')
    restored = FileStorage(str(tmp_path / "restored"))

    assert inspect(checkpoint.storage).epoch == 3
    savepoints.create(checkpoint.storage, FileStorage(str(tmp_path / "kept")))
    savepoints.restore(FileStorage(str(tmp_path / "kept")), restored)
    assert restored.names("offsets") == ["offsets/2", "offsets/3"]

    checkpoint.storage.put(failed_path(5), b"")  # it was not left out
    for look in (newest_committed, inspect):
        with pytest.raises(DataLossError, match="epoch 5 as done, but a call of its sink failed"):
            look(checkpoint.storage)


def test_what_kafka_does_not_tell_of_a_doubtful_epoch_is_not_taken_for_undecided(checkpoint):
    """Also after micro-batches that were left out since."""
    checkpoint.storage.put(failed_path(3), b"")
    for _ in range(2):
        report = inspect(checkpoint.storage, ask=lambda _, __: TokenAnswer(None, "out of reach"))
        assert {output.standing for output in report.outputs if output.epoch == 3} == {KAFKA_KNOWS}
        checkpoint.log_offsets(4, 5)
        checkpoint.storage.put("commits/4", b"v1\n{}")


@pytest.mark.parametrize("decided_by", [KAFKA, CHECKPOINT])
def test_what_its_decider_denies_is_no_savepoint_though_spark_has_logged_it(checkpoint, decided_by):
    """A killed run left a manifest, and the function left the micro-batch out since."""
    for path in Epochs(checkpoint.storage).paths:
        data = checkpoint.storage.get(path)
        changed = replace(m.decode(data, path), decided_by=decided_by)
        checkpoint.storage.put(path, changed.encode())

    def says(epoch: int) -> dict[str, Ask]:
        (path,) = Epochs(checkpoint.storage).of(epoch)
        token = Token(epoch, "l", checkpoint.storage.location, path)
        if decided_by == CHECKPOINT:
            log = DecisionLog(checkpoint.storage, SystemClock(), "t")
            log.decide(log.fence(None), token)
            return {}
        return {"ask": lambda _, __: TokenAnswer(token)}

    decider = says(2)
    with pytest.raises(DataLossError, match=r"epoch 3 as done, and its decider knows of earlier"):
        newest_committed(checkpoint.storage, **decider)
    assert newest_committed(checkpoint.storage, **decider, wanted=2).epoch == 2
    report = inspect(checkpoint.storage, **decider)
    assert {output.epoch: output.standing for output in report.outputs}[3] == UNDECIDED
    assert any("its decider knows of earlier epochs only" in note for note in report.notes)

    decider = says(3)
    assert newest_committed(checkpoint.storage, **decider).epoch == 3
    assert inspect(checkpoint.storage, **decider).notes == ()


def test_behind_more_than_spark_logs_a_savepoint_says_what_can_be_done(checkpoint, tmp_path):
    for epoch in range(4, 8):
        checkpoint.log_offsets(epoch, epoch + 1)
        checkpoint.storage.put(f"commits/{epoch}", b"v1\n{}")
    for epoch in range(4):
        checkpoint.storage.delete(f"offsets/{epoch}")

    with pytest.raises(StateFileError, match=r"a hundred micro-batches, .* Try again when one"):
        savepoints.create(checkpoint.storage, FileStorage(str(tmp_path / "kept")))


def test_a_decided_epoch_whose_manifest_was_removed_is_not_taken_for_left_out(checkpoint):
    log = DecisionLog(checkpoint.storage, SystemClock(), "t")
    path = "tallystick/000000000004-4-gone.json"
    token = Token(4, "l", checkpoint.storage.location, path)
    log.decide(log.fence(None), token)
    checkpoint.log_offsets(4, 5)
    checkpoint.storage.put("commits/4", b"v1\n{}")

    for look in (newest_committed, inspect):
        with pytest.raises(ManifestError, match="no manifest of it"):
            look(checkpoint.storage)
