"""Arrow batches to Kafka record batches (magic 2), column by column.

Invariants
    Records never become Python objects: Python handles batches, `kernels` handles records.
    Encoded batches belong to no producer until `stamp` gives them one.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from crc32c import crc32c
from numpy.typing import NDArray

from tallystick.codec.records import kernels
from tallystick.codec.records.batch_header import (
    CHECKED_FROM,
    HEADER,
    LENGTH_FROM,
    MAGIC,
    TRANSACTIONAL,
)
from tallystick.codec.records.compression import CODEC_IDS, compress
from tallystick.codec.spans import Spans, spans_of
from tallystick.errors import RecordError
from tallystick.values import Producer

_CRC_AT = 17
_PRODUCER_AT = 43
_PRODUCER = struct.Struct(">qhi")

_NO_LEADER_EPOCH = -1
_NO_CRC = 0  # `stamp` knows it
_NO_PRODUCER = (-1, -1, 0)  # producer id, producer epoch, base sequence: `stamp` replaces them


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """A finished transactional record batch that no producer owns yet, see `stamp`."""

    record_count: int
    data: bytes

    def __post_init__(self) -> None:
        assert self.record_count > 0, self.record_count


class RecordBeyondLimitError(RecordError):
    """A single record is a larger record batch than its topic takes.

    Args:
        row: the record's number in the batch.
        size: of the record batch that the record makes.
        plain_size: of that record batch without compression.
        limit: of the topic.
    """

    def __init__(self, row: int, size: int, plain_size: int, limit: int) -> None:
        super().__init__(f"record {row} of the batch takes {size} bytes, and the topic {limit}")
        self.row, self.size, self.plain_size, self.limit = row, size, plain_size, limit


def encode(
    batch: pa.RecordBatch | pa.Table,
    *,
    compression: str = "none",
    batch_bytes: int = 900_000,
    batch_records: int = 1_000_000,
    batch_limit: int | None = None,
    beyond_limit: Callable[[RecordBeyondLimitError], None] | None = None,
    now_ms: int,
) -> Iterator[EncodedBatch]:
    """Encode records, in order.

    Args:
        batch: `value` and optionally `key` (binary or string; absent or null: none), `timestamp`
            (int64, ms since 1970) and `headers` (list of struct of `key` and `value`).
        compression: none, gzip, snappy, lz4 or zstd.
        batch_bytes: largest batch before compression; a larger record is a batch of its own.
        batch_records: most records in a batch.
        batch_limit: the largest batch that the topic takes, compressed and with its header; None:
            not known.
        beyond_limit: called with the error of each larger record, which is left out; None: raise
            the error.
        now_ms: the timestamp of records that have none.

    Raises:
        RecordBeyondLimitError: see `beyond_limit`.
        RecordError: a column is missing or of another type, a header has no key, or a record is
            too large for the format (2 GiB). What the broker accepts is left to the broker.
    """
    assert compression in CODEC_IDS, compression
    assert batch_bytes > 0, batch_bytes
    assert batch_records > 0, batch_records
    if batch_limit is not None:
        batch_bytes = max(HEADER.size, min(batch_bytes, batch_limit))
    scratch = np.empty(batch_bytes, np.uint8)
    parts = batch.combine_chunks().to_batches() if isinstance(batch, pa.Table) else [batch]
    before = 0
    for part in parts:
        columns = _Columns.of(part, now_ms)
        row, records_max = 0, batch_records
        while row < part.num_rows:
            row_stop = min(part.num_rows, row + records_max)
            records_max = batch_records
            next_row, size, timestamp_max, problem, needed = columns.encode(row, row_stop, scratch)
            if problem == kernels.NEEDS_LARGER_BUFFER:
                scratch = np.empty(HEADER.size + needed, np.uint8)
                next_row, size, timestamp_max, problem, needed = columns.encode(
                    row, row + 1, scratch
                )
            if problem:
                raise _unwritable(problem, next_row, needed)
            timestamps = int(columns.timestamps[row]), timestamp_max
            records = scratch.data[HEADER.size : HEADER.size + size]
            encoded = _finished(records, compression, next_row - row, timestamps)
            if len(scratch) > batch_bytes:
                scratch = np.empty(batch_bytes, np.uint8)
            if batch_limit is None or len(encoded.data) <= batch_limit:
                yield encoded
            elif next_row > row + 1:  # records that cannot be compressed grow a little
                records_max = (next_row - row) // 2
                continue
            else:
                sizes = len(encoded.data), HEADER.size + size
                beyond = RecordBeyondLimitError(before + row, *sizes, batch_limit)
                if beyond_limit is None:
                    raise beyond
                beyond_limit(beyond)
            row = next_row
        before += part.num_rows


def stamp(data: bytes, producer: Producer, sequence: int) -> bytes:
    """Make a batch the next of a producer: set id, epoch, first sequence number and checksum.

    Args:
        data: an `EncodedBatch`'s bytes.
        producer: the writer of the batch.
        sequence: how many records the producer wrote to the partition before (modulo 2^31).
    """
    assert 0 <= sequence < 2**31, sequence
    view = memoryview(data)
    identity = _PRODUCER.pack(producer.producer_id, producer.producer_epoch, sequence)
    attributes = view[CHECKED_FROM:_PRODUCER_AT]
    rest = view[_PRODUCER_AT + _PRODUCER.size :]
    crc = crc32c(rest, crc32c(identity, crc32c(attributes)))
    return b"".join((view[:_CRC_AT], struct.pack(">I", crc), attributes, identity, rest))


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns of an Arrow batch, as the kernel takes them."""

    arguments: tuple[Any, ...]
    timestamps: NDArray[np.int64]
    spans: tuple[Spans, ...]  # the memory that the addresses in `arguments` point into

    @classmethod
    def of(cls, batch: pa.RecordBatch, now_ms: int) -> "_Columns":
        names = batch.schema.names
        if "value" not in names:
            raise RecordError(f"records need a column value; found {', '.join(names) or 'none'}.")
        nothing = pa.nulls(batch.num_rows)
        headers = batch.column("headers") if "headers" in names else nothing
        starts, counts, header_keys, header_values = _header_spans(headers)
        keys = spans_of(batch.column("key") if "key" in names else nothing, "key")
        values = spans_of(batch.column("value"), "value")
        times = _timestamps(batch.column("timestamp") if "timestamp" in names else nothing, now_ms)
        arguments = (
            _kernel_spans(keys),
            _kernel_spans(values),
            (starts, counts),
            _kernel_spans(header_keys),
            _kernel_spans(header_values),
            times,
        )
        return cls(arguments, times, (keys, values, header_keys, header_values))

    def encode(
        self, row: int, row_stop: int, scratch: NDArray[np.uint8]
    ) -> tuple[int, int, int, int, int]:
        """Write records into `scratch` after the room for the header, see the kernel."""
        target = scratch.ctypes.data + HEADER.size
        result: tuple[int, int, int, int, int] = kernels.encode_records(
            *self.arguments, row, row_stop, target, len(scratch) - HEADER.size
        )
        return result


def _kernel_spans(spans: Spans) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
    return spans.address, spans.starts, spans.lengths


def _timestamps(column: pa.Array, now_ms: int) -> NDArray[np.int64]:
    if pa.types.is_null(column.type):
        return np.full(len(column), now_ms, np.int64)
    if not pa.types.is_int64(column.type):
        raise RecordError(
            f"column timestamp is {column.type}, expected int64: milliseconds since 1970. "
            "Cast it: timestamp('ms'), then int64."
        )
    filled = column.fill_null(now_ms).to_numpy(zero_copy_only=False)
    return np.array(filled, np.int64)  # a copy is writable, so kernels see one type only


def _header_spans(column: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64], Spans, Spans]:
    """Return each record's first header and header count, and the keys and values of all."""
    nothing = spans_of(pa.nulls(0), "headers")
    none = np.zeros(0, np.int64)
    if pa.types.is_null(column.type) or column.null_count == len(column):
        return none, none, nothing, nothing
    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind)
    items = kind.value_type if is_list and not pa.types.is_map(kind) else None
    if pa.types.is_map(kind):
        items = pa.struct([("key", kind.key_type), ("value", kind.item_type)])
    if (
        items is None
        or not pa.types.is_struct(items)
        or {"key", "value"} != {f.name for f in items}
    ):
        raise RecordError(
            f"column headers is {kind}, expected list<struct<key: string, value: binary>>."
        )
    offsets = column.offsets.to_numpy().astype(np.int64)
    counts = np.diff(offsets)
    if column.null_count:  # Arrow allows garbage under a null list
        counts[column.is_null().to_numpy(zero_copy_only=False)] = 0
    structs = column.values
    if counts.min() < 0 or offsets[0] < 0 or offsets[-1] > len(structs):
        raise RecordError(
            "column headers: the Arrow array is damaged, its offsets leave its values."
        )
    keys = spans_of(structs.field("key"), "headers.key")
    if structs.null_count:
        keys.lengths[structs.is_null().to_numpy(zero_copy_only=False)] = -1
    return offsets[:-1], counts, keys, spans_of(structs.field("value"), "headers.value")


def _finished(
    records: memoryview, compression: str, record_count: int, timestamps: tuple[int, int]
) -> EncodedBatch:
    body = records if compression == "none" else compress(compression, records)
    header = HEADER.pack(
        0,
        HEADER.size - LENGTH_FROM + len(body),
        _NO_LEADER_EPOCH,
        MAGIC,
        _NO_CRC,
        CODEC_IDS[compression] | TRANSACTIONAL,
        record_count - 1,
        *timestamps,
        *_NO_PRODUCER,
        record_count,
    )
    return EncodedBatch(record_count, b"".join((header, body)))


def _unwritable(problem: int, row: int, size: int) -> RecordError:
    if problem == kernels.HEADER_WITHOUT_KEY:
        return RecordError(f"record {row} of the batch has a header without a key: give it one.")
    assert problem == kernels.RECORD_TOO_LARGE, problem
    return RecordError(
        f"record {row} of the batch takes {size} bytes; Kafka's format ends at "
        f"{kernels.BODY_BYTES_MAX}. Write large values elsewhere and their address to Kafka."
    )
