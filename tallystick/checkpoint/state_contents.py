"""The committed entries of a step, straight from the checkpoint's files: for looking inside."""

from collections.abc import Iterator

import pyarrow as pa

from tallystick.checkpoint.state_files import read_entries
from tallystick.ports import Storage
from tallystick.state.catalog import StepState
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.overlay import one_batch

CHUNK_BYTES = 16 << 20
"""About so many bytes of files are in memory at a time."""


def contents_of(step: StepState, groups: KeyGroupRange, storage: Storage) -> pa.RecordBatch:
    """The entries of some key groups, sorted by key; `ENTRIES`.

    Raises:
        StateFileError: a file is missing or damaged.
        OptionError: they are too many for one batch.
    """
    what = f"the entries of key groups {groups.first} to {groups.last} of step {step.uid}"
    return one_batch(read_entries(step, groups, storage), what, "spread them over more key groups")


def chunks_of(step: StepState, groups: KeyGroupRange) -> Iterator[KeyGroupRange]:
    """The key groups in parts that are small enough to hold, as far as single groups are."""
    size = sum(
        file.size * file.groups.intersection(groups).count // file.groups.count
        for file in step.files
    )
    count = max(1, min(groups.count, -(-size // CHUNK_BYTES)))
    yield from groups.parts(count)
