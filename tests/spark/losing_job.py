"""A pipeline that loses shuffle files once: `python losing_job.py '{"name": …, …}'`.

In a process of its own: Spark's local mode never gets over a fetch that failed. It prints the
events of the epoch protocol as JSON, by name, with their errors.
"""

import glob
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jvm
import loaded_daemon
import pyarrow as pa
from pyspark import TaskContext

import tallystick as ts
from tallystick.host.java import spark_java_home

WAIT_S = 150


def losing(folder: str, marker: str) -> Any:
    """A function whose second task waits for the first one's output, and deletes it."""

    def lose_the_other_tasks_output(rows: pa.RecordBatch) -> pa.RecordBatch:
        if TaskContext.get().partitionId() == 1 and not os.path.exists(marker):
            while not (paths := glob.glob(f"{folder}/blockmgr-*/*/shuffle_*_*_0.data")):
                time.sleep(0.02)
            for name in paths:
                os.unlink(name)
            Path(marker).touch()
        return rows.select(["key", "value"])

    return lose_the_other_tasks_output


def main(spec: dict[str, Any]) -> None:
    """Run over all that is there."""
    options = dict(spec["kafka"])
    servers = options.pop("kafka.bootstrap.servers")
    source = ts.KafkaSource(
        servers,
        topics=[spec["topic_in"]],
        starting_offsets="earliest",
        max_offsets_per_trigger="all",
        options=options,
    )
    config = {
        "spark.ui.enabled": "false",
        "spark.local.dir": spec["folder"],
        "spark.driver.extraJavaOptions": jvm.options(),
        **loaded_daemon.SETTINGS,
    }
    spark = ts.spark_session("losing-job", master="local[2]", config=config)
    events: list[tuple[str, str]] = []
    query = (
        ts.Pipeline(spec["name"])
        .read(source)
        .map_batches(losing(spec["folder"], spec["marker"]))
        .write(ts.KafkaSink(servers, topic=spec["topic_out"], options=options))
        .start(
            spark,
            checkpoint=spec["checkpoint"],
            trigger={"availableNow": True},
            listener=lambda event: events.append(
                (type(event).__name__, str(getattr(event, "error", "")))
            ),
            execution="jobs",
        )
    )
    assert query.awaitTermination(WAIT_S)
    print("FOUND " + json.dumps(events), flush=True)


if __name__ == "__main__":
    os.environ["JAVA_HOME"] = str(spark_java_home())
    os.environ["PYSPARK_PYTHON"] = sys.executable
    main(json.loads(sys.argv[1]))
