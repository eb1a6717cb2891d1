"""Copies of state in memory: the StateStore port of a `driver.Driver`, and views of entries."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa

from tallystick.state.catalog import Version
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.overlay import ENTRIES


@dataclass
class MemoryStore:
    """The StateStore port: the committed state of a key-group range in a dictionary."""

    at: Version | None = None
    entries: dict[bytes, bytes] = field(default_factory=dict)

    def version(self) -> Version | None:
        """Return the version of the content."""
        return self.at

    def apply(
        self,
        expected: Version | None,
        version: Version,
        steps: Iterable[KeyGroupRange | pa.RecordBatch],
    ) -> bool:
        """Bring the content to another version; see `ports.StateStore.apply`."""
        if self.at != expected:
            return False
        self.at = None
        for step in steps:
            take(self.entries, step)
        self.at = version
        return True

    @contextmanager
    def view(self, version: Version | None) -> Iterator["MemoryView | None"]:
        """Open the content at a version; None if it has another."""
        yield MemoryView(dict(self.entries)) if self.at == version else None


@dataclass(frozen=True)
class MemoryView:
    """The entries of a store at one moment; see `state.overlay.StateView`."""

    entries: Mapping[bytes, bytes]

    @cached_property
    def _keys(self) -> list[bytes]:
        return sorted(self.entries)

    def get_many(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        """Return the value of each key, null for a key without a value."""
        return pa.array([self.entries.get(key) for key in keys.to_pylist()], pa.binary())

    def scan(self, first: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the entries with first <= key < end, in order."""
        keys = self._keys[bisect_left(self._keys, first) : bisect_left(self._keys, end)]
        return ((key, self.entries[key]) for key in keys)

    def batches(self, groups: KeyGroupRange) -> Iterator[pa.RecordBatch]:
        """Yield all entries of the key groups, in order."""
        keys = [key for key in self._keys if is_in(key, groups)]
        values = [self.entries[key] for key in keys]
        arrays = [pa.array(keys, pa.binary()), pa.array(values, pa.binary())]
        yield pa.RecordBatch.from_arrays(arrays, schema=ENTRIES)


def take(entries: dict[bytes, bytes], step: KeyGroupRange | pa.RecordBatch) -> None:
    """Take a step of a change into entries: key groups are cleared, a null value removes a key."""
    if isinstance(step, KeyGroupRange):
        for key in [key for key in entries if is_in(key, step)]:
            del entries[key]
        return
    for key, value in zip(*(column.to_pylist() for column in step.columns), strict=True):
        if value is None:
            entries.pop(key, None)
        else:
            entries[key] = value


def is_in(key: bytes, groups: KeyGroupRange) -> bool:
    """True if an entry belongs to the key groups."""
    return groups.first <= int.from_bytes(key[:2], "big") <= groups.last
