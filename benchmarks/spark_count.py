"""Spark's own keyed state in Python at the job `count`: `transformWithState`, row by row.

Run by `run.py`; alone: `spark_count.py BOOTSTRAP INPUT OUTPUT --checkpoint DIR`. The same Spark as
ours, with Spark's Kafka connector. Prints `FIRST <ms>` just before the query is started.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator

from harness.spark_connector import connector_jars
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.streaming.stateful_processor import (
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)

EVENT = "user string, ts bigint, amount double"
TOTALS = "count bigint, sum double"
OUTPUT = f"user string, {TOTALS}, ts bigint"
PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


class Totals(StatefulProcessor):
    """Counts and adds up the rows of a user; a row for each batch that has some."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Name the state."""
        self._totals = handle.getValueState("totals", TOTALS)

    def handleInputRows(  # noqa: N802 - Spark's name
        self,
        key: tuple[str],
        rows: Iterator[Row],
        timerValues: TimerValues,  # noqa: N803
    ) -> Iterator[Row]:
        """Add one batch's rows."""
        count, total = self._totals.get() or (0, 0.0)
        newest_ms = 0
        for row in rows:
            count += 1
            total += row.amount
            newest_ms = row.ts
        self._totals.update((count, total))
        yield Row(user=key[0], count=count, sum=round(total, 2), ts=newest_ms)


def session() -> SparkSession:
    """A Spark of two cores and a heap of 3 GB, with RocksDB as Spark's peer has it."""
    config = {
        "spark.jars": ",".join(map(str, connector_jars())),
        "spark.driver.memory": "3g",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.streaming.metricsEnabled": "false",
        "spark.sql.streaming.stateStore.providerClass": PROVIDER,
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    }
    # Else its workers run in whatever python3 is on the PATH.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]").appName("bench-spark-state")
    for name, value in config.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def totals(spark: SparkSession, bootstrap: str, topic: str, epoch_records: int) -> DataFrame:
    """The job, from the input topic to Kafka's two columns."""
    records = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", epoch_records)
        .load()
    )
    events = records.select(F.from_json(F.col("value").cast("string"), EVENT).alias("event"))
    parsed = (
        events.select("event.*")
        .groupBy("user")
        .transformWithState(Totals(), outputStructType=OUTPUT, outputMode="Update", timeMode="None")
    )
    return parsed.select(
        F.col("user").alias("key"),
        F.to_json(F.struct("user", "count", "sum", "ts")).alias("value"),
    )


def main() -> None:
    """Read all that the input topic holds now, and end."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("bootstrap")
    parser.add_argument("input")
    parser.add_argument("output")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--epoch-records", type=int, default=1_000_000)
    arguments = parser.parse_args()

    spark = session()
    spark.sparkContext.setLogLevel("ERROR")
    rows = totals(spark, arguments.bootstrap, arguments.input, arguments.epoch_records)
    print("FIRST", time.time_ns() // 1_000_000, flush=True)
    query = (
        rows.writeStream.format("kafka")
        .option("kafka.bootstrap.servers", arguments.bootstrap)
        .option("topic", arguments.output)
        .option("kafka.linger.ms", 20)
        .option("kafka.batch.size", 131_072)
        .option("checkpointLocation", arguments.checkpoint)
        .outputMode("update")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    print("DONE", time.time_ns() // 1_000_000, flush=True)
    for progress in query.recentProgress:
        print(progress["batchId"], progress["numInputRows"], progress["durationMs"], flush=True)


if __name__ == "__main__":
    main()
