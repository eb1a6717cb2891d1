"""Small files of due epochs become large ones before they are published.

The tasks of an epoch do it, beside their rows: the driver gives each that had rows last a share of
the files that are due. The compacted files are named and decided as the epoch's own are.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from tallystick.files.folder import Folder
from tallystick.tables.due import DueEpoch, to_publish
from tallystick.tables.port import DataFile

SHRINKS, MARGIN = 1.5, 1.05
"""A large file is smaller than its sources together: so many times at first, then as seen."""
LOOKS = 16
"""Due files are looked at again once more of them have come: a large file by this number."""
EPOCH_PATIENCE_S = 5.0
"""The time for an epoch to come; then files are published as they are."""
COMPACTION_PATIENCE_S = 60.0
"""The time for the end of that epoch."""
READ_AT_ONCE = 64
"""The number of small files whose bytes a task has in memory at a time."""


class Share(NamedTuple):
    """Small files of one partition, for a task to compact into one.

    Args:
        task: the index of the task.
        sources: the files, in the order of epochs.
    """

    task: int
    sources: tuple[DataFile, ...]


class Phase(Enum):
    """The way to a commit."""

    WAITING = auto()
    """Only files of which a large one becomes are compacted."""
    ASKED = auto()
    """The time has come: the next epoch compacts all that is due."""
    GIVEN = auto()
    """An epoch that does so is under way."""
    AWAITED = auto()
    """The same, and it takes long."""
    PUBLISHING = auto()
    """The commit is under way, or about to be."""


class Compactor:
    """The driver's side: when due files are compacted, and which.

    Args:
        target: the size of files, in bytes.
    """

    def __init__(self, target: int) -> None:
        self._target, self._shrinks = target, SHRINKS
        self._next_size = 0
        self._phase = Phase.WAITING
        self.tasks: tuple[int, ...] = ()
        """The tasks that had rows last."""

    def shares(self, due: Mapping[int, DueEpoch]) -> tuple[Share, ...]:
        """Return what the tasks of the next epoch compact."""
        if self._phase is Phase.PUBLISHING:
            return ()
        is_asked = self._phase is not Phase.WAITING
        enough = int(self._target * self._shrinks)
        size = sum(file.size for epoch in due.values() for file in epoch.files)
        if not is_asked and size < max(enough, self._next_size):
            return ()
        if self._phase is Phase.ASKED:
            self._phase = Phase.GIVEN
        shares = shares_of(
            to_publish(due).files, self.tasks, self._target, enough, all_small=is_asked
        )
        self._next_size = 0 if shares else size + enough // LOOKS
        return shares

    def patience_s(self, due: Mapping[int, DueEpoch]) -> float:
        """Return how long an epoch that compacts all that is due is waited for; 0: not at all."""
        if self._phase is Phase.GIVEN:
            self._phase = Phase.AWAITED
            return COMPACTION_PATIENCE_S
        files = to_publish(due).files if self._phase is Phase.WAITING else ()
        if shares_of(files, self.tasks, self._target, self._target, all_small=True):
            self._phase = Phase.ASKED
            return EPOCH_PATIENCE_S
        return 0

    def took(self, epoch: DueEpoch) -> bool:
        """Take in an epoch that is due; return True if all that was due before can be published."""
        for compaction in epoch.compactions:
            self._shrinks = max(1.0, compaction.size / compaction.file.size) * MARGIN
        if self._phase not in (Phase.GIVEN, Phase.AWAITED):
            return False
        self._phase = Phase.PUBLISHING
        return True

    def begin_again(self) -> None:
        """Wait for the next commit, after a publish or a try."""
        self._phase, self._next_size = Phase.WAITING, 0


def shares_of(
    files: Iterable[DataFile], tasks: Sequence[int], target: int, enough: int, *, all_small: bool
) -> tuple[Share, ...]:
    """Share the work of compacting due files among tasks.

    Args:
        files: that a commit would publish now, in the order of epochs.
        tasks: those that had rows last, and probably have some again.
        target: the size of files; those of at least half of it are left as they are.
        enough: the size of sources of which a file of the target size becomes.
        all_small: compact fewer files too, so that one file for each partition remains, or some
            large ones; else each task has one share at most, which keeps epochs short.
    """
    if not tasks:
        return ()
    groups = list(_groups(files, target // 2, enough, all_small=all_small))
    chosen = groups if all_small else groups[: len(tasks)]
    return tuple(Share(tasks[at % len(tasks)], group) for at, group in enumerate(chosen))


def _groups(
    files: Iterable[DataFile], large: int, enough: int, *, all_small: bool
) -> Iterator[tuple[DataFile, ...]]:
    waiting = defaultdict[tuple[str | None, ...], list[DataFile]](list)
    sizes = Counter[tuple[str | None, ...]]()
    for file in files:
        if file.size >= large:
            continue
        values = (*file.values.values(),)
        waiting[values].append(file._replace(statistics=""))  # a task does not need them
        sizes[values] += file.size
        if sizes[values] >= enough and len(waiting[values]) > 1:
            yield (*waiting.pop(values),)
            del sizes[values]
    for group in waiting.values():
        if all_small and len(group) > 1:
            yield (*group,)


def rows_of(folder: Folder, sources: Sequence[DataFile]) -> Iterator[pa.Table]:
    """Yield the rows of files, in order.

    Raises:
        StorageError: a file cannot be read now.
        FileNotFoundError: a file is gone.
        ArrowException: a file is damaged.
    """
    for start in range(0, len(sources), READ_AT_ONCE):
        paths = [file.path for file in sources[start : start + READ_AT_ONCE]]
        for path, content in zip(paths, folder.get_all(paths), strict=True):
            if content is None:
                raise FileNotFoundError(path)
            yield pq.ParquetFile(pa.BufferReader(content)).read()
