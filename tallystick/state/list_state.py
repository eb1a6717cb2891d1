"""List state: the elements of each task, and their division among another number of tasks.

Each element is an entry. The key is the number of the task and the place of the element in the
task's list; the key group is the number of the task too:

    task | state id | task, place         the columns of the element, as `ColumnsCodec`
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.state.changelog import groups_of
from tallystick.state.functions.processing import ELEMENTS, StateDeclaration
from tallystick.state.key_groups import MAX_PARALLELISM_MAX, KeyGroupRange
from tallystick.state.keys import KeyCodec, entry_keys
from tallystick.state.overlay import ENTRIES
from tallystick.state.row_codec import ColumnsCodec, changed_rows
from tallystick.state.schema import text_of

STATE_NAME = "elements"
STATE_ID = 1
"""The only state of a list."""
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
        return StateDeclaration(STATE_NAME, ELEMENTS, "", text_of(self.columns))

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
        (shares,) = repartitioned({STATE_NAME: sizes.tolist()}, parallelism).values()
    parts = [
        entries.column(1).slice(starts[share.task] + share.start, share.stop - share.start)
        for share in shares[task]
    ]
    return pa.concat_arrays([pa.array([], pa.binary()), *parts])


def changes_of(task: int, before: pa.BinaryArray, after: pa.BinaryArray) -> pa.RecordBatch:
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


def gone(entries: pa.RecordBatch, parallelism: int) -> pa.RecordBatch:
    """Return the entries that delete the lists of tasks beyond the parallelism.

    Args:
        entries: `ENTRIES` of all tasks.
        parallelism: how many tasks there are now.
    """
    keys = entries.column(0)
    keys = keys.filter(pc.greater_equal(pa.array(groups_of(keys)), parallelism))
    return pa.RecordBatch.from_arrays([keys, pa.nulls(len(keys), pa.binary())], schema=ENTRIES)
