"""Reads the topics of the `count` job to columns: through librdkafka and Arrow's parser of JSON.

Nothing of ours is in it: whoever judges must not have the faults of the judged.
"""

import io
import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from .count_check import Inputs, Numbers, Outputs
from .dataset import DatasetError
from .topics import PARTITION_COUNT

MESSAGES_AT_ONCE = 100_000
GATHER_S = 0.25
"""For so long librdkafka waits for as many messages, even where the topic ends earlier."""
PATIENCE_S = 30.0
"""Without a message for so long, reading has failed."""
EMPTY_VALUE = b"{}"
MISSING = -1

_INPUT = pa.schema([("user", pa.string()), ("amount", pa.float64()), ("ts", pa.int64())])
_OUTPUT = pa.schema(
    [("user", pa.string()), ("count", pa.int64()), ("sum", pa.float64()), ("ts", pa.int64())]
)


def read_inputs(bootstrap: str, topic: str) -> Inputs:
    """All records of an input topic."""
    tables = [
        parse(values, _INPUT)
        for partition in range(PARTITION_COUNT)
        for _, values in read_values(bootstrap, topic, partition)
    ]
    table = _together(tables, _INPUT)
    return Inputs(_users(table), _cents(table["amount"]), _numbers(table["ts"]))


def read_outputs(bootstrap: str, topic: str) -> Outputs:
    """All committed rows of an output topic."""
    tables, partitions, offsets = [], [], []
    for partition in range(PARTITION_COUNT):
        for places, values in read_values(bootstrap, topic, partition):
            tables.append(parse(values, _OUTPUT))
            partitions.append(np.full(len(places), partition))
            offsets.append(places)
    table = _together(tables, _OUTPUT)
    nothing = np.zeros(0, dtype=np.int64)
    return Outputs(
        partitions=np.concatenate([nothing, *partitions]),
        offsets=np.concatenate([nothing, *offsets]),
        users=_users(table),
        counts=_numbers(table["count"]),
        cents=_cents(table["sum"]),
        times_ms=_numbers(table["ts"]),
    )


def read_values(
    bootstrap: str, topic: str, partition: int
) -> Iterator[tuple[Numbers, list[bytes]]]:
    """The offsets and values of a partition's committed records, many at a time."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "benchmark-verifier",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "fetch.queue.backoff.ms": 10,
            "log_level": 0,
        }
    )
    try:
        consumer.assign([TopicPartition(topic, partition, 0)])
        at_end = False
        deadline_s = time.monotonic() + PATIENCE_S
        while not at_end:
            messages = consumer.consume(MESSAGES_AT_ONCE, GATHER_S)
            if messages:
                deadline_s = time.monotonic() + PATIENCE_S
            elif time.monotonic() > deadline_s:
                raise DatasetError(f"nothing came from {topic}-{partition} in {PATIENCE_S:.0f} s")
            at_end = any(_is_end(message) for message in messages if message.error())
            good = [message for message in messages if not message.error()]
            if good:
                offsets = np.array([message.offset() for message in good], dtype=np.int64)
                yield offsets, [message.value() or EMPTY_VALUE for message in good]
    finally:
        consumer.close()


def _is_end(message: Message) -> bool:
    error = message.error()
    if error.code() != KafkaError._PARTITION_EOF:
        raise DatasetError(f"{message.topic()}-{message.partition()} cannot be read: {error}")
    return True


def parse(values: list[bytes], schema: pa.Schema) -> pa.Table:
    """Values that are JSON objects, as columns; fields of no column are left out."""
    text = b"\n".join(values)
    table = pyarrow.json.read_json(
        io.BytesIO(text),
        read_options=pyarrow.json.ReadOptions(block_size=len(text) + 1),
        parse_options=pyarrow.json.ParseOptions(
            explicit_schema=schema, unexpected_field_behavior="ignore"
        ),
    )
    if len(table) != len(values):
        raise DatasetError(f"{len(values)} values hold {len(table)} JSON objects")
    return table


def _together(tables: list[pa.Table], schema: pa.Schema) -> pa.Table:
    return pa.concat_tables([schema.empty_table(), *tables])


def _users(table: pa.Table) -> Numbers:
    """The number in `u64392`."""
    return _numbers(pc.cast(pc.utf8_slice_codeunits(table["user"], 1), pa.int64()))


def _cents(amounts: pa.ChunkedArray) -> Numbers:
    hundredfold = pc.round(pc.multiply(amounts, pa.scalar(100.0)))
    return _numbers(pc.cast(hundredfold, pa.int64()))


def _numbers(column: pa.ChunkedArray) -> Numbers:
    values: Numbers = pc.fill_null(column, MISSING).to_numpy()
    return values
