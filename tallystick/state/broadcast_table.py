"""A broadcast table: rows by key, the same in every task.

Each row is an entry of the only key group; the value holds the columns beside the key:

    key group 0 | state id | key         the other columns, as `ColumnsCodec`

Invariant: a content depends on the entries alone, not on the way it came about: its rows stand in
the order of their entries' keys, whether they were read at once or change by change.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tallystick.codec.spans import spans_of
from tallystick.errors import OptionError
from tallystick.state import key_kernels
from tallystick.state.functions.processing import TABLE, StateDeclaration
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.keys import KeyCodec, bodies, entry_keys
from tallystick.state.overlay import ENTRIES
from tallystick.state.row_codec import ColumnsCodec, changed_rows
from tallystick.state.schema import text_of

STATE_NAME = "row"
STATE_ID = 1
"""The only state of a table."""
WHOLE = KeyGroupRange(0, 0)
"""All key groups of a table."""

Int64Array = NDArray[np.int64]


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
                raise OptionError(f"key column {name!r}: the rows have {columns.names}")
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
        return StateDeclaration(STATE_NAME, TABLE, "", text_of(self._values.schema))

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
