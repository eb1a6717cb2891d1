"""A folder of Parquet files as a table: a log of publications says which files are visible.

A publication is created exclusively, under the next number, and is the commit: the files that it
names are then given their final names, by whoever looks at the newest one. It says which epoch is
the newest that is published. Old ones are removed; where a writer that slept creates one of these
again, a later one is there, and its own does not count.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tallystick.epoch.manifest import seal, unseal
from tallystick.files.drafts import DRAFT
from tallystick.files.folder import HIDDEN, Folder
from tallystick.files.writing import split
from tallystick.tables.due import REMEDY
from tallystick.tables.port import PARQUET, DataFile

STAGED, PUBLISHED = f"{HIDDEN}/staged", "published"
VERSION = 1
KEPT = 10
"""The number of publications that stay: the newest one counts."""
FOLDER = "folder"
"""The name of the one value of a partition."""


@dataclass(frozen=True)
class FolderLayout:
    """The files of a folder: drafts in the hidden folder, without the columns in folders' names.

    Args:
        partition_by: the columns that become folders.
    """

    partition_by: tuple[str, ...]

    @property
    def folder(self) -> str:
        """See `Layout.folder`."""
        return STAGED

    @property
    def ending(self) -> str:
        """See `Layout.ending`."""
        return PARQUET + DRAFT

    @property
    def partitioned_by(self) -> str:
        """See `Layout.partitioned_by`."""
        return ", ".join(self.partition_by)

    def split(self, rows: pa.RecordBatch) -> Iterator[tuple[dict[str, str | None], pa.RecordBatch]]:
        """See `Layout.split`."""
        for folder, part in split(rows, self.partition_by) if self.partition_by else [("", rows)]:
            yield {FOLDER: folder}, part

    def statistics(self, footer: pq.FileMetaData) -> str:
        """See `Layout.statistics`: nobody asks for them."""
        return ""


class FolderCommits:
    """A folder of files as the driver publishes them. See `tables.port.Table`.

    Args:
        folder: of the files.
        app_id: of the sink in its checkpoint.
    """

    def __init__(self, folder: Folder, app_id: str) -> None:
        self._folder, self._log = folder, f"{HIDDEN}/{app_id}/{PUBLISHED}"
        self._number = self._newest_epoch = -1
        self.refresh()

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """See `Table.failures`."""
        return (OSError,)

    @property
    def staged_bytes_max(self) -> int | None:
        """See `Table.staged_bytes_max`."""
        return None

    @property
    def table_id(self) -> str:
        """See `Table.table_id`: a folder has none."""
        return ""

    @property
    def newest_epoch(self) -> int:
        """See `Table.newest_epoch`."""
        return self._newest_epoch

    def refresh(self) -> None:
        """See `Table.refresh`. Files that a publication names and nobody has revealed are."""
        number = max(self._numbers(), default=-1)
        if number == self._number:
            return
        path = self._path(number)
        content = self._folder.get(path)
        if content is None:  # a later one has come, and this one is gone
            return self.refresh()
        newest, files = self._parsed(path, content)
        self._reveal(files)
        self._number, self._newest_epoch = number, newest

    def _parsed(self, path: str, content: bytes) -> tuple[int, dict[str, str]]:
        """Return the newest epoch of a publication, and the final names of its drafts."""

        def build(fields: dict[str, Any]) -> tuple[int, dict[str, str]]:
            return int(fields["newest"]), dict(fields["files"])

        what = f"{self._folder.name}: publication {path}"
        return unseal(content, what, VERSION, REMEDY, build)

    def _numbers(self) -> list[int]:
        return [int(name) for name in self._folder.names(self._log) if name.isdigit()]

    def _path(self, number: int) -> str:
        return f"{self._log}/{number:08d}"

    def _reveal(self, files: dict[str, str]) -> None:
        drafts = self._folder.sizes(files)
        self._folder.reveal((draft, files[draft]) for draft in drafts)
        if not self._folder.is_local:
            self._folder.remove_files(drafts)

    def problems(self) -> list[str]:
        """See `Table.problems`."""
        return []

    def append(self, files: Sequence[DataFile], first: int, newest: int) -> bool:
        """See `Table.append`."""
        number = self._number + 1
        moves = {file.path: _final(file) for file in files}
        content = seal(VERSION, {"first": first, "newest": newest, "files": moves})
        if not self._folder.put_new(self._path(number), content):
            return False
        numbers = self._numbers()
        if max(numbers) > number:
            self._folder.remove_file(self._path(number))
            return False
        self._reveal(moves)
        self._number, self._newest_epoch = number, newest
        old = (one for one in numbers if one <= number - KEPT)
        self._folder.remove_files(map(self._path, old))
        return True

    def names(self) -> set[str]:
        """See `Table.names`: the drafts that the remaining publications name."""
        paths = [*map(self._path, self._numbers())]
        contents = zip(paths, self._folder.get_all(paths), strict=True)
        return {
            draft.rpartition("/")[2]
            for path, content in contents
            if content is not None
            for draft in self._parsed(path, content)[1]
        }


def _final(file: DataFile) -> str:
    name = file.path.rpartition("/")[2].removesuffix(DRAFT)
    return "/".join(filter(None, (file.values[FOLDER], name)))
