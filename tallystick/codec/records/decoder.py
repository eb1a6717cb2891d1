"""Kafka record batches (magic 2) to Arrow batches, column by column.

Invariants
    Records never become Python objects: Python handles batches, `kernels` handles records.
    Decoded batches have passed their checksum, and every length in them has been checked.
    No decoded column exceeds `COLUMN_BYTES_MAX`: decoding stops before, at a batch boundary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tallystick.codec.records import kernels
from tallystick.codec.records.batch_header import (
    BatchHeader,
    DamagedBatchError,
    UnreadableBatchError,
    batch_headers,
    check,
)
from tallystick.codec.records.compression import Buffer
from tallystick.codec.records.encoder import encode, stamp
from tallystick.codec.records.plain import (
    AbortedTransactions,
    GiveUp,
    decompressed,
    give_up_or_raise,
)
from tallystick.errors import CorruptRecordError
from tallystick.values import Producer, TopicPartition

COLUMN_BYTES_MAX = 2**31 - 1
"""The most that the 32-bit offsets of an Arrow binary column can address."""

PIECE_BYTES = 4 << 20
"""Small enough to stay in the processor's cache between two passes over the records."""

HEADERS_TYPE = pa.list_(
    pa.struct([pa.field("key", pa.string(), nullable=False), pa.field("value", pa.binary())])
)

RECORD_SCHEMA = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", pa.int64(), nullable=False),
        pa.field("timestampType", pa.int32(), nullable=False),
    ]
)
"""Columns of `decode`: timestamp in ms, timestampType 0 (create time) or 1 (log append time)."""

RECORD_SCHEMA_WITH_HEADERS = RECORD_SCHEMA.append(pa.field("headers", HEADERS_TYPE))


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """The visible records of a response, and where to fetch next.

    The next offset is the start offset if the data hold not even one whole batch.
    """

    batch: pa.RecordBatch
    next_offset: int


def decode(
    data: Buffer,
    *,
    topic_partition: TopicPartition,
    start_offset: int,
    stop_offset: int,
    aborted: Sequence[tuple[int, int]] | None,
    headers: bool,
    give_up: GiveUp | None = None,
) -> DecodedBatch:
    """Decode the records of a partition's fetch response.

    Args:
        data: the response's `records` bytes; the last batch may be cut off.
        topic_partition: the partition of the records, for errors.
        start_offset: the first offset wanted; a batch may begin before it.
        stop_offset: the first offset not wanted.
        aborted: the response's aborted transactions as (producer id, first offset), and their
            records are left out (read_committed); None: they are kept (read_uncommitted).
        headers: whether a column `headers` is wanted, null where a record has none.
        give_up: called with the error of a whole batch whose records cannot be read: it returns, to
            leave them out, or raises; None: raise an error.

    Returns:
        The records, as many whole batches as one Arrow batch can hold, and the next offset to
        fetch: after the last batch seen, visible or not, and at most `stop_offset`.

    Raises:
        CorruptRecordError: a batch is damaged, or of a format before Kafka 0.11.
    """
    pieces = decode_pieces(
        data,
        topic_partition=topic_partition,
        start_offset=start_offset,
        stop_offset=stop_offset,
        aborted=aborted,
        headers=headers,
        piece_bytes=COLUMN_BYTES_MAX,
        give_up=give_up,
    )
    return next(pieces)


def decode_pieces(
    data: Buffer,
    *,
    topic_partition: TopicPartition,
    start_offset: int,
    stop_offset: int,
    aborted: Sequence[tuple[int, int]] | None,
    headers: bool,
    piece_bytes: int = PIECE_BYTES,
    give_up: GiveUp | None = None,
) -> Iterator[DecodedBatch]:
    """Decode a whole response as `decode` does, and yield Arrow batches: at least one.

    `piece_bytes` is how many bytes of decompressed records an Arrow batch is made of; a larger
    record batch makes an Arrow batch of its own.
    """
    assert 0 <= start_offset <= stop_offset, (start_offset, stop_offset)
    assert 0 < piece_bytes <= COLUMN_BYTES_MAX, piece_bytes
    view = memoryview(data).cast("B")
    visible: list[tuple[BatchHeader, Buffer]] = []
    records_bytes = 0
    next_offset = start_offset
    transactions = AbortedTransactions(aborted)
    try:
        for header in batch_headers(view):
            if header.base_offset >= stop_offset:
                next_offset = stop_offset
                break
            check(header, view)
            hidden = transactions.hide(header)
            if header.last_offset < start_offset:
                continue
            records = None if hidden else decompressed(header, view, give_up)
            if records is not None:
                records_bytes += len(records)
                if records_bytes > piece_bytes and visible:
                    yield DecodedBatch(
                        _to_arrow(visible, start_offset, stop_offset, headers, give_up), next_offset
                    )
                    visible, records_bytes = [], len(records)
                visible.append((header, records))
            next_offset = min(header.last_offset + 1, stop_offset)
        yield DecodedBatch(
            _to_arrow(visible, start_offset, stop_offset, headers, give_up), next_offset
        )
    except UnreadableBatchError as wrong:
        raise CorruptRecordError(f"{topic_partition}, {wrong}") from None
    except DamagedBatchError as damage:
        raise CorruptRecordError(
            f"{topic_partition}, {damage}. Compare the replicas with "
            "kafka-dump-log.sh; a damaged one heals when its log directory is re-created."
        ) from None


def _to_arrow(
    visible: Sequence[tuple[BatchHeader, Buffer]],
    start: int,
    stop: int,
    headers: bool,
    give_up: GiveUp | None,
) -> pa.RecordBatch:
    """Scan all batches at once, then copy the values of each column out of them."""
    count = sum(header.record_count for header, _ in visible)
    keys = np.empty((2, count), np.int64)
    values = np.empty((2, count), np.int64)
    header_blocks = np.empty((3, count), np.int64)
    offsets = np.empty(count, np.int64)
    timestamps = np.empty(count, np.int64)
    log_appended = np.empty(count, np.int32)
    problems = np.empty((len(visible), 2), np.int64)
    rows = kernels.scan_records(
        _batch_table(visible),
        start,
        stop,
        keys,
        values,
        header_blocks,
        offsets,
        timestamps,
        log_appended,
        problems,
    )
    for index in np.flatnonzero(problems[:, 0]).tolist():
        header = visible[index][0]
        give_up_or_raise(UnreadableBatchError(header, _problem(header, *problems[index])), give_up)
    columns = [
        _gathered(keys, rows, pa.binary()),
        _gathered(values, rows, pa.binary()),
        pa.array(offsets[:rows]),
        pa.array(timestamps[:rows]),
        pa.array(log_appended[:rows]),
    ]
    if not headers:
        return pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA)
    columns.append(_headers_to_arrow(header_blocks, rows))
    return pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA_WITH_HEADERS)


def _problem(header: BatchHeader, problem: int, number: int) -> str:
    """Return the reason why a batch's record, by its number, cannot be read."""
    if problem == kernels.OUTSIDE:
        return (
            f"record {number} of {header.record_count} names an offset outside of the batch, which "
            f"has {header.base_offset} to {header.last_offset}"
        )
    return (
        f"record {number} of {header.record_count} does not fit the batch that holds it: a length "
        f"in it leaves the record, or the batch"
    )


def _batch_table(visible: Sequence[tuple[BatchHeader, Buffer]]) -> NDArray[np.int64]:
    """Return the columns that `scan_records` needs of each batch."""
    rows = [
        (
            pa.py_buffer(records).address,
            len(records),
            header.record_count,
            header.base_offset,
            header.last_offset - header.base_offset,
            header.base_timestamp,
            header.max_timestamp,
            header.is_log_append_time,
        )
        for header, records in visible
    ]
    return np.array(rows, np.int64).reshape(-1, 8)


def _gathered(spans: NDArray[np.int64], rows: int, kind: pa.DataType) -> pa.Array:
    """Copy spans into a binary or string array."""
    spans = np.ascontiguousarray(spans[:, :rows])
    lengths = spans[1]
    nulls = lengths < 0
    null_count = int(np.count_nonzero(nulls))
    capacity = int(lengths.sum()) + null_count  # a null counts -1
    data = pa.allocate_buffer(capacity)
    offsets = np.empty(rows + 1, np.int32)
    size = kernels.gather(spans, offsets, data.address, capacity)
    assert size == capacity, (size, capacity)
    validity = pa.py_buffer(np.packbits(~nulls, bitorder="little")) if null_count else None
    return pa.Array.from_buffers(
        kind, rows, [validity, pa.py_buffer(offsets), data], null_count=null_count
    )


def _headers_to_arrow(blocks: NDArray[np.int64], rows: int) -> pa.Array:
    """Scan and copy the headers of all records."""
    blocks = np.ascontiguousarray(blocks[:, :rows])
    counts = blocks[2]
    count = int(counts.sum())
    keys = np.empty((2, count), np.int64)
    values = np.empty((2, count), np.int64)
    scanned = kernels.scan_headers(blocks, keys, values)
    assert scanned == count, (scanned, count)
    structs = pa.StructArray.from_arrays(
        [_readable(_gathered(keys, count, pa.binary())), _gathered(values, count, pa.binary())],
        fields=list(HEADERS_TYPE.value_type),
    )
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    none = counts == 0
    validity = pa.py_buffer(np.packbits(~none, bitorder="little")) if none.any() else None
    return pa.Array.from_buffers(
        HEADERS_TYPE, rows, [validity, pa.py_buffer(offsets)], children=[structs]
    )


def _readable(keys: pa.Array) -> pa.Array:
    """Return header keys as text; bytes that are no UTF-8 become U+FFFD, as in Java."""
    try:
        return keys.cast(pa.string())
    except pa.ArrowInvalid:
        distinct = keys.dictionary_encode()
        texts = [key.decode(errors="replace") for key in distinct.dictionary.to_pylist()]
        return pa.array(texts, pa.string()).take(distinct.indices)


def warm_up() -> None:
    """Compile the kernels, or load them from the cache."""
    header_type = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    batch = pa.record_batch(
        {
            "key": pa.array([b"k"]),
            "value": pa.array([b"v"]),
            "headers": pa.array([[("h", b"v")]], header_type),
        }
    )
    producer = Producer("warm-up", 1, 0)
    (encoded,) = encode(batch, now_ms=0)
    decoded = decode(
        stamp(encoded.data, producer, 0),
        topic_partition=TopicPartition("warm-up", 0),
        start_offset=0,
        stop_offset=1,
        aborted=None,
        headers=True,
    )
    assert decoded.batch.num_rows == 1, decoded
