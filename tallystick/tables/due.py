"""Due epochs as they are written down, and the files that a commit of all of them publishes.

A compaction is part of the epoch whose tasks made it, and decided with it. Which compactions count
is seen only at the commit: those whose sources are all published by that very commit.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tallystick.epoch.manifest import seal, unseal
from tallystick.epoch.two_phase import DueOutput, Owner
from tallystick.files.drafts import due_folder, hidden_folder
from tallystick.files.folder import Folder
from tallystick.tables.port import DataFile

VERSION = 1
REMEDY = "Bring it back from a backup of the table's folder, and start again."


class Compaction(NamedTuple):
    """A file with the rows of smaller ones, which is published in their place.

    Args:
        sources: the paths of the smaller files.
        size: theirs together, in bytes.
        file: the one in their place.
    """

    sources: tuple[str, ...]
    size: int
    file: DataFile

    @classmethod
    def of(cls, fields: Any) -> "Compaction":
        """Parse a compaction as JSON has it."""
        sources, size, file = fields
        return cls(tuple(sources), int(size), DataFile(*file))


class DueEpoch(NamedTuple):
    """A decided epoch that waits for a commit.

    Args:
        table_id: of the table that its files were written for.
        files: its own.
        compactions: those made by its tasks, of files of earlier epochs.
        since_ms: when it became due, in ms since 1970.
        every_ms: the time between two commits.
    """

    table_id: str
    files: tuple[DataFile, ...]
    compactions: tuple[Compaction, ...]
    since_ms: int
    every_ms: int

    def to_bytes(self) -> bytes:
        """Return the content of the file of a due epoch."""
        return seal(VERSION, self._asdict())

    @classmethod
    def from_bytes(cls, content: bytes, what: str) -> "DueEpoch":
        """Parse the content of the file of a due epoch.

        Args:
            content: of its file.
            what: names the file.

        Raises:
            ManifestError: it is damaged.
        """

        def build(fields: dict[str, Any]) -> DueEpoch:
            return cls(
                str(fields["table_id"]),
                tuple(DataFile(*values) for values in fields["files"]),
                tuple(map(Compaction.of, fields["compactions"])),
                int(fields["since_ms"]),
                int(fields["every_ms"]),
            )

        return unseal(content, what, VERSION, REMEDY, build)


def path_of(hidden: str, epoch: int) -> str:
    """Return the path of a due epoch's file."""
    return f"{due_folder(hidden)}/{epoch:08d}"


def read_due(folder: Folder, hidden: str) -> dict[int, DueEpoch]:
    """Return the due epochs of a sink in a checkpoint, in order.

    Raises:
        ManifestError: a file of one is damaged.
        StorageError: the folder cannot be read now.
    """
    epochs = sorted(int(name) for name in folder.names(due_folder(hidden)) if name.isdigit())
    paths = [path_of(hidden, epoch) for epoch in epochs]
    return {
        epoch: DueEpoch.from_bytes(content, f"{folder.name}: due epoch {path}")
        for epoch, path, content in zip(epochs, paths, folder.get_all(paths), strict=True)
        if content is not None  # published meanwhile
    }


class Publication(NamedTuple):
    """The files of a commit of due epochs, and the compactions that count in it.

    Args:
        files: in the order of epochs; a compacted file stands where its last source would.
        counted: compactions whose files are among these.
        missed: compactions of these epochs that do not count: another commit has their sources, or
            their file.
    """

    files: tuple[DataFile, ...]
    counted: tuple[Compaction, ...]
    missed: tuple[Compaction, ...]


def to_publish(due: Mapping[int, DueEpoch], newest: int | None = None) -> Publication:
    """Return the outcome of a commit of due epochs.

    A compaction counts if all its sources are published by the commit, also one of a later epoch.

    Args:
        due: the epochs that the table does not have.
        newest: the newest one that is published; None: all are.
    """
    files: dict[str, DataFile] = {}
    counted, missed = list[Compaction](), list[Compaction]()
    for at, epoch in sorted(due.items()):
        is_published = newest is None or at <= newest
        for compaction in epoch.compactions:
            sources = {*compaction.sources}
            if sources and files.keys() >= sources:
                counted.append(compaction)
                files = _in_place(files, compaction)
            elif is_published:
                missed.append(compaction)
        if is_published:
            files |= {file.path: file for file in epoch.files}
    return Publication((*files.values(),), (*counted,), (*missed,))


def _in_place(files: Mapping[str, DataFile], compaction: Compaction) -> dict[str, DataFile]:
    """Return files with a compacted one in place of the last of its sources."""
    sources, last, file = {*compaction.sources}, compaction.sources[-1], compaction.file
    return {
        (file.path if path == last else path): (file if path == last else other)
        for path, other in files.items()
        if path == last or path not in sources
    }


def output_of(due: Iterable[DueEpoch]) -> DueOutput:
    """Return how much waits."""
    due = (*due,)
    files = to_publish(dict(enumerate(due))).files
    return DueOutput(
        epochs=len(due),
        rows=sum(file.rows for file in files),
        files=len(files),
        size=sum(file.size for file in files),
        since_ms=min((epoch.since_ms for epoch in due), default=0),
        every_ms=max((epoch.every_ms for epoch in due), default=0),
    )


def due_output_in(folder: Folder, owner: Owner) -> DueOutput:
    """Return what waits in a folder for a sink, of all lineages: a start publishes all of it.

    Raises:
        ManifestError: a file of a due epoch is damaged.
        StorageError: the folder cannot be read now.
    """
    siblings = hidden_folder(owner).rpartition("/")[0]

    def of_lineages() -> Iterator[Iterable[DueEpoch]]:
        for lineage in folder.names(siblings):
            yield read_due(folder, f"{siblings}/{lineage}").values()

    return output_of(itertools.chain.from_iterable(of_lineages()))
