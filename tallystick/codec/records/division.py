"""The division of a record batch that a broker has refused as too large (KIP-126)."""

from tallystick.codec.records.batch_header import CHECKED_FROM, TRANSACTIONAL, batch_headers
from tallystick.codec.records.compression import CODEC_IDS
from tallystick.codec.records.decoder import decode
from tallystick.codec.records.encoder import EncodedBatch, encode
from tallystick.values import TopicPartition

BATCH_BYTES_MIN = 1024
_NAMES = {number: name for name, number in CODEC_IDS.items()}


def divided(
    data: bytes, topic_partition: TopicPartition, batch_limit: int | None
) -> list[EncodedBatch]:
    """Return the records of a batch in smaller batches, in order, that no producer owns yet.

    Args:
        data: one stamped batch of several records.
        topic_partition: the batch's destination, for errors.
        batch_limit: the largest batch that the topic takes; None: not known, or larger than the
            batch, which the broker has compressed otherwise: then it is cut in two.

    Raises:
        RecordBeyondLimitError: a single record is larger than the limit.
    """
    (header,) = batch_headers(data)
    assert header.record_count > 1, header
    records = decode(
        data,
        topic_partition=topic_partition,
        start_offset=header.base_offset,
        stop_offset=header.last_offset + 1,
        aborted=None,
        headers=True,
    ).batch
    known = batch_limit is not None and batch_limit < len(data)
    pieces = encode(
        records,
        compression=_NAMES[header.compression],
        batch_bytes=max(BATCH_BYTES_MIN, records.nbytes),  # the limits below say where to cut
        batch_records=header.record_count if known else (header.record_count + 1) // 2,
        batch_limit=batch_limit if known else None,
        now_ms=0,  # each has its own time
    )
    return [piece if header.is_transactional else plain(piece) for piece in pieces]


def plain(encoded: EncodedBatch) -> EncodedBatch:
    """Return a batch without the mark of a transaction; the checksum is set at sending."""
    at = CHECKED_FROM + 1  # attributes are two bytes
    mark = bytes([encoded.data[at] & ~TRANSACTIONAL])
    data = b"".join((encoded.data[:at], mark, encoded.data[at + 1 :]))
    return EncodedBatch(encoded.record_count, data)
