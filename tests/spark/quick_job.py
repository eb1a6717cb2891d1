"""A context of a pipeline that was given none, in a process of its own, and what it has found.

    quick_job.py [--kill ahead|serving] [--stay]

`--kill` kills the early daemon before the JVM asks for it, or while it serves. With `--stay ahead`
or `--stay serving` the process waits there to be killed itself.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark import SparkContext

from tallystick.spark.context import OWN

AHEAD, SERVING = "ahead", "serving"


def look(_: Any) -> Iterator[tuple[int, int, bool]]:
    """Who runs this task, by whom it was forked, and whether it found everything loaded."""
    module = sys.modules.get("tallystick.codec.records.kernels")
    is_warm = module is not None and bool(module.scan_records.signatures)
    yield os.getpid(), os.getppid(), is_warm and "tallystick.spark.gang.member" in sys.modules


def main() -> None:
    """Start a context, run a task or two, and print what was seen."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill", choices=(AHEAD, SERVING))
    parser.add_argument("--stay", choices=(AHEAD, SERVING))
    arguments = parser.parse_args()
    taken = OWN.take("quick", is_light=True)
    daemon: Any = OWN._daemon
    facts: dict[str, Any] = {"daemon": daemon._process.pid, "address": daemon.address}
    if arguments.kill == AHEAD:
        daemon._process.kill()
    if arguments.stay == AHEAD:
        tell(facts)
        time.sleep(600)
    context = taken.result()
    facts["workers"] = run(context)
    if arguments.kill == SERVING:
        os.kill(facts["workers"][0][1], signal.SIGKILL)
        os.waitpid(facts["workers"][0][1], 0)
        facts["workers"] += run(context)
    gateway: Any = SparkContext._gateway
    maps = Path("/proc", str(gateway.proc.pid), "maps").read_text().splitlines()
    files = {line.split(maxsplit=5)[-1] for line in maps}
    facts["archives"] = sorted(file for file in files if "spark-classes-" in file)
    tell(facts)
    if arguments.stay == SERVING:
        time.sleep(600)
    OWN.give_back()
    tell({"is_over": daemon._process.poll() is not None})


def run(context: SparkContext) -> list[tuple[int, int, bool]]:
    """Run a task; its worker is killed with its daemon, perhaps, and so it may fail at first."""
    for _ in range(5):
        try:
            return context.parallelize([0], 1).mapPartitions(look).collect()
        except Exception as error:
            print(f"a task failed: {error}", file=sys.stderr)
    raise AssertionError("no task ran")


def tell(facts: dict[str, Any]) -> None:
    """Print it for the test to read."""
    print("FOUND", json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
