"""Rows in state, several per key, for functions that look rows up by key and time.

A key has one entry, its *head*, with its newest rows and the list of its *chunks*; each chunk is an
entry of its own, with the rows of a span of time:

    key group | state id | key            times, matched, rows | first, last, due, … of each chunk
    key group | state id | key | number   times, matched, rows

So a key with few rows costs one entry, and one with very many is read and written in parts: once
the head has `OPEN_ROWS` or `OPEN_BYTES` of rows, they become chunks, by time. A row itself is the
bytes of `ColumnsCodec`.

Invariants: the rows of a head, and the rows of a chunk, stand in the order of their times, rows of
equal times as they arrived. The number of a chunk is above the numbers of all earlier chunks of its
key that still exist, and an epoch writes each entry once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.codec.spans import Int64Array
from tallystick.state.entries import ID_AT
from tallystick.state.functions.inputs import TIME
from tallystick.state.functions.join_columns import (
    NEVER,
    BoolArray,
    Rows,
    greatest,
    least,
    order_of,
)
from tallystick.state.functions.processing import ROWS, StateDeclaration
from tallystick.state.keys import bodies
from tallystick.state.meaning import Meaning
from tallystick.state.numpy_columns import explode, lists_of
from tallystick.state.overlay import EmptyView, Overlay
from tallystick.state.row_codec import ColumnsCodec, changed_rows
from tallystick.state.schema import text_of

OPEN_ROWS = 64
OPEN_BYTES = 4096
"""The rows of a head at most: more become chunks."""
CHUNK_ROWS = 1024
CHUNK_BYTES = 64 << 10
"""The size of a chunk, about: the row that passes the limit still belongs to the chunk."""
LOAD_BYTES = 8 << 20
"""The chunks that are in memory at a time."""


_ROWS = [
    pa.field("times", pa.list_(pa.int64())),
    pa.field("matched", pa.list_(pa.bool_())),
    pa.field("rows", pa.list_(pa.binary())),
]
_CHUNKS = ("numbers", "firsts", "lasts", "dues", "sizes")
_HEAD = ColumnsCodec(
    pa.schema(
        [
            *_ROWS,
            *(pa.field(name, pa.list_(pa.int64())) for name in _CHUNKS),
            pa.field("due", pa.int64()),
        ]
    )
)
_CHUNK = ColumnsCodec(pa.schema(_ROWS))


@dataclass(frozen=True)
class Chunks:
    """The list of chunks, sorted by key and number.

    Args:
        codes: the number of each chunk's key.
        numbers: the number of each chunk within the key.
        firsts, lasts: the times of each chunk's first and last row.
        dues: when something is to be done about each chunk.
        sizes: in bytes, about.
    """

    codes: Int64Array
    numbers: Int64Array
    firsts: Int64Array
    lasts: Int64Array
    dues: Int64Array
    sizes: Int64Array

    def take(self, which: Int64Array | BoolArray) -> "Chunks":
        """Return some of the chunks."""
        return Chunks(*(column[which] for column in self._columns))

    @classmethod
    def of_all(cls, lists: Sequence["Chunks"]) -> "Chunks":
        """Merge several lists of chunks, sorted by key and number."""
        columns = zip(*(chunks._columns for chunks in lists), strict=True)
        merged = cls(*(np.concatenate(column) for column in columns))
        return merged.take(order_of(merged.codes, merged.numbers))

    def parts(self) -> Iterator["Chunks"]:
        """Yield the chunks in runs that fit into memory together."""
        ends = np.cumsum(self.sizes)
        first = 0
        while first < len(ends):
            done = int(ends[first - 1]) if first else 0
            stop = max(first + 1, int(np.searchsorted(ends, done + LOAD_BYTES, "right")))
            yield self.take(np.arange(first, stop))
            first = stop

    @property
    def _columns(self) -> tuple[Int64Array, ...]:
        return self.codes, self.numbers, self.firsts, self.lasts, self.dues, self.sizes


@dataclass(frozen=True)
class Head:
    """The committed heads of some keys.

    Args:
        entries: their keys in the state.
        before: the committed values.
        rows: in the heads.
        chunks: of the keys.
        due: when something is to be done about each key, or `NEVER`.
    """

    entries: pa.BinaryArray
    before: pa.BinaryArray
    rows: Rows
    chunks: Chunks
    due: Int64Array


class RowState:
    """The rows of one side.

    Args:
        name: of the state.
        owner: the function and its use of the rows: for another owner the state is refused.
        what: the name of the rows, for messages.
        columns: of a row.
        meaning: of the state.

    Raises:
        OptionError: a column cannot be stored.
    """

    def __init__(
        self, name: str, owner: str, what: str, columns: pa.Schema, meaning: Meaning = ()
    ) -> None:
        self.name, self._owner, self._columns, self._meaning = name, owner, columns, meaning
        self._codec = ColumnsCodec(columns, what) if len(columns) else None

    @cached_property
    def declaration(self) -> StateDeclaration:
        """The declaration of the state by the step."""
        columns = text_of(self._columns)
        return StateDeclaration(self.name, ROWS, self._owner, columns, meaning=self._meaning)

    def new_rows(self, codes: Int64Array, times: Int64Array, columns: Sequence[pa.Array]) -> Rows:
        """Encode new rows, and sort them by key and time."""
        data = pa.nulls(len(codes), pa.binary())
        if self._codec is not None:
            batch = pa.RecordBatch.from_arrays(list(columns), schema=self._codec.schema)
            data = self._codec.encode(batch)
        unmatched = np.zeros(len(codes), np.bool_)
        return Rows(codes, times, unmatched, data, tuple(columns)).ordered()

    def load(self, overlay: Overlay, entries: pa.BinaryArray) -> Head:
        """Read the heads of keys from sorted entries."""
        before = overlay.get_many(entries)
        decoded = _HEAD.decode(before)
        codes, lists = explode(decoded.columns[: len(_ROWS)])
        owners, lines = explode(decoded.columns[len(_ROWS) : -1])
        due = decoded.columns[-1].fill_null(NEVER).to_numpy()
        chunks = Chunks(owners, *(line.to_numpy() for line in lines))
        return Head(entries, before, self._rows(codes, lists), chunks, due)

    def load_chunks(self, overlay: Overlay, head: Head, chunks: Chunks) -> "LoadedChunks":
        """Read chunks of the keys in `head`, with their rows."""
        entries = _chunk_keys(head.entries, chunks.codes, chunks.numbers)
        before = overlay.get_many(entries)
        lines, lists = explode(_CHUNK.decode(before).columns)
        rows = self._rows(chunks.codes[lines], lists)
        order = order_of(rows.codes, rows.times)
        return LoadedChunks(chunks, before, rows.take(order), lines[order])

    def write_chunks(
        self,
        overlay: Overlay,
        head: Head,
        places: tuple[Int64Array, Int64Array],
        rows: Rows,
        dues: Int64Array,
        before: pa.BinaryArray | None = None,
    ) -> Chunks:
        """Write the chunks with rows, and return them; delete the empty chunks.

        Args:
            overlay: of the epoch.
            head: of the keys.
            places: the number of each chunk's key, and the chunk's own number; sorted.
            rows: of all chunks, sorted by code; a code is a chunk's position in `places`.
            dues: of each chunk.
            before: the committed values; None: the chunks are new.
        """
        codes, numbers = places
        count = len(codes)
        values = _CHUNK.encode(_lists_of(rows, count, _CHUNK.schema))
        _put_changed(
            overlay,
            _chunk_keys(head.entries, codes, numbers),
            pa.nulls(count, pa.binary()) if before is None else before,
            values,
        )
        chunks = Chunks(
            codes,
            numbers,
            least(rows.times, rows.codes, count, NEVER),
            greatest(rows.times, rows.codes, count, -NEVER),
            dues,
            np.bincount(rows.codes, rows.sizes, count).astype(np.int64),
        )
        return chunks.take(np.bincount(rows.codes, minlength=count) > 0)

    def move_to_chunks(
        self,
        overlay: Overlay,
        head: Head,
        chunks: Chunks,
        rows: Rows,
        dues: Callable[[Rows, int], Int64Array],
    ) -> tuple[Rows, Chunks]:
        """Move the rows of keys with too many rows for a head to new chunks.

        Args:
            overlay: of the epoch.
            head: of the keys.
            chunks: of the keys so far.
            rows: for the heads, by key and time.
            dues: the due times of so many chunks, from their rows.

        Returns:
            The rows that are left, and all chunks.
        """
        before = head.chunks
        following = greatest(before.numbers, before.codes, len(head.entries), -1) + 1
        leaving, moved, places = _to_be_chunks(rows, following)
        if not len(moved):
            return rows, chunks
        due = dues(moved, len(places[0]))
        new = self.write_chunks(overlay, head, places, moved, due)
        return rows.filter(~leaving), Chunks.of_all([chunks, new])

    def write_heads(
        self, overlay: Overlay, head: Head, rows: Rows, chunks: Chunks, due: Int64Array
    ) -> None:
        """Write the changed heads of keys.

        Args:
            overlay: of the epoch.
            head: the committed heads.
            rows: of the heads now, by key and time.
            chunks: of the keys.
            due: of each key.
        """
        count = len(head.entries)
        counts = np.bincount(chunks.codes, minlength=count)
        lines = [lists_of(counts, pa.array(getattr(chunks, name))) for name in _CHUNKS]
        whole = _lists_of(rows, count, pa.schema(_ROWS))
        arrays = [*whole.columns, *lines, pa.array(due, mask=due == NEVER)]
        values = _HEAD.encode(pa.RecordBatch.from_arrays(arrays, schema=_HEAD.schema))
        _put_changed(overlay, head.entries, head.before, values)

    def _rows(self, codes: Int64Array, lists: Sequence[pa.Array]) -> Rows:
        times, matched, data = lists
        columns = () if self._codec is None else tuple(self._codec.decode(data).columns)
        flags = matched.to_numpy(zero_copy_only=False)
        return Rows(codes, times.to_numpy(), np.array(flags, np.bool_), data, columns)


@dataclass(frozen=True)
class LoadedChunks:
    """Chunks with their rows.

    Args:
        chunks: the list of the loaded chunks.
        before: the committed values.
        rows: of all, by key and time.
        lines: the chunk of each row, as a number into `chunks`.
    """

    chunks: Chunks
    before: pa.BinaryArray
    rows: Rows
    lines: Int64Array

    def by_line(self, kept: BoolArray, which: BoolArray) -> Rows:
        """Return rows to keep, by chunk.

        Args:
            kept: for each row, whether it stays.
            which: for each chunk, whether it is written again; codes number the chunks written.
        """
        numbers = np.cumsum(which) - 1
        at = np.flatnonzero(kept & which[self.lines])
        return replace(self.rows.take(at), codes=numbers[self.lines[at]]).ordered()


def _to_be_chunks(
    rows: Rows, next_numbers: Int64Array
) -> tuple[BoolArray, Rows, tuple[Int64Array, Int64Array]]:
    """Cut the rows of heads that are too large into new chunks.

    Args:
        rows: of the heads, by key and time.
        next_numbers: the number of each key's next chunk.

    Returns:
        A mask of the rows; the rows with the numbers of their chunks as codes; the key and number
        of each chunk.
    """
    key_count = len(next_numbers)
    sizes = rows.sizes
    is_large = np.bincount(rows.codes, sizes, key_count) > OPEN_BYTES
    is_large |= np.bincount(rows.codes, minlength=key_count) > OPEN_ROWS
    leaving = is_large[rows.codes]
    leaving_rows = rows.take(np.flatnonzero(leaving))
    costs = np.maximum(sizes[leaving], CHUNK_BYTES // CHUNK_ROWS)
    before = np.cumsum(costs) - costs
    is_first = np.diff(leaving_rows.codes, prepend=-1) > 0
    starts = np.maximum.accumulate(np.where(is_first, before, 0))
    parts = (before - starts) // CHUNK_BYTES
    is_new = is_first | (np.diff(parts, prepend=-1) != 0)
    numbers = next_numbers[leaving_rows.codes] + parts
    places = leaving_rows.codes[is_new], numbers[is_new]
    return leaving, replace(leaving_rows, codes=np.cumsum(is_new) - 1), places


def stored_fields(columns: pa.Schema) -> pa.StructType:
    """Return the type of a row in `stored_rows`.

    The row's time, whether it has had a partner, when something is to be done about its key's rows
    of this side, and its columns.
    """
    own = [(TIME, pa.int64()), ("$matched", pa.bool_()), ("$due", pa.int64())]
    return pa.struct([*(pa.field(*field) for field in own), *columns])


def stored_rows(
    columns: pa.Schema, values: pa.BinaryArray, are_chunks: BoolArray, codes: Int64Array
) -> tuple[Int64Array, pa.StructArray]:
    """Decode all rows of a state as columns; return the number of each row's key, and the rows.

    Rows are in the order of their keys' numbers, those of equal times as they arrived.

    Args:
        columns: of a row.
        values: of entries in the order of their keys, heads and chunks.
        are_chunks: which are chunks.
        codes: the number of each entry's key.

    Raises:
        ManifestError: the bytes are not of these columns.
    """
    state = RowState("rows", "", "rows", columns)
    heads = values.filter(pa.array(~are_chunks))
    due = np.full(int(codes.max(initial=-1)) + 1, NEVER)
    due[codes[~are_chunks]] = _HEAD.decode(heads).columns[-1].fill_null(NEVER).to_numpy()
    owners, parts = [], []
    for codec, which in ((_CHUNK, are_chunks), (_HEAD, ~are_chunks)):  # as they arrived
        decoded = codec.decode(values.filter(pa.array(which)))
        lines, lists = explode(decoded.columns[: len(_ROWS)])
        rows = state._rows(codes[which][lines], lists)
        arrays = [pa.array(rows.times), pa.array(rows.matched), pa.array(due[rows.codes])]
        fields = list(stored_fields(columns))
        parts.append(pa.StructArray.from_arrays([*arrays, *rows.columns], fields=fields))
        owners.append(rows.codes)
    numbers = np.concatenate(owners)
    order = np.argsort(numbers, kind="stable")
    return numbers[order], pa.concat_arrays(parts).take(pa.array(order))


def rows_to_store(
    columns: pa.Schema, entries: pa.BinaryArray, codes: Int64Array, stored: pa.StructArray
) -> tuple[pa.Table, Int64Array]:
    """Return the entries of some keys' rows, and when each key is due: `stored_rows` back again.

    A row that does not say when it is due is due at once: whoever visits the key finds out.

    Args:
        columns: of a row.
        entries: of the keys.
        codes: the number of each row's key.
        stored: the rows, those of equal times in the order of arrival.
    """
    state, overlay = RowState("rows", "", "rows", columns), Overlay(EmptyView())
    times, matched, due, *values = stored.flatten()
    order = order_of(codes, times.to_numpy())
    values = [column.take(pa.array(order)) for column in values]
    rows = state.new_rows(codes[order], times.to_numpy()[order], values)
    flags = matched.fill_null(False).to_numpy(zero_copy_only=False)
    # The columns are in `data` already: the place is free for what is to follow each row.
    rows = replace(
        rows, matched=flags[order], columns=(due.fill_null(-NEVER).take(pa.array(order)),)
    )

    def dues(some: Rows, count: int) -> Int64Array:
        return least(some.columns[0].to_numpy(), some.codes, count, NEVER)

    head, count = state.load(overlay, entries), len(entries)
    in_heads, chunks = state.move_to_chunks(overlay, head, head.chunks, rows, dues)
    of_chunks = least(chunks.dues, chunks.codes, count, NEVER)
    of_keys = np.minimum(dues(in_heads, count), of_chunks)
    state.write_heads(overlay, head, in_heads, chunks, of_keys)
    return overlay.changes(), of_keys


def with_rows(
    values: pa.BinaryArray, are_heads: BoolArray, convert: Callable[[pa.BinaryArray], pa.Array]
) -> pa.BinaryArray:
    """Return entries of a state with each of their rows converted.

    Args:
        values: of entries, heads and chunks.
        are_heads: which are heads.
        convert: from the bytes of rows to their new bytes.
    """
    parts, places = [], []
    at = len(_ROWS) - 1
    for codec, which in ((_HEAD, are_heads), (_CHUNK, ~are_heads)):
        decoded = codec.decode(values.filter(pa.array(which)))
        lists = decoded.column(at)
        lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        new = lists_of(lengths.astype(np.int64), convert(lists.flatten()))
        arrays = [*decoded.columns[:at], new, *decoded.columns[at + 1 :]]
        parts.append(codec.encode(pa.RecordBatch.from_arrays(arrays, schema=codec.schema)))
        places.append(np.flatnonzero(which))
    order = np.argsort(np.concatenate(places), kind="stable")
    return pa.concat_arrays(parts).take(pa.array(order))


def due_of(ends: Int64Array, codes: Int64Array, pending: BoolArray, count: int) -> Int64Array:
    """Return when something is to be done about the rows of each code; `NEVER` without rows.

    The time is the end of the first pending row, else of the last row, when all can go.

    Args:
        ends: the moment after which no partner of a row can come.
        codes: of the rows.
        pending: whether the row comes out at its end.
        count: how many codes there are.
    """
    last = greatest(ends, codes, count, -NEVER)
    first = least(ends[pending], codes[pending], count, NEVER)
    return np.where(first < NEVER, first, np.where(last > -NEVER, last, NEVER))


def of_state(entries: pa.BinaryArray, state_id: int) -> pa.BinaryArray:
    """Return the entries of another state under the same keys."""
    groups = pc.binary_slice(entries, 0, ID_AT)
    return pc.binary_join_element_wise(groups, bytes([state_id]), bodies(entries), b"")


def _chunk_keys(entries: pa.BinaryArray, codes: Int64Array, numbers: Int64Array) -> pa.BinaryArray:
    """Return the entries of chunks: the entry of the key, followed by the chunk's number."""
    words = numbers.astype(">u8")
    width = words.dtype.itemsize
    tails = pa.Array.from_buffers(pa.binary(width), len(words), [None, pa.py_buffer(words)])
    owners = entries.take(pa.array(codes))
    return pc.binary_join_element_wise(owners, tails.cast(pa.binary()), b"")


def _lists_of(rows: Rows, count: int, schema: pa.Schema) -> pa.RecordBatch:
    counts = np.bincount(rows.codes, minlength=count)
    columns = (pa.array(rows.times), pa.array(rows.matched), rows.data)
    arrays = [lists_of(counts, column) for column in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _put_changed(
    overlay: Overlay, keys: pa.BinaryArray, before: pa.BinaryArray, after: pa.BinaryArray
) -> None:
    changed = pa.array(changed_rows(before, after))
    overlay.put_many(keys.filter(changed), after.filter(changed))
