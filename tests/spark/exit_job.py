"""A script that ends right after `query.stop()`: `python exit_job.py '{…}'`, its spec as JSON.

`die_before_showing`: it is killed before this position is sent; null: it is not.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any

import loaded_daemon

import tallystick as ts
from tallystick.pipeline.group_offsets import GroupOffsets
from tallystick.source.offsets import SourceOffsets


def die_before(position: int) -> Callable[..., bool]:
    """Instead of sending positions: what the last run has shown is left as it is."""

    def show(self: Any, sources: Iterable[SourceOffsets], *, forward_only: bool = False) -> bool:
        if any(position in source.positions.values() for source in sources):
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    return show


def main() -> None:
    """Run a query to the noop sink over all that is there."""
    spec = json.loads(sys.argv[1])
    config = {"spark.ui.enabled": "false", **loaded_daemon.SETTINGS}  # the JVM is there
    spark = ts.spark_session("exit", master="local[2]", config=config)
    ts.register(spark)
    if (position := spec["die_before_showing"]) is not None:
        GroupOffsets.show = die_before(position)  # type: ignore[method-assign]
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
