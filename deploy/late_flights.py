"""The pipeline of the image: late flights from one topic to another, until it is stopped."""

import logging
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

import tallystick as ts
from tallystick.ops import metrics


def late_only(flights: pa.RecordBatch) -> pa.RecordBatch:
    """Keep flights that left at least 15 minutes late."""
    late = flights.filter(pc.greater_equal(flights["dep_delay"], 15.0))
    return late.select(["id", "dest", "dep_delay"])


def login() -> dict[str, str]:
    """Return the login in Kafka: name=value lines of a file, as `--kafka-options` takes them."""
    file = os.environ.get("KAFKA_LOGIN")
    lines = Path(file).read_text().splitlines() if file else []
    pairs = (line.partition("=") for line in lines if "=" in line and not line.startswith("#"))
    return {f"kafka.{name.strip()}": value.strip() for name, _, value in pairs}


def main() -> None:
    """Run until SIGTERM drains the pipeline; a kill loses no record either."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    servers, options = os.environ["KAFKA_BOOTSTRAP_SERVERS"], login()
    source = ts.KafkaSource(
        servers,
        topics=["flights"],
        value=ts.Json("id bigint, dest string, dep_delay double"),
        starting_offsets="earliest",
        options=options,
    )
    sink = ts.KafkaSink(servers, topic="late", key="dest", value=ts.Json(), options=options)
    pipeline = ts.Pipeline("late-flights").read(source).map_batches(late_only).write(sink)
    metrics.serve(9400, "0.0.0.0")
    ui_port = int(os.environ["UI_PORT"]) if "UI_PORT" in os.environ else None
    pipeline.start(checkpoint=os.environ["CHECKPOINT"], ui_port=ui_port).awaitTermination()


if __name__ == "__main__":
    main()
