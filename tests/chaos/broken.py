"""A user's program with a mistake, or none, for `tallystick chaos`: argv[1] says which.

The names of its topics begin with argv[2], if it is given.
"""

import os
import sys
import time

import confluent_kafka
import pyarrow as pa

import tallystick as ts

SERVERS = os.environ["TALLYSTICK_CHAOS_SERVERS"]
SCHEMA = "id long, dest string, delay long"


class CountsOfTheProcess:
    """Numbers the flights to each destination from counters that a restart sets back."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def __call__(self, flights: pa.RecordBatch) -> pa.RecordBatch:
        numbers = []
        for dest in flights["dest"].to_pylist():
            self.counts[dest] = self.counts.get(dest, 0) + 1
            numbers.append(self.counts[dest])
        columns = [flights["id"], flights["dest"], pa.array(numbers, pa.int64())]
        return pa.record_batch(columns, ["id", "dest", "delay"])


def by_the_clock(flights: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows with the time of day instead of the delay."""
    now = pa.array([time.time_ns()] * flights.num_rows, pa.int64())
    return pa.record_batch([flights["id"], flights["dest"], now], ["id", "dest", "delay"])


def beside_the_epoch(flights: pa.RecordBatch) -> pa.RecordBatch:
    """Write rows with a producer of the function's own."""
    producer = confluent_kafka.Producer({"bootstrap.servers": SERVERS})  # the class is not pickled
    for flight in flights.to_pylist():
        producer.produce("late", str(flight["id"]).encode(), flight["dest"].encode())
    producer.flush()
    time.sleep(0.5)  # so that a kill meets an epoch that is not decided, and rows that are written
    return flights.slice(0, 0)


class RowsOfToday:
    """Lets rows pass only within the hour of the start, by the wall clock."""

    def __init__(self) -> None:
        self.began = time.time()

    def __call__(self, flights: pa.RecordBatch) -> pa.RecordBatch:
        return flights if abs(time.time() - self.began) < 3000 else flights.slice(0, 0)


def nothing(flights: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows as they are: no mistake."""
    return flights


MISTAKES = {
    "nothing": nothing,
    "counter": CountsOfTheProcess(),
    "clock": by_the_clock,
    "today": RowsOfToday(),
    "producer": beside_the_epoch,
}

if __name__ == "__main__":
    prefix = "".join(sys.argv[2:])
    (
        ts.Pipeline("broken")
        .read(
            ts.KafkaSource(
                SERVERS,
                topics=[f"{prefix}flights"],
                value=ts.Json(SCHEMA),
                starting_offsets="earliest",
            )
        )
        .map_batches(MISTAKES[sys.argv[1]])
        .write(ts.KafkaSink(SERVERS, topic=f"{prefix}late", key="dest", value=ts.Json()))
        .start(checkpoint=os.environ["TALLYSTICK_CHAOS_CHECKPOINT"])
        .awaitTermination()
    )
