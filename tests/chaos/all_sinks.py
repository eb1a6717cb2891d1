"""A user's program for `tallystick chaos` with all sinks: a topic, and tables of three kinds.

argv[1] is the DSN of the database with the table `late`.
"""

import os
import sys

import pyarrow as pa

import tallystick as ts

COLUMNS = pa.schema([("id", pa.int64()), ("dest", pa.string()), ("delay", pa.int64())])

if __name__ == "__main__":
    servers, files = os.environ["TALLYSTICK_CHAOS_SERVERS"], os.environ["TALLYSTICK_CHAOS_FILES"]
    os.makedirs(files, exist_ok=True)
    catalog = {
        "type": "sql",
        "uri": f"sqlite:///{files}/catalog.db",
        "warehouse": f"file://{files}/warehouse",
    }
    settings = {"create": True, "schema": COLUMNS, "commit_every": "2 seconds"}
    (
        ts.Pipeline("all-sinks")
        .read(
            ts.KafkaSource(
                servers,
                topics=["flights"],
                value=ts.Json("id long, dest string, delay long"),
                starting_offsets="earliest",
            )
        )
        .map_batches(lambda flights: flights.select(["id", "dest", "delay"]))
        .write(
            ts.KafkaSink(servers, topic="late", key="dest", value=ts.Json()),
            ts.DeltaSink(f"{files}/delta", partition_by=["dest"], **settings),
            ts.IcebergSink(catalog, "air.late", **settings),
            ts.PostgresSink(sys.argv[1], table="late"),
        )
        .start(checkpoint=os.environ["TALLYSTICK_CHAOS_CHECKPOINT"])
        .awaitTermination()
    )
