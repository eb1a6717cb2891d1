"""Arrow batches to Kafka's record batches and back: what the package uses of the codec."""

import pyarrow as pa

from tallystick.codec.records import kernels
from tallystick.codec.records.batch_header import BatchHeader, ControlType, batch_headers
from tallystick.codec.records.decoder import (
    RECORD_SCHEMA,
    RECORD_SCHEMA_WITH_HEADERS,
    DecodedBatch,
    decode,
    decode_pieces,
)
from tallystick.codec.records.encoder import EncodedBatch, encode, stamp
from tallystick.values import Producer, TopicPartition

__all__ = [
    "RECORD_SCHEMA",
    "RECORD_SCHEMA_WITH_HEADERS",
    "BatchHeader",
    "ControlType",
    "DecodedBatch",
    "EncodedBatch",
    "batch_headers",
    "decode",
    "decode_pieces",
    "encode",
    "stamp",
    "warm_up",
]


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
    kernels.control_type(0, 0)
