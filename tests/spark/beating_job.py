"""A Spark whose shuffle files are lost once, and which then runs jobs while its heartbeats fail.

beating_job.py ours|plain FOLDER LOG

LOG is where its standard error goes. It prints how many files were lost, and `ran` if jobs still
pass after more failures than Spark allows.
"""

import contextlib
import sys
import time
from pathlib import Path

import jvm
from pyspark.sql import SparkSession

import tallystick as ts

BEAT_S = 0.1
BEATS = 70
"""Spark allows 60 to fail."""
NOT_REGISTERED = "Cannot find endpoint: spark://CoarseGrainedScheduler"
WAIT_S = 120


def main() -> None:
    """Lose the files between two jobs that read them."""
    kind, folder, log = sys.argv[1:]
    config = {
        "spark.ui.enabled": "false",
        "spark.local.dir": folder,
        "spark.driver.extraJavaOptions": jvm.options(),
        "spark.executor.heartbeatInterval": f"{BEAT_S * 1000:.0f}ms",
    }
    if kind == "ours":
        session = ts.spark_session("beating", master="local[2]", config=config)
    else:
        builder = SparkSession.builder.master("local[2]")
        for name, value in config.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
    context = session.sparkContext
    counts = context.parallelize([(i % 3, i) for i in range(100)], 2).groupByKey(2).mapValues(len)
    counts.collect()
    lost = list(Path(folder).rglob("shuffle_*.data"))
    for path in lost:
        path.unlink()
    print(f"lost {len(lost)}", flush=True)
    until_s = time.monotonic() + WAIT_S
    with contextlib.suppress(Exception):  # it misses them, and its executor is no longer known
        counts.collect()
    # With Spark's own settings until its JVM has ended, which takes it a while.
    while kind == "plain" or Path(log).read_text().count(NOT_REGISTERED) < BEATS:
        assert time.monotonic() < until_s, "too few heartbeats, or Spark's own JVM lives on"
        if context._gateway.proc.poll() is not None:
            raise SystemExit("the JVM has ended")
        time.sleep(BEAT_S)
    assert context.parallelize([1, 2], 2).sum() == 3
    print("ran", flush=True)


if __name__ == "__main__":
    main()
