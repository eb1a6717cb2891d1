"""A user's program with a mistake, or none, for `tallystick chaos`: argv[1] says which."""

import os
import sys
import time

import pyarrow as pa
from confluent_kafka import Producer

import tallystick as ts

SERVERS = os.environ["TALLYSTICK_CHAOS_SERVERS"]
SCHEMA = "id long, dest string, delay long"


class CountedByTheProcess:
    """Numbers rows from a counter that a restart sets back."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, flights: pa.RecordBatch) -> pa.RecordBatch:
        first, self.count = self.count, self.count + flights.num_rows
        numbers = pa.array(range(first, self.count), pa.int64())
        return pa.record_batch([flights["id"], flights["dest"], numbers], ["id", "dest", "delay"])


def by_the_clock(flights: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows with the time of day instead of the delay."""
    now = pa.array([time.time_ns()] * flights.num_rows, pa.int64())
    return pa.record_batch([flights["id"], flights["dest"], now], ["id", "dest", "delay"])


def beside_the_epoch(flights: pa.RecordBatch) -> pa.RecordBatch:
    """Write rows with a producer of the function's own."""
    producer = Producer({"bootstrap.servers": SERVERS})
    for flight in flights.to_pylist():
        producer.produce("late", str(flight["id"]).encode(), flight["dest"].encode())
    producer.flush()
    return flights.slice(0, 0)


def nothing(flights: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows as they are: no mistake."""
    return flights


MISTAKES = {
    "nothing": nothing,
    "counter": CountedByTheProcess(),
    "clock": by_the_clock,
    "producer": beside_the_epoch,
}

if __name__ == "__main__":
    (
        ts.Pipeline("broken")
        .read(
            ts.KafkaSource(
                SERVERS, topics=["flights"], value=ts.Json(SCHEMA), starting_offsets="earliest"
            )
        )
        .map_batches(MISTAKES[sys.argv[1]])
        .write(ts.KafkaSink(SERVERS, topic="late", key="dest", value=ts.Json()))
        .start(checkpoint=os.environ["TALLYSTICK_CHAOS_CHECKPOINT"])
        .awaitTermination()
    )
