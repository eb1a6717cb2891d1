"""Whatever happened to a store, it is brought to the committed state, or refuses."""

import functools
import itertools
import random
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from dictionary_store import DictionaryStore, DictionaryView, MemoryStorage, within
from hypothesis import given
from hypothesis import strategies as st

from tallystick.checkpoint import state_files
from tallystick.checkpoint.local.store import open_store
from tallystick.checkpoint.state_files import (
    bring_forward,
    delete_all,
    newest_entries,
    write_changelog,
    write_merged,
    write_snapshot,
)
from tallystick.errors import RetriableError, StateFileError
from tallystick.host.stopwatch import REBUILT_COPIES, REUSED_COPIES, stopwatch
from tallystick.state import file_sets
from tallystick.state.catalog import StepState, Version
from tallystick.state.file_sets import collectable, due_merges, due_snapshots, extend
from tallystick.state.key_groups import KeyGroupRange, key_group_range
from tallystick.state.overlay import ENTRIES
from tests.checkpoint_on_disk import entries_of
from tests.examples import drawn

GROUPS = 24
RESCALES = (1, 2, 3, 2, 5, 3, 5, 6, 5, 2, 5, 3, 2, 1)


def empty_step():
    return StepState("counts", GROUPS, 1, "[]", 1)


def table(entries):
    columns = zip(*sorted(entries.items()), strict=True) if entries else ((), ())
    return pa.table([pa.array(column, pa.binary()) for column in columns], schema=ENTRIES)


def content(store, version):
    with store.view(version) as view:
        assert view is not None
        return dict(view.scan(b"", b"\xff\xff"))


def key(group, number=0):
    return group.to_bytes(2, "big") + b"\x01%d" % number


class Pipeline:
    """The state's side of a driver and its tasks; every choice comes from `draw`."""

    def __init__(self, draw, make_store):
        self.draw = draw
        self.make_store = make_store
        self.storage = MemoryStorage()
        self.nonces = itertools.count()
        self.stores = {}
        self.step = empty_step()
        self.history = [(self.step, {})]
        self.parallelism = 1
        self.changed_bytes_min = draw.choice([1, 2000, 1 << 20])
        self.files_min = draw.choice([2, 4, 1000])

    @property
    def committed(self):
        return self.step.version.epoch if self.step.version else -1

    def run_epoch(self, *, fails):
        """All tasks of an epoch; what a failed one wrote stays where it is."""
        epoch, entries = self.committed + 1, dict(self.history[-1][1])
        files = []
        for index in range(self.parallelism):
            groups = key_group_range(GROUPS, self.parallelism, index)
            store = self.brought_forward(groups)
            files += self.rewritten(store, index)
            changes = {
                key(self.draw.randint(groups.first, groups.last), self.draw.randrange(4)): (
                    None if self.draw.random() < 0.3 else b"%d" % next(self.nonces)
                )
                for _ in range(self.draw.choice([0, 0, 1, 3, 9]))
            }
            nonce = str(next(self.nonces))
            arguments = self.storage, self.step.uid, epoch, index, nonce, table(changes)
            files += [file for file in [write_changelog(*arguments)] if file]
            entries.update(changes)
        if not fails:
            self.draw.shuffle(files)
            version = Version(epoch, str(next(self.nonces)))
            self.step = extend(self.step, version, files)
            entries = {name: value for name, value in entries.items() if value is not None}
            self.history.append((self.step, entries))

    def brought_forward(self, groups):
        """The store of a range, wherever it was, checked against the oracle."""
        if groups not in self.stores or self.draw.random() < 0.1:
            self.stores[groups] = self.make_store(groups)
        store = self.stores[groups]
        bring_forward(store, self.step, groups, self.storage)
        if self.step.version:
            assert content(store, self.step.version) == within(self.history[-1][1], groups)
        return store

    def rewritten(self, store, index):
        """Snapshot and merged changelog of a task, if they are due."""
        where = self.storage, self.step.uid, self.committed, index
        if index in (
            snapshots := due_snapshots(self.step, self.parallelism, self.changed_bytes_min)
        ):
            with store.view(self.step.version) as view:
                yield write_snapshot(*where, str(next(self.nonces)), view, snapshots[index])
        if index in (merges := due_merges(self.step, self.parallelism, self.files_min)):
            yield write_merged(*where, str(next(self.nonces)), merges[index], base=self.step)

    def go_back(self):
        """Go on from an older epoch, as from a savepoint: numbers repeat, tokens do not."""
        at = self.draw.randrange(len(self.history))
        self.history = self.history[: at + 1]
        self.step = self.history[-1][0]

    def collect(self):
        """Keep the newest three manifests; the rest goes, what they name stays."""
        self.history = self.history[-3:]
        kept = [(step,) for step, _ in (*self.history, (self.step, None))]
        there = state_files.state_files(self.storage)
        delete_all(self.storage, collectable(there, max(self.committed, 0), kept))
        needed = {file.path for step, _ in self.history for file in step.files}
        assert needed <= self.storage.files.keys()
        old = [
            path
            for path in self.storage.files
            if (file_sets.epoch_of(path) or 0) <= self.committed and path not in needed
        ]
        assert not old, "rubbish was left"


def run(seed, make_store, epochs):
    draw = random.Random(seed)
    pipeline = Pipeline(draw, make_store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_sets, "SNAPSHOT_BYTES", draw.choice([500, 4000]))
        patch.setattr(file_sets, "SMALL_BYTES", draw.choice([600, 800]))
        patch.setattr(file_sets, "MERGED_BYTES_MAX", draw.choice([650, 800, 1 << 20]))
        patch.setattr(file_sets, "TRAIL_LENGTH", draw.choice([2, 64]))
        patch.setattr(state_files, "WHOLE_FILE_BYTES", draw.choice([0, 900, 1 << 20]))
        for parallelism in RESCALES[: draw.randrange(2, len(RESCALES) + 1)]:
            pipeline.parallelism = parallelism
            for _ in range(draw.randrange(1, epochs)):
                pipeline.run_epoch(fails=draw.random() < 0.15)
            if draw.random() < 0.3:
                pipeline.collect()
            if draw.random() < 0.1:
                pipeline.go_back()
        everything = KeyGroupRange(0, GROUPS - 1)
        assert entries_of(pipeline.step, everything, pipeline.storage) == pipeline.history[-1][1]
    return pipeline


@drawn(15)
@given(st.integers(0, 1 << 32))
def test_after_any_history_a_store_holds_what_was_committed(seed):
    """Rescales, snapshots, merges, failed epochs, lost and stale stores, restored savepoints."""
    run(seed, lambda _: DictionaryStore(), epochs=7)


@drawn(3)
@given(st.integers(0, 1 << 32))
def test_after_any_history_lmdb_holds_what_was_committed(seed):
    with tempfile.TemporaryDirectory() as folder:
        opened = []

        def make_store(groups):
            opened.append(open_store(Path(folder), str(len(opened)), "counts", groups))
            return opened[-1]

        run(seed, make_store, epochs=4)
        for file in opened:
            file.close()


@functools.cache
def big_snapshot():
    """Forty thousand entries in one snapshot: the storage's files, what names them, the entries."""
    draw, storage, rows = random.Random(1), MemoryStorage(), 40_000
    entries = {
        key(number * GROUPS // rows, 10**6 + number): draw.randbytes(40) for number in range(rows)
    }
    everything = KeyGroupRange(0, GROUPS - 1)
    view = DictionaryView(entries)
    file = write_snapshot(storage, "counts", 0, 0, "n", view, everything)
    return storage.files, file, entries


def big_step(storage):
    """A step whose state is one snapshot."""
    files, file, entries = big_snapshot()
    storage.files.update(files)
    first = extend(empty_step(), Version(0, "a"), [])
    return extend(first, Version(1, "b"), [file]), entries


@pytest.mark.parametrize("parallelism", [2, 3, 5, 6])
def test_rescaling_reads_each_byte_of_a_big_file_about_once(parallelism):
    """A range reads the file's index, and one slice; the slices overlap by a segment at most."""
    storage = MemoryStorage()
    step, entries = big_step(storage)
    (file,) = step.files
    most = 0
    for index in range(parallelism):
        groups, store = key_group_range(GROUPS, parallelism, index), DictionaryStore()
        restored = bring_forward(store, step, groups, storage)

        assert content(store, step.version) == within(entries, groups)
        assert restored.requests == 2
        most = max(most, restored.bytes_read)
    assert sum(storage.read.values()) < 1.01 * file.size + parallelism * (file.size // 20)
    assert most < file.size * (1 / parallelism + 1 / 20) + file.index_size


def test_a_small_file_and_one_that_is_all_wanted_take_one_request():
    storage, store = MemoryStorage(), DictionaryStore()
    step, _ = big_step(storage)
    assert bring_forward(store, step, KeyGroupRange(0, GROUPS - 1), storage).requests == 1

    change = write_changelog(storage, "counts", 2, 0, "x", table({key(3): b"x", key(20): b""}))
    step = extend(step, Version(2, "c"), [change])
    restored = bring_forward(store, step, KeyGroupRange(0, GROUPS - 1), storage)
    assert restored == (change.size, 1)


def test_a_copy_counts_as_reused_or_rebuilt_each_time_it_is_needed():
    storage, store = MemoryStorage(), DictionaryStore()
    step, _ = big_step(storage)
    groups = KeyGroupRange(0, GROUPS - 1)

    def counted(step):
        with stopwatch() as watch:
            bring_forward(store, step, groups, storage)
        return watch.counts[REUSED_COPIES], watch.counts[REBUILT_COPIES]

    assert counted(empty_step()) == (0, 0), "there is no state yet"
    assert counted(step) == (0, 1)
    assert counted(step) == (1, 0)
    change = write_changelog(storage, "counts", 2, 0, "x", table({key(3): b"x"}))
    step = extend(step, Version(2, "c"), [change])
    assert counted(step) == (1, 0), "brought forward by what changed"
    store.apply(step.version, Version(9, "of another run"), [])
    assert counted(step) == (0, 1)


def test_nothing_changed_is_no_file_and_a_new_version():
    storage, store, groups = MemoryStorage(), DictionaryStore(), KeyGroupRange(0, GROUPS - 1)
    assert write_changelog(storage, "counts", 0, 0, "n", table({})) is None
    step = extend(empty_step(), Version(0, "a"), [])

    assert bring_forward(store, step, groups, storage) == (0, 0)
    assert store.version() == step.version
    assert storage.files == {}


def test_a_missing_file_is_named_with_its_checkpoint_and_key_groups():
    storage = MemoryStorage()
    step, _ = big_step(storage)
    storage.delete(step.files[0].path)

    with pytest.raises(StateFileError) as raised:
        bring_forward(DictionaryStore(), step, KeyGroupRange(2, 5), storage)
    for part in (step.files[0].path, "memory://checkpoint", "key groups 0 to 23", "missing"):
        assert part in str(raised.value)


@pytest.mark.parametrize("groups", [KeyGroupRange(0, GROUPS - 1), KeyGroupRange(2, 5)])
@pytest.mark.parametrize("harm", ["cut", "index", "segment"])
def test_a_damaged_file_is_refused_and_the_store_has_no_wrong_version(groups, harm):
    storage, store = MemoryStorage(), DictionaryStore()
    step, _ = big_step(storage)
    (file,) = step.files
    data = bytearray(storage.files[file.path])
    if harm == "cut":
        del data[-5:]
    else:
        data[-30 if harm == "index" else file.size * 3 // GROUPS] ^= 1
    storage.files[file.path] = bytes(data)

    with pytest.raises(StateFileError, match="damaged"):
        bring_forward(store, step, groups, storage)
    assert store.version() is None


def test_a_store_that_others_keep_setting_back_is_given_up():
    class Contested(DictionaryStore):
        def apply(self, expected, version, steps):
            return False

    step = extend(empty_step(), Version(0, "a"), [])
    with pytest.raises(RetriableError, match="set it back"):
        bring_forward(Contested(), step, KeyGroupRange(0, 3), MemoryStorage())


def test_a_store_that_another_process_set_back_is_brought_forward_again():
    """A zombie of an older run may use the same folder."""

    class SetBack(DictionaryStore):
        tricks = 1

        def apply(self, expected, version, steps):
            if self.tricks:
                self.tricks -= 1
                self.at, self.entries = Version(7, "zombie"), {key(1): b"zombie"}
                return False
            return super().apply(expected, version, steps)

    storage, store = MemoryStorage(), SetBack()
    step, entries = big_step(storage)
    bring_forward(store, step, KeyGroupRange(0, GROUPS - 1), storage)

    assert content(store, step.version) == entries


def test_files_that_the_manifest_names_and_those_of_later_epochs_are_kept():
    storage = MemoryStorage()
    step, _ = big_step(storage)
    storage.put("keyed-state/counts/000000000009-0-lost.changelog", b"")
    storage.put("keyed-state/counts/000000000010-0-next.changelog", b"")
    storage.put("keyed-state/dropped/000000000003-0-n.snapshot", b"")

    assert collectable(state_files.state_files(storage), 9, [(step,)]) == [
        "keyed-state/counts/000000000009-0-lost.changelog",
        "keyed-state/dropped/000000000003-0-n.snapshot",
    ]


def test_merging_keeps_the_newest_entry_of_each_key_and_the_deletions():
    parts = [{key(1): b"a", key(2): b"b"}, {key(1): None}, {key(0): b"c", key(2): b"d"}]
    merged = newest_entries([batch for part in parts for batch in table(part).to_batches()])

    assert merged.to_pylist() == [
        {"key": key(0), "value": b"c"},
        {"key": key(1), "value": None},
        {"key": key(2), "value": b"d"},
    ]
