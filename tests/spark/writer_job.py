"""`crash_job.py` with `writeStream` in place of a pipeline; see `mortal_writer`."""

import os
from pathlib import Path
from typing import Any

import crash_job
import mortal_writer
from pyspark import cloudpickle
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

import tallystick as ts


def start(spark: SparkSession, spec: dict[str, Any], fate: Any) -> StreamingQuery:
    """Keys and values as they are."""
    jvm: Any = spark.sparkContext._jvm
    victims = (int(jvm.java.lang.ProcessHandle.current().pid()), os.getpid())
    folder = Path(spec.get("facts", spec["checkpoint"] + f"-facts-{os.getpid()}"))
    folder.mkdir(parents=True, exist_ok=True)  # this start may be another try
    death = mortal_writer.Death(
        str(folder),
        spec["dies_at"],
        spec.get("occurrence", 1),
        victims if spec.get("kills") else (),
        spec.get("waits_for", ""),
    )
    reading = {
        **spec["kafka"],
        "subscribe": spec["topic_in"],
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": str(spec.get("epoch_records", 100)),
    }
    ts.register(spark)
    spark.dataSource.register(mortal_writer.MortalFormat)
    rows = spark.readStream.format("tallystick").options(**reading).load()
    return (
        rows.select("key", "value")
        .writeStream.format("mortal")
        .queryName(spec["name"])
        .options(**spec["kafka"], topic=spec["topic_out"], **death.to_option())
        .option("checkpointLocation", spec["checkpoint"])
        .trigger(availableNow=True)
        .start()
    )


if __name__ == "__main__":
    cloudpickle.register_pickle_by_value(mortal_writer)
    crash_job.start = start
    crash_job.main()
