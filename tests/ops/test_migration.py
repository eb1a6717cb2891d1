"""A savepoint in other key groups holds the same state, for every key where it is looked for."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tallystick.checkpoint import savepoint_folder
from tallystick.checkpoint.state_files import contents_of, write_changelog
from tallystick.epoch import manifest as m
from tallystick.epoch.manifest import Manifest
from tallystick.errors import OptionError, StateFileError, StorageError
from tallystick.ops import savepoints
from tallystick.state.catalog import PartitionTime, StateField, StepState, Version
from tallystick.state.entries import TIMERS_BY_TIME
from tallystick.state.file_sets import extend
from tallystick.state.key_groups import KeyGroupRange, key_groups_of
from tallystick.state.keys import KeyCodec, entry_keys
from tallystick.state.overlay import ENTRIES
from tallystick.storage.file_storage import FileStorage
from tallystick.values import Producer

KEY = KeyCodec(pa.schema([("user", pa.string())]))
FIELDS = (StateField("count", 1, "value", "", "{}"), StateField("last", 3, "value", "", "{}"))
TIMES = (PartitionTime("orders", 0, 1700, 1900), PartitionTime("orders", 1, None, 1900))
USERS = [f"user {number}" for number in range(3000)]


def entries_of(values: Mapping[str, bytes], max_parallelism: int) -> dict[bytes, bytes]:
    """A value and a timer for each user."""
    rows = pa.record_batch({"user": list(values)})
    groups, keys = key_groups_of(KEY.hash_codes(rows), max_parallelism), KEY.encode(rows)
    timed = pa.array([b"12345678" + key for key in keys.to_pylist()], pa.binary())
    entries = dict(zip(entry_keys(groups, 1, keys).to_pylist(), values.values(), strict=True))
    timers = entry_keys(groups, TIMERS_BY_TIME, timed).to_pylist()
    return dict(sorted((entries | dict.fromkeys(timers, b"")).items()))


def write(storage: FileStorage, step: StepState, epoch: int, values: Mapping[str, bytes]):
    """One epoch's changes, by one task."""
    changes = entries_of(values, step.max_parallelism)
    table = pa.table([list(changes), list(changes.values())], schema=ENTRIES)
    file = write_changelog(storage, step.uid, epoch, 0, f"n{epoch}", table)
    assert file is not None
    return extend(step, Version(epoch, f"t{epoch}"), [file])


def entries_in(step: StepState, storage: FileStorage) -> dict[bytes, bytes]:
    entries = contents_of(step, KeyGroupRange(0, step.max_parallelism - 1), storage)
    return dict(zip(*(column.to_pylist() for column in entries.columns), strict=True))


@pytest.fixture
def saved(tmp_path: Path) -> FileStorage:
    """A savepoint of two steps, both with a changed and an unchanged half."""
    storage = FileStorage(str(tmp_path / "checkpoint"))
    state = []
    for uid in ("counts", "other"):
        step = StepState(uid, 128, 2, KEY.schema_text, 1, FIELDS, 4, partition_times=TIMES)
        step = write(storage, step, 0, dict.fromkeys(USERS, b"old"))
        state.append(write(storage, step, 1, dict.fromkeys(USERS[::2], b"new")))
    manifest = Manifest(1, "job", "l", ("{}",), (), Producer("t", 1, 1), tuple(state))
    storage.put(m.manifest_path(manifest, "n"), manifest.encode())
    for path in ("offsets/0", "offsets/1", "commits/1"):
        storage.put(path, b"v1")
    target = FileStorage(str(tmp_path / "saved"))
    savepoints.create(storage, target)
    return target


VALUES = {user: b"old" if at % 2 else b"new" for at, user in enumerate(USERS)}


@pytest.mark.parametrize("count", [1, 100, 512, 32768])
def test_every_entry_is_where_its_key_belongs(saved, tmp_path, count):
    target = FileStorage(str(tmp_path / "new"))

    new = savepoints.migrate(saved, target, {"counts": count}, tmp_path)

    counts, other = new.manifest.state
    assert counts.max_parallelism == count
    assert counts.parallelism == min(2, count)
    assert counts.partition_times == TIMES, "partitions of the input have no key groups"
    assert entries_in(counts, target) == entries_of(VALUES, count)
    assert entries_in(other, target) == entries_of(VALUES, 128)
    assert counts.version != other.version, "no local copy of the old key groups may be taken"
    savepoints.restore(target, FileStorage(str(tmp_path / "restored")))


def test_it_can_be_written_on(saved, tmp_path):
    target = FileStorage(str(tmp_path / "new"))
    counts = savepoints.migrate(saved, target, {"counts": 300}, tmp_path).manifest.state[0]

    after = write(target, counts, 2, {USERS[0]: b"newest"})

    assert entries_in(after, target) == entries_of({**VALUES, USERS[0]: b"newest"}, 300)


def test_entries_of_deleted_states_are_not_carried_on(saved, tmp_path):
    path = tmp_path / "checkpoint" / m.FOLDER
    (name,) = path.iterdir()
    manifest = m.decode(name.read_bytes(), "m")
    counts, other = manifest.state
    deleted = replace(counts, fields=(FIELDS[1],))
    name.write_bytes(replace(manifest, state=(deleted, other)).encode())
    source, target = FileStorage(str(tmp_path / "again")), FileStorage(str(tmp_path / "new"))
    savepoints.create(FileStorage(str(tmp_path / "checkpoint")), source)

    new = savepoints.migrate(source, target, {"counts": 64}, tmp_path).manifest.state[0]

    entries = entries_in(new, target)
    assert entries == {key: b"" for key in entries_of(VALUES, 64) if key[2] == TIMERS_BY_TIME}


def test_files_are_of_a_size_that_can_be_held(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(savepoints, "SNAPSHOT_BYTES", 10_000)
    target = FileStorage(str(tmp_path / "new"))
    counts = savepoints.migrate(saved, target, {"counts": 300}, tmp_path).manifest.state[0]

    assert len(counts.files) > 3
    covered = np.concatenate([np.arange(f.first, f.last + 1) for f in counts.files])
    assert covered.tolist() == list(range(300))
    assert entries_in(counts, target) == entries_of(VALUES, 300)


def test_what_cannot_be_is_refused(saved, tmp_path):
    target = FileStorage(str(tmp_path / "new"))
    with pytest.raises(OptionError, match="no step 'cuonts': it has counts, other"):
        savepoints.migrate(saved, target, {"cuonts": 5}, tmp_path)
    with pytest.raises(OptionError, match="max_parallelism 0"):
        savepoints.migrate(saved, target, {"counts": 0}, tmp_path)
    file = next((tmp_path / "saved" / "keyed-state" / "counts").iterdir())
    file.write_bytes(b"torn")
    with pytest.raises(StateFileError, match=file.name):
        savepoints.migrate(saved, target, {"counts": 5}, tmp_path)
    assert not (tmp_path / "new" / "savepoint.json").exists()


@pytest.mark.parametrize("fails_at", range(6))
def test_a_migration_that_fails_leaves_nothing_and_can_be_made_again(
    saved, tmp_path, monkeypatch, fails_at
):
    """Whichever write fails: those of a step in new key groups, a copied one's, the last one."""
    monkeypatch.setattr(savepoints, "SNAPSHOT_BYTES", 30_000)
    monkeypatch.setattr(savepoint_folder, "FILES_AT_A_TIME", 1)
    folder = tmp_path / "new"
    written = []

    class Full(FileStorage):
        def put(self, path: str, data: bytes) -> None:
            if len(written) == fails_at:
                raise StorageError(f"no room for {path}")
            super().put(path, data)
            written.append(path)

    folder.mkdir()
    (folder / "notes.txt").write_text("of somebody else")
    with pytest.raises(StorageError, match="no room for"):
        savepoints.migrate(saved, Full(str(folder)), {"counts": 300}, tmp_path)

    assert len(written) == fails_at
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["notes.txt"]
    savepoints.migrate(saved, FileStorage(str(folder)), {"counts": 300}, tmp_path)
