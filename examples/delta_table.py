"""Each flight into a topic and into a Delta table: whatever crashes, they agree."""

from tempfile import TemporaryDirectory

import playground
import pyarrow as pa
from deltalake import DeltaTable

import tallystick as ts
from tallystick.testing import EmbeddedKafka
from tallystick_tools.demo.flights import load

SCHEMA = "id bigint, carrier string, dest string"
COLUMNS = pa.schema([("id", pa.int64()), ("carrier", pa.string()), ("dest", pa.string())])


def only_flights(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Leave out the columns of the Kafka record: key, topic, partition, offset, timestamp."""
    return rows.select(COLUMNS.names)


with EmbeddedKafka() as kafka, TemporaryDirectory() as folder:
    servers = kafka.bootstrap_servers
    kafka.create_topic("flights", 3)
    kafka.create_topic("flown", 3)
    flights = load(5_000)
    playground.write(servers, "flights", flights, key="carrier")

    source = ts.KafkaSource(
        servers, topics=["flights"], value=ts.Json(SCHEMA), starting_offsets="earliest"
    )
    table = ts.DeltaSink(
        f"{folder}/flights",
        create=True,  # only where there is none
        schema=COLUMNS,
        partition_by=["carrier"],
        commit_every="1 minute",  # and when the query stops
    )
    query = (
        ts.Pipeline("flights-tabled")
        .read(source)
        .map_batches(only_flights)
        .write(ts.KafkaSink(servers, topic="flown", key="carrier", value=ts.Json()), table)
        .start(checkpoint=f"{folder}/checkpoint", trigger={"availableNow": True})
    )
    query.awaitTermination()

    delta = DeltaTable(f"{folder}/flights")
    rows = sorted(
        delta.to_pyarrow_table(columns=COLUMNS.names).to_pylist(), key=lambda row: row["id"]
    )
    expected = flights[COLUMNS.names].to_dict("records")
    playground.check(
        f"{len(rows)} flights in one commit, version {delta.version()}", rows, expected
    )
