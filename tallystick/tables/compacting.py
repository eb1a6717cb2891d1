"""Small files of due epochs become large ones before they are published.

The processes of tasks do it, beside the epochs: the driver gives each that had rows last a share of
the files that are due. A later epoch hands the file over, and decides it as its own.
"""

import secrets
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from tallystick.files.folder import Folder
from tallystick.tables.due import DueEpoch
from tallystick.tables.port import DataFile

SHRINKS, MARGIN = 1.5, 1.05
"""A large file is smaller than its sources together: so many times at first, then as seen."""
EPOCH_PATIENCE_S = 5.0
"""The time for an epoch to come; then files are published as they are."""
COMPACTION_PATIENCE_S = 60.0
"""The time for the compaction of all that is due, and for an epoch that hands it over."""
SILENT_EPOCHS = 20
"""The number of epochs after which a share that no task speaks of goes to another one."""
READ_AT_ONCE = 64
"""The number of small files whose bytes a task has in memory at a time."""

Values = tuple[str | None, ...]


class Share(NamedTuple):
    """Small files, for a task to compact.

    Args:
        task: the index of the task.
        name: no other share has it, of any run; in the form of an attempt's.
        groups: the files of which one is to become, in the order of epochs; empty: the task's
            process has them.
    """

    task: int
    name: str
    groups: tuple[tuple[DataFile, ...], ...]


class Source(NamedTuple):
    """A small file that waits.

    Args:
        epoch: the one with whose publication it can be named.
        file: the file.
    """

    epoch: int
    file: DataFile


Group = tuple[Source, ...]
"""Small files of which a file is to become."""


@dataclass
class UnderWay:
    """The groups that a task has got.

    Args:
        task: its index.
        groups: the sources.
        is_known: the task's process has the sources.
        silent_epochs: the number of epochs since the last word of it.
    """

    task: int
    groups: tuple[Group, ...]
    is_known: bool = False
    silent_epochs: int = 0

    def share(self, name: str) -> Share:
        """Return the share in the form of the plan of tasks."""
        groups = () if self.is_known else self.groups
        return Share(self.task, name, tuple(tuple(file for _, file in group) for group in groups))


class Phase(Enum):
    """The way to a commit."""

    WAITING = auto()
    """Only files of which a large one becomes are compacted."""
    ASKED = auto()
    """The time has come: the next epoch's tasks begin to compact all that is due."""
    GIVEN = auto()
    """They do so."""
    AWAITED = auto()
    """The same, and it takes long."""
    PUBLISHING = auto()
    """The commit is under way, or about to be."""


class Compactor:
    """The driver's side: when due files are compacted, and which. Any thread may call it.

    Invariants:
        * A file is in at most one group.
        * From the question on until the commit, all groups are of epochs up to `_until`.

    Args:
        target: the size of files, in bytes; those of at least half of it are left as they are.
    """

    def __init__(self, target: int) -> None:
        self._target, self._shrinks = target, SHRINKS
        self._lock = threading.Lock()
        self._small = defaultdict[Values, list[Source]](list)
        self._sizes = Counter[Values]()
        self._groups = deque[Group]()  # nobody has them yet
        self._under_way = dict[str, UnderWay]()
        self._phase = Phase.WAITING
        self._newest = self._until = -1
        self.tasks: tuple[int, ...] = ()
        """The tasks that had rows last."""
        self.names = set[str]()
        """The shares whose files no decided epoch has, of this run."""

    def shares(self) -> tuple[Share, ...]:
        """Return what the tasks are to compact, or do compact."""
        with self._lock:
            if self._phase is Phase.ASKED:
                self._phase = Phase.GIVEN
            for name, one in [*self._under_way.items()]:
                if one.silent_epochs > SILENT_EPOCHS:
                    del self._under_way[name]
                    self._groups.extend(one.groups)
            for task, groups in self._chosen():
                oldest = min(group[-1].epoch for group in groups)
                name = f"{oldest:08d}-{task:05d}-{secrets.token_hex(8)}"
                self._under_way[name] = UnderWay(task, groups)
                self.names.add(name)
            return tuple(one.share(name) for name, one in self._under_way.items())

    def _chosen(self) -> Iterator[tuple[int, tuple[Group, ...]]]:
        """Yield groups that nobody has, with their tasks: one for each, or all that is due."""
        busy = {one.task for one in self._under_way.values()}
        idle = [task for task in self.tasks if task not in busy]
        if not idle:
            return
        count = len(idle) if self._phase is Phase.WAITING else len(self._groups)
        chosen = [self._groups.popleft() for _ in range(min(count, len(self._groups)))]
        for at, task in enumerate(idle):
            if groups := (*chosen[at :: len(idle)],):
                yield task, groups

    def add(self, epoch: int, due: DueEpoch) -> None:
        """Take in an epoch that has become due."""
        with self._lock:
            self._newest = max(self._newest, epoch)
            for file in due.files:
                self._wait(Source(epoch, file))
            for compaction in due.compactions:
                self._shrinks = max(1.0, compaction.size / compaction.file.size) * MARGIN
            names = {name_in(compaction.file.path) for compaction in due.compactions}
            self.names -= names
            groups = [group for name in names for group in self._end(name)]
            epochs = {file.path: at for group in groups for at, file in group}
            for compaction in due.compactions:
                if (at := epochs.get(compaction.sources[-1])) is not None:
                    self._wait(Source(at, compaction.file))

    def _end(self, name: str) -> tuple[Group, ...]:
        """Forget a share; return the groups of files in the share."""
        one = self._under_way.pop(name, None)
        return () if one is None else one.groups

    def _wait(self, source: Source) -> None:
        """Let a file wait, if it is small, until there are enough for a large one."""
        if source.file.size >= self._target // 2:
            return
        values = (*source.file.values.values(),)
        file = source.file._replace(statistics="")  # a task does not need them
        waiting = self._small[values]
        waiting.append(source._replace(file=file))
        self._sizes[values] += file.size
        is_enough = self._sizes[values] >= self._target * self._shrinks and len(waiting) > 1
        if is_enough and self._phase is Phase.WAITING:
            self._group(values)

    def _group(self, values: Values) -> None:
        in_order = sorted(self._small.pop(values), key=lambda source: source.epoch)
        self._groups.append((*in_order,))
        del self._sizes[values]

    def hear(self, known: Iterable[str], failed: Iterable[str]) -> int | None:
        """Take in what the tasks of a due epoch tell of their shares.

        Returns the newest epoch to publish, if all is compacted that is to be, else None.

        Args:
            known: the shares that their processes have.
            failed: those that cannot be compacted.
        """
        with self._lock:
            known = {*known}
            for name, one in self._under_way.items():
                one.is_known |= name in known
                one.silent_epochs = 0 if name in known else one.silent_epochs + 1
            for name in failed:
                self._end(name)
            if self._phase not in (Phase.GIVEN, Phase.AWAITED):
                return None
            if self._groups or self._under_way:
                return None
            self._phase = Phase.PUBLISHING
            return self._until

    def drop(self, names: Iterable[str]) -> None:
        """Leave the sources of shares as they are."""
        with self._lock:
            for name in names:
                self._end(name)

    def patience_s(self) -> float:
        """Return how long the compaction of all that is due is waited for; 0: not at all."""
        with self._lock:
            if self._phase is Phase.GIVEN:
                self._phase = Phase.AWAITED
                return COMPACTION_PATIENCE_S
            if self._phase is not Phase.WAITING or not self.tasks:
                return 0
            for values in [values for values, waiting in self._small.items() if len(waiting) > 1]:
                self._group(values)
            if not self._groups and not self._under_way:
                return 0
            self._phase, self._until = Phase.ASKED, self._newest
            return EPOCH_PATIENCE_S

    def begin_again(self, due: Collection[int]) -> None:
        """Wait for the next commit, after a publish or a try.

        Args:
            due: the epochs that are due still.
        """
        with self._lock:
            self._phase = Phase.WAITING

            def waits(group: Group) -> bool:
                return all(source.epoch in due for source in group)

            self._groups = deque(filter(waits, self._groups))
            self._under_way = {
                name: one for name, one in self._under_way.items() if all(map(waits, one.groups))
            }
            waiting = [source for group in self._small.values() for source in group]
            self._small.clear()
            self._sizes.clear()
            for source in waiting:
                if source.epoch in due:
                    self._wait(source)


def name_in(path: str) -> str:
    """Return the name of the attempt, or of the share, in the path of its file."""
    return path.rpartition("/")[2].removeprefix("part-").rpartition("-")[0]


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
