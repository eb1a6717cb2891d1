"""All rows to two topics and to files: one decision per epoch, after which all three show them."""

from tempfile import TemporaryDirectory

import playground
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

import tallystick as ts
from tallystick.testing import EmbeddedKafka
from tallystick_tools.demo.flights import load


def flown(flights: pa.RecordBatch) -> pa.RecordBatch:
    """Drop cancelled flights, which have no delay."""
    flew = flights.filter(pc.is_valid(flights["dep_delay"]))
    return flew.select(["id", "carrier", "dest", "dep_delay"])


with EmbeddedKafka() as kafka, TemporaryDirectory() as folder:
    servers = kafka.bootstrap_servers
    for topic in ("flights", "by-carrier", "by-destination"):
        kafka.create_topic(topic, 3)
    flights = load(5_000)
    playground.write(servers, "flights", flights, key="carrier")

    source = ts.KafkaSource(
        servers,
        topics=["flights"],
        value=ts.Json("id bigint, carrier string, dest string, dep_delay double"),
        starting_offsets="earliest",
    )
    deciding = ts.KafkaSink(servers, topic="by-carrier", key="carrier", value=ts.Json())
    following = ts.KafkaSink(
        servers,
        topic="by-destination",
        key="dest",
        value=ts.Json(),
        transactions="task",  # only one sink can decide an epoch
        uid="by-destination",
    )
    query = (
        ts.Pipeline("flown")
        .read(source)
        .map_batches(flown)
        .write(deciding, following, ts.FileSink(f"{folder}/flown"))
        .start(checkpoint=f"{folder}/checkpoint", trigger={"availableNow": True})
    )
    query.awaitTermination()

    expected = flights[flights["dep_delay"].notna()]["id"].tolist()
    for topic in ("by-carrier", "by-destination"):
        numbers = sorted(row["id"] for row in playground.read(servers, topic))
        playground.check(f"topic {topic}", numbers, expected)
    in_files = ds.dataset(f"{folder}/flown", format="parquet").to_table(["id"])["id"].to_pylist()
    playground.check(f"{len(in_files)} flights in each of 3 sinks", sorted(in_files), expected)
