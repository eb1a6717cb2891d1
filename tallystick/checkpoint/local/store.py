"""Copies of state on this host: `LocalState` chooses the folder, `LmdbStore` keeps a copy there.

Nothing needs the files below the local root: they only save reading the checkpoint again.

The StateStore port with LMDB has a file per key-group range on the worker's own disk:

    root / "boot-…" / lineage / uid / "0-63" / data.mdb, lock.mdb         and "0-63.lock" beside it

Invariants:
- The store holds a whole committed version, or says that it has none: an apply of several
  transactions removes the version with the first and sets the new one with the last; each checks
  that no other apply has come between.
- Nothing is synced to disk: a killed process loses nothing, a machine that stops may. So the boot's
  id is in the path: what another boot left is never opened.
- No read transaction outlives its `view`: LMDB cannot reuse a page that a reader may see.
- A folder is never emptied under a process that has it open: the folder is renamed away, and the
  process keeps a copy of its own, which it leaves at its next use.

LMDB takes keys of up to 511 bytes. A longer one is stored as its beginning and a digest, 511 bytes
in all (which no other stored key has), and the value begins with the whole key. Shortened keys of
one beginning stand in the order of their digests: what is read in order is sorted again, run by
run. Only stores that ever held such a key pay for it.

Limits: one host, and not shared between containers (LMDB identifies readers by process id). A
process that is stopped, not killed, in the middle of a write keeps others from writing.
"""

import collections
import contextlib
import hashlib
import itertools
import json
import operator
import os
import shutil
import stat
import struct
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import lmdb
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.checkpoint.local.lmdb_environment import (
    UNREADABLE,
    Environment,
    boot_folder,
    discard,
    environment_at,
    locked,
    remove_unused,
)
from tallystick.errors import BrokenInvariantError, OptionError, StorageError
from tallystick.host.stopwatch import LIVE_ENTRIES, count
from tallystick.host.worker_cache import WorkerCache
from tallystick.ports import StateStore, Storage
from tallystick.state.catalog import Version
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.overlay import ENTRIES, EmptyView, StateView
from tallystick.storage.file_storage import FileStorage
from tallystick.storage.places import local_path
from tallystick.values import CheckFinding, Severity

ROOT_VARIABLE = "TALLYSTICK_STATE_DIR"
"""Names the folder for local copies of state, on each host; else the system's temporary folder."""
FREE_MIN_BYTES = 1 << 30
FREE_MIN_SHARE = 0.05

CHUNK_ROWS = 100_000
CHUNK_BYTES = 64 << 20
"""The bytes of a transaction: LMDB copies each page that is written, and reuses only pages of
earlier transactions."""

STORED_KEY_MAX = 511
DIGEST_BYTES = 32
PREFIX_BYTES = STORED_KEY_MAX - DIGEST_BYTES
BATCH_ROWS = 16_384
FIRST_ENTRY = b"\0\0"
"""Keys before this key belong to the store itself."""

_OPEN_TO_OTHERS = 0o077
_WRITABLE_BY_OTHERS = 0o022
_storages: WorkerCache[str, FileStorage] = WorkerCache()
_KEY_AND_VALUE = operator.itemgetter(0), operator.itemgetter(1)
_LENGTH = struct.Struct("<I")
_ABOUT = b"\0"
"""Sorts before all entries, whose keys have more than two bytes."""

_Steps = list[KeyGroupRange | pa.RecordBatch]


class _About(NamedTuple):
    """The store's description of itself.

    Args:
        version: None while a change is under way, or was given up.
        change: names the apply that wrote last.
        long_keys: True if the store ever held a key that had to be shortened.
    """

    version: Version | None = None
    change: str = ""
    long_keys: bool = False


class LmdbStore:
    """The committed state of one step's key groups, on this host.

    Args:
        path: its folder.
        groups: the key groups that it holds.
    """

    def __init__(self, path: Path, groups: KeyGroupRange) -> None:
        self._path = path
        self._groups = groups

    def __repr__(self) -> str:
        return f"LmdbStore({str(self._path)!r})"

    def close(self) -> None:
        """Close the file, which this process otherwise keeps open for the next epoch."""
        environment_at(self._path).close()

    def version(self) -> Version | None:
        """See `StateStore.version`."""
        with self._transaction() as (_, txn):
            return _about(txn).version

    def apply(
        self,
        expected: Version | None,
        version: Version,
        steps: Iterable[KeyGroupRange | pa.RecordBatch],
    ) -> bool:
        """See `StateStore.apply`; at `None` the store starts empty, whatever it held.

        Raises:
            StorageError: the disk is full, say.
        """
        with locked(self._path):
            try:
                is_done = self._apply(expected, version, steps)
                environment = environment_at(self._path, is_locked=True)
                if is_done and environment.is_bloated():
                    environment.rewrite()
            except UNREADABLE:
                environment_at(self._path, is_locked=True).close()
                discard(self._path)
                return False
            except lmdb.Error as error:
                raise StorageError(
                    f"local state {self._path}: writing failed: {error}. Make room on the disk, "
                    f"or give another folder."
                ) from error
        return is_done

    @contextlib.contextmanager
    def view(self, version: Version | None) -> Iterator[StateView | None]:
        """See `StateStore.view`; before the first epoch the view is empty, whatever lies there."""
        if version is None:
            yield EmptyView()
            return
        with self._transaction() as (environment, txn):
            about = _about(txn)
            if about.version != version:
                yield None
                return
            # LMDB knows how many there are; one is the store's own, `_ABOUT`.
            count(LIVE_ENTRIES, txn.stat(environment.entries)["entries"] - 1)
            yield LmdbView(txn, long_keys=about.long_keys)

    @contextlib.contextmanager
    def _transaction(self) -> "Iterator[tuple[Environment, lmdb.Transaction[bytes]]]":
        environment = environment_at(self._path)
        txn = environment.begin()
        environment.views += 1
        try:
            yield environment, txn
        finally:
            environment.views -= 1
            txn.abort()

    def _apply(
        self,
        expected: Version | None,
        version: Version,
        steps: Iterable[KeyGroupRange | pa.RecordBatch],
    ) -> bool:
        change = uuid.uuid4().hex
        chunks = _chunks(steps)
        chunk: _Steps | None = next(chunks, [])
        if expected is None:
            chunk = [self._groups, *(chunk or [])]
        is_first = True
        while chunk is not None:
            following = next(chunks, None)
            after = _About(version if following is None else None, change)
            environment = environment_at(self._path, is_locked=True)
            before = _About(expected) if is_first else _About(None, change)
            while (is_written := self._write(environment, chunk, before, after)) is None:
                environment.grow()
            if not is_written:
                return False
            chunk, is_first = following, False
        return True

    def _write(
        self, environment: Environment, chunk: _Steps, before: _About, after: _About
    ) -> bool | None:
        """Write in one transaction; False: another process was faster, None: there is no room."""
        try:
            with environment.begin(write=True) as txn:
                about = _about(txn)
                if about.version != before.version or before.change not in ("", about.change):
                    return False
                long_keys = about.long_keys
                for step in chunk:
                    if isinstance(step, KeyGroupRange):
                        self._clear(environment, txn, step)
                    else:
                        long_keys |= _put(txn, step)
                txn.put(_ABOUT, json.dumps(after._replace(long_keys=long_keys)).encode())
        except lmdb.MapFullError:
            return None
        return True

    def _clear(
        self, environment: Environment, txn: "lmdb.Transaction[bytes]", groups: KeyGroupRange
    ) -> None:
        if groups.intersection(self._groups) == self._groups:
            txn.drop(environment.entries, delete=False)
            return
        first, end = _bounds(groups)
        cursor = txn.cursor()
        if cursor.set_range(first):
            keys = itertools.takewhile(end.__gt__, cursor.iternext(values=False))
            _delete(txn, list(keys))


def open_store(root: Path, lineage: str, uid: str, groups: KeyGroupRange) -> LmdbStore:
    """Return the store of a range of key groups, at any version; make it where there is none.

    Args:
        root: a folder on a local disk of this host, for stores alone.
        lineage: of the checkpoint.
        uid: of the step.
        groups: those of the task.

    Raises:
        StorageError: the folder cannot be used.
    """
    path = boot_folder(root) / lineage / uid / f"{groups.first}-{groups.last}"
    remove_unused(root, path)
    environment_at(path)
    return LmdbStore(path, groups)


class LmdbView:
    """The entries that a read transaction sees.

    Args:
        txn: ends with the view.
        long_keys: True if the store ever held a key that had to be shortened.
    """

    def __init__(self, txn: "lmdb.Transaction[bytes]", *, long_keys: bool) -> None:
        self._txn = txn
        self._long_keys = long_keys

    def get_many(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        """See `StateView.get_many`."""
        wanted = keys.to_pylist()
        if not (self._long_keys and _has_long_keys(keys)):
            return pa.array(list(map(self._txn.get, wanted)), pa.binary())
        values = map(self._txn.get, map(_stored_key, wanted))
        return pa.array(list(map(_user_value, wanted, values)), pa.binary())

    def scan(self, first: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """See `StateView.scan`."""
        if not self._long_keys:
            return self._stored(first, end)
        # The _bounds may be long keys themselves: all that begins as they do is looked at.
        widest = end if len(end) <= PREFIX_BYTES else end[:PREFIX_BYTES] + b"\xff" * 33
        entries = _in_order(self._stored(first[:PREFIX_BYTES], widest))
        return (entry for entry in entries if first <= entry[0] < end)

    def batches(self, groups: KeyGroupRange) -> Iterator[pa.RecordBatch]:
        """See `StateView.batches`."""
        entries = self.scan(*_bounds(groups))
        while rows := list(itertools.islice(entries, BATCH_ROWS)):
            columns = [pa.array(list(map(item, rows)), pa.binary()) for item in _KEY_AND_VALUE]
            yield pa.RecordBatch.from_arrays(columns, schema=ENTRIES)

    def _stored(self, first: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        cursor = self._txn.cursor()
        if not cursor.set_range(max(first, FIRST_ENTRY)):
            return iter(())
        return itertools.takewhile(lambda entry: entry[0] < end, cursor.iternext())


def _stored_key(key: bytes) -> bytes:
    """Return the key under which LMDB has an entry."""
    if len(key) < STORED_KEY_MAX:
        return key
    digest = hashlib.blake2b(key, digest_size=DIGEST_BYTES).digest()
    return key[:PREFIX_BYTES] + digest


def _stored_value(key: bytes, value: bytes) -> bytes:
    """Return the value that LMDB has for an entry."""
    return value if len(key) < STORED_KEY_MAX else _LENGTH.pack(len(key)) + key + value


def _has_long_keys(keys: pa.BinaryArray) -> bool:
    """True if a key is too long for LMDB, and must be shortened."""
    return bool(len(keys)) and pc.max(pc.binary_length(keys)).as_py() >= STORED_KEY_MAX


def _bounds(groups: KeyGroupRange) -> tuple[bytes, bytes]:
    """Return the first possible key of the key groups, and the first one after them."""
    return groups.first.to_bytes(2, "big"), (groups.last + 1).to_bytes(2, "big")


def _in_order(stored: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    for _, run in itertools.groupby(stored, key=lambda entry: entry[0][:PREFIX_BYTES]):
        yield from sorted(itertools.starmap(_user_entry, run), key=operator.itemgetter(0))


def _user_entry(key: bytes, value: bytes) -> tuple[bytes, bytes]:
    if len(key) < STORED_KEY_MAX:
        return key, value
    start = _LENGTH.size
    stop = start + _LENGTH.unpack_from(value)[0]
    return value[start:stop], value[stop:]


def _user_value(key: bytes, value: bytes | None) -> bytes | None:
    if value is None or len(key) < STORED_KEY_MAX:
        return value
    return value[_LENGTH.size + len(key) :]


def _chunks(steps: Iterable[KeyGroupRange | pa.RecordBatch]) -> Iterator[_Steps]:
    chunk: _Steps = []
    rows = size = 0
    for step in steps:
        chunk.append(step)
        if isinstance(step, pa.RecordBatch):
            rows, size = rows + step.num_rows, size + step.nbytes
        if rows >= CHUNK_ROWS or size >= CHUNK_BYTES:
            yield chunk
            chunk, rows, size = [], 0, 0
    yield chunk


def _put(txn: "lmdb.Transaction[bytes]", batch: pa.RecordBatch) -> bool:
    """Set and delete entries; True if a key had to be shortened."""
    gone = batch.column(0).filter(pc.is_null(batch.column(1)))
    if len(gone):
        _delete(txn, list(map(_stored_key, gone.to_pylist())))
        batch = batch.filter(pc.is_valid(batch.column(1)))
    if batch.num_rows == 0:
        return False
    keys, values = (column.to_pylist() for column in batch.columns)
    cursor = txn.cursor()
    is_long = _has_long_keys(batch.column(0))
    if is_long:
        values = list(map(_stored_value, keys, values))
        keys = list(map(_stored_key, keys))
    is_behind = not is_long and (not cursor.last() or cursor.key() < keys[0])
    done, _ = cursor.putmulti(zip(keys, values, strict=True), append=is_behind)
    if done != len(keys):
        raise BrokenInvariantError(f"{done} of {len(keys)} entries were set: are they sorted?")
    return is_long


def _delete(txn: "lmdb.Transaction[bytes]", keys: list[bytes]) -> None:
    collections.deque(map(txn.delete, keys), maxlen=0)


def _about(txn: "lmdb.Transaction[bytes]") -> _About:
    data = txn.get(_ABOUT)
    if data is None:
        return _About()
    version, change, long_keys = json.loads(data)
    return _About(None if version is None else Version(*version), change, long_keys)


@dataclass(frozen=True)
class LocalState:
    """A worker's copies of a checkpoint's state.

    Args:
        checkpoint: its URI.
        lineage: its id, so that copies of two checkpoints do not meet.
    """

    checkpoint: str = field(repr=False)  # credentials may stand in it
    lineage: str

    def storage(self) -> Storage:
        """Return the checkpoint's files; never a connection that was made before a fork."""
        return _storages.get(self.checkpoint, lambda: FileStorage(self.checkpoint))

    def store(self, uid: str, groups: KeyGroupRange) -> StateStore:
        """Return the copy of a step's key groups on this host."""
        return open_store(state_root(), self.lineage, uid, groups)


def state_folder() -> Path:
    """Return the folder for copies of state on this host, without making it."""
    named = os.environ.get(ROOT_VARIABLE)
    return Path(named) if named else Path(tempfile.gettempdir(), f"tallystick-{os.getuid()}")


def state_root() -> Path:
    """Return the folder for copies of state, made if missing; no other user may change it.

    Other users may not even read the one below the system's temporary folder.

    Raises:
        OptionError: another user owns it, or could change it.
    """
    root = state_folder()
    if os.environ.get(ROOT_VARIABLE):
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.stat()  # a link of the administrator's may be what is named
        refused, what = _WRITABLE_BY_OTHERS, "that only this user can change"
        remedy = (
            f"Name a folder in it that is not there yet in {ROOT_VARIABLE}, or give this one to "
            f"the user that Spark's executors run as, and take others' right to write (chmod go-w)"
        )
    else:
        root.mkdir(mode=0o700, exist_ok=True)
        status = root.lstat()
        refused, what = _OPEN_TO_OTHERS, "that only this user can use"
        remedy = f"Remove it, or name another folder in {ROOT_VARIABLE}"
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_ours or stat.S_IMODE(status.st_mode) & refused:
        raise OptionError(
            f"{root}: expected a folder {what}, for copies of state; it is of user "
            f"{status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}. {remedy}"
        )
    return root


def disk_space(checkpoint: str) -> Iterator[CheckFinding]:
    """Check whether disks are nearly full; object stores are not asked.

    Args:
        checkpoint: its location.
    """
    places = {"copies of state": state_folder(), "the checkpoint": local_path(checkpoint)}
    for what, place in places.items():
        while place is not None and not place.exists():
            place = place.parent
        if place is None:
            continue
        usage = shutil.disk_usage(place)
        if usage.free < max(FREE_MIN_BYTES, FREE_MIN_SHARE * usage.total):
            yield CheckFinding(
                Severity.WARNING,
                "disk",
                f"{usage.free / 2**30:.1f} GiB of {usage.total / 2**30:.1f} GiB are free on the "
                f"disk of {what} ({place})",
                "When it is full, epochs are aborted and run again until there is space; nothing "
                "is lost.",
                f"df -h {place}; then make space, or move it: the checkpoint to a larger disk "
                f"while the pipeline is stopped, copies of state by {ROOT_VARIABLE}.",
            )
