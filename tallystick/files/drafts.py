"""Drafts of files: their names, their commit exactly once, and the proof of each outcome.

A commit checks that all drafts exist, writes a *marker*, gives the drafts their final names, and
removes their folder. The proofs of an outcome:

    marker                      COMMITTED, as soon as no draft is left: only a commit removes them
    no marker, drafts           not yet: the commit goes on
    no marker, final files      COMMITTED, of a size as recorded (the marker was pruned)
    no marker, neither          LOST: the drafts were removed
    the same, an old epoch      DataLossError: its marker may have been pruned

Why a marker, where a final file seems proof enough: final files are the user's. A reader may
move them on or delete them, at once; a commit that is repeated after a crash would take that for a
loss, and the epoch would be written twice. And why it is written *before* the first file is
visible: after a crash in between, files that a reader took away already would be nowhere. Whoever
finds a marker knows that every draft was there, and that a draft that is gone was made visible.

One gap is left where a final name needs a copy: on an object store, which cannot rename, or onto
another device. If the commit is killed between the copy of a file and the removal of its draft, and
a reader takes the copy away meanwhile, the repeated commit copies the file again, under the same
name. A reader that removes files there has to remember the names that it has read.

Markers are small files, one per task and epoch; markers more than 10 epochs old are removed. The
first epoch whose markers stay is noted before, so that a missing marker is never mistaken for a
proof.
"""

import hashlib
import json
import re
import socket
from collections.abc import Iterable
from typing import NamedTuple, Self
from urllib.parse import quote

from tallystick.epoch.two_phase import Committable, Outcome, Owner, Place
from tallystick.errors import UNREADABLE, DataLossError, ManifestError, OptionError
from tallystick.files.folder import HIDDEN, Folder
from tallystick.text import shortened

DRAFT = ".draft"
"""Follows the final name: DuckDB's `**/*.parquet` does look into hidden folders."""
SEEN = "seen-by-the-driver"
"""A file that a run's driver writes, and tasks on a local disk look for."""
SINK_BYTES = 6
"""The length of the hash that stands for a sink in names."""
_TEXT = r"\d{8,}-\d{5,}-[0-9a-f]+(?:-[0-9a-f]+)?"
_NAME = re.compile(_TEXT, re.ASCII)
_FINAL = re.compile(rf"(?:(.+)/)?part-({_TEXT})(?:\.(\d+))?\.parquet", re.ASCII)


class File(NamedTuple):
    """One file of a committable.

    Args:
        folder: of its partition, below the sink's path; "" without partitions.
        number: from 0 on: one task's files of one folder.
        size: in bytes.
    """

    folder: str
    number: int
    size: int


class Drafts(NamedTuple):
    """The files written by one attempt of a task.

    Args:
        location: of the sink, when they were written.
        hidden: the folder of its pipeline, sink and lineage, below the location.
        name: of epoch, task, nonce and sink.
        files: the files that a commit makes visible; None: not known (found by a recovery).
    """

    location: str
    hidden: str
    name: str
    files: tuple[File, ...] | None = None

    @classmethod
    def of(cls, committable: Committable) -> Self:
        """Parse the details of a committable.

        Raises:
            ManifestError: the details would lead to files other than drafts, markers and results.
        """
        try:
            details = json.loads(committable.details)
            files = (
                None
                if details["files"] is None
                else tuple(File(*values) for values in details["files"])
            )
            drafts = cls(details["location"], details["hidden"], committable.name, files)
            is_ours = _is_ours(drafts)
        except UNREADABLE:
            is_ours = False
        if not is_ours:
            raise ManifestError(
                f"file sink {committable.sink}: epoch {committable.checkpoint_id} names "
                f"{committable.name!r} with {committable.details[:200]!r}, which no release "
                f"writes: the manifest was edited, or made by somebody else. Nothing was changed."
            )
        return drafts

    @property
    def details(self) -> str:
        """The drafts as the text that a committable carries."""
        return json.dumps(
            {"location": self.location, "hidden": self.hidden, "files": self.files},
            ensure_ascii=False,
            separators=(",", ":"),
        )

    @property
    def pending(self) -> str:
        """The folder of the drafts."""
        return f"{pending_folder(self.hidden)}/{self.name}"

    @property
    def marker(self) -> str:
        """The path of the marker, the proof that the commit began with all drafts present."""
        return f"{marker_folder(self.hidden)}/{self.name}"

    def draft(self, file: File) -> str:
        """Return the path of a file before the commit."""
        return f"{self.pending}/{self.final(file)}{DRAFT}"

    def final(self, file: File) -> str:
        """Return the path of a file after the commit."""
        number = f".{file.number}" if file.number else ""
        name = f"part-{self.name}{number}.parquet"
        return f"{file.folder}/{name}" if file.folder else name


def hidden_folder(owner: Owner) -> str:
    """Return the folder of one sink's drafts and markers, below the sink's path."""
    parts = (owner.pipeline, owner.sink, owner.lineage)
    return "/".join((HIDDEN, *map(_part, parts)))


def show_disk(folder: Folder, owner: Owner) -> None:
    """Write the file that proves to tasks on other hosts that the driver has the same disk."""
    folder.put(f"{hidden_folder(owner)}/{SEEN}", b"")


def check_disk(folder: Folder, owner: Owner) -> None:
    """Refuse a disk that the driver does not see: the driver would take the files for lost.

    Raises:
        OptionError: a local folder does not have what the driver wrote.
    """
    seen = f"{hidden_folder(owner)}/{SEEN}"
    if folder.is_local and not folder.sizes([seen]):
        raise OptionError(
            f"{folder.name}: a task on {socket.gethostname()} does not find {seen} there, which "
            f"the driver wrote: expected one disk that the driver and all executors see. Mount it "
            f"everywhere, or write to S3 or the like."
        )


def pending_folder(hidden: str) -> str:
    """Return the folder with a folder of drafts for each attempt of a task."""
    return f"{hidden}/pending"


def due_folder(hidden: str) -> str:
    """Return the folder with a file for each decided epoch that waits for a commit of a table."""
    return f"{hidden}/due"


def marker_folder(hidden: str) -> str:
    """Return the folder with a marker for each commit that has begun."""
    return f"{hidden}/committed"


def name_of(place: Place) -> str:
    """Return the name of an attempt's files, unique among all attempts and sinks of the path.

    All sinks of a task share the nonce, so the name has a short hash of the sink's uid: the uid
    itself may have dashes.
    """
    sink = hashlib.blake2b(place.owner.sink.encode(), digest_size=SINK_BYTES).hexdigest()
    return f"{place.checkpoint_id:08d}-{place.task:05d}-{place.nonce}-{sink}"


def parse_name(name: str) -> tuple[int, int] | None:
    """Return the epoch and the task of a name; None: the name is no attempt's."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    epoch, task, *_ = name.split("-")
    return int(epoch), int(task)


def parse_draft(path: str, size: int) -> File | None:
    """Return the file of a draft in its pending folder; None: the path is no draft's."""
    match = _FINAL.fullmatch(path.removesuffix(DRAFT)) if path.endswith(DRAFT) else None
    return match and File(match[1] or "", int(match[3] or 0), size)


def _is_ours(drafts: Drafts) -> bool:
    top, *parts = drafts.hidden.split("/")
    folders = {part for file in drafts.files or () for part in file.folder.split("/")}
    numbers = [number for file in drafts.files or () for number in (file.number, file.size)]
    return (
        _NAME.fullmatch(drafts.name) is not None
        and (top, len(parts)) == (HIDDEN, 3)
        and not any("\0" in part or part == ".." for part in (*parts, *folders))
        and all(type(number) is int and number >= 0 for number in numbers)
        and isinstance(drafts.location, str)
    )


def _part(text: str) -> str:
    """Return any name as the name of one folder: no slash, and neither `.` nor `..`."""
    return quote(text, safe=" ") if text.strip(".") else text.replace(".", "%2E")


EPOCHS_KEPT = 10
"""The number of epochs whose markers are kept; a repeated commit is usually of the newest."""
KEPT_FROM = "kept-from"
SHOWN_MAX = 10
PARQUET_END = b"PAR1"


class Commits:
    """The commit and the abort of drafts below one path.

    Args:
        folder: the sink's path.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._pruned: dict[str, int] = {}

    def commit(self, committable: Committable) -> Outcome:
        """Give the drafts their final names, or prove them committed before, or lost. Idempotent.

        Raises:
            StorageError: the outcome is unknown for now.
            DataLossError: a part of the files is gone, or the outcome can never be known.
        """
        drafts = Drafts.of(committable)
        folder = self._folder.at(drafts.location)
        files = drafts.files
        if files is None:
            files = _pending_files(folder, drafts)
        remaining = _remaining(folder, drafts, files)
        if folder.get(drafts.marker) is None:
            is_had = self._is_had(folder, committable, drafts, files, remaining)
            if not is_had:
                folder.remove(drafts.pending)
                return Outcome.LOST
            folder.put(drafts.marker, committable.details.encode())
        folder.reveal((path, drafts.final(file)) for path, file in remaining.items())
        folder.remove(drafts.pending)
        self._prune(folder, drafts.hidden, committable.checkpoint_id)
        return Outcome.COMMITTED

    def _is_had(
        self,
        folder: Folder,
        committable: Committable,
        drafts: Drafts,
        files: tuple[File, ...],
        remaining: dict[str, File],
    ) -> bool:
        """True if every file exists, as a draft or visible; False if none does.

        Raises:
            DataLossError: only some exist, or visible files of so old an epoch may be gone.
        """
        absent = [file for file in files if drafts.draft(file) not in remaining]
        visible = _sized(folder, {drafts.final(file): file for file in absent})
        gone = [drafts.final(file) for file in absent if drafts.final(file) not in visible]
        if files and not gone:
            return True
        if remaining or visible:
            raise DataLossError(
                f"file sink {drafts.location}: epoch {committable.checkpoint_id} was decided, and "
                f"of the {len(files)} files of task {committable.task}, {len(gone)} are gone that "
                f"were never made visible: {shortened(gone, SHOWN_MAX)}. Of the others, "
                f"{len(visible)} are visible, and the drafts of {len(remaining)} lie in "
                f"{drafts.pending}. Somebody, or a lifecycle rule, removed them from there. Bring "
                f"them back (versions or a backup of the bucket or disk) and start again."
            )
        kept_from = _kept_from(folder, drafts.hidden)
        if kept_from is None or committable.checkpoint_id < kept_from:
            since = "an epoch that cannot be read" if kept_from is None else f"epoch {kept_from}"
            raise DataLossError(
                f"file sink {drafts.location}: whether {shortened(gone, SHOWN_MAX)} of epoch "
                f"{committable.checkpoint_id} was ever visible cannot be known: neither "
                f"the file nor its draft is there, and what was committed is noted from {since} on "
                f"only. Look for it where readers of {drafts.location} put what "
                f"they have read; restore a newer savepoint."
            )
        return False

    def _prune(self, folder: Folder, hidden: str, checkpoint_id: int) -> None:
        """Remove old markers: once per run, and every `EPOCHS_KEPT` epochs."""
        last = self._pruned.get(hidden)
        if last is not None and checkpoint_id < last + EPOCHS_KEPT:
            return
        self._pruned[hidden] = checkpoint_id
        before = _kept_from(folder, hidden)
        if before == 0 and checkpoint_id <= EPOCHS_KEPT:
            return
        markers = marker_folder(hidden)
        places = {name: parse_name(name) for name in folder.names(markers)}
        epochs = {name: place[0] for name, place in places.items() if place is not None}
        if before is None:  # it was below the newest marker when it was written
            before = max(epochs.values(), default=checkpoint_id)
        kept_from = max(checkpoint_id - EPOCHS_KEPT, before)
        folder.put(f"{markers}/{KEPT_FROM}", b"%d\n" % kept_from)
        for name, epoch in epochs.items():
            if epoch < kept_from:
                folder.remove_file(f"{markers}/{name}")

    def abort(self, committable: Committable) -> None:
        """Remove the drafts, unless their commit has begun."""
        drafts = Drafts.of(committable)
        folder = self._folder.at(drafts.location)
        has_begun = folder.get(drafts.marker) is not None
        if not has_begun or not folder.files(drafts.pending):
            folder.remove(drafts.pending)

    def lingering(self, sink: str, hidden: str) -> Iterable[Committable]:
        """Yield a committable for each task's drafts in the hidden folder; one listing."""
        for name in self._folder.names(pending_folder(hidden)):
            place = parse_name(name)
            if place is not None:
                details = Drafts(self._folder.location, hidden, name).details
                yield Committable(sink, *place, name, 0, 0, details)


def _kept_from(folder: Folder, hidden: str) -> int | None:
    """Return the first epoch from which all markers are kept; None: the file is empty or cut."""
    content = folder.get(f"{marker_folder(hidden)}/{KEPT_FROM}")
    if content is None:
        return 0
    digits, end, rest = content.partition(b"\n")
    return int(digits) if digits.isdigit() and end and not rest else None


def _remaining(folder: Folder, drafts: Drafts, files: tuple[File, ...]) -> dict[str, File]:
    """Return the drafts that still exist, by path; raise if a size differs from the task's."""
    sizes = folder.sizes(drafts.draft(file) for file in files)
    for file in files:
        size = sizes.get(drafts.draft(file), file.size)
        if size != file.size:
            raise DataLossError(
                f"file sink {drafts.location}: {drafts.draft(file)} has {size} bytes, and its task "
                f"wrote {file.size}: somebody changed it. Bring it back (versions or a backup of "
                f"the bucket or disk) and start again."
            )
    return {drafts.draft(file): file for file in files if drafts.draft(file) in sizes}


def _sized(folder: Folder, expected: dict[str, File]) -> dict[str, File]:
    """Return the files that exist in their expected size."""
    sizes = folder.sizes(expected)
    return {path: file for path, file in expected.items() if sizes.get(path) == file.size}


def _pending_files(folder: Folder, drafts: Drafts) -> tuple[File, ...]:
    """Return the files in the pending folder, for a recovery without a manifest."""
    sizes = folder.files(drafts.pending)
    files = {path: parse_draft(path, size) for path, size in sizes.items()}
    for path in files:
        if folder.end(f"{drafts.pending}/{path}", len(PARQUET_END)) != PARQUET_END:
            raise DataLossError(
                f"file sink {drafts.location}: {drafts.pending}/{path} is not whole: its task "
                f"never finished, so there is nothing to commit. Abort it."
            )
    return tuple(file for file in files.values() if file is not None)
