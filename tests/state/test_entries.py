"""Whose an entry is, by the byte after its key group."""

import pyarrow as pa

from tallystick.state.entries import TIMERS_BY_KEY, TTL_INDEX, ids_of, living
from tallystick.state.overlay import ENTRIES


def entries(*ids: int) -> pa.RecordBatch:
    keys = [bytes([0, 7, ident]) + b"key" for ident in ids]
    return pa.RecordBatch.from_pydict({"key": keys, "value": [b"v"] * len(ids)}, schema=ENTRIES)


def test_entries_of_deleted_states_are_told_from_living_ones_and_from_indexes():
    living_entries = living(entries(1, 2, 3, TTL_INDEX, TIMERS_BY_KEY), [1, 3])

    assert ids_of(living_entries.column(0)).tolist() == [1, 3, TTL_INDEX, TIMERS_BY_KEY]


def test_a_part_of_a_batch_is_read_where_it_lies():
    assert ids_of(entries(1, 2, 3).slice(1).column(0)).tolist() == [2, 3]
