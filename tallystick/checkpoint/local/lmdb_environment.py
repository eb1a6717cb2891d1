"""LMDB files and their folders, with one open environment per path and process.

LMDB's rules that this module keeps: a file is opened once per process, never used across a fork,
not grown while the process reads it, and lock file and data file belong together. Reader slots of
killed processes are freed at each opening.
"""

import contextlib
import errno
import fcntl
import math
import mmap
import os
import resource
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import lmdb

from tallystick.errors import StorageError

UNUSED_MAX_S = 24 * 3600
"""Folders not written for this long are removed: of other ranges, other lineages, other boots."""

LOOK_AROUND_S = 3600
"""The interval at which a process looks for them."""

LOCK_PATIENCE_S = 60.0
"""A process that was stopped may hold a lock for ever: then we go on, the versions decide."""

READERS_MAX = 1024
OPEN_MAX = 64
"""Environments that a process keeps open; each takes address space and file descriptors."""

MAP_BYTES = 64 << 30
"""The size to which a file may grow before its map must too; takes address space only."""

MAP_SHARE = 32
"""The share of a limited address space that a file may take at first."""

BLOAT = 3
BLOAT_BYTES_MIN = 64 << 20
"""A file this many times larger than what is in it, and by this much, is rewritten."""

UNREADABLE = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
)
"""The file is of no use."""

Taken = TypeVar("Taken")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_GONE = ".gone"
_open: dict[Path, "Environment"] = {}
"""No `WorkerCache`: in a fork, LMDB opens a file again only after the inherited one was closed."""
_looked_s: dict[Path, float] = {}


class Environment:
    """An open LMDB file.

    Args:
        path: its folder.
        map_bytes: the largest size of the file, to begin with; None: as the process allows.
    """

    def __init__(self, path: Path, map_bytes: int | None = None) -> None:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = path
        self.views = 0
        self._pid = os.getpid()
        self._open_file(map_bytes or _map_bytes())

    def _open_file(self, map_bytes: int) -> None:
        self.lmdb = lmdb.open(
            str(self.path),
            map_size=map_bytes,
            sync=False,
            metasync=False,
            readahead=False,
            max_readers=READERS_MAX,
        )
        self.lmdb.reader_check()
        self.entries = self.lmdb.open_db()
        self._inode = _inode(self.path)

    @property
    def is_current(self) -> bool:
        """True if this process opened the file, and the path still leads to the same file."""
        return self._pid == os.getpid() and self._inode == _inode(self.path)

    def begin(self, *, write: bool = False) -> "lmdb.Transaction[bytes]":
        """Start a transaction."""
        try:
            return self.lmdb.begin(write=write)
        except lmdb.MapResizedError:  # another process made it larger
            self._resize(0)
        except lmdb.ReadersFullError:
            self.lmdb.reader_check()
        return self.lmdb.begin(write=write)

    def grow(self) -> None:
        """Make room: a transaction failed without it."""
        self._resize(2 * self.lmdb.info()["map_size"])

    def is_bloated(self) -> bool:
        """True if the unused file is much larger than its content: LMDB never gives pages back."""
        stat = self.lmdb.stat()
        pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        size = (self.path / "data.mdb").stat().st_size
        return size > BLOAT * pages * stat["psize"] + BLOAT_BYTES_MIN and self.views == 0

    def rewrite(self) -> None:
        """Replace the file with a compacted copy; the caller holds the folder's lock."""
        assert self.views == 0, "somebody reads it"
        fresh = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex[:8]}{_GONE}")
        fresh.mkdir(mode=0o700)
        try:
            self.lmdb.copy(str(fresh), compact=True)
            self.close()
            discard(self.path)
            fresh.rename(self.path)
        except OSError:  # the next process that opens it makes it again
            shutil.rmtree(fresh, ignore_errors=True)

    def close(self) -> None:
        """Close the file, and forget the environment."""
        self.lmdb.close()
        _open.pop(self.path, None)

    def _resize(self, map_bytes: int) -> None:
        if self.views:
            raise StorageError(
                f"local state {self.path}: it has to grow while this process reads it. Run the "
                f"task again; ulimit -v (or spark.executor.pyspark.memory) unlimited avoids it."
            )
        try:
            self.lmdb.set_mapsize(map_bytes)
        except lmdb.MemoryError:  # it has released the old map, and would crash without one
            self.close()
            _with_room(lambda: self._open_file(map_bytes or _map_bytes()))
            _open[self.path] = self


def environment_at(path: Path, *, is_locked: bool = False) -> Environment:
    """Return the environment at a path, opened if need be.

    Args:
        path: its folder.
        is_locked: whether the caller holds its lock.

    Raises:
        StorageError: it cannot be opened: disk or rights are missing.
    """
    environment = _open.pop(path, None)
    if environment is not None:
        if environment.is_current:
            _open[path] = environment  # at the end: the one used last
            return environment
        _leave(environment)
    _close_idle(len(_open) - OPEN_MAX + 1)
    with contextlib.nullcontext() if is_locked else locked(path):
        try:
            opened = _opened(path)
        except (lmdb.Error, OSError) as error:
            raise StorageError(f"local state {path}: opening it failed: {error}") from error
    _open[path] = opened
    return opened


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a folder, which a killed process releases."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline_s = time.monotonic() + LOCK_PATIENCE_S
        while not _is_taken(descriptor) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def discard(path: Path) -> None:
    """Remove a folder atomically; a process with the file open keeps a copy."""
    gone = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{_GONE}")
    with contextlib.suppress(FileNotFoundError):
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def boot_folder(root: Path) -> Path:
    """Return the folder for the files of this boot: no other's can be trusted."""
    if _BOOT_ID.exists():
        return root / f"boot-{_BOOT_ID.read_text().strip()}"
    return root / f"boot-unknown-{os.getpid()}"


def remove_unused(root: Path, kept: Path) -> None:
    """Remove folders not written for a day; looks when a folder is new, else once an hour.

    Args:
        root: of all folders.
        kept: the one that is about to be used.
    """
    now_s = time.monotonic()
    if kept.exists() and now_s < _looked_s.get(root, -math.inf) + LOOK_AROUND_S:
        return
    _looked_s[root] = now_s
    oldest_s = time.time() - UNUSED_MAX_S
    for folder in root.glob("boot-*/*/*/*"):
        with contextlib.suppress(OSError):
            if folder == kept or not folder.is_dir() or _used_s(folder) > oldest_s:
                continue
            discard(folder)
            folder.with_name(f"{folder.name}.lock").unlink(missing_ok=True)
            for parent in list(folder.parents)[:3]:
                parent.rmdir()  # fails, and ends the loop, where others are in it


def _used_s(folder: Path) -> float:
    data = folder / "data.mdb"
    return (data if data.exists() else folder).stat().st_mtime


def _opened(path: Path) -> Environment:
    try:
        return _with_room(lambda: Environment(path))
    except UNREADABLE:
        discard(path)
        return _with_room(lambda: Environment(path))


def _with_room(take: Callable[[], Taken]) -> Taken:
    """Call `take`; where address space runs out, close all files that nobody reads, and repeat."""
    try:
        return take()
    except lmdb.MemoryError:
        if not _close_idle(len(_open)):
            raise
    return take()


def _close_idle(count: int) -> int:
    """Close up to this many environments that are not being read, the longest unused first."""
    idle = [env for env in _open.values() if env.views == 0][: max(0, count)]
    for environment in idle:
        environment.close()
    return len(idle)


def _leave(environment: Environment) -> None:
    """Close an environment that was replaced, or that belongs to the process we forked from."""
    if environment.views == 0:
        environment.lmdb.close()
    # Else a view of it is open: closing would end that, and the last one to go closes the file.


def _is_taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = (path / "data.mdb").stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _map_bytes() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return MAP_BYTES
    return min(MAP_BYTES, limit // MAP_SHARE // mmap.PAGESIZE * mmap.PAGESIZE)
