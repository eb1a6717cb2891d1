"""A pipeline with page, metrics and log that goes wrong on command: `-m tests.faults.job SPEC`.

The commands are files in its folder. While `hang` is there its function does not return; while
`hold` is there an epoch that was prepared is not committed; while `full` is there nothing can be
written durably. `member` has the process id of a task.
"""

import errno
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import tallystick as ts
from tallystick.epoch import protocol
from tallystick.ops import metrics

POLL_S = 0.05


def set_clock(ahead_s: float) -> None:
    """Let this process believe that it is later than it is."""
    wall_s, wall_ns = time.time, time.time_ns
    time.time = lambda: wall_s() + ahead_s
    time.time_ns = lambda: wall_ns() + int(ahead_s * 1e9)


def passing_on(folder: str) -> Any:
    """Return a function that passes rows on, unless it is told to hang."""

    def pass_on(batch: Any) -> Any:
        written = Path(folder) / f"member-{os.getpid()}"
        written.write_text(str(os.getpid()))
        written.replace(Path(folder) / "member")  # whoever reads it has all of it
        while (Path(folder) / "hang").exists():
            time.sleep(POLL_S)
        return batch.select(["key", "value"])

    return pass_on


def listener_of(folder: Path) -> Any:
    """Return a listener that holds up the driver, or its disk."""
    whole = os.fsync

    def no_space(_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def listen(event: protocol.Event) -> None:
        while isinstance(event, protocol.OutputCounted) and (folder / "hold").exists():
            time.sleep(POLL_S)
        os.fsync = no_space if (folder / "full").exists() else whole

    return listen


def main() -> None:
    """Run until killed."""
    spec = json.loads(sys.argv[1])
    set_clock(spec["ahead_s"])
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    metrics.serve(spec["metrics_port"])
    source = ts.KafkaSource(spec["servers"], topics=[spec["topic_in"]], starting_offsets="earliest")
    (
        ts.Pipeline(spec["name"])
        .read(source)
        .map_batches(passing_on(spec["folder"]))
        .write(ts.KafkaSink(spec["servers"], topic=spec["topic_out"]))
        .start(
            checkpoint=spec["checkpoint"],
            trigger={"processingTime": "200 milliseconds"},
            listener=listener_of(Path(spec["folder"])),
            ui_port=spec["ui_port"],
        )
        .awaitTermination()
    )


if __name__ == "__main__":
    main()
