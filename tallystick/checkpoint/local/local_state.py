"""The ports of a keyed task: the checkpoint's files, and copies of state on this host.

Nothing needs the files below the local root: they only save reading the checkpoint again.
"""

import os
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tallystick.checkpoint.local.lmdb_store import open_store
from tallystick.errors import OptionError
from tallystick.host.worker_cache import WorkerCache
from tallystick.ports import StateStore, Storage
from tallystick.state.key_groups import KeyGroupRange
from tallystick.storage.file_storage import FileStorage

ROOT_VARIABLE = "TALLYSTICK_STATE_DIR"
"""Names the folder for local copies of state, on each host; else the system's temporary folder."""

_OPEN_TO_OTHERS = 0o077
_WRITABLE_BY_OTHERS = 0o022
_storages: WorkerCache[str, FileStorage] = WorkerCache()


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
