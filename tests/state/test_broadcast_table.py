"""Broadcast tables as a dictionary would have them, and their index."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tallystick.checkpoint.state_files import newest_entries
from tallystick.errors import OptionError
from tallystick.state import operator_state
from tallystick.state.operator_state import KeyIndex, TableCodec, TableContent
from tallystick.state.overlay import one_batch

COLUMNS = pa.schema([("v", pa.int64()), ("a", pa.string()), ("b", pa.int32()), ("t", pa.string())])
CODEC = TableCodec(COLUMNS, ["a", "b"])
KEY = st.tuples(st.none() | st.sampled_from(["", "x", "yy"]), st.none() | st.integers(-2, 3))
CHANGE = st.tuples(KEY, st.none() | st.integers(0, 9), st.none() | st.text(max_size=2))
Row = tuple[tuple[str | None, int | None], int | None, str | None]


def changes(rows: list[tuple[Row, bool]]) -> pa.RecordBatch:
    batch = pa.RecordBatch.from_pylist(
        [{"v": v, "a": key[0], "b": key[1], "t": t} for (key, v, t), _ in rows], schema=COLUMNS
    )
    entries = CODEC.entries(batch, pa.array([gone for _, gone in rows], pa.bool_()))
    return one_batch(newest_entries([entries]), "changes", "")


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(CHANGE, st.booleans()), max_size=8), max_size=5))
def test_a_table_has_the_newest_row_of_each_key(epochs: list[list[tuple[Row, bool]]]) -> None:
    """Rows whose columns are all null are there too; nulls are keys."""
    content, expected = TableContent.empty(CODEC), dict[Any, Any]()
    for rows in epochs:
        content = content.changed(changes(rows))
        for (key, v, t), gone in rows:
            expected.pop(key, None)
            if not gone:
                expected[key] = (v, t)
    table_rows = content.rows.to_pylist()
    assert {(r["a"], r["b"]): (r["v"], r["t"]) for r in table_rows} == expected
    assert len(table_rows) == len(expected)
    assert content.rows.schema == COLUMNS

    at_once = TableContent.empty(CODEC).changed(changes([row for rows in epochs for row in rows]))
    assert at_once.rows.equals(content.rows), "in one order, whichever way it came about"
    assert at_once.entries.equals(content.entries)


@settings(deadline=None)
@given(st.sets(st.binary(max_size=3)), st.lists(st.binary(max_size=3)), st.booleans())
def test_the_index_finds_what_is_there(keys: set[bytes], wanted: list[bytes], same: bool) -> None:
    sorted_keys = sorted(keys)
    with pytest.MonkeyPatch.context() as patch:
        if same:  # hashes that are equal
            hashes = operator_state._hashes
            patch.setattr(operator_state, "_hashes", lambda keys: hashes(keys) % 3)
        index = KeyIndex(pa.array(sorted_keys, pa.binary()))
        places = index.find(pa.array(wanted, pa.binary())).tolist()
    assert places == [sorted_keys.index(key) if key in keys else -1 for key in wanted]


def test_what_cannot_be_a_table_is_refused() -> None:
    with pytest.raises(OptionError, match="key='c': there is no column 'c'"):
        TableCodec(COLUMNS, ["c"])
    with pytest.raises(OptionError, match="no columns beside the key"):
        TableCodec(pa.schema([("a", pa.string())]), ["a"])
    with pytest.raises(OptionError, match="column 's' is struct"):
        TableCodec(pa.schema([("a", pa.string()), ("s", pa.struct([("x", pa.int8())]))]), ["a"])
