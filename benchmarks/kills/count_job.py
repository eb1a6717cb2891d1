"""Tallystick's side: a running count and sum per user, from Kafka to Kafka.

python -m benchmarks.kills.count_job NAME SERVERS INPUT OUTPUT CHECKPOINT EPOCH_MS TIMEOUT_MS
"""

import os
import sys

import tallystick as ts

EVENT = "user string, amount bigint, ts bigint"
TOTALS = "user string, count bigint, sum bigint, ts bigint"


def main() -> None:
    """Run until something ends it."""
    name, servers, events, updates, checkpoint, epoch_ms, timeout_ms = sys.argv[1:]
    os.environ["PYSPARK_SUBMIT_ARGS"] = "--master local[2] pyspark-shell"
    totals = ts.aggregate(
        {"count": ts.count(), "sum": ts.sum("amount")}, each="record", keep=["ts"]
    )
    query = (
        ts.Pipeline(name)
        .read(
            ts.KafkaSource(
                servers, topics=[events], value=ts.Json(EVENT), starting_offsets="earliest"
            )
        )
        .key_by("user")
        .process(totals, uid="totals", output=TOTALS, parallelism=2)
        .write(
            ts.KafkaSink(
                servers,
                topic=updates,
                key="user",
                value=ts.Json(),
                transaction_timeout_ms=int(timeout_ms),
            )
        )
        .start(checkpoint=checkpoint, trigger={"processingTime": f"{epoch_ms} milliseconds"})
    )
    query.awaitTermination()


if __name__ == "__main__":
    main()
