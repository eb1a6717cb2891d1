"""The committed entries of a step, straight from the checkpoint's files: for looking inside."""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

import pyarrow as pa
import pyarrow.compute as pc

from tallystick.errors import BrokenInvariantError
from tallystick.ports import Storage
from tallystick.state.handles import StepState, Version
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.view import ENTRIES, StateView
from tallystick.state_files import bring_forward, newest_entries

CHUNK_BYTES = 16 << 20
"""About so many bytes of files are in memory at a time."""


class _Gathered:
    """A store that holds nothing but what it is given once."""

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []
        self._version: Version | None = None

    def version(self) -> Version | None:
        """See `StateStore.version`."""
        return self._version

    def apply(
        self,
        expected: Version | None,
        version: Version,
        steps: Iterable[KeyGroupRange | pa.RecordBatch],
    ) -> bool:
        """See `StateStore.apply`."""
        assert expected is None, "it is filled once, from nothing"
        self.batches = [step for step in steps if isinstance(step, pa.RecordBatch)]
        self._version = version
        return True

    def view(self, version: Version | None) -> AbstractContextManager[StateView | None]:
        """See `StateStore.view`."""
        raise BrokenInvariantError(f"nobody reads it by key, at {version} or ever")


def contents_of(step: StepState, groups: KeyGroupRange, storage: Storage) -> pa.RecordBatch:
    """The entries of some key groups, sorted by key; `ENTRIES`.

    Raises:
        StateFileError: a file is missing or damaged.
    """
    gathered = _Gathered()
    bring_forward(gathered, step, groups, storage)
    newest = newest_entries(gathered.batches)
    found = newest.filter(pc.is_valid(newest.column(1))).combine_chunks().to_batches()
    return found[0] if found else pa.RecordBatch.from_pylist([], schema=ENTRIES)


def chunks_of(step: StepState, groups: KeyGroupRange) -> Iterator[KeyGroupRange]:
    """The key groups in parts that are small enough to hold, as far as single groups are."""
    size = sum(
        file.size * file.groups.intersection(groups).count // file.groups.count
        for file in step.files
    )
    count = max(1, min(groups.count, -(-size // CHUNK_BYTES)))
    edges = [groups.first + groups.count * at // count for at in range(count + 1)]
    for start, stop in itertools.pairwise(edges):
        yield KeyGroupRange(start, stop - 1)
