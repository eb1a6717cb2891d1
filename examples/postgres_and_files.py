"""Each flight into PostgreSQL and into Parquet files: whatever crashes, they agree."""

from tempfile import TemporaryDirectory

import playground
import pyarrow as pa
import pyarrow.dataset as ds

import tallystick as ts
from tallystick.testing import EmbeddedKafka
from tallystick_tools.demo.flights import load

COLUMNS = ["id", "carrier", "dest", "dep_delay"]
SCHEMA = "id bigint, carrier string, dest string, dep_delay double"


def only_flights(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Leave out the columns of the Kafka record: key, topic, partition, offset, timestamp."""
    return rows.select(COLUMNS)


server = playground.postgres()
try:
    with EmbeddedKafka() as kafka, TemporaryDirectory() as folder:
        kafka.create_topic("flights", 3)
        flights = load(5_000)
        playground.write(kafka.bootstrap_servers, "flights", flights, key="carrier")
        server.query(
            "CREATE TABLE flights (id bigint PRIMARY KEY, carrier text, dest text, "
            "dep_delay double precision)"
        )

        source = ts.KafkaSource(
            kafka.bootstrap_servers,
            topics=["flights"],
            value=ts.Json(SCHEMA),
            starting_offsets="earliest",
        )
        query = (
            ts.Pipeline("flights-kept")
            .read(source)
            .map_batches(only_flights)
            .write(
                ts.PostgresSink(server.dsn, table="flights"),  # COPY, then COMMIT PREPARED
                ts.FileSink(f"{folder}/flights", partition_by=["carrier"]),
            )
            .start(checkpoint=f"{folder}/checkpoint", trigger={"availableNow": True})
        )
        query.awaitTermination()

        files = ds.dataset(f"{folder}/flights", format="parquet", partitioning="hive")
        in_files = files.to_table(COLUMNS).to_pylist()
        rows = server.query("SELECT id, carrier, dest, dep_delay FROM flights ORDER BY id")
        in_table = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
        expected = flights[COLUMNS].astype(object)
        expected = expected.where(expected.notna(), None).to_dict("records")
        playground.check("the table", in_table, expected)
        in_files.sort(key=lambda row: row["id"])
        playground.check(f"{len(in_table)} flights in table and files", in_files, expected)
finally:
    server.stop()
