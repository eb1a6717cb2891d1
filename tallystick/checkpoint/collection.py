"""The removal of files that no retained epoch of a checkpoint needs, while a run goes on.

    committed manifests ─► files that the newest no longer names ─┐ once their epochs are expired
    a look at the names of all files, seldom ─► those of nobody  ─┴─► removed, in a thread beside

The cost follows the number of removed files: an epoch's manifest shows which files it dropped.
Files of failed attempts are in no manifest: all names are looked through at a start, after a
failure, and now and then, for attempts that failed without a word (losers of a speculation).

Invariants:
    * A file is removed only when no retained manifest names it; expired manifests that name it are
      removed first. Readers use retained manifests only: recoveries, savepoints, `read_state`.
    * Of an epoch that is not committed, nothing is removed: another run may be writing it.
    * A file that a manifest names again is kept: an epoch that was decided and lost runs again from
      the one before, which names what the lost one had dropped.
"""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import takewhile
from threading import Event, Thread

from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.checkpoint.state_files import delete_all, state_files
from tallystick.epoch import manifest as names
from tallystick.epoch.manifest import COLLECT_EVERY, EPOCHS_RETAINED, Manifest
from tallystick.epoch.micro_batches import settled_notes
from tallystick.state.catalog import StepState
from tallystick.state.file_sets import collectable, renamed

logger = logging.getLogger(__name__)

COLLECTED_MAX = 1000
"""The most files that are removed at once: between two rounds the thread may be ended. S3 takes as
many in one request."""
LOOKED_AT_PER_EPOCH = 10
"""The names of files that an epoch pays for, on average: the more there are, the fewer looks."""
ENDED_S = 10.0
"""The longest that the end of a run waits for the files that are being removed."""


class Collection:
    """The files of a checkpoint that a run has to remove.

    Args:
        folder: the checkpoint.
        every: how many epochs between two removals of few files; 0: nothing is removed.
        at_a_time: see `delete_all`.
    """

    def __init__(
        self, folder: CheckpointFolder, every: int = COLLECT_EVERY, at_a_time: int = 1
    ) -> None:
        self.every = every
        self._folder = folder
        self._at_a_time = at_a_time
        self._is_beside = False
        self._thread: Thread | None = None
        self._ending = Event()
        self._state: tuple[StepState, ...] | None = None  # of the newest committed manifest
        self._epochs: deque[int] = deque(maxlen=EPOCHS_RETAINED)  # the newest committed ones
        self._dropped: dict[str, int] = {}  # files by the epoch that dropped them, ascending
        # By a look: retained epochs name them, not the newest.
        self._collectable: deque[str] = deque()
        self._due_at = self._look_at = 0

    def begin_beside(self) -> None:
        """Remove files in a thread from now on, which `end` ends: no epoch waits for it."""
        self._is_beside = True

    def expect_strays(self) -> None:
        """Make the next round look at all names: an attempt has left files without a manifest."""
        self._due_at = self._look_at = 0

    def go_on(self, committed: Manifest) -> None:
        """Note the newest committed manifest, and remove files that are due; after each epoch.

        No epoch fails because of a removal: a later look finds what could not be removed.
        """
        self._note(committed)
        epoch = committed.checkpoint_id
        is_busy = self._thread is not None and self._thread.is_alive()
        if not self.every or is_busy:
            return
        due = self._due()
        if epoch < self._due_at and len(due) < COLLECTED_MAX:
            return
        self._due_at, is_look = epoch + self.every, epoch >= self._look_at
        if is_look:
            count = sum(len(step.files) for step in committed.state)
            self._look_at = epoch + max(self.every, count // LOOKED_AT_PER_EPOCH)
        for path in due:
            del self._dropped[path]
        if not self._is_beside:
            self._remove(committed, due, is_look=is_look)
            return
        self._thread = Thread(
            target=self._remove,
            args=(committed, due),
            kwargs={"is_look": is_look},
            name="tallystick-collection",
            daemon=True,
        )
        self._thread.start()

    def end(self) -> None:
        """Wait for the removal that is under way, `ENDED_S` at most, then stop it.

        A run of one epoch, by the trigger availableNow, has no other time for it.
        """
        if self._thread is not None:
            self._thread.join(ENDED_S)
        self._ending.set()

    def _note(self, committed: Manifest) -> None:
        epoch = committed.checkpoint_id
        if self._state is not None:
            added, gone = renamed(self._state, committed.state)
            for path in added:
                self._dropped.pop(path, None)
            self._drop(gone, epoch)
        self._state = committed.state
        if not self._epochs or self._epochs[-1] != epoch:
            self._epochs.append(epoch)
        if self._collectable:
            named = {file.path for step in committed.state for file in step.files}
            self._drop((path for path in self._taken() if path not in named), epoch)

    def _taken(self) -> Iterable[str]:
        while self._collectable:
            yield self._collectable.popleft()

    def _drop(self, paths: Iterable[str], epoch: int) -> None:
        for path in paths:
            self._dropped.pop(path, None)  # it goes to the end
            self._dropped[path] = epoch

    def _due(self) -> list[str]:
        """Return the files that were dropped before the oldest retained epoch.

        Files that this epoch dropped itself are not due: a failed attempt of it may have left a
        manifest that names them.
        """
        if len(self._epochs) < EPOCHS_RETAINED:
            return []
        oldest = min(self._epochs)
        return [
            path for path, _ in takewhile(lambda entry: entry[1] < oldest, self._dropped.items())
        ]

    def _remove(self, committed: Manifest, due: Sequence[str], *, is_look: bool) -> None:
        try:
            self._remove_now(committed, due, is_look=is_look)
        except Exception as error:
            self._look_at = 0
            logger.warning(
                "checkpoint %s: removing what is no longer needed failed, and is tried again "
                "later; nothing else depends on it: %s",
                self._folder.location,
                error,
            )

    def _remove_now(self, committed: Manifest, due: Sequence[str], *, is_look: bool) -> None:
        epoch, listed = committed.checkpoint_id, self._folder.files()
        paths, storage = names.manifests(listed), self._folder.storage
        expired = names.expired_manifests(paths, epoch)
        delete_all(storage, [*expired, *settled_notes(listed, epoch)], self._at_a_time)
        if is_look:
            kept = self._folder.manifests(names.retained_manifests(paths, epoch)).values()
            retained = [committed.state, *(manifest.state for manifest in kept)]
            there = state_files(storage)
            due = [*due, *collectable(there, epoch, retained)]
            # The others that the newest does not name are due when their epochs are.
            self._collectable.extend(
                set(collectable(there, epoch, [committed.state])).difference(due)
            )
        for start in range(0, len(due), COLLECTED_MAX):
            if self._ending.is_set():
                return
            delete_all(storage, due[start : start + COLLECTED_MAX], self._at_a_time)
