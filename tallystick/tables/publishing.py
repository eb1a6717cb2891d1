"""Due epochs and the commits of a table that publish them, each epoch exactly once.

A *due* epoch is decided, and its files wait for a commit of the table. It is written down in the
hidden folder, by a file of its own, so that an epoch costs the same whatever waits; a commit then
names the files of all due epochs, and says which epoch is the newest that the table has of this
sink in this checkpoint. The proofs of an outcome:

    the table's newest epoch ≥ the epoch              COMMITTED
    less, and the epoch is due                        COMMITTED: the next commit publishes it
    less, not due, and all files are there            not yet: it becomes due
    less, not due, and no file is there               LOST: somebody removed all of them

Invariants:
    * An epoch is due only after its decision, and before any later epoch is.
    * A commit is tried only after the table was asked for its newest epoch, and the table refuses
      one if another run has committed since then. So a driver that slept commits nothing twice.
    * A due file is removed only when the table has its epoch.
    * Intents of an epoch are removed only once it is due or committed: what lingers is undecided.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from tallystick.epoch.two_phase import PATIENCE_S, Committable, DueOutput, Outcome
from tallystick.errors import (
    UNREADABLE,
    DataLossError,
    FencedError,
    ManifestError,
    OptionError,
    StorageError,
    TallystickError,
)
from tallystick.files.drafts import due_folder, parse_name, pending_folder
from tallystick.files.folder import Folder
from tallystick.host.stopwatch import now_ms
from tallystick.tables.columns import refuse
from tallystick.tables.compacting import Compactor, Share, name_in
from tallystick.tables.due import (
    REMEDY,
    Compaction,
    DueEpoch,
    Publication,
    output_of,
    path_of,
    read_due,
    to_publish,
)
from tallystick.tables.port import DataFile, Table
from tallystick.text import shortened

DUE_MAX = 2_000
"""The number of due epochs at which they are published before the time has come."""
CLOSE_PATIENCE_S = 30.0
TARGET_FILE_SIZE = 64 << 20
"""The size of compacted files by default, in bytes."""
SHOWN_MAX = 10

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")


class AttemptFiles(NamedTuple):
    """The files of one committable.

    Args:
        table_id: of the table that they were written for.
        files: of the epoch's rows.
        compactions: of files of earlier epochs.
        known: the shares whose sources the process of the task has.
        failed: those of them that cannot be compacted.
    """

    table_id: str
    files: tuple[DataFile, ...]
    compactions: tuple[Compaction, ...]
    known: tuple[str, ...]
    failed: tuple[str, ...]


def prepared(committable: Committable) -> AttemptFiles:
    """Parse the details of a committable.

    Raises:
        ManifestError: no release writes them, or a recovery found the committable by its intent.
    """
    try:
        details = json.loads(committable.details)
        parts = AttemptFiles(
            str(details["table"]),
            tuple(DataFile(*fields) for fields in details.get("files", ())),
            tuple(map(Compaction.of, details.get("compactions", ()))),
            tuple(map(str, details.get("known", ()))),
            tuple(map(str, details.get("failed", ()))),
        )
        is_ours = parse_name(committable.name) is not None and all(
            _name(file.path).startswith(f"part-{committable.name}-") and ".." not in file.path
            for file in (*parts.files, *(compaction.file for compaction in parts.compactions))
        )
        is_ours &= all(
            _name(source).startswith("part-") and ".." not in source
            for compaction in parts.compactions
            for source in compaction.sources
        )
    except UNREADABLE:
        is_ours = False
    if not is_ours:
        raise ManifestError(
            f"sink {committable.sink}: epoch {committable.checkpoint_id} names "
            f"{committable.name!r} with {committable.details[:200]!r}, which no release writes: "
            f"the manifest was edited, or made by somebody else. Nothing was changed."
        )
    return parts


class Pace(NamedTuple):
    """The user's wishes about commits.

    Args:
        every_ms: the time between two commits of the table; 0: a commit for each epoch.
        target_file_size: that of compacted files, in bytes.
    """

    every_ms: int
    target_file_size: int = TARGET_FILE_SIZE


class Publisher:
    """The due epochs of one sink in one checkpoint, and their commits.

    Args:
        table: as it was refreshed last.
        folder: of the table.
        hidden: the sink's folder in it.
        data: the folder of the files, below the table's.
        pace: of the commits.
    """

    def __init__(self, table: Table, folder: Folder, hidden: str, data: str, pace: Pace) -> None:
        self._table, self._folder = table, folder
        self.hidden, self._data, self._every_ms = hidden, data, pace.every_ms
        self._compactor = Compactor(pace.target_file_size)
        self._table_id = table.table_id
        self._lock, self._committing = threading.Lock(), threading.Lock()
        self._timer: threading.Timer | None = None
        self._error: Exception | None = None
        self._is_first, self._is_closed = True, False
        self._due = read_due(folder, hidden)
        self._due_bytes = sum(map(_size, self._due.values()))
        for epoch, of_epoch in self._due.items():
            self._check_table(of_epoch.table_id, epoch)

    @property
    def due(self) -> tuple[int, ...]:
        """The epochs that wait."""
        with self._lock:
            return tuple(sorted(self._due))

    def due_output(self) -> DueOutput:
        """Return how much waits."""
        with self._lock:
            due = (*self._due.values(),)
        return output_of(due)

    def shares(self) -> tuple[Share, ...]:
        """Return what the tasks compact beside the next epoch."""
        return self._compactor.shares() if self._is_compacted else ()

    @property
    def names(self) -> frozenset[str]:
        """The shares of this run whose files no decided epoch has; the processes of tasks do."""
        return frozenset(self._compactor.names)

    @property
    def _is_compacted(self) -> bool:
        is_kept = self._table.staged_bytes_max is None
        return bool(self._every_ms) and is_kept and not self._is_closed

    def newest_epoch(self) -> int:
        """Return the newest epoch in the table; -1: none is.

        Raises:
            StorageError: the table cannot be read now.
        """
        return self._asking(lambda: self._table.newest_epoch)

    def _asking(self, ask: Callable[[], Answer]) -> Answer:
        with self._committing:
            try:
                self._table.refresh()
                return ask()
            except self._table.failures as error:
                raise self._folder.failed("reading the table", error) from None

    def take(self, committables: Sequence[Committable]) -> Outcome:
        """Make a decided epoch due, and publish it if its time has come. Idempotent.

        Raises:
            StorageError: the outcome is unknown for now.
            DataLossError: some files of the epoch are gone, or the table was replaced.
            OptionError: the table was changed so that it cannot be written to any more.
        """
        (epoch,) = {committable.checkpoint_id for committable in committables}
        if self._error is not None:
            raise self._error
        parts = [prepared(committable) for committable in committables]
        with self._lock:
            is_due = epoch in self._due
        if not is_due:
            files = tuple(file for part in parts for file in part.files)
            gone = self._gone(files)
            # A later epoch of this run is in the table only if another run has gone on, which a
            # commit finds out.
            if not (gone or self._is_first) or self.newest_epoch() < epoch:
                for part in parts:
                    self._check_table(part.table_id, epoch)
                if len(gone) == len(files):
                    return Outcome.LOST
                self._check_whole(epoch, files, gone)
                self._make_due(epoch, parts)
            else:
                self._remove_staged(files)
            self._is_first = False
        self._compactor.tasks = tuple(sorted({one.task for one in committables}))
        with self._lock:
            due_count = len(self._due)
        if not self._every_ms or self._is_full:
            self.publish()
        elif (newest := self._reported(parts)) is not None:
            self._start_timer(0, newest)  # what has come since is not compacted
        elif self._timer is None and due_count:
            self._wait()
        elif due_count == DUE_MAX * 3 // 4:
            self._start_timer(0)  # compacted before there are too many
        pending = pending_folder(self.hidden)
        self._folder.remove_files(f"{pending}/{committable.name}" for committable in committables)
        return Outcome.COMMITTED

    def _reported(self, parts: Iterable[AttemptFiles]) -> int | None:
        """Return the newest epoch to publish, if all that is due before has been compacted."""
        known = [name for part in parts for name in part.known]
        failed = [name for part in parts for name in part.failed]
        return self._compactor.hear(known, failed)

    @property
    def _is_full(self) -> bool:
        bytes_max = self._table.staged_bytes_max
        with self._lock:
            is_large = bytes_max is not None and self._due_bytes >= bytes_max
            return len(self._due) >= DUE_MAX or is_large

    def _make_due(self, epoch: int, parts: Iterable[AttemptFiles]) -> None:
        parts = (*parts,)
        compactions = [compaction for part in parts for compaction in part.compactions]
        gone = self._gone(tuple(compaction.file for compaction in compactions))
        if gone:
            logger.warning("%s: compacted files are gone: %s", self._folder.name, shortened(gone))
        due = DueEpoch(
            self._table_id,
            tuple(file for part in parts for file in part.files),
            tuple(compaction for compaction in compactions if compaction.file.path not in gone),
            now_ms(),
            self._every_ms,
        )
        self._note(epoch, due)
        with self._lock:
            self._due[epoch] = due
            self._due_bytes += _size(due)
        if self._is_compacted:
            self._compactor.add(epoch, due)
            self._compactor.drop(map(name_in, gone))

    def _note(self, epoch: int, due: DueEpoch) -> None:
        if self._every_ms:
            self._folder.put(path_of(self.hidden, epoch), due.to_bytes())

    def _gone(self, files: tuple[DataFile, ...]) -> list[str]:
        sizes = self._folder.sizes(file.path for file in files)
        return [file.path for file in files if sizes.get(file.path) != file.size]

    def _check_whole(self, epoch: int, files: tuple[DataFile, ...], gone: list[str]) -> None:
        if gone:
            raise DataLossError(
                f"{self._folder.name}: epoch {epoch} was decided, and of its "
                f"{len(files)} files {len(gone)} are gone that no commit has named: "
                f"{shortened(gone, SHOWN_MAX)}. Somebody removed them, such as a VACUUM with a "
                f"retention shorter than the pipeline was down. {REMEDY}"
            )

    def _check_folders(self, files: Sequence[DataFile], what: str) -> None:
        if any(file.path.rpartition("/")[0] != self._data for file in files):
            raise OptionError(
                f"{self._folder.name}: {what} were written while the sink "
                f"{'had no key=' if self._table.staged_bytes_max else 'had a key='}, and are due. "
                f"Start the pipeline as it was and stop it, which publishes them; then change key="
            )

    def _check_table(self, table_id: str, epoch: int) -> None:
        if table_id != self._table_id:
            raise DataLossError(
                f"{self._folder.name}: epoch {epoch} was written for the table "
                f"with id {table_id}, and now there is one with id {self._table_id}: the table was "
                f"replaced. Bring the old one back, or begin with a new checkpoint."
            )

    def _wait(self) -> None:
        self._start_timer(self._every_ms / 1000)

    def _start_timer(self, after_s: float, newest: int | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(after_s, self._publish_in_time, (newest,))
        self._timer.daemon = True
        self._timer.start()

    def _publish_in_time(self, newest: int | None = None) -> None:
        """Publish, or first ask the next epoch to compact what is due, and wait for it a while."""
        if newest is None and self._is_compacted and (wait_s := self._compactor.patience_s()):
            self._start_timer(min(self._every_ms / 1000, wait_s))
            return
        self._timer = None
        try:
            self.publish(newest=newest)
        except StorageError as error:
            logger.warning("%d epochs wait for the next try: %s", len(self.due), error)
            if not self._is_closed:
                self._wait()
        except Exception as error:
            self._error = error  # raised by the next epoch
        else:
            if self.due and not self._is_closed:
                self._wait()

    def publish(self, patience_s: float = PATIENCE_S, newest: int | None = None) -> None:
        """Commit the files of due epochs, unless the table has them.

        Args:
            patience_s: the time for tries while other writers are first.
            newest: the newest epoch of them; None: all are published.

        Raises:
            StorageError: whether the table has them is unknown for now.
            OptionError: the table was changed so that it cannot be written to any more.
        """
        until = time.monotonic() + patience_s
        with self._committing:
            with self._lock:
                due = dict(sorted(self._due.items()))
            newest = max(due, default=-1) if newest is None else newest
            try:
                if due and min(due) <= newest:
                    new, useless = self._commit(due, newest, until)
                    self._folder.remove_files(useless)
                    self._forget(due, newest, new.counted)
            finally:
                with self._lock:
                    remaining = {*self._due}
                self._compactor.begin_again(remaining)

    def _forget(self, due: dict[int, DueEpoch], newest: int, counted: Sequence[Compaction]) -> None:
        """Remove the notes of published epochs, and of compactions that were published early."""
        published = {epoch: due[epoch] for epoch in due if epoch <= newest}
        for epoch in due.keys() - published.keys():
            remaining = tuple(one for one in due[epoch].compactions if one not in counted)
            if remaining != due[epoch].compactions:
                due[epoch] = due[epoch]._replace(compactions=remaining)
                self._note(epoch, due[epoch])
        self._remove_staged(file for epoch in published.values() for file in epoch.files)
        if self._every_ms or self._folder.names(due_folder(self.hidden)):
            self._folder.remove_files(path_of(self.hidden, epoch) for epoch in published)
        with self._lock:
            self._due |= due  # others may have come meanwhile
            for epoch in published:
                self._due_bytes -= _size(self._due.pop(epoch))

    def _remove_staged(self, files: Iterable[DataFile]) -> None:
        if self._table.staged_bytes_max is not None:
            self._folder.remove_files(file.path for file in files)

    def _commit(
        self, due: dict[int, DueEpoch], newest: int, until: float
    ) -> tuple[Publication, list[str]]:
        """Commit the epochs up to `newest` that the table does not have.

        Returns them, and the files that nobody needs any more.
        """
        while True:
            try:
                self._table.refresh()
                in_table = self._table.newest_epoch
                before = [due[at] for at in due if at <= in_table]
                missed = [compaction for epoch in before for compaction in epoch.compactions]
                new = to_publish({at: due[at] for at in due if at > in_table}, newest)
                missed += new.missed
                if not new.files:
                    return new, self._replaced(missed)
                self._check_table(self._table.table_id, newest)
                self._check_folders(new.files, f"epochs {min(due)} to {newest}")
                refuse(self._folder.name, self._table.problems())
                if self._table.append(new.files, min(due), newest):
                    useless = [path for one in new.counted for path in one.sources]
                    return new, [*useless, *self._replaced(missed)]
            except TallystickError:
                raise
            except self._table.failures as error:
                raise self._folder.failed(f"committing epoch {newest}", error) from None
            if time.monotonic() > until:  # others were first, each time
                raise self._folder.failed(
                    f"committing epoch {newest}",
                    OSError("other writers were first, time and again"),
                )

    def _replaced(self, compactions: Sequence[Compaction]) -> list[str]:
        """Return the files that nobody needs of compactions that other commits have settled.

        Whether one counted then is seen by the files that the table names. Where the table names
        neither a file nor a source, since somebody rewrote both, nothing is removed.
        """
        if not compactions:
            return []
        self._table.refresh()
        named, useless = self._table.names(), list[str]()
        counted = set(named)
        for sources, _, file in reversed(compactions):
            if _name(file.path) in counted:
                useless += sources
                counted |= {*map(_name, sources)}
            elif any(_name(source) in named for source in sources):
                useless.append(file.path)
        return useless

    def check_newest(self, epoch: int) -> None:
        """Raise if the table, or what is due, has a later epoch.

        Raises:
            FencedError: it has.
        """
        newest = max(self.newest_epoch(), *self.due, -1)
        if newest > epoch:
            raise FencedError(
                f"{self._folder.name} has epoch {newest} of this checkpoint, and "
                f"the checkpoint's newest is {epoch}: another run has gone on, or the checkpoint "
                f"is an old copy. Stop the other run, or restore a savepoint into a new checkpoint."
            )

    def abort(self, name: str, epoch: int) -> None:
        """Remove the files of an attempt, and its intent, unless the table names them."""
        prefix, data = f"part-{name}-", self._data
        with self._lock:
            due = {
                _name(compaction.file.path)
                for of_epoch in self._due.values()
                for compaction in of_epoch.compactions
            }
        names = self._folder.names(data)
        parts = [part for part in names if part.startswith(prefix) and part not in due]
        if parts and self.newest_epoch() >= epoch:
            named = self._asking(self._table.names)
            parts = [part for part in parts if part not in named]
        self._folder.remove_files(f"{data}/{part}" if data else part for part in parts)
        self._folder.remove_file(f"{pending_folder(self.hidden)}/{name}")

    def close(self) -> None:
        """Publish what waits; a failure leaves it due, for the next start."""
        self._is_closed = True
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        try:
            self.publish(CLOSE_PATIENCE_S)
        except StorageError as error:
            logger.warning("%d epochs wait for the next start: %s", len(self.due), error)


def _size(due: DueEpoch) -> int:
    """Return the size of an epoch's own files, in bytes."""
    return sum(file.size for file in due.files)


def _name(path: str) -> str:
    return path.rpartition("/")[2]
