"""Without output for how long: a rescale of a running query that holds many keys.

    .venv/bin/python benchmarks/live_rescale.py [--keys N] [--rate N] [--to 3,4,2]

The job `count` takes in three records for each key, then a steady stream; meanwhile its parallelism
is changed. Prints how long `rescale()` took, and the longest pause between two commits around it.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread

import tallystick_count
import tallystick_stateless
from harness import results
from harness.broker import start_broker
from harness.dataset import Dataset
from harness.topics import Topics
from harness.workspace import Workspace, build_tools

from tallystick.checkpoint.local.store import ROOT_VARIABLE

HERE = Path(__file__).resolve().parent
INPUT, OUTPUT = "events", "counts"
RECORDS_PER_KEY = 3
AROUND_S = 8.0
"""So long before and after each rescale its commits are looked at."""
POLL_S = 0.002
FLOW_MAX_S = 3600


class Commits(Thread):
    """When the committed end of the output moved."""

    def __init__(self, topics: Topics) -> None:
        super().__init__(daemon=True)
        self.at_s: list[float] = []
        self._topics = topics
        self._is_over = Event()

    def run(self) -> None:
        """Look until told to stop."""
        before = -1
        while not self._is_over.wait(POLL_S):
            if (committed := self._topics.ends(OUTPUT).committed) != before:
                before = committed
                self.at_s.append(time.monotonic())

    def stop(self) -> None:
        """Look no more."""
        self._is_over.set()
        self.join()

    def pauses_s(self, begin_s: float, end_s: float) -> list[float]:
        """The times between commits of a span."""
        inside = [at_s for at_s in self.at_s if begin_s <= at_s <= end_s]
        return [later - earlier for earlier, later in pairwise(inside)]


def main() -> None:
    """Load, run, rescale while records flow, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rate", type=int, default=20_000, help="records per second")
    parser.add_argument("--to", default="3,4,2", help="parallelisms, one after the other")
    parser.add_argument("--peers", type=Path, default=HERE.parent.parent / "shared" / "peers")
    parser.add_argument("--work", type=Path, default=HERE / "work")
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    arguments = parser.parse_args()
    workspace = Workspace(arguments.work.resolve(), arguments.peers.resolve(), HERE)
    build_tools(workspace)
    directory = workspace.directory / "live-rescale"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    os.environ[ROOT_VARIABLE] = str(directory / "local")
    os.environ["PYTHONPATH"] = os.pathsep.join((str(HERE), os.environ.get("PYTHONPATH", "")))
    os.environ.update(tallystick_stateless.TWO_CORES)
    with start_broker(directory / "broker") as broker, Topics(broker.bootstrap) as topics:
        for topic in (INPUT, OUTPUT):
            topics.create(topic)
        Dataset(workspace, broker.bootstrap, arguments.keys).load(
            INPUT, arguments.keys * RECORDS_PER_KEY
        )
        rows = measure(workspace, broker.bootstrap, topics, directory, arguments)
    headings = ["to", "rescale() s", "longest pause s", "median pause before s"]
    print(results.markdown(headings, [[str(cell) for cell in row.values()] for row in rows]))
    config = {**results.environment(HERE), "keys": arguments.keys, "rate": arguments.rate}
    results.append_row(arguments.results, "live_rescale", {"rescales": rows}, config=config)


def measure(
    workspace: Workspace,
    bootstrap: str,
    topics: Topics,
    directory: Path,
    arguments: argparse.Namespace,
) -> list[dict[str, float]]:
    """What each rescale took, and the pauses in the output around it."""
    job = argparse.Namespace(
        bootstrap=bootstrap,
        input=INPUT,
        output=OUTPUT,
        mode="record",
        epoch_records=1_000_000,
        starting_offsets="earliest",
    )
    query = tallystick_count.pipeline(job).start(
        checkpoint=str(directory / "checkpoint"), trigger={"processingTime": "0 seconds"}
    )
    commits = Commits(topics)
    rows = []
    try:
        query.processAllAvailable()
        commits.start()
        with flowing(workspace, bootstrap, arguments):
            time.sleep(AROUND_S)
            for parallelism in map(int, arguments.to.split(",")):
                time.sleep(AROUND_S)
                began_s = time.monotonic()
                query.rescale(parallelism=parallelism)
                took_s = time.monotonic() - began_s
                time.sleep(AROUND_S)
                pauses = commits.pauses_s(began_s - 1, time.monotonic())
                before = commits.pauses_s(began_s - AROUND_S, began_s)
                rows.append(
                    {
                        "parallelism": parallelism,
                        "rescale_s": round(took_s, 2),
                        "longest_pause_s": round(max(pauses), 2),
                        "median_pause_before_s": round(statistics.median(before), 3),
                    }
                )
    finally:
        commits.stop()
        query.stop()
    return rows


@contextmanager
def flowing(workspace: Workspace, bootstrap: str, arguments: argparse.Namespace) -> Iterator[None]:
    """Records at a steady rate, meanwhile."""
    flags = ["-Xmx512m", "-XX:+UseSerialGC", f"-Dusers={arguments.keys}"]
    flags += ["-cp", workspace.tools_classpath(), "peers.Tools"]
    paced = ["pace", bootstrap, INPUT, str(arguments.rate), str(FLOW_MAX_S)]
    process = subprocess.Popen(["java", *flags, *paced], stdout=subprocess.DEVNULL)
    try:
        yield
        assert process.poll() is None, "the records have ended"
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
