"""Malformed records on their way to a topic of their own: as they were, and why they are there.

Key, value, headers and timestamp stay what they were; but a timestamp that is none in ms, which
brokers refuse, becomes the time of writing. Behind the headers of the record come ours, all of them
text; a record that was a dead letter before has them twice, and the last are the new.
"""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.topic_partition import TopicPartition

ERROR_HEADER = "tallystick.error"
TOPIC_HEADER = "tallystick.topic"
PARTITION_HEADER = "tallystick.partition"
OFFSET_HEADER = "tallystick.offset"
OWN_HEADERS = (ERROR_HEADER, TOPIC_HEADER, PARTITION_HEADER, OFFSET_HEADER)

REASON_LENGTH_MAX = 500
"""A parser's message may quote the value; the dead letter must not become much larger than it."""
TIMESTAMP_MS_MAX = (2**63 - 1) // 1000
"""In microseconds it is just not too large for 64 bits."""
_HEADER_TYPE = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])


def dead_letters(
    records: pa.RecordBatch, reasons: Mapping[int, str], topic_partition: TopicPartition
) -> pa.RecordBatch:
    """The malformed records as rows for the sink: key, value, headers, timestamp (ms since 1970).

    Args:
        records: as `kafka.records.decode` makes them, with headers; of one partition.
        reasons: what is wrong, by the row of each malformed record.
        topic_partition: where they come from.
    """
    bad = records.take(pa.array(list(reasons), pa.int64()))
    offsets = bad.column("offset").to_pylist()
    texts = [
        text
        for reason, offset in zip(reasons.values(), offsets, strict=True)
        for text in (
            reason[:REASON_LENGTH_MAX],
            topic_partition.topic,
            str(topic_partition.partition),
            str(offset),
        )
    ]
    own = pa.StructArray.from_arrays(
        [
            pa.array(OWN_HEADERS * len(reasons), pa.string()),
            pa.array([text.encode(errors="replace") for text in texts], pa.binary()),
        ],
        fields=list(_HEADER_TYPE),
    )
    times = bad.column("timestamp")
    numbers = times.to_numpy()
    fits = (numbers >= -TIMESTAMP_MS_MAX) & (numbers <= TIMESTAMP_MS_MAX)
    return pa.RecordBatch.from_pydict(
        {
            "key": bad.column("key"),
            "value": bad.column("value"),
            "headers": _appended(bad.column("headers"), own),
            "timestamp": pc.if_else(pa.array(fits), times, None),
        }
    )


def _appended(headers: pa.Array, own: pa.Array) -> pa.Array:
    """Lists of headers with ours behind: as many of `own` to each list."""
    lengths = pc.list_value_length(headers).fill_null(0).to_numpy()
    given = headers.flatten().cast(_HEADER_TYPE)
    count = len(OWN_HEADERS)
    # Where the entries of each list end, its own follow: an order to take the two arrays in.
    places = np.repeat(np.cumsum(lengths), count)
    order = np.insert(np.arange(len(given)), places, len(given) + np.arange(len(own)))
    entries = pa.concat_arrays([given, own]).take(pa.array(order))
    starts = np.concatenate(([0], np.cumsum(lengths + count))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(starts), entries, type=pa.list_(_HEADER_TYPE))
