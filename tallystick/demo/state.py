"""The state at the end, read from its files by a process of its own: no Kafka, no pipeline."""

import json
import subprocess
import sys
from pathlib import Path

import tallystick as ts
from tallystick.demo.flights import STEP


def read_counts(checkpoint: Path, log: Path) -> dict[str, int] | None:
    """How many flights the state has for each destination; None: it could not be read.

    Args:
        checkpoint: of a pipeline that was killed.
        log: for what the process says.
    """
    command = [sys.executable, "-m", __name__, str(checkpoint)]
    with log.open("a") as file:
        read = subprocess.run(command, stdout=subprocess.PIPE, stderr=file, text=True)
    found = [line for line in read.stdout.splitlines() if line.startswith("{")]
    counts: dict[str, int] | None = json.loads(found[-1]) if read.returncode == 0 else None
    return counts


def main() -> None:
    """Print the counts as JSON."""
    spark = ts.spark_session("state", master="local[2]", config={"spark.ui.enabled": "false"})
    rows = ts.read_state(spark, sys.argv[1], STEP).select("dest", "nth").collect()
    print(json.dumps({row["dest"]: row["nth"] for row in rows}))


if __name__ == "__main__":
    main()
