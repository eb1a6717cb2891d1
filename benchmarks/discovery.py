"""How long until a record in a partition that was just added is read by a running query.

    python benchmarks/discovery.py [--rounds 10] [--interval-ms 1000] [--trigger-ms 200]

The promise is one discovery interval plus one trigger, from the moment that Kafka has the record.
"""

import argparse
import statistics
import tempfile
import time

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions

import tallystick as ts
from tallystick.testing import EmbeddedKafka

TOPIC = "growing"
WAIT_S = 60.0


def main() -> None:
    """Add a partition and a record again and again, and print when the record was read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--interval-ms", type=int, default=1000)
    parser.add_argument("--trigger-ms", type=int, default=200)
    options = parser.parse_args()
    with EmbeddedKafka() as kafka, tempfile.TemporaryDirectory() as folder:
        kafka.create_topic(TOPIC, 1)
        delays = measure(kafka, folder, options.rounds, options.interval_ms, options.trigger_ms)
    promised = options.interval_ms + options.trigger_ms
    print(f"| promised | p50 | longest of {options.rounds} |\n| --- | --- | --- |")
    print(f"| {promised} ms + the epoch | {statistics.median(delays):.0f} | {max(delays):.0f} |")


def measure(
    kafka: EmbeddedKafka, folder: str, rounds: int, interval_ms: int, trigger_ms: int
) -> list[float]:
    """The delays in ms, from the record's acknowledgement to the call that holds it."""
    spark = ts.spark_session("discovery", master="local[2]", config={"spark.ui.enabled": "false"})
    ts.register(spark)
    read: dict[str, float] = {}

    def note(rows, _):  # type: ignore[no-untyped-def]
        values = [row.value for row in rows.collect()]
        read.update(dict.fromkeys(values, time.monotonic()))

    query = (
        spark.readStream.format("tallystick")
        .option("kafka.bootstrap.servers", kafka.bootstrap_servers)
        .option("subscribe", TOPIC)
        .option("startingOffsets", "earliest")
        .option("value.format", "string")
        .option("partition.discovery.interval.ms", str(interval_ms))
        .load()
        .writeStream.option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(processingTime=f"{trigger_ms} milliseconds")
        .foreachBatch(note)
        .start()
    )
    admin = AdminClient(kafka.confluent_options())
    delays = []
    for round_number in range(rounds + 1):  # the first one warms up
        admin.create_partitions([NewPartitions(TOPIC, round_number + 2)])[TOPIC].result(WAIT_S)
        kafka.wait_until_in_sync([TOPIC])
        producer = Producer(kafka.confluent_options())  # an older one knows fewer partitions
        producer.produce(TOPIC, value=f"{round_number}", partition=round_number + 1)
        producer.flush(WAIT_S)
        written = time.monotonic()
        while f"{round_number}" not in read:
            time.sleep(0.005)
        delays.append((read[f"{round_number}"] - written) * 1000)
        time.sleep(0.137 * (round_number % 5))  # not in step with the intervals
    query.stop()
    spark.stop()
    return delays[1:]


if __name__ == "__main__":
    main()
