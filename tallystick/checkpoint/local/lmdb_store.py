"""The StateStore port for real: an LMDB file per key-group range on the worker's own disk.

    root / "boot-…" / lineage / uid / "0-63" / data.mdb, lock.mdb         and "0-63.lock" beside it

Invariants:
- It holds a committed version whole, or says that it has none: an apply of several transactions
  takes the version away with the first and gives the new one with the last; each checks that it is
  still the one at work.
- Nothing is synced to disk: a killed process loses nothing, a machine that stops may. So the boot's
  id is in the path: what another boot left is never opened.
- No read transaction outlives its `view`: LMDB cannot reuse a page that a reader may see.
- A folder is never emptied under a process that has it open: it is renamed away, and whoever has it
  open keeps a copy of its own, which it leaves at its next use.

Limits: one host, and not shared between containers (LMDB tells readers apart by process id). A
process that is stopped, not killed, in the middle of a write keeps others from writing.
"""

import collections
import contextlib
import itertools
import json
import uuid
from collections.abc import Iterable, Iterator
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
from tallystick.checkpoint.local.lmdb_view import (
    LmdbView,
    bounds,
    has_long_keys,
    stored_key,
    stored_value,
)
from tallystick.errors import BrokenInvariantError, StorageError
from tallystick.state.catalog import Version
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.overlay import EmptyView, StateView

CHUNK_ROWS = 100_000
CHUNK_BYTES = 64 << 20
"""The bytes that one transaction writes: LMDB copies pages it touches, reuses only older ones."""

_ABOUT = b"\0"
"""Sorts before all entries, whose keys have more than two bytes."""

_Steps = list[KeyGroupRange | pa.RecordBatch]


class _About(NamedTuple):
    """The store's description of itself.

    Args:
        version: None while a change is under way, or was given up.
        change: names the apply that wrote last.
        long_keys: see `lmdb_view`.
    """

    version: Version | None = None
    change: str = ""
    long_keys: bool = False


class LmdbStore:
    """The committed state of one step's key groups, on this host.

    Args:
        path: its folder.
        groups: which it holds.
    """

    def __init__(self, path: Path, groups: KeyGroupRange) -> None:
        self._path = path
        self._groups = groups

    def __repr__(self) -> str:
        return f"LmdbStore({str(self._path)!r})"

    def close(self) -> None:
        """Let go of the file, which this process otherwise keeps open for the next epoch."""
        environment_at(self._path).close()

    def version(self) -> Version | None:
        """See `StateStore.version`."""
        with self._transaction() as txn:
            return _about(txn).version

    def apply(
        self,
        expected: Version | None,
        version: Version,
        steps: Iterable[KeyGroupRange | pa.RecordBatch],
    ) -> bool:
        """See `StateStore.apply`; at `None` it starts from nothing, whatever lies there.

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
        """See `StateStore.view`; before the first epoch it is empty, whatever lies there."""
        if version is None:
            yield EmptyView()
            return
        with self._transaction() as txn:
            about = _about(txn)
            yield LmdbView(txn, long_keys=about.long_keys) if about.version == version else None

    @contextlib.contextmanager
    def _transaction(self) -> "Iterator[lmdb.Transaction[bytes]]":
        environment = environment_at(self._path)
        txn = environment.begin()
        environment.views += 1
        try:
            yield txn
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
        """One transaction; False where another process was faster, None where there is no room."""
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
        first, end = bounds(groups)
        cursor = txn.cursor()
        if cursor.set_range(first):
            keys = itertools.takewhile(end.__gt__, cursor.iternext(values=False))
            _delete(txn, list(keys))


def open_store(root: Path, lineage: str, uid: str, groups: KeyGroupRange) -> LmdbStore:
    """The store of a range of key groups, at whatever version it is; made where there is none.

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
    """Set and delete; whether a key had to be shortened."""
    gone = batch.column(0).filter(pc.is_null(batch.column(1)))
    if len(gone):
        _delete(txn, list(map(stored_key, gone.to_pylist())))
        batch = batch.filter(pc.is_valid(batch.column(1)))
    if batch.num_rows == 0:
        return False
    keys, values = (column.to_pylist() for column in batch.columns)
    cursor = txn.cursor()
    is_long = has_long_keys(batch.column(0))
    if is_long:
        values = list(map(stored_value, keys, values))
        keys = list(map(stored_key, keys))
    is_behind = not is_long and (not cursor.last() or cursor.key() < keys[0])
    done, _ = cursor.putmulti(zip(keys, values, strict=True), append=is_behind)
    if done != len(keys):
        raise BrokenInvariantError(f"{done} of {len(keys)} entries were set: are they sorted?")
    return is_long


def _delete(txn: "lmdb.Transaction[bytes]", keys: list[bytes]) -> None:
    collections.deque(map(txn.delete, keys), maxlen=0)


def _about(txn: "lmdb.Transaction[bytes]") -> _About:
    found = txn.get(_ABOUT)
    if found is None:
        return _About()
    version, change, long_keys = json.loads(found)
    return _About(None if version is None else Version(*version), change, long_keys)
