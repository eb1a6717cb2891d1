"""The doors of a keyed task for real: the checkpoint's files, and copies of state on this host.

What lies below the local root is needed by nothing: it only saves reading the checkpoint again.
"""

import os
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tallystick.errors import OptionError
from tallystick.lmdb_store import open_store
from tallystick.ports import StateStore, Storage
from tallystick.state.key_groups import KeyGroupRange
from tallystick.storage import FileStorage

ROOT_VARIABLE = "TALLYSTICK_STATE_DIR"
"""Names the folder for local copies of state, on each host; else the system's temporary folder."""

_storages: dict[tuple[int, str], FileStorage] = {}


@dataclass(frozen=True)
class LocalState:
    """What a worker has of a checkpoint.

    Args:
        checkpoint: its URI.
        lineage: its id, so that copies of two checkpoints do not meet.
    """

    checkpoint: str = field(repr=False)  # credentials may stand in it
    lineage: str

    def storage(self) -> Storage:
        """The checkpoint's files; never a connection that was made before a fork."""
        key = (os.getpid(), self.checkpoint)
        if key not in _storages:
            _storages[key] = FileStorage(self.checkpoint)
        return _storages[key]

    def store(self, uid: str, groups: KeyGroupRange) -> StateStore:
        """The copy of a step's key groups on this host."""
        return open_store(state_root(), self.lineage, uid, groups)


def state_root() -> Path:
    """The folder for copies of state, made where it is not there; no one else may look into it.

    Raises:
        OptionError: somebody else owns it.
    """
    named = os.environ.get(ROOT_VARIABLE)
    if named:
        root = Path(named)
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        return root
    root = Path(tempfile.gettempdir(), f"tallystick-{os.getuid()}")
    root.mkdir(mode=0o700, exist_ok=True)
    found = root.lstat()
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_ours or stat.S_IMODE(found.st_mode) & 0o077:
        raise OptionError(
            f"{root}: expected a folder that only this user can use, for copies of state. Remove "
            f"it, or name another folder in {ROOT_VARIABLE}"
        )
    return root
