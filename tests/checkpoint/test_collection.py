"""What a run removes of its checkpoint: all that nobody needs, nothing that a reader may need."""

import random
import secrets
from threading import Event

import pytest
from dictionary_store import MemoryStorage

from tallystick.checkpoint import collection
from tallystick.checkpoint.collection import Collection
from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.epoch import manifest as m
from tallystick.epoch.manifest import EPOCHS_RETAINED, Manifest
from tallystick.errors import StorageError
from tallystick.state.catalog import CHANGELOG, StateFile, StepState, Version
from tallystick.values import Producer

STATE = "keyed-state/count"


def state_file(epoch, nonce):
    path = f"{STATE}/{epoch:012d}-0-{nonce}.{CHANGELOG}"
    return StateFile(path, CHANGELOG, epoch, 0, 1, 9, 1, 1, 1)


class Run:
    """A pipeline: epochs add files, and now and then leave out the oldest."""

    def __init__(self, tasks=4, every=1):
        self.tasks = tasks
        self.storage = MemoryStorage()
        self.looks = 0
        names = self.storage.names

        def counted(folder):
            self.looks += folder == "keyed-state"
            return names(folder)

        self.storage.names = counted
        self.folder = CheckpointFolder(self.storage)
        self.collection = Collection(self.folder, every)
        self.committed = self.manifest(0, ())

    def manifest(self, epoch, files):
        trail = (Version(epoch, "token"),)
        state = StepState("count", 4096, self.tasks, "[]", 1, files=files, trail=trail)
        return Manifest(epoch, "p", "l", (), (), Producer("t", 1, epoch), (state,))

    def attempt(self, base, epoch, dropped=0):
        """Write what an attempt of an epoch leaves; it is not committed by that."""
        files = base.state[0].files
        new = tuple(state_file(epoch, secrets.token_hex(4)) for _ in range(self.tasks))
        for file in new:
            self.storage.put(file.path, b"state")
        after = self.manifest(epoch, (*files[dropped:], *new))
        self.folder.put_manifest(after, secrets.token_hex(4))
        return after

    def commit(self, manifest):
        self.committed = manifest
        self.collection.go_on(manifest)

    def check(self):
        """Every reader finds all files of every manifest that it may go by."""
        epoch = self.committed.checkpoint_id
        paths = m.retained_manifests(self.folder.manifest_paths(), epoch)
        assert paths
        for path in paths:
            for file in self.folder.read_manifest(path).state[0].files:
                assert file.path in self.storage.files, (path, epoch)

    def rubbish(self):
        kept = self.folder.manifests(self.folder.manifest_paths()).values()
        named = {file.path for manifest in kept for file in manifest.state[0].files}
        return {path for path in self.storage.files if path.startswith(STATE)} - named


def test_it_keeps_up_whatever_the_number_of_tasks():
    """2,500 files an epoch: all above 2,000 at a time were left for later, and so for ever."""
    run = Run(tasks=2_500, every=20)
    for epoch in range(1, 31):
        run.commit(run.attempt(run.committed, epoch, dropped=run.tasks * (epoch > 2)))
    run.check()
    state = [path for path in run.storage.files if path.startswith(STATE)]
    assert len(state) < run.tasks * (EPOCHS_RETAINED + 4)
    assert run.looks == 1, "it costs by what is removed, not by what is there"


@pytest.mark.parametrize("seed", range(12))
def test_no_file_of_a_retained_epoch_is_ever_missing(seed, monkeypatch):
    """With attempts that fail before and after their manifest, lost epochs, epochs left out."""
    draw = random.Random(seed)
    monkeypatch.setattr(collection, "COLLECTED_MAX", draw.choice([2, 1000]))
    monkeypatch.setattr(collection, "LOOKED_AT_PER_EPOCH", draw.choice([1000, 0.01]))
    run = Run(tasks=draw.randrange(1, 4), every=draw.choice([1, 3, 50]))
    before = run.committed
    for epoch in range(1, 90):
        if draw.random() < 0.1:
            continue  # left out by the function of a query
        base = run.committed
        if draw.random() < 0.2:  # it failed: its manifest is there, and names what the next drops
            run.attempt(base, epoch, draw.randrange(3))
            if draw.random() < 0.5:
                run.collection.expect_strays()
        if draw.random() < 0.1:  # a stray file, of no manifest
            run.storage.put(state_file(epoch, f"stray{seed}").path, b"stray")
        if draw.random() < 0.1:  # decided, and its rows lost: it runs again from the one before
            base = before
        if draw.random() < 0.05:  # another process goes on
            run.collection = Collection(run.folder, run.collection.every)
        before = base
        run.commit(run.attempt(base, epoch, draw.choice([0, 0, 1, 5])))
        run.check()
    run.collection.every = 1
    for epoch in range(90, 105):
        run.commit(run.attempt(run.committed, epoch))
        run.check()
    run.collection.expect_strays()
    run.commit(run.attempt(run.committed, 105))
    assert not run.rubbish()


def test_a_file_that_is_named_again_stays():
    run = Run(tasks=2)
    first = run.attempt(run.committed, 1)
    run.commit(first)
    run.commit(run.attempt(first, 2, dropped=2))
    run.commit(run.attempt(first, 3))  # epoch 2 was lost
    for epoch in range(4, 30):
        run.commit(run.attempt(run.committed, epoch))
        run.check()
    assert {file.path for file in first.state[0].files} <= run.storage.files.keys()


def test_no_epoch_waits_for_it_and_the_end_of_a_run_ends_it(monkeypatch):
    monkeypatch.setattr(collection, "COLLECTED_MAX", 1)
    run = Run(tasks=3)
    strays = [state_file(0, f"stray{at}").path for at in range(5)]
    for path in strays:
        run.storage.put(path, b"stray")
    begun, may_go_on, delete = Event(), Event(), run.storage.delete

    def slow(path):
        begun.set()
        assert may_go_on.wait(60)
        delete(path)

    run.storage.delete = slow
    run.collection.begin_beside()
    run.commit(run.attempt(run.committed, 1))
    assert begun.wait(60), "a thread is removing"
    run.commit(run.attempt(run.committed, 2))
    assert set(strays) <= run.storage.files.keys()

    run.collection._ending.set()
    may_go_on.set()
    run.collection.end()
    remaining = sum(path in run.storage.files for path in strays)
    assert 0 < remaining < len(strays), "it went on no further than it had to"


def test_runs_of_one_epoch_remove_what_they_leave(monkeypatch):
    """By the trigger availableNow a run ends while the removal still looks at the files."""
    monkeypatch.setattr(collection, "COLLECTED_MAX", 1)
    run, is_ending = Run(tasks=3), Event()
    names = run.storage.names

    def slow(folder):
        assert is_ending.wait(60)
        return names(folder)

    monkeypatch.setattr(run.storage, "names", slow)
    for epoch in range(1, 3 * EPOCHS_RETAINED):
        is_ending.clear()
        run.collection = Collection(run.folder)
        run.collection.begin_beside()
        run.commit(run.attempt(run.committed, epoch, dropped=run.tasks * (epoch > 2)))
        join = run.collection._thread.join

        def ending(timeout_s, join=join):
            is_ending.set()
            join(timeout_s)

        monkeypatch.setattr(run.collection._thread, "join", ending)
        run.collection.end()
        assert is_ending.is_set(), "the removal was under way when the run ended"
        run.check()
    state = [path for path in run.storage.files if path.startswith(STATE)]
    assert len(state) < run.tasks * (EPOCHS_RETAINED + 4)


def test_a_failure_is_said_and_made_up_for(caplog):
    run = Run(tasks=1)
    stray = state_file(0, "stray").path
    run.storage.put(stray, b"stray")
    delete = run.storage.delete

    def fails(path):
        raise StorageError("no")

    run.storage.delete = fails
    run.commit(run.attempt(run.committed, 1))
    assert "is tried again" in caplog.text
    run.storage.delete = delete
    run.commit(run.attempt(run.committed, 2))
    assert stray not in run.storage.files
