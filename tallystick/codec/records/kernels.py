"""The loops over records: Kafka's record format (magic 2) to and from spans, compiled by numba.

The functions work on memory addresses, so that one compiled version serves all buffers.

Invariants
    Nothing is read outside the `[at, end)` that the caller passes, even with damaged bytes, and
    nothing is written beyond a capacity.
    A read that would leave its range yields the address `FAILED`, which every later read yields
    again: a record needs one check at its end, not one per field.

Source of the format: https://kafka.apache.org/documentation/#record
"""

import numba
import numpy as np

from tallystick.codec.bytes_kernels import copy, inner_kernel, load8, put_zigzag, store8, zigzag

UNFIT, OUTSIDE = 1, 2
"""Problems of a batch: a length does not fit; a record's offset is outside of the batch."""
FAILED = 1 << 62
"""Larger than any address, and far enough from 2^63 that adding a length cannot overflow."""

BODY_BYTES_MAX = 2**31 - 1 - 64
"""A record with its batch header must fit the batch's 31-bit length."""

NEEDS_LARGER_BUFFER = 1
HEADER_WITHOUT_KEY = 2
RECORD_TOO_LARGE = 3

_SEVEN_BITS = np.uint64(0x7F)
_CONTINUE = np.uint64(0x80)
_SEVEN = np.uint64(7)
_ONE = np.uint64(1)
_INT_BITS = np.uint64(0xFFFFFFFF)

_kernel = numba.njit(cache=True, nogil=True, error_model="numpy")


# ---- reading ------------------------------------------------------------------------------------


@inner_kernel
def _read_bits(at, end):  # type: ignore[no-untyped-def]
    """(bits of a varint, address after it); (0, FAILED) when it leaves the range or 64 bits."""
    value = np.uint64(0)
    shift = np.uint64(0)
    after = np.int64(FAILED)
    while at < end and shift < np.uint64(64):
        byte = load8(at)
        at += 1
        value |= (byte & _SEVEN_BITS) << shift
        if byte < _CONTINUE:
            after = np.int64(at)
            break
        shift += _SEVEN
    if after == FAILED:
        value = np.uint64(0)
    return value, after


@inner_kernel
def _read_long(at, end):  # type: ignore[no-untyped-def]
    """(varint of 64 bits, address after it), or (0, FAILED)."""
    bits, at = _read_bits(at, end)
    return np.int64(bits >> _ONE) ^ -np.int64(bits & _ONE), at


@inner_kernel
def _read_int(at, end):  # type: ignore[no-untyped-def]
    """(varint of 32 bits, address after it), or (0, FAILED); higher bits mean nothing, as in Java.

    Source: org.apache.kafka.common.utils.ByteUtils.readVarint.
    """
    bits, at = _read_bits(at, end)
    bits &= _INT_BITS
    return np.int64(bits >> _ONE) ^ -np.int64(bits & _ONE), at


@inner_kernel
def _skip(at, size, end):  # type: ignore[no-untyped-def]
    """Return the address after `size` bytes, or FAILED; any size below 0 is null, as in Java."""
    if size > end - at:
        return np.int64(FAILED)
    return at + max(size, 0)


@inner_kernel
def _skip_headers(at, count, end):  # type: ignore[no-untyped-def]
    """Return the address after `count` headers, or FAILED."""
    if count < 0:
        return np.int64(FAILED)
    for _ in range(count):
        size, at = _read_int(at, end)
        at = _skip(at, size, end) if size >= 0 else np.int64(FAILED)
        size, at = _read_int(at, end)
        at = _skip(at, size, end)
        if at == FAILED:
            break
    return at


@inner_kernel
def _read_record(at, end):  # type: ignore[no-untyped-def]
    """Return ((timestamp delta, offset delta), key, value, headers, address after the record).

    Key and value are (address, length; -1 is null), headers (address, number). The last address is
    `FAILED` if a part does not fit the record.
    """
    timestamp_delta, at = _read_long(at + 1, end)  # 1: attributes, unused
    offset_delta, at = _read_int(at, end)
    key_size, key_at = _read_int(at, end)
    value_size, value_at = _read_int(_skip(key_at, key_size, end), end)
    header_count, headers_at = _read_int(_skip(value_at, value_size, end), end)
    after = headers_at
    if header_count != 0:
        after = _skip_headers(headers_at, header_count, end)
    return (
        (timestamp_delta, offset_delta),
        (key_at, max(key_size, -1)),
        (value_at, max(value_size, -1)),
        (headers_at, header_count),
        after,
    )


@_kernel
def scan_records(  # type: ignore[no-untyped-def]
    batches, start, stop, keys, values, headers, offsets, timestamps, log_appended, problems
):
    """Find the records of decompressed batches with offsets in `[start, stop)`.

    A faulty producer may number the records of an uncompressed batch twice, or out of order: each
    counts at the offset that it names, so it is in one range only. The offset must be one of the
    batch's.

    Args:
        batches: one row per batch: address, size, record count, base offset, last offset delta,
            base timestamp, timestamp of all records (log append time), 1 if that one counts.
        start: the first offset to take.
        stop: the first offset not to take.
        keys: rows 0 and 1 get each key's address and length; -1 is null.
        values: the same for the values.
        headers: rows 0 to 2 get the address, the end and the number of each record's headers.
        offsets: gets each record's offset.
        timestamps: gets each record's timestamp in ms.
        log_appended: gets 1 where the broker set the timestamp.
        problems: a row per batch: gets 0, or UNFIT or OUTSIDE and the number of the record that has
            the problem; no record of such a batch is taken.

    All but `batches` and `problems` have room for the sum of the batches' record counts.

    Returns:
        The number of records found.
    """
    row = 0
    for index in range(len(batches)):
        at = batches[index, 0]
        batch_end = at + batches[index, 1]
        base_offset = batches[index, 3]
        base_timestamp = batches[index, 5]
        is_log_append_time = batches[index, 7]
        first_row = row
        problem = 0
        number = 0
        while number < batches[index, 2]:
            size, at = _read_int(at, batch_end)
            end = _skip(at, size, batch_end)
            if end == FAILED or size < 0:
                problem = UNFIT
                break
            deltas, key, value, header, at = _read_record(at, end)
            timestamp_delta, offset_delta = deltas
            if at != end or offset_delta < 0 or offset_delta > batches[index, 4]:
                problem = UNFIT if at != end else OUTSIDE
                break
            number += 1
            offset = base_offset + offset_delta
            if offset < start or offset >= stop:
                continue
            keys[0, row], keys[1, row] = key
            values[0, row], values[1, row] = value
            headers[0, row], headers[2, row] = header
            headers[1, row] = end
            offsets[row] = offset
            if is_log_append_time:
                timestamps[row] = batches[index, 6]
            else:
                timestamps[row] = base_timestamp + timestamp_delta
            log_appended[row] = is_log_append_time
            row += 1
        problem = UNFIT if not problem and at != batch_end else problem
        row = first_row if problem else row
        problems[index, 0] = problem
        problems[index, 1] = number
    return row


@_kernel
def scan_headers(headers, keys, values):  # type: ignore[no-untyped-def]
    """Find the record headers that `scan_records` skipped.

    Args:
        headers: rows 0 to 2: address, end and number of each record's headers.
        keys: rows 0 and 1 get each header key's address and length, for all records in a row.
        values: the same for the header values; length -1 is null.

    Returns:
        The number of headers; -1 when the bytes are not the ones that `scan_records` saw.
    """
    row = 0
    for record in range(headers.shape[1]):
        at = headers[0, record]
        end = headers[1, record]
        for _ in range(headers[2, record]):
            if row >= keys.shape[1]:
                return -1
            size, at = _read_int(at, end)
            keys[0, row] = at
            keys[1, row] = size
            at = _skip(at, size, end)
            size, at = _read_int(at, end)
            values[0, row] = at
            values[1, row] = max(size, -1)
            at = _skip(at, size, end)
            if at == FAILED:
                return -1
            row += 1
    return row


@_kernel
def gather(spans, offsets, target, capacity):  # type: ignore[no-untyped-def]
    """Copy the spans one after another to `target`, and note their offsets in Arrow's form.

    Args:
        spans: rows 0 and 1: addresses and lengths.
        offsets: gets one offset more than there are spans.
        target: the address to copy to.
        capacity: how many bytes may be written there, at most 2^31 - 1.

    Returns:
        The bytes written, or -1 when they would be more than `capacity`.
    """
    size = 0
    offsets[0] = 0
    for row in range(spans.shape[1]):
        length = spans[1, row]
        if length > 0:
            if length > capacity - size:
                return -1
            copy(target + size, spans[0, row], length)
            size += length
        offsets[row + 1] = size
    return size


# ---- writing ------------------------------------------------------------------------------------


@inner_kernel
def _varint_size(value):  # type: ignore[no-untyped-def]
    rest = zigzag(value) >> _SEVEN
    size = 1
    while rest:
        rest >>= _SEVEN
        size += 1
    return size


@inner_kernel
def _blob_size(length):  # type: ignore[no-untyped-def]
    return _varint_size(length) + max(length, 0)


@inner_kernel
def _write_blob(at, source, length):  # type: ignore[no-untyped-def]
    at = put_zigzag(at, length)
    if length > 0:
        copy(at, source, length)
        at += length
    return at


@_kernel
def encode_records(  # type: ignore[no-untyped-def]
    keys, values, headers, header_keys, header_values, timestamps, row, row_stop, target, capacity
):
    """Write records `row` to `row_stop` to `target`, as many as fit.

    Args:
        keys: address of the data, starts, lengths; a length of -1 is null.
        values: the same.
        headers: for each record the first of its headers, and their number; or two empty arrays.
        header_keys: address, starts, lengths of all header keys.
        header_values: the same for the header values.
        timestamps: ms, one per record.
        row: the first record of the batch.
        row_stop: the first record not to write.
        target: the address to write to.
        capacity: how many bytes may be written there.

    Returns:
        (first record not written, bytes written, largest timestamp, problem, bytes needed).
        problem is 0, NEEDS_LARGER_BUFFER when not even one record fits, RECORD_TOO_LARGE or
        HEADER_WITHOUT_KEY (both about the first record not written).
    """
    key_data, key_starts, key_lengths = keys
    value_data, value_starts, value_lengths = values
    header_starts, header_counts = headers
    header_key_data, header_key_starts, header_key_lengths = header_keys
    header_value_data, header_value_starts, header_value_lengths = header_values
    has_headers = len(header_starts) > 0
    first = row
    at = target
    timestamp_max = timestamps[row]
    while row < row_stop:
        key_length = key_lengths[row]
        value_length = value_lengths[row]
        timestamp_delta = timestamps[row] - timestamps[first]
        first_header = header_starts[row] if has_headers else 0
        header_count = header_counts[row] if has_headers else 0
        body = 1 + _varint_size(timestamp_delta) + _varint_size(row - first)
        body += _blob_size(key_length) + _blob_size(value_length) + _varint_size(header_count)
        for header in range(first_header, first_header + header_count):
            if header_key_lengths[header] < 0:
                return row, at - target, timestamp_max, HEADER_WITHOUT_KEY, 0
            body += _blob_size(header_key_lengths[header])
            body += _blob_size(header_value_lengths[header])
        if body > BODY_BYTES_MAX:
            return row, at - target, timestamp_max, RECORD_TOO_LARGE, body
        size = _varint_size(body) + body
        if size > capacity - (at - target):
            problem = NEEDS_LARGER_BUFFER if row == first else 0
            return row, at - target, timestamp_max, problem, size
        at = put_zigzag(at, body)
        store8(at, np.uint64(0))  # attributes, unused
        at = put_zigzag(at + 1, timestamp_delta)
        at = put_zigzag(at, row - first)
        at = _write_blob(at, key_data + key_starts[row], key_length)
        at = _write_blob(at, value_data + value_starts[row], value_length)
        at = put_zigzag(at, header_count)
        for header in range(first_header, first_header + header_count):
            at = _write_blob(
                at, header_key_data + header_key_starts[header], header_key_lengths[header]
            )
            at = _write_blob(
                at, header_value_data + header_value_starts[header], header_value_lengths[header]
            )
        timestamp_max = max(timestamp_max, timestamps[row])
        row += 1
    return row, at - target, timestamp_max, 0, 0
