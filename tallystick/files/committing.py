"""The driver's side: drafts are made visible, once, and what became of them is proved.

A commit looks whether all drafts are there, writes a *marker*, gives the drafts their final names,
and removes their folder. What proves an outcome:

    marker                      COMMITTED, as soon as no draft is left: only a commit removes them
    no marker, drafts           not yet: the commit goes on
    no marker, final files      COMMITTED, of a size as recorded (the marker was pruned)
    no marker, neither          LOST: somebody removed the drafts
    the same, an old epoch      DataLossError: its marker may have been pruned

Why a marker, where a final file seems proof enough: final files are the user's. Who reads them may
move them on or delete them, at once; a commit that is repeated after a crash would take that for a
loss, and the epoch would be written twice. And why it is written *before* the first file is
visible: after a crash in between, files that a reader took away already would be nowhere. Whoever
finds a marker knows that every draft was there, and that one that is gone was made visible.

Left is a copy, on an object store, which cannot rename, or onto another device: killed between the
copy of a file and the removal of its draft, while a reader takes the copy away, a commit copies it
again, under the same name. A reader that removes what it read there has to know names that it had
already.

Markers are small files, one per task and epoch; those more than 10 epochs old are removed. Up to
which epoch that went is noted first, so that a missing marker is never taken for a proof.
"""

from collections.abc import Iterable

from tallystick.errors import DataLossError
from tallystick.files.drafts import (
    Drafts,
    File,
    marker_folder,
    parse_draft,
    parse_name,
    pending_folder,
)
from tallystick.files.folder import Folder
from tallystick.sink.two_phase import Committable, Outcome

EPOCHS_KEPT = 10
"""How many epochs' markers are kept; a repeated commit is of the newest epoch, as a rule."""
KEPT_FROM = "kept-from"
SHOWN_MAX = 10
PARQUET_END = b"PAR1"


class Commits:
    """Commits and aborts drafts below one path.

    Args:
        folder: the sink's path.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._pruned: dict[str, int] = {}

    def commit(self, committable: Committable) -> Outcome:
        """Make files visible, or find that they are, or prove that they are lost. Idempotent.

        Raises:
            StorageError: the outcome is unknown for now.
            DataLossError: a part of the files is gone, or the outcome can never be known.
        """
        drafts = Drafts.of(committable)
        folder = self._folder.at(drafts.location)
        files = drafts.files
        if files is None:
            files = _found(folder, drafts)
        left = _left(folder, drafts, files)
        if folder.get(drafts.marker) is None:
            is_had = self._is_had(folder, committable, drafts, files, left)
            if not is_had:
                folder.remove(drafts.pending)
                return Outcome.LOST
            folder.put(drafts.marker, committable.details.encode())
        folder.reveal((path, drafts.final(file)) for path, file in left.items())
        folder.remove(drafts.pending)
        self._prune(folder, drafts.hidden, committable.checkpoint_id)
        return Outcome.COMMITTED

    def _is_had(
        self,
        folder: Folder,
        committable: Committable,
        drafts: Drafts,
        files: tuple[File, ...],
        left: dict[str, File],
    ) -> bool:
        """Whether every file is there, as a draft or visible; False if none is.

        Raises:
            DataLossError: some are.
        """
        absent = [file for file in files if drafts.draft(file) not in left]
        visible = _sized(folder, {drafts.final(file): file for file in absent})
        gone = [drafts.final(file) for file in absent if drafts.final(file) not in visible]
        if files and not gone:
            return True
        if left or visible:
            raise DataLossError(
                f"file sink {drafts.location}: epoch {committable.checkpoint_id} was decided, and "
                f"of the {len(files)} files of task {committable.task}, {len(gone)} are gone that "
                f"were never made visible: {_some(gone)}. Of the others, {len(visible)} are "
                f"visible, and the drafts of {len(left)} lie in {drafts.pending}. Somebody, or a "
                f"lifecycle rule, removed them from there. Bring them back (versions or a backup "
                f"of the bucket or disk) and start again."
            )
        kept_from = _kept_from(folder, drafts.hidden)
        if kept_from is None or committable.checkpoint_id < kept_from:
            since = "an epoch that cannot be read" if kept_from is None else f"epoch {kept_from}"
            raise DataLossError(
                f"file sink {drafts.location}: whether {_some(gone)} of epoch "
                f"{committable.checkpoint_id} was ever visible cannot be known any more: neither "
                f"the file nor its draft is there, and what was committed is noted from {since} on "
                f"only. Look for it where readers of {drafts.location} put what "
                f"they have read; restore a newer savepoint."
            )
        return False

    def _prune(self, folder: Folder, hidden: str, checkpoint_id: int) -> None:
        """Remove old markers: once per run, and every so many epochs."""
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
        """Everything that lies in the hidden folder: one listing."""
        for name in self._folder.names(pending_folder(hidden)):
            place = parse_name(name)
            if place is not None:
                details = Drafts(self._folder.location, hidden, name).details
                yield Committable(sink, *place, name, 0, 0, details)


def _kept_from(folder: Folder, hidden: str) -> int | None:
    """From which epoch on every marker is kept; None: the file is empty or cut, so who knows."""
    held = folder.get(f"{marker_folder(hidden)}/{KEPT_FROM}")
    if held is None:
        return 0
    digits, end, rest = held.partition(b"\n")
    return int(digits) if digits.isdigit() and end and not rest else None


def _left(folder: Folder, drafts: Drafts, files: tuple[File, ...]) -> dict[str, File]:
    """The drafts that are there."""
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
    """Those that are there with their sizes."""
    sizes = folder.sizes(expected)
    return {path: file for path, file in expected.items() if sizes.get(path) == file.size}


def _found(folder: Folder, drafts: Drafts) -> tuple[File, ...]:
    """What lies in the pending folder: for a person who commits by hand what no manifest names."""
    found = folder.files(drafts.pending)
    files = {path: parse_draft(path, size) for path, size in found.items()}
    for path in files:
        if folder.end(f"{drafts.pending}/{path}", len(PARQUET_END)) != PARQUET_END:
            raise DataLossError(
                f"file sink {drafts.location}: {drafts.pending}/{path} is not whole: its task "
                f"never finished, so there is nothing to commit. Abort it."
            )
    return tuple(file for file in files.values() if file is not None)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else ""
    return ", ".join(names[:SHOWN_MAX]) + more
