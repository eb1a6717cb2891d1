"""State of a task without keys: broadcast tables, and lists of elements.

A broadcast table has rows by key, the same in every task. Each row is an entry of the only key
group; the value holds the columns beside the key:

    key group 0 | state id | key         the other columns, as `ColumnsCodec`

Invariant: a content depends on the entries alone, not on the way it came about: its rows stand in
the order of their entries' keys, whether they were read at once or change by change.

A list has the elements of each task, divided among the tasks of another parallelism. Each element
is an entry. The key is the number of the task and the place of the element in the task's list; the
key group is the number of the task too:

    task | state id | task, place         the columns of the element, as `ColumnsCodec`
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tallystick.arguments import missing_column
from tallystick.codec.spans import Int64Array, spans_of
from tallystick.errors import OptionError
from tallystick.state import key_kernels
from tallystick.state.changelog import groups_of
from tallystick.state.functions.processing import ELEMENTS, TABLE, StateDeclaration
from tallystick.state.key_groups import MAX_PARALLELISM_MAX, KeyGroupRange
from tallystick.state.keys import KeyCodec, bodies, entry_keys
from tallystick.state.overlay import ENTRIES
from tallystick.state.row_codec import ColumnsCodec, changed_rows
from tallystick.state.schema import text_of

_TABLE_STATE, _LIST_STATE = "row", "elements"
"""The name of the only state of a table, and of a list."""
STATE_ID = 1
WHOLE = KeyGroupRange(0, 0)
"""All key groups of a table."""


class TableCodec:
    """Rows of a table as entries.

    Args:
        columns: of the table.
        key: the names of the key columns.

    Raises:
        OptionError: a key column is not there exactly once, a type cannot be stored, or there is no
            column beside the key.
    """

    def __init__(self, columns: pa.Schema, key: Sequence[str]) -> None:
        for name in key:
            if columns.names.count(name) != 1:
                raise missing_column(f"key={name!r}", name, columns.names)
        self.columns = columns
        self.key = KeyCodec(pa.schema([columns.field(name) for name in key]))
        others = [column for column in columns if column.name not in key]
        if not others:
            raise OptionError(
                f"there are no columns beside the key {list(key)}: add one, such as Kafka's "
                f"timestamp, in ts.stream(source).map_batches(…, schema=…)"
            )
        self._values = ColumnsCodec(pa.schema(others), "the table")

    @property
    def declaration(self) -> StateDeclaration:
        """The declaration of the table's state."""
        return StateDeclaration(_TABLE_STATE, TABLE, "", text_of(self._values.schema))

    def entries(self, rows: pa.RecordBatch, deleted: pa.Array) -> pa.RecordBatch:
        """Encode rows and deletions as entries of the table (`ENTRIES`), in the order of the rows.

        Args:
            rows: with the table's columns.
            deleted: true where a row deletes the row of its key instead of replacing it.
        """
        groups = np.zeros(rows.num_rows, np.int32)
        keys = entry_keys(groups, STATE_ID, self.key.encode(rows))
        others = rows.select(self._values.schema.names)
        values = self._values.encode(others).fill_null(self._values.all_null)
        values = pc.if_else(deleted, pa.scalar(None, pa.binary()), values)
        return pa.RecordBatch.from_arrays([keys, values], schema=ENTRIES)

    def rows(self, entries: pa.RecordBatch) -> pa.Table:
        """Decode rows from entries without deletions."""
        keys, values = self.key.decode(bodies(entries.column(0))), self._values
        by_name = dict(zip(keys.schema.names, keys.columns, strict=True))
        others = values.decode(entries.column(1))
        by_name |= dict(zip(others.schema.names, others.columns, strict=True))
        return pa.table([by_name[name] for name in self.columns.names], schema=self.columns)


@dataclass(frozen=True, eq=False)
class TableContent:
    """A table at one version.

    Args:
        codec: of the rows.
        entries: the keys of the rows' entries, sorted.
        rows: in the order of `entries`.
    """

    codec: TableCodec
    entries: pa.BinaryArray
    rows: pa.Table

    @classmethod
    def empty(cls, codec: TableCodec) -> "TableContent":
        """Return a table without rows."""
        return cls(codec, pa.array([], pa.binary()), codec.columns.empty_table())

    def changed(self, changes: pa.RecordBatch) -> "TableContent":
        """Return the table after changes.

        Args:
            changes: `ENTRIES`, sorted by key, each key once.
        """
        is_set = pc.is_valid(changes.column(1)).to_numpy(zero_copy_only=False)
        places = pc.index_in(changes.column(0), value_set=self.entries).fill_null(-1).to_numpy()
        is_known = places >= 0
        count = len(self.entries)
        new = count + np.cumsum(is_set) - 1  # where the row of a change stands behind all others
        order = np.arange(count)
        order[places[is_known & is_set]] = new[is_known & is_set]
        kept = np.ones(count, np.bool_)
        kept[places[is_known & ~is_set]] = False
        is_added = ~is_known & is_set
        order = np.concatenate([order[kept], new[is_added]])
        put = changes.filter(pa.array(is_set))
        entries = pa.concat_arrays([self.entries, put.column(0)]).take(pa.array(order))
        if is_added.any():
            ranks = pc.sort_indices(entries)
            entries, order = entries.take(ranks), order[ranks.to_numpy()]
        rows = pa.concat_tables([self.rows, self.codec.rows(put)])
        return TableContent(self.codec, entries, rows.take(pa.array(order)).combine_chunks())

    @cached_property
    def index(self) -> "KeyIndex":
        """An index of the keys, made once for each version."""
        return KeyIndex(bodies(self.entries))


class KeyIndex:
    """A hash index of keys, which is searched batch by batch.

    Args:
        keys: distinct, none is null.
    """

    def __init__(self, keys: pa.BinaryArray) -> None:
        self._keys = keys
        hashes = _hashes(keys)
        self._order = np.argsort(hashes)
        self._hashes = hashes[self._order]
        self._is_plain = bool((self._hashes[1:] != self._hashes[:-1]).all())

    def find(self, wanted: pa.BinaryArray) -> Int64Array:
        """Return the position of each wanted key among the indexed keys, or -1."""
        if not len(self._keys):
            return np.full(len(wanted), -1, np.int64)
        if not self._is_plain:  # two keys of one hash: Arrow makes an index for each batch
            indices = pc.index_in(wanted, value_set=self._keys).fill_null(-1)
            places: Int64Array = indices.to_numpy().astype(np.int64)
            return places
        hashes = _hashes(wanted)
        at = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        likely = self._order[at]
        is_there = self._hashes[at] == hashes
        is_there &= ~changed_rows(wanted, self._keys.take(pa.array(likely)))
        found_at: Int64Array = np.where(is_there, likely, -1)
        return found_at


def _hashes(keys: pa.BinaryArray) -> NDArray[np.uint64]:
    spans = spans_of(keys, "key")
    codes = np.empty(len(keys), np.uint64)
    key_kernels.hash_long(spans.data, spans.starts, spans.lengths, codes)
    return codes


# ---- lists ---------------------------------------------------------------------------------------

ALL_TASKS = KeyGroupRange(0, MAX_PARALLELISM_MAX - 1)
PLACE = KeyCodec(pa.schema([pa.field("task", pa.int32()), pa.field("place", pa.int64())]))


class Share(NamedTuple):
    """A part of one task's list: the elements `start <= place < stop`."""

    task: int
    start: int
    stop: int


def repartitioned(
    sizes: Mapping[str, Sequence[int]], parallelism: int
) -> dict[str, list[list[Share]]]:
    """Divide the lists of an operator evenly among its new tasks.

    The elements of a state, in the order of the old tasks, are dealt out in runs of equal length,
    the first ones longer by one element. The first run goes to the task after the last longer run
    of the state before. Nothing moves where the number of tasks stays.

    Source: Flink's RoundRobinOperatorStateRepartitioner (SPLIT_DISTRIBUTE), with its order of
    states, that of a Java HashMap.

    Args:
        sizes: of the list of each old task, by the name of the state.
        parallelism: how many new tasks there are.

    Returns:
        The shares of each new task, by the name of the state.
    """
    by_name, start = {}, 0
    for name in sorted(sizes, key=_place_in_hash_map):
        old = sizes[name]
        if len(old) == parallelism:
            by_name[name] = [
                [Share(task, 0, size)] if size else [] for task, size in enumerate(old)
            ]
            continue
        least, more = divmod(sum(old), parallelism)
        ends = np.concatenate([[0], np.cumsum(old)]).tolist()
        shares: list[list[Share]] = [[] for _ in range(parallelism)]
        at = 0
        for number in range(parallelism):
            stop = at + least + (number < more)
            shares[(start + number) % parallelism] = _shares(ends, at, stop)
            at = stop
        by_name[name] = shares
        start = (start + more) % parallelism
    return by_name


def in_union(sizes: Sequence[int], parallelism: int) -> list[list[Share]]:
    """Give the lists of all old tasks to each new one.

    Source: Flink's RoundRobinOperatorStateRepartitioner (UNION).

    Args:
        sizes: of the list of each old task.
        parallelism: how many new tasks there are.
    """
    everything = [Share(task, 0, size) for task, size in enumerate(sizes) if size]
    return [everything] * parallelism


def _shares(ends: Sequence[int], start: int, stop: int) -> list[Share]:
    """Return the elements from `start` to `stop` of all lists, as shares of the old tasks."""
    return [
        Share(task, max(start, first) - first, min(stop, end) - first)
        for task, (first, end) in enumerate(pairwise(ends))
        if max(start, first) < min(stop, end)
    ]


def _place_in_hash_map(name: str) -> int:
    """Return the bucket of a text in a Java HashMap of the smallest size."""
    code = 0
    units = name.encode("utf-16-be")
    for at in range(0, len(units), 2):
        code = (code * 31 + int.from_bytes(units[at : at + 2], "big")) & 0xFFFFFFFF
    return (code ^ (code >> 16)) & 15


class ListCodec:
    """The storage format of list elements.

    Args:
        columns: of an element.

    Raises:
        OptionError: a column cannot be stored, or there is none.
    """

    def __init__(self, columns: pa.Schema) -> None:
        self._codec = ColumnsCodec(columns, "list state")
        self.columns = self._codec.schema

    @property
    def declaration(self) -> StateDeclaration:
        """The declaration of the list's state."""
        return StateDeclaration(_LIST_STATE, ELEMENTS, "", text_of(self.columns))

    def encode(self, elements: pa.RecordBatch) -> pa.BinaryArray:
        """Encode each element as the value of an entry."""
        return self._codec.encode(elements).fill_null(self._codec.all_null)

    def decode(self, values: pa.BinaryArray) -> pa.RecordBatch:
        """Decode elements from the values of `encode`."""
        return self._codec.decode(values)


def shared_values(
    entries: pa.RecordBatch, task: int, before: int, parallelism: int, *, is_union: bool = False
) -> pa.BinaryArray:
    """Return the values of the elements that a new task takes over from the old tasks.

    Args:
        entries: `ENTRIES` of all old tasks, sorted by key, none deleted.
        task: the number of the new task.
        before: how many old tasks there were.
        parallelism: how many new tasks there are.
        is_union: each task gets all elements.
    """
    sizes = np.bincount(groups_of(entries.column(0)), minlength=before)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    if is_union:
        shares = in_union(sizes.tolist(), parallelism)
    else:
        (shares,) = repartitioned({_LIST_STATE: sizes.tolist()}, parallelism).values()
    parts = [
        entries.column(1).slice(starts[share.task] + share.start, share.stop - share.start)
        for share in shares[task]
    ]
    return pa.concat_arrays([pa.array([], pa.binary()), *parts])


def list_changes(task: int, before: pa.BinaryArray, after: pa.BinaryArray) -> pa.RecordBatch:
    """Return the entries that change a task's list; `ENTRIES`, sorted by key.

    Args:
        task: the number of the task.
        before: the committed values of the list.
        after: the values to be.
    """
    both = min(len(before), len(after))
    changed = np.flatnonzero(changed_rows(before.slice(0, both), after.slice(0, both)))
    places = np.concatenate([changed, np.arange(both, max(len(before), len(after)))])
    at = pa.array(np.where(places < len(after), places, -1), mask=places >= len(after))
    tasks = np.full(len(places), task, np.int32)
    rows = pa.record_batch([tasks, places.astype(np.int64)], schema=PLACE.schema)
    keys = entry_keys(tasks, STATE_ID, PLACE.encode(rows))
    return pa.RecordBatch.from_arrays([keys, after.take(at)], schema=ENTRIES)


def deletions_beyond(entries: pa.RecordBatch, parallelism: int) -> pa.RecordBatch:
    """Return the entries that delete the lists of tasks beyond the parallelism.

    Args:
        entries: `ENTRIES` of all tasks.
        parallelism: how many tasks there are now.
    """
    keys = entries.column(0)
    keys = keys.filter(pc.greater_equal(pa.array(groups_of(keys)), parallelism))
    return pa.RecordBatch.from_arrays([keys, pa.nulls(len(keys), pa.binary())], schema=ENTRIES)
