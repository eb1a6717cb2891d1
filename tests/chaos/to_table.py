"""A user's program for `tallystick chaos` that writes a table of PostgreSQL: argv is its DSN."""

import os
import sys

import tallystick as ts

if __name__ == "__main__":
    (
        ts.Pipeline("to-table")
        .read(
            ts.KafkaSource(
                os.environ["TALLYSTICK_CHAOS_SERVERS"],
                topics=["flights"],
                value=ts.Json("id long, dest string, delay long"),
                starting_offsets="earliest",
            )
        )
        .map_batches(lambda flights: flights.select(["id", "dest", "delay"]))
        .write(ts.PostgresSink(sys.argv[1], table="late"))
        .start(checkpoint=os.environ["TALLYSTICK_CHAOS_CHECKPOINT"])
        .awaitTermination()
    )
