"""A binary column as plain arrays: the start and the length of each value.

Kernels work on spans, so they need to know nothing of Arrow's offset widths, slices and bitmaps.

Invariants: all arrays are int64 and contiguous (numba compiles one version of each kernel); every
span lies inside `data`; a length of -1 is null.

The way back is `text_array`, from bytes that may lie anywhere in memory, and `binary_array`, from
adjacent ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tallystick.codec.bytes_kernels import copy_spans
from tallystick.errors import RecordError

Int64Array = NDArray[np.int64]
Bytes = NDArray[np.uint8]


BINARY_BYTES_MAX = (1 << 31) - 1
"""The most that an Arrow binary array holds; a longer result is large_binary."""


@dataclass(frozen=True, slots=True)
class Spans:
    """The values of a binary column; `data` is read-only and shared with Arrow, not copied."""

    data: Bytes
    starts: Int64Array
    lengths: Int64Array

    @property
    def address(self) -> int:
        """The address of `data` in memory; valid as long as this object lives."""
        return int(self.data.ctypes.data)

    def runs(
        self, bytes_max: int, rows_max: int | None = None, overhead: int = 0
    ) -> Iterator[tuple[int, int]]:
        """Yield runs of rows, the first and the one after the last; a huge row stands alone.

        Args:
            bytes_max: how many bytes a run has at most.
            rows_max: how many rows a run has at most.
            overhead: bytes that each row takes besides its own.
        """
        ends = np.cumsum(np.maximum(self.lengths, 0) + overhead)
        first, done = 0, 0
        while first < len(ends):
            fits = int(np.searchsorted(ends, done + bytes_max, side="right"))
            last = min(max(fits, first + 1), first + (rows_max or len(ends)))
            yield first, last
            first, done = last, int(ends[last - 1])


def spans_of(column: pa.Array, name: str) -> Spans:
    """Return the spans of an Arrow array of any binary or string type, sliced or not.

    Args:
        column: binary, string, their large, view, fixed-size or dictionary-encoded forms, or null.
        name: the column's name in errors.

    Raises:
        RecordError: the type holds no bytes, or the array's offsets are damaged.
    """
    if pa.types.is_null(column.type):
        count = len(column)
        return Spans(_bytes_of(None), np.zeros(count, np.int64), np.full(count, -1, np.int64))
    column = _with_offsets(column, name)
    width = np.int64 if _is_large(column.type) else np.int32
    _, offset_buffer, data_buffer = column.buffers()
    data = _bytes_of(data_buffer)
    if offset_buffer is None or offset_buffer.size == 0:  # legal for an array of length 0
        return Spans(data, np.zeros(0, np.int64), np.zeros(0, np.int64))
    window = slice(column.offset, column.offset + len(column) + 1)
    offsets = np.frombuffer(offset_buffer, width)[window].astype(np.int64)
    lengths = np.diff(offsets)
    if offsets[0] < 0 or offsets[-1] > data.size or lengths.min(initial=0) < 0:
        raise RecordError(
            f"column {name}: the Arrow array is damaged, its offsets leave the data buffer of "
            f"{data.size} bytes. Check what made it with Array.validate(full=True)."
        )
    if column.null_count:
        lengths[column.is_null().to_numpy(zero_copy_only=False)] = -1
    return Spans(data, offsets[:-1], lengths)


def _bytes_of(buffer: pa.Buffer | None) -> Bytes:
    data = np.frombuffer(buffer if buffer is not None else b"", np.uint8)
    data.flags.writeable = False
    return data


def _is_large(kind: pa.DataType) -> bool:
    return bool(pa.types.is_large_binary(kind) or pa.types.is_large_string(kind))


def _with_offsets(column: pa.Array, name: str) -> pa.Array:
    """Return a column's values in one of the four types with an offsets buffer."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if pa.types.is_binary(kind) or pa.types.is_string(kind) or _is_large(kind):
        return column
    if pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind):
        return column.cast(pa.large_binary())
    if pa.types.is_string_view(kind):
        return column.cast(pa.large_string())
    raise RecordError(
        f"column {name} is {kind}, but Kafka takes bytes: cast it to binary or string first."
    )


def text_array(
    kind: pa.DataType, starts: Int64Array, lengths: NDArray[np.integer], valid: Bytes
) -> pa.Array:
    """Return a binary or string array with bytes from anywhere.

    Args:
        kind: binary or string.
        starts: the address of each value; the caller keeps that memory alive.
        lengths: bytes of each value; ignored for a null.
        valid: 0 for null.
    """
    offsets = offsets_of(lengths, valid)
    text = np.empty(int(offsets[-1]), np.uint8)
    copy_spans(starts, offsets, text.ctypes.data)
    buffers = [validity(valid), pa.py_buffer(offsets), pa.py_buffer(text)]
    return pa.Array.from_buffers(kind, len(valid), buffers)


def binary_array(data: pa.Buffer, offsets: NDArray[np.int64]) -> pa.Array:
    """Return adjacent values as a binary array; large_binary beyond 2 GiB.

    Args:
        data: the bytes of all values.
        offsets: where each value begins, and the end of the last.
    """
    is_large = offsets[-1] > BINARY_BYTES_MAX
    kind = pa.large_binary() if is_large else pa.binary()
    places = offsets if is_large else offsets.astype(np.int32)
    return pa.Array.from_buffers(kind, len(offsets) - 1, [None, pa.py_buffer(places), data])


def last_of_each_key(
    keys: pa.Array, items: pa.Array, counts: Int64Array
) -> tuple[pa.Array, pa.Array, Int64Array]:
    """Return the entries of maps, the last of each key in a map, and each map's number of entries.

    Args:
        keys: of all maps, one map after another; never null.
        items: the values of the keys.
        counts: how many entries each map has.
    """
    if counts.max(initial=0) < 2:
        return keys, items, counts
    codes = keys.dictionary_encode().indices.to_numpy(zero_copy_only=False).astype(np.int64)
    owners = np.repeat(np.arange(len(counts)), counts)
    pairs = owners * (int(codes.max()) + 1) + codes
    _, from_end = np.unique(pairs[::-1], return_index=True)
    if len(from_end) == len(pairs):
        return keys, items, counts
    kept = np.sort(len(pairs) - 1 - from_end)
    taken = pa.array(kept)
    kept_counts = np.bincount(owners[kept], minlength=len(counts)).astype(np.int64)
    return keys.take(taken), items.take(taken), kept_counts


def offsets_of(lengths: NDArray[np.integer], valid: Bytes) -> NDArray[np.int32]:
    """Return the start of each value; nulls are empty. Callers bound a batch's bytes by 2^31."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths if valid.all() else np.where(valid, lengths, 0), out=offsets[1:])
    assert offsets[-1] < 2**31, "too many bytes in one batch"
    return offsets.astype(np.int32)


def validity(valid: Bytes) -> pa.Buffer | None:
    """Return bytes of validity as Arrow has them; None: all are valid."""
    return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
