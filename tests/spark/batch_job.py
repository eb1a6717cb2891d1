"""A process that writes a DataFrame and never commits: `python batch_job.py '{"servers": …}'`.

When it is interrupted it says so, waits for a line on its standard input, and writes again.
"""

import json
import sys
import time

import loaded_daemon

import tallystick as ts
from tallystick.kafka.broker import KafkaBroker


def main() -> None:
    """Write, and wait before the commit until a signal comes."""
    spec = json.loads(sys.argv[1])
    KafkaBroker.last_sequences = lambda *_: time.sleep(600)  # type: ignore[assignment,return-value]
    config = {"spark.ui.enabled": "false", **loaded_daemon.SETTINGS}  # the JVM is there
    spark = ts.spark_session("batch", master="local[2]", config=config)
    rows = spark.range(0, 10, 1, 1).selectExpr("string(id) AS value")
    while True:
        try:
            ts.KafkaSink(spec["servers"], topic=spec["topic"]).write(rows)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            sys.stdin.readline()


if __name__ == "__main__":
    main()
