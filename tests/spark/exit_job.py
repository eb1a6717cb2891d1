"""A script that ends right after `query.stop()`: `python exit_job.py '{…}'`, its spec as JSON.

`die_before_showing`: it is killed before the positions of its first epoch are sent.
"""

import json
import os
import signal
import sys
from typing import Any

import tallystick as ts
from tallystick.spark.group_offsets import GroupOffsets


def die(self: Any, sources: Any, *, forward_only: bool = False) -> bool:
    """Instead of sending the positions of a new epoch."""
    if forward_only:
        return True  # the last run's
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("dead")


def main() -> None:
    """Run a query to the noop sink over all that is there."""
    spec = json.loads(sys.argv[1])
    spark = ts.spark_session("exit", master="local[2]", config={"spark.ui.enabled": "false"})
    ts.register(spark)
    if spec["die_before_showing"]:
        GroupOffsets.show = die  # type: ignore[method-assign, assignment]
    query = (
        spark.readStream.format("tallystick")
        .options(**spec["options"])
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", spec["checkpoint"])
        .start()
    )
    query.processAllAvailable()
    query.stop()


if __name__ == "__main__":
    main()
