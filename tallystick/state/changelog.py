"""The bytes of a state file: entries sorted by key, in segments that end where a key group ends.

    Arrow IPC stream: schema | segment … | end || index: a line per segment | its size | "TSSTATE1"

A segment is one record batch (`ENTRIES`, buffers compressed by lz4): any Arrow library reads all
segments from front to back. The index has each segment's key groups, place and CRC-32; the manifest
has the CRC-32 of index and trailer, so a file proves itself whole from there. Key groups lie in
order: a range of key groups is one contiguous slice of the file. A key group too big for one
segment has several.
"""

import bisect
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.errors import UNREADABLE
from tallystick.state.catalog import StateFile
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.overlay import ENTRIES

MAGIC = b"TSSTATE1"
SEGMENT_ROWS = 2048
"""A segment ends with the first key group that ends after this many rows."""
COMPRESSED_BYTES_MIN = 4096
"""Smaller files are not compressed: decompressing wakes up Arrow's threads, which takes longer."""
SEGMENT_ROWS_MAX = 16 * SEGMENT_ROWS
KEY_BYTES_MIN = 3
"""Each key begins with its key group and the number of its state, see `entries`."""
SEGMENT_BYTES = 1 << 20
"""The same for bytes before compression: values may be long."""

_SCHEMA_SIZE = len(ENTRIES.serialize())
_TRAILER = struct.Struct(f"<I{len(MAGIC)}s")
_LINE = np.dtype(
    [
        ("first", "<u2"),
        ("last", "<u2"),
        ("rows", "<u4"),
        ("offset", "<u8"),
        ("length", "<u8"),
        ("checksum", "<u4"),
    ]
)


class DamagedError(ValueError):
    """Damaged bytes of a state file; the caller adds the file's name."""


class Segment(NamedTuple):
    """A line of the index: a segment's key groups, row count, place in the file and CRC-32."""

    first: int
    last: int
    rows: int
    offset: int
    length: int
    checksum: int


class EncodedFile(NamedTuple):
    """The bytes of a state file, and the facts about them for the manifest."""

    data: bytes
    index_size: int
    checksum: int
    rows: int
    first: int
    last: int


def encode(table: pa.Table, groups: KeyGroupRange | None = None) -> EncodedFile:
    """Encode entries as a state file.

    Args:
        table: `ENTRIES`, sorted by key.
        groups: the key groups that the file covers; None: from the first entry's to the last one's.
    """
    assert groups is not None or table.num_rows, "a file that says nothing"
    segments = []
    sink = pa.BufferOutputStream()
    codec = "lz4" if table.nbytes >= COMPRESSED_BYTES_MIN else None
    options = pa.ipc.IpcWriteOptions(compression=codec, use_threads=False)
    with pa.ipc.new_stream(sink, ENTRIES, options=options) as stream:
        for batch in table.combine_chunks().to_batches():
            row_groups = groups_of(batch.column(0))
            assert (row_groups[1:] >= row_groups[:-1]).all(), "entries are not sorted by key"
            for start, stop in _cuts(row_groups, batch):
                ends = int(row_groups[start]), int(row_groups[stop - 1])
                offset = max(sink.tell(), _SCHEMA_SIZE)  # it goes out with the first batch
                stream.write_batch(batch.slice(start, stop - start))
                segments.append((*ends, stop - start, offset, sink.tell() - offset, 0))
    data = sink.getvalue()
    lines = np.array(segments, _LINE)
    lines["checksum"] = [zlib.crc32(data[at : at + size]) for *_, at, size, _ in segments]
    index = lines.tobytes()
    tail = index + _TRAILER.pack(len(index) + _TRAILER.size, MAGIC)
    return EncodedFile(
        data=b"".join([data, tail]),
        index_size=len(tail),
        checksum=zlib.crc32(tail),
        rows=table.num_rows,
        first=groups.first if groups else segments[0][0],
        last=groups.last if groups else segments[-1][1],
    )


def parse_index(tail: bytes, checksum: int) -> list[Segment]:
    """Return the segments of a file, in order.

    Args:
        tail: the last `index_size` bytes of the file.
        checksum: their CRC-32 in the manifest.

    Raises:
        DamagedError: the bytes are not what was written.
    """
    if zlib.crc32(tail) != checksum:
        raise DamagedError(f"its index ({len(tail)} bytes) fails its checksum")
    index = tail[: -_TRAILER.size]
    size, magic = _TRAILER.unpack(tail[len(index) :].rjust(_TRAILER.size, b"\0"))
    if magic != MAGIC or size != len(tail) or len(index) % _LINE.itemsize:
        raise DamagedError(f"format {magic!r}, this release reads {MAGIC!r}")
    segments = [Segment(*line) for line in np.frombuffer(index, _LINE).tolist()]
    stop = first = 0
    for segment in segments:
        if segment.offset < stop or not first <= segment.first <= segment.last:
            raise DamagedError("its index names segments that are out of order")
        first, stop = segment.last, segment.offset + segment.length
    return segments


def segments_of(segments: Sequence[Segment], groups: KeyGroupRange) -> list[Segment]:
    """Return the segments that may hold a range of key groups: neighbours in the file."""
    return [
        segment
        for segment in segments
        if segment.last >= groups.first and segment.first <= groups.last
    ]


def decode(blob: bytes | memoryview, segment: Segment, groups: KeyGroupRange) -> pa.RecordBatch:
    """Decode the entries of a range of key groups from a segment.

    Raises:
        DamagedError: the bytes are not what was written.
    """
    if len(blob) != segment.length or zlib.crc32(blob) != segment.checksum:
        raise DamagedError(
            f"{len(blob)} bytes at {segment.offset}, expected {segment.length}, fail their checksum"
        )
    batch = _entries(blob, segment)
    if groups.first <= segment.first and segment.last <= groups.last:
        return batch
    keys = batch.column(0)
    start = _position(keys, groups.first)
    return batch.slice(start, _position(keys, groups.last + 1) - start)


def _entries(blob: bytes | memoryview, segment: Segment) -> pa.RecordBatch:
    """Decode a segment, and check its entries against the segment's line in the index.

    A checksum does not prove who wrote the bytes, and Arrow itself trusts what it reads.
    """
    try:
        message = pa.ipc.read_message(pa.py_buffer(blob))
        batch = pa.ipc.read_record_batch(message, ENTRIES)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, EOFError, MemoryError, *UNREADABLE) as error:
        raise DamagedError(f"the segment at {segment.offset} is no entries: {error}") from None
    keys = batch.column(0)
    if batch.num_rows != segment.rows or keys.null_count or _shortest(keys) < KEY_BYTES_MIN:
        raise DamagedError(f"the segment at {segment.offset} holds other entries than it should")
    groups = groups_of(keys)
    if (groups < segment.first).any() or (groups > segment.last).any():
        raise DamagedError(f"the segment at {segment.offset} holds other key groups than it should")
    return batch


def _shortest(keys: pa.BinaryArray) -> int:
    return int(pc.min(pc.binary_length(keys)).as_py() or 0) if len(keys) else KEY_BYTES_MIN


def groups_of(keys: pa.BinaryArray) -> npt.NDArray[np.int32]:
    """Return the key group of each entry's key: its first two bytes."""
    if len(keys) == 0:
        return np.empty(0, np.int32)
    _, offsets, data = keys.buffers()
    starts = np.frombuffer(offsets, np.int32, len(keys), keys.offset * np.dtype(np.int32).itemsize)
    units = np.frombuffer(data, np.uint8)
    return units[starts].astype(np.int32) << 8 | units[starts + 1]


def _position(keys: pa.BinaryArray, group: int) -> int:
    """Return the row of the first entry at or after a key group."""
    wanted = group.to_bytes(2, "big")
    return bisect.bisect_left(range(len(keys)), wanted, key=lambda row: keys[row].as_py())


def _cuts(groups: npt.NDArray[np.int32], batch: pa.RecordBatch) -> list[tuple[int, int]]:
    """Cut a batch into segments; return the first row of each, and the row after its last."""
    ends = np.append(np.flatnonzero(np.diff(groups)) + 1, len(groups))
    row_bytes = max(1, batch.nbytes // len(groups))
    rows = min(SEGMENT_ROWS, max(1, SEGMENT_BYTES // row_bytes))
    rows_max = SEGMENT_ROWS_MAX * rows // SEGMENT_ROWS or 1
    cuts, start = [], 0
    while start < len(groups):
        at = int(np.searchsorted(ends, min(start + rows, len(groups))))
        stop = min(int(ends[at]), start + rows_max)
        cuts.append((start, stop))
        start = stop
    return cuts


def damage_of(file: StateFile, data: bytes) -> str:
    """Return the reason why a whole file is damaged; "" if it is not."""
    if len(data) != file.size:
        return f"{len(data)} bytes, expected {file.size}"
    try:
        segments = parse_index(data[file.size - file.index_size :], file.checksum)
    except DamagedError as error:
        return str(error)
    view = memoryview(data)
    for segment in segments:
        if zlib.crc32(view[segment.offset : segment.offset + segment.length]) != segment.checksum:
            return f"{segment.length} bytes at {segment.offset} fail their checksum"
    return ""
