"""A user's program for `tallystick chaos` that writes Parquet files and no topic."""

import os

import tallystick as ts

if __name__ == "__main__":
    (
        ts.Pipeline("to-files")
        .read(
            ts.KafkaSource(
                os.environ["TALLYSTICK_CHAOS_SERVERS"],
                topics=["flights"],
                value=ts.Json("id long, dest string, delay long"),
                starting_offsets="earliest",
            )
        )
        .write(ts.FileSink(os.environ["TALLYSTICK_CHAOS_FILES"], partition_by=["dest"]))
        .start(checkpoint=os.environ["TALLYSTICK_CHAOS_CHECKPOINT"])
        .awaitTermination()
    )
