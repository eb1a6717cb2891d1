"""Keep the late flights: Kafka to Kafka, without state."""

from tempfile import TemporaryDirectory

import playground
import pyarrow as pa
import pyarrow.compute as pc

import tallystick as ts
from tallystick.testing import EmbeddedKafka
from tallystick_tools.demo.flights import load


def late_only(flights: pa.RecordBatch) -> pa.RecordBatch:
    """Arrow in, Arrow out: called in the reader, for thousands of records at a time."""
    late = flights.filter(pc.greater_equal(flights["dep_delay"], 15.0))
    return late.select(["id", "dest", "dep_delay"])


with EmbeddedKafka() as kafka, TemporaryDirectory() as folder:
    servers = kafka.bootstrap_servers
    for topic in ("flights", "late"):
        kafka.create_topic(topic, 3)
    flights = load(5_000)
    playground.write(servers, "flights", flights, key="carrier")

    source = ts.KafkaSource(
        servers,
        topics=["flights"],
        value=ts.Json("id bigint, dest string, dep_delay double"),
        starting_offsets="earliest",
    )
    sink = ts.KafkaSink(servers, topic="late", key="dest", value=ts.Json())
    query = (
        ts.Pipeline("late-flights")
        .read(source)
        .map_batches(late_only)
        .write(sink)
        .start(checkpoint=f"{folder}/checkpoint", trigger={"availableNow": True})
    )
    query.awaitTermination()

    numbers = sorted(row["id"] for row in playground.read(servers, "late"))
    expected = flights[flights["dep_delay"] >= 15]["id"].tolist()
    playground.check(f"{len(numbers)} of {len(flights)} flights were late", numbers, expected)
