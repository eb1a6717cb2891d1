"""The local copy: whole at a version or at none, whoever else uses it and whoever is killed."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time

import lmdb_applier
import pyarrow as pa
import pytest

from tallystick.checkpoint.local import lmdb_environment
from tallystick.checkpoint.local import store as store_module
from tallystick.checkpoint.local.store import open_store
from tallystick.errors import StorageError
from tallystick.host.stopwatch import LIVE_ENTRIES, stopwatch
from tallystick.state.catalog import Version
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.overlay import ENTRIES

GROUPS = KeyGroupRange(0, 7)
V1, V2, V3 = Version(1, "a"), Version(2, "b"), Version(3, "c")


def batch(entries):
    columns = zip(*sorted(entries.items()), strict=True) if entries else ((), ())
    return pa.RecordBatch.from_arrays([pa.array(c, pa.binary()) for c in columns], schema=ENTRIES)


def key(group, text=b"k"):
    return group.to_bytes(2, "big") + b"\x01" + text


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path, "lineage", "counts", GROUPS)
    yield store
    store.close()


def content(store, version):
    with store.view(version) as view:
        assert view is not None
        return dict(view.scan(b"\0\0", b"\xff\xff"))


def test_a_store_is_empty_then_at_what_was_applied(store):
    assert store.version() is None
    assert store.apply(None, V1, [batch({key(0): b"x", key(7): b"y"})])
    assert store.apply(V1, V2, [batch({key(0): None, key(3): b""})])

    assert store.version() == V2
    assert content(store, V2) == {key(3): b"", key(7): b"y"}


def test_a_task_that_looks_into_its_copy_counts_the_entries_without_reading_them(store):
    def counted(version):
        with stopwatch() as watch, store.view(version):
            return watch.counts.get(LIVE_ENTRIES)

    long = key(3, b"k" * 600)
    store.apply(None, V1, [batch({key(group): b"x" for group in range(8)} | {long: b"y"})])
    assert counted(V1) == 9
    store.apply(V1, V2, [KeyGroupRange(0, 1), batch({key(2): None, key(3): b"z", key(5): b"z"})])
    assert counted(V1) is None, "it is not at that version any more"
    assert counted(V2) == len(content(store, V2)) == 6
    store.apply(V2, V3, [GROUPS])
    assert counted(V3) == 0


def test_who_expects_another_version_changes_nothing(store):
    store.apply(None, V1, [batch({key(0): b"x"})])

    assert not store.apply(V2, V3, [batch({key(0): b"z"})])
    assert not store.apply(None, V3, [batch({key(0): b"z"})])
    assert content(store, V1) == {key(0): b"x"}


def test_a_view_is_of_one_version_whatever_is_applied_meanwhile(store):
    store.apply(None, V1, [batch({key(0): b"x"})])
    with store.view(V1) as view:
        store.apply(V1, V2, [batch({key(0): b"z"})])

        assert view.get_many(pa.array([key(0)], pa.binary())).to_pylist() == [b"x"]
    with store.view(V1) as gone:
        assert gone is None


def test_before_the_first_epoch_the_state_is_empty_whatever_lies_there(store):
    store.apply(None, V1, [batch({key(0): b"x"})])
    with store.view(None) as view:
        assert view.get_many(pa.array([key(0)], pa.binary())).to_pylist() == [None]
        assert list(view.scan(b"", b"\xff")) == []
        assert list(view.batches(GROUPS)) == []


def test_ranges_are_cleared_whole_or_in_part(store):
    entries = {key(group): b"x" for group in range(8)}
    store.apply(None, V1, [batch(entries)])
    store.apply(V1, V2, [KeyGroupRange(2, 4), batch({key(3): b"new"})])
    assert content(store, V2) == {key(group): b"x" for group in range(8) if not 2 <= group <= 4} | {
        key(3): b"new"
    }

    store.apply(V2, V3, [GROUPS])
    assert content(store, V3) == {}


def test_an_apply_that_breaks_off_leaves_no_version(store, monkeypatch):
    """A store that is changed by several transactions must not look whole in between."""
    monkeypatch.setattr(store_module, "CHUNK_ROWS", 1)

    def steps():
        yield batch({key(0): b"new"})
        yield batch({key(1): b"new"})
        yield batch({key(2): b"new"})
        raise ValueError("the file is damaged")

    store.apply(None, V1, [batch({key(0): b"old"})])
    with pytest.raises(ValueError, match="damaged"):
        store.apply(V1, V2, steps())
    assert store.version() is None
    with store.view(V1) as view:
        assert view is None

    assert store.apply(None, V2, [batch({key(5): b"x"})])
    assert content(store, V2) == {key(5): b"x"}


def test_two_that_apply_at_once_for_want_of_a_lock_do_not_mix(store, monkeypatch):
    """A stopped process may hold the lock for ever; without it each transaction looks who it is."""
    monkeypatch.setattr(store_module, "locked", contextlib.nullcontext)
    monkeypatch.setattr(store_module, "CHUNK_ROWS", 1)

    def parts(text):
        yield from [batch({key(number): text}) for number in range(4)]

    def overtaken():
        yield from parts(b"ours")
        with pytest.raises(ValueError, match="killed"):
            store.apply(None, V2, killed())
        yield from parts(b"ours")

    def killed():
        yield from parts(b"theirs")
        raise ValueError("killed")

    assert not store.apply(None, V1, overtaken())
    assert store.version() is None


def test_an_apply_of_one_transaction_that_breaks_off_did_nothing(store):
    def steps():
        yield batch({key(0): b"new"})
        raise ValueError("the file is damaged")

    store.apply(None, V1, [batch({key(0): b"old"})])
    with pytest.raises(ValueError, match="damaged"):
        store.apply(V1, V2, steps())
    assert content(store, V1) == {key(0): b"old"}


def test_long_keys_are_ordinary_keys(store):
    """LMDB refuses keys of more than 511 bytes; nobody outside may notice."""
    draw = random.Random(1)
    stem = key(3, b"s" * 474)
    entries = {
        stem + draw.randbytes(draw.choice([0, 1, 2, 31, 32, 33, 60, 700])): b"%d" % number
        for number in range(300)
    }
    for size in range(505, 516):
        entries[key(2, b"t" * (size - 3))] = b"%d" % size
    store.apply(None, V1, [batch(entries)])
    gone = sorted(entries)[::3]
    store.apply(V1, V2, [batch(dict.fromkeys(gone))])
    remaining = {name: entries[name] for name in sorted(entries) if name not in gone}

    with store.view(V2) as view:
        keys = pa.array(list(entries), pa.binary())
        assert view.get_many(keys).to_pylist() == [remaining.get(name) for name in entries]
        assert list(view.scan(b"\0\0", b"\xff\xff")) == list(remaining.items())
        for _ in range(100):
            first, end = sorted(draw.sample(sorted(entries), 2))
            expected = [entry for entry in remaining.items() if first <= entry[0] < end]
            assert list(view.scan(first, end)) == expected
        rows = pa.Table.from_batches(view.batches(KeyGroupRange(3, 3)), ENTRIES)
        assert rows["key"].to_pylist() == [name for name in remaining if name[:2] == b"\0\3"]
    store.apply(V2, V3, [KeyGroupRange(3, 3)])
    assert all(entry[:2] == b"\0\2" for entry in content(store, V3))


def test_a_full_map_grows(tmp_path, monkeypatch):
    """As where the process's address space is limited."""
    monkeypatch.setattr(lmdb_environment, "MAP_BYTES", 1 << 16)
    store = open_store(tmp_path, "lineage", "counts", GROUPS)
    entries = {key(1, b"%06d" % number): b"." * 100 for number in range(5000)}

    assert store.apply(None, V1, [batch(entries)])
    assert content(store, V1) == entries


def test_a_map_cannot_grow_under_a_view_of_this_process(tmp_path, monkeypatch):
    monkeypatch.setattr(lmdb_environment, "MAP_BYTES", 1 << 16)
    store = open_store(tmp_path, "lineage", "counts", GROUPS)
    store.apply(None, V1, [batch({key(1): b""})])
    entries = {key(1, b"%06d" % number): b"." * 100 for number in range(5000)}
    with store.view(V1), pytest.raises(StorageError, match="has to grow"):
        store.apply(V1, V2, [batch(entries)])
    assert store.apply(V1, V2, [batch(entries)])


def test_a_file_much_larger_than_its_content_is_written_anew(store, monkeypatch):
    monkeypatch.setattr(lmdb_environment, "BLOAT_BYTES_MIN", 1 << 16)
    entries = {key(1, b"%06d" % number): b"." * 100 for number in range(5000)}
    store.apply(None, V1, [batch(entries)])
    before = sum(file.stat().st_size for file in store._path.iterdir())
    store.apply(V1, V2, [GROUPS, batch({key(0): b"x"})])

    assert sum(file.stat().st_size for file in store._path.iterdir()) < before / 4
    assert content(store, V2) == {key(0): b"x"}
    assert not list(store._path.parent.glob(".*"))


def test_what_is_no_lmdb_file_is_replaced(store):
    store.apply(None, V1, [batch({key(0): b"x"})])
    lmdb_environment.environment_at(store._path).close()
    (store._path / "data.mdb").write_bytes(b"garbage " * 4096)

    assert store.version() is None
    assert store.apply(None, V2, [batch({key(0): b"x"})])


def test_folders_unused_for_a_day_are_removed(tmp_path, store):
    """Of other ranges, lineages and boots; those in use stay."""
    store.apply(None, V1, [batch({key(0): b"x"})])
    old = open_store(tmp_path, "older", "counts", KeyGroupRange(8, 15))
    sibling = open_store(tmp_path, "lineage", "counts", KeyGroupRange(8, 15))
    long_ago = time.time() - 2 * lmdb_environment.UNUSED_MAX_S
    for copy in (old, sibling):
        os.utime(copy._path / "data.mdb", (long_ago, long_ago))
    with old.view(None):
        fresh = open_store(tmp_path, "lineage", "counts", KeyGroupRange(16, 23))

    assert not old._path.parents[1].exists()
    assert not sibling._path.exists()
    assert fresh._path.exists()
    assert content(store, V1) == {key(0): b"x"}
    assert old.version() is None  # made anew, where it was


ANOTHER = """
import sys
from pathlib import Path
import pyarrow as pa
from tallystick.checkpoint.local import lmdb_environment
from tallystick.checkpoint.local.store import open_store
from tallystick.state.catalog import Version
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.overlay import ENTRIES

groups = KeyGroupRange(0, 7)
lmdb_environment.BLOAT_BYTES_MIN = 1 << 16
store = open_store(Path(sys.argv[1]), "lineage", "counts", groups)
for line in sys.stdin:
    have, wanted, value = eval(line)
    rows = [(b"\\0\\0\\1k", value), (b"\\0\\1\\1k", value)]
    columns = [pa.array(column, pa.binary()) for column in zip(*rows)]
    batch = pa.RecordBatch.from_arrays(columns, schema=ENTRIES)
    print(store.apply(have and Version(*have), Version(*wanted), [groups, batch]), flush=True)
"""


class Another:
    """Another process with the same store, told what to apply."""

    def __init__(self, folder):
        command = [sys.executable, "-c", ANOTHER, str(folder)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def apply(self, have, wanted, value):
        have = None if have is None else tuple(have)
        self.process.stdin.write(f"{(have, tuple(wanted), value)!r}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline() == "True\n"


@pytest.fixture
def another(tmp_path):
    another = Another(tmp_path)
    yield another
    another.process.kill()
    another.process.communicate()


def test_a_steady_job_looks_for_unused_folders_now_and_then(tmp_path, store, monkeypatch):
    """After a rescale no new folder comes that would be an occasion."""
    older = open_store(tmp_path, "lineage", "counts", KeyGroupRange(8, 15))
    os.utime(older._path / "data.mdb", (0, 0))
    open_store(tmp_path, "lineage", "counts", GROUPS)
    assert older._path.exists()

    monkeypatch.setattr(lmdb_environment, "LOOK_AROUND_S", 0)
    open_store(tmp_path, "lineage", "counts", GROUPS)
    assert not older._path.exists()


def test_a_forked_process_opens_the_file_for_itself(store):
    """LMDB forbids to use an environment across a fork, and does not notice."""
    store.apply(None, V1, [batch({key(0): b"x"})])
    inherited = lmdb_environment.environment_at(store._path)
    child = os.fork()
    if child == 0:
        is_fine = lmdb_environment.environment_at(store._path) is not inherited
        is_fine = is_fine and content(store, V1) == {key(0): b"x"}
        is_fine = is_fine and store.apply(V1, V2, [batch({key(1): b"y"})])
        os._exit(0 if is_fine else 1)

    assert os.waitpid(child, 0)[1] == 0
    assert content(store, V2) == {key(0): b"x", key(1): b"y"}


def test_a_process_keeps_few_files_open(tmp_path, monkeypatch):
    monkeypatch.setattr(lmdb_environment, "OPEN_MAX", 3)
    stores = [open_store(tmp_path, "lineage", f"step {number}", GROUPS) for number in range(6)]
    for store in stores:
        store.apply(None, V1, [batch({key(0): b"x"})])
    assert sum(path in lmdb_environment._open for path in [s._path for s in stores]) <= 3
    assert all(content(store, V1) == {key(0): b"x"} for store in stores)


def test_up_to_its_limit_a_process_keeps_files_open(tmp_path, monkeypatch):
    monkeypatch.setattr(lmdb_environment, "_open", {})
    monkeypatch.setattr(lmdb_environment, "OPEN_MAX", 8)
    for number in range(8):
        open_store(tmp_path, "lineage", f"step {number}", GROUPS)
    assert len(lmdb_environment._open) == 8

    open_store(tmp_path, "lineage", "step 8", GROUPS)
    assert len(lmdb_environment._open) == 8
    lmdb_environment._close_idle(8)


LITTLE_ADDRESS_SPACE = """
import resource, sys
from pathlib import Path
import lmdb
from tallystick.checkpoint.local import lmdb_environment
from tallystick.checkpoint.local.store import open_store
from tallystick.state.catalog import Version
from tallystick.state.key_groups import KeyGroupRange

resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
maps = [lmdb_environment._map_bytes()]
lmdb_environment.MAP_SHARE = 4  # a gigabyte for each of six
stores = [open_store(Path(sys.argv[1]), "l", "u", KeyGroupRange(i, i)) for i in range(6)]
for store in stores:
    assert store.apply(None, Version(1, "a"), []), store
environment = lmdb_environment.environment_at(stores[0]._path)
lmdb_environment.environment_at(stores[1]._path)
environment._resize(11 << 28)  # there is no room for the other one's gigabyte
assert environment.lmdb.info()["map_size"] == 11 << 28
assert lmdb_environment._open == {environment.path: environment}
try:
    environment.grow()
except lmdb.MemoryError:
    maps.append(0)
assert all(store.version() == Version(1, "a") for store in stores)
print(*maps)
"""


def test_where_address_space_is_short_files_that_nobody_reads_give_theirs(tmp_path):
    """As with spark.executor.pyspark.memory."""
    command = [sys.executable, "-c", LITTLE_ADDRESS_SPACE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.split() == [str(128 << 20), "0"]


def test_a_zombie_that_sets_the_store_back_is_noticed(store, another):
    """It may be of an older run of the pipeline; each opens a view of the version it needs."""
    store.apply(None, V2, [batch({key(0): b"two"})])
    with store.view(V2) as view:
        assert another.apply(V2, V1, b"zombie")

        assert dict(view.scan(b"", b"\xff")) == {key(0): b"two"}
    with store.view(V2) as gone:
        assert gone is None
    assert not store.apply(V2, V3, [batch({key(0): b"three"})])
    assert store.version() == V1

    assert store.apply(V1, V2, [GROUPS, batch({key(0): b"two"})])
    assert content(store, V2) == {key(0): b"two"}
    assert not another.apply(V1, V3, b"zombie")


def test_a_file_written_anew_is_found_by_who_has_the_old_one_open(store, another):
    """Until then each has a whole copy, with a version of its own."""
    entries = {key(1, b"%06d" % number): b"." * 100 for number in range(5000)}
    store.apply(None, V1, [batch(entries)])
    before = (store._path / "data.mdb").stat().st_ino
    with store.view(V1) as view:
        assert another.apply(V1, V2, b"two")
        assert (store._path / "data.mdb").stat().st_ino != before
        assert dict(view.scan(b"", b"\xff")) == entries

        assert content(store, V2) == {key(0): b"two", key(1): b"two"}
    assert another.apply(V2, V3, b"three")
    assert content(store, V3) == {key(0): b"three", key(1): b"three"}


def test_a_map_that_another_process_made_larger_is_adopted(tmp_path, monkeypatch, another):
    monkeypatch.setattr(lmdb_environment, "MAP_BYTES", 1 << 16)
    store = open_store(tmp_path, "lineage", "counts", GROUPS)
    assert another.apply(None, V1, b"." * (1 << 20))

    assert len(content(store, V1)[key(0)]) == 1 << 20
    assert store.apply(V1, V2, [batch({key(0): b"x"})])


def test_kill_9_in_the_middle_never_leaves_a_wrong_store_with_a_version(tmp_path):
    """Two processes apply, now one and now the other; both are killed at random moments."""
    store = open_store(tmp_path, "lineage", "counts", GROUPS)
    draw = random.Random(7)
    seen = set()
    for _ in range(4):
        command = [sys.executable, lmdb_applier.__file__, str(tmp_path)]
        workers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
        for worker in workers:
            worker.stdout.readline()
        time.sleep(draw.uniform(0, 0.1))
        for worker in workers:
            worker.send_signal(signal.SIGKILL)
            worker.wait()
            worker.stdout.close()
        version = store.version()
        seen.add(version)
        if version is not None:
            assert content(store, version) == lmdb_applier.content_after(version.epoch)
        if store.apply(None, V1, [batch({key(0): b"x"})]):  # the dead hold no lock
            assert content(store, V1) == {key(0): b"x"}
            store.apply(V1, Version(0, "x"), [GROUPS])
    assert seen - {None}
