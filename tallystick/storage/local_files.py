"""Files on a local disk that appear whole or not at all, and durably.

A draft beside the file, fsync, a rename or a hard link, and an fsync of the folder.
"""

import contextlib
import errno
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from tallystick.errors import OptionError

DRAFT_UNUSED_S = 24 * 3600
"""An unfinished file of a killed process is removed when it is as old as this."""

_COPIED_BYTES = 1 << 20
_DRAFT = re.compile(r"\..+\.tallystick-[0-9a-f]{8}")
"""The names of our drafts, and of no others: other programs may have files in the folder."""


def put_local(path: Path, data: bytes) -> None:
    """Write a file on a local disk, atomically and durably."""
    with _durable_draft(path, data) as draft:
        draft.rename(path)
    fsync_folder(path.parent)


def put_new_local(path: Path, data: bytes) -> bool:
    """Create a file with its content, durably; return False if the name is taken."""
    with _durable_draft(path, data) as draft:
        is_new = _linked(draft, path)
        draft.unlink()
    fsync_folder(path.parent)  # a file that another writer has just linked counts from now on, too
    return is_new


def _linked(draft: Path, path: Path) -> bool:
    try:
        os.link(draft, path)
    except FileExistsError:
        # NFS repeats a request whose answer was lost: two names show that ours was the first.
        return draft.stat().st_nlink == 2
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        raise OptionError(
            f"checkpoint {path.parent}: a file that must be new is needed here, and this file "
            f"system has no hard links to create one exclusively ({error.strerror}). Put the "
            f"checkpoint on another disk or on S3, or have a KafkaSink with transactions='epoch' "
            f"in the pipeline, which decides in Kafka instead."
        ) from None
    return True


@contextlib.contextmanager
def _durable_draft(path: Path, data: bytes) -> Iterator[Path]:
    """Yield a draft beside a file, with the file's future content; a failure leaves no draft."""
    make_folder(path.parent)
    _remove_old_drafts(path.parent)
    draft = _draft_beside(path)
    try:
        with open(draft, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield draft
    except (OSError, OptionError):
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def move_local(source: Path, target: Path) -> None:
    """Move a file onto a path, in place of any file there; onto another device, by a copy.

    The copy appears whole, and durably, before the source is removed. (A folder may be a link, or
    mounted from elsewhere.)
    """
    try:
        source.rename(target)
        return
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    _remove_old_drafts(target.parent)
    draft = _draft_beside(target)
    try:
        with open(source, "rb") as original, open(draft, "xb") as copy:
            shutil.copyfileobj(original, copy, _COPIED_BYTES)
            copy.flush()
            os.fsync(copy.fileno())
        draft.rename(target)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    fsync_folder(target.parent)
    source.unlink()


def _draft_beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.tallystick-{uuid.uuid4().hex[:8]}")


def link_between(root: Path, place: Path) -> Path | None:
    """Return the innermost symbolic link among the folders between a root and a file; None: none.

    Such a link may have been aimed at other files. The root itself may be a link, and the file,
    too, which is not followed.
    """
    above = place.parents[: len(place.parts) - len(root.parts) - 1]
    return next((folder for folder in above if folder.is_symlink()), None)


def make_folder(folder: Path) -> None:
    """Create a local folder and its missing parents, durably."""
    missing = list(takewhile(lambda path: not path.exists(), (folder, *folder.parents)))
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:  # a folder is a name in the one above it
        fsync_folder(path.parent)


def fsync_folder(path: Path) -> None:
    """Make changes to the names in a local folder durable: files created, renamed or removed."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


_looked_through: set[Path] = set()


def _remove_old_drafts(folder: Path) -> None:
    """Remove drafts of killed processes, if possible; once per process, before its first write."""
    if folder in _looked_through:
        return
    _looked_through.add(folder)
    oldest_s = time.time() - DRAFT_UNUSED_S
    for entry in os.scandir(folder):
        with contextlib.suppress(OSError):
            if _DRAFT.fullmatch(entry.name) and entry.stat().st_mtime < oldest_s:
                os.unlink(entry)
