"""Compactions run in the processes of tasks, in threads beside the epochs, which none waits for.

    epoch n       the plan has a share ─► the task's process begins a job
    epoch m ≥ n   the job is done ─► the task hands its file over, as a committable of its own

A job puts an intent under the share's name before its file, and removes both where the share is no
longer in the plan, or where somebody has removed the intent: a start does, after a kill.
"""

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from threading import Lock, Thread, get_native_id

import pyarrow as pa

from tallystick.errors import StorageError
from tallystick.files.drafts import pending_folder
from tallystick.files.writing import BUFFER_BYTES_MAX
from tallystick.tables.compacting import Share, rows_of
from tallystick.tables.due import Compaction
from tallystick.tables.parts import FileSettings, Part
from tallystick.tables.port import DataFile

NICENESS = 10
"""The niceness of a job's thread: the epochs' work goes first."""
SORTED_BYTES_MAX = 256 << 20
"""The rows of a sorted file, which are in memory at once; of larger groups become several files."""

logger = logging.getLogger(__name__)
_jobs: dict[str, "Job"] = {}
"""The jobs of this process, by the names of their shares."""
_lock = Lock()


class _DroppedError(Exception):
    """The file of a job is no longer wanted, or would be a copy."""


class Job:
    """A share's compaction, in a thread of its own.

    Args:
        settings: of the file.
        hidden: the sink's folder in that of the table.
        share: with its sources.
    """

    def __init__(self, settings: FileSettings, hidden: str, share: Share) -> None:
        self.home, self.share = (settings.folder.location, hidden), share
        self.compactions: tuple[Compaction, ...] = ()
        """The outcome; empty: there is none yet."""
        self.has_failed = False
        """True if its sources are to be published as they are."""
        self._settings, self._folder = settings, settings.folder
        self._intent = f"{pending_folder(hidden)}/{share.name}"
        self._lock, self._is_dropped = Lock(), False
        self._parts = list[Part]()
        self._thread = Thread(target=self._run, name=f"compact-{share.name}", daemon=True)

    @property
    def is_begun(self) -> bool:
        """True if its thread was started."""
        return self._thread.ident is not None

    @property
    def is_under_way(self) -> bool:
        """True if its thread runs."""
        return self._thread.is_alive()

    def begin(self) -> None:
        """Start the thread."""
        self._thread.start()

    def drop(self) -> None:
        """Remove what the job has written, unless an epoch has it: then its intent is gone.

        A job that is under way does so itself.
        """
        with self._lock:
            self._is_dropped = True
        if self.compactions:
            with suppress(StorageError):  # the next start does
                if self._folder.get(self._intent) is not None:
                    self._remove()

    def wait(self) -> None:
        """Wait for the end of the thread."""
        if self.is_begun:
            self._thread.join()

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # of this thread alone, on Linux
            os.setpriority(os.PRIO_PROCESS, get_native_id(), NICENESS)
        try:
            self._folder.put(self._intent, b"")
            compactions = (*chain.from_iterable(map(self._compacted, self.share.groups)),)
            self._folder.sync_files(compaction.file.path for compaction in compactions)
            if not compactions or self._folder.get(self._intent) is None:
                raise _DroppedError
            with self._lock:
                if self._is_dropped:
                    raise _DroppedError
                self.compactions = compactions
        except Exception as error:
            if not self._is_dropped and not isinstance(error, _DroppedError):
                name = self._folder.name
                logger.warning("%s: files are not compacted: %s", name, error)
            with suppress(Exception):  # the next start does
                self._remove()
            self.has_failed = True

    def _compacted(self, group: tuple[DataFile, ...]) -> Iterator[Compaction]:
        """Yield the compactions of a group: one, or several where its rows are sorted."""
        is_sorted = self._settings.order is not None
        part: Part | None = None
        first = 0
        for at, rows in enumerate(rows_of(self._folder, group)):
            if self._is_dropped:
                raise _DroppedError
            if is_sorted and part and part.waiting.byte_count + rows.nbytes > SORTED_BYTES_MAX:
                yield from self._ended(part, group[first:at])
                part, first = None, at
            if part is None:
                name = f"part-{self.share.name}-{secrets.token_hex(4)}"
                part = Part(self._settings, name, group[0].values, rows.schema)
                self._parts.append(part)
            for batch in rows.to_batches():
                part.waiting.take(batch)
            if part.waiting.byte_count > BUFFER_BYTES_MAX and not is_sorted:
                part.flush()
        assert part is not None, "a group has files"
        yield from self._ended(part, group[first:])

    def _ended(self, part: Part, sources: tuple[DataFile, ...]) -> Iterator[Compaction]:
        """Yield the compaction of sources, unless it would be a copy of one."""
        if len(sources) == 1:
            part.waiting.clear()
            return
        file = part.close()
        assert file.rows == sum(source.rows for source in sources), file
        size = sum(source.size for source in sources)
        yield Compaction(tuple(source.path for source in sources), size, file)

    def _remove(self) -> None:
        for part in self._parts:
            with suppress(OSError, pa.ArrowException):
                part.drop()
        self._folder.remove_files(part.path for part in self._parts)
        self._folder.remove_file(self._intent)


def go_on(settings: FileSettings, hidden: str, shares: Iterable[Share], task: int) -> None:
    """Begin the jobs of a task's shares, one at a time, and drop those that no share is for.

    Args:
        settings: of the files.
        hidden: the sink's folder in that of the table.
        shares: of all tasks of the sink.
        task: whose.
    """
    shares = (*shares,)
    listed = {share.name for share in shares}
    with _lock:
        dropped = _taken(settings, hidden, lambda job: job.share.name not in listed)
        for share in shares:
            if share.task == task and share.groups and share.name not in _jobs:
                _jobs[share.name] = Job(settings, hidden, share)
        own = _of_task(settings, hidden, task)
        if not any(job.is_under_way for job in own):
            for job in [job for job in own if not job.is_begun][:1]:
                job.begin()
    for job in dropped:
        job.drop()


def jobs_of(settings: FileSettings, hidden: str, task: int) -> list[Job]:
    """Return the jobs that this process has for a task."""
    with _lock:
        return _of_task(settings, hidden, task)


def end(settings: FileSettings, hidden: str) -> None:
    """Drop all jobs that this process has for a sink, and wait for their threads."""
    with _lock:
        dropped = _taken(settings, hidden, lambda _: True)
    for job in dropped:
        job.drop()
        job.wait()


def _of_task(settings: FileSettings, hidden: str, task: int) -> list[Job]:
    home = (settings.folder.location, hidden)
    return [job for job in _jobs.values() if job.home == home and job.share.task == task]


def _taken(settings: FileSettings, hidden: str, does_end: Callable[[Job], bool]) -> list[Job]:
    """Take jobs of a sink out of those of this process."""
    home = (settings.folder.location, hidden)
    taken = [job for job in _jobs.values() if job.home == home and does_end(job)]
    for job in taken:
        del _jobs[job.share.name]
    return taken
