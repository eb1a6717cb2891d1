"""Rows of a DataFrame that come to a fault once Kafka has some of them in an open transaction."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark import TaskContext

WAIT_S = 120.0
BATCH_ROWS = 10_000
"""Spark hands rows on in so many."""
FAULTY = "key string, value binary"
HAS_HIT = "the fault has hit"


def is_open(options: Mapping[str, str], topic: str) -> bool:
    """True if a topic has rows that nobody has committed or aborted, as librdkafka sees it."""
    from confluent_kafka import IsolationLevel, TopicPartition  # cannot be pickled by value
    from confluent_kafka.admin import AdminClient, OffsetSpec

    admin = AdminClient(dict(options))
    partitions = admin.list_topics(topic, timeout=WAIT_S).topics[topic].partitions
    asked = {TopicPartition(topic, partition): OffsetSpec.latest() for partition in partitions}
    ends = [
        {where.partition: future.result().offset for where, future in found.items()}
        for found in (
            admin.list_offsets(asked, isolation_level=level, request_timeout=WAIT_S)
            for level in (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED)
        )
    ]
    return ends[0] != ends[1]


def faulty_rows(
    fault: str, options: Mapping[str, str], topic: str
) -> Callable[[Iterator[Any]], Any]:
    """Return a function for `mapInArrow`, with more rows than a task holds back.

    Args:
        fault: `raise`: the task fails; `raise once`: its first attempt does; `stay`: it stays
            there; `outlive`: it goes on when the transaction is no longer open.
        options: of a client of librdkafka.
        topic: that the rows are written to.
    """

    def until(is_so: bool) -> None:
        deadline = time.monotonic() + WAIT_S
        while is_open(options, topic) != is_so:
            assert time.monotonic() < deadline, "no transaction was opened, or it never ended"
            time.sleep(0.1)

    def rows(_: Iterator[Any]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        is_faulty = fault != "raise once" or context.attemptNumber() == 0
        for _batch in range(4):
            keys = [f"k{n % 7}" for n in range(BATCH_ROWS)]
            values = [os.urandom(600) for _ in range(BATCH_ROWS)]
            yield pa.record_batch([pa.array(keys), pa.array(values)], names=["key", "value"])
        if not is_faulty:
            return
        until(True)
        if fault == "outlive":
            until(False)
        if fault == "stay":
            time.sleep(600)
        if fault.startswith("raise"):
            raise RuntimeError(HAS_HIT)

    return rows
