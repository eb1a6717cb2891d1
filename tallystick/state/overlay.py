"""The overlay: the changes of an epoch over a committed state."""

import bisect
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from tallystick.errors import OptionError
from tallystick.state.key_groups import KeyGroupRange

ENTRIES = pa.schema([pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary())])
"""Entries of state as columns; a null value means that the key is deleted."""


def one_batch(table: pa.Table, what: str, advice: str) -> pa.RecordBatch:
    """Return all rows of a table as one batch.

    Args:
        table: of any columns.
        what: the name of the table, for the message.
        advice: what to do about too many rows.

    Raises:
        OptionError: a column has more text than one batch holds (2 GiB).
    """
    batches = table.combine_chunks().to_batches()
    if len(batches) > 1:
        raise OptionError(
            f"{what}: {table.num_rows} rows do not fit into one batch (2 GiB of text in a column): "
            f"{advice}"
        )
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


class StateView(Protocol):
    """A fixed view of a committed state, even if changes are applied to the store meanwhile."""

    def get_many(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        """Return the value of each key, or null; quickest for sorted keys."""
        ...

    def scan(self, first: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Return the entries with first <= key < end, in the order of their keys."""
        ...

    def batches(self, groups: KeyGroupRange) -> Iterator[pa.RecordBatch]:
        """Yield the entries of the key groups as (key, value) columns, in the order of keys."""
        ...


def following(prefix: bytes) -> bytes:
    """Return the smallest key after all keys with a prefix, which is not 0xFF alone."""
    cut = prefix.rstrip(b"\xff")
    return cut[:-1] + bytes([cut[-1] + 1])


class EmptyView:
    """The state before the first epoch."""

    def get_many(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        """See `StateView.get_many`."""
        return pa.nulls(len(keys), pa.binary())

    def scan(self, first: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """See `StateView.scan`."""
        return iter(())

    def batches(self, groups: KeyGroupRange) -> Iterator[pa.RecordBatch]:
        """See `StateView.batches`."""
        return iter(())


FINAL_WATERMARK_MS = (1 << 62) // 1000
"""The watermark at the end of all inputs, as Flink's MAX_WATERMARK: after every event time. Half of
what 64 bits hold in microseconds, so that a user's function can add a delay or a gap to it."""
_LAST_EVENT_MS = 253_402_300_800_000
"""The end of the year 9999, in which all event times lie."""
TIMERS_END_MS = (1 << 63) - 1
"""No timer is due later."""


def is_final(watermark_ms: int | None) -> bool:
    """True if a watermark is that of the end of all inputs, perhaps less a delay."""
    return watermark_ms is not None and watermark_ms >= _LAST_EVENT_MS


class EpochTime(NamedTuple):
    """The clock of an epoch: the same for each of its attempts.

    `timestamp_ms` is the processing time of the epoch; `watermark_ms` comes from earlier
    epochs, and is None as long as no event time was seen.
    """

    timestamp_ms: int
    watermark_ms: int | None = None

    @property
    def event_timers_until_ms(self) -> int | None:
        """The moment up to which timers of event time are due: at the end of all inputs, all."""
        return TIMERS_END_MS if is_final(self.watermark_ms) else self.watermark_ms


class Overlay:
    """The changes of one epoch over the committed state; `get` and `scan` see both.

    Args:
        view: the committed state.
    """

    def __init__(self, view: StateView) -> None:
        self._view = view
        self._changes: dict[bytes, bytes | None] = {}
        self._sorted: list[bytes] | None = []  # None: to be sorted again
        self._columns: list[pa.RecordBatch] = []
        self._read: dict[bytes, bytes | None] = {}
        self._families: dict[bytes, set[bytes]] = {}

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key; None if it has none."""
        if key in self._changes:
            return self._changes[key]
        if key in self._read:
            return self._read[key]
        # For a single key a scan costs an eighth of two Arrow arrays.
        committed = next((value for _, value in self._view.scan(key, key + b"\x00")), None)
        self._read[key] = committed
        return committed

    def prefetch(self, keys: pa.BinaryArray) -> None:
        """Read the committed values of keys ahead of `get`, and forget earlier read values."""
        values = self._view.get_many(keys)
        # Arrow makes bytes of a whole column ten times faster than of its scalars.
        names = keys.to_numpy(zero_copy_only=False)
        self._read = dict(zip(names, values.to_numpy(zero_copy_only=False), strict=True))

    def put(self, key: bytes, value: bytes | None) -> None:
        """Set a value; None deletes."""
        if key not in self._changes:
            self._sorted = None
        self._changes[key] = value

    def put_in(self, family: bytes, key: bytes, value: bytes | None) -> None:
        """Set a value as `put` does, and list the key under a family for `entries`."""
        self.put(key, value)
        members = self._families.get(family)
        if members is None:
            self._families[family] = {key}
        else:
            members.add(key)

    def any_order(self, family: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the entries of a family in no order; write no entry of the family meanwhile.

        Of the epoch's changes only those by `put_in` are seen. `scan` sorts all changes after each
        new key; here the cost is that of the family's entries.
        """
        changed = self._families.get(family, ())
        for key in changed:
            value = self._changes[key]
            if value is not None:
                yield key, value
        for key, value in self._view.scan(family, following(family)):
            if key not in changed:
                yield key, value

    def entries(self, family: bytes) -> list[tuple[bytes, bytes]]:
        """Return the entries of `any_order` in the order of the keys; writing meanwhile is safe."""
        return sorted(self.any_order(family))

    def committed(self, first: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Return the committed entries with first <= key < end, without this epoch's changes."""
        return self._view.scan(first, end)

    def scan(self, first: bytes, end: bytes) -> list[tuple[bytes, bytes]]:
        """Return a snapshot of the entries with first <= key < end, in order."""
        if self._sorted is None:
            self._sorted = sorted(self._changes)
        start, stop = bisect.bisect_left(self._sorted, first), bisect.bisect_left(self._sorted, end)
        changed = self._sorted[start:stop]
        entries: dict[bytes, bytes | None] = dict(self._view.scan(first, end))
        if not changed:
            return [(key, value) for key, value in entries.items() if value is not None]
        entries.update((key, self._changes[key]) for key in changed)
        return sorted((key, value) for key, value in entries.items() if value is not None)

    def get_many(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        """Return the committed value of each key, or null.

        For functions that see each key once in an epoch: the epoch's changes are not read.
        """
        return self._view.get_many(keys)

    def put_many(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> None:
        """Set the values of distinct keys; no other `put` or `put_many` may set the same keys."""
        if len(keys):
            self._columns.append(pa.RecordBatch.from_arrays([keys, values], schema=ENTRIES))

    def changes(self) -> pa.Table:
        """Return all changes, sorted by key; `ENTRIES`."""
        single = pa.table(
            [
                pa.array(self._changes.keys(), pa.binary()),
                pa.array(self._changes.values(), pa.binary()),
            ],
            schema=ENTRIES,
        )
        together = pa.concat_tables(
            [single, *(pa.table(c.columns, schema=ENTRIES) for c in self._columns)]
        )
        return together.take(pc.sort_indices(together, sort_keys=[("key", "ascending")]))
