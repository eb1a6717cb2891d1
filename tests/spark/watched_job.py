"""A pipeline with metrics that does wrong what it is told to: `watched_job.py SPEC-AS-JSON`.

Files in a folder tell: for `die` a task dies, once, and while `hold` is there an epoch stays open
after all of its rows were flushed.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import tallystick as ts
from tallystick.epoch import protocol
from tallystick.ops import metrics

POLL_S = 0.05


def dying(folder: str) -> Any:
    """Return a function that ends its process if the file is there, which it takes away."""

    def pass_or_die(batch: Any) -> Any:
        with contextlib.suppress(FileNotFoundError):
            (Path(folder) / "die").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch

    return pass_or_die


def main() -> None:
    """Run until killed."""
    spec = json.loads(sys.argv[1])
    hold = Path(spec["folder"]) / "hold"

    def listener(event: protocol.Event) -> None:
        while isinstance(event, protocol.EpochRan) and hold.exists():
            time.sleep(POLL_S)

    metrics.serve(spec["port"])
    servers = spec["servers"]
    source = ts.KafkaSource(
        servers, topics=[spec["topic_in"]], starting_offsets="earliest", max_offsets_per_trigger=20
    )
    sink = ts.KafkaSink(
        servers, topic=spec["topic_out"], transaction_timeout_ms=spec["transaction_timeout_ms"]
    )
    (
        ts.Pipeline(spec["name"])
        .read(source)
        .map_batches(dying(spec["folder"]))
        .map_batches(lambda batch: batch.select(["key", "value"]))
        .write(sink)
        .start(
            checkpoint=spec["checkpoint"],
            trigger={"processingTime": "400 milliseconds"},
            listener=listener,
        )
        .awaitTermination()
    )


if __name__ == "__main__":
    main()
