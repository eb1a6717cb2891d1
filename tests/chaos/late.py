"""A user's program for `tallystick chaos`: late flights, counted by destination."""

import os

import pyarrow as pa
import pyarrow.compute as pc

import tallystick as ts

SERVERS = os.environ["TALLYSTICK_CHAOS_SERVERS"]


def late_only(flights: pa.RecordBatch) -> pa.RecordBatch:
    """Return the flights with a delay."""
    return flights.filter(pc.greater(flights["delay"], 15)).select(["id", "dest", "delay"])


if __name__ == "__main__":
    (
        ts.Pipeline("late")
        .read(
            ts.KafkaSource(
                SERVERS,
                topics=["flights"],
                value=ts.Json("id long, dest string, delay long"),
                starting_offsets="earliest",
            )
        )
        .map_batches(late_only, schema="id long, dest string, delay long")
        .key_by("dest")
        .process(
            ts.aggregate({"n": ts.count(), "delay": ts.sum("delay"), "last": ts.maximum("id")}),
            uid="counts",
            parallelism=int(os.environ["TALLYSTICK_CHAOS_PARALLELISM"]),
        )
        .write(ts.KafkaSink(SERVERS, topic="late", key="dest", value=ts.Json()))
        .start(checkpoint=os.environ["TALLYSTICK_CHAOS_CHECKPOINT"])
        .awaitTermination()
    )
