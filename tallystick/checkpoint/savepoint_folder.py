"""The folder that a command on savepoints fills or empties, and the copied files in it.

Invariants:

* One command at a time works in a folder: it holds the marker. Where the storage cannot create a
  file exclusively, only the look that finds the folder empty stands between two commands.
* A failed command removes only files that it wrote itself: the folder was empty, and no other
  command could take it.
* `savepoint.json` is written last, after all files of state were read back and have the bytes that
  the manifest names. Without it a folder is no savepoint, even with all other files.
"""

import logging
import os
import socket
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from tallystick.checkpoint.folder import CheckpointFolder, encode_lineage, named_file
from tallystick.checkpoint.spark_log import COMMITS, METADATA, OFFSETS, SOURCES, SPARKS_STATE
from tallystick.epoch.manifest import FOLDER as MANIFESTS
from tallystick.epoch.manifest import SEED, Manifest, manifest_path
from tallystick.epoch.savepoint import FILE, TOMBSTONE, Savepoint, decode, unfinished_deletion
from tallystick.errors import OptionError, StateFileError, StorageError
from tallystick.ports import Storage
from tallystick.state.catalog import FOLDER as STATE_FOLDER
from tallystick.state.catalog import StateFile, StepState
from tallystick.state.changelog import damage_of

logger = logging.getLogger(__name__)

MARKER = "being-written"
"""A file that says which command fills or empties the folder."""
DELETION = "savepoint delete"
SPARKS_FOLDERS = (OFFSETS, COMMITS, SOURCES, SPARKS_STATE)
WRITTEN_LAST = (FILE, METADATA)
"""Files that make a folder a savepoint, or a checkpoint."""
MARKER_SHOWN_MAX = 200
FILES_AT_A_TIME = 4
"""Copied or verified; each is held in memory as a whole."""


class SupersededError(StateFileError):
    """A file to be copied is gone: if a pipeline runs there, a later epoch has replaced it."""


class NewFolder:
    """A new folder while a command fills it; see `filled`.

    Args:
        storage: the folder.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._written: list[str] = []
        self._copied: dict[str, StateFile] = {}

    def put(self, path: str, data: bytes) -> None:
        """Write a file that is removed again if the command fails."""
        self.will_have(path)
        self.storage.put(path, data)

    def put_seed(self, seed: Manifest) -> None:
        """Write the manifest that the new checkpoint begins with."""
        self.put(manifest_path(seed, f"{SEED}{uuid.uuid4().hex[:12]}"), seed.encode())

    def begin(self, lineage: str) -> None:
        """Make the folder a checkpoint of a given id."""
        self.put(METADATA, encode_lineage(lineage))

    def will_have(self, path: str) -> None:
        """Remove this file too if the command fails."""
        self._written.append(path)

    def copy(self, source: Storage, state: Iterable[StepState]) -> None:
        """Copy files of state, to the same paths.

        Files of an earlier call stay, so that another try, of a later epoch, copies only what is
        new in it: file names are never used twice.

        Raises:
            SupersededError: some are missing; all others have been copied.
            StateFileError: one is damaged.
        """

        def copy_one(file: StateFile) -> str:
            data = source.get(file.path)
            if data is None:
                return file.path
            if damage := damage_of(file, data):
                raise StateFileError(f"{named_file(file, source.location)} is damaged: {damage}")
            self.put(file.path, data)
            self._copied[file.path] = file
            return ""

        wanted = [file for file in files_of(state) if self._copied.get(file.path) != file]
        with ThreadPoolExecutor(FILES_AT_A_TIME) as threads:
            missing = set(threads.map(copy_one, wanted))
        for file in wanted:
            if file.path in missing:
                raise SupersededError(f"{named_file(file, source.location)} is missing")

    def complete(self, savepoint: Savepoint) -> None:
        """Verify a savepoint's files, then write `savepoint.json`, which completes the savepoint.

        Raises:
            StateFileError: a file cannot be read back as it was written.
            ManifestError: the description would be unreadable: it has a name that none may have.
        """
        data = savepoint.encode()
        decode(data, f"{self.storage.location}/{FILE}")
        self.verify(savepoint.manifest.state)
        self.put(FILE, data)

    def verify(self, state: Iterable[StepState]) -> None:
        """Read all copied files back; first remove copies of earlier tries that no state names.

        Raises:
            StateFileError: a file cannot be read back as it was written.
        """
        files = files_of(state)
        for path in sorted(self._copied.keys() - {file.path for file in files}):
            remove(self.storage, path)
        with ThreadPoolExecutor(FILES_AT_A_TIME) as threads:
            list(threads.map(self._verify, files))

    def _verify(self, file: StateFile) -> None:
        data = self.storage.get(file.path)
        damage = "it is missing" if data is None else damage_of(file, data)
        if damage:
            raise StateFileError(
                f"{named_file(file, self.storage.location)} is not as it was just written: "
                f"{damage}. Nothing was saved. Check the storage, or name a folder on another one."
            )

    def undo(self) -> None:
        """Remove all written files, beginning with `WRITTEN_LAST`; log every file that is left.

        While a file of `WRITTEN_LAST` may still be there, the files that it needs have to stay.
        """
        newest_first = self._written[::-1]
        for path in sorted(newest_first, key=lambda path: path not in WRITTEN_LAST):
            is_removed = remove(self.storage, path)
            if path in WRITTEN_LAST and not is_removed and _may_be_there(self.storage, path):
                logger.warning("%s: what %s needs is left too", self.storage.location, path)
                return


@contextmanager
def filled(folder: Storage, command: str) -> Iterator[NewFolder]:
    """Reserve an unused folder; after an error it is as empty as before.

    Raises:
        OptionError: it is in use, or another command fills it, or was killed while it did.
    """
    _refuse_used(folder)
    with marked(folder, command) as is_marked:
        if is_marked:
            _refuse_used(folder)  # another command may have filled it since, and be done
        new = NewFolder(folder)
        try:
            yield new
        except BaseException:
            new.undo()
            raise


@contextmanager
def marked(folder: Storage, command: str) -> Iterator[bool]:
    """Keep other commands off a folder; False: this storage cannot create a file exclusively.

    Raises:
        OptionError: another command is at work there, or was killed.
    """
    is_marked = _mark(folder, command)
    try:
        yield is_marked
    finally:
        if is_marked:
            remove(folder, MARKER)


def _mark(folder: Storage, command: str) -> bool:
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    mark = f"{command} (process {os.getpid()} on {socket.gethostname()}, since {now})\n".encode()
    try:
        if folder.put_new(MARKER, mark):
            return True
    except (OptionError, StorageError) as error:
        marker = folder.get(MARKER)  # whether it was created is unknown
        if marker is None:
            logger.warning("%s is not kept from other commands: %s", folder.location, error)
        if marker is None or marker == mark:
            return marker is not None
    writer = _writer(folder)
    doing = "emptied" if writer.startswith(DELETION) else "filled"
    raise OptionError(
        f"{folder.location} is being {doing} by {writer or 'another command'}. Nothing was "
        f"changed. Name another folder, or wait. If that command was killed, remove the file "
        f"{MARKER} there, then try again."
    )


def _writer(folder: Storage) -> str:
    mark = folder.get(MARKER) or b""
    return mark.decode(errors="replace").partition("\n")[0][:MARKER_SHOWN_MAX]


def _refuse_used(folder: Storage) -> None:
    """Raise OptionError if a folder has files of a checkpoint or of a savepoint.

    Files that are deleted or collected there later must be those of the command that fills it.
    """
    if folder.get(FILE) is not None:
        raise OptionError(f"{folder.location} holds a savepoint already: name another folder.")
    if folder.get(TOMBSTONE) is not None:
        raise OptionError(unfinished_deletion(folder.location))
    used = [path for path in (*SPARKS_FOLDERS, MANIFESTS) if folder.names(path)]
    if CheckpointFolder(folder).is_begun:
        used.append(METADATA)
    if any(map(folder.names, folder.names(STATE_FOLDER))):  # a step's folder may be left, empty
        used.append(STATE_FOLDER)
    if used:
        writer = _writer(folder)
        whose = f"what {writer} writes, or left when it was killed"
        raise OptionError(
            f"{folder.location} is not empty, it has {', '.join(used)}: "
            f"{whose if writer else 'a checkpoint, or what a killed command left'}. Nothing was "
            f"changed. Name a new folder."
        )


def remove(folder: Storage, path: str) -> bool:
    """Remove a file; return True if that was done. A file that is left is logged."""
    try:
        folder.delete(path)
    except Exception as error:  # of any kind: it must not hide why the command failed
        logger.warning("%s: %s is left, remove it by hand: %s", folder.location, path, error)
        return False
    return True


def _may_be_there(folder: Storage, path: str) -> bool:
    try:
        return folder.get(path) is not None
    except Exception:
        return True


def refuse_savepoint(checkpoint: Storage) -> None:
    """Refuse a query whose checkpoint would be the folder of a savepoint.

    No manifest of the query names the savepoint's files, so the query would collect them.

    Raises:
        OptionError: a savepoint lies there.
    """
    if checkpoint.get(FILE) is not None:
        raise OptionError(
            f"checkpoint {checkpoint.location} is the folder of a savepoint ({FILE}): a query "
            f"would remove its files as those that no epoch needs. None was touched. Restore it "
            f"(`tallystick savepoint restore {checkpoint.location} <new folder>`), and start the "
            f"query on the new folder; what Spark has put here already (metadata, offsets) can go. "
            f"If queries have run here before and the savepoint is no longer of use, remove "
            f"{FILE} instead."
        )


def files_of(state: Iterable[StepState]) -> list[StateFile]:
    """Return all files of some steps."""
    return [file for step in state for file in step.files]


def whole_uri(location: str) -> str:
    """Return a location as a URI that means the same wherever it is read."""
    is_hadoops = location.startswith("file:") and not location.startswith("file://")
    if "://" in location and not is_hadoops:
        return location.rstrip("/")
    path = Path(location.removeprefix("file:")).absolute()
    return (path.resolve() if ".." in path.parts else path).as_uri()


def name_of(folder: Storage) -> str:
    """Return the name of the savepoint in a folder."""
    return whole_uri(folder.location).rpartition("/")[2]
