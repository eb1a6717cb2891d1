"""The pipeline of the image: late flights from one topic to another, until it is stopped."""

import os

import pyarrow as pa
import pyarrow.compute as pc

import tallystick as ts
from tallystick.ops import metrics


def late_only(flights: pa.RecordBatch) -> pa.RecordBatch:
    """Keep flights that left at least 15 minutes late."""
    late = flights.filter(pc.greater_equal(flights["dep_delay"], 15.0))
    return late.select(["id", "dest", "dep_delay"])


def main() -> None:
    """Run until the pod ends; killing it at any moment is safe."""
    servers = os.environ["KAFKA_BOOTSTRAP_SERVERS"]
    source = ts.KafkaSource(
        servers,
        topics=["flights"],
        value=ts.Json("id bigint, dest string, dep_delay double"),
        starting_offsets="earliest",
    )
    sink = ts.KafkaSink(servers, topic="late", key="dest", value=ts.Json())
    pipeline = ts.Pipeline("late-flights").read(source).map_batches(late_only).write(sink)
    metrics.serve(9400, "0.0.0.0")
    pipeline.start(checkpoint=os.environ["CHECKPOINT"]).awaitTermination()


if __name__ == "__main__":
    main()
