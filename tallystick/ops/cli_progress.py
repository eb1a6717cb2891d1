"""Progress of commands that take more than moments: on a terminal, and nowhere else."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Lock

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from tallystick.checkpoint.folder import CheckpointFolder, state_path
from tallystick.epoch.manifest import epoch_of
from tallystick.errors import TallystickError
from tallystick.ops import savepoints
from tallystick.state.catalog import StepState
from tallystick.storage.file_storage import FileStorage


class WatchedStorage(FileStorage):
    """A storage that reports the bytes of state that are read or written; manifests do not count.

    Args:
        uri: its location.
        note: called with the number of bytes of each read or write.
    """

    def __init__(self, uri: str, note: Callable[[int], None]) -> None:
        super().__init__(uri)
        self._note = note

    def get(self, path: str) -> bytes | None:
        """See `FileStorage.get`."""
        return self._noted(path, super().get(path))

    def get_range(self, path: str, offset: int, length: int) -> bytes | None:
        """See `FileStorage.get_range`."""
        return self._noted(path, super().get_range(path, offset, length))

    def put(self, path: str, data: bytes) -> None:
        """See `FileStorage.put`."""
        super().put(path, data)
        self._noted(path, data)

    def _noted(self, path: str, data: bytes | None) -> bytes | None:
        if path.startswith(state_path("")):
            self._note(len(data or b""))
        return data


class Work:
    """A command's work without a terminal: everything is done, and nothing shown."""

    def storage(self, uri: str) -> FileStorage:
        """Open a storage whose bytes count as progress."""
        return FileStorage(uri)

    def say(self, what: str) -> None:
        """Show the name of the present step."""

    def expect(self, byte_count: Callable[[], int | None]) -> None:
        """Set the approximate number of bytes of state that the storages will read or write.

        Args:
            byte_count: computes the number; called only on a terminal. None: not known.
        """


class WatchedWork(Work):
    """A command's work on a terminal, which shows the progress."""

    def __init__(self, progress: Progress, what: str) -> None:
        self._progress = progress
        self._task = progress.add_task(what, total=None)
        self._total: int | None = None
        self._passed = 0
        self._lock = Lock()

    def storage(self, uri: str) -> FileStorage:
        """See `Work.storage`."""
        return WatchedStorage(uri, self._note)

    def _note(self, count: int) -> None:
        with self._lock:  # files are copied several at a time
            self._passed += count
            # An index may be read twice: more than all of it is all of it.
            shown = self._passed if self._total is None else min(self._passed, self._total)
            self._progress.update(self._task, completed=shown)

    def say(self, what: str) -> None:
        """See `Work.say`."""
        self._progress.update(self._task, description=what, refresh=True)  # it may be short

    def expect(self, byte_count: Callable[[], int | None]) -> None:
        """See `Work.expect`."""
        try:
            self._total = byte_count()
        except TallystickError:
            return  # the command itself will say what is wrong
        self._progress.update(self._task, total=self._total)


@contextmanager
def watched(what: str) -> Iterator[Work]:
    """Show a bar of the bytes through storages, which disappears at the end of the block.

    Args:
        what: the text before the bar.
    """
    if not sys.stderr.isatty():
        yield Work()
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield WatchedWork(progress, what)


@contextmanager
def counted(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar of a count, from the first count until the end of the block.

    Args:
        what: the text before the bar.

    Yields:
        A function to call with the count and the total.
    """
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None, visible=False)
        yield lambda count, total: progress.update(task, completed=count, total=total, visible=True)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show a spinner for work whose progress is unknown."""
    if not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status(what):
        yield


def checkpoint_bytes(checkpoint: str) -> int:
    """Return the size of the files of state that the retained manifests of a checkpoint name.

    Raises:
        TallystickError: a manifest cannot be read.
    """
    folder = CheckpointFolder(FileStorage(checkpoint))
    manifests = folder.manifests(folder.manifest_paths()).values()
    return _bytes_of(step for manifest in manifests for step in manifest.state)


def epoch_bytes(checkpoint: str, epoch: int | None) -> int:
    """Return the size of the files of state of one epoch; None: the newest.

    Raises:
        TallystickError: a manifest cannot be read.
    """
    folder = CheckpointFolder(FileStorage(checkpoint))
    paths = [path for path in folder.manifest_paths() if epoch in (None, epoch_of(path))]
    return _bytes_of(
        step for manifest in folder.manifests(paths[-1:]).values() for step in manifest.state
    )


def savepoint_bytes(savepoint: str) -> int:
    """Return the size of the files of state of a savepoint.

    Raises:
        TallystickError: it cannot be read.
    """
    return _bytes_of(savepoints.read(FileStorage(savepoint)).manifest.state)


def _bytes_of(steps: Iterable[StepState]) -> int:
    return sum({file.path: file.size for step in steps for file in step.files}.values())
