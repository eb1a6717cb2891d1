"""The folder that a command on savepoints fills: its own meanwhile, and as before if it fails.

Invariant: what a failed command removes, it wrote itself: it alone could take the folder, which was
empty then. Where the storage cannot create a file exclusively, only the look that finds it empty
stands between two commands.
"""

import contextlib
import logging
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from tallystick.checkpoint import savepoint as s
from tallystick.checkpoint.manifest import FOLDER as MANIFESTS
from tallystick.checkpoint.savepoint import Savepoint
from tallystick.errors import OptionError, StorageError
from tallystick.ports import Storage
from tallystick.state.handles import FOLDER as STATE_FOLDER

logger = logging.getLogger(__name__)

MARKER = "being-written"
"""A file that says who fills the folder, or empties it."""
DELETION = "savepoint delete"
SPARKS_FOLDERS = ("offsets", "commits", "sources", "state")
MADE_WHOLE_BY = (s.FILE, "metadata")
"""What is written last: with it, a folder is a savepoint or a checkpoint."""
MARK_SHOWN_MAX = 200

_at_work: set[str] = set()
"""What tells the marks of this process' commands apart that have not ended."""

Written = list[tuple[Storage, str]]
"""Folders and the paths in them, in the order of writing."""


@contextmanager
def taken(folder: Storage, command: str) -> Iterator[None]:
    """Have an unused folder to oneself.

    Raises:
        OptionError: it is in use, or another command fills it, or was killed while it did.
    """
    refuse_used(folder)
    with _marked(folder, command) as is_marked:
        if is_marked:
            refuse_used(folder)  # another command may have filled it since, and be done
        yield


@contextmanager
def held_to_delete(folder: Storage) -> Iterator[None]:
    """Have a savepoint's folder to oneself; the place of a command that was killed is taken.

    Raises:
        OptionError: another command has it, or was killed where it cannot be seen from here.
    """
    mark = folder.get(MARKER)
    if mark is not None and _is_dead(mark):
        folder.delete(MARKER)
    with _marked(folder, DELETION):
        yield


@contextmanager
def _marked(folder: Storage, command: str) -> Iterator[bool]:
    name = uuid.uuid4().hex
    _at_work.add(name)
    try:
        is_marked = _mark(folder, command, name)
        try:
            yield is_marked
        finally:
            if is_marked:
                remove(folder, MARKER)
    finally:
        _at_work.discard(name)


def refuse_used(folder: Storage) -> None:
    """A savepoint and a restored checkpoint get a folder that nobody uses.

    What is deleted or collected in it later must be theirs.

    Raises:
        OptionError: there are files of a checkpoint or of a savepoint.
    """
    if folder.get(s.FILE) is not None:
        raise OptionError(f"{folder.location} holds a savepoint already: name another folder.")
    if folder.get(s.TOMBSTONE) is not None:
        raise OptionError(s.unfinished_deletion(folder.location))
    used = [path for path in (*SPARKS_FOLDERS, MANIFESTS, s.CLAIMS) if folder.names(path)]
    if folder.get("metadata") is not None:
        used.append("metadata")
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


def _mark(folder: Storage, command: str, name: str) -> bool:
    """Create the marker; False: this storage cannot create a file exclusively."""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    who = f"{command} (process {os.getpid()} on {socket.gethostname()}, since {since})"
    mark = f"{who}\n{name}\n{os.getpid()}\n{_machine()}\n".encode()
    try:
        if folder.put_new(MARKER, mark):
            return True
    except (OptionError, StorageError) as error:
        found = folder.get(MARKER)  # whether it was created is unknown
        if found is None:
            logger.warning("%s is not kept from other commands: %s", folder.location, error)
        if found is None or found == mark:
            return found is not None
    writer = _writer(folder)
    doing = "emptied" if writer.startswith(DELETION) else "filled"
    raise OptionError(
        f"{folder.location} is being {doing} by {writer or 'another command'}. Nothing was "
        f"changed. Name another folder, or wait. If that command was killed, remove the file "
        f"{MARKER} there, then try again."
    )


def _machine() -> str:
    """Where a process id means the same process: until the next boot, in one container."""
    found = [socket.gethostname()]
    with contextlib.suppress(OSError):  # not Linux
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        found.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(found)


def _is_dead(mark: bytes) -> bool:
    """Whether a command has surely ended; what runs on another machine may be slow."""
    lines = mark.decode(errors="replace").splitlines()
    if len(lines) != 4 or lines[3] != _machine() or not lines[2].isdecimal():
        return False
    if int(lines[2]) == os.getpid():
        return lines[1] not in _at_work
    try:
        os.kill(int(lines[2]), 0)  # only asks
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # another user's; or no number of a process
        return False
    return False


def refuse_at_work(folder: Storage, claimed: str) -> None:
    """Raise if a command fills or empties a folder, or was killed while it did.

    Args:
        folder: who holds claims.
        claimed: where.
    """
    if folder.get(MARKER) is not None:
        raise OptionError(
            f"{folder.location} has {MARKER}: {_writer(folder) or 'a command'} is at work there, "
            f"and may use files of {claimed}. Nothing was changed. Wait for it. If that command "
            f"was killed, remove the file {MARKER} there, then try again."
        )


def _writer(folder: Storage) -> str:
    mark = folder.get(MARKER) or b""
    return mark.decode(errors="replace").partition("\n")[0][:MARK_SHOWN_MAX]


@contextmanager
def all_or_none() -> Iterator[Written]:
    """Remove what was written if an error comes; each file goes into the list before it is written.

    First what made the folder whole: while that may be there, what it needs has to stay. Then
    claims, which nobody else would ever end. What cannot be removed is logged.
    """
    written: Written = []
    try:
        yield written
    except BaseException:
        _undo(written)
        raise


def _undo(written: Written) -> None:
    written.reverse()
    for folder, path in sorted(written, key=lambda each: _rank(each[1])):
        is_removed = remove(folder, path)
        if path in MADE_WHOLE_BY and not is_removed and _may_be_there(folder, path):
            logger.warning("%s: what %s needs is left too, with its claims", folder.location, path)
            return


def _rank(path: str) -> int:
    return 0 if path in MADE_WHOLE_BY else 1 if path.startswith(s.CLAIMS) else 2


def remove(folder: Storage, path: str) -> bool:
    """Remove a file; return whether that was done. What is left is logged."""
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


def put_description(target: Storage, savepoint: Savepoint, written: Written) -> None:
    """Write the file that makes a folder a savepoint.

    Raises:
        ManifestError: nobody could read it: a location or a name is one that none may have.
    """
    data = savepoint.encode()
    s.decode(data, f"{target.location}/{s.FILE}")
    written.append((target, s.FILE))
    target.put(s.FILE, data)
