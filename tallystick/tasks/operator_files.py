"""Files of operator state, which one task writes again for all: merged changelogs and snapshots."""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from tallystick.checkpoint.state_files import changes_since, write_merged, write_snapshot
from tallystick.ports import Storage
from tallystick.state.catalog import StateFile, StepState
from tallystick.state.file_sets import due_merges, due_snapshots
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.overlay import EmptyView

FIRST_READER = 0
"""The task that does it."""


def rewritten(base: StepState, epoch: int, storage: Storage, nonce: str) -> Iterator[StateFile]:
    """Write again what is due of the committed state.

    Args:
        base: the committed state.
        epoch: the one that runs.
        storage: the checkpoint's files.
        nonce: that no other attempt has drawn.
    """
    if base.version is None or not base.files:
        return
    name = (storage, base.uid, base.version.epoch, FIRST_READER, nonce)
    if FIRST_READER in (merges := due_merges(base, 1)):
        yield write_merged(*name, merges[FIRST_READER], written_in=epoch)
    if FIRST_READER in (due := due_snapshots(base, 1)):
        view = CommittedEntries(base, storage)
        yield write_snapshot(*name, view, due[FIRST_READER], written_in=epoch)


class CommittedEntries(EmptyView):
    """The committed entries of operator state, read from its files."""

    def __init__(self, base: StepState, storage: Storage) -> None:
        self._base, self._storage = base, storage

    def batches(self, groups: KeyGroupRange) -> Iterator[pa.RecordBatch]:
        """See `StateView.batches`."""
        entries = changes_since(self._base, None, groups, self._storage).entries
        yield entries.filter(pc.is_valid(entries.column(1)))
