"""A user's program for `tallystick chaos` that writes no topic.

With a DSN as argv[1] it writes a table of PostgreSQL, else Parquet files.
"""

import os
import sys

import tallystick as ts

if __name__ == "__main__":
    if sys.argv[1:]:
        sink = ts.PostgresSink(sys.argv[1], table="late")
    else:
        sink = ts.FileSink(os.environ["TALLYSTICK_CHAOS_FILES"], partition_by=["dest"])
    (
        ts.Pipeline("beside-topics")
        .read(
            ts.KafkaSource(
                os.environ["TALLYSTICK_CHAOS_SERVERS"],
                topics=["flights"],
                value=ts.Json("id long, dest string, delay long"),
                starting_offsets="earliest",
            )
        )
        .map_batches(lambda flights: flights.select(["id", "dest", "delay"]))
        .write(sink)
        .start(checkpoint=os.environ["TALLYSTICK_CHAOS_CHECKPOINT"])
        .awaitTermination()
    )
