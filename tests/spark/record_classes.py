"""A JVM that does what tests do and writes its classes down: `record_classes.py FILE FOLDER`."""

import sys
from pathlib import Path
from typing import Any

import crash_job
import jvm
from confluent_kafka import Producer
from pyspark.sql import SparkSession

from tallystick.spark.context import JAVA_OPTIONS
from tallystick.spark.warm_up import end_jvm
from tallystick.testing import EmbeddedKafka


def main() -> None:
    """Run a query of Spark's and a pipeline of ours, then end the JVM, which writes the file."""
    file, folder = sys.argv[1:]
    recording = f"{jvm.LIGHT} -XX:ArchiveClassesAtExit={file} {jvm.SILENT}"
    spark = crash_job.session(crash_job.LOCAL, {JAVA_OPTIONS: recording})
    commands: Any = None  # nothing is to stop
    with EmbeddedKafka() as kafka:
        for name in ("query", "pipeline"):
            spec = _spec(kafka, name, folder)
            crash_job.run(spark, {**spec, "foreach_batch": name == "query"}, commands)
    _use_sql(spark, Path(folder))
    spark.stop()
    end_jvm()


def _spec(kafka: EmbeddedKafka, name: str, folder: str) -> dict[str, Any]:
    topics = f"{name}-in", f"{name}-out"
    for topic in topics:
        kafka.create_topic(topic, 2)
    producer = Producer(kafka.confluent_options())
    for number in range(60):
        producer.produce(topics[0], key=str(number), value=str(number))
    assert producer.flush(60) == 0
    options = dict(kafka.kafka_options)
    checkpoint = str(Path(folder, name))
    both = {"topic_in": topics[0], "topic_out": topics[1], "checkpoint": checkpoint}
    return {"name": name, "kafka": options, "epoch_records": 20, "execution": "jobs", **both}


def _use_sql(spark: SparkSession, folder: Path) -> None:
    rows = spark.createDataFrame([("a", 1), ("b", 2)], "k string, n int")
    rows.write.parquet(str(folder / "rows"))
    read = spark.read.parquet(str(folder / "rows"))
    read.groupBy("k").sum("n").orderBy("k").collect()
    read.mapInArrow(lambda batches: batches, "k string, n int").toPandas()


if __name__ == "__main__":
    main()
